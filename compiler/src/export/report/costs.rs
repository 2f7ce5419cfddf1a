//! The ops in order with the cuts between them, and the effect of moving each cut.

use crate::export::escape::short;
use crate::export::report::markup::{Table, details, paragraph};
use crate::export::report::{CutCost, ModelInfo, Move};
use crate::export::stage_name::layers;
use crate::plan::{Plan, Stage};
use crate::profile::cost_graph::OpCost;
use crate::text::quantity;

/// Maximum number of op rows; beyond it, consecutive ops of one module share a row.
const ROWS: usize = 400;
/// Relative differences below this are shown as equal.
const EQUAL: f64 = 5e-5;

pub fn tables(plan: &Plan, modelled: &ModelInfo) -> String {
    let mut text = String::new();
    if !modelled.faults.is_empty() {
        text +=
            &paragraph("warning", "The plan's figures do not follow from these costs, so its cuts are not evaluated:");
        modelled.faults.iter().for_each(|fault| text += &paragraph("quiet", fault));
        return text;
    }
    if !modelled.cuts.is_empty() {
        text += &cuts(plan, modelled);
    }
    text + &ops(plan, modelled)
}

fn cuts(plan: &Plan, modelled: &ModelInfo) -> String {
    let caption = "Cuts. Effect on minibatch time of moving each cut by one op, re-evaluated by the plan checker.";
    let header = ["cut", "tensors", "bytes", "one op earlier", "op that moves", "one op later", "op that moves"];
    let mut table = Table::new(caption, &header, &[1, 2, 3, 5]);
    for cut in &modelled.cuts {
        let [earlier, later] = [&cut.earlier, &cut.later].map(|moved| change(plan, moved.as_ref()));
        let [first, second] = [&cut.earlier, &cut.later].map(|moved| name(modelled, moved.as_ref()));
        table.row(&[
            format!("{} | {}", cut.before, cut.before + 1),
            cut.tensors.to_string(),
            quantity::bytes(cut.bytes),
            earlier,
            first,
            later,
            second,
        ]);
    }
    table.html()
}

/// The change of the minibatch time, such as `+1.2 %`, or the reason why the op cannot move.
fn change(plan: &Plan, moved: Option<&Move>) -> String {
    let Some(moved) = moved else { return "no legal move".to_string() };
    let share = moved.minibatch_us / plan.predicted.by_equations_us() - 1.0;
    let time = if !share.is_finite() {
        quantity::duration(moved.minibatch_us)
    } else if share.abs() < EQUAL {
        "no change".to_string()
    } else {
        format!("{}{:.2} %", if share > 0.0 { "+" } else { "−" }, share.abs() * 100.0)
    };
    if moved.fits { time } else { format!("{time}, does not fit") }
}

fn name(modelled: &ModelInfo, moved: Option<&Move>) -> String {
    let Some(moved) = moved else { return String::new() };
    let first = moved.ops.first().and_then(|op| modelled.graph.ops.get(*op as usize));
    let name = first.map_or(String::new(), |op| short(op_label(op), 34));
    if moved.ops.len() > 1 { format!("{name} and {} with it", moved.ops.len() - 1) } else { name }
}

fn op_label(op: &OpCost) -> &str {
    if op.name.is_empty() { &op.op } else { &op.name }
}

#[derive(Default)]
struct Row {
    name: String,
    ops: u64,
    fwd_us: f64,
    bwd_us: f64,
    weight_grad_us: f64,
    param_bytes: u64,
    saved_bytes: u64,
    out_bytes: u64,
}

fn ops(plan: &Plan, modelled: &ModelInfo) -> String {
    let total = modelled.graph.ops.len();
    let depth = depth(plan, modelled);
    let note = match depth {
        Some(_) => {
            format!("The model has {} ops; consecutive ops of one module share a row.", quantity::count(total as u64))
        }
        None => format!("All {} ops. Times and sizes are per micro-batch.", quantity::count(total as u64)),
    };
    let total_us: f64 = modelled.graph.ops.iter().map(|op| op.fwd_us + op.bwd_us).sum();
    let header = ["op", "ops", "forward", "backward", "for weights", "share", "parameters", "saved", "output"];
    let mut table = Table::new(&note, &header, &[1, 2, 3, 4, 5, 6, 7, 8]);
    for (at, stage) in plan.stages.iter().enumerate() {
        if at > 0 {
            table.line("cut", &cut_line(at - 1, modelled.cuts.get(at - 1)));
        }
        table.line("stage", &format!("Stage {at}: {}", short(&layers(stage), 80)));
        for row in rows(stage, modelled, depth) {
            let share = if total_us > 0.0 { (row.fwd_us + row.bwd_us) / total_us * 100.0 } else { 0.0 };
            table.row(&[
                short(&row.name, 60),
                row.ops.to_string(),
                quantity::duration(row.fwd_us),
                quantity::duration(row.bwd_us),
                quantity::duration(row.weight_grad_us),
                format!("{share:.1} %"),
                quantity::bytes(row.param_bytes),
                quantity::bytes(row.saved_bytes),
                quantity::bytes(row.out_bytes),
            ]);
        }
    }
    details("Ops and cuts", &table.html())
}

fn cut_line(before: usize, cut: Option<&CutCost>) -> String {
    let tensor_text = cut.map_or(String::new(), |cut| {
        let tensors = quantity::plural(cut.tensors as u64, "tensor", "tensors");
        format!(": {tensors}, {} per micro-batch in each direction", quantity::bytes(cut.bytes))
    });
    format!("cut {before} | {}{tensor_text}", before + 1)
}

/// The maximum module path depth that keeps the number of rows within the limit; `None` if each op has its own row.
fn depth(plan: &Plan, modelled: &ModelInfo) -> Option<usize> {
    if modelled.graph.ops.len() <= ROWS {
        return None;
    }
    let count = |depth| plan.stages.iter().map(|stage| rows(stage, modelled, Some(depth)).len()).sum::<usize>();
    Some((0..=6).rev().find(|depth| count(*depth) <= ROWS).unwrap_or(0))
}

fn rows(stage: &Stage, modelled: &ModelInfo, depth: Option<usize>) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let stage_ops = stage.op_ids().filter_map(|op| modelled.graph.ops.get(op as usize));
    for op in stage_ops {
        let name = match depth {
            None => op_label(op).to_string(),
            Some(depth) => module(op, depth),
        };
        let is_same = depth.is_some() && rows.last().is_some_and(|row| row.name == name);
        if !is_same {
            rows.push(Row { name, ..Row::default() });
        }
        let Some(row) = rows.last_mut() else { continue };
        row.ops += 1;
        row.fwd_us += op.fwd_us;
        row.bwd_us += op.bwd_us;
        row.weight_grad_us += op.weight_part_us();
        row.param_bytes = row.param_bytes.saturating_add(op.param_bytes);
        row.saved_bytes = row.saved_bytes.saturating_add(op.saved_bytes);
        row.out_bytes = op.out_bytes;
    }
    rows
}

fn module(op: &OpCost, depth: usize) -> String {
    let parts: Vec<&str> = op.module.split('.').filter(|part| !part.is_empty()).take(depth).collect();
    if parts.is_empty() { "outside modules".to_string() } else { parts.join(".") }
}
