//! A model that more than one question is asked about: of many devices, or again as a plan was asked for.
//!
//! From a plan it goes back to the question that the plan answers, so that its stages can be weighed again and the same be asked of
//! other devices.

use crate::arguments::{Devices, Import};
use crate::cmd::optimizer::Optimizer;
use crate::cmd::partition::{Question, cost_name};
use crate::failure::Failure;
use crate::groups::Groups;
use crate::loss::Counted;
use crate::machines;
use crate::model::{self, Loaded};
use crate::screen::Screen;
use crate::source::{self, Costs, Format, Times};
use crate::stages::COSTS;
use crate::whose;
use crate::zero::Zero;
use clap::ValueEnum;
use compiler::cluster::{Bytes, Cluster, Device, device};
use compiler::plan::problem::{InFlight, Objective, Problem};
use compiler::plan::zero::MOST;
use compiler::plan::{Plan, PlannedCluster, buckets};
use compiler::profile::Method;
use compiler::tensor::DType;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A model, and where its costs come from.
pub struct Source {
    kind: Kind,
    path: PathBuf,
    /// The loss that analytic costs have in them.
    counted: Counted,
}

enum Kind {
    Published,
    Analytic(Box<Loaded>, Option<Device>),
    Measured(Box<Loaded>, PathBuf),
}

impl Source {
    /// Reads a model, whose costs are `profile`: a file, `analytic:KIND`, or the roofline of the cluster's devices.
    pub fn open(path: &Path, profile: Option<&str>, import: &Import, screen: &Screen) -> Result<Source, Failure> {
        let path = path.to_path_buf();
        if source::format_of(&path) == Format::Pipedream {
            return Ok(Source { kind: Kind::Published, path, counted: Counted::None });
        }
        let loaded = Box::new(model::read(&path, import, screen)?);
        let kind = match profile {
            None | Some("analytic") => Kind::Analytic(loaded, None),
            Some(text) => match text.strip_prefix("analytic:") {
                Some(kind) => Kind::Analytic(loaded, Some(machines::kind(kind)?.device())),
                None => Kind::Measured(loaded, PathBuf::from(text)),
            },
        };
        Ok(Source { kind, path, counted: Counted::Usual })
    }

    /// The model of a plan.
    pub fn of_plan(path: &Path, profile: Option<&str>, plan: &Plan, screen: &Screen) -> Result<Source, Failure> {
        let is_measured = plan.profile.method == Method::Measured && source::format_of(path) != Format::Pipedream;
        let mut import = Import::default();
        import.follow(&plan.model.import);
        let mut source = Source::open(path, profile.or(is_measured.then_some("analytic")), &import, screen)?;
        if is_measured && profile.is_none() {
            // Another model would want another profile.
            if let Kind::Analytic(loaded, _) = &source.kind {
                let ops = loaded.profiled().ops as usize;
                whose::check(plan, &loaded.planned(ops, plan.model.import.loss.clone()))?;
            }
            return Err(unprofiled(path, plan));
        }
        source.counted = Counted::read(plan.model.import.loss.as_deref())?;
        if let Kind::Analytic(_, device @ None) = &mut source.kind {
            *device = Some(planned_device(plan));
        }
        Ok(source)
    }

    /// A model that is at hand and stands in no file.
    pub fn of_loaded(loaded: Loaded, profile: Option<&str>) -> Result<Source, Failure> {
        let device = match profile.and_then(|text| text.strip_prefix("analytic:")) {
            Some(kind) => Some(machines::kind(kind)?.device()),
            None => None,
        };
        let path = PathBuf::from(&loaded.model.file);
        Ok(Source { path, kind: Kind::Analytic(Box::new(loaded), device), counted: Counted::Usual })
    }

    /// Whether the costs can be had for other sizes of micro-batch than the plan's.
    pub fn is_flexible(&self) -> bool {
        matches!(&self.kind, Kind::Analytic(..))
    }

    /// Samples in a micro-batch where nobody says.
    pub fn micro_batch(&self, screen: &Screen) -> u64 {
        match &self.kind {
            Kind::Published => 1,
            Kind::Analytic(loaded, _) => loaded.micro_batch(None, screen),
            Kind::Measured(loaded, path) => {
                let profiled = source::read_profile(path).ok().map(|(_, profile)| profile.settings.micro_batch);
                loaded.micro_batch(profiled, screen)
            }
        }
    }

    /// The devices that the flags describe, of the kind that the costs are for.
    pub fn cluster(&self, devices: &Devices) -> Result<Cluster, Failure> {
        match &self.kind {
            Kind::Published | Kind::Analytic(_, None) => machines::cluster(devices, None),
            Kind::Analytic(_, Some(device)) => machines::cluster(devices, device::find(&device.kind)),
            Kind::Measured(_, path) => machines::cluster_of(devices, &source::read_profile(path)?.1),
        }
    }

    /// The costs at that many samples on a cluster.
    pub fn on(&self, cluster: Cluster, micro_batch: u64) -> Result<Costs, Failure> {
        self.with(cluster, micro_batch, None)
    }

