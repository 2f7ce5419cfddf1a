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

use super::super::gather::{LocalIndices, local_indices};
use super::super::unary::scalar;
use super::*;
use crate::op::sharding::LocalContext;

/// Label of targets that a device ignores.
const NO_CLASS: i64 = -1;

impl CrossEntropy {
    pub(super) fn by_rows(&self, context: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let outputs = out.emit_all(Op::CrossEntropy(*self), context.inputs);
        let valid = valid_mask(out, context.inputs[1], self.ignore);
        let local_count = count(out, valid);
        let fraction = local_fraction(out, local_count, context.devices);
        let fraction = cast(out, fraction, outputs[0]);
        vec![out.emit(Op::Binary(Binary::Mul), &[outputs[0], fraction]), outputs[1]]
    }

    pub(super) fn by_classes(&self, context: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let logits = context.inputs[0];
        let targets = Targets::of(
            out,
            context.inputs[1],
            context.whole[0].shape[self.axis].clone(),
            self.ignore,
            context.devices,
        );
        let local = CrossEntropy { ignore: Some(NO_CLASS), ..*self };
        let outputs = out.emit_all(Op::CrossEntropy(local), &[logits, targets.labels]);
        let [mean, own_lse] = outputs[..] else { unreachable!("infer gives two outputs") };

        let reduced = |out: &mut dyn Emit, kind, value| {
            out.emit(Op::AllReduce(AllReduce { kind, devices: context.devices }), &[value])
        };
        let maximum = reduced(out, ReduceKind::Max, own_lse);
        let below = out.emit(Op::Binary(Binary::Sub), &[own_lse, maximum]);
        let part = out.emit(Op::Unary(Unary::Exp), &[below]);
        let sum = reduced(out, ReduceKind::Sum, part);
        let log = out.emit(Op::Unary(Unary::Log), &[sum]);
        let lse = out.emit(Op::Binary(Binary::Add), &[maximum, log]);

        let zero = out.emit(scalar(out.fact(mean).dtype, 0.0), &[]);
        let local_count = count(out, targets.local);
        let local_count = cast(out, local_count, mean);
        let total = out.emit(Op::Binary(Binary::Mul), &[mean, local_count]);
        // Adds the small terms first: a sum with large logits would be rounded.
        let correction = out.emit(Op::Binary(Binary::Sub), &[maximum, own_lse]);
        let correction = out.emit(Op::Binary(Binary::Add), &[correction, log]);
        let correction = out.emit(Op::Select(Select {}), &[targets.local, correction, zero]);
        let correction = sum_of(out, correction);
        let total = out.emit(Op::Binary(Binary::Add), &[total, correction]);
        let total_count = count(out, targets.valid);
        let total_count = cast(out, total_count, mean);
        let total_count = at_least_one(out, total_count);
        vec![out.emit(Op::Binary(Binary::Div), &[total, total_count]), lse]
    }
}

impl CrossEntropyGrad {
    pub(super) fn by_rows(&self, context: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let [dloss, logits, target, lse] = *context.inputs else { unreachable!("infer checks the arity") };
        let valid = valid_mask(out, target, self.ignore);
        let local_count = count(out, valid);
        let fraction = local_fraction(out, local_count, context.devices);
        let fraction = cast(out, fraction, dloss);
        let dloss = out.emit(Op::Binary(Binary::Mul), &[dloss, fraction]);
        vec![out.emit(Op::CrossEntropyGrad(*self), &[dloss, logits, target, lse])]
    }

