//! Converts every float of a graph to another precision.

use crate::graph::{AddError, Graph, Node, order};
use crate::op::table::rule;
use crate::op::{FactError, Op};
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use thiserror::Error;

#[derive(Debug, Error, PartialEq)]
pub enum PrecisionError {
    #[error("node `{node}` reads the bits of its input, which differ in {to}")]
    Bits { node: String, to: DType },
    #[error("node `{node}` does not support {to}: {fault}")]
    Fact { node: String, to: DType, fault: Box<AddError> },
}

impl PrecisionError {
    pub fn of(node: &Node, to: DType, fault: FactError) -> PrecisionError {
        let fault = Box::new(AddError { op: rule(&node.op).name().to_string(), fault });
        PrecisionError::Fact { node: node.label().to_string(), to, fault }
    }
}

/// Converts every float to type `to`: sources, constants, casts and all that depends on them. Node ids are unchanged.
pub fn precision(graph: &Graph, to: DType) -> Result<Graph, PrecisionError> {
    let mut converted = graph.clone();
    for id in order::canonical(graph) {
        if matches!(converted.node(id).op, Op::BitCast(_)) {
            return Err(PrecisionError::Bits { node: converted.node(id).label().to_string(), to });
        }
        retype(&mut converted.node_mut(id).op, to);
        let facts: Vec<Fact> = converted.inputs(id).into_iter().map(|v| converted.fact(v).clone()).collect();
        let node = converted.node(id);
        let inferred = rule(&node.op).infer(&facts.iter().collect::<Vec<_>>());
        let inferred = inferred.map_err(|fault| PrecisionError::of(node, to, fault))?;
        converted.node_mut(id).facts = inferred;
    }
    Ok(converted)
}

fn retype(op: &mut Op, to: DType) {
    let dtype = match op {
        Op::Input(o) => &mut o.fact.dtype,
        Op::Parameter(o) => &mut o.fact.dtype,
        Op::State(o) => &mut o.fact.dtype,
        Op::Iota(o) => &mut o.fact.dtype,
        Op::Uniform(o) => &mut o.fact.dtype,
        Op::Cast(o) => &mut o.to,
        Op::Constant(o) if o.tensor.dtype().is_float() => {
            o.tensor = narrow(&o.tensor, to);
            return;
        }
        _ => return,
    };
    if dtype.is_float() {
        *dtype = to;
    }
}

/// Converts a constant. In a narrow type, finite values stay finite and non-zero values stay non-zero: a mask's lowest
/// number must not become infinite, nor an epsilon zero.
fn narrow(tensor: &Tensor, to: DType) -> Tensor {
    let (largest, smallest) = match to {
        DType::F16 => (f16::MAX.to_f64(), f16::MIN_POSITIVE_SUBNORMAL.to_f64()),
        DType::Bf16 => (bf16::MAX.to_f64(), bf16::MIN_POSITIVE_SUBNORMAL.to_f64()),
        _ => return tensor.cast(to),
    };
    let clamp = |value: f64| match value {
        value if value == 0.0 || !value.is_finite() => value,
        value => value.abs().clamp(smallest, largest).copysign(value),
    };
    Tensor::from_f64(tensor.shape(), &tensor.to_f64().into_iter().map(clamp).collect::<Vec<_>>()).cast(to)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

    #[test]
    fn narrow_constants_stay_finite_and_apart_from_zero() {
        let tensor = Tensor::from_f32(&[4], &[f32::MIN, 1e-12, 0.0, f32::INFINITY]);
        let half = narrow(&tensor, DType::F16).to_f64();
        assert_eq!((half[0], half[2], half[3]), (-65504.0, 0.0, f64::INFINITY));
        assert!(half[1] > 0.0);
        assert!(narrow(&tensor, DType::Bf16).to_f64()[0].is_finite());
    }

    #[test]
    fn every_op_takes_its_samples_in_f64() {
        for sample in crate::op::table::samples() {
            if matches!(sample.op, Op::BitCast(_)) {
                continue;
            }
            let mut op = sample.op.clone();
            retype(&mut op, DType::F64);
            let wide = |t: &Tensor| Fact::of(if t.dtype().is_float() { DType::F64 } else { t.dtype() }, t.shape());
            let facts: Vec<Fact> = sample.inputs.iter().map(wide).collect();
            let outputs = rule(&op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
            assert!(outputs.iter().all(|f| !f.dtype.is_float() || f.dtype == DType::F64), "{op:?} makes {outputs:?}");
        }
    }
}
