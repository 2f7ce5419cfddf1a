//! Digests of everything that all processes of a run must have in common.

use crate::train::data_digest::named;
use crate::train::prepared::Prepared;
use crate::train::task::Task;
use compiler::graph::hash::hash;
use runtime::device::api::Device;
use runtime::process::placement::WorkerPlacement;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Digests by name; the name is the subject of the message `… differ`.
pub fn digests(task: &Task<'_>, prepared: &Prepared, placement: &WorkerPlacement) -> Vec<(String, [u8; 32])> {
    let training = prepared.training(task);
    let of = |what: &str, put: &dyn Fn(&mut Sha256)| {
        let mut sha = Sha256::new();
        put(&mut sha);
        (what.to_string(), <[u8; 32]>::from(sha.finalize()))
    };
    let text = |text: String| move |sha: &mut Sha256| sha.update(text.as_bytes());
    let sharding = prepared.sharing.as_ref().map_or_else(String::new, |sharing| sharing.describe(training.codes));
    // With different settings, parts of a checkpoint would be missing.
    let cuts = task.keeping.as_ref().map(|keeping| keeping.every);
    let mut all = vec![
        of("the versions of pipec", &text(env!("CARGO_PKG_VERSION").to_string())),
        of("the models", &text(hash(prepared.graph()))),
        of("the plans or schedules", &text(training.program.to_string())),
        of("the tensor-parallel degrees or shardings", &text(sharding)),
        of("the optimizers or learning rates", &text(format!("{:?}", training.optimizer))),
        of("the gradient clipping, statistics, staleness or loss scaling", &text(format!("{:?}", training.policy))),
        of("the batch sizes", &text(prepared.batch.to_string())),
        of("the numbers of steps", &text(prepared.steps.to_string())),
        of("the uses of `--shuffle`", &text(format!("{:?}", task.order))),
        of("the seeds", &text(task.seed.to_string())),
        of("the uses of `--save-gradients`", &text(task.keep_gradients.to_string())),
        of("`--checkpoint-dir` or `--checkpoint-every`", &text(format!("{cuts:?}"))),
        of("the initial weights", &|sha| {
            training.weights.iter().for_each(|(name, tensor)| named(sha, name, tensor.bytes()))
        }),
        of("the checkpoints", &text(prepared.first().to_string())),
        ("the data".to_string(), *prepared.data_digest()),
    ];
    // The ranks of a group must update unsharded parameters alike.
    if placement.has_split_groups() {
        let devices = arithmetic(task.devices);
        all.push(of("the processors or libraries of tensor-parallel groups", &text(format!("{devices:?}"))));
    }
    all
}

fn arithmetic(devices: &[Arc<dyn Device>]) -> BTreeSet<String> {
    devices.iter().map(|device| device.arithmetic()).collect()
}
