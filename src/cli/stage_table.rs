//! A plan as text: its heading, and its stages as a table. The table of many stages has one row for those alike
//! ([`stage_rows`](super::stage_rows)).

use crate::cli::stage_rows::{self, Row};
use crate::cli::table::{fits, folded_rows, omission};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use compiler::cluster::Device;
use compiler::export::stage_name::{LAYERS, layers_within, ranges, replicas, sparing};
use compiler::plan::problem::CostModel;
use compiler::plan::{Plan, Stage};
use compiler::profile::Method;
use compiler::schedule::StageSpec;
use compiler::schedule::pipeline::pipeline;
use compiler::text::name::short_name;
use compiler::text::quantity;
use pipec::cluster;
use pipec::costs::COSTS;

/// Characters of a full load bar.
const BAR_WIDTH: usize = 10;

/// The most characters of a list of stages or devices.
const MAX_LIST_WIDTH: usize = 24;

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

/// The model, devices, cost source and settings of the plan.
pub fn heading(plan: &Plan) -> String {
    let source = plan.options.get(COSTS).and_then(|name| name.as_str()).map(short_name);
    let costs = match plan.profile.method {
        Method::Measured => source.map_or("measured costs".to_string(), |name| format!("costs measured on {name}")),
        Method::Analytic => {
            let kind = source.unwrap_or_else(|| short_name(&plan.cluster.device.kind));
            format!("analytic costs of {kind} (nothing was measured)")
        }
        Method::Imported => "costs from the file".to_string(),
    };
    let model = if plan.model.file.is_empty() { "the model" } else { &plan.model.file };
    let (items, batch) = match batch_text(plan) {
        Some(batch) => (String::new(), format!("{batch}\n")),
        None => (microbatches_text(plan), String::new()),
    };
    format!(
        "{}: {} ops on {}\n{costs}, cost model {}, {}, {items}schedule {}\n{batch}",
        short_name(model),
        quantity::count(plan.model.ops),
        cluster::describe(&plan.cluster),
        plan.cost.name(),
        plan.precision_name(),
        plan.schedule.kind.name(),
    )
}

/// The micro-batches of a plan that does not train, or that has no samples.
fn microbatches_text(plan: &Plan) -> String {
    let schedule = &plan.schedule;
    let count_text = quantity::plural(u64::from(schedule.microbatches), "micro-batch", "micro-batches");
    format!("micro-batch {}, {count_text} per minibatch, ", schedule.micro_batch)
}

/// The global batch, the samples of one weight update, as the product of micro-batch, gradient accumulation steps and data-parallel
/// replicas. `None` for plans that do not train.
fn batch_text(plan: &Plan) -> Option<String> {
    let (schedule, stages) = (&plan.schedule, &plan.stages);
    if matches!(plan.cost, CostModel::Load | CostModel::Hybrid) || !schedule.kind.trains() {
        return None;
    }
    let (size, items) = (schedule.micro_batch, schedule.microbatches);
    let batch_of = |items: u32| format!("global batch {}", quantity::count(size.saturating_mul(items.into())));
    let size_text = quantity::count(size);
    let count_text = |items: u32| quantity::plural(items.into(), "micro-batch", "micro-batches");
    let replicas = stages.first().map(|first| first.replicas)?;
    let product = |steps: u32| {
        let global_batch = batch_of(steps.saturating_mul(replicas));
        let steps = quantity::plural(steps.into(), "gradient accumulation step", "gradient accumulation steps");
        let replicas = quantity::plural(replicas.into(), "data-parallel replica", "data-parallel replicas");
        format!("{global_batch} = micro-batch {size_text} × {steps} × {replicas}")
    };
    let is_even = stages.iter().all(|stage| stage.replicas == replicas);
    Some(match (schedule.kind.is_round_robin(), is_even) {
        // A stage updates once each of its replicas has had a micro-batch.
        (true, true) => product(1),
        (true, false) => {
            format!("micro-batch {size_text}; the global batch of a stage is one micro-batch for each of its replicas")
        }
        (false, true) if items.is_multiple_of(replicas) => product(items / replicas),
        (false, true) => {
            let steps = match (items / replicas, items.div_ceil(replicas)) {
                (0, max_steps) => format!("at most {max_steps} gradient accumulation step"),
                (min_steps, max_steps) => format!("{min_steps} or {max_steps} gradient accumulation steps"),
            };
            format!(
                "{} = {} of {size_text} over {replicas} data-parallel replicas, {steps}",
                batch_of(items),
                count_text(items)
            )
        }
        (false, false) => {
            format!(
                "{} = {} of {size_text}, distributed over the replicas of each stage",
                batch_of(items),
                count_text(items)
            )
        }
    })
}

/// Widths of the parts of a stage table.
#[derive(Clone, Copy)]
struct Layout {
    /// Characters of a stage's layers.
    layers: usize,
    /// Characters of a full load bar; 0 for none.
    bar: usize,
    /// True if messages and all-reduces have columns.
    links: bool,
}

