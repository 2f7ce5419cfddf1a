//! The optimizer step of a stage: optimizer state, `f32` master weights of 16-bit parameters, and PipeMare's average of
//! updates.

use crate::checkpoint::ParameterState;
use crate::device::buffer::{Buffer, Pool};
use crate::device::cpu::half::{is_half, narrow};
use crate::device::cpu::real::Real;
use crate::exec::compile::StageCode;
use crate::exec::executor::Weights;
use crate::optim::optimizer::{Ahead, Optimizer, Update};
use crate::optim::policy::{DISCREPANCY, Staleness};
use crate::zero::shard::ShardRange;
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::tensor::DType;
use std::sync::Arc;

/// Updates the parameters of a stage.
pub struct ParameterUpdater<'a> {
    optimizer: &'a Optimizer,
    dtypes: Vec<DType>,
    /// `f32` master weights of each 16-bit parameter; the 16-bit weights are their rounded copies.
    masters: Vec<Option<Buffer>>,
    state: Vec<Vec<Buffer>>,
    /// PipeMare's `δ`; `keep` is its decay.
    drift: Vec<Buffer>,
    keep: f64,
    /// The shard that this replica updates; master weights and state have its size.
    share: ShardRange,
}

impl<'a> ParameterUpdater<'a> {
    /// Creates zero optimizer state. `delay` is the number of updates between a stage's forward and its own update.
    pub fn new(
        code: &StageCode,
        optimizer: &'a Optimizer,
        masters: Vec<Option<Buffer>>,
        staleness: Staleness,
        delay: u32,
        share: ShardRange,
    ) -> ParameterUpdater<'a> {
        let masters = masters.into_iter().enumerate();
        let masters: Vec<Option<Buffer>> =
            masters.map(|(at, master)| master.map(|whole| cut(&share, at, DType::F32, whole))).collect();
        let own = |at: usize| {
            let named = &code.parameters[at];
            share.own(at, named.bytes, named.fact.dtype.size()).len()
        };
        let bytes = |at: usize| masters[at].as_ref().map_or(own(at), Buffer::len);
        let drifts = matches!(staleness, Staleness::PipeMare { .. }) && delay > 0;
        let all = 0..code.parameters.len();
        ParameterUpdater {
            optimizer,
            dtypes: code.parameters.iter().map(|named| named.fact.dtype).collect(),
            state: all.clone().map(|at| optimizer.new_state(bytes(at))).collect(),
            drift: if drifts { all.map(|at| Buffer::new(bytes(at))).collect() } else { Vec::new() },
            keep: DISCREPANCY.powf(1.0 / f64::from(delay.max(1))),
            masters,
            share,
        }
    }

    /// Bytes of optimizer state, master weights and PipeMare's averages.
    pub fn bytes(&self) -> usize {
        let kept = self.state.iter().flatten().chain(self.masters.iter().flatten()).chain(&self.drift);
        kept.map(Buffer::len).sum()
    }

    /// Updates this replica's shard of a parameter. Overwrites the old version if it is unshared, else allocates.
    pub fn step(&mut self, p: usize, mut weight: Arc<Buffer>, update: Update<'_>, pool: &mut Pool) -> Arc<Buffer> {
        let own = match self.share.keeps() {
            true => 0..weight.len(),
            false => self.share.own(p, weight.len(), self.dtypes[p].size()),
        };
        let state = &mut self.state[p];
        if let Some(master) = &mut self.masters[p] {
            self.optimizer.in_place(update, master.bytes_mut(), state);
            if Arc::get_mut(&mut weight).is_none() {
                weight = pool.take(weight.len());
            }
            narrow(self.dtypes[p], cast_slice(master.bytes()), &mut exclusive(&mut weight)[own]);
            return weight;
        }
        // PipeMare's `δ` needs the difference of two versions.
        if let (true, Some(only)) = (self.drift.is_empty(), Arc::get_mut(&mut weight)) {
            self.optimizer.in_place(update, &mut only.bytes_mut()[own], state);
            return weight;
        }
        let mut next = pool.take(weight.len());
        self.optimizer.out_of_place(update, &weight.bytes()[own.clone()], &mut exclusive(&mut next)[own], state);
        if let Some(drift) = self.drift.get_mut(p) {
            let (drift, keep) = (drift.bytes_mut(), self.keep);
            match self.dtypes[p] {
                DType::F64 => follow_step::<f64>(drift, weight.bytes(), next.bytes(), keep),
                _ => follow_step::<f32>(drift, weight.bytes(), next.bytes(), keep),
            }
            pool.give(weight);
        }
        next
    }

    /// Restores saved state.
    pub fn begin(&mut self, moves: Vec<ParameterState>) {
        let (mut state, mut drift) = (Vec::new(), Vec::new());
        for (p, of) in moves.into_iter().enumerate() {
            let dtype = wide(self.dtypes[p]);
            state.push(of.state.into_iter().map(|whole| cut(&self.share, p, dtype, whole)).collect());
            drift.extend(of.drift);
        }
        (self.state, self.drift) = (state, drift);
    }

    /// A copy of a parameter's optimizer state, as far as this replica holds it.
    pub fn moves(&self, p: usize) -> ParameterState {
        let copy = |buffer: &Buffer| Buffer::copy_of(buffer.bytes());
        let (master, drift) = (self.masters[p].as_ref().map(copy), self.drift.get(p).map(copy));
        ParameterState { master, state: self.state[p].iter().map(copy).collect(), drift, updates: 0 }
    }

    /// Weights predicted some updates ahead in the last update direction (SpecTrain).
    pub fn ahead(&self, weights: &Weights, ahead: impl Fn(usize) -> Ahead, pool: &mut Pool) -> Weights {
        let one = |(p, weight): (usize, &Arc<Buffer>)| {
            let mut to = pool.take(weight.len());
            self.optimizer.ahead(self.dtypes[p], ahead(p), weight.bytes(), &self.state[p], exclusive(&mut to));
            to
        };
        weights.iter().enumerate().map(one).collect()
    }

    /// Approximate weights of `steps` updates ago (PipeMare).
    pub fn back(&self, weights: &Weights, steps: u32, pool: &mut Pool) -> Weights {
        let one = |(p, weight): (usize, &Arc<Buffer>)| {
            let mut to = pool.take(weight.len());
            let (drift, bytes) = (self.drift[p].bytes(), exclusive(&mut to));
            match self.dtypes[p] {
                DType::F64 => set_back::<f64>(weight.bytes(), steps, drift, bytes),
                _ => set_back::<f32>(weight.bytes(), steps, drift, bytes),
            }
            to
        };
        weights.iter().enumerate().map(one).collect()
    }

    /// True if PipeMare's averages are kept.
    pub fn drifts(&self) -> bool {
        !self.drift.is_empty()
    }

    /// The `f32` master of a 16-bit parameter, if this replica holds all of it.
    pub fn master(&self, p: usize) -> Option<&Buffer> {
        self.masters.get(p).and_then(Option::as_ref).filter(|_| !self.share.is_sharded(p))
    }

    /// The weights to return after training: masters where there are any.
    pub fn leave(&mut self, weights: Weights) -> Weights {
        let of = |(weight, master): (Arc<Buffer>, Option<Buffer>)| master.map_or(weight, Arc::new);
        weights.into_iter().zip(std::mem::take(&mut self.masters)).map(of).collect()
    }
}

