//! Published schedules: bubbles, activations and step times match the papers' formulas, and torch's generated tables.

use compiler::plan::schedule::Schedule;
use compiler::schedule::check::verify::check;
use compiler::schedule::formats::csv::{ComputeTable, csv};
use compiler::schedule::generators::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, Program, RankId, ScheduleError, StageSpec};
use compiler::simulate::Timeline;
use compiler::simulate::run::{Machine, simulate};

/// p ranks of v stages each; a rank's work for one micro-batch takes F = I = W = 1.
fn ranks(name: Schedule, p: u32, v: u32) -> Pipeline {
    let mut pipeline = Pipeline::balanced(&vec![1; (p * v) as usize], 2.0);
    for stage in &mut pipeline.stages {
        (stage.forward, stage.backward) = (1.0 / f64::from(v), 2.0 / f64::from(v));
        stage.weight = stage.backward / 2.0;
    }
    match name {
        Schedule::Zbv | Schedule::DualPipeV => pipeline.folded(),
        _ => pipeline.looped(p),
    }
}

fn run(name: Schedule, p: u32, v: u32, minibatches: u32, microbatches: u32) -> (Program, Timeline) {
    let pipeline = ranks(name, p, v);
    let program = schedule(name, &pipeline, StepCount { minibatches, microbatches }).unwrap();
    check(&program).unwrap_or_else(|error| panic!("{name}, p {p}, v {v}, m {microbatches}: {error}"));
    let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap();
    (program, timeline)
}

/// Time between minibatches, minus the compute time of a rank.
fn bubble(name: Schedule, p: u32, v: u32, m: u32) -> f64 {
    let [short, long] = [4, 8].map(|minibatches| run(name, p, v, minibatches, m).1.makespan);
    (long - short) / 4.0 - 3.0 * f64::from(m)
}

/// Peak in-flight micro-batches per rank, in units of a whole rank.
fn peaks(name: Schedule, p: u32, v: u32, m: u32) -> Vec<f64> {
    run(name, p, v, 1, m).1.peak_in_flight.iter().map(|&peak| f64::from(peak) / f64::from(v)).collect()
}

fn assert_close(actual: f64, expected: f64, case: &str) {
    assert!((actual - expected).abs() < 1e-6, "{case}: {actual}, expected {expected}");
}

#[test]
fn four_ranks_and_eight_microbatches() {
    let table: [(Schedule, u32, f64, [f64; 4]); 8] = [
        (Schedule::Gpipe, 1, 9.0, [8.0; 4]),
        (Schedule::OneFOneB, 1, 9.0, [4.0, 3.0, 2.0, 1.0]),
        (Schedule::Interleaved, 2, 4.5, [5.5, 4.5, 3.5, 2.5]),
        (Schedule::Bfs, 2, 4.5, [8.0; 4]),
        (Schedule::ZbH1, 1, 3.0, [4.0; 4]),
        (Schedule::ZbH2, 1, 0.0, [7.0; 4]),
        (Schedule::Zbv, 2, 0.0, [4.0; 4]),
        (Schedule::DualPipeV, 2, 1.5, [4.5; 4]),
    ];
    let mut differences = String::new();
    for (name, v, expected_bubble, expected_peaks) in table {
        let actual = (bubble(name, 4, v, 8), peaks(name, 4, v, 8));
        if (actual.0 - expected_bubble).abs() > 1e-6 || actual.1 != expected_peaks {
            differences += &format!("{name}: {actual:?}, expected {:?}\n", (expected_bubble, expected_peaks));
        }
    }
    assert!(differences.is_empty(), "\n{differences}");
    let step = |name, v| run(name, 4, v, 1, 8).1.makespan;
    let [one_f_one_b, h1, zbv] = [step(Schedule::OneFOneB, 1), step(Schedule::ZbH1, 1), step(Schedule::Zbv, 2)];
    assert!(h1 < one_f_one_b && zbv < h1, "{one_f_one_b} {h1} {zbv}");
}

