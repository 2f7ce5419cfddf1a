//! Settings for torchtitan (`torchtitan/distributed/pipeline_parallel.py`): the modules of each model part in
//! `module_fqns_per_model_part`, the schedule, degrees of parallelism and batch sizes.
//!
//! torchtitan supports top-level modules and items of top-level lists (`tok_embeddings`, `layers.0`); `titan_names`
//! renames those of nested models. It assigns part k to rank k modulo ranks, so tables are only possible for such plans.
//! `1F1B` and `GPipe` need no table, nor do the schedules with V-shaped placement, `ZBVZeroBubble` and `DualPipeV`.
//!
//! torchtitan 0.3 reads command-line arguments, `torchtitan.args`; earlier versions also read `torchtitan.toml`.
//! `torchtitan.json` is for configurations in Python.

use super::layers::layers;
use super::orders::{Order, order};
use super::refusal::Refusal;
use super::titan_names::{Named, rename_modules};
use super::{Bundle, ExportInput, fit};
use crate::plan::problem::Target;
use crate::plan::schedule::Schedule;
use crate::plan::{Plan, Stage};
use crate::profile::precision::Precision;
use crate::profile::shared::ActivationSharding;
use serde_json::{Value, json};

const TOOL: &str = "torchtitan";

const TABLE: &str = "schedule.csv";

/// Writes `torchtitan.args`, `torchtitan.toml`, `torchtitan.json` and, for schedules that torchtitan does not have by
/// name, `schedule.csv`.
pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    let Order { table, ranks, microbatches, replicas } = order(input, TOOL)?;
    let Named { parts, note } = rename_modules(layers(plan, TOOL)?, TOOL)?;
    let degree = ranks.iter().max().map_or(1, |rank| rank + 1);
    let by_name = by_name(plan.schedule.kind, &table, degree, microbatches);
    let is_v = matches!(plan.schedule.kind, Schedule::Zbv | Schedule::DualPipeV);
    if !is_v && let Some(stage) = (0u32..).zip(&ranks).find(|(stage, rank)| **rank != stage % degree).map(|of| of.0) {
        let module = parts[stage as usize].first().cloned().unwrap_or_default();
        let rank = ranks[stage as usize];
        let why =
            format!("is on rank {rank}, and torchtitan assigns {} parts to ranks in a loop", plan.schedule.kind.name());
        return Err(Refusal::Place { module, stage, why });
    }
    let zero = fit::zero(plan, TOOL, Target::Torchtitan)?.level;
    let is_sharded = zero > 0 && replicas > 1;
    let shards = plan.stages.first().filter(|_| is_sharded).map_or(1, Stage::shards).max(1);
    let mut section = json!({
        "pipeline_parallel_degree": degree,
        "data_parallel_replicate_degree": replicas / shards,
        "data_parallel_shard_degree": shards,
        "pipeline_parallel_microbatch_size": plan.schedule.micro_batch,
        "pipeline_parallel_schedule": by_name.unwrap_or("PipelineScheduleMulti"),
        "module_fqns_per_model_part": parts,
    });
    if is_sharded {
        section["fsdp_reshard_after_forward"] = json!(if zero == 3 { "always" } else { "never" });
    }
    let tensor_degree = plan.stages.first().map_or(1, Stage::degree);
    if plan.activations() == ActivationSharding::Batch {
        return Err(Refusal::Experts { tool: TOOL, devices: tensor_degree });
    }
    if tensor_degree > 1 {
        section["tensor_parallel_degree"] = json!(tensor_degree);
    }
    if by_name.is_none() {
        section["pipeline_parallel_schedule_csv"] = json!(TABLE);
    }
    let batch = plan.schedule.micro_batch.saturating_mul(u64::from(microbatches));
    let precision = match plan.precision() {
        Some(Precision::Bf16) => "bfloat16",
        _ => "float32",
    };
    // Without a pipeline, torchtitan accumulates gradients over local batches.
    let training = json!({
        "local_batch_size": if degree > 1 { batch } else { plan.schedule.micro_batch },
        "global_batch_size": batch.saturating_mul(u64::from(replicas)),
        "mixed_precision_param": precision,
    });
    let mode = if fit::recomputing(plan) > 0 { "full" } else { "none" };
    let config = json!({ "parallelism": section, "training": training, "activation_checkpoint": { "mode": mode } });
    let json = serde_json::to_string_pretty(&config).unwrap_or_default() + "\n";
    let mut bundle = Bundle::of("torchtitan.args", arguments(&config, mode)?)
        .with("torchtitan.toml", toml(&config))
        .with("torchtitan.json", json);
    bundle.notes.extend(note);
    bundle.notes.extend(notes(plan, zero, is_sharded));
    bundle.notes.extend(fit::handed_on(plan, TOOL));
    let processes = u64::from(degree) * u64::from(replicas) * u64::from(tensor_degree);
    let folder = if by_name.is_none() { ", in FOLDER because of schedule.csv" } else { "" };
    bundle.notes.push(format!(
        "train with: {} -m torchtitan.train --module MODULE --config CONFIG $(cat FOLDER/torchtitan.args){folder}",
        fit::torchrun(plan, processes)
    ));
    Ok(if by_name.is_none() { bundle.with(TABLE, table) } else { bundle })
}