    pub(super) fn by_classes(&self, context: &LocalContext<'_>, out: &mut dyn Emit) -> Vec<Value> {
        let [dloss, logits, target, lse] = *context.inputs else { unreachable!("infer checks the arity") };
        let targets = Targets::of(out, target, context.whole[1].shape[self.axis].clone(), self.ignore, context.devices);
        let mut column = out.fact(logits).shape;
        column[self.axis] = Dim::Known(1);
        let as_column = |out: &mut dyn Emit, value| out.emit(Op::Reshape(Reshape { shape: column.clone() }), &[value]);

        let lse = as_column(out, lse);
        let logits_input = logits;
        let logits = cast(out, logits, lse);
        let below = out.emit(Op::Binary(Binary::Sub), &[logits, lse]);
        let weight = out.emit(Op::Unary(Unary::Exp), &[below]);
        let mut row = vec![Dim::Known(1); out.fact(logits).rank()];
        row[self.axis] = out.fact(logits).shape[self.axis].clone();
        let classes = out.emit(Op::Iota(Iota { fact: Fact::new(DType::I64, row), axis: self.axis }), &[]);
        let labels = as_column(out, targets.labels);
        let is_label = out.emit(Op::Compare(Compare::Equal), &[classes, labels]);
        let is_label = cast(out, is_label, logits);
        let slope = out.emit(Op::Binary(Binary::Sub), &[weight, is_label]);
        let total_count = count(out, targets.valid);
        let total_count = cast(out, total_count, dloss);
        let row_gradient = out.emit(Op::Binary(Binary::Div), &[dloss, total_count]);
        let slope = out.emit(Op::Binary(Binary::Mul), &[row_gradient, slope]);
        let valid = as_column(out, targets.valid);
        let zero = out.emit(scalar(out.fact(logits).dtype, 0.0), &[]);
        let slope = out.emit(Op::Select(Select {}), &[valid, slope, zero]);
        vec![cast(out, slope, logits_input)]
    }
}

/// The targets of all rows, seen by a device with a shard of the classes.
struct Targets {
    /// Mask of targets that are not ignored.
    valid: Value,
    /// Mask of counted targets among this device's classes.
    local: Value,
    /// Local class index, [`NO_CLASS`] for all other targets.
    labels: Value,
}

impl Targets {
    fn of(out: &mut dyn Emit, target: Value, classes: Dim, ignore: Option<i64>, devices: usize) -> Targets {
        let valid = valid_mask(out, target, ignore);
        let target = out.emit(Op::Cast(Cast { to: DType::I64 }), &[target]);
        let number = |out: &mut dyn Emit, value: i64| {
            out.emit(Op::Constant(Constant { tensor: Tensor::from_i64(&[], &[value]) }), &[])
        };
        // A negative index counts from the end, but a negative label is invalid: it becomes an index out of range.
        let (zero, no_class) = (number(out, 0), number(out, NO_CLASS));
        let out_of_range = number(out, classes.known().expect("sizes are known under tensor parallelism"));
        let below = out.emit(Op::Compare(Compare::Less), &[target, zero]);
        let target = out.emit(Op::Select(Select {}), &[below, out_of_range, target]);
        let target = out.emit(Op::Select(Select {}), &[valid, target, zero]);
        let LocalIndices { in_shard, indices, size: _ } = local_indices(out, target, classes, devices);
        let is_local = out.emit(Op::Binary(Binary::And), &[in_shard, valid]);
        let labels = out.emit(Op::Select(Select {}), &[is_local, indices, no_class]);
        Targets { valid, local: is_local, labels }
    }
}

/// Mask of targets that are not ignored.
fn valid_mask(out: &mut dyn Emit, target: Value, ignore: Option<i64>) -> Value {
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
fn count(out: &mut dyn Emit, mask: Value) -> Value {
    let ones = out.emit(Op::Cast(Cast { to: DType::I64 }), &[mask]);
    sum_of(out, ones)
}

fn sum_of(out: &mut dyn Emit, x: Value) -> Value {
    let axes = (0..out.fact(x).rank()).collect();
    out.emit(Op::Reduce(Reduce { kind: ReduceKind::Sum, axes, keep: false }), &[x])
}

/// This device's fraction of the group's count; 0 if the count is 0.
fn local_fraction(out: &mut dyn Emit, local_count: Value, devices: usize) -> Value {
    let total = out.emit(Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices }), &[local_count]);
    let [local_count, total] = [local_count, total].map(|count| out.emit(Op::Cast(Cast { to: DType::F64 }), &[count]));
    let total = at_least_one(out, total);
    out.emit(Op::Binary(Binary::Div), &[local_count, total])
}

fn at_least_one(out: &mut dyn Emit, count: Value) -> Value {
    let one = out.emit(scalar(out.fact(count).dtype, 1.0), &[]);
    out.emit(Op::Binary(Binary::Max), &[count, one])
}

fn cast(out: &mut dyn Emit, value: Value, target: Value) -> Value {
    let to = out.fact(target).dtype;
    if out.fact(value).dtype == to { value } else { out.emit(Op::Cast(Cast { to }), &[value]) }
}