/// This replica's shard of a parameter-sized tensor.
fn cut(share: &ShardRange, p: usize, dtype: DType, whole: Buffer) -> Buffer {
    if share.is_sharded(p) { Buffer::copy_of(&whole.bytes()[share.own(p, whole.len(), dtype.size())]) } else { whole }
}

/// Element type of gradient sums and optimizer state.
pub fn wide(dtype: DType) -> DType {
    if is_half(dtype) { DType::F32 } else { dtype }
}

/// Mutable bytes of a buffer just taken from a pool.
pub fn exclusive(buffer: &mut Arc<Buffer>) -> &mut [u8] {
    Arc::get_mut(buffer).expect("a buffer from the pool has a single owner").bytes_mut()
}

/// `δ ← keep · δ + (1 − keep) · (new − old)`
fn follow_step<T: Real>(drift: &mut [u8], old: &[u8], new: &[u8], keep: f64) {
    let steps = cast_slice::<u8, T>(old).iter().zip(cast_slice::<u8, T>(new));
    for (drift, (old, new)) in cast_slice_mut::<u8, T>(drift).iter_mut().zip(steps) {
        *drift = T::of(keep * drift.wide() + (1.0 - keep) * (new.wide() - old.wide()));
    }
}

/// `to = weight − steps · δ`
fn set_back<T: Real>(weight: &[u8], steps: u32, drift: &[u8], to: &mut [u8]) {
    let from = cast_slice::<u8, T>(weight).iter().zip(cast_slice::<u8, T>(drift));
    for (to, (weight, drift)) in cast_slice_mut::<u8, T>(to).iter_mut().zip(from) {
        *to = T::of(weight.wide() - f64::from(steps) * drift.wide());
    }
}
