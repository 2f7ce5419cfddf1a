//! What all processes of a run must have in common: settings by value, and digests of what is large.

use crate::launch::role::RunInputs;
use crate::train::data_digest::add_bytes;
use crate::train::prepared::Prepared;
use crate::train::run_settings::{DATA, FROZEN, GRAPH, LEARNING_RATE, PRECISION, run_settings};
use crate::train::task::Task;
use compiler::graph::hash::hash;
use compiler::plan::{Plan, Stage};
use runtime::device::api::Device;
use runtime::process::handshake::RunInput;
use runtime::process::placement::WorkerPlacement;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Settings that are digests, and are among the inputs under another name.
const IN_DIGESTS: [&str; 2] = [DATA, GRAPH];

/// The inputs by name. A name is the subject of the message `… differ` for a digest, and the heading of both values for a
/// setting.
pub fn inputs(task: &Task<'_>, prepared: &Prepared, placement: &WorkerPlacement) -> RunInputs {
    let job = prepared.job(task);
    let (schedule, microbatches) = prepared.order();
    let digest = |what: &str, update: &dyn Fn(&mut Sha256)| {
        let mut sha = Sha256::new();
        update(&mut sha);
        (what.to_string(), RunInput::Digest(sha.finalize().into()))
    };
    let text = |text: String| move |sha: &mut Sha256| sha.update(text.as_bytes());
    let setting = |name: &str, value: String| (name.to_string(), RunInput::setting(value));
    let state = |is_on: bool| if is_on { "on" } else { "off" }.to_string();
    let sharding = prepared.sharing.as_ref().map_or_else(String::new, |sharing| sharing.describe(job.codes));
    // With different settings, parts of a checkpoint would be missing.
    let every = task.checkpoint_interval();
    let mut inputs = vec![
        setting("version of pipec", env!("CARGO_PKG_VERSION").to_string()),
        digest("the models", &text(hash(&prepared.compiled.graph))),
        digest("the plans or schedules", &text(format!("{}{}", job.program, stages(task.plan)))),
        digest("the tensor-parallel degrees or shardings", &text(sharding)),
        setting("steps", prepared.steps.to_string()),
        setting("schedule", schedule.to_string()),
        setting("micro-batches", microbatches.to_string()),
        setting("`--save-gradients`", state(job.keep_gradients)),
        setting("checkpoints", state(task.checkpoint_settings.is_some())),
        setting("`--checkpoint-every`", every.map_or(String::new(), |every| every.to_string())),
        setting("minibatches in the checkpoint", prepared.first_step().to_string()),
        digest("the initial weights", &|sha| {
            job.weights.iter().for_each(|(name, tensor)| add_bytes(sha, name, tensor.bytes()))
        }),
        ("the data".to_string(), RunInput::Digest(*prepared.data_digest())),
    ];
    let settings = run_settings(task, prepared).into_iter().filter(|(name, _)| !IN_DIGESTS.contains(&name.as_str()));
    inputs.extend(settings.map(|(name, run_setting)| match &name[..] {
        LEARNING_RATE => setting("`--lr-schedule`", run_setting.text),
        // The same graph may be described in several ways.
        FROZEN | PRECISION => (name, RunInput::cause(run_setting.text)),
        _ => setting(&name, run_setting.text),
    }));
    // The ranks of a group must update unsharded parameters alike.
    if placement.has_split_groups() {
        let devices: Vec<String> = arithmetics(task.devices).into_iter().collect();
        inputs.push(digest("the processors or libraries of tensor-parallel groups", &text(devices.join(", "))));
    }
    inputs
}

/// The ops of each stage, and the parameters of its gradient buckets. A program has only their numbers.
fn stages(plan: &Plan) -> String {
    let describe = |stage: &Stage| {
        let buckets: Vec<&[String]> = stage.buckets.iter().map(|bucket| &bucket.parameters[..]).collect();
        format!("{:?} {buckets:?}\n", stage.ops)
    };
    plan.stages.iter().map(describe).collect()
}

fn arithmetics(devices: &[Arc<dyn Device>]) -> BTreeSet<String> {
    devices.iter().map(|device| device.arithmetic()).collect()
}
