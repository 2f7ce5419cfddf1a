//! The candidates that a plan was chosen from, as `partition --compare` shows them.

use crate::cli::prediction;
use crate::cli::table::{Give, fitted, folded};
use compiler::partition::planned::{ComparedPlan, Planned};
use compiler::plan::problem::Objective;
use compiler::text::quantity;
use pipec::plan::result::{Losses, Tried, TriedPlan};
use std::collections::BTreeMap;

/// Lists every candidate once; candidates with equal columns share a row. The chosen one comes first and is marked.
pub fn table(planned: &Planned, width: Option<usize>) -> String {
    let row = |candidate: &ComparedPlan| {
        vec![
            candidate.replicas.iter().map(u32::to_string).collect::<Vec<_>>().join("-")
                + &of(candidate)
                + &on(candidate),
            quantity::time(candidate.minibatch_us),
            quantity::bytes(candidate.peak_bytes),
            if candidate.fits { "yes" } else { "no" }.to_string(),
        ]
    };
    let plan = &planned.plan;
    // The requested partitioner is named, whichever of its searches found the plan.
    let asked = plan.options.get("partitioner").and_then(|name| name.as_str()).unwrap_or(&plan.search.method);
    let mut rows: Vec<(Vec<&str>, Vec<String>)> = Vec::new();
    for candidate in &planned.compared {
        let (row, is_first) = (row(candidate), rows.is_empty());
        match rows.iter_mut().find(|(_, known)| *known == row) {
            Some((names, _)) if names.contains(&candidate.name) => {}
            Some((names, _)) => names.push(candidate.name),
            None if is_first && candidate.name != asked => rows.push((vec![asked, candidate.name], row)),
            None => rows.push((vec![candidate.name], row)),
        }
    }
    let marked = |(at, (names, row)): (usize, (Vec<&str>, Vec<String>))| {
        let mark = if at == 0 { "chosen" } else { "" };
        std::iter::once(names.join(", ")).chain(row).chain([mark.to_string()]).collect()
    };
    let rows = rows.into_iter().enumerate().map(marked).collect();
    let time = if prediction::is_of_items(plan) { "micro-batch" } else { "minibatch" };
    let header = ["candidate", "replicas", time, "peak memory", "fits", ""];
    let gives = [Give::Cut(1, 16), Give::Cut(0, 20), Give::Leave(4), Give::Leave(3)];
    let mut text = String::new();
    if plan.schedule.chunks > 1 {
        let kind = plan.schedule.kind.name();
        text += &format!("candidates with one stage per device do not use {kind}; they are listed for comparison\n");
    }
    if plan.predicted.objective_us.is_some() {
        let played = quantity::time(plan.predicted.minibatch_us);
        text += &format!(
            "times are estimates of the cost model; the simulated program of the chosen plan takes {played}\n"
        );
    }
    format!("\n{}{}", fitted(&header, &[2, 3], rows, &gives, width), folded(&text, width))
}

/// The tensor-parallel degree of a candidate; nothing if it is 1.
fn of(candidate: &ComparedPlan) -> String {
    if candidate.tensor > 1 { format!(" of {}", candidate.tensor) } else { String::new() }
}

/// The devices of a candidate with several stages per device; nothing if each replica has its own device.
fn on(candidate: &ComparedPlan) -> String {
    let replicas = candidate.replicas.iter().fold(0u32, |sum, &replicas| sum.saturating_add(replicas));
    match candidate.devices == replicas {
        true => String::new(),
        false => format!(" on {}", quantity::plural(u64::from(candidate.devices), "device", "devices")),
    }
}

/// The stages of a plan: `8 x 16` are eight stages of 16 replicas, `4 x 2 x 16` two of them on each of four ranks.
fn stages(plan: &TriedPlan) -> String {
    let replicas = &plan.replicas;
    if replicas.iter().any(|other| *other != replicas[0]) {
        return replicas.iter().map(u32::to_string).collect::<Vec<_>>().join("-");
    }
    let count = replicas.len() as u32 / plan.chunks.max(1);
    let chunks = if plan.chunks > 1 { format!("{} x ", plan.chunks) } else { String::new() };
    format!("{count} x {chunks}{}", replicas.first().copied().unwrap_or(1))
}

/// What keeps the busiest device from advancing the training, in percent of the time.
fn lost(losses: &Losses) -> String {
    let parts = [("idle", losses.idle), ("collectives", losses.collectives), ("recomputation", losses.recomputation)];
    let said = parts.into_iter().filter(|(_, part)| *part >= 0.005);
    said.map(|(name, part)| format!("{name} {:.0} %", part * 100.0)).collect::<Vec<_>>().join(", ")
}

/// Lists the configurations, best first, then those without a plan, grouped by reason.
pub fn combinations(tried: &[Tried], objective: Objective, width: Option<usize>) -> String {
    let mut planned: Vec<(&Tried, &TriedPlan)> =
        tried.iter().filter_map(|one| one.answer.as_ref().ok().map(|plan| (one, plan))).collect();
    planned.sort_by(|(_, a), (_, b)| match objective {
        Objective::Memory => a.peak_bytes.cmp(&b.peak_bytes),
        _ => b.throughput_per_s.total_cmp(&a.throughput_per_s),
    });
    let row = |(one, plan): &(&Tried, &TriedPlan)| {
        let [size, count] = [one.micro_batch.to_string(), one.microbatches.to_string()];
        let schedule = match (&plan.replicas[..], plan.tensor) {
            ([1], 1) => "one device",
            ([1], _) => "tensor parallel",
            ([_], _) => "data parallel",
            _ => one.schedule.name(),
        };
        vec![
            schedule.to_string(),
            stages(plan),
            plan.tensor.to_string(),
            if plan.zero > 0 { plan.zero.to_string() } else { String::new() },
            size,
            count,
            quantity::samples(plan.throughput_per_s),
            quantity::bytes(plan.peak_bytes),
            lost(&plan.losses),
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
    let table = fitted(&header, &[2, 3, 4, 5, 6, 7], rows, &[Give::Leave(5), Give::Leave(7), Give::Leave(3)], width);
    let mut text = String::new();
    let mut refused: BTreeMap<&str, Vec<&Tried>> = BTreeMap::new();
    for one in tried {
        if let Err(why) = &one.answer {
            refused.entry(why).or_default().push(one);
        }
    }
    for (why, all) in refused {
        let mut names: Vec<&str> = all.iter().map(|one| one.schedule.name()).collect();
        names.sort_unstable();
        names.dedup();
        text += &format!(
            "{} of {}: {why}\n",
            quantity::plural(all.len() as u64, "configuration", "configurations"),
            names.join(", ")
        );
    }
    format!("\n{table}{}", folded(&text, width))
}