/// torchtitan's name of the schedule, if it runs the same table. Its 1F1B needs as many micro-batches as stages.
fn by_name(kind: Schedule, table: &str, ranks: u32, microbatches: u32) -> Option<&'static str> {
    let is_standard = |warmup: &dyn Fn(u32) -> u32| {
        let row = |rank: u32| {
            let first = warmup(rank).min(microbatches);
            let steady =
                (first..microbatches).flat_map(|next| [format!("{rank}B{}", next - first), format!("{rank}F{next}")]);
            let drain = (microbatches - first..microbatches).map(|next| format!("{rank}B{next}"));
            let fill = (0..first).map(|next| format!("{rank}F{next}"));
            fill.chain(steady).chain(drain).collect::<Vec<_>>().join(",")
        };
        table.lines().eq((0..ranks).map(row))
    };
    match kind {
        Schedule::Zbv => Some("ZBVZeroBubble"),
        Schedule::DualPipeV => Some("DualPipeV"),
        Schedule::Gpipe if is_standard(&|_| microbatches) => Some("GPipe"),
        Schedule::OneFOneB if microbatches >= ranks && is_standard(&|rank| ranks - rank) => Some("1F1B"),
        _ => None,
    }
}

/// What torchtitan does differently.
fn notes(plan: &Plan, zero: u32, is_sharded: bool) -> Vec<String> {
    let mut notes = Vec::new();
    if is_sharded && zero == 1 {
        notes.push("torchtitan has no ZeRO 1: it shards gradients too, as ZeRO 2".to_string());
    }
    if (1..plan.stages.len()).contains(&fit::recomputing(plan)) {
        notes.push(fit::recomputes_all(plan, TOOL));
    }
    if plan.precision() == Some(Precision::Fp16) {
        notes.push("torchtitan has no fp16: the settings are for fp32; `--precision bf16` plans for bf16".to_string());
    }
    notes
}

/// Formats sections as command-line arguments, one per line. The kind of activation checkpointing is a subcommand.
fn arguments(config: &Value, mode: &str) -> Result<String, Refusal> {
    let mut text = String::new();
    for (section, values) in config.as_object().into_iter().flatten() {
        for (key, value) in values.as_object().into_iter().flatten().filter(|_| section != "activation_checkpoint") {
            let value = match value {
                Value::Array(parts) => {
                    let parts: Result<Vec<String>, Refusal> =
                        (0u32..).zip(parts).map(|(at, part)| join_names(at, part)).collect();
                    parts?.join(" ")
                }
                Value::String(value) => value.clone(),
                value => value.to_string(),
            };
            text += &format!("--{section}.{key} {value}\n");
        }
    }
    // torchtitan refuses CUDA graphs with a pipeline, and has them by default.
    Ok(text + &format!("--training.disable_cuda_graphs\nactivation-checkpoint:{mode}\n"))
}

/// The modules of a part, separated by commas. The shell splits the file at spaces and expands patterns.
fn join_names(stage: u32, part: &Value) -> Result<String, Refusal> {
    let names: Vec<&str> = part.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let is_plain = |name: &&&str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    match names.iter().find(|name| !is_plain(name)) {
        Some(name) => {
            let why = "has a name that cannot be an argument".to_string();
            Err(Refusal::Place { module: name.to_string(), stage, why })
        }
        None => Ok(names.join(",")),
    }
}

/// Formats sections of plain values and lists as TOML. Every JSON string without DEL is a valid TOML string.
fn toml(config: &Value) -> String {
    let mut text = String::new();
    for (name, section) in config.as_object().into_iter().flatten() {
        text += &format!("[{name}]\n");
        for (key, value) in section.as_object().into_iter().flatten() {
            text += &match value {
                Value::Array(rows) => {
                    let rows: Vec<String> = rows.iter().map(|row| format!("    {},\n", toml_value(row))).collect();
                    format!("{key} = [\n{}]\n", rows.concat())
                }
                value => format!("{key} = {}\n", toml_value(value)),
            };
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

fn toml_value(value: &Value) -> String {
    value.to_string().replace('\u{7f}', "\\u007f")
}