#[test]
fn bubbles_and_activations_are_the_published_formulas() {
    for p in 1..=6u32 {
        for m in [2 * p, 3 * p, 4 * p] {
            let idle = f64::from(p - 1);
            let case = |name: Schedule| format!("{name}, p {p}, m {m}");
            for name in [Schedule::Gpipe, Schedule::OneFOneB] {
                assert_close(bubble(name, p, 1, m), 3.0 * idle, &case(name));
            }
            assert_close(bubble(Schedule::ZbH1, p, 1, m), idle, &case(Schedule::ZbH1));
            assert_close(bubble(Schedule::ZbH2, p, 1, m), 0.0, &case(Schedule::ZbH2));
            assert_close(bubble(Schedule::Zbv, p, 2, m), 0.0, &case(Schedule::Zbv));
            assert_eq!(peaks(Schedule::Gpipe, p, 1, m), vec![f64::from(m); p as usize]);
            let falling_peaks: Vec<f64> = (0..p).map(|rank| f64::from(p - rank)).collect();
            assert_eq!(peaks(Schedule::OneFOneB, p, 1, m), falling_peaks);
            assert_eq!(peaks(Schedule::ZbH1, p, 1, m), vec![f64::from(p); p as usize]);
            let zb_h2_peak = f64::from((2 * p - 1).min(m));
            assert_eq!(peaks(Schedule::ZbH2, p, 1, m), vec![zb_h2_peak; p as usize]);
            assert_eq!(peaks(Schedule::Zbv, p, 2, m), vec![f64::from(p); p as usize], "zbv");
            for v in 2..=3u32 {
                let case = |name: Schedule| format!("{name}, p {p}, v {v}, m {m}");
                assert_close(
                    bubble(Schedule::Interleaved, p, v, m),
                    3.0 * idle / f64::from(v),
                    &case(Schedule::Interleaved),
                );
                assert_close(bubble(Schedule::Bfs, p, v, m), 3.0 * idle / f64::from(v), &case(Schedule::Bfs));
                // Warm-up 2 (p - r - 1) + (v - 1) p, and the current one.
                let peak_of = |rank: u32| f64::from((2 * (p - rank - 1) + (v - 1) * p + 1).min(m * v)) / f64::from(v);
                assert_eq!(peaks(Schedule::Interleaved, p, v, m), (0..p).map(peak_of).collect::<Vec<_>>());
                assert_eq!(peaks(Schedule::Bfs, p, v, m), vec![f64::from(m); p as usize]);
            }
        }
    }
}

/// DualPipeV fills its V from 2 p micro-batches on, and has half a micro-batch more in flight than ZBV; a bubble of (p
/// - 1) / 2 remains.
#[test]
fn dualpipev_over_a_grid() {
    for p in 1..=6u32 {
        for m in [2 * p, 2 * p + 1, 3 * p, 4 * p] {
            assert_close(bubble(Schedule::DualPipeV, p, 2, m), f64::from(p - 1) / 2.0, &format!("p {p}, m {m}"));
            let peak = f64::from((2 * p + 1).min(2 * m)) / 2.0;
            assert_eq!(peaks(Schedule::DualPipeV, p, 2, m), vec![peak; p as usize], "p {p}, m {m}");
        }
    }
}

