//! Rows of the integer program for the time of stages and links, per cost model. The head of `formulation` gives the
//! equations.

use crate::partition::milp::formulation::Formulation;
use crate::partition::search::build_plan;
use crate::plan::stage_cost;
use crate::profile::cost_graph::ParamCost;
use good_lp::{Expression, Variable, variable};

impl Formulation<'_> {
    pub(super) fn paper(&mut self) {
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

    pub(super) fn pipedream(&mut self) {
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
            // A cut is charged to the stage after it and, except for the first stage, to the one before it.
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

    /// Bytes per microsecond of the level itself; `Wire` also includes the levels below.
    fn wire_alone(&self) -> f64 {
        stage_cost::levels(&self.scope.problem.cluster)[0].bytes_per_us
    }

    /// 1 if `op` is before the cut and one of `readers` beyond it, otherwise 0.
    fn leaves(&mut self, op: usize, readers: &[usize], cut: usize) -> Expression {
        let sums = readers.iter().map(|&reader| self.apart(op, reader, cut)).collect();
        self.any(sums)
    }

    /// The largest of these sums. A single one is never negative, because a reader follows what it reads.
    fn any(&mut self, sums: Vec<Expression>) -> Expression {
        match <[Expression; 1]>::try_from(sums) {
            Ok([alone]) => alone,
            Err(sums) => self.at_least(sums).into(),
        }
    }

    /// 1 if PipeDream charges an op at a cut: it has no reader before the cut, or one beyond it, or its readers do
    /// not all lead to the same frontier ops.
    fn charged(&mut self, op: usize, cut: usize) -> Expression {
        let order = self.scope.order;
        let readers = &order.readers[op];
        if readers.is_empty() {
            let mut inside = Expression::default();
            self.add_before(&mut inside, 1.0, op, cut);
            return inside;
        }
        let mut sums: Vec<Expression> =
            order.last(readers).into_iter().map(|reader| self.apart(op, reader, cut)).collect();
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
        self.any(sums)
    }

    /// The last bucket of an all-reduce after a flush, and the exchange of gradients that more than two stages share, are
    /// not linear. Their terms are smaller here, which only relaxes the program.
    pub(super) fn pipec(&mut self) {
        let asked = self.scope.asked;
        let adds = asked.adds();
        let (comes_in, goes_out) = self.messages();
        // T is the time of the busiest stage; with flushes plus fill and drain time.
        let busiest = if adds { self.variables.add(variable().min(0.0)) } else { self.least };
        let (mut ways, mut reduces) = (Vec::new(), Vec::new());
        // What passes in the backward of the last micro-batch before it ends in a stage.
        let mut before = Expression::default();
        for (stage, (comes_in, goes_out)) in comes_in.into_iter().zip(goes_out).enumerate() {
            let replicas = self.choice.replicas[stage];
            let (k, q) = (asked.weight(replicas), asked.reduces(replicas));
            let compute = self.sum(stage, self.room(), |op| self.time(op, stage));
            let reduce = self.reduce(stage);
            let tied = self.tied(stage);
            if adds {
                before += comes_in.clone();
                reduces.push(reduce.clone() + tied.clone() - self.overlap(stage) - before.clone());
                before += self.backward(stage);
                ways.push((compute.clone(), if asked.trains() { 2.0 } else { 1.0 } * comes_in.clone()));
            }
            let carried = match asked.trains() {
                true => vec![comes_in + goes_out + q * reduce],
                false => vec![comes_in, goes_out],
            };
            for item in carried.into_iter().chain([compute + q * tied]).filter(|_| k > 0.0) {
                self.keep((k * item - busiest).leq(0.0));
            }
        }
        if adds {
            let reduced = self.at_least(reduces);
            let held = self.held(busiest, &ways);
            let way = ways.into_iter().map(|(compute, comes_in)| compute + comes_in).sum::<Expression>();
            self.keep((busiest + held + way + reduced - self.least).leq(0.0));
        }
    }

    /// The exchange of gradients of tied parameters, at least that of two stages.
    fn tied(&mut self, stage: usize) -> Expression {
        if !self.scope.asked.trains() {
            return Expression::default();
        }
        let (unit_us, wire) = (self.scope.unit_us, self.wire);
        let of = |param: &ParamCost| (2.0 * wire.latency_us + param.sum_bytes as f64 / wire.bytes_per_us) / unit_us;
        self.shared(stage, self.room(), of)
    }

    /// H: waits for micro-batches in flight. `ways` are compute and incoming messages of each stage.
    fn held(&mut self, busiest: Variable, ways: &[(Expression, Expression)]) -> Variable {
        let asked = &self.scope.asked;
        let caps = build_plan::caps(self.scope.problem, &self.choice.replicas);
        let mut sums = Vec::new();
        let mut way = Expression::default();
        for (stage, (compute, comes_in)) in ways.iter().enumerate().rev() {
            way += compute.clone();
            let (replicas, cap) = (self.choice.replicas[stage], caps[stage]);
            let rounds = f64::from(asked.holds(replicas, cap));
            if rounds > 0.0 {
                let pace = f64::from(cap.max(1)) / asked.weight(replicas).max(1.0);
                sums.push(rounds * (way.clone() - pace * busiest));
            }
            way += comes_in.clone();
        }
        self.at_least(sums)
    }

    /// The largest part of the all-reduce that may overlap with the last backward: none if it is one bucket.
    fn overlap(&self, stage: usize) -> Expression {
        let problem = self.scope.problem;
        let sums: f64 = problem.graph.params.iter().map(|param| param.sum_bytes as f64).sum();
        if sums <= self.scope.asked.bucket_bytes { Expression::default() } else { self.backward(stage) }
    }

    fn backward(&self, stage: usize) -> Expression {
        let graph = &self.scope.problem.graph;
        let forward = |op: usize| graph.ops[op].fwd_us / self.scope.unit_us / self.choice.paces[stage];
        // Terms that are too large for a plan are not cut here: they would make the program too strict.
        let mut sum = Expression::default();
        for op in 0..self.ops() {
            self.add_inside(&mut sum, self.time(op, stage) - forward(op), op, stage);
        }
        sum
    }

    /// Upper bound on a micro-batch's time in any stage under cost model `pipec`.
    fn room(&self) -> f64 {
        if self.scope.asked.adds() {
            return self.scope.most;
        }
        let slowest = (0..self.stages()).map(|stage| self.weight(stage)).fold(f64::INFINITY, f64::min);
        self.scope.most / slowest
    }

    /// For each stage the time of its incoming and of its outgoing messages per micro-batch.
    ///
    /// A tensor is sent once to each stage that reads it, directly from its producer. All tensors between two stages
    /// form one message.
    fn messages(&mut self) -> (Vec<Expression>, Vec<Expression>) {
        let (stages, room) = (self.stages(), self.room());
        let per_byte = 1.0 / (self.wire.bytes_per_us * self.scope.unit_us);
        let latency = self.factor(self.wire.latency_us / self.scope.unit_us, room);
        // The first stage receives nothing.
        let mut comes_in = vec![Expression::default()];
        let mut goes_out = vec![Expression::default(); stages];
        for to in 1..stages {
            let mut arrives = Expression::default();
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
                    arrives.add_mul(factor.unwrap_or(0.0), sent);
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
                    arrives.add_mul(latency, is_sent);
                    goes_out[from].add_mul(latency, is_sent);
                }
            }
            comes_in.push(arrives);
        }
        (comes_in, goes_out)
    }

    /// All-reduce time of a stage: 2 (m-1) l + 2 (m-1) / m w / B. A parameter counts once in every stage that uses it.
    fn reduce(&mut self, stage: usize) -> Expression {
        let m = f64::from(self.choice.replicas[stage]);
        if m < 2.0 || !self.scope.asked.trains() {
            return Expression::default();
        }
        let unit_us = self.scope.unit_us;
        let per_byte = 2.0 * (m - 1.0) / m / (self.wire.bytes_per_us * unit_us);
        let mut sum = self.parameters(stage, self.room(), |param| per_byte * param.bytes as f64);
        sum += 2.0 * (m - 1.0) * self.wire.latency_us / unit_us;
        sum
    }
}
