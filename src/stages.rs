//! A plan as people read it: what it is for, and its stages as a table.

use crate::machines;
use crate::quantity;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use compiler::export::stage_name::{layers, ranges};
use compiler::import::onnx::name::shown;
use compiler::plan::{Plan, Stage};
use compiler::profile::Method;

/// The option of a plan that names the device whose costs it was made from.
pub const COSTS: &str = "costs";

/// Characters of a full load bar.
const BAR: usize = 10;

/// A table without lines; the columns in `right` are aligned to the right.
pub fn table(header: &[&str], right: &[usize], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for &index in right {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_string() + "\n").collect()
}

/// What the plan is for and where its costs came from, in one line.
pub fn heading(plan: &Plan) -> String {
    let source = plan.options.get(COSTS).and_then(|name| name.as_str()).map(shown);
    let costs = match plan.profile.method {
        Method::Measured => source.map_or("measured costs".to_string(), |name| format!("costs measured on {name}")),
        Method::Analytic => {
            let kind = source.unwrap_or_else(|| shown(&plan.cluster.device.kind));
            format!("analytic costs of {kind} (nothing was measured)")
        }
        Method::Imported => "costs from the file".to_string(),
    };
    let model = if plan.model.file.is_empty() { "the model" } else { &plan.model.file };
    format!(
        "{}: {} ops on {}\n{costs}, cost model {}, {}, micro-batch {}, {} a minibatch, schedule {}\n",
        shown(model),
        quantity::count(plan.model.ops),
        machines::describe(&plan.cluster),
        crate::cmd::partition::cost_name(plan.cost),
        plan.dtype,
        plan.schedule.micro_batch,
        plural(u64::from(plan.schedule.microbatches), "micro-batch", "micro-batches"),
        plan.schedule.kind.name(),
    )
}

/// The stage table.
pub fn stages(plan: &Plan) -> String {
    let load = |stage: &Stage| (stage.fwd_us + stage.bwd_us) / f64::from(stage.replicas.max(1));
    let most = plan.stages.iter().map(load).fold(0.0, f64::max);
    let row = |stage: &Stage| {
        vec![
            stage.id.0.to_string(),
            quantity::count(stage.op_ids().count() as u64),
            layers(stage),
            format!("{} on {}{}", stage.replicas, ranges(&stage.devices), kinds(plan, stage)),
            quantity::time(stage.fwd_us + stage.bwd_us),
            quantity::bytes(stage.memory.total) + if stage.recompute { ", recomputed" } else { "" },
            bar(if most > 0.0 { load(stage) / most } else { 0.0 }),
        ]
    };
    let header = ["stage", "ops", "layers", "replicas", "fwd+bwd", "memory", "load per replica"];
    table(&header, &[0, 1, 4, 5], plan.stages.iter().map(row).collect())
}

/// The kinds of a stage's devices, where the cluster has several classes.
fn kinds(plan: &Plan, stage: &Stage) -> String {
    let mut kinds: Vec<&str> = Vec::new();
    let mut end = 0u32;
    for class in &plan.cluster.classes {
        let start = end;
        end = end.saturating_add(class.count);
        if stage.devices.iter().any(|device| (start..end).contains(device))
            && !kinds.contains(&class.device.kind.as_str())
        {
            kinds.push(&class.device.kind);
        }
    }
    if kinds.is_empty() { String::new() } else { format!(" ({})", shown(&kinds.join(", "))) }
}

fn bar(share: f64) -> String {
    let full = (share * BAR as f64).round() as usize;
    format!("{}{} {:3.0} %", "█".repeat(full.min(BAR)), "░".repeat(BAR.saturating_sub(full)), share * 100.0)
}

/// `1 op`, `2 ops`.
pub fn plural(count: u64, one: &str, many: &str) -> String {
    quantity::plural(count, one, many)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_filled_by_tenths() {
        assert_eq!(bar(0.5), "█████░░░░░  50 %");
    }
}
