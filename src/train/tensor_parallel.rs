//! Stages that several devices share: `--tensor N`.

use crate::error::Error;
use crate::train::failures;
use compiler::cluster::{Seconds, device};
use compiler::graph::Graph;
use compiler::op::Sharding;
use compiler::plan::{Plan, Stage};
use compiler::schedule::Pipeline;
use compiler::tensor_parallel::cost::Machine;
use runtime::checkpoint::devices::whole_codes;
use runtime::comm::tensor_group::Layouts;
use runtime::exec::compile::StageCode;
use runtime::train::prepare::{PrepareError, Prepared, Settings};
use runtime::train::run::{RunOptions, StepDone, TrainJob, Trained};
use runtime::train::tensor_parallel::{Order, TensorParallelError, prepare_shared_with, run_shared};

/// What two threads take to meet.
const MEETING: Seconds = Seconds(2e-6);

/// A group of devices that shares all stages.
pub struct Sharing {
    /// How parameters lie.
    layouts: Layouts,
    /// How many devices.
    devices: usize,
    /// The stages as checkpoints know them, whole.
    pub whole: Vec<StageCode>,
}

/// The group that a plan was made for; without one, threads of this machine: cores that share its memory.
fn machine(plan: &Plan, devices: usize) -> Machine {
    if let (true, Some(level)) = (degree(plan) == devices, plan.cluster.levels.first()) {
        let device = plan.cluster.device.clone();
        return Machine { device, devices, bandwidth: level.bandwidth, latency: level.latency };
    }
    let kind = device::find("cpu").expect("the table of devices has CPUs");
    Machine { device: kind.device(), devices, bandwidth: kind.link().1, latency: MEETING }
}

/// Devices that share each replica of a plan's stages.
pub fn degree(plan: &Plan) -> usize {
    plan.stages.iter().map(Stage::degree).max().unwrap_or(1) as usize
}

/// Prepares a run with stages that so many devices share, in this order of work.
pub fn prepare(
    graph: &Graph,
    stages: &[usize],
    pipeline: Pipeline,
    settings: &Settings,
    order: Order<'_>,
    (plan, devices): (&Plan, usize),
) -> Result<(Prepared, Sharing), PrepareError> {
    let machine = machine(plan, devices);
    let (made, layouts) = prepare_shared_with(graph, stages, pipeline, settings, order, &machine)?;
    let whole = whole_codes(&made.codes, &layouts, devices);
    Ok((made, Sharing { layouts, devices, whole }))
}

impl Sharing {
    /// Trains on all devices of the group, from where the course begins.
    pub fn train(
        &self,
        training: &TrainJob<'_>,
        course: RunOptions<'_>,
        on_step: &mut dyn FnMut(StepDone),
    ) -> Result<Trained, Error> {
        run_shared(training, course, (&self.layouts, self.devices), on_step).map_err(|error| match &error {
            TensorParallelError::Panic { .. } => Error::bug(&error.to_string()),
            TensorParallelError::Train(error) => failures::describe(error),
            TensorParallelError::Thread { .. } | TensorParallelError::Device(_) => {
                Error::negative("training stopped").because(&error)
            }
            TensorParallelError::Weight { .. } => Error::input("cannot train").because(&error),
        })
    }

    /// What it comes to, in a sentence.
    pub fn summary(&self) -> String {
        let split = self.layouts.values().filter(|layout| matches!(layout, Sharding::Split(_))).count();
        let (devices, all) = (self.devices, self.layouts.len());
        match split {
            0 => format!("{devices} devices share every stage, and at these sizes hold all {all} parameters each"),
            _ => format!("{devices} devices share every stage; {split} of {all} parameters are split among them"),
        }
    }
}
