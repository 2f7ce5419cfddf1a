//! Tensor-parallel training: `--tensor N`.

use crate::error::Error;
use crate::train::failures;
use compiler::cluster::{Seconds, device};
use compiler::op::Sharding;
use compiler::plan::{Plan, Stage};
use compiler::profile::shared::ActivationSharding;
use compiler::tensor_parallel::cost::Machine;
use runtime::comm::tensor_group::Layouts;
use runtime::exec::sequence::Collective;
use runtime::exec::stage_code::StageCode;
use runtime::process::process_group::Group;
use runtime::train::job::{RunOptions, StepDone, TrainJob, Trained};
use runtime::train::prepare::Prepared;
use runtime::train::tensor_parallel::run_shared_in_group;
use runtime::train::tensor_shards::whole_codes;

const COLLECTIVE_LATENCY: Seconds = Seconds(2e-6);

/// The tensor-parallel group of a run.
pub struct Sharing {
    /// Sharding of the parameters.
    layouts: Layouts,
    /// The tensor-parallel degree.
    devices: usize,
    /// The unsharded stages, as in checkpoints.
    pub unsharded: Vec<StageCode>,
}

/// The tensor-parallel group of the plan; without one, threads of this machine that share its memory.
pub fn machine(plan: &Plan, devices: usize) -> Machine {
    if let (true, Some(level)) = (degree(plan) == devices, plan.cluster.levels.first()) {
        let device = &plan.cluster.device;
        let device = plan.precision().map_or_else(|| device.clone(), |precision| precision.on(device));
        return Machine {
            device,
            devices,
            bandwidth: level.bandwidth,
            latency: level.latency,
            keeps_weights: plan.stages.iter().any(|stage| stage.tensor_parallel.is_some_and(|of| of.keeps_weights)),
            activations: plan.activations(),
        };
    }
    let kind = device::find("cpu").expect("the table of devices has CPUs");
    Machine {
        device: kind.device(),
        devices,
        bandwidth: kind.link().1,
        latency: COLLECTIVE_LATENCY,
        keeps_weights: false,
        activations: ActivationSharding::Replicated,
    }
}

/// The tensor-parallel degree of a plan.
pub fn degree(plan: &Plan) -> usize {
    plan.stages.iter().map(Stage::degree).max().unwrap_or(1) as usize
}

impl Sharing {
    /// The group of a prepared run, of this degree.
    pub fn of(prepared: &Prepared, devices: usize) -> Sharing {
        let unsharded = whole_codes(&prepared.codes, &prepared.layouts, devices);
        Sharing { layouts: prepared.layouts.clone(), devices, unsharded }
    }

    /// Trains on all devices of the group, or those of this process in a process group. Only process 0 returns a result.
    pub fn train(
        &self,
        training: &TrainJob<'_>,
        options: RunOptions<'_>,
        on_step: &mut dyn FnMut(StepDone),
        group: Option<Group>,
    ) -> Result<Option<Trained>, Error> {
        let sharding = (&self.layouts, self.devices);
        run_shared_in_group(training, options, sharding, on_step, group).map_err(|error| failures::describe(&error))
    }

    /// What processes that train together must have in common: the degree, the shardings of parameters, and the
    /// collectives of the compiled stages, in order.
    pub fn describe(&self, codes: &[StageCode]) -> String {
        let split = self.layouts.iter().filter(|(_, layout)| matches!(layout, Sharding::Split(_)));
        let mut text = format!("{} {:?}", self.devices, split.collect::<Vec<_>>());
        for (stage, code) in codes.iter().enumerate() {
            for (pass, sequence) in [("forward", &code.forward), ("backward", &code.backward), ("weight", &code.weight)]
            {
                for Collective { op, operand } in sequence.steps.iter().filter_map(|step| step.collective.as_ref()) {
                    text += &format!("\n{stage} {pass} {op:?} {} {:?}", operand.dtype, operand.shape);
                }
            }
        }
        text
    }

    /// A sentence about the degree and the sharding.
    pub fn summary(&self) -> String {
        let split = self.layouts.values().filter(|layout| matches!(layout, Sharding::Split(_))).count();
        let (devices, total) = (self.devices, self.layouts.len());
        match split {
            0 => {
                format!("tensor parallelism of degree {devices}; at these sizes all {total} parameters are replicated")
            }
            _ => format!("tensor parallelism of degree {devices}; {split} of {total} parameters are sharded"),
        }
    }
}
