//! Reference results of ops.

use compiler::op::table::rule;
use compiler::op::{KernelError, Op};
use compiler::tensor::fact::Fact;
use compiler::tensor::view::ViewMut;
use compiler::tensor::{DType, Tensor};

pub fn facts_of(tensors: &[Tensor]) -> Vec<Fact> {
    tensors.iter().map(|t| Fact::of(t.dtype(), t.shape())).collect()
}

/// Tensors of these facts from their bytes.
pub fn tensors(facts: &[Fact], buffers: &[&[u8]]) -> Vec<Tensor> {
    let tensor = |(fact, bytes): (&Fact, &&[u8])| {
        Tensor::new(fact.dtype, fact.concrete().unwrap(), bytes.to_vec().into()).unwrap()
    };
    facts.iter().zip(buffers).map(tensor).collect()
}

pub fn reference(op: &Op, inputs: &[Tensor], outputs: &[Fact]) -> Result<Vec<Tensor>, KernelError> {
    let shapes: Vec<Vec<usize>> = outputs.iter().map(|f| f.concrete().unwrap()).collect();
    let mut bytes: Vec<Vec<u8>> = outputs.iter().map(|f| vec![0xff; f.bytes().unwrap() as usize]).collect();
    let mut views: Vec<ViewMut<'_>> = outputs
        .iter()
        .zip(&shapes)
        .zip(&mut bytes)
        .map(|((f, shape), bytes)| ViewMut::new(f.dtype, shape, bytes))
        .collect();
    rule(op).reference(&inputs.iter().map(Tensor::view).collect::<Vec<_>>(), &mut views)?;
    Ok(tensors(outputs, &bytes.iter().map(Vec::as_slice).collect::<Vec<_>>()))
}

/// The same tensors with `f32` replaced by another element type.
pub fn in_type(inputs: &[Tensor], dtype: DType) -> Vec<Tensor> {
    inputs.iter().map(|t| if t.dtype() == DType::F32 { t.cast(dtype) } else { t.clone() }).collect()
}
