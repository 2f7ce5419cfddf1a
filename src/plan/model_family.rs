//! The largest model of a zoo family that fits on a number of devices, with one stage on each.

use crate::cluster::{self, ClusterRequest};
use crate::costs::Costs;
use crate::costs::cost_source::CostSource;
use crate::error::{Error, ErrorKind};
use crate::model;
use crate::plan::from_costs::solve;
use crate::plan::request::PlanOptions;
use crate::plan::tensor_parallel::TensorParallel;
use compiler::cluster::Cluster;
use compiler::export::sweep::Largest;
use compiler::plan::coarsen;
use compiler::plan::problem::{InFlight, Recomputation, set_recompute_scopes};
use models::choice::Setting;
use models::zoo::{self, Options};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

/// The zoo option that makes the members of a family larger.
const LAYERS: &str = "layers";
/// Maximum number of layers tried; larger graphs add no information.
const MOST: u32 = 4096;

/// Pieces per stage of a coarsened member, and the fewest pieces in total.
const PIECES: usize = 4;
const LEAST_PIECES: usize = 32;

/// Bytes per parameter of zoo models.
const BYTES: f64 = 4.0;

/// A family of zoo models that differ in their number of layers.
pub struct Family<'a> {
    /// Its name in the zoo: a model, or a published size whose other settings are kept.
    pub name: &'a str,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// The device type of the costs; the cluster's devices if absent.
    pub kind: Option<&'a str>,
    /// Search settings. Stages and recomputation are set for each member.
    pub options: &'a PlanOptions,
    /// Step between numbers of layers.
    step: u32,
    /// Members with their costs, by number of layers.
    members: RefCell<BTreeMap<u32, Option<(u64, Costs)>>>,
}

impl<'a> Family<'a> {
    /// Finds the family and the step between its numbers of layers.
    pub fn open(
        name: &'a str,
        micro_batch: u64,
        kind: Option<&'a str>,
        options: &'a PlanOptions,
    ) -> Result<Self, Error> {
        let fail = |why: String| Error::input(format!("unknown `--family {name}`")).because(why);
        let Some((entry, _)) = zoo::find(name) else {
            return Err(fail(format!("the zoo has no such model{}", zoo::meant(name)))
                .with_help("`pipec zoo` lists the models"));
        };
        if !entry.choices.iter().any(|choice| choice.name == LAYERS) {
            return Err(fail(format!("`{}` has no option `{LAYERS}`", entry.name)));
        }
        let mut family = Family { name, micro_batch, kind, options, step: 1, members: RefCell::default() };
        // GNMT needs pairs of layers, AmoebaNet triples: the smallest step with which two successive members can be built.
        let is_step = |step: &u32| [2, 3].iter().all(|times| family.build(step * 2 * times).is_ok());
        family.step = (1..=6).find(is_step).ok_or_else(|| fail("no two of its members can be built".to_string()))?;
        Ok(family)
    }

    /// The most layers that fit on these devices, with one stage on each device or tensor-parallel group. `tried` receives every number of layers tried, and true if it fits.
    ///
    /// A coarsened member is planned quickly, and fits only if the full one does. So coarsened members are searched first; the full
    /// search starts from the largest of them.
    pub fn largest(
        &self,
        request: &ClusterRequest,
        recompute: bool,
        tried: &dyn Fn(u32, bool),
    ) -> Result<Largest, Error> {
        let cluster = cluster::cluster(request, self.kind.map(cluster::kind).transpose()?)?;
        let devices = cluster.devices();
        let fits = |times: u32, is_coarse: bool| -> Result<Option<(u32, u64)>, Error> {
            let layers = times * self.step;
            if layers > MOST {
                return Ok(None);
            }
            let parameters = self.fits(layers, &cluster, recompute, is_coarse)?;
            tried(layers, parameters.is_some());
            Ok(parameters.map(|parameters| (layers, parameters)))
        };
        let (least, known) = largest_of((0, None), &|times| fits(times, true))?;
        let (_, found) = largest_of((least, known), &|times| fits(times, false))?;
        Ok(Largest { devices, recompute, found })
    }

    fn build(&self, layers: u32) -> Result<zoo::Built, zoo::ZooError> {
        let options = Options { structure: true, ..Options::default() };
        zoo::build(self.name, &options.with(LAYERS, Setting::Number(layers as usize)))
    }

