//! Bottleneck search on a [`CutSpace`]: how much of the model fits on a number of units if no part is slower than a
//! given time. Bisection over that time yields the smallest bottleneck.
//!
//! ```text
//! G_k(u)        = max over m of  reach_k( G_k(u - m), m )
//! reach_k(c, m) = the furthest end of a part that begins at c on m units
//! ```
//!
//! Reaching further is never worse, because a shortened part has less compute and fewer weights. If too many bytes
//! cross at the furthest cut, the last earlier cut with few enough bytes is used. On a relaxed space an infeasible time
//! is therefore a lower bound for every plan; inner levels are checked in the same way. On a line, the cuts found form
//! a plan.
//!
//! The search is quadratic in the units and logarithmic in the cuts: tens of thousands of ops on thousands of devices
//! take at most a second.

use crate::partition::bounds::cut_space::{CutPosition, CutSpace};
use crate::partition::dp::nested_partition::{Group, StageBody};
use crate::plan::stage_cost::{LevelCost, StageCost, StageRange};
use std::cell::Cell;

/// Relative precision of the bisection.
const CLOSE: f64 = 1e-5;

pub struct BottleneckSearch<'a> {
    pub cut_space: &'a CutSpace,
    pub cost: &'a StageCost,
    pub levels: &'a [LevelCost],
    /// Number of devices in one unit of each level.
    devices: Vec<f64>,
    /// Steps so far, and the step limit.
    steps: Cell<u64>,
    most_steps: u64,
}

#[derive(Clone, Copy, Debug)]
struct Leg {
    /// Number of units used by earlier parts.
    before: usize,
    from: CutPosition,
}

#[derive(Clone, Debug)]
pub struct Bracket {
    pub low_us: f64,
    /// The fastest feasible time, or the initial upper bound.
    pub high_us: f64,
}

#[derive(Clone, Copy)]
struct PartRange {
    from: CutPosition,
    to: CutPosition,
    replicas: usize,
    is_first: bool,
    /// Class of the weight bounds (see [`CutSpace::class`]).
    class: usize,
}

