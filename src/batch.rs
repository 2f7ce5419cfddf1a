//! `--batch N` and `--schedule auto`: into how many micro-batches a minibatch is cut, and in which order they are worked on, are found with
//! the stages.
//!
//! Every size of micro-batch that divides the minibatch is planned for under 1F1B, sizes that are close together once; then the best of
//! them under every other order of work that flushes. Whoever asks for groups of devices or for ZeRO gets the best of those for each.

use crate::cmd::partition::{self, Arguments};
use crate::failure::{self, Failure};
use crate::narrow::{Give, fitted, folded};
use crate::screen::Screen;
use crate::source::{self, Costs};
use crate::{quantity, stages, ties};
use compiler::export::sweep::Figures;
use compiler::partition::planner::Planned;
use compiler::plan::ScheduleKind;
use compiler::plan::problem::Objective;
use compiler::profile::shared::SharedCosts;
use std::collections::BTreeMap;

/// What asks for the best order of work.
pub const AUTO: &str = "auto";

/// Orders of work that train as one minibatch does, the one that all sizes are planned under first.
const ORDERS: [ScheduleKind; 8] = [
    ScheduleKind::OneFOneB,
    ScheduleKind::Gpipe,
    ScheduleKind::Interleaved,
    ScheduleKind::Bfs,
    ScheduleKind::ZbH1,
    ScheduleKind::ZbH2,
    ScheduleKind::Zbv,
    ScheduleKind::DualPipeV,
];

/// How many sizes are planned for under every order of work.
const BEST: usize = 3;

/// Numbers of micro-batches that differ by less are planned for once.
const STEP: f64 = 1.5;

/// One combination and what became of it.
pub struct Tried {
    micro_batch: u64,
    microbatches: u32,
    schedule: ScheduleKind,
    /// Samples a second and the most bytes of a device, or why there is no plan.
    answer: Result<(f64, u64), String>,
}

/// The best plan, and what else was tried; why `train` would refuse it.
pub type Found = (Planned, Option<String>, Vec<Tried>);

/// Whether more than the stages is asked for.
pub fn is_asked(arguments: &Arguments) -> bool {
    arguments.batch.is_some() || arguments.question.schedule.as_deref() == Some(AUTO)
}

