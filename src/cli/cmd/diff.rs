//! `pipec plan diff`: two plans side by side.
//!
//! ```text
//! a.json and b.json differ in replicas, devices and memory of stages, predicted time
//! a.json is 1.333 times as fast as b.json: 444.4 samples/s in place of 333.3
//!
//! stage     ops      replicas           fwd+bwd               memory
//!     0  3 to 4  2 on 0-1 to 1 on 0  9.000 ms to 12.00 ms  3.000 MB
//! ```

use crate::cli::plan_differences::{faster, words};
use crate::cli::screen::Screen;
use crate::cli::stage_table;
use crate::cli::table::{Shrink, fit_table};
use compiler::export::stage_name::{per_stage, ranges, recomputed, replicas};
use compiler::plan::device_memory::fullest;
use compiler::plan::diff::{Diff, Moved, StageChange, diff, is_rearranged};
use compiler::plan::{Plan, Stage};
use compiler::text::name::short_name;
use compiler::text::quantity;
use pipec::error::Error;
use pipec::plan::read::read_checked;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// The most stages, and the most ranges of moved ops, that are listed.
const MOST_LISTED: usize = 24;

/// Compares two plans and prints the differences; fails with exit code 1 if they differ.
pub fn run(before: &Path, after: &Path, screen: &Screen) -> Result<(), Error> {
    let (left, right) = (read_checked(before)?, read_checked(after)?);
    let diff = diff(&left, &right);
    screen.json(&diff_json(&left, &right, &diff));
    let [first, second] = [before, after].map(|path| path.display().to_string());
    if diff.is_empty() {
        screen.text(&format!("{first} and {second} are the same plan"));
        return Ok(());
    }
    let difference = words(&left, &right, &diff).join(", ");
    screen.prose(&format!("{first} and {second} differ in {difference}\n"));
    if let Some(faster) = faster([&left, &right], [&first, &second]) {
        screen.prose(&format!("{faster}\n"));
    }
    screen.prose(&format!("\n{}", describe(&left, &right, &diff, screen.width())));
    Err(Error::negative(format!("{first} and {second} differ")).because(format!("in {difference}")).reported())
}

fn describe(left: &Plan, right: &Plan, diff: &Diff, width: Option<usize>) -> String {
    let mut text = String::new();
    if left.model.graph_hash != right.model.graph_hash || left.model.sha256 != right.model.sha256 {
        let [first, second] = [left, right].map(|plan| short_name(&plan.model.file));
        text += &format!("the plans are for different models: {first} and {second}\n");
    }
    let rows = compare_settings(left, right).into_iter().filter(|(_, before, after)| before != after);
    let rows: Vec<Vec<String>> = rows.map(|(name, before, after)| vec![name, before, after]).collect();
    if !rows.is_empty() {
        text += &format!("{}\n", stage_table::table(&["", "before", "after"], &[], rows));
    }
    let row = |change: &StageChange| {
        let (before, after) = (left.stages.get(change.stage), right.stages.get(change.stage));
        let cell = |property: &dyn Fn(&Stage) -> String| match (before.map(property), after.map(property)) {
            (Some(before), Some(after)) if before != after => format!("{before} to {after}"),
            // A stage that only one plan has is shown as that plan has it.
            (before, after) => before.or(after).unwrap_or_default(),
        };
        let prefix = match (before, after) {
            (None, _) => "new ",
            (_, None) => "gone ",
            _ => "",
        };
        let count_text =
            |ops: u64, sign: char| if ops > 0 { format!("{sign}{}", quantity::count(ops)) } else { String::new() };
        vec![
            format!("{prefix}{}", change.stage),
            cell(&|stage| quantity::count(stage.op_ids().count() as u64)),
            count_text(change.came, '+'),
            count_text(change.ops_lost, '-'),
            cell(&|stage| format!("{} on {}", replicas(stage), ranges(&stage.devices))),
            cell(&recomputed),
            cell(&|stage| quantity::time(stage.fwd_us + stage.bwd_us)),
            cell(&|stage| quantity::bytes(stage.memory.total)),
        ]
    };
    let changed: Vec<&StageChange> = diff.stages.iter().filter(|change| is_changed(left, right, change)).collect();
    let header = ["stage", "ops", "in", "out", "replicas", "", "fwd+bwd", "memory"];
    let shrinks = [Shrink::Omit(2), Shrink::Omit(3), Shrink::Cut(4, 20), Shrink::Omit(6)];
    let rows = changed.iter().take(MOST_LISTED).map(|change| row(change)).collect();
    if !changed.is_empty() {
        text += &fit_table(&header, &[0, 1, 2, 3, 6, 7], rows, &shrinks, width);
    }
    if changed.len() > MOST_LISTED {
        text += &format!("and {} more stages\n", changed.len() - MOST_LISTED);
    }
    for moved in diff.moved.iter().take(MOST_LISTED) {
        text += &format!("{}\n", describe_move(left, moved));
    }
    if diff.moved.len() > MOST_LISTED {
        text += &format!("and {} more ranges of ops\n", diff.moved.len() - MOST_LISTED);
    }
    let rows = compare_figures(left, right).into_iter().map(|figure| {
        let format = figure.format;
        vec![figure.name.to_string(), format(figure.before), format(figure.after), figure.change()]
    });
    text + &format!("\n{}", stage_table::table(&["", "before", "after", ""], &[1, 2, 3], rows.collect()))
}

