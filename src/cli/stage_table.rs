//! A plan as text: its heading, and its stages as a table.

use crate::cli::table::folded;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use compiler::export::quantity;
use compiler::export::stage_name::{LAYERS, layers_within, ranges, replicas, sparing};
use compiler::import::onnx::name::shown;
use compiler::plan::problem::CostModel;
use compiler::plan::{Plan, Stage};
use compiler::profile::Method;
use compiler::schedule::StageSpec;
use compiler::schedule::pipeline::pipeline;
use pipec::cluster;
use pipec::costs::COSTS;
use pipec::plan::request::cost_name;

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

/// The model, devices, cost source and settings of the plan.
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
        "{}: {} ops on {}\n{costs}, cost model {}, {}, micro-batch {}, {} per minibatch, schedule {}\n",
        shown(model),
        quantity::count(plan.model.ops),
        cluster::describe(&plan.cluster),
        cost_name(plan.cost),
        plan.precision_name(),
        plan.schedule.micro_batch,
        quantity::plural(u64::from(plan.schedule.microbatches), "micro-batch", "micro-batches"),
        plan.schedule.kind.name(),
    )
}

/// Widths of the parts of a stage table.
#[derive(Clone, Copy)]
struct Room {
    /// Characters of a stage's layers.
    layers: usize,
    /// Characters of a full load bar; 0 for none.
    bar: usize,
    /// True if messages and all-reduces have columns.
    links: bool,
}

/// The columns that a narrow table omits.
const COLUMNS: [&str; 2] = ["sends", "all-reduce"];

/// Table layouts, widest first; the first that fits is shown. Parts that follow from the others are omitted first.
const ROOMS: [Room; 5] = [
    Room { layers: LAYERS, bar: BAR, links: true },
    Room { layers: 24, bar: BAR / 2, links: true },
    Room { layers: 24, bar: BAR / 2, links: false },
    Room { layers: 20, bar: BAR / 2, links: false },
    Room { layers: 14, bar: 0, links: false },
];

/// The stage table, in lines of at most `width` characters if possible.
pub fn stages(plan: &Plan, width: Option<usize>) -> String {
    let fits = |text: &String| width.is_none_or(|width| text.lines().all(|line| line.chars().count() <= width));
    let mut tables = ROOMS.iter().map(|room| stages_in(plan, *room));
    let widest = tables.next().unwrap_or_default();
    if fits(&widest) {
        return widest;
    }
    let narrow = tables.fold(widest.clone(), |narrower, next| if fits(&narrower) { narrower } else { next });
    let has = |table: &str, column: &str| table.lines().next().is_some_and(|header| header.contains(column));
    let left: Vec<&str> = COLUMNS.into_iter().filter(|column| has(&widest, column) && !has(&narrow, column)).collect();
    match left.is_empty() {
        true => narrow,
        false => narrow + &folded(&format!("without {}: this terminal is too narrow\n", left.join(", ")), width),
    }
}

fn stages_in(plan: &Plan, room: Room) -> String {
    let load = |stage: &Stage| (stage.fwd_us + stage.bwd_us) / f64::from(stage.replicas.max(1));
    let most = plan.stages.iter().map(load).fold(0.0, f64::max);
    let links = if room.links { links(plan) } else { Vec::new() };
    let row = |(at, stage): (usize, &Stage)| {
        let mut row = vec![
            stage.id.0.to_string(),
            quantity::count(stage.op_ids().count() as u64),
            layers_within(stage, room.layers),
            format!("{} on {}{}", replicas(stage), ranges(&stage.devices), kinds(plan, stage)),
            quantity::time(stage.fwd_us + stage.bwd_us),
        ];
        row.extend(links.get(at).into_iter().flatten().cloned());
        row.push(quantity::bytes(stage.memory.total) + &of_limit(plan, stage) + &sparing(stage));
        row.push(bar(if most > 0.0 { load(stage) / most } else { 0.0 }, room.bar));
        row
    };
    let mut header = vec!["stage", "ops", "layers", "replicas", "fwd+bwd"];
    if !links.is_empty() {
        header.extend(["sends", "all-reduce"]);
    }
    header.extend(["memory", if room.bar == BAR { "load per replica" } else { "load" }]);
    let right = [&[0, 1][..], &(4..header.len() - 1).collect::<Vec<_>>()].concat();
    table(&header, &right, plan.stages.iter().enumerate().map(row).collect())
}

/// For each stage, the time of its outgoing messages per micro-batch (activations and gradients) and of its all-reduce per round.
/// Empty for one device, and for cost models that charge links differently.
fn links(plan: &Plan) -> Vec<[String; 2]> {
    let has_links = plan.cost == CostModel::Pipec && plan.cluster.devices > 1;
    let Some(pipeline) = has_links.then(|| pipeline(plan).ok()).flatten() else { return Vec::new() };
    let time_or_dash = |us: f64| if us > 0.0 { quantity::time(us) } else { "-".to_string() };
    let trains = plan.schedule.kind.trains();
    let one = |(at, shape): (usize, &StageSpec)| {
        let sent = pipeline.edges.iter().map(|edge| {
            let forward = if edge.from.index() == at { edge.forward_us } else { 0.0 };
            forward + if trains && edge.to.index() == at { edge.backward_us } else { 0.0 }
        });
        [time_or_dash(sent.sum()), time_or_dash(if trains { shape.all_reduce } else { 0.0 })]
    };
    pipeline.stages.iter().enumerate().map(one).collect()
}

/// The memory of a stage in percent of the memory of its smallest device, with all stages on these devices.
fn of_limit(plan: &Plan, stage: &Stage) -> String {
    let mut end = 0u32;
    let classes = plan.cluster.classes.iter().filter_map(|class| {
        let start = end;
        end = end.saturating_add(class.count);
        stage.devices.iter().any(|device| (start..end).contains(device)).then_some(class.device.memory.0)
    });
    let limit = classes.chain(plan.cluster.memory_per_device.map(|limit| limit.0)).min();
    limit.filter(|limit| *limit > 0).map_or(String::new(), |limit| {
        let beside = plan.stages.iter().filter(|other| other.devices == stage.devices);
        let held: f64 = beside.map(|other| other.memory.total as f64).sum();
        format!(", {:.0} %", held / limit as f64 * 100.0)
    })
}

/// The device types of a stage, if the cluster has several device classes.
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

fn bar(share: f64, width: usize) -> String {
    let full = ((share * width as f64).round() as usize).min(width);
    let space = if width > 0 { " " } else { "" };
    format!("{}{}{space}{:3.0} %", "█".repeat(full), "░".repeat(width - full), share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::cluster::read::gpus;
    use models::zoo;
    use pipec::costs::cost_source::CostSource;
    use pipec::model;
    use pipec::plan::from_costs::solve;
    use pipec::plan::request::PlanOptions;
    use std::path::Path;

    #[test]
    fn a_narrow_terminal_gets_a_narrow_table() {
        let built = zoo::build("gpt", &zoo::Options { structure: true, ..zoo::Options::default() }).unwrap();
        let loaded = model::of_zoo("gpt.onnx", zoo::to_bytes(&built.model)).unwrap();
        let costs = CostSource::of_loaded(loaded, None).unwrap().on(gpus(4, None).unwrap(), 4).unwrap();
        let options = PlanOptions { replicas: Some(vec![1, 2, 1]), ..PlanOptions::default() };
        let plan = solve(Path::new("gpt.onnx"), costs, &options).unwrap().plan;
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
        assert_eq!(bar(0.5, 10), "█████░░░░░  50 %");
        assert_eq!(bar(1.0, 0), "100 %");
    }
}