/// Plans for all of it.
pub fn plan(arguments: &Arguments, screen: &Screen) -> Result<Found, Failure> {
    check(arguments)?;
    let said = arguments.question.schedule.as_deref();
    let orders: Vec<Option<String>> = match said {
        Some(AUTO) => ORDERS.iter().map(|kind| Some(kind.name().to_string())).collect(),
        // One micro-batch in a minibatch flushes as any other number does.
        _ => vec![Some(said.unwrap_or(ORDERS[0].name()).to_string())],
    };
    let mut search = Search { arguments, best: None, tried: Vec::new(), refused: Vec::new() };
    let sizes = sizes(arguments, screen)?;
    let bar = screen.progress(
        (sizes.len() + BEST.min(sizes.len()) * (orders.len() - 1)) as u64,
        "{bar:30} {pos}/{len} combinations, {elapsed}, {msg}",
    );
    let mut known = Vec::new();
    for (size, costs) in sizes {
        let costs = match costs {
            Some(costs) => costs,
            None => source::costs(&at(arguments, size, None), &Screen::silent())?,
        };
        // It is the same model at every size.
        if known.is_empty() {
            partition::keep_others(arguments, &costs.model)?;
        }
        let shared = arguments.question.tensor.costs(&costs)?;
        let sized = Sized { size, costs, shared };
        let good = search.ask(&sized, orders[0].clone())?;
        bar.inc(1);
        known.push((good, sized));
    }
    // Where 1F1B does not fit, small micro-batches are the nearest to it.
    known.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.size.0.cmp(&b.1.size.0)));
    for (_, sized) in known.iter().take(BEST) {
        for order in &orders[1..] {
            bar.set_message(order.clone().unwrap_or_default());
            search.ask(sized, order.clone())?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let Search { best, tried, mut refused, .. } = search;
    // The smallest micro-batches lack least.
    refused.sort_by_key(|(micro_batch, _)| *micro_batch);
    match (best, refused.into_iter().next()) {
        (Some(Best { mut planned, refused, aged, .. }), _) => {
            aged.iter().for_each(|told| screen.note(told));
            let options = &mut planned.plan.options;
            if let Some(batch) = arguments.batch {
                options.insert("batch".to_string(), batch.into());
            }
            options.insert("combinations".to_string(), (tried.len() as u64).into());
            Ok((planned, refused, tried))
        }
        (None, Some((_, failure))) => Err(failure),
        (None, None) => Err(Failure::bug("nothing was tried")),
    }
}

/// Refuses what leaves nothing to find, or has no flush.
fn check(arguments: &Arguments) -> Result<(), Failure> {
    let question = &arguments.question;
    let refused = |flag: &str, why: &str| {
        Err(Failure::input(format!("`{flag}` does not go with `--schedule auto`")).because(why))
    };
    match (question.schedule.as_deref(), arguments.batch) {
        (Some(AUTO), _) if question.objective == "latency" => {
            refused("--objective latency", "it is about a pipeline that only answers")
        }
        (Some(AUTO), _) if question.cost != "pipec" => {
            refused(&format!("--cost {}", question.cost), "its formula knows one order of work")
        }
        (_, Some(batch)) => {
            let parts =
                [("--micro-batch", arguments.dims.micro_batch), ("--microbatches", Some(question.microbatches.into()))];
            let given = parts.into_iter().find(|(_, part)| part.is_some_and(|part| batch % part != 0));
            let both = arguments.dims.micro_batch.filter(|_| question.microbatches > 1);
            let product = both.map(|size| size.saturating_mul(question.microbatches.into()));
            match given {
                _ if question.infers() => Err(Failure::input("`--batch` does not go with a plan for inference")
                    .because("what only answers has no minibatches")
                    .help("`--micro-batch` says how many samples it answers at a time")),
                _ if product.is_some_and(|product| product != batch) => Err(Failure::input(format!(
                    "`--batch {batch}` does not go with `--micro-batch {}` and `--microbatches {}`",
                    both.unwrap_or(1),
                    question.microbatches
                ))
                .because(format!("these make {} samples", product.unwrap_or(batch)))
                .help("leave one of the three out")),
                Some((flag, Some(part))) => {
                    Err(Failure::input(format!("`--batch {batch}` does not go with `{flag} {part}`"))
                        .because(format!("{batch} samples are not a multiple of {part}"))
                        .help("leave one of them out"))
                }
                _ => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Samples of a micro-batch, and how many make a minibatch.
type Size = (u64, u32);

/// The sizes to plan for; the costs of one that has been read already.
fn sizes(arguments: &Arguments, screen: &Screen) -> Result<Vec<(Size, Option<Costs>)>, Failure> {
    let asked = arguments.question.microbatches;
    let count = |micro_batch: u64, batch: u64| {
        u32::try_from(batch / micro_batch).ok().filter(|_| batch.is_multiple_of(micro_batch)).ok_or_else(|| {
            Failure::input(format!("`--batch {batch}` is no number of micro-batches of {micro_batch}"))
                .because("the costs are those of that size")
        })
    };
    let is_measured = arguments.profile.as_deref().is_some_and(|profile| profile.split(':').next() != Some("analytic"));
    match (arguments.batch, arguments.dims.micro_batch) {
        (Some(batch), None) if asked > 1 => Ok(vec![((batch / u64::from(asked), asked), None)]),
        (Some(batch), None) if !is_measured => {
            let costs = source::costs(&at(arguments, (batch, 1), None), screen)?;
            let mut costs = Some(costs);
            let all = counts(batch).into_iter().map(|count| ((batch / u64::from(count), count), costs.take()));
            Ok(all.collect())
        }
        (batch, _) => {
            let costs = source::costs(arguments, screen)?;
            let count = batch.map_or(Ok(asked), |batch| count(costs.micro_batch, batch))?;
            Ok(vec![((costs.micro_batch, count), Some(costs))])
        }
    }
}

/// Numbers of micro-batches that divide a minibatch, from one on, each at least [`STEP`] times the one before.
fn counts(batch: u64) -> Vec<u32> {
    let mut counts: Vec<u32> = Vec::new();
    for count in (1..=batch.min(1 << 20)).filter(|count| batch.is_multiple_of(*count)) {
        if counts.last().is_none_or(|last| count as f64 >= STEP * f64::from(*last)) {
            counts.push(count as u32);
        }
    }
    counts
}

/// The arguments for one combination.
fn at(arguments: &Arguments, (micro_batch, microbatches): Size, schedule: Option<String>) -> Arguments {
    let mut one = arguments.clone();
    one.dims.micro_batch = Some(micro_batch);
    one.question.microbatches = microbatches;
    one.question.schedule = schedule;
    let has_chunks = |name: &str| ScheduleKind::from_name(name).is_some_and(ScheduleKind::has_chunks);
    if !one.question.schedule.as_deref().is_some_and(has_chunks) {
        one.question.chunks = None;
    }
    one
}

/// What the model costs at one size, on devices and on groups of them.
struct Sized {
    size: Size,
    costs: Costs,
    shared: Vec<SharedCosts>,
}

/// How good the best one is, its plan, why `train` would refuse that, and what is to be said of shared parameters.
struct Best {
    good: f64,
    planned: Planned,
    refused: Option<String>,
    aged: Option<String>,
}

struct Search<'a> {
    arguments: &'a Arguments,
    best: Option<Best>,
    tried: Vec<Tried>,
    /// Micro-batches for which there is no plan, and why.
    refused: Vec<(u64, Failure)>,
}

impl Search<'_> {
    /// Plans for one combination and keeps it if it is the best; says how good it is.
    fn ask(&mut self, sized: &Sized, schedule: Option<String>) -> Result<f64, Failure> {
        let Sized { size, costs, shared } = sized;
        let one = at(self.arguments, *size, schedule);
        one.question.check()?;
        let kind = one.question.schedule.as_deref().and_then(ScheduleKind::from_name).unwrap_or(ScheduleKind::Csv);
        let (answer, good) = match partition::ask_of_groups(&one.file, costs.clone(), shared.clone(), &one.question) {
            Ok(planned) => {
                let Figures { throughput_per_s: speed, peak_bytes: peak, .. } = Figures::of(&planned.plan, 0);
                let is_small_good = planned.plan.objective == Objective::Memory;
                let good = if is_small_good { -(peak as f64) } else { speed };
                if self.best.as_ref().is_none_or(|best| good > best.good) {
                    let (params, plan) = (&costs.graph.params, &planned.plan);
                    let (refused, aged) = (ties::refused(params, plan), ties::aged(params, plan));
                    self.best = Some(Best { good, planned, refused, aged });
                }
                (Ok((speed, peak)), good)
            }
            Err(failure) if failure.code == failure::BUG => return Err(failure),
            Err(failure) => {
                let why = failure.line();
                self.refused.push((size.0, failure));
                (Err(why), f64::NEG_INFINITY)
            }
        };
        self.tried.push(Tried { micro_batch: size.0, microbatches: size.1, schedule: kind, answer });
        Ok(good)
    }
}

/// The table of what was tried, the best first; combinations without a plan by the reason for it.
pub fn table(tried: &[Tried], objective: Objective, width: Option<usize>) -> String {
    let mut planned: Vec<(&Tried, f64, u64)> =
        tried.iter().filter_map(|one| one.answer.as_ref().ok().map(|(speed, peak)| (one, *speed, *peak))).collect();
    planned.sort_by(|a, b| match objective {
        Objective::Memory => a.2.cmp(&b.2),
        _ => b.1.total_cmp(&a.1),
    });
    let row = |(one, speed, peak): &(&Tried, f64, u64)| {
        let [size, count] = [one.micro_batch.to_string(), one.microbatches.to_string()];
        vec![one.schedule.name().to_string(), size, count, quantity::samples(*speed), quantity::bytes(*peak)]
    };
    let header = ["schedule", "samples", "micro-batches", "samples/s", "most memory"];
    let rows = planned.iter().map(row).collect();
    let table = fitted(&header, &[1, 2, 3, 4], rows, &[Give::Leave(4), Give::Leave(2)], width);
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
            stages::plural(all.len() as u64, "combination", "combinations"),
            names.join(", ")
        );
    }
    format!("\n{table}{}", folded(&text, width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_divide_and_are_apart() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(24), [1, 2, 3, 6, 12, 24]);
        assert_eq!(counts(7), [1, 7]);
        assert!(counts(1536).iter().all(|count| 1536 % count == 0));
    }
}
