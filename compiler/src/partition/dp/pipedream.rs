//! PipeDream's hierarchical partitioner (Narayanan et al., SOSP 2019, section 3.1), over the down-sets of a graph.
//!
//! ```text
//! A_k(i..j, m) = min( T_k(i..j, m),  min over s, m' of  max( A_k(i..s, m - m'),  T_k(s+1..j, m') ) )
//! ```
//!
//! | paper          | here                                                      | unit         |
//! | ---            | ---                                                       | ---          |
//! | i..j           | two nested sets of a [`DownSets`]                         |              |
//! | T_k            | `StageCost::part_us`, including the links at the cuts     | microseconds |
//! | A_k(i..j, m)   | `best`                                                    | microseconds |
//! | m_k, B_k       | `LevelCost`                                               |              |
//!
//! The outermost level needs only ranges that start at the empty set; every inner level needs all ranges, because any
//! of them may become a group. Three optimisations keep the result unchanged:
//! - The cost of the last part does not depend on the start of the range, so it is computed once for all starts.
//! - On the outermost level the time of a known plan (the best cut of a linear order) prunes slower parts and costly
//!   cuts. It also prunes states that leave more work than the remaining units can do.
//! - The first pass computes values only. A second pass reconstructs the optimum with the fewest parts.

use crate::partition::dp::nested_partition::{Group, Shape, StageBody};
use crate::partition::search::downsets::DownSets;
use crate::plan::stage_cost::{LevelCost, StageCost};

/// Relative tolerance for equal values; far below the 1e-6 to which objectives are compared.
const SAME: f64 = 1e-12;

#[derive(Clone, Debug)]
pub struct Solution {
    pub minibatch_us: f64,
    /// Smallest objective for any number of outermost units, in microseconds.
    pub least_us: f64,
    /// The optimal shape with the fewest parts.
    pub shape: Shape,
}

/// Finds the best partition of `space` on `levels`. All units of every level are used, unless `may_leave_units` is set.
///
/// `bound_us` is a time that some partition is known to reach, or infinity. Returns `None` only if no partition reaches
/// it.
pub fn solve(
    space: &DownSets,
    cost: &StageCost,
    levels: &[LevelCost],
    may_leave_units: bool,
    bound_us: f64,
) -> Option<Solution> {
    let mut solver = Solver { space, cost, levels, may_leave_units, inner: Vec::new() };
    for level in 0..levels.len().checked_sub(1)? {
        let table = solver.all_ranges(level);
        solver.inner.push(table);
    }
    let outermost = levels.len() - 1;
    let units = levels[outermost].count as usize;
    let whole = space.len() - 1;
    let values = solver.prefix_ranges(outermost, bound_us * (1.0 + 1e-9));
    let objective_of = |used: usize| values[whole * units + used - 1];
    let least_us = (1..=units).map(objective_of).fold(f64::INFINITY, f64::min);
    let optimum = if may_leave_units { least_us } else { objective_of(units) };
    if !optimum.is_finite() {
        return None;
    }
    let limit = optimum * (1.0 + SAME);
    let used = (1..=units).find(|&used| (may_leave_units || used == units) && objective_of(used) <= limit)?;
    let groups = solver.fewest_parts(outermost, 0, whole, used, limit)?;
    let shape = Shape { groups, is_flat: false };
    Some(Solution { minibatch_us: optimum, least_us, shape })
}

/// Cost of [`solve`] for this many sets: steps of about a nanosecond, and bytes of its tables.
pub fn effort(levels: &[LevelCost], sets: usize) -> (f64, f64) {
    let sets = sets as f64;
    let pairs = |level: &LevelCost| f64::from(level.count) * (f64::from(level.count) + 1.0) / 2.0;
    let (outer, inner) = match levels.split_last() {
        Some((outer, inner)) => (sets * sets / 2.0 * pairs(outer), inner),
        None => (0.0, levels),
    };
    let steps = inner.iter().map(|level| sets.powi(3) / 6.0 * pairs(level)).sum::<f64>();
    let bytes = inner.iter().map(|level| sets * sets * 8.0 * (f64::from(level.count) + 1.0)).fold(0.0, f64::max);
    (outer + steps, bytes)
}

struct Solver<'a> {
    space: &'a DownSets,
    cost: &'a StageCost,
    levels: &'a [LevelCost],
    may_leave_units: bool,
    /// For each solved level: the value of the range from set p to set q on all units, at `p * sets + q`.
    inner: Vec<Vec<f64>>,
}