    /// The same with floats of this type.
    fn with(&self, cluster: Cluster, micro_batch: u64, floats: Option<DType>) -> Result<Costs, Failure> {
        match &self.kind {
            Kind::Published => {
                source::published_on(&self.path, cluster, micro_batch, floats.unwrap_or(DType::F32).name())
            }
            Kind::Analytic(loaded, device) => {
                let device = device.clone().unwrap_or_else(|| cluster.device.clone());
                source::assemble(loaded, micro_batch, cluster, Times::Analytic(device), floats, self.counted)
            }
            Kind::Measured(loaded, path) => {
                let (sha256, profile) = source::read_profile(path)?;
                let counted = Counted::read(profile.settings.loss.as_deref())?;
                source::assemble(
                    loaded,
                    micro_batch,
                    cluster,
                    Times::Profile(path.clone(), sha256, Box::new(profile)),
                    floats,
                    counted,
                )
            }
        }
    }

    /// The costs at that many samples on the plan's cluster; refuses a model that is not the plan's.
    pub fn costs(&self, plan: &Plan, micro_batch: u64) -> Result<Costs, Failure> {
        let mut costs = self.on(cluster(plan), micro_batch)?;
        // `--dtype` may have said another type than the model's own.
        if let (false, Some(floats)) = (costs.dtype == plan.dtype, DType::parse(&plan.dtype)) {
            costs = self.with(cluster(plan), micro_batch, Some(floats))?;
        }
        whose::check(plan, &costs.model)?;
        Ok(costs)
    }
}

/// The times of a plan's ops are measured, and neither the plan nor the model has them.
fn unprofiled(path: &Path, plan: &Plan) -> Failure {
    let is_it = |path: &PathBuf| source::read_profile(path).is_ok_and(|(sha256, _)| sha256 == plan.profile.sha256);
    let found = [source::default_output(path, "profile"), PathBuf::from("profile.json")].into_iter().find(is_it);
    let named = found.map_or("FILE".to_string(), |found| found.display().to_string());
    Failure::input("the profile that the plan was made from is not named")
        .because("what each op takes was measured, and stands in that profile alone")
        .help(format!("`--model {} --profile {named}` names it", path.display()))
}

/// The device whose data sheet gave the plan's costs.
fn planned_device(plan: &Plan) -> Device {
    let own = &plan.cluster.device;
    let name = plan.options.get(COSTS).and_then(Value::as_str).filter(|name| *name != own.kind);
    name.and_then(device::find).map_or_else(|| own.clone(), device::Kind::device)
}

/// The devices of a plan.
pub fn cluster(plan: &Plan) -> Cluster {
    let PlannedCluster { device, levels, classes, .. } = plan.cluster.clone();
    Cluster { device, levels, classes, hosts: Vec::new() }
}

/// What the judge needs to weigh stages as this plan's were weighed.
pub fn problem(plan: &Plan, costs: Costs) -> Result<Problem, Failure> {
    let shared = Groups::in_plan(plan).costs(&costs)?;
    let mut problem = costs.problem(plan.cost);
    problem.shared = shared;
    problem.objective = plan.objective;
    problem.activation_compression = number(plan, "activation_compression");
    problem.memory_limit = plan.cluster.memory_per_device;
    problem.optimizer_state = number(plan, "optimizer_state").unwrap_or(0.0);
    problem.bucket = bucket(plan);
    problem.zero = plan.stages.iter().map(|stage| stage.zero).max().unwrap_or(0);
    problem.schedule = plan.schedule.kind;
    problem.microbatches = plan.schedule.microbatches;
    problem.chunks = plan.schedule.chunks;
    problem.count_updates();
    Ok(problem)
}

/// The same question, with stages left free and no time spent on what was pinned.
pub fn question(plan: &Plan) -> Question {
    let text = |name: &str| plan.options.get(name).and_then(Value::as_str).map(str::to_string);
    let usual = Question::default();
    Question {
        cost: cost_name(plan.cost).to_string(),
        activation_compression: number(plan, "activation_compression"),
        memory: plan.cluster.memory_per_device.map(|limit| format!("{}B", limit.0)),
        microbatches: plan.schedule.microbatches,
        schedule: Some(plan.schedule.kind.name().to_string()),
        objective: match plan.objective {
            Objective::Throughput => "throughput",
            Objective::Memory => "memory",
            Objective::Latency => "latency",
        }
        .to_string(),
        target: text("target"),
        bucket: format!("{}B", bucket(plan).0),
        zero: match plan.options.get("zero") {
            Some(Value::String(_)) => Zero::Auto,
            said => Zero::Level(said.and_then(Value::as_u64).unwrap_or(0).min(MOST.into()) as u32),
        },
        recompute: text("recompute").unwrap_or(usual.recompute.clone()),
        optimizer: Optimizer::from_str(&plan.optimizer, true).unwrap_or(usual.optimizer),
        tensor: Groups::of_plan(plan),
        no_replication: plan.options.get("no_replication") == Some(&Value::Bool(true)),
        in_flight: match text("in_flight").as_deref() {
            Some("pipedream") => InFlight::Pipedream,
            _ => InFlight::Auto,
        },
        seed: plan.seed,
        ..usual
    }
}

/// The size of the parts in which gradients are summed.
fn bucket(plan: &Plan) -> Bytes {
    Bytes(plan.options.get("bucket_bytes").and_then(Value::as_u64).unwrap_or(buckets::USUAL_BYTES))
}

fn number(plan: &Plan, name: &str) -> Option<f64> {
    plan.options.get(name).and_then(Value::as_f64)
}
