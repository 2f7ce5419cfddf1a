//! The best partition of a line, or of a few closed sets, whose every stage fits in memory.
//!
//! How much a stage holds depends on how many micro-batches it has in flight, and so on the workers after it. Hence the search
//! goes from the end: when the run [i, j) with m units is put before a suffix that takes w units, all that decides its memory is
//! known exactly, and it is left out if it does not fit.
//!
//! ```text
//! G_k(i, w) = min over j, m' of  max( T_k(i..j, m') if it fits,  G_k(j, w - m') )
//! ```
//!
//! The same search with bytes in the place of T finds the least memory that any partition of the line needs.
//! At inner levels the workers after a span and the copies of it are part of the question, so a table is kept for each.

use crate::partition::line::Line;
use crate::partition::shape::{Body, Group, Shape};
use crate::plan::caps::{First, Flow, Lanes, Position};
use crate::plan::memory::{Holdings, Multiples};
use crate::plan::stage_cost::{LevelCost, Part, StageCost};
use std::collections::HashMap;

/// What is made least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Least {
    /// The time of the slowest part, among partitions in which every stage takes at most so many bytes.
    Time {
        /// Bytes on one device.
        within: u64,
    },
    /// The bytes of the fullest stage.
    Memory,
}

/// The settings of a search.
#[derive(Clone, Copy, Debug)]
pub struct Fit<'a> {
    /// Where it may cut.
    pub line: &'a Line,
    /// Cost model.
    pub cost: &'a StageCost,
    /// Levels, innermost first.
    pub levels: &'a [LevelCost],
    /// What decides how much is in flight; `workers` is a bound.
    pub flow: Flow,
    /// Bytes of optimizer state for each byte of weights.
    pub optimizer_state: f64,
    /// The level of ZeRO of stages with replicas.
    pub zero: u32,
}

/// Finds the partition that makes `least` least, using any number of outermost units and all units of inner levels. Gives its
/// value, microseconds or bytes, or `None` if nothing fits.
pub fn fit(settings: &Fit<'_>, least: Least) -> Option<(f64, Shape)> {
    let outermost = settings.levels.len().checked_sub(1)?;
    let whole = settings.line.space.len() - 1;
    let is_line = (0..whole).all(|at| settings.line.space.nested(at, at + 1));
    let mut search = FitSearch { settings, least, is_line, tables: HashMap::new() };
    let key = Key { level: outermost, to: whole, workers_after: 0, copies: 1 };
    search.prepare(key);
    let units = settings.levels[outermost].count as usize;
    let table = &search.tables[&key];
    let value = |used: usize| table.first[used].value;
    let (best, used) = (1..=units).map(|used| (value(used), used)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    if !best.is_finite() {
        return None;
    }
    Some((best, Shape { groups: search.groups(key, 0, used), is_flat: false }))
}

/// The steps of [`fit`] for a line of so many places, in units of about ten nanoseconds.
pub fn effort(levels: &[LevelCost], places: usize) -> f64 {
    let places = places as f64;
    let Some((outer, inner)) = levels.split_last() else { return 0.0 };
    let pairs = |level: &LevelCost| f64::from(level.count) * (f64::from(level.count) + 1.0) / 2.0;
    let mut spans = 1.0;
    let mut steps = places * places / 2.0 * pairs(outer);
    let mut above = outer;
    for level in inner.iter().rev() {
        spans *= pairs(above) * places;
        steps += spans * places * places / 6.0 * pairs(level);
        above = level;
    }
    steps
}

/// A span of one level: it ends at place `to`, has so many workers after it, and runs in so many copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    level: usize,
    to: usize,
    workers_after: u32,
    copies: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    value: f64,
    /// Where the first part ends, and its units.
    end: usize,
    replicas: usize,
}

/// Entry `from * (units + 1) + used`: the run from place `from` to the end of the span on `used` units.
struct Table {
    /// With the first part being the first of its span.
    first: Vec<Entry>,
    /// With another part before it.
    later: Vec<Entry>,
}

struct FitSearch<'a> {
    settings: &'a Fit<'a>,
    least: Least,
    /// Whether each set contains all before it.
    is_line: bool,
    tables: HashMap<Key, Table>,
}

