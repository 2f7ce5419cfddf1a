//! Simulated figures known from elsewhere: bubbles, activations, stashes, shared cores, links.

use compiler::plan::schedule::Schedule;
use compiler::schedule::check::verify::check;
use compiler::schedule::formats::chart::chart;
use compiler::schedule::formats::json::{from_json, to_json};
use compiler::schedule::generators::schedule;
use compiler::schedule::link_time::Link;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Bucket, Pipeline, Program, StageSpec};
use compiler::simulate::efficiency::{auto_caps, steady_efficiency};
use compiler::simulate::network::Network;
use compiler::simulate::one_f_one_b_rr::{bound, ideal_us, steady};
use compiler::simulate::run::{Jitter, Machine, simulate};
use compiler::simulate::{Activity, SimulateError, Timeline};

fn run(program: &Program, pipeline: &Pipeline) -> Timeline {
    check(program).unwrap();
    simulate(program, pipeline, &Machine::of(pipeline)).unwrap()
}

/// Four stages, eight micro-batches, F = 1, B = 2: values of torch's generators and the papers' formulas.
#[test]
fn bubbles_and_activations_of_flush_schedules() {
    let pipeline = Pipeline::balanced(&[1, 1, 1, 1], 2.0);
    let count = StepCount { minibatches: 1, microbatches: 8 };
    for (name, activations) in [(Schedule::Gpipe, [8, 8, 8, 8]), (Schedule::OneFOneB, [4, 3, 2, 1])] {
        let timeline = run(&schedule(name, &pipeline, count).unwrap(), &pipeline);
        assert_eq!(timeline.makespan, 33.0, "{name}");
        for worker in 0..4 {
            assert_eq!(timeline.makespan - timeline.busy(worker), 9.0, "{name}, worker {worker}");
        }
        assert!((timeline.bubble() - 9.0 / 33.0).abs() < 1e-12);
        assert_eq!(timeline.peak_in_flight, activations, "{name}");
    }
}

/// GPipe: the idle fraction is (p − 1) / (m + p − 1).
#[test]
fn the_bubble_of_fill_drain_is_the_published_formula() {
    for p in 1..6u32 {
        for m in 1..9u32 {
            let pipeline = Pipeline::balanced(&vec![1; p as usize], 2.0);
            let count = StepCount { minibatches: 1, microbatches: m };
            let timeline = run(&schedule(Schedule::Gpipe, &pipeline, count).unwrap(), &pipeline);
            let formula = f64::from(p - 1) / f64::from(m + p - 1);
            assert!((timeline.bubble() - formula).abs() < 1e-12, "{p} stages, {m} microbatches");
        }
    }
}

/// A worker keeps at most c_s weight versions and gradients, besides the gradient being accumulated.
#[test]
fn stashes_stay_within_the_cap() {
    for replicas in [&[1, 1, 1][..], &[2, 1], &[1, 3, 1], &[4, 2, 1], &[3, 3]] {
        for extra in 0..3 {
            let mut pipeline = Pipeline::balanced(replicas, 2.0);
            for stage in &mut pipeline.stages {
                stage.cap += extra;
                stage.param_bytes = 1;
            }
            let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(60)).unwrap();
            let timeline = run(&program, &pipeline);
            for (worker, list) in program.workers.iter().enumerate() {
                let cap = u64::from(pipeline.stages[list.rank.index()].cap);
                let peak = timeline.peak_memory(worker);
                assert!(peak <= cap + 1, "{replicas:?} + {extra}, worker {worker}: {peak} > {cap} + 1");
            }
        }
    }
    let mut pipeline = Pipeline::balanced(&[2, 1, 1], 2.0);
    pipeline.stages.iter_mut().for_each(|stage| stage.param_bytes = 1);
    let count = StepCount { minibatches: 10, microbatches: 4 };
    let timeline = run(&schedule(Schedule::TwoBw, &pipeline, count).unwrap(), &pipeline);
    assert!((0..4).all(|worker| timeline.peak_memory(worker) <= 3), "2bw holds two versions and a gradient");
}

#[test]
fn saved_activations_are_counted() {
    let mut pipeline = Pipeline::balanced(&[1, 1, 1], 2.0);
    pipeline.stages.iter_mut().for_each(|stage| stage.saved_bytes = 100);
    let count = StepCount { minibatches: 2, microbatches: 8 };
    let timeline = run(&schedule(Schedule::OneFOneB, &pipeline, count).unwrap(), &pipeline);
    assert_eq!([0, 1, 2].map(|worker| timeline.peak_memory(worker)), [300, 200, 100]);
    assert_eq!(timeline.memory[0].last().unwrap().1, 0);
}

