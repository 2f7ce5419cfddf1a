//! The best plan of a given number of stages, for users who fix the replicas, the cuts, or the caps of each stage.
//!
//! ```text
//! H(t, i, w) = min over j, m of  max( T(i..j, m) if it fits,  H(t - 1, j, w - m) )
//! ```
//!
//! t counts stages from the end, so that workers and stages after a stage, and with them its caps and its memory, are known.
//! Such plans need not take whole groups, so a cluster of several levels counts as one at its slowest bandwidth.

use crate::partition::line::Line;
use crate::partition::shape::Shape;
use crate::plan::caps::{Flow, Position};
use crate::plan::memory::Multiples;
use crate::plan::stage_cost::{LevelCost, Part, StageCost};

/// What is fixed, and the settings of the search.
#[derive(Clone, Copy, Debug)]
pub struct Pinned<'a> {
    /// Where it may cut.
    pub line: &'a Line,
    /// Cost model.
    pub cost: &'a StageCost,
    /// The one level.
    pub level: LevelCost,
    /// What decides how much is in flight; `workers` is a bound.
    pub flow: Flow,
    /// Bytes of optimizer state for each byte of weights.
    pub optimizer_state: f64,
    /// Number of stages.
    pub stages: usize,
    /// Replicas of each stage, or free.
    pub replicas: Option<&'a [u32]>,
    /// Caps of each stage, or the schedule's rule.
    pub caps: Option<&'a [u32]>,
    /// Bytes on one device.
    pub memory_limit: Option<u64>,
    /// Whether to make the fullest stage least instead of the slowest.
    pub least_memory: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    value: f64,
    end: usize,
    replicas: usize,
}

/// Finds the best such plan: its value, microseconds or bytes, and its shape, or `None` if nothing fits.
pub fn pinned(settings: &Pinned<'_>) -> Option<(f64, Shape)> {
    let space = &settings.line.space;
    let places = space.len();
    let units = settings.level.count as usize;
    let width = units + 1;
    if settings.stages == 0 || settings.stages > units || settings.stages >= places {
        return None;
    }
    let none = Entry { value: f64::INFINITY, end: 0, replicas: 0 };
    let mut tables: Vec<Vec<Entry>> = vec![vec![none; places * width]];
    tables[0][(places - 1) * width].value = 0.0;
    for after in 0..settings.stages {
        let stage = settings.stages - 1 - after;
        let mut table = vec![none; places * width];
        let choices = match settings.replicas {
            Some(replicas) => replicas[stage] as usize..=replicas[stage] as usize,
            None => 1..=units,
        };
        // The first stage starts at the first place, every other somewhere after it.
        let starts = if stage == 0 { 0..1 } else { 1..places - 1 };
        for from in starts {
            for end in from + 1..places {
                for rest in 0..units {
                    let tail = tables[after][end * width + rest].value;
                    if tail.is_infinite() {
                        continue;
                    }
                    for replicas in choices.clone().take_while(|replicas| replicas + rest <= units) {
                        let entry = &mut table[from * width + rest + replicas];
                        if tail < entry.value {
                            let value = value(settings, stage, from, end, replicas as u32, rest as u32).max(tail);
                            if value < entry.value {
                                *entry = Entry { value, end, replicas };
                            }
                        }
                    }
                }
            }
        }
        tables.push(table);
    }
    let last = &tables[settings.stages];
    let (best, mut left) = (1..=units).map(|used| (last[used].value, used)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    if !best.is_finite() {
        return None;
    }
    let mut stages = Vec::with_capacity(settings.stages);
    let mut at = 0;
    for table in tables[1..].iter().rev() {
        let Entry { end, replicas, .. } = table[at * width + left];
        stages.push((space.between(at, end), replicas as u32));
        at = end;
        left -= replicas;
    }
    Some((best, Shape::flat(stages, true)))
}

fn value(settings: &Pinned<'_>, stage: usize, from: usize, end: usize, replicas: u32, workers_after: u32) -> f64 {
    let space = &settings.line.space;
    let rule = || settings.flow.in_flight(Position { replicas, workers_after });
    let in_flight = settings.caps.map_or_else(rule, |caps| caps[stage]);
    let first = settings.caps.map_or(settings.flow.workers, |caps| caps[0]);
    let multiples = Multiples {
        in_flight,
        versions: settings.flow.versions(in_flight, first),
        optimizer_state: settings.optimizer_state,
        schedule: settings.flow.schedule,
    };
    let total = settings.line.holdings(from, end).held(&multiples).total;
    if settings.least_memory {
        return total as f64;
    }
    if settings.memory_limit.is_some_and(|limit| total > limit) {
        return f64::INFINITY;
    }
    let part = Part {
        is_first: from == 0,
        is_last: end + 1 == space.len(),
        replicas,
        inner_us: space.compute[end] - space.compute[from],
        weight_bytes: space.weights[end] - space.weights[from],
        in_bytes: space.cut[from],
        out_bytes: space.cut[end],
    };
    settings.cost.part_us(&settings.level, &part)
}