impl FitSearch<'_> {
    fn prepare(&mut self, key: Key) {
        if self.tables.contains_key(&key) {
            return;
        }
        let units = self.settings.levels[key.level].count as usize;
        let width = units + 1;
        let none = Entry { value: f64::INFINITY, end: 0, replicas: 0 };
        let mut table = Table { first: vec![none; (key.to + 1) * width], later: vec![none; (key.to + 1) * width] };
        table.later[key.to * width].value = 0.0;
        let space = &self.settings.line.space;
        for from in (0..key.to).rev() {
            for end in from + 1..=key.to {
                if !space.nested(from, end) {
                    continue;
                }
                // What the weights and saved tensors alone make too large does not fit with more ops either.
                if self.never_fits(from, end) {
                    if self.is_line {
                        break;
                    }
                    continue;
                }
                for rest in 0..units {
                    let tail = table.later[end * width + rest].value;
                    if tail.is_infinite() {
                        continue;
                    }
                    for replicas in 1..=units - rest {
                        let used = rest + replicas;
                        let at = from * width + used;
                        if tail >= table.first[at].value && tail >= table.later[at].value {
                            continue;
                        }
                        let inner = self.inner(key, from, end, rest, replicas);
                        for (entries, is_first) in [(&mut table.first, true), (&mut table.later, false)] {
                            let value = self.value(key.level, from, end, replicas, is_first, inner).max(tail);
                            if value < entries[at].value {
                                entries[at] = Entry { value, end, replicas };
                            }
                        }
                    }
                }
            }
        }
        self.tables.insert(key, table);
    }

    fn never_fits(&self, from: usize, end: usize) -> bool {
        let Least::Time { within } = self.least else { return false };
        // At inner levels a run may be cut again; its ops fit or do not where they become a stage.
        let alone = Multiples {
            in_flight: 1,
            apart: 0,
            versions: 1,
            // Who shares with many holds least.
            replicas: if self.settings.zero > 0 { u32::MAX } else { 1 },
            recompute: false,
            zero: self.settings.zero,
            optimizer_state: self.settings.optimizer_state,
            schedule: self.settings.flow.schedule,
        };
        self.settings.levels.len() == 1 && {
            // With more ops fewer tensors may go in and out, but no fewer are held inside.
            let inside = Holdings { inputs: 0, outputs: 0, sent: 0, ..*self.settings.line.holdings(from, end) };
            inside.held(&alone).total > within
        }
    }

    /// Microseconds (or bytes) of one unit of the run [from, end), or infinity if it does not fit.
    fn inner(&mut self, key: Key, from: usize, end: usize, rest: usize, replicas: usize) -> f64 {
        if let Some(inner) = self.inner_key(key, end, rest, replicas) {
            self.prepare(inner);
            let units = self.settings.levels[inner.level].count as usize;
            return self.tables[&inner].first[from * (units + 1) + units].value;
        }
        let settings = self.settings;
        let copies = key.copies.saturating_mul(replicas as u32);
        let workers_after = key.workers_after.saturating_add(key.copies.saturating_mul(rest as u32));
        let position = Position { replicas: copies, workers_after };
        let in_flight = settings.flow.in_flight(position);
        let own = Lanes { replicas: copies, in_flight };
        let first = if from == 0 { First::Known(own) } else { First::Unknown };
        let multiples = Multiples {
            in_flight,
            apart: settings.flow.apart(position, in_flight),
            versions: settings.flow.versions(own, first),
            replicas: copies,
            recompute: false,
            zero: settings.zero,
            optimizer_state: settings.optimizer_state,
            schedule: settings.flow.schedule,
        };
        let total = settings.line.holdings(from, end).held(&multiples).total;
        match self.least {
            Least::Memory => total as f64,
            Least::Time { within } if total > within => f64::INFINITY,
            Least::Time { .. } => settings.line.space.compute[end] - settings.line.space.compute[from],
        }
    }

    fn inner_key(&self, key: Key, end: usize, rest: usize, replicas: usize) -> Option<Key> {
        let level = key.level.checked_sub(1)?;
        let unit: u32 = self.settings.levels[..key.level].iter().map(|level| level.count).product();
        let after = key.copies.saturating_mul(unit).saturating_mul(rest as u32);
        Some(Key {
            level,
            to: end,
            workers_after: key.workers_after.saturating_add(after),
            copies: key.copies.saturating_mul(replicas as u32),
        })
    }

    fn value(&self, level: usize, from: usize, end: usize, replicas: usize, is_first: bool, inner: f64) -> f64 {
        if self.least == Least::Memory || inner.is_infinite() {
            return inner;
        }
        let space = &self.settings.line.space;
        let part = Part {
            is_first,
            is_last: end + 1 == space.len(),
            replicas: replicas as u32,
            inner_us: inner,
            weight_bytes: space.weights[end] - space.weights[from],
            in_bytes: space.cut[from],
            out_bytes: space.cut[end],
        };
        self.settings.cost.part_us(&self.settings.levels[level], &part)
    }

    fn groups(&self, key: Key, from: usize, units: usize) -> Vec<Group> {
        let width = self.settings.levels[key.level].count as usize + 1;
        let table = &self.tables[&key];
        let mut groups = Vec::new();
        let (mut at, mut left, mut entries) = (from, units, &table.first);
        while at < key.to {
            let Entry { end, replicas, .. } = entries[at * width + left];
            left -= replicas;
            let body = match self.inner_key(key, end, left, replicas) {
                None => Body::Ops(self.settings.line.space.between(at, end)),
                Some(inner) => {
                    let count = self.settings.levels[inner.level].count as usize;
                    Body::Groups(self.groups(inner, at, count))
                }
            };
            groups.push(Group { replicas: replicas as u32, body });
            at = end;
            entries = &table.later;
        }
        groups
    }
}
