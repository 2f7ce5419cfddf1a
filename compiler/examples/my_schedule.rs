//! A custom schedule in Rust: k forwards, k backwards, for a pipeline with slow links.
//!
//! ```text
//! cargo run -p compiler --example my_schedule                        # draws it next to 1F1B and GPipe
//! cargo run -p compiler --example my_schedule -- my_schedule.csv     # and writes it, for pipec's commands:
//! pipec simulate plan.json --schedule my_schedule.csv
//! pipec train model.onnx --stages 1,1,1 --batch 32 --schedule my_schedule.csv --data train.npz
//! ```
//!
//! kFkB (Wang et al., Ada-Grouper, 2023) is 1F1B over groups of k micro-batches: a rank computes one micro-batch of a group
//! during the transfer of the next. k = 1 is 1F1B, k = all is GPipe; values between trade memory for time.

use compiler::plan::StageId;
use compiler::schedule::action::{Phase, Work};
use compiler::schedule::check::verify::check;
use compiler::schedule::custom::{ComputeOrder, program};
use compiler::schedule::formats::chart::chart;
use compiler::schedule::formats::csv::csv;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{MicrobatchId, Pipeline, Program, RankId};
use compiler::simulate::run::{Machine, simulate};
use std::error::Error;

/// 1F1B over groups of `k` micro-batches.
struct Grouped {
    k: u32,
}

impl ComputeOrder for Grouped {
    fn work(&self, pipeline: &Pipeline, rank: RankId, items: u32) -> Vec<Work> {
        let groups = items.div_ceil(self.k);
        let of_group = |group: u32, part: Phase| {
            let group_items = group * self.k..items.min((group + 1) * self.k);
            group_items.map(move |item| Work { stage: StageId(rank.0), item: MicrobatchId(item), part })
        };
        // Warm up with one group per later rank; then each backward frees room for a forward.
        let ahead = groups.min(pipeline.stages.len() as u32 - 1 - rank.0);
        let mut work: Vec<Work> = (0..ahead).flat_map(|group| of_group(group, Phase::Forward)).collect();
        for group in 0..groups {
            if ahead + group < groups {
                work.extend(of_group(ahead + group, Phase::Forward));
            }
            work.extend(of_group(group, Phase::Backward));
        }
        work
    }
}

/// Three stages with 1 ms forward, 2 ms backward and transfers of half a millisecond.
fn pipeline() -> Pipeline {
    let mut pipeline = Pipeline::balanced(&[1, 1, 1], 2.0);
    pipeline.stages.iter_mut().for_each(|stage| (stage.forward, stage.backward) = (1000.0, 2000.0));
    pipeline.edges.iter_mut().for_each(|edge| (edge.forward_us, edge.backward_us) = (500.0, 500.0));
    pipeline
}

/// The checked program for one minibatch of six micro-batches.
fn build(k: u32) -> Result<Program, Box<dyn Error>> {
    let program = program(&Grouped { k }, &pipeline(), StepCount { minibatches: 1, microbatches: 6 })?;
    check(&program)?;
    Ok(program)
}

fn main() -> Result<(), Box<dyn Error>> {
    for k in [1, 2, 6] {
        let program = build(k)?;
        let timeline = simulate(&program, &pipeline(), &Machine::of(&pipeline()))?;
        println!(
            "k = {k}: {:.1} ms, {:.1} % idle, at most {:?} micro-batches in flight",
            timeline.makespan / 1e3,
            timeline.bubble() * 100.0,
            timeline.peak_in_flight
        );
        println!("{}", chart(&program)?);
    }
    if let Some(path) = std::env::args().nth(1) {
        std::fs::write(&path, csv(&build(2)?))?;
        println!("wrote {path}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::plan::schedule::Schedule;
    use compiler::schedule::generators::schedule;

    #[test]
    fn its_ends_are_the_published_schedules() {
        let count = StepCount { minibatches: 1, microbatches: 6 };
        for (k, published) in [(1, Schedule::OneFOneB), (6, Schedule::Gpipe)] {
            let published_program = schedule(published, &pipeline(), count).unwrap();
            assert_eq!(csv(&build(k).unwrap()), csv(&published_program), "k = {k}");
        }
    }

    #[test]
    fn groups_of_two_hide_the_links() {
        let time = |k| simulate(&build(k).unwrap(), &pipeline(), &Machine::of(&pipeline())).unwrap();
        let (one, two, all) = (time(1), time(2), time(6));
        assert!(two.makespan < one.makespan, "{} and {} us", two.makespan, one.makespan);
        assert_eq!([&one, &two, &all].map(|run| run.peak_in_flight[0]), [3, 6, 6]);
    }

    /// The table next to this file is the one that it writes.
    #[test]
    fn the_table_is_this_schedule() {
        assert_eq!(csv(&build(2).unwrap()), include_str!("my_schedule.csv"));
    }
}