/// The columns that a narrow table omits.
const OPTIONAL_COLUMNS: [&str; 2] = ["sends", "all-reduce"];

/// Table layouts, widest first; the first that fits is shown. Parts that follow from the others are omitted first.
const LAYOUTS: [Layout; 5] = [
    Layout { layers: LAYERS, bar: BAR_WIDTH, links: true },
    Layout { layers: 24, bar: BAR_WIDTH / 2, links: true },
    Layout { layers: 24, bar: BAR_WIDTH / 2, links: false },
    Layout { layers: 20, bar: BAR_WIDTH / 2, links: false },
    Layout { layers: 14, bar: 0, links: false },
];

/// The stage table, in lines of at most `width` characters if possible.
pub fn stages(plan: &Plan, width: Option<usize>) -> String {
    let mut tables = LAYOUTS.iter().map(|layout| draw_stages(plan, *layout));
    let widest = tables.next().unwrap_or_default();
    if fits(&widest, width) {
        return widest;
    }
    let narrow = tables.fold(widest.clone(), |narrow, narrower| if fits(&narrow, width) { narrow } else { narrower });
    let has = |table: &str, column: &str| table.lines().next().is_some_and(|header| header.contains(column));
    let missing: Vec<&str> =
        OPTIONAL_COLUMNS.into_iter().filter(|column| has(&widest, column) && !has(&narrow, column)).collect();
    narrow + &omission(&missing, width)
}

fn draw_stages(plan: &Plan, layout: Layout) -> String {
    let links = if layout.links { link_times(plan) } else { Vec::new() };
    let rows = stage_rows::rows(plan, &links);
    let row = |row: &Row<'_>| {
        let stages = &row.stages;
        let mut cells = vec![
            stages_label(row),
            quantity::count(stages[0].op_ids().count() as u64),
            layers(row, layout.layers),
            devices(plan, row),
            range_text(stages.iter().map(|stage| stage.fwd_us + stage.bwd_us), quantity::time),
        ];
        if !links.is_empty() {
            let time_or_dash = |us: f64| if us > 0.0 { quantity::time(us) } else { "-".to_string() };
            cells.extend([0, 1].map(|at| range_text(row.indices.iter().map(|index| links[*index][at]), time_or_dash)));
        }
        let memory =
            range_text(stages.iter().map(|stage| stage.memory.total as f64), |bytes| quantity::bytes(bytes as u64));
        cells.push(memory + &limit_share(plan, row) + &sparing(stages[0]));
        cells.push(load_bar(row.load, layout.bar));
        cells
    };
    let mut header = vec!["stage", "ops", "layers", "replicas", "fwd+bwd"];
    if !links.is_empty() {
        header.extend(["sends", "all-reduce"]);
    }
    header.extend(["memory", if layout.bar == BAR_WIDTH { "load per replica" } else { "load" }]);
    let right = [&[0, 1][..], &(4..header.len() - 1).collect::<Vec<_>>()].concat();
    let omitted = match stage_rows::omitted_count(plan, &rows) {
        0 => String::new(),
        stages => folded_rows(&quantity::plural(stages as u64, "stage", "stages")),
    };
    table(&header, &right, rows.iter().map(row).collect()) + &omitted
}

/// `12`, or `12-19` for stages alike.
fn stages_label(row: &Row<'_>) -> String {
    let ids: Vec<u32> = row.stages.iter().map(|stage| stage.id.0).collect();
    match (&ids[..], ranges(&ids)) {
        ([first, .., last], text) if text.chars().count() > MAX_LIST_WIDTH => {
            format!("{first}-{last} ({} stages)", quantity::count(ids.len() as u64))
        }
        (_, text) => text,
    }
}

fn layers(row: &Row<'_>, width: usize) -> String {
    match &row.stages[..] {
        [first, .., last] => format!("{} … {}", layers_within(first, width / 2), layers_within(last, width / 2)),
        _ => layers_within(row.stages[0], width),
    }
}

/// Replicas of each stage, and the devices of all.
fn devices(plan: &Plan, row: &Row<'_>) -> String {
    let first = row.stages[0];
    let (kinds, replicas) = (device_kinds(plan, first), replicas(first));
    if row.stages.len() == 1 {
        return format!("{replicas} on {}{kinds}", ranges(&first.devices));
    }
    let mut device_ids: Vec<u32> = row.stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
    device_ids.sort_unstable();
    device_ids.dedup();
    let devices_text = match ranges(&device_ids) {
        text if text.chars().count() > MAX_LIST_WIDTH => {
            format!("{} devices", quantity::count(device_ids.len() as u64))
        }
        text => text,
    };
    format!("{replicas} each, on {devices_text}{kinds}")
}

