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
use super::*;
use crate::op::sharding::LocalContext;

/// Label of targets that a device ignores.
const NO_CLASS: i64 = -1;

impl CrossEntropy {
    pub(super) fn by_rows<'b>(&self, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let outputs = emit_all(Op::CrossEntropy(*self), context.inputs);
        let fraction = local_fraction(context.inputs[1], self.ignore, context.devices);
        vec![outputs[0] * fraction.like(outputs[0]), outputs[1]]
    }

    pub(super) fn by_classes<'b>(&self, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let (classes, devices) = (context.whole[0].shape[self.axis].clone(), context.devices);
        let targets = Targets::of(context.inputs[1], classes, self.ignore, devices);
        let local = CrossEntropy { ignore: Some(NO_CLASS), ..*self };
        let outputs = emit_all(Op::CrossEntropy(local), &[context.inputs[0], targets.labels]);
        let [mean, own_lse] = outputs[..] else { unreachable!("infer gives two outputs") };

        let maximum = own_lse.all_reduce(ReduceKind::Max, devices);
        let log = (own_lse - maximum).exp().all_reduce(ReduceKind::Sum, devices).log();
        let lse = maximum + log;

        let zero = mean.number(0.0);
        let total = mean * count(targets.local).like(mean);
        // Adds the small terms first: a sum with large logits would be rounded.
        let correction = targets.local.select(maximum - own_lse + log, zero).sum();
        let total = total + correction;
        vec![total / at_least_one(count(targets.valid).like(mean)), lse]
    }
}

impl CrossEntropyGrad {
    pub(super) fn by_rows<'b>(&self, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let [dloss, logits, target, lse] = *context.inputs else { unreachable!("infer checks the arity") };
        let dloss = dloss * local_fraction(target, self.ignore, context.devices).like(dloss);
        vec![emit(Op::CrossEntropyGrad(*self), &[dloss, logits, target, lse])]
    }

    pub(super) fn by_classes<'b>(&self, context: &LocalContext<'b>) -> Vec<Expr<'b>> {
        let [dloss, logits, target, lse] = *context.inputs else { unreachable!("infer checks the arity") };
        let targets = Targets::of(target, context.whole[1].shape[self.axis].clone(), self.ignore, context.devices);
        let mut column = logits.shape();
        let mut row = vec![Dim::Known(1); column.len()];
        row[self.axis] = std::mem::replace(&mut column[self.axis], Dim::Known(1));

        let lse = lse.reshape(column.clone());
        let wide_logits = logits.like(lse);
        let weight = (wide_logits - lse).exp();
        let classes = lse.source(Op::Iota(Iota { fact: Fact::new(DType::I64, row), axis: self.axis }));
        let is_label = classes.equal(targets.labels.reshape(column.clone()));
        let slope = weight - is_label.like(wide_logits);
        let slope = dloss / count(targets.valid).like(dloss) * slope;
        let valid = targets.valid.reshape(column);
        vec![valid.select(slope, wide_logits.number(0.0)).like(logits)]
    }
}

/// The targets of all rows, seen by a device with a shard of the classes.
struct Targets<'b> {
    /// Mask of targets that are not ignored.
    valid: Expr<'b>,
    /// Mask of counted targets among this device's classes.
    local: Expr<'b>,
    /// Local class index, [`NO_CLASS`] for all other targets.
    labels: Expr<'b>,
}

impl<'b> Targets<'b> {
    fn of(target: Expr<'b>, classes: Dim, ignore: Option<i64>, devices: usize) -> Targets<'b> {
        let valid = valid_mask(target, ignore);
        let target = target.cast(DType::I64);
        // A negative index counts from the end, but a negative label is invalid: it becomes an index out of range.
        let (zero, no_class) = (target.integer(0), target.integer(NO_CLASS));
        let out_of_range = target.integer(classes.known().expect("sizes are known under tensor parallelism"));
        let target = target.less(zero).select(out_of_range, target);
        let target = valid.select(target, zero);
        let LocalIndices { in_shard, indices, size: _ } = local_indices(target, classes, devices);
        let local = in_shard.binary(Binary::And, valid);
        Targets { valid, local, labels: local.select(indices, no_class) }
    }
}

/// Mask of targets that are not ignored.
fn valid_mask(target: Expr<'_>, ignore: Option<i64>) -> Expr<'_> {
    let Some(ignore) = ignore else {
        return target.equal(target);
    };
    // Compared as `i64`: if the target's type cannot represent the ignored label, no target is ignored.
    let target = if target.dtype() == DType::I64 { target } else { target.cast(DType::I64) };
    !target.equal(target.integer(ignore))
}

/// Number of true elements, as `i64`: a narrow float could not count them.
fn count(mask: Expr<'_>) -> Expr<'_> {
    mask.cast(DType::I64).sum()
}

/// This device's fraction of the group's counted targets; 0 if there are none.
fn local_fraction(target: Expr<'_>, ignore: Option<i64>, devices: usize) -> Expr<'_> {
    let local_count = count(valid_mask(target, ignore));
    let total = local_count.all_reduce(ReduceKind::Sum, devices);
    let [local_count, total] = [local_count, total].map(|count| count.cast(DType::F64));
    local_count / at_least_one(total)
}

fn at_least_one(count: Expr<'_>) -> Expr<'_> {
    count.binary(Binary::Max, count.number(1.0))
}
