//! Exhaustive enumeration for small models: the test oracle for the other partitioners.
//!
//! Enumerates all chains of down-sets with all replica counts and any number of devices. A branch is pruned only if it
//! is already slower than the best, or if the remaining devices cannot do the remaining work in time. Partial results
//! are reused only for the inner levels of a group, where nothing else depends on the choice.

use crate::partition::dp::nested_partition::{Group, Shape, StageBody};
use crate::partition::search::downsets::DownSets;
use crate::plan::stage_cost::{LevelCost, StageCost};
use std::collections::HashMap;

pub const MAX_OPS: usize = 14;

/// Largest number of steps; a few seconds.
pub const MAX_STEPS: u64 = 400_000_000;

/// Returns the best shape accepted by `fits` (`None` if there is none) and the number of steps; an error gives the step
/// limit if it was exceeded. On several levels `fits` only sees the best inner pipelines.
pub fn exhaustive(
    space: &DownSets,
    cost: &StageCost,
    levels: &[LevelCost],
    fits: &dyn Fn(&Shape) -> bool,
) -> Result<(Option<Shape>, u64), u64> {
    let Some(outermost) = levels.len().checked_sub(1) else { return Ok((None, 0)) };
    let mut walk = Walk { space, cost, levels, inner: HashMap::new(), steps: 0 };
    let mut best = Best { us: f64::INFINITY, groups: None };
    let span = Span { level: outermost, from: 0, to: space.len() - 1 };
    walk.extend(span, 0, levels[outermost].count, 0.0, &mut Vec::new(), &mut best, Some(fits))?;
    Ok((best.groups.map(|groups| Shape { groups, is_flat: false }), walk.steps))
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Span {
    level: usize,
    from: usize,
    to: usize,
}

struct Best {
    us: f64,
    groups: Option<Vec<Group>>,
}

struct Walk<'a> {
    space: &'a DownSets,
    cost: &'a StageCost,
    levels: &'a [LevelCost],
    inner: HashMap<Span, (f64, Vec<Group>)>,
    steps: u64,
}

impl Walk<'_> {
    #[allow(clippy::too_many_arguments)] // Arguments hold the state of one branch; a struct would be built at every step.
    fn extend(
        &mut self,
        span: Span,
        at: usize,
        units: u32,
        so_far: f64,
        groups: &mut Vec<Group>,
        best: &mut Best,
        fits: Option<&dyn Fn(&Shape) -> bool>,
    ) -> Result<(), u64> {
        let Span { level, from, to } = span;
        if at == to {
            let shape = Shape { groups: groups.clone(), is_flat: false };
            if fits.is_none_or(|fits| fits(&shape)) {
                *best = Best { us: so_far, groups: Some(shape.groups) };
            }
            return Ok(());
        }
        let unit: f64 = self.levels[..level].iter().map(|level| f64::from(level.count)).product();
        for next in at + 1..=to {
            if !self.space.nested(at, next) || !self.space.nested(next, to) {
                continue;
            }
            let (inner_us, body) = self.body(level, at, next)?;
            for replicas in 1..=units {
                self.steps += 1;
                if self.steps > MAX_STEPS {
                    return Err(MAX_STEPS);
                }
                let part = self.space.range(at, next, replicas, at == from, inner_us);
                let us = self.cost.part_us(&self.levels[level], &part).max(so_far);
                let rest =
                    (self.space.compute[to] - self.space.compute[next]) / (unit * f64::from((units - replicas).max(1)));
                if us >= best.us || rest * (1.0 - 1e-9) > best.us || (next < to && replicas == units) {
                    continue;
                }
                groups.push(Group { replicas, body: body.clone() });
                self.extend(span, next, units - replicas, us, groups, best, fits)?;
                groups.pop();
            }
        }
        Ok(())
    }

    fn body(&mut self, level: usize, from: usize, to: usize) -> Result<(f64, StageBody), u64> {
        let Some(level) = level.checked_sub(1) else {
            return Ok((
                self.space.compute[to] - self.space.compute[from],
                StageBody::Ops(self.space.between(from, to)),
            ));
        };
        let span = Span { level, from, to };
        if let Some((us, groups)) = self.inner.get(&span) {
            return Ok((*us, StageBody::Groups(groups.clone())));
        }
        let mut best = Best { us: f64::INFINITY, groups: None };
        self.extend(span, from, self.levels[level].count, 0.0, &mut Vec::new(), &mut best, None)?;
        let groups = best.groups.unwrap_or_default();
        self.inner.insert(span, (best.us, groups.clone()));
        Ok((best.us, StageBody::Groups(groups)))
    }
}