/// True if a stage differs in what its row shows.
fn is_changed(left: &Plan, right: &Plan, change: &StageChange) -> bool {
    let (before, after) = (left.stages.get(change.stage), right.stages.get(change.stage));
    let figures = |stage: &Stage| (stage.fwd_us, stage.bwd_us, stage.memory.total);
    let is_same =
        |(before, after): (&Stage, &Stage)| !is_rearranged(before, after) && figures(before) == figures(after);
    change.came + change.ops_lost > 0 || !before.zip(after).is_some_and(is_same)
}

/// `ops 4 to 7 (conv2 … relu3): stage 0 to 1`.
fn describe_move(plan: &Plan, moved: &Moved) -> String {
    let (first, last) = (moved.ops.0, moved.ops.1 - 1);
    let ops = if first == last { format!("op {first}") } else { format!("ops {first} to {last}") };
    let stage = |stage: Option<usize>| stage.map_or("no stage".to_string(), |stage| format!("stage {stage}"));
    let names = [first, last].map(|op| op_name(plan, moved.from, op));
    let named = match names {
        [Some(first), Some(last)] if first != last => format!(" ({} … {})", short_name(&first), short_name(&last)),
        [Some(first), _] => format!(" ({})", short_name(&first)),
        _ => String::new(),
    };
    format!("{ops}{named}: {} to {}", stage(moved.from), stage(moved.to))
}

/// The name of an op of a stage, where the plan names all of them.
fn op_name(plan: &Plan, stage: Option<usize>, op: u32) -> Option<String> {
    let stage = plan.stages.get(stage?)?;
    let at = stage.op_ids().position(|id| id == op)?;
    stage.op_names.get(at).cloned()
}

fn compare_settings(left: &Plan, right: &Plan) -> Vec<(String, String, String)> {
    let settings = |plan: &Plan| {
        [
            ("cost model", plan.cost.name().to_string()),
            ("schedule", plan.schedule.kind.name().to_string()),
            ("micro-batch", plan.schedule.micro_batch.to_string()),
            ("micro-batches", plan.schedule.microbatches.to_string()),
            ("stages per rank", plan.schedule.chunks.to_string()),
            ("stages", plan.stages.len().to_string()),
            ("replicas", per_stage(&replicas_of(plan))),
            ("in flight", per_stage(&plan.schedule.in_flight)),
            ("devices", pipec::cluster::describe(&plan.cluster)),
            ("ZeRO", zero_text(plan)),
            ("optimizer", short_name(&plan.optimizer)),
            ("precision", short_name(plan.precision_name())),
            ("limit", plan.cluster.memory_per_device.map_or("none".to_string(), |limit| quantity::bytes(limit.0))),
        ]
    };
    let pair = |((name, before), (_, after)): ((&str, String), (&str, String))| (name.to_string(), before, after);
    let settings = settings(left).into_iter().zip(settings(right)).map(pair);
    let names: BTreeSet<&String> = left.options.keys().chain(right.options.keys()).collect();
    let option_text = |plan: &Plan, name: &str| match plan.options.get(name) {
        Some(Value::String(text)) => short_name(text),
        Some(value) => value.to_string(),
        None => "-".to_string(),
    };
    // Options with rows of their own are not repeated.
    let options = names.into_iter().filter(|name| !DUPLICATE_OPTIONS.contains(&name.as_str()));
    let options = options
        .map(|name| (format!("--{}", name.replace('_', "-")), option_text(left, name), option_text(right, name)));
    settings.chain(options).collect()
}

fn replicas_of(plan: &Plan) -> Vec<u32> {
    plan.stages.iter().map(|stage| stage.replicas).collect()
}

/// Options that a plan has in other words, too.
const DUPLICATE_OPTIONS: [&str; 5] = ["optimizer_state", "in_flight", "zero", "shard_degree", "stages"];