impl Solver<'_> {
    /// T_k: the range from set `from` to set `to` as one part.
    fn part_us(&self, level: usize, from: usize, to: usize, replicas: usize, is_first: bool) -> f64 {
        let space = self.space;
        let inner_us = match level.checked_sub(1) {
            None => space.compute[to] - space.compute[from],
            Some(below) => self.inner[below][from * space.len() + to],
        };
        let part = space.range(from, to, replicas as u32, is_first, inner_us);
        self.cost.part_us(&self.levels[level], &part)
    }

    /// Lower bound on a part that begins at set `at`, if it is not the first part of its range.
    fn entry_us(&self, level: usize, at: usize) -> f64 {
        self.cost.entry_us(&self.levels[level], self.space.cut[at], self.levels[level].count)
    }

    /// A_k of every range, on all units of `level`, or on the best number of them.
    fn all_ranges(&self, level: usize) -> Vec<f64> {
        let sets = self.space.len();
        let units = self.levels[level].count as usize;
        // best[(from * units + m - 1) * sets + to]
        let mut best = vec![f64::INFINITY; sets * units * sets];
        let mut last = vec![f64::INFINITY; units * sets];
        let mut values = vec![0.0; units];
        for to in 1..sets {
            for split in 1..to {
                let nested = self.space.nested(split, to);
                for m in 1..units {
                    let time = if nested { self.part_us(level, split, to, m, false) } else { f64::INFINITY };
                    last[(m - 1) * sets + split] = time;
                }
            }
            for from in (0..to).filter(|&from| self.space.nested(from, to)) {
                let rows = &best[from * units * sets..(from + 1) * units * sets];
                let splits = from + 1..to;
                for m in 1..=units {
                    let mut value = self.part_us(level, from, to, m, true);
                    for last_m in 1..m {
                        let first = (m - last_m - 1) * sets;
                        let head = &rows[first + splits.start..first + splits.end];
                        let row = (last_m - 1) * sets;
                        value = least_of_greater(head, &last[row + splits.start..row + splits.end], value);
                    }
                    values[m - 1] = value;
                }
                for (m, value) in values.iter().enumerate() {
                    best[(from * units + m) * sets + to] = *value;
                }
            }
        }
        let with = |at: usize, used: usize| best[(at / sets * units + used - 1) * sets + at % sets];
        let least = if self.may_leave_units { 1 } else { units };
        (0..sets * sets).map(|at| (least..=units).map(|used| with(at, used)).fold(f64::INFINITY, f64::min)).collect()
    }

    /// A_k of the ranges that start at the empty set, at `to * units + m - 1`. Values above `bound` may be infinite or
    /// too large.
    fn prefix_ranges(&self, level: usize, bound: f64) -> Vec<f64> {
        let sets = self.space.len();
        let units = self.levels[level].count as usize;
        let whole = sets - 1;
        let windows = self.windows(level, 0, whole, units, bound, true);
        let mut best = vec![f64::INFINITY; sets * units];
        let mut alive: Vec<usize> = Vec::new();
        for to in (1..sets).filter(|&to| to == whole || self.entry_us(level, to) <= bound) {
            let (before, row) = best.split_at_mut(to * units);
            let row = &mut row[..units];
            let Some((least, most)) = windows.of(to) else { continue };
            for m in least..=most {
                row[m - 1] = self.part_us(level, 0, to, m, true);
            }
            let start = alive.partition_point(|&split| windows.units_between(split, to) >= units);
            for &split in alive[start..].iter().filter(|&&split| self.space.nested(split, to)) {
                let Some((head_least, head_most)) = windows.of(split) else { continue };
                let heads = &before[split * units..(split + 1) * units];
                let last_least = windows.units_between(split, to).max(least.saturating_sub(head_most)).max(1);
                for last_m in last_least..=most.saturating_sub(head_least) {
                    let last = self.part_us(level, split, to, last_m, false);
                    if last > bound {
                        continue;
                    }
                    for m in least.max(head_least + last_m)..=most.min(head_most + last_m) {
                        let head = heads[m - last_m - 1];
                        let time = if head > last { head } else { last };
                        if time < row[m - 1] {
                            row[m - 1] = time;
                        }
                    }
                }
            }
            if row.iter().any(|value| *value <= bound) {
                alive.push(to);
            }
        }
        best
    }

    /// For each intermediate set: the number of units that its prefix can have used if no part is slower than `bound`.
    fn windows(
        &self,
        level: usize,
        from: usize,
        to: usize,
        units: usize,
        bound: f64,
        may_leave: bool,
    ) -> UnitRanges<'_> {
        let capacity = bound * self.levels[..level].iter().map(|level| f64::from(level.count)).product::<f64>();
        UnitRanges { compute: &self.space.compute, from, to, units, capacity, may_leave }
    }

    /// Covers the range with the fewest parts on exactly `units` units, none slower than `limit`; likewise in inner
    /// groups.
    fn fewest_parts(&self, level: usize, from: usize, to: usize, units: usize, limit: f64) -> Option<Vec<Group>> {
        let sets = to + 1 - from;
        // fewest[(at - from) * (units + 1) + used]: number of parts, start of the last part, units of the last part.
        let none = (u32::MAX, 0usize, 0usize);
        let mut fewest = vec![none; sets * (units + 1)];
        fewest[0] = (0, from, 0);
        let windows = self.windows(level, from, to, units, limit, false);
        let mut alive = vec![from];
        for at in from + 1..=to {
            let is_too_wide = at < to && self.entry_us(level, at) > limit;
            if is_too_wide || !self.space.nested(from, at) || !self.space.nested(at, to) {
                continue;
            }
            let Some((least, most)) = windows.of(at) else { continue };
            let mut lives = false;
            let start = alive.partition_point(|&split| windows.units_between(split, at) > units);
            for &split in alive[start..].iter().filter(|&&split| self.space.nested(split, at)) {
                for last in windows.units_between(split, at).max(1)..=most {
                    if self.part_us(level, split, at, last, split == from) > limit {
                        continue;
                    }
                    for used in least.max(last)..=most {
                        let (parts, ..) = fewest[(split - from) * (units + 1) + used - last];
                        let entry = &mut fewest[(at - from) * (units + 1) + used];
                        if parts != u32::MAX && parts + 1 < entry.0 {
                            *entry = (parts + 1, split, last);
                            lives = true;
                        }
                    }
                }
            }
            if lives {
                alive.push(at);
            }
        }
        let mut groups = Vec::new();
        let (mut at, mut used) = (to, units);
        while at > from {
            let (parts, split, last) = fewest[(at - from) * (units + 1) + used];
            if parts == u32::MAX {
                return None;
            }
            let body = match level.checked_sub(1) {
                None => StageBody::Ops(self.space.between(split, at)),
                Some(below) => {
                    // An inner pipeline may be slower than its optimum as long as the part stays within the limit.
                    let best = self.inner[below][split * self.space.len() + at];
                    let slack = (limit - self.part_us(level, split, at, last, split == from)) * last as f64;
                    let allowed = (best + slack * (1.0 - 1e-9)).max(best) * (1.0 + SAME);
                    let count = self.levels[below].count as usize;
                    let least = if self.may_leave_units { 1 } else { count };
                    let with = |used| self.fewest_parts(below, split, at, used, allowed);
                    StageBody::Groups((least..=count).find_map(with)?)
                }
            };
            groups.push(Group { replicas: last as u32, body });
            at = split;
            used -= last;
        }
        groups.reverse();
        (used == 0).then_some(groups)
    }
}

