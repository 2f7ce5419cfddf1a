//! Reading and printing `plan.json`, and its JSON Schema.

use crate::plan::{Plan, SCHEMA};
use crate::profile::MAX_INTERVAL;
use crate::profile::json::{self, JsonError};
use serde_json::Value;

/// The content of a plan file is validated by `plan/check`, not here.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanFileError {
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error("schema is `{found}`, expected `{SCHEMA}`")]
    Schema { found: String },
    #[error("unknown field `{field}`; fields of other tools start with `x-`")]
    Unknown { field: String },
    #[error("`stages[{stage}].weight_grad_us` is {weight_grad_us}, but must not exceed `bwd_us`, which is {bwd_us}")]
    Part { stage: usize, weight_grad_us: f64, bwd_us: f64 },
    #[error(
        "`profile.interval` is [{low:?}, {high:?}]; the first must be from 0 to 1, the second from 1 to {MAX_INTERVAL}"
    )]
    Interval { low: f64, high: f64 },
    #[error("`profile.workers` is 0; it must be at least 1")]
    Workers,
    #[error("`{field}` is {value}; it must be finite and not negative")]
    Figure { field: String, value: f64 },
}

/// Parses a plan. Duplicate keys are errors; so are unknown top-level fields unless they start with `x-`.
pub fn from_json(text: &str) -> Result<Plan, PlanFileError> {
    let plan: Plan = json::read(text)?;
    check(&plan)?;
    Ok(plan)
}

/// Prints a plan: equal plans give equal bytes, and the text ends with a newline.
pub fn to_json(plan: &Plan) -> Result<String, PlanFileError> {
    check(plan)?;
    Ok(json::print(plan)?)
}

/// The JSON Schema of `plan.json`.
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Plan).to_value();
    if let Value::Object(object) = &mut schema {
        object.insert("patternProperties".into(), serde_json::json!({ "^x-": {} }));
        object.insert("additionalProperties".into(), Value::Bool(false));
    }
    schema
}

fn check(plan: &Plan) -> Result<(), PlanFileError> {
    if plan.schema != SCHEMA {
        let found = plan.schema.chars().take(40).map(|c| if c.is_control() { '?' } else { c }).collect();
        return Err(PlanFileError::Schema { found });
    }
    if let Some(field) = plan.extra.keys().find(|key| !key.starts_with("x-")) {
        let field = field.chars().take(60).map(|c| if c.is_control() { '?' } else { c }).collect();
        return Err(PlanFileError::Unknown { field });
    }
    let figure = |field: String, value: f64| {
        let fine = value.is_finite() && value >= 0.0;
        if fine { Ok(()) } else { Err(PlanFileError::Figure { field, value }) }
    };
    let predicted = &plan.predicted;
    figure("predicted.minibatch_us".into(), predicted.minibatch_us)?;
    figure("predicted.step_us".into(), predicted.step_us)?;
    figure("predicted.throughput_per_s".into(), predicted.throughput_per_s)?;
    figure("predicted.bubble".into(), predicted.bubble)?;
    if plan.profile.workers == 0 {
        return Err(PlanFileError::Workers);
    }
    if let Some([low, high]) = plan.profile.interval
        && !((0.0..=1.0).contains(&low) && (1.0..=MAX_INTERVAL).contains(&high))
    {
        return Err(PlanFileError::Interval { low, high });
    }
    figure("lower_bound_us".into(), plan.lower_bound_us)?;
    figure("baselines.single".into(), plan.baselines.single)?;
    figure("baselines.data_parallel".into(), plan.baselines.data_parallel)?;
    figure("baselines.uniform".into(), plan.baselines.uniform)?;
    for (at, level) in plan.cluster.levels.iter().enumerate() {
        figure(format!("cluster.levels[{at}].bandwidth"), level.bandwidth.0)?;
        figure(format!("cluster.levels[{at}].latency"), level.latency.0)?;
    }
    for (at, stage) in plan.stages.iter().enumerate() {
        figure(format!("stages[{at}].fwd_us"), stage.fwd_us)?;
        figure(format!("stages[{at}].bwd_us"), stage.bwd_us)?;
        if let Some(weight_grad_us) = stage.weight_grad_us {
            figure(format!("stages[{at}].weight_grad_us"), weight_grad_us)?;
            if weight_grad_us > stage.bwd_us {
                return Err(PlanFileError::Part { stage: at, weight_grad_us, bwd_us: stage.bwd_us });
            }
        }
    }
    Ok(())
}
