//! The request of an existing plan, to evaluate its stages again or to plan for other devices.

use crate::costs::Costs;
use crate::error::Error;
use crate::plan::optimizer::Optimizer;
use crate::plan::request::{BucketSize, PlanOptions, ScheduleChoice};
use crate::plan::tensor_parallel::{TensorParallel, problem_as_trained};
use crate::plan::zero::ZeroStage;
use compiler::cluster::Bytes;
use compiler::plan::check::verify;
use compiler::plan::problem::{InFlight, Problem, Recomputation, Target};
use compiler::plan::zero::{MOST, Zero};
use compiler::plan::{Plan, buckets};
use serde_json::Value;

/// The problem whose solution is this plan, for evaluating other cuts. The costs of its tensor-parallel groups are those
/// of its stages as trained if these are the plan's.
pub fn problem(plan: &Plan, costs: Costs) -> Result<Problem, Error> {
    let known = costs.clone();
    let searched = searched(plan, costs)?;
    let trained = problem_as_trained(&searched, &known, plan);
    Ok(trained.filter(|trained| verify::check(trained, plan).is_ok()).unwrap_or(searched))
}

/// The problem with the costs that its search had.
fn searched(plan: &Plan, costs: Costs) -> Result<Problem, Error> {
    let shared = TensorParallel::costs_of(plan, &costs)?;
    let mut problem = costs.problem(plan.cost);
    problem.shared = shared;
    problem.objective = plan.objective;
    problem.activation_compression = number(plan, "activation_compression");
    problem.memory_limit = plan.cluster.memory_per_device;
    problem.optimizer_state = number(plan, "optimizer_state").unwrap_or(0.0);
    problem.bucket = bucket(plan);
    problem.zero = plan.zero();
    problem.schedule = plan.schedule.kind;
    problem.microbatches = plan.schedule.microbatches;
    problem.chunks = plan.schedule.chunks;
    problem.set_target(target(plan));
    problem.count_updates();
    Ok(problem)
}

/// The framework that a plan was made for.
pub fn target(plan: &Plan) -> Option<Target> {
    plan.options.get("target").and_then(Value::as_str).and_then(Target::from_name)
}

/// The options that a plan was made with, without constraints on its stages.
pub fn options(plan: &Plan) -> PlanOptions {
    let text = |name: &str| plan.options.get(name).and_then(Value::as_str);
    let default = PlanOptions::default();
    PlanOptions {
        cost: plan.cost,
        activation_compression: number(plan, "activation_compression"),
        memory_limit: plan.cluster.memory_per_device,
        microbatches: plan.schedule.microbatches,
        schedule: Some(ScheduleChoice::Named(plan.schedule.kind)),
        objective: plan.objective,
        target: target(plan),
        bucket: BucketSize::Bytes(bucket(plan)),
        zero: Some(match plan.options.get("zero") {
            Some(Value::String(_)) => ZeroStage::Auto,
            level => {
                let level = level.and_then(Value::as_u64).unwrap_or(0).min(MOST.into()) as u32;
                let degree = plan.options.get("shard_degree").and_then(Value::as_u64).unwrap_or(0);
                ZeroStage::Given(Zero { level, degree: degree.min(u32::MAX.into()) as u32 })
            }
        }),
        recompute: text("recompute").and_then(Recomputation::from_name).unwrap_or_default(),
        optimizer: Optimizer::from_name(&plan.optimizer).unwrap_or(default.optimizer),
        tensor_parallel: Some(TensorParallel::of_plan(plan)),
        no_replication: plan.options.get("no_replication") == Some(&Value::Bool(true)),
        in_flight: match text("in_flight") {
            Some("pipedream") => InFlight::Pipedream,
            _ => InFlight::Auto,
        },
        seed: plan.seed,
        ..default
    }
}

/// The size of gradient buckets.
pub fn bucket(plan: &Plan) -> Bytes {
    Bytes(plan.options.get("bucket_bytes").and_then(Value::as_u64).unwrap_or(buckets::USUAL_BYTES))
}

/// A numeric option of the planning request.
pub fn number(plan: &Plan, name: &str) -> Option<f64> {
    plan.options.get(name).and_then(Value::as_f64)
}
