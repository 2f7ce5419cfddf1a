//! The candidates that a plan was chosen from, as `partition --compare` shows them.

use crate::narrow::{Give, fitted, folded};
use crate::{prediction, quantity, stages};
use compiler::partition::planner::{ComparedPlan, Planned};

/// Every candidate once: those that look the same in all columns share a row. The one that became the plan comes first and is marked.
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
    // Whoever found it, it is the answer of the one who was asked.
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
    let told = |(at, (names, row)): (usize, (Vec<&str>, Vec<String>))| {
        let mark = if at == 0 { "chosen" } else { "" };
        std::iter::once(names.join(", ")).chain(row).chain([mark.to_string()]).collect()
    };
    let rows = rows.into_iter().enumerate().map(told).collect();
    let time = if prediction::is_of_items(plan) { "micro-batch" } else { "minibatch" };
    let header = ["candidate", "replicas", time, "most memory", "fits", ""];
    let gives = [Give::Cut(1, 16), Give::Cut(0, 20), Give::Leave(4), Give::Leave(3)];
    let mut text = String::new();
    if plan.schedule.chunks > 1 {
        let kind = plan.schedule.kind.name();
        text += &format!("candidates of one stage on each device are no {kind}: they are what it is compared with\n");
    }
    if plan.predicted.objective_us.is_some() {
        let played = quantity::time(plan.predicted.minibatch_us);
        text +=
            &format!("times are those of the cost model's equations; the program of the chosen one takes {played}\n");
    }
    format!("\n{}{}", fitted(&header, &[2, 3], rows, &gives, width), folded(&text, width))
}

/// The devices that share each replica of a candidate; nothing where each replica is one.
fn of(candidate: &ComparedPlan) -> String {
    if candidate.tensor > 1 { format!(" of {}", candidate.tensor) } else { String::new() }
}

/// The devices of a candidate some of whose devices have several stages; nothing where each replica has its own.
fn on(candidate: &ComparedPlan) -> String {
    let replicas = candidate.replicas.iter().fold(0u32, |sum, &replicas| sum.saturating_add(replicas));
    match candidate.devices == replicas {
        true => String::new(),
        false => format!(" on {}", stages::plural(u64::from(candidate.devices), "device", "devices")),
    }
}
