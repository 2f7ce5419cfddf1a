//! The integer program for fixed replica counts: decides for each op which cuts it precedes.
//!
//! ```text
//! minimise T
//!   y(v,c) in {0,1}        op v is in one of the first c stages, 0 < c < stages;  y(v,0) = 0,  y(v,stages) = 1
//!   y(v,c) <= y(v,c+1)     stages are ordered
//!   y(v,c) <= y(u,c)       if v reads u
//!   x(v,s) = y(v,s+1) - y(v,s)                           op v is in stage s;  sum over v of x(v,s) >= 1
//! paper        sum t_v x(v,s) <= m T       2 (m-1) / B sum w_v x(v,s) <= m T        2 / B sum a_e z(e,c) <= T
//! pipedream    sum t_v x(v,s) + 4 (m-1) / (B m) sum w_v x(v,s) <= m T               2 / (B m r) sum out_v g(v,c) <= T
//! pipec        k_m max( C_s, q_m R_s, sum over its messages + q_m R_s ) + fill, drain, H and E <= T
//! memory       every size in `plan/memory` times its multiplier <= limit
//! ```
//!
//! | equation | here |
//! | --- | --- |
//! | y | `Formulation::before` |
//! | T | `Program::least`, in units of `Scope::unit_us` |
//! | m, B, r | replicas of stage s, bytes per microsecond, compression ratio |
//! | z(e,c) >= y(u,c) - y(v,c) | tensor e of op u has a reader v beyond cut c |
//! | g(v,c) | PipeDream charges the outputs of v at cut c, see `cut_bytes` |
//! | k_m, q_m, C_s, R_s, H, E | as in `plan/cost_estimate` |
//!
//! Cumulative variables y give a tighter relaxation than x, and branching on them decides cuts. All other variables
//! only add cost, so they take their smallest value and need not be integer. If the predecessors of an op alone exceed
//! the known time of the first c stages, y is a constant.

use crate::partition::milp::order::Order;
use crate::partition::milp::replica_choices::Choice;
use crate::partition::milp::solver::Program;
use crate::plan::cost_estimate::FlowQuery;
use crate::plan::links::Wire;
use crate::plan::problem::{CostModel, Problem};
use crate::profile::cost_graph::{OpId, ParamCost};
use good_lp::{Constraint, Expression, IntoAffineExpression, ProblemVariables, Variable, variable};

pub struct Scope<'a> {
    /// Must have a single level.
    pub problem: &'a Problem,
    pub asked: FlowQuery,
    /// Microseconds per unit of time in the programs.
    pub unit_us: f64,
    /// Upper bound on T, in that unit.
    pub most: f64,
    /// Terms smaller than this fraction of their row are dropped. That helps the solver numerically and only relaxes
    /// the program, so infeasibility still holds.
    pub finest: f64,
    pub pins: &'a [(u32, usize)],
    /// The stage of each op, if cuts are given.
    pub fixed: Option<&'a [usize]>,
    pub order: &'a Order,
}

#[derive(Clone, Copy)]
enum Before {
    Never,
    Always,
    /// Free; the variable and its index.
    Free(Variable, usize),
}

pub struct Formulation<'a> {
    pub(super) scope: &'a Scope<'a>,
    pub(super) choice: &'a Choice,
    pub(super) variables: ProblemVariables,
    rows: Vec<Constraint>,
    pub(super) least: Variable,
    /// `before[c - 1][v]` is y(v,c).
    before: Vec<Vec<Before>>,
    /// Bandwidth and latency of the level.
    pub(super) wire: Wire,
}