    /// The parameters and the costs on one device of the member with this number of layers, if it can be built. Costs are not computed
    /// for a member that exceeds the memory of all devices together.
    fn member(&self, layers: u32, cluster: &Cluster) -> Result<Option<(u64, Costs)>, Error> {
        if let Some(known) = self.members.borrow().get(&layers) {
            return Ok(known.clone());
        }
        let member = match self.build(layers) {
            Err(_) => None,
            Ok(built) if self.is_beyond(built.counts.parameters as f64, cluster)? => return Ok(None),
            Ok(built) => {
                let parameters = u64::try_from(built.counts.parameters).unwrap_or(u64::MAX);
                let loaded = model::of_zoo(self.name, zoo::to_bytes(&built.model))?;
                let source = CostSource::of_loaded(loaded, self.kind)?;
                let one = source.cluster(&ClusterRequest { gpus: Some(1), ..ClusterRequest::default() })?;
                let mut costs = source.with(one, self.micro_batch, self.options.precision)?;
                if self.options.tensor_parallel() == TensorParallel::Never {
                    // Copies of the costs need no copy of the graph.
                    costs.shareable = None;
                }
                Some((parameters, costs))
            }
        };
        self.members.borrow_mut().insert(layers, member.clone());
        Ok(member)
    }

    /// True if the parameters, their gradients and the optimizer state exceed the memory of all devices.
    fn is_beyond(&self, parameters: f64, cluster: &Cluster) -> Result<bool, Error> {
        let limit = self.options.memory_limit.unwrap_or(cluster.device.memory);
        let least = parameters * BYTES * (2.0 + self.options.optimizer()?.state());
        Ok(limit.0 > 0 && least > limit.0 as f64 * cluster.devices() as f64)
    }

    /// The parameters of the member with this number of layers, if it can be built and fits.
    fn fits(&self, layers: u32, cluster: &Cluster, recompute: bool, is_coarse: bool) -> Result<Option<u64>, Error> {
        let Some((parameters, mut costs)) = self.member(layers, cluster)? else { return Ok(None) };
        costs.cluster = cluster.clone();
        let stages = match self.options.tensor_parallel() {
            TensorParallel::Degree(degree) => cluster.devices() / degree,
            _ => cluster.devices(),
        };
        set_recompute_scopes(&mut costs.graph, self.options.target);
        if is_coarse {
            costs.graph = coarsen::runs(&costs.graph, (PIECES * stages as usize).max(LEAST_PIECES));
        }
        let options = PlanOptions {
            replicas: Some(vec![1; stages as usize]),
            recompute: if recompute { Recomputation::Auto } else { Recomputation::Never },
            in_flight: InFlight::Pipedream,
            ..self.options.clone()
        };
        match solve(Path::new(self.name), costs, &options) {
            Ok(_) => Ok(Some(parameters)),
            Err(failure) if failure.kind() == ErrorKind::Infeasible => Ok(None),
            // Too few pieces for the number of stages; the full member may fit.
            Err(_) if is_coarse => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// A number that fits, with its result.
type Fitting = (u32, Option<(u32, u64)>);

/// The largest number that fits, given one that fits: doubling steps, then bisection.
fn largest_of(start: Fitting, fits: &dyn Fn(u32) -> Result<Option<(u32, u64)>, Error>) -> Result<Fitting, Error> {
    let (mut least, mut known) = start;
    // A pipeline needs at least two layers to cut between.
    let mut step = if least == 0 { 2 } else { 1 };
    let mut most = loop {
        match fits(least + step)? {
            Some(found) => (least, known, step) = (least + step, Some(found), step * 2),
            None => break least + step,
        }
    };
    while most > least + 1 {
        let middle = least.midpoint(most);
        match fits(middle)? {
            Some(found) => (least, known) = (middle, Some(found)),
            None => most = middle,
        }
    }
    Ok((least, known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_found_from_any_start() {
        for largest in 0..40 {
            let fits = |times: u32| Ok((times <= largest).then_some((times, 0)));
            for start in 0..=largest {
                let known = (start > 0).then_some((start, 0));
                let expected = (largest, (largest > 0).then_some((largest, 0)));
                assert_eq!(largest_of((start, known), &fits).unwrap(), expected, "from {start}");
            }
        }
    }
}
