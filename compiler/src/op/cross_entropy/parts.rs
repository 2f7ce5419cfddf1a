//! Tensor-parallel cross-entropy, split by rows or by classes.
//!
//! By rows, with n_d the counted targets of device d and n those of all: the loss is `Σ_d loss_d n_d / n`. Each
//! device's gradient is that of its local loss times `n_d / n`.
//!
//! By classes, with lse_d over the classes of device d, which ignores targets of other devices:
//!
//!   lse  = m + log Σ_d e^(lse_d - m),  m the largest lse_d
//!   loss = Σ_d (loss_d n_d + Σ (lse - lse_d over the rows with a target on d)) / n
//!
//! Only one number per row is communicated, never the logits.

use super::super::gather::{OwnIndices, local_indices};
use super::super::unary::scalar;
use super::*;
use crate::op::sharding::LocalContext;

/// Label of targets that a device ignores.
const NO_CLASS: i64 = -1;

impl CrossEntropy {
    pub(super) fn by_rows(&self, at: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let both = out.emit_all(Op::CrossEntropy(*self), at.inputs);
        let own = counted(out, at.inputs[1], self.ignore);
        let own = count(out, own);
        let share = share(out, own, at.devices);
        let share = cast(out, share, both[0]);
        vec![out.emit(Op::Binary(Binary::Mul), &[both[0], share]), both[1]]
    }

    pub(super) fn by_classes(&self, at: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let logits = at.inputs[0];
        let targets = Targets::of(out, at.inputs[1], at.whole[0].shape[self.axis].clone(), self.ignore, at.devices);
        let local = CrossEntropy { ignore: Some(NO_CLASS), ..*self };
        let both = out.emit_all(Op::CrossEntropy(local), &[logits, targets.labels]);
        let [mean, own_lse] = both[..] else { unreachable!("infer gives two outputs") };

        let reduced = |out: &mut dyn Emit, kind, value| {
            out.emit(Op::AllReduce(AllReduce { kind, devices: at.devices }), &[value])
        };
        let most = reduced(out, ReduceKind::Max, own_lse);
        let below = out.emit(Op::Binary(Binary::Sub), &[own_lse, most]);
        let part = out.emit(Op::Unary(Unary::Exp), &[below]);
        let sum = reduced(out, ReduceKind::Sum, part);
        let log = out.emit(Op::Unary(Unary::Log), &[sum]);
        let lse = out.emit(Op::Binary(Binary::Add), &[most, log]);

        let zero = out.emit(scalar(out.fact(mean).dtype, 0.0), &[]);
        let own = count(out, targets.own);
        let own = cast(out, own, mean);
        let total = out.emit(Op::Binary(Binary::Mul), &[mean, own]);
        // Adds the small terms first: a sum with large logits would be rounded.
        let missing = out.emit(Op::Binary(Binary::Sub), &[most, own_lse]);
        let missing = out.emit(Op::Binary(Binary::Add), &[missing, log]);
        let missing = out.emit(Op::Select(Select {}), &[targets.own, missing, zero]);
        let missing = sum_of(out, missing);
        let total = out.emit(Op::Binary(Binary::Add), &[total, missing]);
        let all = count(out, targets.counted);
        let all = cast(out, all, mean);
        let all = at_least_one(out, all);
        vec![out.emit(Op::Binary(Binary::Div), &[total, all]), lse]
    }
}

impl CrossEntropyGrad {
    pub(super) fn by_rows(&self, at: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let [dloss, logits, target, lse] = *at.inputs else { unreachable!("infer checks the arity") };
        let own = counted(out, target, self.ignore);
        let own = count(out, own);
        let share = share(out, own, at.devices);
        let share = cast(out, share, dloss);
        let dloss = out.emit(Op::Binary(Binary::Mul), &[dloss, share]);
        vec![out.emit(Op::CrossEntropyGrad(*self), &[dloss, logits, target, lse])]
    }

