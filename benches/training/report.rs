//! The result tables: speed, goals, and accuracy of the plans.

use crate::figures::{Round, cheaper, faster, median, median_of};
use crate::ours::{ActivitySeconds, Parallelism};
use crate::subjects::Subject;
use crate::table::Table;
use compiler::plan::{Plan, Stage};

/// Goal: speedup of 1F1B-RR on two workers over PyTorch eager on two threads.
const ROUND_ROBIN: f64 = 1.1;
/// Goal: fraction of the speed allowed by the plan's slowest stage.
const OF_BOUND: f64 = 0.95;
/// Goal: fraction of the speed of two independent workers.
const OF_TWO: f64 = 0.95;
/// Goal: speedup of one thread over torch.compile.
const COMPILED: f64 = 1.1;
/// Goal: speedup over PyTorch pipelining with a flush.
const FLUSH: f64 = 1.5;
/// Goal: maximum slowdown by micro-batches, relative to PyTorch's.
const MICROBATCHING: f64 = 1.15;
/// Goal: relative error of predicted memory.
const MEMORY: f64 = 0.05;
/// Goal: relative error of predicted time.
const TIME: f64 = 0.1;
/// Goal: fraction of rounds within the prediction interval.
const INSIDE: f64 = 0.9;

/// A training mode, here and for PyTorch.
pub struct Line {
    pub about: &'static str,
    pub parallelism: Parallelism,
    pub mode: &'static str,
}

/// In the order of [`Measured::lines`].
pub const LINES: [Line; 4] = [
    Line { about: "one thread", parallelism: Parallelism { workers: 1, microbatches: 1 }, mode: "eager1" },
    Line {
        about: "two workers, 1F1B-RR / two threads",
        parallelism: Parallelism { workers: 2, microbatches: 1 },
        mode: "eager2",
    },
    Line {
        about: "one thread, 8 microbatches",
        parallelism: Parallelism { workers: 1, microbatches: 8 },
        mode: "micro",
    },
    Line {
        about: "two workers, 1F1B, 8 microbatches",
        parallelism: Parallelism { workers: 2, microbatches: 8 },
        mode: "pipelining",
    },
];

/// Results of one mode.
pub struct Figures {
    pub plan: Plan,
    pub ours: Vec<Round>,
    /// PyTorch's rounds, up to the first failure.
    pub theirs: Vec<Round>,
    /// Peak bytes, by worker.
    pub peak_memory_bytes: Vec<u64>,
    pub spent: Vec<ActivitySeconds>,
}

/// Results of a model.
pub struct Measured {
    pub subject: &'static Subject,
    /// Parameter count, equal for PyTorch.
    pub parameters: u64,
    /// One for each of [`LINES`].
    pub lines: Vec<Figures>,
    /// 1F1B-RR on two workers, each time before one of `twice`.
    pub paired: Vec<Round>,
    /// Two independent runs of one worker at the same time.
    pub twice: Vec<Round>,
    /// PyTorch with torch.compile, on one thread.
    pub compiled: Vec<Round>,
}

impl Measured {
    /// Maximum speedup of 1F1B-RR over one worker: the time of all stages over that of the slowest, whose replicas
    /// share its minibatches.
    fn bound(&self) -> f64 {
        let stages = &self.lines[1].plan.stages;
        let slowest = stages.iter().map(|stage| busy_ms(stage) / f64::from(stage.replicas));
        stages.iter().map(busy_ms).sum::<f64>() / slowest.fold(f64::MIN_POSITIVE, f64::max)
    }
}

/// Forward and backward of one minibatch or micro-batch.
fn busy_ms(stage: &Stage) -> f64 {
    (stage.fwd_us + stage.bwd_us) / 1e3
}

fn format_number(number: Option<f64>, digits: usize) -> String {
    number.map_or("–".to_string(), |number| format!("{number:.digits$}"))
}

/// Ratios of wall time and CPU time; marked if the first misses its goal.
fn ratio(wall: Option<f64>, processors: Option<f64>, reaches_goal: impl Fn(f64) -> bool) -> String {
    let mark = if wall.is_some_and(|ratio| !reaches_goal(ratio)) { " missed" } else { "" };
    let cpu_text = processors.map_or(String::new(), |ratio| format!(" ({ratio:.2})"));
    format!("{}{cpu_text}{mark}", format_number(wall, 2))
}

