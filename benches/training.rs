//! Training speed of pipec and PyTorch: the same models, batches and optimizer, in alternating rounds.
//!
//! ```text
//! cargo bench --bench training                                       everything, five rounds: about an hour
//! cargo bench --bench training -- --models mlp-64,lstm --rounds 3    a quick look
//! cargo bench --bench training -- --steps 2                          two minibatches per round
//! ```
//!
//! Prints Markdown. PyTorch runs in `$PIPEC_PYTHON`, by default `python3`, from `training/peer.py`; without it, only
//! pipec is measured. All models train in f32 with SGD and momentum 0.9 on synthetic data. Each row has a profile of its
//! own, measured with its number of workers. Where PyTorch pipelines too, there is one stage per worker; for 1F1B-RR the
//! planner chooses. Two replicas update once per two minibatches. Two independent workers run right after 1F1B-RR, three
//! times per round, because the speed of a shared machine changes. Two workers, or two PyTorch threads or processes, need
//! two idle cores; CPU time shows the cost if other work uses them.
//!
//! | column | |
//! | --- | --- |
//! | samples/s | by wall time, without the first steps |
//! | CPU-s/step | CPU seconds per minibatch, over all threads and processes |
//! | faster, cheaper | speedup of pipec in wall time, and in CPU time |
//! | off | relative excess of the prediction over the measurement |
//! | expected | the prediction interval of the plan |

#[path = "training/figures.rs"]
mod figures;
#[path = "training/ours.rs"]
mod ours;
#[path = "training/peer.rs"]
mod peer;
#[path = "training/report.rs"]
mod report;
#[path = "training/subjects.rs"]
mod subjects;
#[allow(dead_code)] // Search cost is for another bench.
#[path = "partition/table.rs"]
mod table;

use clap::Parser;
use ours::ProfiledSubject;
use peer::Peer;
use report::{Figures, LINES, Measured, report};
use subjects::{SUBJECTS, Subject};

/// Trains with pipec and PyTorch, and compares.
#[derive(Debug, Parser)]
struct Arguments {
    /// Models to train [default: all]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = find_subject)]
    models: Vec<&'static Subject>,
    /// Number of rounds; results are their medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Minibatches per round [default: a few seconds' worth]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: Option<u32>,
    /// Passed by cargo to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

/// Runs of 1F1B-RR on two workers per round, each followed by two independent workers.
const PAIRS: u32 = 3;

fn find_subject(name: &str) -> Result<&'static Subject, String> {
    let names = || SUBJECTS.iter().map(|subject| subject.name).collect::<Vec<_>>().join(", ");
    SUBJECTS.iter().find(|subject| subject.name == name).ok_or_else(|| format!("there are {}", names()))
}

/// Trains one model in all modes; PyTorch follows pipec in every round.
fn measure_subject(subject: &'static Subject, arguments: &Arguments, peer: &mut Option<Peer>) -> Measured {
    let (model, parameters) = subject.import();
    if let Some(peer) = peer {
        let counted = peer.parameters(subject.name).expect("the peer can count");
        assert_eq!(parameters, counted, "{}: the peer's model is different", subject.name);
    }
    eprintln!("{}: {}, {parameters} parameters, batch {}; profiling", subject.name, subject.about, subject.batch);
    let profiled = ProfiledSubject::of(subject, &model, LINES.iter().map(|line| line.parallelism));
    let steps = arguments.steps.unwrap_or(subject.steps);
    let runs: Vec<_> = LINES
        .iter()
        .map(|line| profiled.prepare_run(line.parallelism, profiled.plan(line.parallelism), steps))
        .collect();
    let (mut paired, mut twice, mut compiled) = (Vec::new(), Vec::new(), Vec::new());
    let mut lines: Vec<Figures> = runs
        .iter()
        .map(|run| Figures {
            plan: run.plan.clone(),
            ours: Vec::new(),
            theirs: Vec::new(),
            peak_memory_bytes: vec![0; run.plan.stages.iter().map(|stage| stage.replicas as usize).sum()],
            spent: Vec::new(),
        })
        .collect();
    for round in 0..arguments.rounds {
        for ((line, run), figures) in LINES.iter().zip(&runs).zip(&mut lines) {
            let outcome = run.run();
            figures.ours.push(outcome.round);
            figures
                .peak_memory_bytes
                .iter_mut()
                .zip(&outcome.peak_memory_bytes)
                .for_each(|(max, peak)| *max = (*max).max(*peak));
            figures.spent = outcome.spent;
            // Rounds stay paired: after a failed one there are none.
            let Some(peer) = peer.as_mut().filter(|_| figures.theirs.len() == round as usize) else { continue };
            match peer.run(subject.name, line.mode, steps, subject.batch) {
                Ok(theirs) => figures.theirs.push(theirs),
                // Its other rows can still be compared.
                Err(error) => eprintln!("{}, {}, round {round}: {error}", subject.name, line.about),
            }
        }
        // In turn: a machine that is shared may be slower minutes later.
        for _ in 0..PAIRS {
            paired.push(runs[1].run().round);
            twice.push(runs[0].run_twice());
        }
        if let Some(peer) = peer.as_mut().filter(|_| compiled.len() == round as usize) {
            match peer.run(subject.name, "compiled1", steps, subject.batch) {
                Ok(theirs) => compiled.push(theirs),
                Err(error) => eprintln!("{}, torch.compile, round {round}: {error}", subject.name),
            }
        }
        eprintln!("{}: round {} of {}", subject.name, round + 1, arguments.rounds);
    }
    Measured { subject, parameters, lines, paired, twice, compiled }
}

fn main() {
    let arguments = Arguments::parse();
    let mut peer = match Peer::start() {
        Ok(peer) => Some(peer),
        Err(error) => {
            println!("Without PyTorch ({error}): pipec alone.");
            None
        }
    };
    let subjects: Vec<&'static Subject> = match arguments.models.as_slice() {
        [] => SUBJECTS.iter().collect(),
        chosen => chosen.to_vec(),
    };
    let results: Vec<Measured> =
        subjects.into_iter().map(|subject| measure_subject(subject, &arguments, &mut peer)).collect();
    println!("# Training\n");
    let device = profiler::machine::this_cpu();
    let cores = std::thread::available_parallelism().map_or(1, |count| count.get());
    println!("{}, {cores} cores, {}; rounds: {}.", device.name, device.driver, arguments.rounds);
    if let Some(peer) = &peer {
        println!("PyTorch {}.", peer.version);
    }
    print!("{}", report(&results));
}