#[test]
fn shared_cores_share_the_speed() {
    let pipeline = Pipeline::balanced(&[1, 1, 1, 1], 2.0);
    let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(200)).unwrap();
    let on_cores = |cores| simulate(&program, &pipeline, &Machine { cores, ..Machine::of(&pipeline) }).unwrap();
    let full_speed = on_cores(None).throughput();
    assert!((full_speed - 1e6 / 3.0).abs() < 1.0);
    assert_eq!(on_cores(Some(4)).throughput(), full_speed);
    assert!((on_cores(Some(2)).throughput() - full_speed / 2.0).abs() < 1.0);
    let single_core = on_cores(Some(1));
    assert!((single_core.makespan - 200.0 * 12.0).abs() < 1e-6, "one core does all the work: {}", single_core.makespan);
}

/// Transfers overlap with computation, as long as none takes longer than a micro-batch.
#[test]
fn transfers_hide_behind_computation() {
    for replicas in [&[1, 1, 1, 1][..], &[2, 1], &[1, 3, 1], &[9, 5, 1, 1]] {
        for time in [0.3, 1.5, 2.9] {
            let mut pipeline = Pipeline::balanced(replicas, 2.0);
            for edge in &mut pipeline.edges {
                (edge.forward_us, edge.backward_us) = (time, time);
            }
            let caps = auto_caps(&pipeline).unwrap();
            let efficiency = steady_efficiency(&pipeline.with_caps(&caps)).unwrap();
            assert!(efficiency >= 0.98, "{replicas:?}, transfers of {time}: {efficiency} with {caps:?}");
        }
    }
}

#[test]
fn a_slow_link_is_the_bottleneck() {
    let mut pipeline = Pipeline::balanced(&[1, 1], 2.0);
    pipeline.edges[0].forward_bytes = 8000;
    let network = Network::new(&pipeline, |_| Link { latency: 2.0, bandwidth: 1000.0 }, |_| Link::INSTANT);
    network.apply(&mut pipeline);
    assert_eq!((pipeline.edges[0].forward_us, pipeline.edges[0].backward_us, ideal_us(&pipeline)), (10.0, 2.0, 10.0));
    let caps = auto_caps(&pipeline).unwrap();
    let program =
        schedule(Schedule::OneFOneBRr, &pipeline.clone().with_caps(&caps), StepCount::minibatches(100)).unwrap();
    let timeline = run(&program, &pipeline);
    assert!((timeline.throughput() - 1e5).abs() < 2e3, "{} items/s with {caps:?}", timeline.throughput());
    assert_eq!(timeline.links[0].name, "0.0 > 1.0");
    assert!(timeline.links[0].spans.windows(2).all(|pair| pair[1].start >= pair[0].end));
}

#[test]
fn automatic_caps_spare_the_dear_stash() {
    let mut pipeline = Pipeline::balanced(&[1, 3, 1], 2.0);
    pipeline.stages[0].param_bytes = 1 << 30;
    let caps_of_large_first = auto_caps(&pipeline).unwrap();
    pipeline.stages[0].param_bytes = 0;
    pipeline.stages[1].param_bytes = 1 << 30;
    let caps_of_large_second = auto_caps(&pipeline).unwrap();
    assert!(
        caps_of_large_first[0] <= caps_of_large_second[0] && caps_of_large_first[1] >= caps_of_large_second[1],
        "{caps_of_large_first:?} {caps_of_large_second:?}"
    );
}

#[test]
fn no_time_at_all_is_no_fault() {
    let pipeline = Pipeline::balanced(&[2, 1], 0.0);
    let mut without_time = pipeline.clone();
    without_time.stages.iter_mut().for_each(|stage| stage.forward = 0.0);
    assert_eq!(steady_efficiency(&without_time).unwrap(), 1.0);
    let program = schedule(Schedule::OneFOneBRr, &without_time, StepCount::minibatches(9)).unwrap();
    let timeline = run(&program, &without_time);
    assert_eq!((timeline.makespan, timeline.bubble()), (0.0, 0.0));
    assert!(timeline.throughput().is_infinite());
    assert!(steady_efficiency(&pipeline).unwrap() > 0.9);
}

