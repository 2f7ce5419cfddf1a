//! From a plan back to the question that it answers, so that its stages can be weighed again and the same be asked of other devices.

use crate::arguments::Import;
use crate::cmd::partition::{Optimizer, Question, cost_name};
use crate::failure::Failure;
use crate::machines;
use crate::model::{self, Loaded};
use crate::screen::Screen;
use crate::source::{self, Costs, Format, Times};
use clap::ValueEnum;
use compiler::cluster::{Cluster, Device, device};
use compiler::plan::Plan;
use compiler::plan::problem::{InFlight, Objective, Problem};
use compiler::profile::Method;
use serde_json::Value;
use std::path::{Path, PathBuf};

use crate::stages::COSTS;

/// The model of a plan, and where its costs come from.
pub struct Source {
    kind: Kind,
    path: PathBuf,
}

enum Kind {
    Published,
    Analytic(Box<Loaded>, Device),
    Measured(Box<Loaded>, PathBuf),
}

impl Source {
    /// Reads the model, and refuses one that is not the plan's.
    pub fn open(path: &Path, profile: Option<&str>, plan: &Plan, screen: &Screen) -> Result<Source, Failure> {
        let path = path.to_path_buf();
        if source::format_of(&path) == Format::Pipedream {
            return Ok(Source { kind: Kind::Published, path });
        }
        let mut import = Import::default();
        import.follow(&plan.model.import);
        let loaded = Box::new(model::read(&path, &import, screen)?);
        let kind = match profile {
            Some(file) if !file.starts_with("analytic") => Kind::Measured(loaded, PathBuf::from(file)),
            None if plan.profile.method == Method::Measured => {
                return Err(Failure::input("the plan was made from a profile").help("`--profile FILE` names it"));
            }
            Some(text) => match text.strip_prefix("analytic:") {
                Some(kind) => Kind::Analytic(loaded, machines::kind(kind)?.device()),
                None => Kind::Analytic(loaded, planned_device(plan)),
            },
            None => Kind::Analytic(loaded, planned_device(plan)),
        };
        Ok(Source { kind, path })
    }

    /// Whether the costs can be had for other sizes of micro-batch than the plan's.
    pub fn is_flexible(&self) -> bool {
        matches!(&self.kind, Kind::Analytic(..))
    }

    /// The costs at that many samples, on the plan's cluster.
    pub fn costs(&self, plan: &Plan, micro_batch: u64) -> Result<Costs, Failure> {
        let cluster = cluster(plan);
        let costs = match &self.kind {
            Kind::Published => source::published_on(&self.path, cluster, micro_batch, &plan.dtype)?,
            Kind::Analytic(loaded, device) => {
                source::assemble(loaded, micro_batch, cluster, Times::Analytic(device.clone()))?
            }
            Kind::Measured(loaded, path) => {
                let (sha256, profile) = source::read_profile(path)?;
                source::assemble(loaded, micro_batch, cluster, Times::Profile(path.clone(), sha256, Box::new(profile)))?
            }
        };
        let (here, there) = (&costs.model, &plan.model);
        let hashes = [(&here.sha256, &there.sha256), (&here.graph_hash, &there.graph_hash)];
        let is_other = match self.kind {
            Kind::Published => hashes[0].0 != hashes[0].1,
            _ => hashes[1].0 != hashes[1].1,
        };
        if is_other || here.ops != there.ops {
            let what = format!("{} is not the model of the plan", self.path.display());
            return Err(Failure::input(what)
                .because(format!("the plan is for {} with {} ops, this has {}", there.file, there.ops, here.ops)));
        }
        Ok(costs)
    }
}

/// The device whose data sheet gave the plan's costs.
fn planned_device(plan: &Plan) -> Device {
    let own = &plan.cluster.device;
    let name = plan.options.get(COSTS).and_then(Value::as_str).filter(|name| *name != own.kind);
    name.and_then(device::find).map_or_else(|| own.clone(), device::Kind::device)
}

/// The devices of a plan.
pub fn cluster(plan: &Plan) -> Cluster {
    Cluster { device: plan.cluster.device.clone(), levels: plan.cluster.levels.clone(), hosts: Vec::new() }
}

/// What the judge needs to weigh stages as this plan's were weighed.
pub fn problem(plan: &Plan, costs: Costs) -> Problem {
    let mut problem = costs.problem(plan.cost);
    problem.objective = plan.objective;
    problem.activation_compression = number(plan, "activation_compression");
    problem.memory_limit = plan.cluster.memory_per_device;
    problem.optimizer_state = number(plan, "optimizer_state").unwrap_or(0.0);
    problem.schedule = plan.schedule.kind;
    problem.microbatches = plan.schedule.microbatches;
    problem.chunks = plan.schedule.chunks;
    problem
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
        recompute: text("recompute").unwrap_or(usual.recompute.clone()),
        optimizer: Optimizer::from_str(&plan.optimizer, true).unwrap_or(usual.optimizer),
        no_replication: plan.options.get("no_replication") == Some(&Value::Bool(true)),
        in_flight: match text("in_flight").as_deref() {
            Some("pipedream") => InFlight::Pipedream,
            _ => InFlight::Auto,
        },
        seed: plan.seed,
        ..usual
    }
}

fn number(plan: &Plan, name: &str) -> Option<f64> {
    plan.options.get(name).and_then(Value::as_f64)
}
