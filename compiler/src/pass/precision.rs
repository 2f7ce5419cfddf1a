//! The same graph in another precision: every float becomes one of another type.

use crate::graph::{AddError, Graph, order};
use crate::op::Op;
use crate::op::table::rule;
use crate::tensor::DType;
use crate::tensor::fact::Fact;
use thiserror::Error;

/// Why a graph has no other precision.
#[derive(Debug, Error, PartialEq)]
pub enum PrecisionError {
    /// An op reads the bits of a float.
    #[error("node `{node}` reads the bits of its input, which are others in {to}")]
    Bits {
        /// Source name of the node.
        node: String,
        /// The type asked for.
        to: DType,
    },
    /// An op does not take the type.
    #[error("node `{node}` cannot work in {to}: {fault}")]
    Fact {
        /// Source name of the node.
        node: String,
        /// The type asked for.
        to: DType,
        /// What does not fit.
        fault: Box<AddError>,
    },
}

/// Makes every float of the graph one of type `to`: sources, constants, casts and all that follows from them. Ids stay.
pub fn precision(graph: &Graph, to: DType) -> Result<Graph, PrecisionError> {
    let mut made = graph.clone();
    for id in order::canonical(graph) {
        let name = made.node(id).told().to_string();
        if matches!(made.node(id).op, Op::BitCast(_)) {
            return Err(PrecisionError::Bits { node: name, to });
        }
        retype(&mut made.node_mut(id).op, to);
        let facts: Vec<Fact> = made.inputs(id).into_iter().map(|v| made.fact(v).clone()).collect();
        let rule = rule(&made.node(id).op);
        let inferred = rule.infer(&facts.iter().collect::<Vec<_>>()).map_err(|fault| PrecisionError::Fact {
            node: name,
            to,
            fault: Box::new(AddError { op: rule.name().to_string(), fault }),
        })?;
        made.node_mut(id).facts = inferred;
    }
    Ok(made)
}

fn retype(op: &mut Op, to: DType) {
    let own = match op {
        Op::Input(o) => &mut o.fact.dtype,
        Op::Parameter(o) => &mut o.fact.dtype,
        Op::State(o) => &mut o.fact.dtype,
        Op::Iota(o) => &mut o.fact.dtype,
        Op::Cast(o) => &mut o.to,
        Op::Constant(o) if o.tensor.dtype().is_float() => {
            o.tensor = o.tensor.cast(to);
            return;
        }
        _ => return,
    };
    if own.is_float() {
        *own = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Tensor;

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
            let made = rule(&op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
            assert!(made.iter().all(|f| !f.dtype.is_float() || f.dtype == DType::F64), "{op:?} makes {made:?}");
        }
    }
}
