//! The integer program of one choice of replicas: which op stands before which cut.
//!
//! ```text
//! minimise T
//!   y(v,c) in {0,1}        op v stands in one of the first c stages, 0 < c < stages;  y(v,0) = 0,  y(v,stages) = 1
//!   y(v,c) <= y(v,c+1)     stages follow each other
//!   y(v,c) <= y(u,c)       where v reads u: what precedes an op of the first stages is in them too
//!   x(v,s) = y(v,s+1) - y(v,s)                           op v stands in stage s;  sum over v of x(v,s) >= 1
//! paper        sum t_v x(v,s) <= m T       2 (m-1) / B sum w_v x(v,s) <= m T        2 / B sum a_e z(e,c) <= T
//! pipedream    sum t_v x(v,s) + 4 (m-1) / (B m) sum w_v x(v,s) <= m T               2 / (B m r) sum out_v g(v,c) <= T
//! pipec        k_m max( C_s, q_m R_s, sum over its messages + q_m R_s ) + what fills and drains <= T
//! memory       every size of `plan/memory` times what it is held for <= limit
//! ```
//!
//! | equation | here |
//! | --- | --- |
//! | y | `Formulation::before` |
//! | T | `Program::least`, in units of `Scope::unit_us` |
//! | m, B, r | replicas of stage s, bytes per microsecond, the compression ratio |
//! | z(e,c) >= y(u,c) - y(v,c) | tensor e of op u is read by some v beyond cut c |
//! | g(v,c) | PipeDream charges the outputs of v at cut c, see `cut_bytes` |
//! | k_m, q_m, C_s, R_s | as in `outlook` |
//!
//! Cumulative y say more to the relaxation than x would, and a program of them branches on cuts. All other variables cost
//! something wherever they occur, so they are as small as they may be, and need not be integer. An op whose predecessors alone
//! fill the first c stages beyond the time that is known cannot stand in them: such y are constants.

use crate::partition::milp::choices::Choice;
use crate::partition::milp::solver::Program;
use crate::plan::caps::Flow;
use crate::plan::links::Wire;
use crate::plan::memory::{Holdings, Multiples};
use crate::plan::outlook::Asked;
use crate::plan::problem::{CostModel, Problem};
use crate::plan::stage_cost;
use crate::profile::cost_graph::{OpCost, OpId};
use good_lp::{Constraint, Expression, IntoAffineExpression, ProblemVariables, Variable, variable};

/// What is the same for every choice.
pub struct Scope<'a> {
    /// The problem, on one level.
    pub problem: &'a Problem,
    /// How items flow under cost `pipec`.
    pub asked: Asked,
    /// What decides how many weight versions are held.
    pub flow: Flow,
    /// Microseconds that count as 1 in the programs.
    pub unit_us: f64,
    /// The most that T may be, in that unit.
    pub most: f64,
    /// The part of the room below which a size is left out. Programs with fewer small numbers are easier on the solver and never
    /// stricter: what none of them allows is not there.
    pub finest: f64,
    /// Ops and the stages that they are pinned to.
    pub pins: &'a [(u32, usize)],
    /// Where cuts are given: the stage of each op.
    pub fixed: Option<&'a [usize]>,
    /// The graph's order.
    pub order: &'a Order,
}

/// Who precedes whom.
pub struct Order {
    /// Microseconds of each op for one item, without recomputation.
    times: Vec<f64>,
    /// Of all that precede an op and itself, and of all that follow it and itself.
    head: Vec<f64>,
    tail: Vec<f64>,
    /// For each op a bit for all that precede it, itself included.
    above: Vec<Vec<u64>>,
    /// Pairs of an op and one that reads it, but for those that follow from others.
    edges: Vec<(usize, usize)>,
    /// The ops that read each op, as in `edges`.
    next: Vec<Vec<usize>>,
    /// All ops that read each op.
    readers: Vec<Vec<usize>>,
}

