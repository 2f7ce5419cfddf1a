//! The judge of plans: works out coverage, order, devices, edges, memory and time of any plan from the definitions.
//!
//! It shares no code with any partitioner, nor the cost functions and memory sums they use: everything is written here a second
//! time, plainly. A plan that leaves the planner has passed it, and a plan that was written by hand can be given to it.

use crate::cluster::Cluster;
use crate::plan::judge;
use crate::plan::problem::{CostModel, Problem};
use crate::plan::{Plan, ScheduleKind, Stage, StageMemory};
use crate::profile::cost_graph::{CostGraph, OpId};
use std::collections::BTreeMap;

/// One fault of a plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// No stages.
    #[error("the plan has no stages")]
    NoStages,
    /// A stage whose id is not its place.
    #[error("stages[{index}] has id {id}")]
    Id {
        /// Place in the list.
        index: usize,
        /// Its id.
        id: u32,
    },
    /// A range that is empty, reversed, out of the model, or not ascending.
    #[error("stage {stage}: op range [{from}, {to}) is empty, out of order, or beyond the {ops} ops of the model")]
    Range {
        /// The stage.
        stage: usize,
        /// Start.
        from: u32,
        /// End.
        to: u32,
        /// Ops of the model.
        ops: usize,
    },
    /// An op in no stage or in two.
    #[error("op {op} is in {count} stages")]
    Coverage {
        /// The op.
        op: usize,
        /// How many stages hold it.
        count: u32,
    },
    /// An op apart from the op whose stage it shares.
    #[error("op {op} is in stage {stage}, op {with}, to which it belongs, in stage {other}")]
    Apart {
        /// The op.
        op: usize,
        /// Its stage.
        stage: usize,
        /// The op it joins.
        with: u32,
        /// The stage of that.
        other: usize,
    },
    /// A tensor that goes backward.
    #[error("tensor `{tensor}` goes from stage {from} back to stage {to}")]
    Backward {
        /// Its name.
        tensor: String,
        /// Stage that makes it.
        from: usize,
        /// Stage that reads it.
        to: usize,
    },
    /// Devices that are not one for each replica, or do not exist, or are used twice.
    #[error("stage {stage}: {what}")]
    Devices {
        /// The stage.
        stage: usize,
        /// What is wrong.
        what: String,
    },
    /// A place in the levels that makes no sense.
    #[error("stage {stage}: hierarchy: {what}")]
    Hierarchy {
        /// The stage.
        stage: usize,
        /// What is wrong.
        what: String,
    },
    /// Lists of the schedule that do not have one entry for each stage, or caps of 0.
    #[error("schedule: {what}")]
    Schedule {
        /// What is wrong.
        what: String,
    },
    /// An edge that is missing, too much, or wrong.
    #[error("edge {from} -> {to}: the plan says {said}, the model makes {found}")]
    Edge {
        /// From stage.
        from: u32,
        /// To stage.
        to: u32,
        /// What the plan says.
        said: String,
        /// What the model makes.
        found: String,
    },
    /// A figure that does not come out.
    #[error("{what}: the plan says {said}, it is {found}")]
    Figure {
        /// Which figure.
        what: String,
        /// What the plan says.
        said: String,
        /// What was worked out.
        found: String,
    },
    /// A stage that does not fit.
    #[error("stage {stage} needs {needed} bytes on each device, the limit is {limit}")]
    Memory {
        /// The stage.
        stage: usize,
        /// Bytes it needs.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
    },
}

/// What the judge worked out.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    /// Time of the slowest stage or link for one minibatch, in microseconds.
    pub minibatch_us: f64,
    /// What sets it, by words.
    pub bottleneck: String,
    /// Memory of each stage.
    pub memory: Vec<StageMemory>,
}

/// The largest relative difference between a time in a plan and the same time worked out again.
pub const TOLERANCE: f64 = 1e-9;