/// Range of unit counts for each prefix: no part may be slower than a bound, and no part is faster than its compute
/// divided by its devices.
struct UnitRanges<'a> {
    compute: &'a [f64],
    from: usize,
    to: usize,
    units: usize,
    /// Microseconds of compute that one unit can do within the bound.
    capacity: f64,
    may_leave: bool,
}

impl UnitRanges<'_> {
    /// Least and most units of the prefix up to set `at`; `None` if the prefix is infeasible.
    fn of(&self, at: usize) -> Option<(usize, usize)> {
        let least = self.units_between(self.from, at).max(1);
        let rest = if at == self.to { 0 } else { self.units_between(at, self.to).max(1) };
        let most = self.units.checked_sub(rest)?;
        let least = if at == self.to && !self.may_leave { self.units } else { least };
        (least <= most).then_some((least, most))
    }

    /// Least number of units for the range between two sets, with slack for rounding.
    fn units_between(&self, from: usize, to: usize) -> usize {
        let need = (self.compute[to] - self.compute[from]) / self.capacity * (1.0 - 1e-9);
        // 0/0 (all costs zero) is NaN and needs no unit; `as` saturates infinity.
        if need.is_nan() { 0 } else { need.ceil() as usize }
    }
}

/// Minimum of `start` and the pairwise maxima. Four accumulators let the compiler vectorise the loop.
fn least_of_greater(left: &[f64], right: &[f64], start: f64) -> f64 {
    let mut least = [start; 4];
    let (left_four, left_rest) = left.as_chunks::<4>();
    let (right_four, right_rest) = right.as_chunks::<4>();
    for (left, right) in left_four.iter().zip(right_four) {
        for lane in 0..4 {
            let greater = if left[lane] > right[lane] { left[lane] } else { right[lane] };
            least[lane] = if greater < least[lane] { greater } else { least[lane] };
        }
    }
    for (&left, &right) in left_rest.iter().zip(right_rest) {
        let greater = if left > right { left } else { right };
        least[0] = if greater < least[0] { greater } else { least[0] };
    }
    least.into_iter().fold(f64::INFINITY, f64::min)
}
