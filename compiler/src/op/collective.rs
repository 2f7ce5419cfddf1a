//! Collectives of a tensor-parallel group, and [`Shard`], the only op whose result depends on the rank.
//!
//! Importers never emit these ops, and they have no gradient: they are inserted into sharded graphs after
//! differentiation. [`meet`] computes the results from all inputs in rank order. Sums use that order, so all devices
//! get the same bits in every run. A single device can only run a group of one.

use super::reduce::{join, join_integers};
use super::*;
use crate::op::sharding::{Sharding, SplitDim, part_of, whole_of};

fn one<'a>(inputs: &[&'a Fact]) -> Result<&'a Fact, FactError> {
    match inputs {
        [x] => Ok(x),
        _ => Err(FactError::Arity { expected: 1, got: inputs.len() }),
    }
}

/// The fact of a shard; an empty group or an indivisible axis is an error.
fn part(x: &Fact, cut: SplitDim, devices: usize) -> Result<Fact, FactError> {
    group(devices)?;
    check_axis(cut.axis, x.rank())?;
    let uneven = || FactError::Attribute(format!("axis {} of {x} has no {} blocks of {devices}", cut.axis, cut.blocks));
    Sharding::Split(cut).part(x, devices).ok_or_else(uneven)
}

fn whole(x: &Fact, cut: SplitDim, devices: usize) -> Result<Fact, FactError> {
    group(devices)?;
    check_axis(cut.axis, x.rank())?;
    let mut whole = x.clone();
    whole.shape[cut.axis] = whole.shape[cut.axis].mul(&Dim::from(devices))?;
    part(&whole, cut, devices)?;
    Ok(whole)
}

fn group(devices: usize) -> Result<(), FactError> {
    match devices {
        0 => Err(FactError::Attribute("a collective needs at least one device".into())),
        1..=65_536 => Ok(()),
        _ => Err(FactError::Attribute(format!("a collective over {devices} devices is too large"))),
    }
}

fn check_sum(x: &Fact, kind: ReduceKind) -> Result<(), FactError> {
    if x.dtype == DType::Bool || kind == ReduceKind::Mean {
        return Err(FactError::Attribute(format!("{kind:?} does not support {}", x.dtype)));
    }
    Ok(())
}

macro_rules! collective {
    ($op:ty, $infer:expr) => {
        impl OpRule for $op {
            fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
                let infer: fn(&$op, &Fact) -> Result<Fact, FactError> = $infer;
                Ok(vec![infer(self, one(inputs)?)?])
            }

            // Local memory traffic only; communication is costed separately.
            fn cost(&self, _: &[&Fact], outputs: &[Fact]) -> Cost {
                Cost { flops: 0.0, bytes: 2.0 * moved_bytes(&[], outputs) }
            }

            fn takes_gradient(&self, _: usize) -> bool {
                false
            }

            fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
                if self.devices != 1 {
                    return Err(KernelError::Alone { devices: self.devices });
                }
                outputs[0].bytes_mut().copy_from_slice(inputs[0].bytes());
                Ok(())
            }
        }
    };
}

collective!(AllReduce, |op, x| {
    group(op.devices)?;
    check_sum(x, op.kind)?;
    Ok(x.clone())
});
collective!(ReduceScatter, |op, x| {
    check_sum(x, ReduceKind::Sum)?;
    part(x, op.cut, op.devices)
});
collective!(AllGather, |op, x| whole(x, op.cut, op.devices));
collective!(AllToAll, |op, x| part(&whole(x, op.from, op.devices)?, op.to, op.devices));
collective!(Shard, |op, x| part(x, op.cut, op.devices));

/// The results of a collective on every device, from all inputs in rank order; `None` for other ops.
pub fn meet(op: &Op, parts: &[Tensor]) -> Option<Vec<Tensor>> {
    (0..parts.len()).map(|device| run_together(op, parts, device)).collect()
}

pub fn run_together(op: &Op, parts: &[Tensor], device: usize) -> Option<Tensor> {
    Some(match op {
        Op::AllReduce(o) => reduce_terms(o.kind, parts),
        Op::ReduceScatter(o) => {
            let shards: Vec<Tensor> = parts.iter().map(|term| part_of(term, o.cut, parts.len(), device)).collect();
            reduce_terms(ReduceKind::Sum, &shards)
        }
        Op::AllGather(o) => whole_of(parts, o.cut),
        Op::AllToAll(o) => part_of(&whole_of(parts, o.from), o.to, parts.len(), device),
        Op::Shard(o) => part_of(&parts[device], o.cut, parts.len(), device),
        _ => return None,
    })
}

