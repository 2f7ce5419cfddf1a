//! The variants of a search: all micro-batch sizes on single devices, then those tensor-parallel groups that may be
//! faster.
//!
//! The costs of groups take longer to compute than all else. Larger micro-batches are computed at least as efficiently,
//! so the work of a group at one size bounds the time at all smaller ones. Each degree starts with the largest size that
//! can be faster than the best layout so far, and goes down while smaller ones can.

use crate::costs::Costs;
use crate::error::Error;
use crate::plan::configuration_search::{SLOWER, Search};
use crate::plan::parallel::in_parallel;
use crate::plan::request_costs::untrainable;
use crate::plan::tensor_parallel::{GroupLayout, TensorParallel};
use crate::plan::variant::{MOST_OPS, SizedCosts, Variant, count, sizes};
use compiler::partition::bounds::flush_bound::FlushBound;
use compiler::plan::problem::Target;
use std::collections::BTreeSet;

/// Sizes whose variants are made at the same time.
const AT_ONCE: usize = 4;

/// A micro-batch size, with a lower bound of its time on single devices.
pub struct Size {
    pub micro_batch: u64,
    pub bound: FlushBound,
}

/// The search of sizes for a tensor-parallel degree with a layout of weights.
struct DegreeSearch {
    degree: u32,
    layout: GroupLayout,
    /// The size that is next.
    at: usize,
    /// The sizes that were tried, with their variants.
    tried: Vec<(usize, usize)>,
    /// Smaller sizes are not faster than the best.
    from: usize,
    /// The largest size that fits, and the smallest that does not or is clearly slower.
    fitting: Option<usize>,
    too_large: usize,
    best_us: f64,
}

impl DegreeSearch {
    /// Goes to another size, after a variant of this one was tried: all compute spread over all devices, the time of
    /// its fastest layout, and the time that a better layout must be below. `None` if no other size is worth its costs.
    fn next(&mut self, variant: usize, least_us: f64, us: f64, to_beat_us: f64) -> Option<()> {
        self.tried.push((self.at, variant));
        if least_us >= to_beat_us {
            self.from = self.at + 1;
        }
        let is_slower = us > SLOWER * self.best_us;
        match self.fitting {
            Some(fitting) if self.at < fitting && us.is_finite() && is_slower => return None,
            Some(fitting) if self.at < fitting => {}
            _ if us.is_finite() && !is_slower => self.fitting = Some(self.at),
            _ => self.too_large = self.at,
        }
        self.best_us = self.best_us.min(us);
        // The largest size that fits is found by bisection.
        let from = self.fitting.map_or(self.from, |at| self.from.max(at + 1));
        self.at = match from < self.too_large {
            true => (from + self.too_large) / 2,
            false => (self.from..self.fitting?).rev().find(|at| !self.has_tried(*at))?,
        };
        Some(())
    }

    fn has_tried(&self, at: usize) -> bool {
        self.tried.iter().any(|(other, _)| *other == at)
    }
}

