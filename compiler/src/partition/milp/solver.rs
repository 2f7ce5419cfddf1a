//! The MILP solver behind good_lp: microlp (pure Rust), or HiGHS with the feature `highs`.
//!
//! Work is limited by search-tree nodes, which is reproducible. Simplex may cycle on ill-conditioned programs, so there
//! is also a wall-clock limit; an answer stopped by it says so.

use good_lp::{Constraint, ProblemVariables, Variable};
use std::time::Duration;

pub struct Program {
    pub variables: ProblemVariables,
    pub rows: Vec<Constraint>,
    pub least: Variable,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Nodes of the search tree besides the root.
    pub nodes: u64,
    pub clock: Duration,
}

/// The less reproducible, the later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ended {
    /// The solution is optimal, or the program is infeasible.
    Proven,
    Nodes,
    Failed,
    Clock,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Values in the order in which variables were added; `None` if no solution was found.
    pub values: Option<Vec<f64>>,
    /// Lower bound on the objective: infinite if infeasible, 0 if nothing was proven.
    pub bound: f64,
    pub nodes: u64,
    pub ended: Ended,
}

impl Answer {
    fn nothing(ended: Ended) -> Answer {
        let bound = if ended == Ended::Proven { f64::INFINITY } else { 0.0 };
        Answer { values: None, bound, nodes: 0, ended }
    }
}

/// Solves a program whose variables and optimum are non-negative.
pub fn solve(program: Program, limits: &Limits) -> Answer {
    // The solvers contain assertions that rounding can violate; such a panic counts as a numerical failure.
    let solved = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| within(program, limits)));
    solved.unwrap_or_else(|_| Answer::nothing(Ended::Failed))
}

#[cfg(not(feature = "highs"))]
fn within(program: Program, limits: &Limits) -> Answer {
    use good_lp::SolverModel;
    use microlp::{Error, SolveOptions, TerminationReason};

    let mut model = program.variables.minimise(program.least).using(good_lp::microlp);
    for row in program.rows {
        model.add_constraint(row);
    }
    // good_lp does not expose a node limit; microlp does.
    let mut options = SolveOptions::default();
    options.node_limit = Some(limits.nodes);
    options.time_limit = Some(limits.clock);
    let outcome = match model.as_inner().solve_with(options) {
        Ok(outcome) => outcome,
        Err(Error::Infeasible) => return Answer::nothing(Ended::Proven),
        Err(_) => return Answer::nothing(Ended::Failed),
    };
    let stats = outcome.stats();
    let ended = match outcome.termination_reason() {
        TerminationReason::ProvenOptimal => Ended::Proven,
        TerminationReason::NodeLimit => Ended::Nodes,
        TerminationReason::TimeLimit => Ended::Clock,
        _ => Ended::Failed,
    };
    let values = outcome.solution().map(|solution| solution.iter().map(|(_, value)| value).collect());
    // An LP stopped by the clock has a value but no bound.
    let bound = if ended == Ended::Clock && stats.nodes_solved == 0 { 0.0 } else { stats.best_bound.unwrap_or(0.0) };
    Answer { values, bound: bound.max(0.0), nodes: stats.nodes_solved, ended }
}

#[cfg(feature = "highs")]
fn within(program: Program, limits: &Limits) -> Answer {
    use good_lp::{ResolutionError, Solution, SolutionStatus, SolverModel};

    let all: Vec<Variable> = program.variables.iter_variables_with_def().map(|(variable, _)| variable).collect();
    let mut model = program.variables.minimise(program.least).using(good_lp::highs);
    for row in program.rows {
        model.add_constraint(row);
    }
    let nodes = i32::try_from(limits.nodes).unwrap_or(i32::MAX);
    let model = model
        .set_threads(1)
        .set_time_limit(limits.clock.as_secs_f64())
        .set_option("random_seed", 0)
        .set_option("mip_max_nodes", nodes)
        .set_option("mip_rel_gap", 0.0)
        .set_option("mip_abs_gap", 0.0);
    match model.solve() {
        Ok(solution) => {
            let values: Vec<f64> = all.iter().map(|&variable| solution.value(variable)).collect();
            let is_proven = matches!(solution.status(), SolutionStatus::Optimal);
            let bound = if is_proven { solution.value(program.least).max(0.0) } else { 0.0 };
            // HiGHS does not report which limit it reached; the clock is the weaker claim.
            let ended = if is_proven { Ended::Proven } else { Ended::Clock };
            Answer { values: Some(values), bound, nodes: limits.nodes, ended }
        }
        Err(ResolutionError::Infeasible) => Answer::nothing(Ended::Proven),
        // Returned if a limit is reached before any solution is found.
        Err(ResolutionError::Other("NoSolutionFound")) => Answer::nothing(Ended::Clock),
        Err(_) => Answer::nothing(Ended::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use good_lp::{Expression, variable};

    const LIMITS: Limits = Limits { nodes: 1000, clock: Duration::from_secs(60) };

    /// Distribute items to two bins so that the heavier bin is as light as possible.
    fn bins(weights: &[f64], most: f64) -> Program {
        let mut variables = ProblemVariables::new();
        let least = variables.add(variable().min(0.0).max(most));
        let mut first = Expression::default();
        let mut second = Expression::default();
        for &weight in weights {
            let item = variables.add(variable().binary());
            first.add_mul(weight, item);
            second.add_mul(-weight, item);
            second += weight;
        }
        Program { variables, rows: vec![first.leq(least), second.leq(least)], least }
    }

    #[test]
    fn the_best_is_found_and_proven() {
        let answer = solve(bins(&[3.0, 3.0, 2.0, 2.0, 2.0], 12.0), &LIMITS);
        assert_eq!(answer.ended, Ended::Proven);
        assert!((answer.bound - 6.0).abs() < 1e-9, "{answer:?}");
        let values = answer.values.unwrap();
        let first: f64 = values[1..].iter().zip([3.0, 3.0, 2.0, 2.0, 2.0]).map(|(x, w)| x * w).sum();
        assert_eq!(first, 6.0);
    }

    #[test]
    fn what_cannot_be_is_proven_too() {
        let answer = solve(bins(&[3.0, 3.0, 2.0, 2.0, 2.0], 5.9), &LIMITS);
        assert_eq!((answer.ended, answer.values, answer.bound), (Ended::Proven, None, f64::INFINITY));
    }

    #[test]
    fn node_limit_is_reported_and_leaves_a_bound() {
        let weights: Vec<f64> = (0..30).map(|at| 1.0 + f64::from(at * 37 % 29) / 31.0).collect();
        let answer = solve(bins(&weights, 1e3), &Limits { nodes: 0, ..LIMITS });
        assert_eq!((answer.ended, answer.nodes), (Ended::Nodes, 0));
        let half = weights.iter().sum::<f64>() / 2.0;
        assert!(answer.bound <= half * (1.0 + 1e-9), "{answer:?}");
        assert!(cfg!(feature = "highs") || answer.bound >= half * (1.0 - 1e-9), "{answer:?}");
    }
}