/// The formulas with different F, I and W: a rank's bubble per minibatch.
#[test]
fn bubbles_of_unequal_parts_are_the_published_formulas() {
    for [forward, input, weight] in
        [[1.0, 1.0, 1.0], [2.0, 2.0, 1.0], [3.0, 2.0, 2.0], [2.0, 3.0, 1.0], [5.0, 5.0, 2.0]]
    {
        for p in 2..=5u32 {
            for m in [2 * p, 3 * p + 1] {
                let idle = |name: Schedule, v: u32| {
                    let mut pipeline = ranks(name, p, v);
                    for stage in &mut pipeline.stages {
                        (stage.forward, stage.weight) = (forward / f64::from(v), weight / f64::from(v));
                        stage.backward = (input + weight) / f64::from(v);
                    }
                    let step = |minibatches| {
                        let program = schedule(name, &pipeline, StepCount { minibatches, microbatches: m }).unwrap();
                        simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap().makespan
                    };
                    (step(8) - step(4)) / 4.0 - f64::from(m) * (forward + input + weight)
                };
                let later_ranks = f64::from(p - 1);
                let case = |name: Schedule| format!("{name}, p {p}, m {m}, F {forward}, I {input}, W {weight}");
                for name in [Schedule::Gpipe, Schedule::OneFOneB] {
                    assert_close(idle(name, 1), later_ranks * (forward + input + weight), &case(name));
                }
                assert_close(idle(Schedule::ZbH1, 1), later_ranks * (forward + input - weight), &case(Schedule::ZbH1));
                if m % p == 0 {
                    for v in 2..=3 {
                        let expected = later_ranks * (forward + input + weight) / f64::from(v);
                        assert_close(idle(Schedule::Interleaved, v), expected, &case(Schedule::Interleaved));
                    }
                }
            }
        }
    }
}

/// torchgpipe's published speedups for AmoebaNet-D (18, 256), relative to two partitions and one micro-batch:
/// partitions, layers per partition, and speedup with 4 and 32 micro-batches.
const TORCHGPIPE: [(u32, &[i32], [f64; 2]); 3] =
    [(2, &[9, 15], [1.539, 1.773]), (4, &[3, 6, 7, 8], [1.666, 2.709]), (8, &[2, 2, 2, 3, 3, 4, 4, 4], [2.621, 4.953])];

/// The simulated speed if each layer takes `ratio` times as long as the previous one. With recomputation a backward
/// takes three forwards; sequentially, a micro-batch takes 1.
fn speed(ratio: f64, layers: &[i32], m: u32) -> f64 {
    let mut first = 0;
    let mut stages = Vec::new();
    let total = 1.0 - ratio.powi(layers.iter().sum());
    for &count in layers {
        let share = ratio.powi(first) * (1.0 - ratio.powi(count)) / total;
        stages.push(StageSpec::new(1, share / 4.0, share * 3.0 / 4.0));
        first += count;
    }
    let pipeline = Pipeline::chain(stages);
    let program = schedule(Schedule::Gpipe, &pipeline, StepCount { minibatches: 1, microbatches: m }).unwrap();
    f64::from(m) / simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap().makespan
}

/// The table does not state the imbalance of the partitions. A single parameter, fitted to the three speedups with 4
/// micro-batches, predicts those with 32 within 10 %.
///
/// The published speedup of 4 partitions and 4 micro-batches hardly exceeds that of 2; no imbalance explains it
/// together with the others, so the fit misses it.
#[test]
fn torchgpipe_speeds_up_as_published() {
    let fit_error = |ratio: f64| -> f64 {
        TORCHGPIPE.iter().map(|(_, layers, [four, _])| (speed(ratio, layers, 4) / four).ln().powi(2)).sum()
    };
    let ratios = (800..1000).map(|thousandth| f64::from(thousandth) / 1000.0);
    let ratio = ratios.min_by(|a, b| fit_error(*a).total_cmp(&fit_error(*b))).unwrap();
    println!("fitted on m = 4: each layer takes {ratio} of the time of the one before");
    println!("partitions  m   published  simulated");
    for (partitions, layers, published) in TORCHGPIPE {
        for (m, published) in [4, 32].into_iter().zip(published) {
            let simulated = speed(ratio, layers, m);
            let error = simulated / published - 1.0;
            println!("{partitions:>10} {m:>2} {published:>11.3} {simulated:>10.3} {:>+6.1} %", error * 100.0);
            assert!(m == 4 || error.abs() < 0.1, "{partitions} partitions: {simulated}, published {published}");
        }
    }
}