impl Search<'_> {
    /// Makes the variants of ascending micro-batch sizes on single devices, and states what all sizes take at least.
    pub fn make_variants(&mut self, source: &dyn SizedCosts) -> Result<(), Error> {
        let (batch, options) = (self.batch, &self.request.options);
        let all = match source.only_size() {
            Some(size) => vec![size],
            None if self.request.batch.is_none() || options.microbatches > 1 => {
                vec![batch / u64::from(options.microbatches)]
            }
            None => sizes(batch),
        };
        let is_alone = !matches!(self.tensor_parallel(), TensorParallel::Degree(_));
        let (mut failure, mut is_slower): (Option<Error>, bool) = (None, false);
        self.total = all.len() as u64;
        let mut rest = &all[..];
        while !rest.is_empty() {
            // Any plan is better than none.
            if self.events.stops() && self.has_layouts() {
                break;
            }
            if (is_slower || !is_alone) && self.add_rest(source, rest) {
                break;
            }
            let (few, later) = rest.split_at(AT_ONCE.min(rest.len()));
            rest = later;
            let (request, schedules, zero) = (self.request, &self.schedules, self.zero);
            let is_made = is_alone && !is_slower;
            let made = in_parallel(few, |size| {
                let costs = source.at(*size)?;
                let bound = FlushBound::of(&costs.graph, &costs.cluster, count(batch, costs.micro_batch)?);
                let size = Size { micro_batch: costs.micro_batch, bound };
                let variant = is_made.then(|| Variant::new(request, costs.clone(), None, batch)).transpose()?;
                let variant = variant.map(|variant| variant.estimated(schedules, zero, request.options.chunks));
                Ok((costs, size, variant))
            });
            for made in made {
                let (costs, size, variant) = match made {
                    Ok(made) => made,
                    // Larger sizes may not be possible.
                    Err(error) => {
                        failure.get_or_insert(error);
                        continue;
                    }
                };
                if self.sizes.is_empty() {
                    self.request.protect_output(&costs.model)?;
                    if let Some(why) = &costs.untrainable {
                        self.events.warn(&untrainable(why));
                    }
                    self.groups = self.degrees(&costs)?;
                }
                self.costs.insert(size.micro_batch, costs);
                self.sizes.push(size);
                let latest_us = variant.as_ref().map_or(f64::INFINITY, Variant::least_us);
                self.best_us = self.best_us.min(latest_us);
                is_slower |= is_alone && latest_us > SLOWER * self.best_us;
                self.variants.extend(variant);
            }
            self.progress(few.len() as u64);
        }
        match failure {
            Some(failure) if self.sizes.is_empty() => Err(failure),
            _ => Ok(()),
        }
    }

    /// Adds the last sizes without variants: the bounds of all follow from the costs of the largest. False if it has none.
    fn add_rest(&mut self, source: &dyn SizedCosts, rest: &[u64]) -> bool {
        let Some((&largest, _)) = rest.split_last().filter(|_| !self.sizes.is_empty()) else { return false };
        let Ok(costs) = source.at(largest) else { return false };
        let sizes = in_parallel(rest, |&micro_batch| {
            let (part, count) = (micro_batch as f64 / largest as f64, count(self.batch, micro_batch)?);
            Ok(Size { micro_batch, bound: FlushBound::of_part(&costs.graph, part, &costs.cluster, count) })
        });
        let Ok(sizes) = sizes.into_iter().collect::<Result<Vec<Size>, Error>>() else { return false };
        self.sizes.extend(sizes);
        self.costs.insert(largest, costs);
        true
    }

    /// Adds the variants of tensor-parallel groups.
    pub fn add_groups(&mut self, source: &dyn SizedCosts) -> Result<(), Error> {
        let (best_us, gap) = (self.best_us, self.request.options.gap);
        let mut searches: Vec<DegreeSearch> = Vec::new();
        let mut least_us = f64::INFINITY;
        for &(degree, layout) in &self.groups {
            let may_win = |size: &Size| size.bound.compute_us(degree) * (1.0 + gap) < best_us;
            let too_large = self.sizes.iter().rposition(may_win).map_or(0, |at| at + 1);
            least_us =
                self.sizes[too_large..].iter().map(|size| size.bound.compute_us(degree)).fold(least_us, f64::min);
            if let Some(at) = too_large.checked_sub(1) {
                let (tried, best_us) = (Vec::new(), f64::INFINITY);
                searches.push(DegreeSearch { degree, layout, at, tried, from: 0, fitting: None, too_large, best_us });
            }
        }
        // `KeepsWeights` is a special case of `Any`, and not faster.
        let waits = |search: &DegreeSearch| {
            search.layout == GroupLayout::KeepsWeights && self.groups.contains(&(search.degree, GroupLayout::Any))
        };
        let (mut later, mut searches): (Vec<_>, Vec<_>) = searches.into_iter().partition(waits);
        let mut ended: Vec<DegreeSearch> = Vec::new();
        while !(searches.is_empty() || self.events.stops() && self.has_layouts()) {
            self.total += searches.len() as u64;
            let (request, schedules, zero, batch) = (self.request, &self.schedules, self.zero, self.batch);
            let at: BTreeSet<usize> = searches.iter().map(|search| search.at).collect();
            let mut unknown: Vec<u64> = at.into_iter().map(|at| self.sizes[at].micro_batch).collect();
            unknown.retain(|size| !self.costs.contains_key(size));
            for (size, costs) in unknown.iter().zip(in_parallel(&unknown, |size| source.at(*size))) {
                self.costs.insert(*size, costs?);
            }
            let made = in_parallel(&searches, |search| -> Result<Variant, Error> {
                let costs = &self.costs[&self.sizes[search.at].micro_batch];
                let groups = source.on_groups(costs, search.degree, search.layout)?;
                let variant = Variant::new(request, costs.clone(), Some(groups), batch)?;
                Ok(variant.estimated(schedules, zero, request.options.chunks))
            });
            self.progress(searches.len() as u64);
            let mut open = Vec::new();
            for (mut search, variant) in searches.into_iter().zip(made) {
                let variant = variant?;
                let work_us = variant.bound.spread_us();
                let us = variant.least_us();
                let to_beat_us = self.best_us / (1.0 + gap);
                if search.layout == GroupLayout::Any && work_us >= to_beat_us {
                    later.retain(|other| other.degree != search.degree);
                }
                self.best_us = self.best_us.min(us);
                let next = search.next(self.variants.len(), work_us, us, to_beat_us);
                if next.is_some() { &mut open } else { &mut ended }.push(search);
                self.variants.push(variant);
            }
            open.append(&mut later);
            searches = open;
        }
        for search in &ended {
            for &(at, variant) in &search.tried {
                let bound = &self.variants[variant].bound;
                let is_least = at > 0 && !search.has_tried(at - 1);
                let us = if is_least { FlushBound::smaller_us } else { FlushBound::least_us };
                least_us = us(bound, &self.schedules, self.fastest_zero(), least_us.min(self.best_us));
            }
        }
        self.least_group_us = Some(least_us);
        Ok(())
    }

    fn has_layouts(&self) -> bool {
        self.variants.iter().any(|variant| !variant.estimates.is_empty())
    }

    /// The tensor-parallel degrees to try, each with a layout of weights.
    fn degrees(&self, costs: &Costs) -> Result<Vec<(u32, GroupLayout)>, Error> {
        let options = &self.request.options;
        let given = self.tensor_parallel();
        if costs.shareable.is_none() && options.tensor_parallel.is_none() {
            return Ok(Vec::new());
        }
        let is_large = costs.graph.ops.len() > MOST_OPS && given == TensorParallel::Auto;
        let mut layouts = GroupLayout::of(costs, options.target);
        layouts.retain(|layout| !is_large || *layout != GroupLayout::Any);
        let sizes = given.sizes(costs)?;
        Ok(sizes.iter().flat_map(|size| layouts.iter().map(|layout| (*size, *layout))).collect())
    }

    /// Tensor parallelism and ZeRO are part of the search for a batch.
    pub fn tensor_parallel(&self) -> TensorParallel {
        let has_groups = self.request.options.target.is_none_or(Target::has_groups);
        let is_open = self.request.batch.is_some() && has_groups;
        let default = if is_open { TensorParallel::Auto } else { TensorParallel::Never };
        self.request.options.tensor_parallel.unwrap_or(default)
    }
}
