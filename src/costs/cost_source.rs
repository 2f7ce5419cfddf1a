//! A model whose costs are needed for several clusters, sizes or plans.

use crate::cluster::{self, ClusterRequest};
use crate::costs::{self, COSTS, CostInput, Costs, ModelFormat, PrecisionChoice, Times, model_match};
use crate::error::Error;
use crate::events::EventSink;
use crate::files::{input, output};
use crate::loss::CountedLoss;
use crate::model::{self, ImportRequest, LoadedModel};
use compiler::cluster::{Cluster, Device, device};
use compiler::plan::Plan;
use compiler::profile::Method;
use compiler::tensor::DType;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model whose costs are computed for several clusters and sizes.
pub struct CostSource {
    origin: Origin,
    path: PathBuf,
    /// The loss that analytic costs include.
    counted: CountedLoss,
}

enum Origin {
    Published,
    Analytic(Box<LoadedModel>, Option<Device>),
    Measured(Box<LoadedModel>, PathBuf),
}

impl CostSource {
    /// Reads a model and names the source of its costs.
    pub fn open(
        path: &Path,
        input: &CostInput,
        import: &ImportRequest,
        events: &dyn EventSink,
    ) -> Result<CostSource, Error> {
        let path = path.to_path_buf();
        if ModelFormat::of(&path) == ModelFormat::Pipedream {
            return Ok(CostSource { origin: Origin::Published, path, counted: CountedLoss::None });
        }
        let loaded = Box::new(model::read(&path, import, events)?);
        let origin = match input {
            CostInput::Analytic(None) => Origin::Analytic(loaded, None),
            CostInput::Analytic(Some(kind)) => Origin::Analytic(loaded, Some(cluster::kind(kind)?.device())),
            CostInput::Profile(path) => Origin::Measured(loaded, path.clone()),
        };
        Ok(CostSource { origin, path, counted: CountedLoss::Default })
    }

    /// The model of a plan, with the costs that the plan was made from unless others are given.
    pub fn of_plan(
        path: &Path,
        input: Option<&CostInput>,
        plan: &Plan,
        events: &dyn EventSink,
    ) -> Result<CostSource, Error> {
        let is_measured = plan.profile.method == Method::Measured && ModelFormat::of(path) != ModelFormat::Pipedream;
        let import = ImportRequest::of(plan);
        let mut source = CostSource::open(path, input.unwrap_or(&CostInput::default()), &import, events)?;
        if is_measured && input.is_none() {
            // A wrong model is reported before a missing profile.
            if let Origin::Analytic(loaded, _) = &source.origin {
                model_match::check_loaded(plan, loaded)?;
            }
            return Err(missing_profile(path, plan));
        }
        source.counted = CountedLoss::read(plan.model.import.loss.as_deref())?;
        if let Origin::Analytic(_, device @ None) = &mut source.origin {
            *device = Some(planned_device(plan));
        }
        Ok(source)
    }

    /// A model in memory, with analytic costs of a device type or of the cluster's devices.
    pub fn of_loaded(loaded: LoadedModel, kind: Option<&str>) -> Result<CostSource, Error> {
        let device = kind.map(cluster::kind).transpose()?.map(device::Kind::device);
        let path = PathBuf::from(&loaded.model.file);
        Ok(CostSource { path, origin: Origin::Analytic(Box::new(loaded), device), counted: CountedLoss::Default })
    }

    /// True if costs are available for any micro-batch size.
    pub fn is_flexible(&self) -> bool {
        matches!(&self.origin, Origin::Analytic(..))
    }

    /// The default number of samples per micro-batch.
    pub fn micro_batch(&self, events: &dyn EventSink) -> u64 {
        match &self.origin {
            Origin::Published => 1,
            Origin::Analytic(loaded, _) => loaded.micro_batch(None, events),
            Origin::Measured(loaded, path) => {
                let profiled = input::read_profile(path).ok().map(|(_, profile)| profile.settings.micro_batch);
                loaded.micro_batch(profiled, events)
            }
        }
    }

    /// The requested devices, of the device type of the costs.
    pub fn cluster(&self, devices: &ClusterRequest) -> Result<Cluster, Error> {
        match &self.origin {
            Origin::Published | Origin::Analytic(_, None) => cluster::cluster(devices, None),
            Origin::Analytic(_, Some(device)) => cluster::cluster(devices, device::find(&device.kind)),
            Origin::Measured(_, path) => cluster::cluster_of(devices, &input::read_profile(path)?.1),
        }
    }

    /// The costs on a cluster with this many samples per micro-batch.
    pub fn on(&self, cluster: Cluster, micro_batch: u64) -> Result<Costs, Error> {
        self.with(cluster, micro_batch, PrecisionChoice::Usual)
    }

    pub fn with(&self, cluster: Cluster, micro_batch: u64, precision: PrecisionChoice) -> Result<Costs, Error> {
        match &self.origin {
            Origin::Published => costs::published_on(&self.path, cluster, micro_batch, DType::F32.name()),
            Origin::Analytic(loaded, device) => {
                let device = device.clone().unwrap_or_else(|| cluster.device.clone());
                costs::assemble(loaded, micro_batch, cluster, Times::Analytic(device), precision, self.counted)
            }
            Origin::Measured(loaded, path) => {
                let (sha256, profile) = input::read_profile(path)?;
                let counted = CountedLoss::read(profile.settings.loss.as_deref())?;
                costs::assemble(
                    loaded,
                    micro_batch,
                    cluster,
                    Times::Profile(path.clone(), sha256, Box::new(profile)),
                    precision,
                    counted,
                )
            }
        }
    }

    /// The costs on the plan's cluster. Refuses a model that is not the plan's.
    pub fn costs(&self, plan: &Plan, micro_batch: u64) -> Result<Costs, Error> {
        let choice = plan.precision().map_or(PrecisionChoice::Model, PrecisionChoice::Given);
        let costs = self.with(cluster::planned(&plan.cluster), micro_batch, choice)?;
        model_match::check(plan, &costs.model)?;
        Ok(costs)
    }
}

/// The error for a plan with measured costs, which only its profile contains.
fn missing_profile(path: &Path, plan: &Plan) -> Error {
    let is_profile_of_plan =
        |path: &PathBuf| input::read_profile(path).is_ok_and(|(sha256, _)| sha256 == plan.profile.sha256);
    let profile =
        [output::default_output(path, "profile"), PathBuf::from("profile.json")].into_iter().find(is_profile_of_plan);
    let profile_text = profile.map_or("FILE".to_string(), |profile| profile.display().to_string());
    Error::input("the plan was made from a profile, which is missing")
        .because("only that profile has the measured costs of the ops")
        .with_help(format!("pass it with `--model {} --profile {profile_text}`", path.display()))
}

/// The device whose data sheet gave the plan's costs.
fn planned_device(plan: &Plan) -> Device {
    let cluster_device = &plan.cluster.device;
    let name = plan.options.get(COSTS).and_then(Value::as_str).filter(|name| *name != cluster_device.kind);
    name.and_then(device::find).map_or_else(|| cluster_device.clone(), device::Kind::device)
}
