//! Provenance of the plan: files, hashes, options, search.

use crate::export::report::Report;
use crate::export::report::markup::list;
use crate::plan::Plan;
use crate::plan::problem::Objective;
use crate::profile::Method;
use serde_json::Value;

pub fn provenance(report: &Report<'_>) -> String {
    let plan = report.plan;
    let or_none = |text: &str| if text.is_empty() { "none".to_string() } else { text.to_string() };
    let method = match plan.profile.method {
        Method::Measured => "measured",
        Method::Analytic => "analytic: not measured",
        Method::Imported => "imported",
    };
    let objective = match plan.objective {
        Objective::Throughput => "throughput",
        Objective::Memory => "memory",
        Objective::Latency => "latency",
    };
    let fallback = plan.search.fallback.clone().unwrap_or_else(|| "none, the search was complete".to_string());
    list(&[
        ("model", or_none(&plan.model.file)),
        ("model SHA-256", or_none(&plan.model.sha256)),
        ("graph hash", or_none(&plan.model.graph_hash)),
        ("import", import(plan)),
        ("costs", method.to_string()),
        ("profile SHA-256", or_none(&plan.profile.sha256)),
        ("SHA-256 of this plan", or_none(&report.plan_sha256)),
        ("schema", plan.schema.clone()),
        ("cost model", plan.cost.name().to_string()),
        ("objective", objective.to_string()),
        ("partitioner", partitioner(plan)),
        ("states explored", crate::text::quantity::count(plan.search.states)),
        ("fallback", fallback),
        ("optimizer", plan.optimizer.clone()),
        ("precision", plan.precision_name().to_string()),
        ("seed", plan.seed.to_string()),
        ("options", options(plan)),
        ("written by", format!("pipec {}", env!("CARGO_PKG_VERSION"))),
    ])
}

/// The requested partitioner, and whether constraints limited its search.
fn partitioner(plan: &Plan) -> String {
    let partitioner = plan.options.get("partitioner").and_then(Value::as_str).unwrap_or(&plan.search.method);
    let is_given = |name: &&str| match plan.options.get(*name) {
        Some(value) => *name != "in_flight" || value.is_array(),
        None => false,
    };
    let flag = |name: &str| format!("--{}", name.replace('_', "-"));
    let constraints: Vec<String> = CONSTRAINTS.iter().copied().filter(|name| is_given(name)).map(flag).collect();
    match constraints.is_empty() {
        true => partitioner.to_string(),
        false => format!("{partitioner}, within the constraints {}", constraints.join(", ")),
    }
}

/// Options that constrain the plans searched.
const CONSTRAINTS: [&str; 7] = ["stages", "cut_after", "pin", "max_stages", "no_replication", "target", "in_flight"];

fn import(plan: &Plan) -> String {
    let import = &plan.model.import;
    let mut entries: Vec<String> = import.dims.iter().map(|(name, size)| format!("{name} = {size}")).collect();
    entries.extend(import.batch_dims.iter().map(|(name, axis)| format!("batch of {name} is axis {axis}")));
    if import.train_mode {
        entries.push("restored to training mode".to_string());
    }
    if !import.freeze.is_empty() {
        entries.push(format!("{} frozen", import.freeze.join(", ")));
    }
    entries.extend(import.loss.iter().map(|loss| format!("loss {loss}")));
    if entries.is_empty() { "unchanged".to_string() } else { entries.join(", ") }
}

fn options(plan: &Plan) -> String {
    let value = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    plan.options.iter().map(|(name, it)| format!("{name} = {}", value(it))).collect::<Vec<_>>().join(", ")
}