/// The ZeRO stage of all pipeline stages, or of each if they differ.
fn zero_text(plan: &Plan) -> String {
    let levels: Vec<String> = plan.stages.iter().map(|stage| stage.sharding().to_string()).collect();
    let common = levels.first().filter(|first| levels.iter().all(|level| level == *first));
    common.cloned().unwrap_or_else(|| levels.join(", "))
}

/// One predicted number of both plans, and its text form.
struct Figure {
    name: &'static str,
    key: &'static str,
    before: f64,
    after: f64,
    format: fn(f64) -> String,
    is_share: bool,
}

impl Figure {
    /// The signed change from the first to the second in percent; for a fraction, in percentage points. Tiny changes have no sign.
    fn change(&self) -> String {
        if self.after == self.before {
            return String::new();
        }
        let (percent, unit, step) = match (self.is_share, self.before > 0.0) {
            (true, _) => ((self.after - self.before) * 100.0, "points", 0.1),
            (false, true) => ((self.after / self.before - 1.0) * 100.0, "%", 0.01),
            (false, false) => return String::new(),
        };
        match percent.abs() < step / 2.0 {
            true => format!("less than {step} {unit}"),
            false if self.is_share => format!("{percent:+.1} {unit}"),
            false => format!("{percent:+.2} {unit}"),
        }
    }
}

fn compare_figures(left: &Plan, right: &Plan) -> Vec<Figure> {
    let figure = |name, key, value: &dyn Fn(&Plan) -> f64, format| {
        let (before, after) = (value(left), value(right));
        Figure { name, key, before, after, format, is_share: key == "bubble" }
    };
    let share: fn(f64) -> String = |share| format!("{:.1} %", share * 100.0);
    vec![
        figure("step time", "step_us", &|plan| plan.predicted.step_us, quantity::time),
        figure("samples/s", "throughput_per_s", &|plan| plan.predicted.throughput_per_s, quantity::samples),
        figure("bubble", "bubble", &|plan| plan.predicted.bubble, share),
        figure("peak memory", "peak_bytes", &|plan| fullest(plan) as f64, |bytes| quantity::bytes(bytes as u64)),
        figure("lower bound", "lower_bound_us", &|plan| plan.lower_bound_us, quantity::time),
    ]
}

fn diff_json(left: &Plan, right: &Plan, diff: &Diff) -> Value {
    let stage_json = |stage: Option<&Stage>| match stage {
        Some(stage) => json!({
            "ops": stage.op_ids().count(),
            "replicas": stage.replicas,
            "tensor_degree": stage.degree(),
            "devices": stage.devices,
            "recompute": stage.recompute,
            "recomputed_ops": stage.recomputed_op_ids().count(),
            "fwd_us": stage.fwd_us,
            "bwd_us": stage.bwd_us,
            "bytes": stage.memory.total,
        }),
        None => Value::Null,
    };
    let stages = diff.stages.iter().map(|change| {
        let (before, after) = (left.stages.get(change.stage), right.stages.get(change.stage));
        let rearranged = before.zip(after).is_none_or(|(before, after)| is_rearranged(before, after));
        json!({
            "stage": change.stage,
            "changed": rearranged || change.came + change.ops_lost > 0,
            "ops_in": change.came,
            "ops_out": change.ops_lost,
            "before": stage_json(before),
            "after": stage_json(after),
        })
    });
    let moved =
        diff.moved.iter().map(|moved| json!({"ops": [moved.ops.0, moved.ops.1], "from": moved.from, "to": moved.to}));
    let pairs = compare_figures(left, right).into_iter();
    let predicted: serde_json::Map<String, Value> =
        pairs.map(|figure| (figure.key.to_string(), json!([figure.before, figure.after]))).collect();
    json!({
        "equal": diff.is_empty(),
        "fields": diff.fields,
        "stages": stages.collect::<Vec<_>>(),
        "moved": moved.collect::<Vec<_>>(),
        "predicted": predicted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn differences_have_the_sign_of_what_they_are() {
        let change = |before: f64, after: f64, is_share: bool| {
            Figure { name: "", key: "", before, after, format: quantity::time, is_share }.change()
        };
        assert_eq!(change(100.0, 150.0, false), "+50.00 %");
        assert_eq!(change(150.0, 100.0, false), "-33.33 %");
        assert_eq!(change(1e6, 1e6 - 1.0, false), "less than 0.01 %");
        assert_eq!(change(0.0, 0.25, true), "+25.0 points");
        assert_eq!(change(0.25, 0.125, true), "-12.5 points");
        assert_eq!(change(0.25, 0.2499, true), "less than 0.1 points");
        assert_eq!(change(0.0, 1.0, false) + &change(2.0, 2.0, false), "");
    }
}