/// Judges `plan` as an answer to `problem`. Gives every fault that can be told apart.
pub fn check(problem: &Problem, plan: &Plan) -> Result<Checked, Vec<Fault>> {
    let mut faults = Vec::new();
    let stage_of = coverage(&problem.graph, plan, &mut faults);
    devices(&problem.cluster, plan, &mut faults);
    schedule(plan, &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    edges(&problem.graph, plan, &stage_of, &mut faults);
    let memory = memory(problem, plan, &stage_of);
    for (at, (stage, found)) in plan.stages.iter().zip(&memory).enumerate() {
        if stage.memory != *found {
            let what = format!("memory of stage {at}");
            faults.push(Fault::Figure { what, said: format!("{:?}", stage.memory), found: format!("{found:?}") });
        }
        if let Some(limit) = problem.memory_limit.filter(|limit| found.total > limit.0) {
            faults.push(Fault::Memory { stage: at, needed: found.total, limit: limit.0 });
        }
    }
    stage_times(&problem.graph, plan, &stage_of, &mut faults);
    let (minibatch_us, bottleneck) = match problem.cost {
        CostModel::Pipec => judge::time(problem, plan, &stage_of),
        CostModel::Paper | CostModel::Pipedream | CostModel::Load => time(problem, plan, &stage_of, &mut faults),
    };
    if differs(plan.predicted.minibatch_us, minibatch_us) {
        let said = plan.predicted.minibatch_us.to_string();
        faults.push(Fault::Figure { what: "predicted.minibatch_us".into(), said, found: minibatch_us.to_string() });
    }
    if faults.is_empty() { Ok(Checked { minibatch_us, bottleneck, memory }) } else { Err(faults) }
}

/// What the stages of `plan` come to by the same reckoning, whatever figures it states: for stages that no planner has chosen. Its
/// edges and times are not looked at, and a stage that is too large is no fault here.
pub fn reckon(problem: &Problem, plan: &Plan) -> Result<Checked, Vec<Fault>> {
    let mut faults = Vec::new();
    let stage_of = coverage(&problem.graph, plan, &mut faults);
    devices(&problem.cluster, plan, &mut faults);
    schedule(plan, &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    let (minibatch_us, bottleneck) = match problem.cost {
        CostModel::Pipec => judge::time(problem, plan, &stage_of),
        CostModel::Paper | CostModel::Pipedream | CostModel::Load => time(problem, plan, &stage_of, &mut faults),
    };
    let memory = memory(problem, plan, &stage_of);
    if faults.is_empty() { Ok(Checked { minibatch_us, bottleneck, memory }) } else { Err(faults) }
}

fn differs(said: f64, found: f64) -> bool {
    let close = (said - found).abs() <= TOLERANCE * said.abs().max(found.abs()).max(1e-6);
    !close
}

fn coverage(graph: &CostGraph, plan: &Plan, faults: &mut Vec<Fault>) -> Vec<usize> {
    let ops = graph.ops.len();
    let mut stage_of = vec![usize::MAX; ops];
    let mut count = vec![0u32; ops];
    if plan.stages.is_empty() {
        faults.push(Fault::NoStages);
    }
    for (index, stage) in plan.stages.iter().enumerate() {
        if stage.id.index() != index {
            faults.push(Fault::Id { index, id: stage.id.0 });
        }
        let mut before = 0;
        for &(from, to) in &stage.ops {
            if from >= to || to as usize > ops || from < before {
                faults.push(Fault::Range { stage: index, from, to, ops });
                continue;
            }
            before = to;
            for op in from..to {
                count[op as usize] += 1;
                stage_of[op as usize] = index;
            }
        }
        if stage.ops.is_empty() {
            faults.push(Fault::Range { stage: index, from: 0, to: 0, ops });
        }
    }
    let wrong = count.iter().enumerate().filter(|(_, count)| **count != 1);
    faults.extend(wrong.take(16).map(|(op, &count)| Fault::Coverage { op, count }));
    if faults.is_empty() {
        for (op, cost) in graph.ops.iter().enumerate() {
            if let Some(with) = cost.joins.filter(|with| stage_of[with.index()] != stage_of[op]) {
                let (stage, other) = (stage_of[op], stage_of[with.index()]);
                faults.push(Fault::Apart { op, stage, with: with.0, other });
            }
        }
        for tensor in &graph.tensors {
            let from = stage_of[tensor.producer.index()];
            for to in tensor.consumers.iter().map(|to| stage_of[to.index()]).filter(|&to| to < from) {
                faults.push(Fault::Backward { tensor: tensor.name.escape_debug().to_string(), from, to });
            }
        }
    }
    stage_of
}

fn devices(cluster: &Cluster, plan: &Plan, faults: &mut Vec<Fault>) {
    let mut user = vec![None; cluster.devices() as usize];
    for (at, stage) in plan.stages.iter().enumerate() {
        let mut fault = |what| faults.push(Fault::Devices { stage: at, what });
        if stage.replicas == 0 || stage.devices.len() != stage.replicas as usize {
            fault(format!("{} devices for {} replicas", stage.devices.len(), stage.replicas));
        }
        for &device in &stage.devices {
            match user.get_mut(device as usize) {
                None => fault(format!("device {device} does not exist; the cluster has {}", cluster.devices())),
                Some(Some(other)) => fault(format!("device {device} is used by stage {other} too")),
                Some(free) => *free = Some(at),
            }
        }
        let product = stage.hierarchy.iter().fold(1u64, |p, place| p.saturating_mul(u64::from(place.replicas)));
        if product != u64::from(stage.replicas) {
            fault(format!("the levels multiply to {product} replicas, the stage has {}", stage.replicas));
        }
    }
}

fn schedule(plan: &Plan, faults: &mut Vec<Fault>) {
    let schedule = &plan.schedule;
    for (name, list) in [("in_flight", &schedule.in_flight), ("weight_versions", &schedule.weight_versions)] {
        if list.len() != plan.stages.len() || list.contains(&0) {
            let what = format!("{name} is {list:?} for {} stages; one number of at least 1 each", plan.stages.len());
            faults.push(Fault::Schedule { what });
        }
    }
    let wanted: Vec<u32> = match schedule.kind {
        ScheduleKind::RoundRobin => schedule.in_flight.clone(),
        ScheduleKind::RoundRobinVsync => {
            let first = schedule.in_flight.first().copied().unwrap_or(1);
            schedule.in_flight.iter().map(|&cap| cap.max(first)).collect()
        }
        ScheduleKind::TwoBw => vec![2; plan.stages.len()],
        _ => vec![1; plan.stages.len()],
    };
    if faults.is_empty() && schedule.weight_versions != wanted {
        let said = format!("{:?}", schedule.weight_versions);
        faults.push(Fault::Figure { what: "schedule.weight_versions".into(), said, found: format!("{wanted:?}") });
    }
}

fn edges(graph: &CostGraph, plan: &Plan, stage_of: &[usize], faults: &mut Vec<Fault>) {
    let mut found: BTreeMap<(u32, u32), (u64, Vec<&str>)> = BTreeMap::new();
    for tensor in &graph.tensors {
        let from = stage_of[tensor.producer.index()];
        let mut targets: Vec<usize> = tensor.consumers.iter().map(|to| stage_of[to.index()]).collect();
        targets.sort_unstable();
        targets.dedup();
        for to in targets.into_iter().filter(|&to| to != from) {
            let edge = found.entry((from as u32, to as u32)).or_default();
            edge.0 += tensor.bytes;
            edge.1.push(&tensor.name);
        }
    }
    let mut said: BTreeMap<(u32, u32), (u64, Vec<&str>)> = BTreeMap::new();
    for edge in &plan.edges {
        let names = edge.tensors.iter().map(String::as_str).collect();
        if said.insert((edge.from.0, edge.to.0), (edge.bytes, names)).is_some() {
            let (said, found) = ("the edge twice".to_string(), "it once".to_string());
            faults.push(Fault::Edge { from: edge.from.0, to: edge.to.0, said, found });
        }
    }
    let text = |edge: Option<&(u64, Vec<&str>)>| match edge {
        Some((bytes, names)) => format!("{} tensors of {bytes} bytes", names.len()),
        None => "no edge".to_string(),
    };
    for key in found.keys().chain(said.keys().filter(|key| !found.contains_key(key))) {
        let (mut left, mut right) = (said.get(key).cloned(), found.get(key).cloned());
        for side in [&mut left, &mut right].into_iter().flatten() {
            side.1.sort_unstable();
        }
        if left != right {
            faults.push(Fault::Edge { from: key.0, to: key.1, said: text(left.as_ref()), found: text(right.as_ref()) });
        }
    }
}

fn memory(problem: &Problem, plan: &Plan, stage_of: &[usize]) -> Vec<StageMemory> {
    let graph = &problem.graph;
    let mut weights = vec![0u64; plan.stages.len()];
    let mut alive = vec![0u64; plan.stages.len()];
    let mut workspace = vec![0u64; plan.stages.len()];
    let mut received = vec![0u64; plan.stages.len()];
    let mut sent = vec![0u64; plan.stages.len()];
    let mut only_sent = vec![0u64; plan.stages.len()];
    for param in &graph.params {
        let mut stages: Vec<usize> = param.users.iter().map(|op| stage_of[op.index()]).collect();
        stages.sort_unstable();
        stages.dedup();
        stages.into_iter().for_each(|stage| weights[stage] = weights[stage].saturating_add(param.bytes));
    }
    for (op, &stage) in graph.ops.iter().zip(stage_of) {
        alive[stage] += op.saved_bytes + op.fed_bytes;
        workspace[stage] = workspace[stage].max(op.workspace_bytes + op.live_bytes);
    }
    for tensor in &graph.tensors {
        let mut stages: Vec<usize> = tensor.consumers.iter().map(|op| stage_of[op.index()]).collect();
        stages.sort_unstable();
        stages.dedup();
        let from = stage_of[tensor.producer.index()];
        stages.retain(|&to| to != from);
        stages.iter().for_each(|&to| received[to] = received[to].saturating_add(tensor.bytes));
        if !stages.is_empty() {
            sent[from] = sent[from].saturating_add(tensor.bytes);
            if graph.ops[tensor.producer.index()].unsaved {
                only_sent[from] = only_sent[from].saturating_add(tensor.bytes);
            }
        }
    }
    let trains = plan.schedule.kind != ScheduleKind::Inference;
    let one = |stage: usize| {
        let weights = weights[stage];
        let versions = weights.saturating_mul(u64::from(plan.schedule.weight_versions[stage]) - 1);
        let copies = if plan.stages[stage].replicas > 1 { 3 } else { 2 };
        let gradients = if trains { weights.saturating_mul(copies) } else { 0 };
        let optimizer = if trains { (weights as f64 * problem.optimizer_state).ceil() as u64 } else { 0 };
        let waiting = received[stage].saturating_add(only_sent[stage]);
        let in_flight = u64::from(plan.schedule.in_flight[stage]);
        let activations = match plan.stages[stage].recompute {
            true => {
                let both = received[stage].saturating_add(sent[stage]);
                both.saturating_mul(in_flight).saturating_add(alive[stage]).saturating_add(sent[stage])
            }
            false => alive[stage].saturating_add(waiting).saturating_mul(in_flight),
        };
        let messages = match trains {
            true => received[stage].saturating_mul(2).saturating_add(sent[stage]),
            false => received[stage],
        };
        let workspace = workspace[stage];
        let sum = [versions, gradients, optimizer, activations, messages, workspace];
        let total = sum.iter().fold(weights, |sum, &part| sum.saturating_add(part));
        StageMemory { weights, versions, gradients, optimizer, activations, messages, workspace, total }
    };
    (0..plan.stages.len()).map(one).collect()
}

fn stage_times(graph: &CostGraph, plan: &Plan, stage_of: &[usize], faults: &mut Vec<Fault>) {
    let mut forward = vec![0.0; plan.stages.len()];
    let mut backward = vec![0.0; plan.stages.len()];
    for (op, &stage) in graph.ops.iter().zip(stage_of) {
        forward[stage] += op.fwd_us;
        backward[stage] += op.bwd_us;
    }
    for (at, stage) in plan.stages.iter().enumerate() {
        if stage.recompute {
            backward[at] += forward[at];
        }
        for (name, said, found) in [("fwd_us", stage.fwd_us, forward[at]), ("bwd_us", stage.bwd_us, backward[at])] {
            if differs(said, found) {
                let what = format!("{name} of stage {at}");
                faults.push(Fault::Figure { what, said: said.to_string(), found: found.to_string() });
            }
        }
    }
}

/// Works out the time of nested groups, outermost level first.
struct Clock<'a> {
    problem: &'a Problem,
    cluster: Cluster,
    stages: &'a [Stage],
    stage_of: &'a [usize],
    faults: &'a mut Vec<Fault>,
}

fn time(problem: &Problem, plan: &Plan, stage_of: &[usize], faults: &mut Vec<Fault>) -> (f64, String) {
    let levels = problem.cluster.levels.len();
    let depth = plan.stages.first().map_or(0, |stage| stage.hierarchy.len());
    if let Some(stage) = plan.stages.iter().position(|stage| stage.hierarchy.len() != depth) {
        faults.push(Fault::Hierarchy { stage, what: "not as deep as that of stage 0".into() });
        return (0.0, String::new());
    }
    let cluster = match depth {
        1 if levels > 1 => problem.cluster.flattened(),
        _ if depth == levels => problem.cluster.clone(),
        _ => {
            faults.push(Fault::Hierarchy { stage: 0, what: format!("{depth} places for {levels} levels") });
            return (0.0, String::new());
        }
    };
    let mut clock = Clock { problem, cluster, stages: &plan.stages, stage_of, faults };
    clock.span(depth - 1, 0, plan.stages.len())
}

impl Clock<'_> {
    /// Time of the stages [from, to), which fill one member of the level above `level`, and what sets it.
    fn span(&mut self, level: usize, from: usize, to: usize) -> (f64, String) {
        let mut worst = (0.0, String::new());
        let (mut start, mut group, mut units) = (from, 0u32, 0u64);
        while start < to {
            let place = self.stages[start].hierarchy[level];
            let end = (start..to).find(|&at| self.stages[at].hierarchy[level].group != place.group).unwrap_or(to);
            if place.group != group {
                let what = format!("group {} where group {group} comes next", place.group);
                self.faults.push(Fault::Hierarchy { stage: start, what });
            }
            if (start..end).any(|at| self.stages[at].hierarchy[level].replicas != place.replicas) {
                let what = format!("the stages of group {group} do not agree on its replicas");
                self.faults.push(Fault::Hierarchy { stage: start, what });
            }
            let time = self.group(level, from, start, end, place.replicas);
            if worst.1.is_empty() || time.0 > worst.0 {
                worst = time;
            }
            units += u64::from(place.replicas);
            group += 1;
            start = end;
        }
        let count = self.cluster.levels[level].count;
        if units > u64::from(count) {
            let what = format!("the groups take {units} of the {count} members of level {level}");
            self.faults.push(Fault::Hierarchy { stage: from, what });
        }
        worst
    }

    /// Time of one group, the stages [start, end), in a span that begins at stage `from`.
    fn group(&mut self, level: usize, from: usize, start: usize, end: usize, replicas: u32) -> (f64, String) {
        let (inner, mut what) = if level > 0 {
            self.span(level - 1, start, end)
        } else {
            if end != start + 1 {
                let what = format!("stages {start} to {} share a group of the innermost level", end - 1);
                self.faults.push(Fault::Hierarchy { stage: start, what });
            }
            let ops = self.problem.graph.ops.iter().zip(self.stage_of);
            let compute =
                ops.filter(|(_, stage)| (start..end).contains(*stage)).map(|(op, _)| op.fwd_us + op.bwd_us).sum();
            (compute, format!("compute of stage {start}"))
        };
        let weights: f64 = {
            let ops = self.problem.graph.ops.iter().zip(self.stage_of);
            ops.filter(|(_, stage)| (start..end).contains(*stage)).map(|(op, _)| op.param_bytes as f64).sum()
        };
        let m = f64::from(replicas);
        let bandwidth = self.cluster.levels[level].bandwidth.0 / 1e6;
        let mut links = Vec::new();
        let stage = match self.problem.cost {
            CostModel::Paper => {
                let sync = 2.0 * (m - 1.0) * weights / bandwidth;
                if sync > inner {
                    what = format!("all-reduce of {}", stages(start, end));
                }
                if start > from {
                    links.push((start, 2.0 * self.crossing_tensors(start) / bandwidth));
                }
                inner.max(sync) / m
            }
            CostModel::Load if replicas > 1 => f64::INFINITY,
            CostModel::Load => inner + (self.crossing_tensors(start) + self.crossing_tensors(end)) / bandwidth,
            CostModel::Pipedream => {
                let mut sync = 4.0 * (m - 1.0) * weights / (bandwidth * m);
                if start == from && level > 0 {
                    sync /= f64::from(self.cluster.levels[level - 1].count);
                }
                if sync > inner {
                    what = format!("all-reduce of {}", stages(start, end));
                }
                if let (Some(ratio), true) = (self.problem.activation_compression, start > from) {
                    links.push((start, 2.0 * self.charged_outputs(start) / (bandwidth * m * ratio)));
                    if end < self.stages.len() {
                        links.push((end, 2.0 * self.charged_outputs(end) / (bandwidth * m * ratio)));
                    }
                }
                (inner + sync) / m
            }
            CostModel::Pipec => unreachable!("cost pipec has a reckoning of its own"),
        };
        let mut worst = (stage, what);
        for (cut, time) in links {
            if time > worst.0 {
                worst = (time, format!("transfer between stages {} and {cut}", cut - 1));
            }
        }
        worst
    }

    /// Bytes of all tensors made before stage `cut` and read at or after it, each once.
    fn crossing_tensors(&self, cut: usize) -> f64 {
        let before = |op: usize| self.stage_of[op] < cut;
        let tensors = self.problem.graph.tensors.iter();
        let crossing =
            tensors.filter(|t| before(t.producer.index()) && t.consumers.iter().any(|to| !before(to.index())));
        crossing.map(|tensor| tensor.bytes as f64).sum()
    }

    /// Bytes of all outputs of the ops before stage `cut` that nothing before it reads (the frontier), and of the ops that precede
    /// a frontier op and have a reader that neither precedes it nor is it. An op counts together with those that join it, of which
    /// only what leaves them is charged.
    fn charged_outputs(&self, cut: usize) -> f64 {
        let graph = &self.problem.graph;
        let with = |op: OpId| graph.ops[op.index()].joins.unwrap_or(op).index();
        let mut edges: Vec<(usize, usize)> = graph.edges().iter().map(|(from, to)| (with(*from), with(*to))).collect();
        edges.retain(|(from, to)| from != to);
        edges.sort_unstable();
        edges.dedup();
        let mut out_bytes: Vec<f64> = graph.ops.iter().map(|op| op.out_bytes as f64).collect();
        (0..graph.ops.len()).filter(|&op| graph.ops[op].joins.is_some()).for_each(|op| out_bytes[op] = 0.0);
        for tensor in graph.tensors.iter().filter(|tensor| graph.ops[tensor.producer.index()].joins.is_some()) {
            let joined = with(tensor.producer);
            if tensor.consumers.is_empty() || tensor.consumers.iter().any(|to| with(*to) != joined) {
                out_bytes[joined] += tensor.bytes as f64;
            }
        }
        let before = |op: usize| self.stage_of[op] < cut && graph.ops[op].joins.is_none();
        let mut is_read = vec![false; graph.ops.len()];
        edges.iter().filter(|(_, to)| before(*to)).for_each(|(from, _)| is_read[*from] = true);
        let frontier: Vec<usize> = (0..graph.ops.len()).filter(|&op| before(op) && !is_read[op]).collect();
        let mut charged = vec![false; graph.ops.len()];
        for &last in &frontier {
            charged[last] = true;
            let mut precedes = vec![false; graph.ops.len()];
            precedes[last] = true;
            // Edges are sorted by producer, and producers come before consumers, so one walk from behind is enough.
            for &(from, to) in edges.iter().rev().filter(|(_, to)| *to <= last) {
                precedes[from] |= precedes[to];
            }
            for &(from, to) in &edges {
                charged[from] |= from != last && precedes[from] && !precedes[to];
            }
        }
        out_bytes.iter().zip(charged).filter(|(_, charged)| *charged).map(|(bytes, _)| *bytes).sum()
    }
}

fn stages(start: usize, end: usize) -> String {
    if end == start + 1 { format!("stage {start}") } else { format!("stages {start} to {}", end - 1) }
}
