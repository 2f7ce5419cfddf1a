//! The largest model of a zoo family that fits on so many devices, with one stage on each.

use crate::arguments::Devices;
use crate::asked::Source;
use crate::cmd::partition::{self, Question};
use crate::failure::{self, Failure};
use crate::model;
use compiler::export::sweep::Largest;
use compiler::plan::problem::InFlight;
use models::choice::Setting;
use models::zoo::{self, Options};
use std::path::Path;

/// The choice of a family that makes its members larger.
const LAYERS: &str = "layers";
/// No more layers than this are tried: a graph of a few hundred thousand ops tells nobody more.
const MOST: u32 = 4096;

/// A family, and what is asked of its members.
pub struct Family<'a> {
    /// Its name in the zoo: a model, or a published size whose other settings are kept.
    pub name: &'a str,
    /// Samples in a micro-batch.
    pub micro_batch: u64,
    /// Where the costs come from.
    pub profile: Option<&'a str>,
    /// What is asked; stages and recomputation are set here.
    pub question: &'a Question,
    /// Layers go up by so many.
    step: u32,
}

impl<'a> Family<'a> {
    /// Looks the family up and finds out by how many layers its members differ.
    pub fn open(
        name: &'a str,
        micro_batch: u64,
        profile: Option<&'a str>,
        question: &'a Question,
    ) -> Result<Self, Failure> {
        let fail = |why: String| Failure::input(format!("`--family {name}` names no family")).because(why);
        let Some((entry, _)) = zoo::find(name) else {
            return Err(fail("the zoo has no such model".to_string()).help("`pipec zoo` lists the models"));
        };
        if !entry.choices.iter().any(|choice| choice.name == LAYERS) {
            return Err(fail(format!("`{}` has no choice of `{LAYERS}`", entry.name)));
        }
        let mut family = Family { name, micro_batch, profile, question, step: 1 };
        // GNMT has pairs of layers, AmoebaNet threes: the smallest step at which two members in a row can be built.
        let is_step = |step: &u32| [2, 3].iter().all(|times| family.build(step * 2 * times).is_ok());
        family.step = (1..=6).find(is_step).ok_or_else(|| fail("no two of its members can be built".to_string()))?;
        Ok(family)
    }

    /// The most layers that fit on that many devices, one stage each.
    pub fn largest(&self, devices: u32, bandwidth: Option<&str>, recompute: bool) -> Result<Largest, Failure> {
        let fits = |layers: u32| self.fits(layers, devices, bandwidth, recompute);
        // A straight pipeline needs something to cut between.
        let mut known = None;
        let (mut least, mut most) = (0, None);
        let mut times = 2;
        while most.is_none() && times * self.step <= MOST {
            match fits(times * self.step)? {
                Some(parameters) => {
                    (least, known) = (times, Some((times * self.step, parameters)));
                    times *= 2;
                }
                None => most = Some(times),
            }
        }
        let mut most = most.unwrap_or(times);
        while most > least + 1 {
            let middle = least.midpoint(most);
            match if middle * self.step <= MOST { fits(middle * self.step)? } else { None } {
                Some(parameters) => (least, known) = (middle, Some((middle * self.step, parameters))),
                None => most = middle,
            }
        }
        Ok(Largest { devices, recompute, found: known })
    }

    fn build(&self, layers: u32) -> Result<zoo::Built, zoo::ZooError> {
        let options = Options { structure: true, ..Options::default() };
        zoo::build(self.name, &options.with(LAYERS, Setting::Number(layers as usize)))
    }

    /// The parameters of the member with so many layers, if it can be built and fits.
    fn fits(
        &self,
        layers: u32,
        devices: u32,
        bandwidth: Option<&str>,
        recompute: bool,
    ) -> Result<Option<u64>, Failure> {
        let Ok(built) = self.build(layers) else { return Ok(None) };
        let parameters = u64::try_from(built.counts.parameters).unwrap_or(u64::MAX);
        let source = Source::of_loaded(model::of_zoo(self.name, zoo::to_bytes(&built.model))?, self.profile)?;
        let devices_of =
            Devices { gpus: Some(devices), bandwidth: bandwidth.map(str::to_string), ..Devices::default() };
        let costs = source.on(source.cluster(&devices_of)?, self.micro_batch)?;
        let question = Question {
            stages: Some(vec![1; devices as usize]),
            recompute: if recompute { "auto" } else { "never" }.to_string(),
            in_flight: InFlight::Pipedream,
            ..self.question.clone()
        };
        match partition::ask(Path::new(self.name), costs, &question) {
            Ok(_) => Ok(Some(parameters)),
            Err(failure) if failure.code == failure::INFEASIBLE => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}
