//! Chains of elementwise ops as one kernel: each operand is read once, and results inside the chain stay in registers.
//! After a batch norm, or the gradient of a layer norm, they are part of its last pass.

use super::draft::KernelBuilder;
use super::element::{compute_type, load, storage_type, store};
use super::elementwise::{expression, loads, sources};
use super::launch_plan::{At, LaunchPlan};
use super::movement::dropout_expression;
use super::offsets::Walk;
use super::{batch_norm, layer_norm};
use crate::device::chain::{Link, Operand};
use crate::device::layout::TensorLayout;
use compiler::op::Op;
use compiler::tensor::DType;

/// `None` if an op after the first is not elementwise, or a tensor is empty.
pub fn kernel(links: &[Link], inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let result = &links.last()?.result;
    if result.is_empty() || inputs.iter().any(TensorLayout::is_empty) {
        return None;
    }
    match &links[0].op {
        Op::BatchNorm(op) => return batch_norm::chain(op, links, inputs),
        Op::LayerNormGrad(_) => return layer_norm::grad_chain(links, inputs),
        _ => {}
    }
    let builder = KernelBuilder::new(inputs.iter().map(TensorLayout::len).chain([result.len()]).max()?);
    let mut body = loads(&inputs.iter().map(|x| x.dtype).collect::<Vec<_>>());
    body.push_str(&chain_code(links, inputs, 0)?);
    let written = links.iter().filter(|link| link.is_written).enumerate();
    let output = |(at, link): (usize, &Link)| (link.result.dtype, At::output(at), Walk::plain(&result.shape));
    let outputs: Vec<_> = written.map(output).collect();
    Some(LaunchPlan::of(builder.each_element(&result.shape, &sources(inputs, &result.shape), &outputs, &body)))
}

/// Code that computes the results `r0`… of the links from `first` on, of operands `v0`…, and assigns the written ones of
/// all links to `y0`…. `None` if one of them is not elementwise.
pub fn chain_code(links: &[Link], inputs: &[TensorLayout], first: usize) -> Option<String> {
    let (mut body, mut written) = (String::new(), 0);
    for (at, link) in links.iter().enumerate() {
        let dtype_of = |operand: &Operand| match *operand {
            Operand::Input(k) => inputs[k].dtype,
            Operand::Result(k) => links[k].result.dtype,
        };
        let name_of = |operand: &Operand| match *operand {
            Operand::Input(k) => format!("v{k}"),
            Operand::Result(k) => format!("r{k}"),
        };
        let dtypes: Vec<DType> = link.operands.iter().map(dtype_of).collect();
        let operands: Vec<String> = link.operands.iter().map(name_of).collect();
        let dtype = link.result.dtype;
        if at >= first {
            let value = match (&link.op, &operands[..]) {
                (Op::Dropout(op), [x, counter]) => dropout_expression(op, dtypes[0], [x, counter, "(u64)n"]),
                _ => expression(&link.op, &dtypes, &operands)?,
            };
            // Rounds as a stored tensor would, so that a chain gives the bits of its ops one by one.
            body.push_str(&format!("{} s{at} = {};\n", storage_type(dtype), store(dtype, &value)));
        }
        body.push_str(&format!("{} r{at} = {};\n", compute_type(dtype), load(dtype, &format!("s{at}"))));
        if link.is_written {
            body.push_str(&format!("y{written} = s{at};\n"));
            written += 1;
        }
    }
    Some(body)
}
