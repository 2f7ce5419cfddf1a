//! The largest model of a zoo family that fits on so many devices, with one stage on each.

use crate::cluster::{self, ClusterRequest};
use crate::costs::Costs;
use crate::costs::cost_source::CostSource;
use crate::error::{Error, ErrorKind};
use crate::model;
use crate::plan::request::PlanOptions;
use crate::plan::solve::solve;
use compiler::cluster::{BytesPerSecond, Cluster};
use compiler::export::sweep::Largest;
use compiler::plan::coarsen;
use compiler::plan::problem::InFlight;
use models::choice::Setting;
use models::zoo::{self, Options};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

/// The choice of a family that makes its members larger.
const LAYERS: &str = "layers";
/// No more layers than this are tried: a graph of a few hundred thousand ops tells nobody more.
const MOST: u32 = 4096;

/// Pieces of a member for each stage, where a first look will do, and the fewest of all.
const PIECES: usize = 4;
const LEAST_PIECES: usize = 32;

/// Bytes of a parameter of the zoo's models.
const BYTES: f64 = 4.0;

/// A family of zoo models that differ in their number of layers.
pub struct Family<'a> {
    /// Its name in the zoo: a model, or a published size whose other settings are kept.
    pub name: &'a str,
    /// Samples in a micro-batch.
    pub micro_batch: u64,
    /// The device kind of the costs; the cluster's devices if absent.
    pub kind: Option<&'a str>,
    /// Search settings. Stages and recomputation are set for each member.
    pub options: &'a PlanOptions,
    /// Layers go up by so many.
    step: u32,
    /// Members that were costed, by their layers.
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
        let fail = |why: String| Error::input(format!("`--family {name}` names no family")).because(why);
        let Some((entry, _)) = zoo::find(name) else {
            return Err(fail(format!("the zoo has no such model{}", zoo::meant(name)))
                .with_help("`pipec zoo` lists the models"));
        };
        if !entry.choices.iter().any(|choice| choice.name == LAYERS) {
            return Err(fail(format!("`{}` has no choice of `{LAYERS}`", entry.name)));
        }
        let mut family = Family { name, micro_batch, kind, options, step: 1, members: RefCell::default() };
        // GNMT has pairs of layers, AmoebaNet threes: the smallest step at which two members in a row can be built.
        let is_step = |step: &u32| [2, 3].iter().all(|times| family.build(step * 2 * times).is_ok());
        family.step = (1..=6).find(is_step).ok_or_else(|| fail("no two of its members can be built".to_string()))?;
        Ok(family)
    }

    /// The most layers that fit on that many devices, one stage each. `tried` is told of every number of layers and whether it fits.
    ///
    /// Members in few pieces are planned soon and never fit where the whole does not, so that they are asked first; only from the
    /// largest of them on is everything looked at.
    pub fn largest(
        &self,
        devices: u32,
        bandwidth: Option<BytesPerSecond>,
        recompute: bool,
        tried: &dyn Fn(u32, bool),
    ) -> Result<Largest, Error> {
        let fits = |times: u32, is_coarse: bool| -> Result<Option<(u32, u64)>, Error> {
            let layers = times * self.step;
            if layers > MOST {
                return Ok(None);
            }
            let parameters = self.fits(layers, devices, bandwidth, recompute, is_coarse)?;
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

    /// The parameters and the costs of the member with so many layers, if it can be built: those of one device, whatever the cluster.
    /// What is too large by far for all devices together is not costed op by op.
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
                Some((parameters, source.on(one, self.micro_batch)?))
            }
        };
        self.members.borrow_mut().insert(layers, member.clone());
        Ok(member)
    }

    /// Whether so many parameters, one gradient of each and the optimizer's state are more than all devices hold.
    fn is_beyond(&self, parameters: f64, cluster: &Cluster) -> Result<bool, Error> {
        let limit = self.options.memory_limit.unwrap_or(cluster.device.memory);
        let least = parameters * BYTES * (2.0 + self.options.optimizer()?.state());
        Ok(limit.0 > 0 && least > limit.0 as f64 * cluster.devices() as f64)
    }

    /// The parameters of the member with so many layers, if it can be built and fits.
    fn fits(
        &self,
        layers: u32,
        devices: u32,
        bandwidth: Option<BytesPerSecond>,
        recompute: bool,
        is_coarse: bool,
    ) -> Result<Option<u64>, Error> {
        let request = ClusterRequest { gpus: Some(devices), bandwidth, ..ClusterRequest::default() };
        let cluster = cluster::cluster(&request, self.kind.map(cluster::kind).transpose()?)?;
        let Some((parameters, mut costs)) = self.member(layers, &cluster)? else { return Ok(None) };
        costs.cluster = cluster;
        if is_coarse {
            costs.graph = coarsen::runs(&costs.graph, (PIECES * devices as usize).max(LEAST_PIECES));
        }
        let options = PlanOptions {
            replicas: Some(vec![1; devices as usize]),
            recompute,
            in_flight: InFlight::Pipedream,
            ..self.options.clone()
        };
        match solve(Path::new(self.name), costs, &options) {
            Ok(_) => Ok(Some(parameters)),
            Err(failure) if failure.kind() == ErrorKind::Infeasible => Ok(None),
            // Too few pieces for so many stages; the whole may do.
            Err(_) if is_coarse => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// A number that fits, and what is known of it.
type Fitting = (u32, Option<(u32, u64)>);

/// The largest number that fits, given one that does: by steps that double, then by halving.
fn largest_of(start: Fitting, fits: &dyn Fn(u32) -> Result<Option<(u32, u64)>, Error>) -> Result<Fitting, Error> {
    let (mut least, mut known) = start;
    // A straight pipeline needs something to cut between, so that nobody begins with a single one.
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