/// The Markdown report.
pub fn report(results: &[Measured]) -> String {
    [speeds(results), goals(results), plans(results), workers(results)].concat()
}

fn speeds(results: &[Measured]) -> String {
    let columns = [
        "model (batch)",
        "parameters",
        "mode",
        "pipec samples/s",
        "PyTorch samples/s",
        "faster",
        "pipec CPU-s/step",
        "PyTorch CPU-s/step",
        "cheaper",
    ];
    let mut table = Table::new("Speed: medians of rounds, and of the ratios of paired rounds", &columns);
    for result in results {
        for (line, figures) in LINES.iter().zip(&result.lines) {
            table.row(&[
                format!("{} ({})", result.subject.name, result.subject.batch),
                result.parameters.to_string(),
                line.about.to_string(),
                format_number(median_of(&figures.ours, |round| round.samples_per_s), 1),
                format_number(median_of(&figures.theirs, |round| round.samples_per_s), 1),
                format_number(faster(&figures.ours, &figures.theirs), 2),
                format_number(median_of(&figures.ours, |round| round.cpu_seconds), 4),
                format_number(median_of(&figures.theirs, |round| round.cpu_seconds), 4),
                format_number(cheaper(&figures.ours, &figures.theirs), 2),
            ]);
        }
    }
    table.text()
}

fn goals(results: &[Measured]) -> String {
    let columns = [
        "model".to_string(),
        "one thread / eager (≥ 1.2, mlp-512 ≥ 1.1)".to_string(),
        format!("1F1B-RR / eager on two threads (≥ {ROUND_ROBIN})"),
        format!("one thread / torch.compile (≥ {COMPILED})"),
        format!("1F1B-RR / bound over one worker (≥ {OF_BOUND})"),
        format!("1F1B-RR / two independent workers (≥ {OF_TWO})"),
        "two independent workers / one".to_string(),
        format!("1F1B / PyTorch's 1F1B (≥ {FLUSH})"),
        format!("cost of 8 microbatches (≤ {MICROBATCHING}, no goal for perceptrons)"),
        "the same for PyTorch".to_string(),
    ];
    let columns = columns.each_ref().map(String::as_str);
    let mut table = Table::new("Goals: ratios of wall-clock time, of processor time in brackets", &columns);
    let speed = |rounds: &[Round]| median_of(rounds, |round| round.samples_per_s);
    for result in results {
        let [whole, robin, micro, flush] = &result.lines[..] else { continue };
        let against = |figures: &Figures, goal: f64| {
            ratio(faster(&figures.ours, &figures.theirs), cheaper(&figures.ours, &figures.theirs), |ratio| {
                ratio >= goal
            })
        };
        let bound = result.bound();
        let fraction = faster(&robin.ours, &whole.ours).map(|gain| gain / bound);
        let costs = |whole: &[Round], micro: &[Round], goal: f64| {
            ratio(faster(whole, micro), cheaper(whole, micro), |ratio| ratio <= goal)
        };
        table.row(&[
            result.subject.name.to_string(),
            against(whole, result.subject.goal),
            against(robin, ROUND_ROBIN),
            ratio(faster(&whole.ours, &result.compiled), cheaper(&whole.ours, &result.compiled), |ratio| {
                ratio >= COMPILED
            }),
            format!("{} of {bound:.2}", ratio(fraction, None, |ratio| ratio >= OF_BOUND)),
            ratio(faster(&result.paired, &result.twice), cheaper(&result.paired, &result.twice), |ratio| {
                ratio >= OF_TWO
            }),
            format_number(speed(&result.twice).zip(speed(&whole.ours)).map(|(twice, whole)| twice / whole), 2),
            against(flush, FLUSH),
            costs(&whole.ours, &micro.ours, if result.subject.entry == "mlp" { f64::INFINITY } else { MICROBATCHING }),
            costs(&whole.theirs, &micro.theirs, f64::INFINITY),
        ]);
    }
    table.text()
}

