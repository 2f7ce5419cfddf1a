//! The candidates that a plan was chosen from, as `partition --compare` shows them.

use crate::cli::prediction;
use crate::cli::table::{Shrink, fit_table, wrap};
use compiler::partition::planned::{ComparedPlan, Planned};
use compiler::text::quantity;
use pipec::plan::result::{Losses, Tried, TriedPlan};
use std::collections::BTreeMap;

/// Lists every candidate once; candidates with equal columns share a row. The chosen one comes first and is marked.
pub fn table(planned: &Planned, width: Option<usize>) -> String {
    let row = |candidate: &ComparedPlan| {
        vec![
            candidate.replicas.iter().map(u32::to_string).collect::<Vec<_>>().join("-")
                + &degree_text(candidate)
                + &devices_text(candidate),
            quantity::time(candidate.minibatch_us),
            quantity::bytes(candidate.peak_bytes),
            if candidate.fits { "yes" } else { "no" }.to_string(),
        ]
    };
    let plan = &planned.plan;
    // The requested partitioner is named, whichever of its searches found the plan.
    let requested = plan.options.get("partitioner").and_then(|name| name.as_str()).unwrap_or(&plan.search.method);
    let mut rows: Vec<(Vec<&str>, Vec<String>)> = Vec::new();
    for candidate in &planned.compared {
        let (row, is_first) = (row(candidate), rows.is_empty());
        match rows.iter_mut().find(|(_, other)| *other == row) {
            Some((names, _)) if names.contains(&candidate.name) => {}
            Some((names, _)) => names.push(candidate.name),
            None if is_first && candidate.name != requested => rows.push((vec![requested, candidate.name], row)),
            None => rows.push((vec![candidate.name], row)),
        }
    }
    let with_mark = |(at, (names, row)): (usize, (Vec<&str>, Vec<String>))| {
        let mark = if at == 0 { "chosen" } else { "" };
        std::iter::once(names.join(", ")).chain(row).chain([mark.to_string()]).collect()
    };
    let rows = rows.into_iter().enumerate().map(with_mark).collect();
    let time = if prediction::is_per_microbatch(plan) { "micro-batch" } else { "minibatch" };
    let header = ["candidate", "replicas", time, "peak memory", "fits", ""];
    let shrinks = [Shrink::Cut(1, 16), Shrink::Cut(0, 20), Shrink::Omit(4), Shrink::Omit(3)];
    let mut text = String::new();
    if plan.schedule.chunks > 1 {
        let kind = plan.schedule.kind.name();
        text += &format!("candidates with one stage per device do not use {kind}; they are listed for comparison\n");
    }
    if plan.predicted.objective_us.is_some() {
        let simulated_time = quantity::time(plan.predicted.minibatch_us);
        text += &format!(
            "times are estimates of the cost model; the simulated program of the chosen plan takes {simulated_time}\n"
        );
    }
    format!("\n{}{}", fit_table(&header, &[2, 3], rows, &shrinks, width), wrap(&text, width))
}

/// The tensor-parallel degree of a candidate; nothing if it is 1.
fn degree_text(candidate: &ComparedPlan) -> String {
    if candidate.tensor > 1 { format!(" of {}", candidate.tensor) } else { String::new() }
}

/// The devices of a candidate with several stages per device; nothing if each replica has its own device.
fn devices_text(candidate: &ComparedPlan) -> String {
    let replicas = candidate.replicas.iter().fold(0u32, |sum, &replicas| sum.saturating_add(replicas));
    match candidate.devices == replicas {
        true => String::new(),
        false => format!(" on {}", quantity::plural(u64::from(candidate.devices), "device", "devices")),
    }
}

/// The stages of a plan: `8 x 16` are eight stages of 16 replicas, `4 x 2 x 16` two of them on each of four ranks.
fn stages_text(plan: &TriedPlan) -> String {
    let replicas = &plan.replicas;
    if replicas.iter().any(|count| *count != replicas[0]) {
        return replicas.iter().map(u32::to_string).collect::<Vec<_>>().join("-");
    }
    let count = replicas.len() as u32 / plan.chunks.max(1);
    let chunks = if plan.chunks > 1 { format!("{} x ", plan.chunks) } else { String::new() };
    format!("{count} x {chunks}{}", replicas.first().copied().unwrap_or(1))
}

/// What keeps the busiest device from advancing the training, in percent of the time.
fn losses_text(losses: &Losses) -> String {
    let parts = [("idle", losses.idle), ("collectives", losses.collectives), ("recomputation", losses.recomputation)];
    let visible = parts.into_iter().filter(|(_, share)| *share >= 0.005);
    visible.map(|(name, share)| format!("{name} {:.0} %", share * 100.0)).collect::<Vec<_>>().join(", ")
}

/// Lists the configurations, then those without a plan, grouped by reason.
pub fn combinations(tried: &[Tried], width: Option<usize>) -> String {
    let planned: Vec<(&Tried, &TriedPlan)> = tried
        .iter()
        .filter_map(|configuration| configuration.answer.as_ref().ok().map(|plan| (configuration, plan)))
        .collect();
    let row = |(configuration, plan): &(&Tried, &TriedPlan)| {
        let [size, count] = [configuration.micro_batch.to_string(), configuration.microbatches.to_string()];
        let schedule = match (&plan.replicas[..], plan.tensor) {
            ([1], 1) => "one device",
            ([1], _) => "tensor parallel",
            ([_], _) => "data parallel",
            _ => configuration.schedule.name(),
        };
        vec![
            schedule.to_string(),
            stages_text(plan),
            plan.tensor.to_string(),
            if plan.zero.level > 0 { plan.zero.to_string() } else { String::new() },
            size,
            count,
            quantity::samples(plan.throughput_per_s),
            quantity::bytes(plan.peak_bytes),
            losses_text(&plan.losses),
        ]
    };
    let header = [
        "schedule",
        "stages",
        "tensor",
        "ZeRO",
        "micro-batch",
        "micro-batches",
        "samples/s",
        "peak memory",
        "time lost on the busiest device",
    ];
    let rows = planned.iter().map(row).collect();
    let table =
        fit_table(&header, &[2, 3, 4, 5, 6, 7], rows, &[Shrink::Omit(5), Shrink::Omit(7), Shrink::Omit(3)], width);
    let mut text = String::new();
    let mut failures: BTreeMap<&str, Vec<&Tried>> = BTreeMap::new();
    for configuration in tried {
        if let Err(why) = &configuration.answer {
            failures.entry(why).or_default().push(configuration);
        }
    }
    for (why, configurations) in failures {
        let mut names: Vec<&str> = configurations.iter().map(|configuration| configuration.schedule.name()).collect();
        names.sort_unstable();
        names.dedup();
        text += &format!(
            "{} of {}: {why}\n",
            quantity::plural(configurations.len() as u64, "configuration", "configurations"),
            names.join(", ")
        );
    }
    format!("\n{table}{}", wrap(&text, width))
}