impl Order {
    /// The order of a problem's graph.
    pub fn of(problem: &Problem, asked: &Asked) -> Order {
        let ops = problem.graph.ops.len();
        let mut readers = vec![Vec::new(); ops];
        let mut reads = vec![Vec::new(); ops];
        for (from, to) in problem.graph.edges() {
            readers[from.index()].push(to.index());
            reads[to.index()].push(from.index());
        }
        let mut above: Vec<Vec<u64>> = Vec::with_capacity(ops);
        let mut edges = Vec::new();
        for (op, reads) in reads.iter().enumerate() {
            let mut set = vec![0u64; ops.div_ceil(64)];
            for &from in reads {
                above[from].iter().zip(&mut set).for_each(|(word, set)| *set |= word);
            }
            let follows = |from: &&usize| reads.iter().any(|other| other != *from && has(&above[*other], **from));
            edges.extend(reads.iter().filter(|from| !follows(from)).map(|&from| (from, op)));
            set[op / 64] |= 1 << (op % 64);
            above.push(set);
        }
        let mut next = vec![Vec::new(); ops];
        edges.iter().for_each(|&(from, to)| next[from].push(to));
        let trains = problem.cost != CostModel::Pipec || asked.trains();
        let time = |op: &OpCost| op.fwd_us + if trains { op.bwd_us } else { 0.0 };
        let times: Vec<f64> = problem.graph.ops.iter().map(time).collect();
        let sum = |of: &dyn Fn(usize) -> bool| (0..ops).filter(|&op| of(op)).map(|op| times[op]).sum::<f64>();
        let head = (0..ops).map(|op| sum(&|other| has(&above[op], other))).collect();
        let tail = (0..ops).map(|op| sum(&|other| has(&above[other], op))).collect();
        Order { times, head, tail, above, edges, next, readers }
    }

    fn precedes(&self, op: usize, later: usize) -> bool {
        has(&self.above[later], op)
    }

    /// Those of `ops` that none of the others follows.
    fn last(&self, ops: &[usize]) -> Vec<usize> {
        let is_last = |op: &&usize| !ops.iter().any(|other| other != *op && self.precedes(**op, *other));
        ops.iter().filter(is_last).copied().collect()
    }
}

fn has(set: &[u64], op: usize) -> bool {
    set[op / 64] >> (op % 64) & 1 == 1
}

/// Whether an op stands before a cut.
#[derive(Clone, Copy)]
enum Before {
    Never,
    Always,
    /// By this variable, which is the so-manieth.
    Free(Variable, usize),
}

/// A program under way.
pub struct Formulation<'a> {
    scope: &'a Scope<'a>,
    choice: &'a Choice,
    variables: ProblemVariables,
    rows: Vec<Constraint>,
    least: Variable,
    /// `before[c - 1][v]` is y(v,c).
    before: Vec<Vec<Before>>,
    /// Bytes per microsecond, and microseconds before the first byte arrives.
    wire: Wire,
}

