//! Memory of a custom schedule beyond the plan's estimate: micro-batches, in-flight micro-batches, weight versions.
//!
//! The memory estimate of a plan assumes its in-flight limits. A table or programs from a file may need more, so a plan that fits may not
//! fit with another schedule. Bytes are computed as in the plan.

use compiler::plan::check::cost::class_of;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Plan, Stage};
use compiler::schedule::action::{self, Phase};
use compiler::schedule::{Instruction, Program, WorkerProgram};
use compiler::text::quantity::{self, plural};

/// Help for such a schedule.
pub const HELP: &str = "`pipec partition MODEL --schedule FILE` makes a plan with the memory of this schedule, or reports that it does not fit";

/// The peak number of something at a stage, and where it occurs.
#[derive(Clone, Default)]
struct Peak {
    most: u32,
    at: String,
}

impl Peak {
    fn meet(&mut self, now: u32, place: impl FnOnce() -> String) {
        if now > self.most {
            *self = Peak { most: now, at: place() };
        }
    }
}

/// Describes what the programs need beyond the plan's estimate; for each stage, the worker that needs most.
pub fn beyond(plan: &Plan, program: &Program) -> Vec<String> {
    let mut excesses = Vec::new();
    let planned = plan.schedule.microbatches;
    if program.microbatches != planned {
        let items = |count: u32| plural(u64::from(count), "micro-batch", "micro-batches");
        excesses.push(format!(
            "its minibatches have {}, but the plan's times and memory assume {}",
            items(program.microbatches),
            items(planned)
        ));
    }
    if !program.schedule.trains() {
        return excesses;
    }
    let (flights, versions) = peaks(program);
    let pending_weight_grads = action::pending_weight_grads(program);
    for (at, stage) in plan.stages.iter().enumerate() {
        let cap = plan.schedule.in_flight.get(at).copied().unwrap_or(1);
        let held = stage.memory.activations / u64::from(cap.max(1));
        if let Some(peak) = flights.get(at).filter(|peak| peak.most > cap) {
            let more = held.saturating_mul(u64::from(peak.most - cap));
            excesses.push(excess(plan, stage, "micro-batches in flight", peak, cap, more));
        }
        let kept = plan.schedule.weight_versions.get(at).copied().unwrap_or(1);
        if let Some(peak) = versions.get(at).filter(|peak| peak.most > kept) {
            let more = stage.memory.weights.saturating_mul(u64::from(peak.most - kept));
            excesses.push(excess(plan, stage, "weight versions", peak, kept, more));
        }
        // A plan for a table does not record which backwards are split.
        let counted = plan.schedule.pending_weight_grads.get(at).copied().unwrap_or(0);
        let found =
            pending_weight_grads.get(at).copied().filter(|_| splits(program) && plan.schedule.kind != Schedule::Csv);
        if let Some(found) = found.filter(|found| *found > counted) {
            excesses.push(format!(
                "stage {at} has {found} micro-batches with a pending weight gradient, but the plan assumes {counted}"
            ));
        }
    }
    excesses
}

fn splits(program: &Program) -> bool {
    let instructions = program.workers.iter().flat_map(|worker| &worker.instructions);
    instructions.into_iter().any(|instruction| matches!(instruction, Instruction::BackwardInput { .. }))
}

fn excess(plan: &Plan, stage: &Stage, what: &str, peak: &Peak, counted: u32, more: u64) -> String {
    let total = stage.memory.total;
    let mut text = format!(
        "stage {} has {} {what} {}, but the plan assumes {counted}: about {} more than its {}",
        stage.id.0,
        peak.most,
        peak.at,
        quantity::bytes(more),
        quantity::bytes(total)
    );
    let classes = stage.devices.iter().filter_map(|&device| class_of(&plan.cluster.classes, device));
    let own = classes.map(|class| class.device.memory.0);
    let limit = plan.cluster.memory_per_device.map(|limit| limit.0).into_iter().chain(own).min();
    if let Some(limit) = limit.filter(|limit| total.saturating_add(more) > *limit) {
        text += &format!(", on devices with {}", quantity::bytes(limit));
    }
    text
}

/// For each stage, the most in-flight micro-batches and the most weight versions of one worker.
fn peaks(program: &Program) -> (Vec<Peak>, Vec<Peak>) {
    let stages = program.stages.len();
    let (mut flights, mut versions) = (vec![Peak::default(); stages], vec![Peak::default(); stages]);
    for worker in &program.workers {
        let (mut in_flight, mut held) = (vec![0u32; stages], vec![1u32; stages]);
        for instruction in &worker.instructions {
            if let Some((work, ..)) = instruction.work() {
                let at = work.stage.index();
                in_flight[at] += u32::from(work.part == Phase::Forward);
                flights[at].meet(in_flight[at], || format!("at {work} on worker {}", name(worker)));
                in_flight[at] = in_flight[at].saturating_sub(u32::from(work.part.ends()));
            }
            match *instruction {
                Instruction::Step { stage, in_place: false, round, .. } => {
                    let at = stage.index();
                    held[at] += 1;
                    versions[at].meet(held[at], || format!("after step {round} on worker {}", name(worker)));
                }
                Instruction::Drop { stage, .. } => held[stage.index()] = held[stage.index()].saturating_sub(1),
                _ => {}
            }
        }
    }
    (flights, versions)
}

fn name(worker: &WorkerProgram) -> String {
    format!("{}.{}", worker.rank.0, worker.replica)
}
