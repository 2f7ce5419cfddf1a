//! What-if plans of a report: half and twice the devices, and half and twice the micro-batch size or, with a flush, the number of
//! micro-batches.
//!
//! The plans are independent of each other, so each core makes one at a time. They have the tensor-parallel degree of the plan.

use crate::cli::screen::Screen;
use compiler::export::escape::short;
use compiler::export::report::WhatIf;
use compiler::export::sweep::Figures;
use compiler::plan::problem::set_recompute_scopes;
use compiler::plan::{Plan, Stage, coarsen};
use compiler::profile::shared::TensorParallelCosts;
use pipec::costs::Costs;
use pipec::costs::cost_source::CostSource;
use pipec::error::ErrorKind;
use pipec::plan::from_costs::solve_fast;
use pipec::plan::parallel::in_parallel;
use pipec::plan::replan;
use pipec::plan::request::PlanOptions;
use pipec::plan::tensor_parallel::TensorParallel;
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Number of pieces to which the model is coarsened; this keeps the search short.
const PIECES: usize = 64;

/// The most devices in a plan.
const MOST_DEVICES: u64 = 4096;

/// Time until the first report of progress without a terminal, and between further ones.
const FIRST_REPORT: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// A plan to make: devices of the outermost level, micro-batches, and the index of its costs.
#[derive(Clone, Copy, Debug)]
struct Request {
    outer: u64,
    microbatches: u32,
    costs: usize,
}

/// The plans, by size, then by number of devices.
pub fn cells(source: &CostSource, file: &Path, plan: &Plan, screen: &Screen) -> Vec<WhatIf> {
    let schedule = &plan.schedule;
    let around = |number: u64| match number {
        0 | 1 => vec![1, 2, 4],
        n => vec![n / 2, n, 2 * n],
    };
    let sizes: Vec<(u64, u32)> = if !schedule.kind.is_continuous() {
        let counts = around(u64::from(schedule.microbatches)).into_iter();
        counts.filter_map(|m| Some((schedule.micro_batch, u32::try_from(m).ok()?))).collect()
    } else if source.is_flexible() {
        around(schedule.micro_batch).into_iter().map(|samples| (samples, schedule.microbatches)).collect()
    } else {
        vec![(schedule.micro_batch, schedule.microbatches)]
    };
    let outer = plan.cluster.levels.last().map_or(1, |level| level.count);
    let inner = u64::from(plan.cluster.devices / outer.max(1));
    // With device classes, it is unknown which devices to add or remove.
    let counts = if plan.cluster.classes.is_empty() { around(u64::from(outer)) } else { vec![u64::from(outer)] };
    let counts: Vec<u64> = counts.into_iter().filter(|count| count * inner <= MOST_DEVICES).collect();

    let options = PlanOptions { tensor_parallel: Some(TensorParallel::in_plan(plan)), ..replan::options(plan) };
    // Costs depend on the size of a micro-batch only.
    let mut costs_by_size: Vec<(u64, Costs, Vec<TensorParallelCosts>)> = Vec::new();
    let mut requests: Vec<Request> = Vec::new();
    for &(micro_batch, microbatches) in &sizes {
        if !costs_by_size.iter().any(|(size, ..)| *size == micro_batch) {
            // A model with a fixed batch has no other sizes.
            let Some(costs) = costs(source, plan, micro_batch, &options) else { continue };
            costs_by_size.push((micro_batch, costs.0, costs.1));
        }
        let Some(costs) = costs_by_size.iter().position(|(size, ..)| *size == micro_batch) else { continue };
        requests.extend(counts.iter().map(|&outer| Request { outer, microbatches, costs }));
    }
    let devices = |request: &Request| u32::try_from(request.outer * inner).unwrap_or(u32::MAX);
    let solve_request = |request: &Request| {
        let (micro_batch, costs, group_costs) = &costs_by_size[request.costs];
        let (devices, microbatches) = (devices(request), request.microbatches);
        let is_this_plan = (devices, *micro_batch, microbatches)
            == (plan.cluster.devices, schedule.micro_batch, schedule.microbatches);
        let answer = match is_this_plan {
            true => Ok(Figures::of(plan, 0)),
            false => solve_variant(
                file,
                plan,
                costs.clone(),
                group_costs.clone(),
                (request.outer as u32, microbatches),
                &options,
            ),
        };
        WhatIf { devices, micro_batch: *micro_batch, microbatches, answer }
    };
    solve_all(&requests, &solve_request, screen)
}

/// Makes all plans on all cores, and reports progress.
fn solve_all(
    requests: &[Request],
    solve_request: &(dyn Fn(&Request) -> WhatIf + Sync),
    screen: &Screen,
) -> Vec<WhatIf> {
    let bar = screen.progress(requests.len() as u64, "{bar:30} {pos}/{len} what-if plans, {elapsed}");
    let (sender, results) = channel();
    let cells = thread::scope(|scope| {
        let plans = scope.spawn(move || {
            in_parallel(requests, |request| {
                let plan = solve_request(request);
                // The receiver outlives the sender.
                let _ = sender.send(());
                plan
            })
        });
        let (mut finished, mut report_time) = (0, Instant::now() + FIRST_REPORT);
        loop {
            match results.recv_timeout(report_time.saturating_duration_since(Instant::now())) {
                Ok(()) => {
                    finished += 1;
                    bar.inc(1);
                }
                Err(RecvTimeoutError::Timeout) => {
                    if bar.is_hidden() {
                        screen.note(&format!(
                            "{finished} of {} what-if plans (`--no-what-if` omits them)",
                            requests.len()
                        ));
                    }
                    report_time = Instant::now() + REPORT_INTERVAL;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        plans.join().unwrap_or_else(|panic| resume_unwind(panic))
    });
    bar.finish_and_clear();
    cells
}

/// The costs at this micro-batch size, on single devices and on groups.
fn costs(
    source: &CostSource,
    plan: &Plan,
    micro_batch: u64,
    options: &PlanOptions,
) -> Option<(Costs, Vec<TensorParallelCosts>)> {
    let mut costs = source.costs(plan, micro_batch).ok()?;
    set_recompute_scopes(&mut costs.graph, options.target);
    // Frameworks cut at module boundaries, which coarsening would lose.
    if options.target.is_none() {
        costs.graph = coarsen::runs(&costs.graph, PIECES);
    }
    let group_costs = options.tensor_parallel().costs(&costs, options.target).ok()?;
    costs.shareable = None;
    Some((costs, group_costs))
}

fn solve_variant(
    file: &Path,
    plan: &Plan,
    mut costs: Costs,
    group_costs: Vec<TensorParallelCosts>,
    (outer, microbatches): (u32, u32),
    options: &PlanOptions,
) -> Result<Figures, String> {
    if let Some(level) = costs.cluster.levels.last_mut() {
        level.count = outer;
    }
    let degree = plan.stages.iter().map(Stage::degree).max().unwrap_or(1);
    if costs.cluster.levels.first().is_some_and(|level| !level.count.is_multiple_of(degree)) {
        return Err(format!("tensor degree {degree} does not divide them"));
    }
    match solve_fast(file, costs, group_costs, &PlanOptions { microbatches, ..options.clone() }) {
        Ok(planned) => Ok(Figures::of(&planned.plan, 0)),
        Err(failure) if failure.kind() == ErrorKind::Infeasible => Err("does not fit".to_string()),
        Err(failure) => Err(short(&failure.reason(), 80)),
    }
}
