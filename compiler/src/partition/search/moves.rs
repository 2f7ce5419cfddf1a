//! Changes of one cut, of one device, of two stages or of one limit: the steps of `improve`.

use crate::partition::search::build_plan;
use crate::partition::search::evaluate::Stages;
use crate::partition::search::linear_order;
use crate::partition::search::starts::{Layout, Order};
use crate::plan::problem::Problem;

/// The most micro-batches in flight beyond the rule of a schedule without a flush.
pub const MOST_WITHOUT_FLUSH: u32 = 10;

pub struct Moves<'a> {
    pub problem: &'a Problem,
    pub orders: &'a [Order],
    /// What may change besides the cuts: replicas, and limits on micro-batches in flight.
    pub has_free_replicas: bool,
    pub has_free_limits: bool,
}

impl Moves<'_> {
    /// The most micro-batches in flight beyond the schedule's rule.
    pub fn most_more(&self) -> u32 {
        if self.problem.schedule.flushes() { self.problem.microbatches } else { MOST_WITHOUT_FLUSH }
    }

    /// All moves.
    pub fn of(&self, layout: &Layout) -> Vec<Stages> {
        let mut moves = Vec::new();
        if self.has_free_limits {
            let last_waits = !self.problem.schedule.flushes();
            limit_moves(&layout.stages, self.most_more(), last_waits, &mut moves);
        }
        self.cuts(layout, &mut moves);
        if self.problem.cluster.is_mixed() {
            swap_moves(&layout.stages, &mut moves);
        }
        if self.has_free_replicas {
            self.device_moves(layout, &mut moves);
            self.stage_moves(layout, &mut moves);
            self.turn_moves(layout, &mut moves);
        }
        moves
    }

    pub fn cuts(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let cuts = &self.orders[layout.order].cuts;
        for at in 1..layout.stages.ends.len() - 1 {
            let Ok(place) = cuts.binary_search(&layout.stages.ends[at]) else { continue };
            let mut step = 1;
            while step < cuts.len() {
                for moved in [place.checked_sub(step), place.checked_add(step)].into_iter().flatten() {
                    let Some(&end) = cuts.get(moved) else { continue };
                    if end > layout.stages.ends[at - 1] && end < layout.stages.ends[at + 1] {
                        let mut ends = layout.stages.ends.clone();
                        ends[at] = end;
                        moves.push(Stages { ends, ..layout.stages.clone() });
                    }
                }
                step *= 2;
            }
        }
    }

    fn idle(&self, layout: &Layout) -> u32 {
        self.problem.cluster.devices().saturating_sub(layout.stages.replicas.iter().sum())
    }

    /// A layout with other replicas: with the same cuts, and with balanced ones.
    fn push_with(&self, layout: &Layout, ends: Vec<usize>, replicas: Vec<u32>, moves: &mut Vec<Stages>) {
        let more = vec![layout.stages.more.iter().copied().max().unwrap_or(0); replicas.len()];
        let of = |ends: Vec<usize>| Stages { ends, replicas: replicas.clone(), firsts: None, more: more.clone() };
        let balanced = linear_order::balanced(&self.problem.graph, &self.orders[layout.order].ops, &replicas);
        moves.push(of(ends));
        if balanced.len() == replicas.len() + 1 {
            moves.push(of(balanced));
        }
    }

    fn device_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let own = &layout.stages.replicas;
        let mut push = |to: Option<usize>, from: Option<usize>| {
            let mut replicas = own.clone();
            to.into_iter().for_each(|to| replicas[to] += 1);
            from.into_iter().for_each(|from| replicas[from] -= 1);
            self.push_with(layout, layout.stages.ends.clone(), replicas, moves);
        };
        let givers = || (0..own.len()).filter(|from| own[*from] > 1);
        for to in 0..own.len() {
            if self.idle(layout) > 0 {
                push(Some(to), None);
            }
            givers().filter(|from| *from != to).for_each(|from| push(Some(to), Some(from)));
        }
        givers().for_each(|from| push(None, Some(from)));
    }

    fn stage_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let (stages, idle) = (layout.stages.replicas.len(), self.idle(layout));
        for at in 0..stages.saturating_sub(1) {
            let mut ends = layout.stages.ends.clone();
            ends.remove(at + 1);
            let mut replicas = layout.stages.replicas.clone();
            let later = replicas.remove(at + 1);
            replicas[at] += later;
            self.push_with(layout, ends.clone(), replicas.clone(), moves);
            replicas[at] -= later.min(replicas[at] - 1);
            self.push_with(layout, ends, replicas, moves);
        }
        if self.problem.constraints.most_stages.is_some_and(|most| stages as u32 >= most) {
            return;
        }
        for at in (0..stages).filter(|at| layout.stages.ends[at + 1] - layout.stages.ends[*at] > 1) {
            let have = layout.stages.replicas[at] + idle;
            let halves = [(have.div_ceil(2), have / 2), (have.saturating_sub(1), 1), (1, have.saturating_sub(1))];
            for (first, second) in halves.into_iter().filter(|(first, second)| *first > 0 && *second > 0) {
                let mut replicas = layout.stages.replicas.clone();
                replicas[at] = first;
                replicas.insert(at + 1, second);
                let mut ends = layout.stages.ends.clone();
                ends.insert(at + 1, self.middle(layout, at, first, second));
                self.push_with(layout, ends, replicas, moves);
            }
        }
    }

    /// The same stages around the cluster, so that the first and the last are neighbours: they may share a tied parameter.
    fn turn_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let cluster = &self.problem.cluster;
        if cluster.levels.len() < 2 || self.idle(layout) > 0 {
            return;
        }
        let devices = cluster.devices();
        let firsts = build_plan::firsts(&layout.stages.replicas);
        for &start in &firsts {
            let turned: Vec<u32> = firsts.iter().map(|first| (first + devices - start) % devices).collect();
            let firsts = (start > 0).then_some(turned);
            if firsts != layout.stages.firsts {
                moves.push(Stages { firsts, ..layout.stages.clone() });
            }
        }
    }

    /// Where a stage is cut in proportion to the devices of its parts.
    fn middle(&self, layout: &Layout, at: usize, first: u32, second: u32) -> usize {
        let (from, to) = (layout.stages.ends[at], layout.stages.ends[at + 1]);
        let order = &self.orders[layout.order].ops;
        let us = |op: &u32| {
            let op = &self.problem.graph.ops[*op as usize];
            op.fwd_us + op.bwd_us
        };
        let wanted = order[from..to].iter().map(us).sum::<f64>() * f64::from(first) / f64::from(first + second);
        let mut sum = 0.0;
        for (place, op) in order.iter().enumerate().take(to - 1).skip(from) {
            sum += us(op);
            if sum >= wanted {
                return place + 1;
            }
        }
        to - 1
    }
}