/// Recomputation runs while gradients are in transit, and its time is deducted from the backward.
#[test]
fn a_stage_that_is_recomputed_says_so() {
    let mut pipeline = Pipeline::balanced(&[1, 1], 2.0);
    // The backward includes a recomputed forward.
    (pipeline.stages[0].backward, pipeline.stages[0].recompute) = (3.0, Some(1.0));
    pipeline.stages[0].weight = 1.0;
    for (name, row, makespan) in [
        (Schedule::OneFOneB, "0.0 | F0 F1 R0 B0 R1 B1", 9.0),
        (Schedule::ZbH1, "0.0 | F0 F1 R0 I0", 8.0),
        (Schedule::OneFOneBRr, "0.0 | F0 F1 R0 B0 R1 B1", 9.0),
    ] {
        let count = if name.is_round_robin() {
            StepCount::minibatches(2)
        } else {
            StepCount { minibatches: 1, microbatches: 2 }
        };
        let program = schedule(name, &pipeline, count).unwrap();
        check(&program).unwrap();
        let text = program.to_string();
        assert!(text.contains("  stage 0 replicas=1 cap=2 recompute\n  stage 1 replicas=1 cap="), "{text}");
        let counts = ["recompute\n", "recompute 0F", "recompute 1F"].map(|word| text.matches(word).count());
        assert_eq!(counts, [1, 2, 0], "{text}");
        assert_eq!(from_json(&to_json(&program).unwrap()).unwrap(), program);
        assert!(chart(&program).unwrap().starts_with(row), "{name}\n{}", chart(&program).unwrap());
        let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap();
        assert_eq!((timeline.busy(0), timeline.makespan), (8.0, makespan), "{name}");
        let incomplete = text.lines().filter(|line| !line.contains("recompute 0F1")).collect::<Vec<_>>().join("\n");
        let error = check(&incomplete.parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("inputs of micro-batch 1, and there was no Recompute"), "{error}");
    }
    let program = schedule(Schedule::Inference, &pipeline, StepCount::minibatches(2)).unwrap();
    assert!(!program.to_string().contains("recompute"));
}

#[test]
fn a_program_that_waits_for_ever_is_named() {
    let pipeline = Pipeline::balanced(&[1, 1], 2.0);
    let text = schedule(Schedule::Inference, &pipeline, StepCount::minibatches(1)).unwrap().to_string();
    let broken: Program = text.replace("    send 0F0 > 1.0 #0\n    wait #0\n", "").parse().unwrap();
    let error = simulate(&broken, &pipeline, &Machine::of(&pipeline)).unwrap_err();
    assert!(matches!(&error, SimulateError::Stuck { worker, .. } if worker == "1.0"), "{error}");
    let other_pipeline = Pipeline::balanced(&[1, 1, 1], 2.0);
    let error = simulate(&broken, &other_pipeline, &Machine::of(&other_pipeline)).unwrap_err();
    assert!(matches!(error, SimulateError::Mismatch { .. }), "{error}");
}

/// Only detects quadratic run time.
#[test]
fn long_runs_are_quick() {
    let pipeline = Pipeline::balanced(&[1; 64], 2.0);
    let start = std::time::Instant::now();
    let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(1000)).unwrap();
    let timeline = run(&program, &pipeline);
    assert!((timeline.throughput() - 1e6 / 3.0).abs() < 1.0);
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}

/// A thousand workers, with `PIPEC_LARGE`: prints the seconds for program and simulation.
#[test]
fn very_large_runs() {
    if std::env::var_os("PIPEC_LARGE").is_none() {
        println!("skipped: PIPEC_LARGE is not set");
        return;
    }
    let pipeline = Pipeline::balanced(&[1; 1024], 2.0);
    let start = std::time::Instant::now();
    let count = StepCount { minibatches: 1, microbatches: 4096 };
    let program = schedule(Schedule::OneFOneB, &pipeline, count).unwrap();
    let generation_time = start.elapsed();
    let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline)).unwrap();
    println!("programs in {generation_time:?}, simulated in {:?}", start.elapsed() - generation_time);
    assert_eq!(timeline.makespan, 3.0 * (4096.0 + 1023.0));
}

