//! The partitioners, one row each.
//!
//! To add one: a file in `partitioners/`, its module and its row here. The command line and plans take the name from the
//! row.

pub mod enumerate;
pub mod exhaustive;
pub mod one_stage;
pub mod uniform;

use crate::partition::bounds::min_memory;
use crate::partition::milp;
use crate::partition::search::context::SearchContext;
use crate::partition::search::downsets::Growth;
use crate::partition::search::pipec_rules;
use crate::partition::search::result::{PlanCandidate, SearchResult};
use crate::plan::problem::{CostModel, ProblemError};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partitioner {
    /// The best of all searches: all down-sets, any number of devices, stages that need not fill whole groups.
    #[default]
    Pipec,
    /// PipeDream's hierarchical partitioner; always uses all devices.
    Pipedream,
    /// Integer programs that improve the plan of `Pipec` or prove it optimal; one interconnect level only.
    Milp,
    /// Exhaustive enumeration, for small models.
    Exhaustive,
    /// One stage, replicated on every device.
    DataParallel,
    /// A straight pipeline with stages of about equal compute.
    Uniform,
    Single,
}

/// The input of a partitioner.
pub struct Request<'a> {
    pub question: &'a SearchContext<'a>,
    /// Single device, data parallelism, uniform pipeline.
    pub baselines: &'a [PlanCandidate; 3],
    /// True if constraints fix the stages.
    pub is_pinned: bool,
}

/// The orders of unlike devices that a partitioner is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderSearch {
    /// Many: its tables eliminate most orders, and only the best are searched completely.
    Tables,
    /// Few, each searched completely.
    Complete,
    /// All, each searched completely: for small problems.
    All,
    /// Any: there is nothing to search.
    Fixed,
}

pub struct Row {
    pub partitioner: Partitioner,
    /// Name on the command line and in plans.
    pub name: &'static str,
    pub orders: OrderSearch,
    pub find: fn(&Request<'_>) -> Result<SearchResult, ProblemError>,
}

const TABLE: [Row; 7] = [
    Row {
        partitioner: Partitioner::Pipec,
        name: "pipec",
        orders: OrderSearch::Tables,
        find: |request| request.default_search(),
    },
    Row { partitioner: Partitioner::Pipedream, name: "pipedream", orders: OrderSearch::Complete, find: pipedream },
    Row { partitioner: Partitioner::Milp, name: "milp", orders: OrderSearch::Complete, find: milp },
    Row { partitioner: Partitioner::Exhaustive, name: "exhaustive", orders: OrderSearch::All, find: exhaustive },
    Row {
        partitioner: Partitioner::DataParallel,
        name: "data-parallel",
        orders: OrderSearch::Fixed,
        find: baseline::<1>,
    },
    Row { partitioner: Partitioner::Uniform, name: "uniform", orders: OrderSearch::Fixed, find: baseline::<2> },
    Row { partitioner: Partitioner::Single, name: "single", orders: OrderSearch::Fixed, find: baseline::<0> },
];

impl Partitioner {
    pub fn all() -> impl Iterator<Item = Partitioner> {
        TABLE.iter().map(|row| row.partitioner)
    }

    pub fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    pub fn name(self) -> &'static str {
        self.row().name
    }

    pub fn from_name(name: &str) -> Option<Partitioner> {
        Partitioner::all().find(|partitioner| partitioner.name() == name)
    }
}

impl Request<'_> {
    /// The default search. It also answers for the others if the stages are fixed.
    fn default_search(&self) -> Result<SearchResult, ProblemError> {
        match (self.question.problem.cost == CostModel::Pipec, self.is_pinned) {
            (true, _) => pipec_rules::found(self.question, self.baselines),
            (false, true) => self.question.pinned(),
            (false, false) => Ok(self.question.hierarchical(Growth::All, self.baselines)),
        }
    }

    /// True if memory alone proves that nothing fits, so that the report of the default search is enough.
    fn cannot_fit(&self) -> bool {
        let problem = self.question.problem;
        !problem.cluster.is_mixed() && min_memory::proves_none(problem)
    }
}

/// One of the baselines, unless the stages are fixed.
fn baseline<const AT: usize>(request: &Request<'_>) -> Result<SearchResult, ProblemError> {
    match request.is_pinned {
        true => request.default_search(),
        false => Ok(SearchResult::of(request.baselines[AT].clone())),
    }
}

fn pipedream(request: &Request<'_>) -> Result<SearchResult, ProblemError> {
    match request.is_pinned {
        true => request.default_search(),
        false => Ok(request.question.hierarchical(Growth::FirstSource, request.baselines)),
    }
}

fn milp(request: &Request<'_>) -> Result<SearchResult, ProblemError> {
    let known = request.default_search()?;
    match request.cannot_fit() {
        true => Ok(known),
        false => milp::solve::refine(request.question, known),
    }
}

fn exhaustive(request: &Request<'_>) -> Result<SearchResult, ProblemError> {
    let problem = request.question.problem;
    if request.is_pinned || request.cannot_fit() {
        return request.default_search();
    }
    if problem.cost != CostModel::Pipec {
        return request.question.exhaustive();
    }
    let (candidate, states) = enumerate::every(request.question)?;
    let proven_us = candidate.as_ref().filter(|best| best.fits).map(|best| best.minibatch_us);
    let proven_us = proven_us.filter(|_| problem.cluster.levels.len() == 1);
    Ok(SearchResult { candidates: candidate.into_iter().collect(), states, proven_us, ..SearchResult::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_that_of_its_partitioner() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(row.partitioner as usize, at);
            assert_eq!(Partitioner::from_name(row.name), Some(row.partitioner));
        }
        assert_eq!(Partitioner::from_name("none"), None);
    }
}