impl<'a> BottleneckSearch<'a> {
    /// A search with a step limit; a step takes about twenty nanoseconds.
    pub fn new(
        cut_space: &'a CutSpace,
        cost: &'a StageCost,
        levels: &'a [LevelCost],
        most_steps: u64,
    ) -> BottleneckSearch<'a> {
        let mut devices = vec![1.0];
        for level in levels {
            devices.push(devices[devices.len() - 1] * f64::from(level.count));
        }
        BottleneckSearch { cut_space, cost, levels, devices, steps: Cell::new(0), most_steps }
    }

    /// Narrows the smallest bottleneck between the lower bound `low_us` and the upper bound `high_us`.
    pub fn narrow(&self, low_us: f64, high_us: f64) -> Bracket {
        let (mut low, mut high) = (low_us, high_us);
        let mut tried = low * (1.0 + CLOSE);
        // The lower bound is usually tight, so the first guesses stay near it.
        let mut stride = 4e-4;
        while tried < high {
            match self.is_feasible(tried) {
                None => return Bracket { low_us: low, high_us: high },
                Some(true) => {
                    high = tried;
                    stride = 0.0;
                }
                Some(false) => {
                    low = tried;
                    stride *= 4.0;
                }
            }
            let middle = if low > 0.0 { (low * high).sqrt() } else { high / 2.0 };
            tried = if stride > 0.0 && low > 0.0 { middle.min(low * (1.0 + stride)) } else { middle };
            if high <= low * (1.0 + CLOSE) || !tried.is_finite() || tried <= low {
                break;
            }
        }
        Bracket { low_us: low, high_us: high }
    }

    fn is_feasible(&self, us: f64) -> Option<bool> {
        let level = self.levels.len() - 1;
        let ends = self.covers(level, self.cut_space.start(), self.cut_space.end(), us, None);
        (self.steps.get() < self.most_steps).then_some(ends)
    }

    /// The partition with no part slower than `us`, if there is one; `between` returns the ops between two intervals.
    pub fn groups(&self, us: f64, between: &dyn Fn(usize, usize) -> Vec<u32>) -> Option<Vec<Group>> {
        let level = self.levels.len() - 1;
        self.groups_between(level, self.cut_space.start(), self.cut_space.end(), us, between)
    }

    fn groups_between(
        &self,
        level: usize,
        from: CutPosition,
        to: CutPosition,
        us: f64,
        between: &dyn Fn(usize, usize) -> Vec<u32>,
    ) -> Option<Vec<Group>> {
        let mut legs = Vec::new();
        if !self.covers(level, from, to, us, Some(&mut legs)) {
            return None;
        }
        let mut groups = Vec::new();
        let (mut at, mut used) = (to, legs.len());
        while used > 0 {
            let leg = legs[used - 1];
            if at.is_beyond(&leg.from) {
                let (replicas, is_first) = (used - leg.before, leg.before == 0);
                let class = self.class(level, replicas, is_first, us);
                let run = PartRange { from: leg.from, to: at, replicas, is_first, class };
                let body = match level.checked_sub(1) {
                    None => StageBody::Ops(between(run.from.stretch, run.to.stretch)),
                    Some(below) => {
                        let inner_us = self.most_inner_us(level, &run, us);
                        StageBody::Groups(self.groups_between(below, run.from, run.to, inner_us, between)?)
                    }
                };
                groups.push(Group { replicas: run.replicas as u32, body });
                at = leg.from;
            }
            used = leg.before;
        }
        groups.reverse();
        Some(groups)
    }

    /// Returns whether all units of `level` can cover `from..to` with no part slower than `us`. `legs` receives one
    /// entry per number of units until the end is reached.
    fn covers(
        &self,
        level: usize,
        from: CutPosition,
        to: CutPosition,
        us: f64,
        mut legs: Option<&mut Vec<Leg>>,
    ) -> bool {
        let units = self.levels[level].count as usize;
        let capacity = us * self.devices[level] * (1.0 + 1e-9);
        if from.compute + capacity * (units as f64) < to.compute {
            return false;
        }
        let mut furthest = Vec::with_capacity(units + 1);
        furthest.push(from);
        for used in 1..=units {
            let mut best: CutPosition = furthest[used - 1];
            let mut leg = legs.as_ref().and_then(|legs| legs.last().copied()).unwrap_or(Leg { before: 0, from });
            for replicas in 1..=used {
                let before = used - replicas;
                let base: CutPosition = furthest[before];
                if base.compute + capacity * (replicas as f64) < best.compute {
                    continue;
                }
                let start = if before == 0 { Some(from) } else { self.entry(level, base, from, replicas, us) };
                let Some(start) = start.filter(|start| start.compute + capacity * replicas as f64 >= best.compute)
                else {
                    continue;
                };
                let class = self.class(level, replicas, before == 0, us);
                let run = PartRange { from: start, to: best, replicas, is_first: before == 0, class };
                if let Some(end) = self.beyond(level, run, to, us) {
                    (best, leg) = (end, Leg { before, from: start });
                }
            }
            furthest.push(best);
            if let Some(legs) = legs.as_deref_mut() {
                legs.push(leg);
            }
            if !to.is_beyond(&best) {
                return true;
            }
            if self.steps.get() >= self.most_steps {
                return false;
            }
        }
        false
    }

    /// The furthest position up to `base` at which a part with `replicas` may begin.
    fn entry(
        &self,
        level: usize,
        base: CutPosition,
        floor: CutPosition,
        replicas: usize,
        us: f64,
    ) -> Option<CutPosition> {
        let level = &self.levels[level];
        self.cut_space.settle(base, floor, |bytes| self.cost.entry_us(level, bytes, replicas as u32) <= us)
    }

    /// The furthest end, up to `goal`, of the part that begins at `run.from`; `None` if it is not beyond `run.to`.
    fn beyond(&self, level: usize, run: PartRange, goal: CutPosition, us: f64) -> Option<CutPosition> {
        let cut_space = self.cut_space;
        let room = run.from.compute + us * self.devices[level] * run.replicas as f64 * (1.0 + 1e-9);
        let to = |spot| PartRange { to: spot, ..run };
        let spot = |stretch: usize| CutPosition { stretch, compute: cut_space.from[stretch] };
        // Weights may need more replicas than compute does, so the first position that is an improvement is checked
        // first.
        let next = if run.to.compute < cut_space.to[run.to.stretch] { run.to.stretch } else { run.to.stretch + 1 };
        let last = cut_space.stretch_at(room.min(goal.compute)).min(goal.stretch);
        if next > last || !self.fits(level, &to(if next > run.to.stretch { spot(next) } else { run.to }), us) {
            return None;
        }
        // Exponential search, then bisection.
        let (mut fits, mut fails, mut stride) = (next, last + 1, 1);
        while fits + stride < fails {
            if self.fits(level, &to(spot(fits + stride)), us) {
                fits += stride;
                stride *= 2;
            } else {
                fails = fits + stride;
            }
        }
        while fails - fits > 1 {
            let middle = fits + (fails - fits) / 2;
            if self.fits(level, &to(spot(middle)), us) { fits = middle } else { fails = middle }
        }
        let (mut near, mut far) = (spot(fits).compute, cut_space.to[fits].min(room));
        if fits == goal.stretch {
            far = far.min(goal.compute);
        }
        let within = |compute| CutPosition { stretch: fits, compute };
        if far > near && !self.fits(level, &to(within(far)), us) {
            for _ in 0..24 {
                let middle = (near + far) / 2.0;
                if self.fits(level, &to(within(middle)), us) { near = middle } else { far = middle }
            }
        }
        let end = within(far.max(near));
        let end = if goal.is_beyond(&end) {
            cut_space.settle(end, run.from, |bytes| self.link_us(level, &run, bytes) <= us)?
        } else {
            goal
        };
        end.is_beyond(&run.to).then_some(end)
    }

    /// The class of weight bounds for cuts with few enough crossing bytes. The first part of a range pays for neither
    /// of its cuts.
    fn class(&self, level: usize, replicas: usize, is_first: bool, us: f64) -> usize {
        if is_first {
            return self.cut_space.any_class();
        }
        let level = &self.levels[level];
        self.cut_space.class(|bytes| self.cost.entry_us(level, bytes, replicas as u32) <= us * (1.0 + 1e-9))
    }

    fn link_us(&self, level: usize, run: &PartRange, out_bytes: f64) -> f64 {
        let part = self.part(run, 0.0);
        self.cost.part_us(&self.levels[level], &StageRange { weight_bytes: 0.0, is_last: false, out_bytes, ..part })
    }

    /// Returns whether the range fits into `us` as one part, ignoring the bytes that cross at its ends.
    fn fits(&self, level: usize, run: &PartRange, us: f64) -> bool {
        self.steps.set(self.steps.get() + 1);
        let compute = (run.to.compute - run.from.compute).max(0.0);
        let least = compute / self.devices[level];
        if self.cost.part_us(&self.levels[level], &self.part(run, least)) > us * (1.0 + 1e-9) {
            return false;
        }
        let Some(below) = level.checked_sub(1) else { return true };
        let inner_us = self.most_inner_us(level, run, us);
        if self.levels[below].count == 1 && below == 0 {
            return least <= inner_us;
        }
        self.covers(below, run.from, run.to, inner_us, None)
    }

    /// The largest time of one unit for which the whole part stays within `us`.
    fn most_inner_us(&self, level: usize, run: &PartRange, us: f64) -> f64 {
        let us = us * (1.0 + 1e-9);
        let time = |inner_us| self.cost.part_us(&self.levels[level], &self.part(run, inner_us));
        let (mut low, mut high) = (0.0, us * run.replicas as f64 * (1.0 + 1e-9));
        if time(high) <= us {
            return high;
        }
        for _ in 0..40 {
            let middle = (low + high) / 2.0;
            if time(middle) <= us { low = middle } else { high = middle }
        }
        high
    }

    fn part(&self, run: &PartRange, inner_us: f64) -> StageRange {
        let cut_space = self.cut_space;
        let weight_bytes = cut_space.weights_between(run.from.stretch, run.to.stretch, run.class);
        StageRange {
            is_first: run.is_first,
            is_last: run.to.stretch + 1 == cut_space.from.len(),
            replicas: run.replicas as u32,
            inner_us,
            weight_bytes,
            in_bytes: 0.0,
            out_bytes: 0.0,
        }
    }
}