/// Two stages of equally many replicas exchange their devices.
fn swap_moves(stages: &Stages, moves: &mut Vec<Stages>) {
    let firsts = stages.firsts.clone().unwrap_or_else(|| build_plan::firsts(&stages.replicas));
    for one in 0..firsts.len() {
        for other in (0..one).filter(|other| stages.replicas[*other] == stages.replicas[one]) {
            let mut firsts = firsts.clone();
            firsts.swap(one, other);
            moves.push(Stages { firsts: Some(firsts), ..stages.clone() });
        }
    }
}

/// One micro-batch more in flight, at one stage or at all; with `last_waits` also at the last stage.
fn limit_moves(stages: &Stages, most: u32, last_waits: bool, moves: &mut Vec<Stages>) {
    let count = stages.more.len();
    let mut push = |more: Vec<u32>| {
        if more.iter().all(|more| *more <= most) {
            moves.push(Stages { more, ..stages.clone() });
        }
    };
    if count < 2 {
        return;
    }
    let waiting = if last_waits { count } else { count - 1 };
    for raised in count - 1..=waiting {
        push((0..count).map(|at| stages.more[at] + u32::from(at < raised)).collect());
    }
    for at in 0..waiting {
        let mut more = stages.more.clone();
        more[at] += 1;
        push(more);
    }
}