impl<'a> Formulation<'a> {
    /// Builds the program for a replica choice; `None` if it is trivially infeasible.
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
            CostModel::Load | CostModel::Hybrid => return None,
        }
        program.memory();
        Some(program)
    }

    pub fn size(&self) -> (usize, usize) {
        (self.variables.len(), self.rows.len())
    }

    /// The finished program, and the decoder of its solutions.
    pub fn into_parts(self) -> (Program, Meaning) {
        let meaning = Meaning { ops: self.ops(), before: self.before };
        (Program { variables: self.variables, rows: self.rows, least: self.least }, meaning)
    }

    pub(super) fn ops(&self) -> usize {
        self.scope.problem.graph.ops.len()
    }

    pub(super) fn stages(&self) -> usize {
        self.choice.replicas.len()
    }

    /// k_m: factor of a micro-batch's time in T.
    pub(super) fn weight(&self, stage: usize) -> f64 {
        let replicas = self.choice.replicas[stage];
        match self.scope.problem.cost {
            CostModel::Pipec => self.scope.asked.weight(replicas),
            _ => 1.0 / f64::from(replicas),
        }
    }

    /// Time of an op in a stage, in units of T.
    pub(super) fn time(&self, op: usize, stage: usize) -> f64 {
        let again = if self.choice.recompute[stage] { self.scope.problem.graph.ops[op].fwd_us } else { 0.0 };
        (self.scope.order.times[op] + again) / self.scope.unit_us / self.choice.paces[stage]
    }

    /// Adds the y, as constants if they have only one possible value.
    fn place(&mut self) -> Option<()> {
        let (ops, stages) = (self.ops(), self.stages());
        if ops < stages {
            return None;
        }
        let order = self.scope.order;
        // Compute that the stages before and after each cut can do within the known time, with slack for rounding.
        let most_us = self.scope.most * self.scope.unit_us * (1.0 + 1e-9);
        let done = |stage: usize| most_us / self.weight(stage) * self.choice.paces[stage];
        let of = |stage| if self.weight(stage) > 0.0 { done(stage) } else { f64::INFINITY };
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
    pub(super) fn add_before(&self, sum: &mut Expression, factor: f64, op: usize, cut: usize) {
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
    pub(super) fn add_inside(&self, sum: &mut Expression, factor: f64, op: usize, stage: usize) {
        self.add_before(sum, factor, op, stage + 1);
        self.add_before(sum, -factor, op, stage);
    }

    /// y(op, cut) - y(later, cut): 1 if the cut is between the two.
    pub(super) fn apart(&self, op: usize, later: usize, cut: usize) -> Expression {
        let mut sum = Expression::default();
        self.add_before(&mut sum, 1.0, op, cut);
        self.add_before(&mut sum, -1.0, later, cut);
        sum
    }

    /// A variable that is at least 0 and at least each of these sums.
    pub(super) fn at_least(&mut self, sums: Vec<Expression>) -> Variable {
        let most = self.variables.add(variable().min(0.0));
        for sum in sums {
            self.keep(sum.leq(most));
        }
        most
    }

    /// Adds a row, unless it has no variables and holds.
    pub(super) fn keep(&mut self, row: Constraint) {
        let is_free = row.expression().linear_coefficients().next().is_some();
        if is_free || row.expression().constant() > 1e-9 {
            self.rows.push(row);
        }
    }

    /// Scales the coefficient of a 0/1 variable in a sum bounded by `room`. Negligible coefficients are dropped and
    /// large ones capped at twice `room`, to keep the program well-conditioned.
    pub(super) fn factor(&self, factor: f64, room: f64) -> Option<f64> {
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
                let row = self.apart(to, from, cut);
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

    /// Sum of a quantity over the ops of a stage; negligible terms are dropped.
    pub(super) fn sum(&self, stage: usize, room: f64, of: impl Fn(usize) -> f64) -> Expression {
        let mut sum = Expression::default();
        for op in 0..self.ops() {
            if let Some(factor) = self.factor(of(op), room) {
                self.add_inside(&mut sum, factor, op, stage);
            }
        }
        sum
    }

    /// Sum of a quantity over the distinct parameters of a stage; negligible terms are dropped.
    pub(super) fn parameters(&mut self, stage: usize, room: f64, of: impl Fn(&ParamCost) -> f64) -> Expression {
        let params = self.scope.problem.graph.params.iter();
        let values: Vec<(f64, &[OpId])> = params.map(|param| (of(param), &param.users[..])).collect();
        self.read(stage, room, values)
    }

    /// Sum of the bytes of a stage's frozen weights, times `factor`; negligible terms are dropped.
    pub(super) fn frozen(&mut self, stage: usize, room: f64, factor: f64) -> Expression {
        let frozen = self.scope.problem.graph.frozen.iter();
        let values = frozen.map(|frozen| (factor * frozen.bytes as f64, &frozen.users[..])).collect();
        self.read(stage, room, values)
    }

    /// Sum of the values of which a stage has a user.
    fn read(&mut self, stage: usize, room: f64, values: Vec<(f64, &[OpId])>) -> Expression {
        let mut sum = Expression::default();
        for (value, users) in values {
            let Some(factor) = self.factor(value, room) else { continue };
            match users {
                [] => {}
                [user] => self.add_inside(&mut sum, factor, user.index(), stage),
                users => {
                    let inside = self.each_inside(users, stage);
                    let is_used = self.at_least(inside);
                    sum.add_mul(factor, is_used);
                }
            }
        }
        sum
    }

    /// Sum of a quantity over the parameters used in this stage and in others; negligible terms are dropped.
    pub(super) fn shared(&mut self, stage: usize, room: f64, of: impl Fn(&ParamCost) -> f64) -> Expression {
        let mut sum = Expression::default();
        for param in self.scope.problem.graph.params.iter().filter(|param| param.users.len() > 1) {
            let Some(factor) = self.factor(of(param), room) else { continue };
            let inside = self.each_inside(&param.users, stage);
            let outside = inside.iter().map(|inside| Expression::from(1.0) - inside.clone()).collect();
            let (is_used, is_used_outside) = (self.at_least(inside), self.at_least(outside));
            sum.add_mul(factor, is_used);
            sum.add_mul(factor, is_used_outside);
            // used + used outside - 1: at least one of the two is true.
            sum += -factor;
        }
        sum
    }

    /// For each of these ops: x(op, stage).
    fn each_inside(&self, ops: &[OpId], stage: usize) -> Vec<Expression> {
        let inside = |op: &OpId| {
            let mut inside = Expression::default();
            self.add_inside(&mut inside, 1.0, op.index(), stage);
            inside
        };
        ops.iter().map(inside).collect()
    }
}

pub struct Meaning {
    before: Vec<Vec<Before>>,
    ops: usize,
}

impl Meaning {
    /// The ops of each stage, ascending; `None` if a stage is empty.
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
