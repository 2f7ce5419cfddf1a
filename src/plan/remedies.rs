//! Remedies for infeasible requests: which change of the request gives a plan.

use crate::costs::{CostInput, ModelFormat};
use crate::error::{Error, ErrorKind};
use crate::events::Silent;
use crate::plan::from_costs::solve;
use crate::plan::request::{PlanRequest, ScheduleChoice};
use crate::plan::request_costs;
use crate::plan::tensor_parallel::TensorParallel;
use crate::plan::zero::ZeroStage;
use compiler::plan::device_memory::fullest;
use compiler::plan::problem::{CostModel, Recomputation};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::{MOST, Zero};
use compiler::text::quantity;

/// Adds the single changes that make an infeasible request feasible, found by planning with each of them. Large requests get generic
/// advice instead.
pub fn with_remedies(request: &PlanRequest, size: Size, failure: Error) -> Error {
    if failure.kind() != ErrorKind::Infeasible {
        return failure;
    }
    let options = &request.options;
    let may_shard =
        options.cost == CostModel::Pipec && options.tensor_parallel() == TensorParallel::Never && size.devices > 1;
    let may_zero = options.zero() == ZeroStage::Given(Zero::default())
        && !options.is_inference()
        && options.cost == CostModel::Pipec;
    let may_recompute = options.recompute == Recomputation::Never && !options.is_inference();
    if size.ops > MOST_OPS || size.devices > MOST_DEVICES {
        let advice = [
            (may_recompute, "allow recomputation (`--recompute auto`)"),
            (may_zero, "shard with `--zero auto`"),
            (may_shard, "use tensor parallelism (`--tensor auto`)"),
            (size.micro_batch > 1, "use a smaller micro-batch"),
            (true, "use more devices"),
        ];
        let ways: Vec<&str> = advice.into_iter().filter(|(applies, _)| *applies).map(|(_, way)| way).collect();
        return failure.with_more_help(ways.join(", or "));
    }
    let changed = |change: &dyn Fn(&mut PlanRequest)| {
        let mut other = request.clone();
        change(&mut other);
        other
    };
    // For each kind of change, the smallest step that helps.
    let mut ways: Vec<Vec<(String, PlanRequest)>> = Vec::new();
    if matches!(request.costs, CostInput::Analytic(_)) {
        let halves =
            std::iter::successors(Some(size.micro_batch / 2), |half| Some(half / 2)).take_while(|half| *half > 0);
        let way = |half| (format!("`--micro-batch {half}`"), changed(&|other| other.micro_batch = Some(half)));
        ways.push(halves.map(way).collect());
    }
    if let Some(count) = request.cluster.gpus {
        let more = [2, 4].map(|times| count.saturating_mul(times));
        let way = |count| (format!("`--gpus {count}`"), changed(&|other| other.cluster.gpus = Some(count)));
        ways.push(more.into_iter().map(way).collect());
    }
    if may_recompute {
        ways.push(vec![(
            "`--recompute auto`".to_string(),
            changed(&|other| other.options.recompute = Recomputation::Auto),
        )]);
    }
    let format = request.format.unwrap_or_else(|| ModelFormat::of(&request.model));
    if may_shard && format != ModelFormat::Pipedream {
        let shards = changed(&|other| other.options.tensor_parallel = Some(TensorParallel::Auto));
        ways.push(vec![("`--tensor auto`".to_string(), shards)]);
    }
    if may_zero {
        let given = |level| Some(ZeroStage::Given(Zero::over_all(level)));
        let way = |level| (format!("`--zero {level}`"), changed(&|other| other.options.zero = given(level)));
        ways.push((1..=MOST).map(way).collect());
    }
    if options.schedule.is_none() && options.microbatches == 1 && !options.is_inference() {
        let flushed = changed(&|other| other.options.schedule = Some(ScheduleChoice::Named(Schedule::OneFOneB)));
        ways.push(vec![("`--schedule 1f1b`".to_string(), flushed)]);
    }
    let fits = |(name, other): &(String, PlanRequest)| {
        let costs = request_costs::costs(other, &Silent).ok()?;
        let plan = solve(&other.model, costs, &other.options).ok()?.plan;
        let speed = quantity::samples(plan.predicted.throughput_per_s);
        Some(format!("{name} (peak memory {}, {speed} samples/s)", quantity::bytes(fullest(&plan))))
    };
    let found: Vec<String> = ways.iter().filter_map(|way| way.iter().find_map(fits)).collect();
    let last: Vec<String> = ways.iter().filter_map(|way| Some(way.last()?.0.clone())).collect();
    match (found.is_empty(), last.is_empty()) {
        (false, _) => failure.with_more_help(format!("other changes that fit: {}", found.join(", "))),
        (true, false) => failure.with_more_help(format!("no single one of {} is sufficient", last.join(", "))),
        (true, true) => failure,
    }
}

#[derive(Clone, Copy)]
pub struct Size {
    pub ops: usize,
    pub devices: u32,
    /// Samples per micro-batch.
    pub micro_batch: u64,
}

/// The largest requests that are planned again with changes.
const MOST_OPS: usize = 400;
const MOST_DEVICES: u32 = 16;