#[test]
fn jitter_follows_its_seed_and_slows_what_waits() {
    let pipeline = Pipeline::balanced(&[1; 8], 2.0);
    let program = schedule(Schedule::OneFOneB, &pipeline, StepCount { minibatches: 4, microbatches: 16 }).unwrap();
    let run_with = |share: f64, seed: u64| {
        let machine = Machine { jitter: Some(Jitter { share, seed }), ..Machine::of(&pipeline) };
        simulate(&program, &pipeline, &machine).unwrap()
    };
    let exact = run(&program, &pipeline);
    assert_eq!(run_with(0.0, 3), exact);
    assert_eq!(run_with(0.2, 3), run_with(0.2, 3));
    assert_ne!(run_with(0.2, 3).makespan, run_with(0.2, 4).makespan);
    for seed in 0..20 {
        let timeline = run_with(0.2, seed);
        // All wait for the slowest, so symmetric noise increases the total.
        assert!(
            timeline.makespan > exact.makespan && timeline.makespan < 1.2 * exact.makespan,
            "{}",
            timeline.makespan
        );
        for (worker, track) in timeline.workers.iter().enumerate() {
            let spans = track.spans.iter().map(|span| (span.activity, span.end - span.start));
            for (activity, us) in spans.filter(|(activity, _)| matches!(activity, Activity::Forward(..))) {
                assert!((0.8 - 1e-9..1.2 + 1e-9).contains(&us), "{worker}: {activity} took {us}");
            }
            let (actual, expected) = (timeline.busy(worker), exact.busy(worker));
            assert!((actual / expected - 1.0).abs() < 0.05, "{worker}: {actual} and {expected}");
        }
    }
}

/// Two replicas, forward 1, backward 8, all-reduce 8 in buckets that are ready after 2, 6 and 8 and take 2, 2 and 4.
fn in_buckets() -> Pipeline {
    let bucket = |ready, share| Bucket { ready, share };
    let buckets = vec![bucket(0.25, 0.25), bucket(0.75, 0.25), bucket(1.0, 0.5)];
    Pipeline::chain(vec![StageSpec { all_reduce: 8.0, buckets, ..StageSpec::new(2, 1.0, 8.0) }])
}

#[test]
fn buckets_travel_beside_the_backward_that_makes_the_rest() {
    let pipeline = in_buckets();
    assert_eq!(pipeline.stages[0].exposed_us(), 4.0);
    let count = StepCount { minibatches: 1, microbatches: 4 };
    let program = schedule(Schedule::OneFOneB, &pipeline, count).unwrap();
    let timeline = run(&program, &pipeline);
    let spans: Vec<(String, f64, f64)> =
        timeline.links[0].spans.iter().map(|span| (span.activity.to_string(), span.start, span.end)).collect();
    let expected = [
        ("all-reduce 0 round 0", 12.0, 14.0),
        ("all-reduce 0 round 0 bucket 1", 16.0, 18.0),
        ("all-reduce 0 round 0 bucket 2", 18.0, 22.0),
    ];
    assert_eq!(spans, expected.map(|(name, start, end)| (name.to_string(), start, end)));
    assert_eq!(timeline.makespan, 22.0);
    // A single bucket starts after the last backward.
    let mut single_bucket = pipeline;
    single_bucket.stages[0].buckets.clear();
    let program = schedule(Schedule::OneFOneB, &single_bucket, count).unwrap();
    assert_eq!(run(&program, &single_bucket).makespan, 26.0);
}

/// With shared cores a bucket is ready when its fraction of the computation is done.
#[test]
fn buckets_are_made_as_the_backward_goes_on() {
    let pipeline = in_buckets();
    let program = schedule(Schedule::OneFOneB, &pipeline, StepCount { minibatches: 1, microbatches: 2 }).unwrap();
    let machine = Machine { cores: Some(1), ..Machine::of(&pipeline) };
    let timeline = simulate(&program, &pipeline, &machine).unwrap();
    // Forwards end at 2, backwards at 18.
    let starts: Vec<f64> = timeline.links[0].spans.iter().map(|span| span.start).collect();
    assert_eq!((starts, timeline.makespan), (vec![6.0, 14.0, 18.0], 22.0));
}

/// The analytic rule, the bound and the programs agree on the time of a round's update.
#[test]
fn the_rule_knows_of_buckets() {
    for cap in 1..=3 {
        let pipeline = in_buckets().with_caps(&[cap]);
        let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(200)).unwrap();
        let timeline = run(&program, &pipeline);
        let ends = timeline.ends(1);
        let us = (ends[199] - ends[99]) / 100.0;
        let [share, max_share] =
            [steady(&pipeline), Ok(bound(&pipeline))].map(|steady_state| steady_state.unwrap().share);
        let ideal = ideal_us(&pipeline);
        assert!(
            (ideal / us - share).abs() < 1e-2 && share <= max_share + 1e-12,
            "cap {cap}: {us}, {share}, {max_share}"
        );
    }
}