#[test]
fn any_number_of_microbatches_runs() {
    for name in Schedule::GENERATED.into_iter().filter(|name| name.flushes()) {
        let v = match name {
            Schedule::Interleaved | Schedule::Bfs => 3,
            Schedule::Zbv | Schedule::DualPipeV => 2,
            _ => 1,
        };
        for p in 1..=4 {
            for m in [1, 2, 3, 5, 6, 7, 11] {
                run(name, p, v, 2, m);
            }
        }
    }
}

const TABLES: [(Schedule, u32, &str); 5] = [
    (Schedule::Interleaved, 2, include_str!("../schedules/interleaved.csv")),
    (Schedule::ZbH1, 1, include_str!("../schedules/zb-h1.csv")),
    (Schedule::Zbv, 2, include_str!("../schedules/zbv.csv")),
    (Schedule::DualPipeV, 2, include_str!("../schedules/dualpipev.csv")),
    (Schedule::Bfs, 2, include_str!("../schedules/bfs.csv")),
];

/// torch 2.15's tables for four ranks and eight micro-batches: parsed, printed identically, run, and equal to our own
/// schedules.
#[test]
fn tables_of_torch() {
    for (name, v, text) in TABLES {
        let table: ComputeTable = text.parse().unwrap();
        assert_eq!(table.to_string(), text, "{name}");
        let pipeline = ranks(name, 4, v);
        let program = table.program(&pipeline, 2).unwrap();
        check(&program).unwrap_or_else(|error| panic!("{name}: {error}"));
        let generated = schedule(name, &pipeline, StepCount { minibatches: 2, microbatches: 8 }).unwrap();
        // In breadth-first schedules torch runs a stage's backwards in reverse, which changes the order of addition.
        assert_eq!(csv(&program) == csv(&generated), name != Schedule::Bfs, "{name}");
        let [a, b] =
            [&program, &generated].map(|program| simulate(program, &pipeline, &Machine::of(&pipeline)).unwrap());
        assert_close(a.makespan, b.makespan, name.name());
        assert_eq!(table.splits_backward(), name.splits_backward());
        let reparsed: ComputeTable = csv(&generated).parse().unwrap();
        assert_eq!(reparsed.to_string(), csv(&generated));
    }
}

/// A table distributes its row over replicas, each of which follows its part.
#[test]
fn replicas_share_a_table() {
    for (name, v, text) in TABLES {
        let mut pipeline = ranks(name, 4, v);
        pipeline.stages.iter_mut().for_each(|stage| stage.replicas = 3);
        let table: ComputeTable = text.parse().unwrap();
        let program = table.program(&pipeline, 2).unwrap();
        check(&program).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(program.workers.len(), 12);
        assert_eq!(program.to_string().parse::<Program>().as_ref(), Ok(&program));
    }
}

#[test]
fn a_no_names_what_can() {
    let count = StepCount { minibatches: 1, microbatches: 4 };
    let unequal = Pipeline::balanced(&[2, 1, 1, 2], 2.0).folded();
    let straight = Pipeline::balanced(&[1, 1, 1, 1], 2.0);
    let mut ragged = Pipeline::balanced(&[2, 1], 2.0);
    ragged.ranks = vec![RankId(0), RankId(1)];
    let error_of = |name, pipeline: &Pipeline| schedule(name, pipeline, count).unwrap_err().to_string();
    assert!(error_of(Schedule::Zbv, &straight).contains("zb-h1"));
    assert!(error_of(Schedule::OneFOneB, &straight.clone().folded()).contains("zbv"));
    assert!(error_of(Schedule::Interleaved, &straight.clone().folded()).contains("dualpipev"));
    assert!(error_of(Schedule::Interleaved, &ragged).contains("1f1b"));
    assert!(error_of(Schedule::Zbv, &unequal).contains("1f1b"));
    assert!(matches!(schedule(Schedule::Csv, &straight, count), Err(ScheduleError::NoTable)));
}
