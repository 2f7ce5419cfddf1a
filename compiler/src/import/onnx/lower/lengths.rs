//! Padded batches of sequences with different lengths.
//!
//! Lengths may be unknown at import time. All operations are comparisons and row gathers, so they are differentiable.
//! In reverse direction, step `t` of a sequence of length `l` is step `l - 1 - t`; padding stays in place.

use super::gather::scale_index;
use super::{LowerReason, Scope};
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::op::{Binary, Compare, Gather, Op, Value};
use crate::tensor::dim::Dim;
use crate::tensor::{DType, Tensor};

/// Sequence lengths `[N]` for a tensor `[T, N, …]`.
pub struct Lengths {
    lengths: Value,
    steps: Dim,
    batch: Dim,
}

impl Lengths {
    /// Reads input `slot`; `None` if it is omitted, or constant with all lengths equal to the number of steps.
    pub fn read(scope: &mut Scope<'_>, slot: usize, x: Value) -> Result<Option<Lengths>, LowerReason> {
        if !scope.has(slot) {
            return Ok(None);
        }
        let shape = scope.fact(x).shape;
        let (steps, batch) = (shape[0].clone(), shape[1].clone());
        // Lengths that are not constant are handled at run time.
        if let Ok(Some(values)) = scope.tensor(slot, "the sequence lengths") {
            let values = values.to_i64();
            if values.iter().any(|l| *l < 0 || steps.known().is_some_and(|steps| *l > steps)) {
                return Err(LowerReason::Inputs(format!("the lengths {values:?} do not fit {steps} steps")));
            }
            if values.iter().all(|length| Some(*length) == steps.known()) {
                return Ok(None);
            }
        }
        let values = scope.value(slot)?;
        let fact = scope.fact(values);
        if fact.shape != [batch.clone()] {
            return Err(LowerReason::Inputs(format!("the sequence lengths are {fact}, expected one per sequence")));
        }
        let lengths = scope.cast(values, DType::I64)?;
        Ok(Some(Lengths { lengths, steps, batch }))
    }

    /// Condition that step `t` is within the sequence: `[T, N]`.
    fn is_valid(&self, scope: &mut Scope<'_>) -> Result<Value, LowerReason> {
        let t = scope.count(2, 0, &self.steps)?;
        scope.compare(Compare::Less, t, self.lengths)
    }

    /// Condition that one given step is within the sequence: `[N, 1]`.
    pub fn at(&self, scope: &mut Scope<'_>, step: i64) -> Result<Value, LowerReason> {
        let step = scope.constant(Tensor::from_i64(&[], &[step]))?;
        let is_valid = scope.compare(Compare::Less, step, self.lengths)?;
        scope.reshape(is_valid, vec![self.batch.clone(), Dim::Known(1)])
    }

    /// `y [T, N, H]` with padding set to zero.
    pub fn mask(&self, scope: &mut Scope<'_>, y: Value) -> Result<Value, LowerReason> {
        let is_valid = self.is_valid(scope)?;
        let is_valid = scope.reshape(is_valid, vec![self.steps.clone(), self.batch.clone(), Dim::Known(1)])?;
        let zero = scope.scalar(scope.fact(y).dtype, 0.0)?;
        scope.select(is_valid, y, zero)
    }

    /// Gathers rows of `x [T, N, H]` by step index of shape `[…, N]` or `[N]`.
    fn rows(&self, scope: &mut Scope<'_>, x: Value, step: Value) -> Result<Value, LowerReason> {
        let rank = scope.fact(step).rank();
        let first = scale_index(scope, step, &self.batch)?;
        let n = scope.count(rank, rank - 1, &self.batch)?;
        let row = scope.binary(Binary::Add, first, n)?;
        let width = scope.fact(x).shape[2].clone();
        let flat = scope.reshape(x, vec![self.steps.mul(&self.batch)?, width])?;
        scope.add(Op::Gather(Gather { axis: 0 }), &[flat, row])
    }

    /// Reverses the steps of each sequence of `x [T, N, H]`.
    pub fn reverse(&self, scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
        let t = scope.count(2, 0, &self.steps)?;
        let reversed = formula(scope, [self.lengths, t], |[lengths, t]| lengths - 1.0 - t)?;
        let is_valid = self.is_valid(scope)?;
        let step = scope.select(is_valid, reversed, t)?;
        self.rows(scope, x, step)
    }

    /// The row of `y [T, N, H]` at the last step of each sequence; `first` for empty sequences.
    pub fn final_state(&self, scope: &mut Scope<'_>, y: Value, first: Value) -> Result<Value, LowerReason> {
        let step = formula(scope, [self.lengths], |[lengths]| (lengths - 1.0).max(0.0))?;
        let row = self.rows(scope, y, step)?;
        let has_steps = self.at(scope, 0)?;
        scope.select(has_steps, row, first)
    }
}