/// The smallest and the largest value as text; one text if both are the same.
fn range_text(values: impl Iterator<Item = f64>, show: impl Fn(f64) -> String) -> String {
    let (min, max) =
        values.fold((f64::INFINITY, 0.0), |(min, max): (f64, f64), value| (min.min(value), max.max(value)));
    match (show(min.min(max)), show(max)) {
        (min, max) if min == max => max,
        (min, max) => format!("{min} to {max}"),
    }
}

/// For each stage, the microseconds of its outgoing messages per micro-batch (activations and gradients) and of its all-reduce per
/// round. Empty for one device, and for cost models that charge links differently.
fn link_times(plan: &Plan) -> Vec<[f64; 2]> {
    let has_links = plan.cost == CostModel::Pipec && plan.cluster.devices > 1;
    let Some(pipeline) = has_links.then(|| pipeline(plan).ok()).flatten() else { return Vec::new() };
    let trains = plan.schedule.kind.trains();
    let mut send_us = vec![0.0; pipeline.stages.len()];
    for edge in &pipeline.edges {
        send_us[edge.from.index()] += edge.forward_us;
        if trains {
            send_us[edge.to.index()] += edge.backward_us;
        }
    }
    let all_reduce_us = |spec: &StageSpec| if trains { spec.all_reduce } else { 0.0 };
    send_us.into_iter().zip(&pipeline.stages).map(|(send_us, spec)| [send_us, all_reduce_us(spec)]).collect()
}

/// The memory of the stages in percent of the memory of their smallest devices, with all stages on these devices.
fn limit_share(plan: &Plan, row: &Row<'_>) -> String {
    let shares: Option<Vec<f64>> = row.stages.iter().map(|stage| stage_limit_share(plan, stage)).collect();
    shares.map_or(String::new(), |shares| {
        let (min, max) =
            (shares.iter().copied().fold(f64::INFINITY, f64::min), shares.iter().copied().fold(0.0, f64::max));
        match (format!("{min:.0}"), format!("{max:.0}")) {
            (min, max) if min == max => format!(", {max} %"),
            (min, max) => format!(", {min} to {max} %"),
        }
    })
}

/// The types of the devices of a stage, in a cluster with several device classes.
fn device_types<'a>(plan: &'a Plan, stage: &'a Stage) -> impl Iterator<Item = &'a Device> {
    let mut end = 0u32;
    let of_stage = plan.cluster.classes.iter().filter(move |class| {
        let start = end;
        end = end.saturating_add(class.count);
        stage.devices.iter().any(|device| (start..end).contains(device))
    });
    of_stage.map(|class| &class.device)
}

fn stage_limit_share(plan: &Plan, stage: &Stage) -> Option<f64> {
    let limits = device_types(plan, stage).map(|device| device.memory.0);
    let limit = limits.chain(plan.cluster.memory_per_device.map(|limit| limit.0)).min();
    limit.filter(|limit| *limit > 0).map(|limit| {
        let colocated = plan.stages.iter().filter(|stage_of_device| stage_of_device.devices == stage.devices);
        let bytes: f64 = colocated.map(|stage_of_device| stage_of_device.memory.total as f64).sum();
        bytes / limit as f64 * 100.0
    })
}

/// The device types of a stage, if the cluster has several device classes.
pub fn device_kinds(plan: &Plan, stage: &Stage) -> String {
    let mut kinds: Vec<&str> = Vec::new();
    for Device { kind, .. } in device_types(plan, stage) {
        if !kinds.contains(&kind.as_str()) {
            kinds.push(kind);
        }
    }
    if kinds.is_empty() { String::new() } else { format!(" ({})", short_name(&kinds.join(", "))) }
}

fn load_bar(share: f64, width: usize) -> String {
    let full = ((share * width as f64).round() as usize).min(width);
    let space = if width > 0 { " " } else { "" };
    format!("{}{}{space}{:3.0} %", "█".repeat(full), "░".repeat(width - full), share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::sample_plan::plan;
    use models::zoo;
    use pipec::plan::request::PlanOptions;

    #[test]
    fn a_narrow_terminal_gets_a_narrow_table() {
        let options = PlanOptions { replicas: Some(vec![1, 2, 1]), ..PlanOptions::default() };
        let plan = plan("gpt", &zoo::Options { structure: true, ..zoo::Options::default() }, 4, &options);
        let widest = |width| stages(&plan, width).lines().map(|line| line.chars().count()).max().unwrap_or(0);
        let free = widest(None);
        assert!(free > 100, "{free}");
        for width in [80, 90, 100, 110, 120, 200] {
            assert!(widest(Some(width)) <= width, "{width}: {}", stages(&plan, Some(width)));
        }
        assert_eq!(widest(Some(200)), free);
    }

    #[test]
    fn bars_are_filled_by_tenths() {
        assert_eq!(load_bar(0.5, 10), "█████░░░░░  50 %");
        assert_eq!(load_bar(1.0, 0), "100 %");
    }
}