    pub(super) fn by_classes(&self, at: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let [dloss, logits, target, lse] = *at.inputs else { unreachable!("infer checks the arity") };
        let targets = Targets::of(out, target, at.whole[1].shape[self.axis].clone(), self.ignore, at.devices);
        let mut column = out.fact(logits).shape;
        column[self.axis] = Dim::Known(1);
        let as_column = |out: &mut dyn Emit, value| out.emit(Op::Reshape(Reshape { shape: column.clone() }), &[value]);

        let lse = as_column(out, lse);
        let narrow = logits;
        let logits = cast(out, logits, lse);
        let below = out.emit(Op::Binary(Binary::Sub), &[logits, lse]);
        let weight = out.emit(Op::Unary(Unary::Exp), &[below]);
        let mut row = vec![Dim::Known(1); out.fact(logits).rank()];
        row[self.axis] = out.fact(logits).shape[self.axis].clone();
        let classes = out.emit(Op::Iota(Iota { fact: Fact::new(DType::I64, row), axis: self.axis }), &[]);
        let labels = as_column(out, targets.labels);
        let hit = out.emit(Op::Compare(Compare::Equal), &[classes, labels]);
        let hit = cast(out, hit, logits);
        let slope = out.emit(Op::Binary(Binary::Sub), &[weight, hit]);
        let all = count(out, targets.counted);
        let all = cast(out, all, dloss);
        let each = out.emit(Op::Binary(Binary::Div), &[dloss, all]);
        let slope = out.emit(Op::Binary(Binary::Mul), &[each, slope]);
        let counted = as_column(out, targets.counted);
        let zero = out.emit(scalar(out.fact(logits).dtype, 0.0), &[]);
        let slope = out.emit(Op::Select(Select {}), &[counted, slope, zero]);
        vec![cast(out, slope, narrow)]
    }
}

/// The targets of all rows, seen by a device with a shard of the classes.
struct Targets {
    /// Mask of targets that are not ignored.
    counted: Value,
    /// Mask of counted targets among this device's classes.
    own: Value,
    /// Local class index, [`NO_CLASS`] for all other targets.
    labels: Value,
}

impl Targets {
    fn of(out: &mut dyn Emit, target: Value, classes: Dim, ignore: Option<i64>, devices: usize) -> Targets {
        let counted = counted(out, target, ignore);
        let target = out.emit(Op::Cast(Cast { to: DType::I64 }), &[target]);
        let number = |out: &mut dyn Emit, value: i64| {
            out.emit(Op::Constant(Constant { tensor: Tensor::from_i64(&[], &[value]) }), &[])
        };
        // A negative index counts from the end, but a negative label is invalid: it becomes an index out of range.
        let (zero, none) = (number(out, 0), number(out, NO_CLASS));
        let outside = number(out, classes.known().expect("sizes are known under tensor parallelism"));
        let below = out.emit(Op::Compare(Compare::Less), &[target, zero]);
        let target = out.emit(Op::Select(Select {}), &[below, outside, target]);
        let target = out.emit(Op::Select(Select {}), &[counted, target, zero]);
        let OwnIndices { has, places, size: _ } = local_indices(out, target, classes, devices);
        let own = out.emit(Op::Binary(Binary::And), &[has, counted]);
        let labels = out.emit(Op::Select(Select {}), &[own, places, none]);
        Targets { counted, own, labels }
    }
}

/// Mask of targets that are not ignored.
fn counted(out: &mut dyn Emit, target: Value, ignore: Option<i64>) -> Value {
    let Some(ignore) = ignore else {
        return out.emit(Op::Compare(Compare::Equal), &[target, target]);
    };
    let fact = out.fact(target);
    let ignored = Tensor::from_i64(&[], &[ignore]);
    // Compared as `i64`: if the target's type cannot represent the ignored label, no target is ignored.
    let target = if fact.dtype == DType::I64 { target } else { out.emit(Op::Cast(Cast { to: DType::I64 }), &[target]) };
    let ignored = out.emit(Op::Constant(Constant { tensor: ignored }), &[]);
    let equal = out.emit(Op::Compare(Compare::Equal), &[target, ignored]);
    out.emit(Op::Unary(Unary::Not), &[equal])
}

/// Number of true elements, as `i64`: a narrow float could not count them.
fn count(out: &mut dyn Emit, which: Value) -> Value {
    let ones = out.emit(Op::Cast(Cast { to: DType::I64 }), &[which]);
    sum_of(out, ones)
}

fn sum_of(out: &mut dyn Emit, x: Value) -> Value {
    let axes = (0..out.fact(x).rank()).collect();
    out.emit(Op::Reduce(Reduce { kind: ReduceKind::Sum, axes, keep: false }), &[x])
}

/// This device's fraction of the group's count; 0 if the count is 0.
fn share(out: &mut dyn Emit, own: Value, devices: usize) -> Value {
    let all = out.emit(Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices }), &[own]);
    let [own, all] = [own, all].map(|count| out.emit(Op::Cast(Cast { to: DType::F64 }), &[count]));
    let all = at_least_one(out, all);
    out.emit(Op::Binary(Binary::Div), &[own, all])
}

fn at_least_one(out: &mut dyn Emit, count: Value) -> Value {
    let one = out.emit(scalar(out.fact(count).dtype, 1.0), &[]);
    out.emit(Op::Binary(Binary::Max), &[count, one])
}

fn cast(out: &mut dyn Emit, value: Value, like: Value) -> Value {
    let to = out.fact(like).dtype;
    if out.fact(value).dtype == to { value } else { out.emit(Op::Cast(Cast { to }), &[value]) }
}