impl<'a> Formulation<'a> {
    /// Writes down the program of one choice; `None` where it is plain that no partition obeys it.
    pub fn of(scope: &'a Scope<'a>, choice: &'a Choice) -> Option<Formulation<'a>> {
        let mut variables = ProblemVariables::new();
        let least = variables.add(variable().min(0.0).max(scope.most));
        let wire = Wire::of(&scope.problem.cluster.levels, 0);
        let mut program = Formulation { scope, choice, variables, rows: Vec::new(), least, before: Vec::new(), wire };
        program.place()?;
        program.follow();
        match scope.problem.cost {
            CostModel::Paper => program.paper(),
            CostModel::Pipedream => program.pipedream(),
            CostModel::Pipec => program.pipec(),
            CostModel::Load => return None,
        }
        if let Some(limit) = scope.problem.memory_limit {
            program.memory(limit.0 as f64);
        }
        Some(program)
    }

    /// Variables and rows.
    pub fn size(&self) -> (usize, usize) {
        (self.variables.len(), self.rows.len())
    }

    /// The program, and what its solutions mean.
    pub fn into_parts(self) -> (Program, Meaning) {
        let meaning = Meaning { ops: self.ops(), before: self.before };
        (Program { variables: self.variables, rows: self.rows, least: self.least }, meaning)
    }

    fn ops(&self) -> usize {
        self.scope.problem.graph.ops.len()
    }

    fn stages(&self) -> usize {
        self.choice.replicas.len()
    }

    /// How often the item of a stage's replica counts in T: k_m.
    fn weight(&self, stage: usize) -> f64 {
        let replicas = self.choice.replicas[stage];
        match self.scope.problem.cost {
            CostModel::Pipec => self.scope.asked.weight(replicas),
            _ => 1.0 / f64::from(replicas),
        }
    }

    /// Time of an op in a stage, in the unit.
    fn time(&self, op: usize, stage: usize) -> f64 {
        let again = if self.choice.recompute[stage] { self.scope.problem.graph.ops[op].fwd_us } else { 0.0 };
        (self.scope.order.times[op] + again) / self.scope.unit_us
    }

    /// Adds the y, as constants where they have no choice.
    fn place(&mut self) -> Option<()> {
        let (ops, stages) = (self.ops(), self.stages());
        if ops < stages {
            return None;
        }
        let order = self.scope.order;
        // What the stages before and after each cut can do in the time that is known, and a little more.
        let most_us = self.scope.most * self.scope.unit_us * (1.0 + 1e-9);
        let of = |stage| if self.weight(stage) > 0.0 { most_us / self.weight(stage) } else { f64::INFINITY };
        let room: Vec<f64> = (0..stages).map(of).collect();
        let mut before = Vec::with_capacity(stages.saturating_sub(1));
        for cut in 1..stages {
            let (room_before, room_after): (f64, f64) = (room[..cut].iter().sum(), room[cut..].iter().sum());
            let mut row = Vec::with_capacity(ops);
            for op in 0..ops {
                let fixed = self.scope.fixed.map(|stage_of| stage_of[op] < cut);
                let is_pinned = |early: bool| {
                    let related = |pinned: usize| match early {
                        true => order.precedes(op, pinned),
                        false => order.precedes(pinned, op),
                    };
                    self.scope.pins.iter().any(|&(pin, stage)| related(pin as usize) && (stage < cut) == early)
                };
                let always = order.tail[op] > room_after || is_pinned(true) || fixed == Some(true);
                let never = order.head[op] > room_before || is_pinned(false) || fixed == Some(false);
                row.push(match (always, never) {
                    (true, true) => return None,
                    (true, false) => Before::Always,
                    (false, true) => Before::Never,
                    (false, false) => {
                        let at = self.variables.len();
                        Before::Free(self.variables.add(variable().binary()), at)
                    }
                });
            }
            before.push(row);
        }
        self.before = before;
        Some(())
    }

    /// Adds `factor` y(op, cut).
    fn add_before(&self, sum: &mut Expression, factor: f64, op: usize, cut: usize) {
        let before = match cut {
            0 => Before::Never,
            cut if cut == self.stages() => Before::Always,
            cut => self.before[cut - 1][op],
        };
        match before {
            Before::Never => {}
            Before::Always => *sum += factor,
            Before::Free(variable, _) => sum.add_mul(factor, variable),
        }
    }

    /// Adds `factor` x(op, stage).
    fn add_inside(&self, sum: &mut Expression, factor: f64, op: usize, stage: usize) {
        self.add_before(sum, factor, op, stage + 1);
        self.add_before(sum, -factor, op, stage);
    }

    /// A variable that is at least every one of these sums, and at least 0.
    fn at_least(&mut self, sums: Vec<Expression>) -> Variable {
        let most = self.variables.add(variable().min(0.0));
        for sum in sums {
            self.keep(sum.leq(most));
        }
        most
    }

    /// Adds a row, unless nothing in it is free.
    fn keep(&mut self, row: Constraint) {
        let is_free = row.expression().linear_coefficients().into_iter().next().is_some();
        if is_free || row.expression().constant() > 1e-9 {
            self.rows.push(row);
        }
    }

    /// A factor of something that is 0 or 1, in a sum of such things that must not exceed `room`: nothing where it hardly counts, and
    /// no more than what is too much anyway, so that a program never has numbers of very different size.
    fn factor(&self, factor: f64, room: f64) -> Option<f64> {
        (factor > room * self.scope.finest).then(|| factor.min(2.0 * room))
    }

    fn follow(&mut self) {
        for cut in 1..self.stages() {
            for op in 0..self.ops() {
                if cut + 1 < self.stages() {
                    let mut row = Expression::default();
                    self.add_before(&mut row, 1.0, op, cut);
                    self.add_before(&mut row, -1.0, op, cut + 1);
                    self.keep(row.leq(0.0));
                }
            }
            for at in 0..self.scope.order.edges.len() {
                let (from, to) = self.scope.order.edges[at];
                let mut row = Expression::default();
                self.add_before(&mut row, 1.0, to, cut);
                self.add_before(&mut row, -1.0, from, cut);
                self.keep(row.leq(0.0));
            }
        }
        for stage in 0..self.stages() {
            let mut row = Expression::from(1.0);
            for op in 0..self.ops() {
                self.add_inside(&mut row, -1.0, op, stage);
            }
            self.keep(row.leq(0.0));
        }
    }

    /// The sum over the ops of a stage of what each has of something, as far as `room` lets it matter.
    fn sum(&self, stage: usize, room: f64, of: impl Fn(usize) -> f64) -> Expression {
        let mut sum = Expression::default();
        for op in 0..self.ops() {
            if let Some(factor) = self.factor(of(op), room) {
                self.add_inside(&mut sum, factor, op, stage);
            }
        }
        sum
    }

    fn paper(&mut self) {
        let per_byte = 1.0 / (self.wire_alone() * self.scope.unit_us);
        let graph = &self.scope.problem.graph;
        for stage in 0..self.stages() {
            let m = f64::from(self.choice.replicas[stage]);
            let room = m * self.scope.most;
            let compute = self.sum(stage, room, |op| self.time(op, stage));
            self.keep((compute - m * self.least).leq(0.0));
            let weights = self.sum(stage, room, |op| 2.0 * (m - 1.0) * per_byte * graph.ops[op].param_bytes as f64);
            self.keep((weights - m * self.least).leq(0.0));
        }
        for cut in 1..self.stages() {
            let mut sum = Expression::default();
            for tensor in &graph.tensors {
                let readers: Vec<usize> = tensor.consumers.iter().map(|to| to.index()).collect();
                let factor = self.factor(2.0 * per_byte * tensor.bytes as f64, self.scope.most);
                if let (Some(factor), false) = (factor, readers.is_empty()) {
                    let readers = self.scope.order.last(&readers);
                    let crosses = self.leaves(tensor.producer.index(), &readers, cut);
                    sum.add_mul(factor, crosses);
                }
            }
            self.keep((sum - self.least).leq(0.0));
        }
    }

    fn pipedream(&mut self) {
        let per_byte = 1.0 / (self.wire_alone() * self.scope.unit_us);
        let graph = &self.scope.problem.graph;
        for stage in 0..self.stages() {
            let m = f64::from(self.choice.replicas[stage]);
            let of =
                |op: usize| self.time(op, stage) + 4.0 * (m - 1.0) / m * per_byte * graph.ops[op].param_bytes as f64;
            let stage = self.sum(stage, m * self.scope.most, of);
            self.keep((stage - m * self.least).leq(0.0));
        }
        let Some(ratio) = self.scope.problem.activation_compression else { return };
        for cut in 1..self.stages() {
            // A cut is charged to the stage after it and, but for the first stage, to the one before it.
            let before = if cut == 1 { u32::MAX } else { self.choice.replicas[cut - 1] };
            let m = f64::from(before.min(self.choice.replicas[cut]));
            let mut sum = Expression::default();
            for op in 0..self.ops() {
                let bytes = graph.ops[op].out_bytes as f64;
                if let Some(factor) = self.factor(2.0 / (m * ratio) * per_byte * bytes, self.scope.most) {
                    let charged = self.charged(op, cut);
                    sum.add_mul(factor, charged);
                }
            }
            self.keep((sum - self.least).leq(0.0));
        }
    }

    /// Bytes per microsecond of the one level, whatever `Wire` makes of those below it.
    fn wire_alone(&self) -> f64 {
        stage_cost::levels(&self.scope.problem.cluster)[0].bytes_per_us
    }

    /// Whether op stands before the cut and one of these beyond it.
    fn leaves(&mut self, op: usize, readers: &[usize], cut: usize) -> Expression {
        let mut sums = Vec::with_capacity(readers.len());
        for &reader in readers {
            let mut sum = Expression::default();
            self.add_before(&mut sum, 1.0, op, cut);
            self.add_before(&mut sum, -1.0, reader, cut);
            sums.push(sum);
        }
        match sums.pop() {
            // It is never below 0, since a reader follows what it reads.
            Some(alone) if sums.is_empty() => alone,
            Some(last) => {
                sums.push(last);
                self.at_least(sums).into()
            }
            None => Expression::default(),
        }
    }

    /// Whether PipeDream charges an op at a cut: it has no reader before it, or one beyond it, or readers that do not all lead to the
    /// same ops without a reader before it.
    fn charged(&mut self, op: usize, cut: usize) -> Expression {
        let order = self.scope.order;
        let readers = &order.readers[op];
        if readers.is_empty() {
            let mut inside = Expression::default();
            self.add_before(&mut inside, 1.0, op, cut);
            return inside;
        }
        let mut sums = Vec::new();
        for reader in order.last(readers) {
            let mut sum = Expression::default();
            self.add_before(&mut sum, 1.0, op, cut);
            self.add_before(&mut sum, -1.0, reader, cut);
            sums.push(sum);
        }
        for last in 0..self.ops() {
            let leads = readers.iter().filter(|reader| order.precedes(**reader, last)).count();
            if leads > 0 && leads < readers.len() {
                let mut sum = Expression::default();
                self.add_before(&mut sum, 1.0, last, cut);
                for &reader in &order.next[last] {
                    self.add_before(&mut sum, -1.0, reader, cut);
                }
                sums.push(sum);
            }
        }
        match <[Expression; 1]>::try_from(sums) {
            Ok([alone]) => alone,
            Err(sums) => self.at_least(sums).into(),
        }
    }

    fn pipec(&mut self) {
        let asked = self.scope.asked;
        let (comes_in, goes_out) = self.messages();
        // T is the busiest stage's item, and under a flush what fills and drains as well.
        let (busiest, reduced) = match asked.adds() {
            true => (self.variables.add(variable().min(0.0)), self.variables.add(variable().min(0.0))),
            false => (self.least, self.least),
        };
        let mut way = Expression::default();
        for (stage, (comes_in, goes_out)) in comes_in.into_iter().zip(goes_out).enumerate() {
            let replicas = self.choice.replicas[stage];
            let (k, q) = (asked.weight(replicas), asked.reduces(replicas));
            let compute = self.sum(stage, self.room(), |op| self.time(op, stage));
            let reduce = self.reduce(stage);
            if asked.adds() {
                way += compute.clone();
                way.add_mul(if asked.trains() { 2.0 } else { 1.0 }, comes_in.clone());
                self.keep((reduce.clone() - reduced).leq(0.0));
            }
            let carried = match asked.trains() {
                true => vec![comes_in + goes_out + q * reduce],
                false => vec![comes_in, goes_out],
            };
            for item in carried.into_iter().chain([compute]).filter(|_| k > 0.0) {
                self.keep((k * item - busiest).leq(0.0));
            }
        }
        if asked.adds() {
            self.keep((busiest + way + reduced - self.least).leq(0.0));
        }
    }

    /// More than an item of any stage may take under cost `pipec`.
    fn room(&self) -> f64 {
        if self.scope.asked.adds() {
            return self.scope.most;
        }
        let slowest = (0..self.stages()).map(|stage| self.weight(stage)).fold(f64::INFINITY, f64::min);
        self.scope.most / slowest
    }

    /// For each stage the time of all messages of one item that come into it, and of all that go out of it.
    ///
    /// A tensor is sent once to each stage that reads it, from the stage that makes it, and the tensors between two stages are one
    /// message.
    fn messages(&mut self) -> (Vec<Expression>, Vec<Expression>) {
        let (stages, room) = (self.stages(), self.room());
        let per_byte = 1.0 / (self.wire.bytes_per_us * self.scope.unit_us);
        let latency = self.factor(self.wire.latency_us / self.scope.unit_us, room);
        let mut comes_in = vec![Expression::default(); stages];
        let mut goes_out = vec![Expression::default(); stages];
        for to in 1..stages {
            let mut any: Vec<Vec<Expression>> = vec![Vec::new(); to];
            for tensor in &self.scope.problem.graph.tensors {
                let factor = self.factor(per_byte * tensor.bytes as f64, room);
                if tensor.consumers.is_empty() || (factor.is_none() && latency.is_none()) {
                    continue;
                }
                let mut all = Expression::default();
                for from in 0..to {
                    let sent = self.variables.add(variable().min(0.0).max(1.0));
                    let mut row = Expression::from(sent);
                    self.add_inside(&mut row, -1.0, tensor.producer.index(), from);
                    self.keep(row.leq(0.0));
                    all += sent;
                    any[from].push(sent.into());
                    comes_in[to].add_mul(factor.unwrap_or(0.0), sent);
                    goes_out[from].add_mul(factor.unwrap_or(0.0), sent);
                }
                for reader in &tensor.consumers {
                    let mut row = -all.clone();
                    self.add_inside(&mut row, 1.0, reader.index(), to);
                    self.add_inside(&mut row, -1.0, tensor.producer.index(), to);
                    self.keep(row.leq(0.0));
                }
            }
            for (from, sums) in any.into_iter().enumerate() {
                if let Some(latency) = latency {
                    let is_sent = self.at_least(sums);
                    comes_in[to].add_mul(latency, is_sent);
                    goes_out[from].add_mul(latency, is_sent);
                }
            }
        }
        (comes_in, goes_out)
    }

    /// The all-reduce of a stage in the unit: 2 (m-1) l + 2 (m-1) / m w / B; each parameter counts once in every stage that uses it.
    fn reduce(&mut self, stage: usize) -> Expression {
        let m = f64::from(self.choice.replicas[stage]);
        if m < 2.0 || !self.scope.asked.trains() {
            return Expression::default();
        }
        let unit_us = self.scope.unit_us;
        let per_byte = 2.0 * (m - 1.0) / m / (self.wire.bytes_per_us * unit_us);
        let mut sum = self.parameters(stage, per_byte, self.room());
        sum += 2.0 * (m - 1.0) * self.wire.latency_us / unit_us;
        sum
    }

    /// The bytes of the parameters that a stage uses, times `factor`.
    fn parameters(&mut self, stage: usize, factor: f64, room: f64) -> Expression {
        let mut sum = Expression::default();
        for param in &self.scope.problem.graph.params {
            let Some(factor) = self.factor(factor * param.bytes as f64, room) else { continue };
            match &param.users[..] {
                [] => {}
                [user] => self.add_inside(&mut sum, factor, user.index(), stage),
                users => {
                    let inside = |user: &OpId| {
                        let mut inside = Expression::default();
                        self.add_inside(&mut inside, 1.0, user.index(), stage);
                        inside
                    };
                    let inside = users.iter().map(inside).collect();
                    let is_used = self.at_least(inside);
                    sum.add_mul(factor, is_used);
                }
            }
        }
        sum
    }

    /// What a replica of each stage holds is within the limit. What a byte of each kind adds is asked of `Holdings::held`, which is
    /// linear but for the rounding of optimizer state.
    fn memory(&mut self, limit: f64) {
        const MANY: u64 = 1 << 40;
        let problem = self.scope.problem;
        for stage in 0..self.stages() {
            let in_flight = self.choice.caps[stage];
            let multiples = Multiples {
                in_flight,
                versions: self.scope.flow.versions(in_flight, self.choice.caps[0]),
                replicas: self.choice.replicas[stage],
                recompute: self.choice.recompute[stage],
                optimizer_state: problem.optimizer_state,
                schedule: problem.schedule,
            };
            let each = |holdings: Holdings| holdings.held(&multiples).total as f64 / MANY as f64 / limit;
            let none = Holdings::default();
            let mut sum = self.parameters(stage, each(Holdings { weights: MANY, ..none }), 1.0);
            let saved = each(Holdings { saved: MANY, ..none });
            sum += self.sum(stage, 1.0, |op| saved * problem.graph.ops[op].kept_bytes() as f64);
            let (input, output, sent) = (
                each(Holdings { inputs: MANY, ..none }),
                each(Holdings { outputs: MANY, ..none }),
                each(Holdings { sent: MANY, ..none }),
            );
            for (at, tensor) in problem.graph.tensors.iter().enumerate() {
                let bytes = tensor.bytes as f64;
                let output = output + if problem.graph.is_only_sent(at) { sent } else { 0.0 };
                for (factor, comes_in) in [(input * bytes, true), (output * bytes, false)] {
                    let Some(factor) = self.factor(factor, 1.0) else { continue };
                    let crosses = self.crosses(at, stage, comes_in);
                    sum.add_mul(factor, crosses);
                }
            }
            let each_op = each(Holdings { workspace: MANY, ..none });
            let mut scratch = Vec::new();
            for op in 0..self.ops() {
                let bytes = problem.graph.ops[op].scratch_bytes() as f64;
                if let Some(factor) = self.factor(each_op * bytes, 1.0) {
                    let mut one = Expression::default();
                    self.add_inside(&mut one, factor, op, stage);
                    scratch.push(one);
                }
            }
            sum += self.at_least(scratch);
            // Sums of many sizes are not exact to the last bit, and what fits exactly fits.
            self.keep(sum.leq(1.0 + 1e-9));
        }
    }

    /// Whether a tensor comes into a stage from another, or goes out of it.
    fn crosses(&mut self, tensor: usize, stage: usize, comes_in: bool) -> Expression {
        let tensor = &self.scope.problem.graph.tensors[tensor];
        let mut sums = Vec::with_capacity(tensor.consumers.len());
        for reader in &tensor.consumers {
            let mut sum = Expression::default();
            let sign = if comes_in { 1.0 } else { -1.0 };
            self.add_inside(&mut sum, sign, reader.index(), stage);
            self.add_inside(&mut sum, -sign, tensor.producer.index(), stage);
            sums.push(sum);
        }
        if sums.is_empty() { Expression::default() } else { self.at_least(sums).into() }
    }
}

/// What the values of a solution mean.
pub struct Meaning {
    before: Vec<Vec<Before>>,
    ops: usize,
}

impl Meaning {
    /// The ops of each stage, ascending; `None` where a stage has none.
    pub fn stages(&self, values: &[f64]) -> Option<Vec<Vec<u32>>> {
        let is_before = |before: &Before| match *before {
            Before::Never => false,
            Before::Always => true,
            Before::Free(_, at) => values.get(at).is_some_and(|value| *value > 0.5),
        };
        let mut stages = vec![Vec::new(); self.before.len() + 1];
        for op in 0..self.ops {
            let first = self.before.iter().position(|cut| is_before(&cut[op]));
            stages[first.unwrap_or(self.before.len())].push(op as u32);
        }
        stages.iter().all(|stage| !stage.is_empty()).then_some(stages)
    }
}