/// Tests for ops that synchronise the devices.
pub fn is_meeting(op: &Op) -> bool {
    matches!(op, Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather(_) | Op::AllToAll(_))
}

/// Reduces the terms in order; floats in `f64`, rounded once.
fn reduce_terms(kind: ReduceKind, parts: &[Tensor]) -> Tensor {
    let views: Vec<View<'_>> = parts.iter().map(Tensor::view).collect();
    let (dtype, shape) = (parts[0].dtype(), parts[0].shape());
    let mut bytes = parts[0].bytes().to_vec();
    let mut sum = ViewMut::new(dtype, shape, &mut bytes);
    for i in 0..sum.len() {
        if dtype.is_float() {
            sum.set_f64(i, views[1..].iter().fold(views[0].f64(i), |sum, term| join(kind, sum, term.f64(i))));
        } else {
            let terms = views[1..].iter().map(|term| term.i64(i));
            sum.set_i64(i, terms.fold(views[0].i64(i), |sum, term| join_integers(kind, dtype, sum, term)));
        }
    }
    Tensor::new(dtype, shape.to_vec(), bytes.into()).expect("as many bytes as each term has")
}

impl<'b> Expr<'b> {
    /// This device's rank in the group, as an `i64` scalar.
    pub fn device(self, devices: usize) -> Expr<'b> {
        let ranks = self.source(Op::Iota(Iota { fact: Fact::of(DType::I64, &[devices]), axis: 0 }));
        ranks.then(Op::Shard(Shard { cut: SplitDim { axis: 0, blocks: 1 }, devices })).reshape(vec![])
    }
}

/// Test cases for a group of one; larger groups have separate tests.
pub fn samples() -> Vec<Sample> {
    let sample = |op| Sample::forward("alone", op, vec![sample::ramp(&[4, 6], 1)]);
    let (cut, devices) = (SplitDim { axis: 1, blocks: 2 }, 1);
    vec![
        sample(Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices })),
        sample(Op::ReduceScatter(ReduceScatter { cut, devices })),
        sample(Op::AllGather(AllGather { cut, devices })),
        sample(Op::AllToAll(AllToAll { from: cut, to: SplitDim { axis: 0, blocks: 1 }, devices })),
        sample(Op::Shard(Shard { cut, devices })),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::sample::try_run;

    fn parts() -> [Tensor; 2] {
        [Tensor::from_f32(&[2, 2], &[1., 2., 3., 4.]), Tensor::from_f32(&[2, 2], &[10., 20., 30., 40.])]
    }

    fn run_together(op: Op) -> Vec<Vec<f64>> {
        meet(&op, &parts()).unwrap().iter().map(Tensor::to_f64).collect()
    }

    #[test]
    fn two_devices_by_hand() {
        let (rows, columns) = (SplitDim { axis: 0, blocks: 1 }, SplitDim { axis: 1, blocks: 1 });
        let devices = 2;
        let sum = [11., 22., 33., 44.];
        assert_eq!(run_together(Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices })), [sum, sum]);
        let maxima = [10., 20., 30., 40.];
        assert_eq!(run_together(Op::AllReduce(AllReduce { kind: ReduceKind::Max, devices })), [maxima, maxima]);
        assert_eq!(run_together(Op::ReduceScatter(ReduceScatter { cut: rows, devices })), [[11., 22.], [33., 44.]]);
        let gathered = [1., 2., 10., 20., 3., 4., 30., 40.];
        assert_eq!(run_together(Op::AllGather(AllGather { cut: columns, devices })), [gathered, gathered]);
        let swapped = [[1., 2., 10., 20.], [3., 4., 30., 40.]];
        assert_eq!(run_together(Op::AllToAll(AllToAll { from: columns, to: rows, devices })), swapped);
        assert_eq!(run_together(Op::Shard(Shard { cut: columns, devices })), [[1., 3.], [20., 40.]]);
    }

    #[test]
    fn single_device_collective_is_an_error() {
        let op = AllReduce { kind: ReduceKind::Sum, devices: 2 };
        assert_eq!(try_run(&op, &parts()[..1]), Err(KernelError::Alone { devices: 2 }));
    }
}