fn plans(results: &[Measured]) -> String {
    let columns = [
        "model",
        "mode",
        "stages, ms",
        "predicted ms/step",
        "expected",
        "measured",
        "off",
        "estimated MiB",
        "measured MiB",
        "off",
    ];
    let mut table = Table::new("Plans: stages, time and peak memory of each worker", &columns);
    let (mut times, mut memories, mut inside) = (Vec::new(), Vec::new(), Vec::new());
    let relative_error = |predicted: f64, measured: f64| predicted / measured - 1.0;
    let percent = |part: f64| format!("{:+.1} %", 100.0 * part);
    for result in results {
        for (line, figures) in LINES.iter().zip(&result.lines) {
            let measured = median_of(&figures.ours, |round| 1e3 * result.subject.batch as f64 / round.samples_per_s);
            let predicted = figures.plan.predicted.step_us / 1e3;
            let time = measured.map(|measured| relative_error(predicted, measured));
            let expected = figures.plan.expected_step_us().map(|interval| interval.map(|us| us / 1e3));
            let rounds = figures.ours.iter().map(|round| 1e3 * result.subject.batch as f64 / round.samples_per_s);
            let are_inside: Vec<bool> =
                expected.map_or(Vec::new(), |[low, high]| rounds.map(|time| (low..=high).contains(&time)).collect());
            let word = if are_inside.contains(&false) { " missed" } else { "" };
            let replicas = figures.plan.stages.iter().flat_map(|stage| (0..stage.replicas).map(move |_| stage));
            let planned: Vec<f64> = replicas.map(|stage| stage.memory.total as f64).collect();
            let peaks: Vec<f64> = figures.peak_memory_bytes.iter().map(|bytes| *bytes as f64).collect();
            let memory: Vec<f64> =
                planned.iter().zip(&peaks).map(|(planned, peaks)| relative_error(*planned, *peaks)).collect();
            let join = |numbers: Vec<String>| numbers.join(" + ");
            let mebibytes = |bytes: &[f64]| {
                join(bytes.iter().map(|figures| format!("{:.1}", figures / f64::from(1 << 20))).collect())
            };
            let stages = figures.plan.stages.iter().map(|stage| match stage.replicas {
                1 => format!("{:.1}", busy_ms(stage)),
                replicas => format!("{:.1} x {replicas} replicas", busy_ms(stage)),
            });
            table.row(&[
                result.subject.name.to_string(),
                line.about.to_string(),
                join(stages.collect()),
                format!("{predicted:.1}"),
                expected.map_or("–".to_string(), |[low, high]| format!("{low:.1} to {high:.1}{word}")),
                format_number(measured, 1),
                time.map_or("–".to_string(), percent),
                mebibytes(&planned),
                mebibytes(&peaks),
                memory.iter().map(|part| percent(*part)).collect::<Vec<_>>().join(", "),
            ]);
            times.extend(time.map(f64::abs));
            inside.extend(are_inside);
            memories.extend(memory.into_iter().map(f64::abs));
        }
    }
    let (time, memory) = (median(times), memories.into_iter().reduce(f64::max));
    let summary = |what: &str, part: Option<f64>, goal: f64| {
        let word = if part.is_some_and(|part| part > goal) { ", missed" } else { "" };
        format!("{what}: {} % off (goal {} %{word}).\n", format_number(part.map(|part| 100.0 * part), 1), 100.0 * goal)
    };
    let (time, memory) =
        (summary("Time, median of all rows", time, TIME), summary("Memory, worst worker", memory, MEMORY));
    let (results, within) = (inside.len(), inside.iter().filter(|is_inside| **is_inside).count());
    let word = if (within as f64) < INSIDE * results as f64 { ", missed" } else { "" };
    let inside =
        format!("Within the prediction interval: {within} of {results} rounds (goal {} %{word}).\n", 100.0 * INSIDE);
    format!("{}\n{time}{inside}{memory}", table.text())
}

fn workers(results: &[Measured]) -> String {
    let columns = ["model", "mode", "worker", "forward", "backward", "step", "waiting"];
    let mut table = Table::new("Worker time: milliseconds per minibatch of the last round", &columns);
    for result in results {
        for (line, figures) in LINES.iter().zip(&result.lines) {
            for (worker, spent) in figures.spent.iter().enumerate() {
                let times = [spent.forward, spent.backward, spent.step, spent.wait];
                let [forward, backward, step, wait] = times.map(|seconds| format!("{:.1}", 1e3 * seconds));
                let (name, parallelism) = (result.subject.name.to_string(), line.about.to_string());
                table.row(&[name, parallelism, worker.to_string(), forward, backward, step, wait]);
            }
        }
    }
    table.text()
}
