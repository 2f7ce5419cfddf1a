//! Resumed runs are bitwise equal to uninterrupted ones: losses, weights, running statistics and all later checkpoints.
//! An interrupted save always leaves a complete checkpoint.

use crate::ready::{Ready, STEPS, adam, bits, checkpoints, cnn, contents, gpt, mlp, momentum, plan, ready};
use compiler::graph::{Graph, MovingAverage, Origin, Output, Writer};
use compiler::op::{BatchNorm, Emit, Input, Op, Parameter, State};
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::resume::period;
use compiler::schedule::semantics::StepCount;
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::checkpoint::barrier::MinibatchBarrier;
use runtime::checkpoint::find::{self, Found};
use runtime::exec::moving_average::Statistics;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::{Policy, Staleness};
use runtime::train::job::RunOptions;
use runtime::train::prepare::{Settings, prepare};
use runtime::train::resume::check_states;
use runtime::train::run::{run, train};
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Compares an uninterrupted run with runs resumed from each of its checkpoints.
fn check_resume(label: &str, ready: &Ready) {
    let uninterrupted = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let expected = ready.run(None, folder.path(), None);
    assert_eq!(bits(&expected.losses), bits(&uninterrupted.losses), "{label}: checkpoints change the run");
    assert!(expected.weights == uninterrupted.weights, "{label}: checkpoints change the run");
    let saved = checkpoints(folder.path());
    assert!(saved.len() >= 2, "{label}: {saved:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), saved.len(), "{label}: nothing else is left");
    for (minibatches, from) in &saved {
        let checkpoint = find::read(from).unwrap_or_else(|fault| panic!("{label}: {fault}"));
        let resumed_folder = tempfile::tempdir().unwrap();
        let resumed = ready.run(Some(&checkpoint), resumed_folder.path(), None);
        assert_eq!(
            bits(&resumed.losses),
            bits(&expected.losses[*minibatches as usize..]),
            "{label}, from {minibatches}"
        );
        assert!(resumed.weights == expected.weights, "{label}, from {minibatches}: weights");
        let later: Vec<_> = saved.iter().filter(|(step, _)| step > minibatches).collect();
        let rewritten = checkpoints(resumed_folder.path());
        assert_eq!(rewritten.len(), later.len(), "{label}, from {minibatches}");
        for ((step, original), (_, repeated)) in later.into_iter().zip(&rewritten) {
            let (original, repeated) = (contents(original), contents(repeated));
            assert_eq!(
                original.keys().collect::<Vec<_>>(),
                repeated.keys().collect::<Vec<_>>(),
                "{label}, {step} from {minibatches}"
            );
            for (name, bytes) in &original {
                assert!(repeated[name] == *bytes, "{label}, {step} from {minibatches}: {name}");
            }
        }
    }
}

#[test]
fn runs_that_flush_go_on() {
    for (name, model) in [("mlp", mlp()), ("cnn", cnn()), ("gpt", gpt(true))] {
        for (schedule, replicas, microbatches) in [
            (Schedule::OneFOneB, &[1, 1, 1][..], 2),
            (Schedule::Gpipe, &[2, 1], 4),
            (Schedule::ZbH1, &[1, 1, 1], 4),
            (Schedule::Interleaved, &[1, 1, 1, 1], 2),
        ] {
            let ready = ready(&model, plan(schedule, replicas, microbatches), adam(), Policy::default());
            check_resume(&format!("{name} {schedule} {replicas:?}"), &ready);
        }
    }
}

#[test]
fn runs_without_a_flush_go_on() {
    for (name, tied, model) in
        [("mlp", false, mlp()), ("cnn", false, cnn()), ("gpt", false, gpt(false)), ("tied", true, gpt(true))]
    {
        for (schedule, replicas, microbatches) in [
            (Schedule::OneFOneBRr, &[1, 1, 1][..], 1),
            (Schedule::OneFOneBRr, &[2, 1], 1),
            (Schedule::OneFOneBRr, &[1, 2], 1),
            (Schedule::OneFOneBRrVsync, &[1, 1, 1], 1),
            (Schedule::OneFOneBRrVsync, &[1, 2], 1),
            (Schedule::TwoBw, &[1, 1, 1], 2),
            (Schedule::TwoBw, &[2, 1], 4),
        ] {
            if tied && schedule.is_round_robin() && replicas.len() == 2 {
                continue;
            }
            let ready = ready(&model, plan(schedule, replicas, microbatches), momentum(), Policy::default());
            check_resume(&format!("{name} {schedule} {replicas:?}"), &ready);
        }
    }
}

#[test]
fn runs_that_stash_nothing_go_on() {
    for (name, model) in [("mlp", mlp()), ("cnn", cnn())] {
        for staleness in [Staleness::None, Staleness::Predict, Staleness::PipeMare { anneal: 4 }] {
            for replicas in [&[1, 1, 1][..], &[2, 1], &[1, 2]] {
                let policy = Policy { staleness, ..Policy::default() };
                for optimizer in [momentum(), adam()] {
                    let ready = ready(&model, plan(Schedule::OneFOneBRrNewest, replicas, 1), optimizer, policy);
                    check_resume(&format!("{name} {staleness:?} {replicas:?}"), &ready);
                }
            }
        }
    }
}

#[test]
fn cuts_come_as_often_as_one_likes() {
    for (schedule, replicas, microbatches) in [
        (Schedule::OneFOneBRr, &[1, 1, 1, 1][..], 1),
        (Schedule::OneFOneBRr, &[2, 1, 1], 1),
        (Schedule::OneFOneBRrVsync, &[1, 1, 1, 1], 1),
        (Schedule::OneFOneB, &[1, 1], 2),
    ] {
        let whole = ready(&mlp(), plan(schedule, replicas, microbatches), adam(), Policy::default());
        check_resume(&format!("{schedule} {replicas:?} every one"), &Ready { every: 1, ..whole });
    }
    let policy = Policy { staleness: Staleness::Predict, ..Policy::default() };
    let whole = ready(&mlp(), plan(Schedule::OneFOneBRrNewest, &[1, 1, 1, 1], 1), adam(), policy);
    check_resume("predicted, every one", &Ready { every: 1, ..whole });
}

#[test]
fn what_checkpoints_hold_is_counted_by_itself() {
    for (schedule, replicas, microbatches) in
        [(Schedule::OneFOneB, &[1, 1, 1][..], 2), (Schedule::OneFOneBRr, &[1, 1, 1], 1), (Schedule::TwoBw, &[1, 1], 2)]
    {
        let ready = ready(&mlp(), plan(schedule, replicas, microbatches), adam(), Policy::default());
        let ready = Ready { every: 1, ..ready };
        let unsaved = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
        let saved = ready.run(None, tempfile::tempdir().unwrap().path(), None);
        assert!(unsaved.checkpoint_bytes.iter().all(|bytes| *bytes == 0));
        for (worker, (with, without)) in saved.peak_memory_bytes.iter().zip(&unsaved.peak_memory_bytes).enumerate() {
            // Message arrival times vary.
            assert!(
                *with <= without + without / 10,
                "{schedule}, worker {worker}: {with} with checkpoints, {without} without"
            );
            let code = &ready.prepared.codes[worker];
            let weights: usize = code.parameters.iter().map(|named| named.bytes).sum();
            // Weights, and two moments for each weight.
            assert!(saved.checkpoint_bytes[worker] as usize >= 3 * weights, "{schedule}, worker {worker}");
        }
    }
}

#[test]
fn what_is_done_beside_goes_on() {
    let clipped =
        Policy { clip_norm: Some(0.05), statistics: Statistics::Deferred { unbiased: true }, ..Policy::default() };
    let flush = ready(&cnn(), plan(Schedule::OneFOneB, &[1, 2], 2), momentum(), clipped);
    check_resume("clipped, deferred", &flush);
    let stale = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 1, 1], 1), momentum(), clipped);
    check_resume("clipped by stage", &stale);
    for rule in [
        Rule::RmsProp { learning_rate: 0.01, alpha: 0.9, epsilon: 1e-8, weight_decay: 0.0, momentum: 0.5 },
        Rule::Adagrad { learning_rate: 0.01, decay: 0.1, epsilon: 1e-8, weight_decay: 0.0 },
        Rule::Sgd { learning_rate: 0.01, momentum: 0.0, nesterov: false, weight_decay: 0.0 },
    ] {
        let label = format!("{rule:?}");
        let run = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), Optimizer::from(rule), Policy::default());
        check_resume(&label, &run);
    }
}

#[test]
fn a_stopped_run_leaves_a_resumable_checkpoint() {
    let newest = Policy { staleness: Staleness::Predict, ..Policy::default() };
    for (schedule, replicas, microbatches, policy) in [
        (Schedule::OneFOneB, &[1, 1, 1][..], 2, Policy::default()),
        (Schedule::Interleaved, &[1, 1, 1, 1], 2, Policy::default()),
        (Schedule::OneFOneBRr, &[1, 1, 1], 1, Policy::default()),
        (Schedule::OneFOneBRr, &[1, 2], 1, Policy::default()),
        (Schedule::OneFOneBRr, &[2, 1, 1], 1, Policy::default()),
        (Schedule::OneFOneBRrVsync, &[1, 2], 1, Policy::default()),
        (Schedule::TwoBw, &[1, 1, 1], 2, Policy::default()),
        (Schedule::OneFOneBRrNewest, &[1, 1, 1], 1, newest),
    ] {
        let ready = ready(&cnn(), plan(schedule, replicas, microbatches), momentum(), policy);
        let ready = Ready { every: 100, ..ready };
        let uninterrupted = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
        let label = format!("{schedule} {replicas:?}");
        // A stop may arrive at any time; here it arrives when some worker starts a minibatch. On a busy machine the run may
        // be over before that.
        let mut stopped = 0;
        for _ in 0..30 {
            if stopped == 3 {
                break;
            }
            let (stop, folder) = (AtomicUsize::new(0), tempfile::tempdir().unwrap());
            let barrier = MinibatchBarrier::new(&stop, period(&ready.prepared.program), 0);
            let first = std::thread::scope(|scope| {
                let run = scope.spawn(|| ready.run(None, folder.path(), Some(&barrier)));
                stop.store(1, Ordering::Relaxed);
                run.join().unwrap()
            });
            let end = barrier.end().expect("it was asked before it began") as usize;
            assert_eq!(bits(&first.losses), bits(&uninterrupted.losses[..end]), "{label}");
            if end == STEPS as usize {
                continue;
            }
            stopped += 1;
            let [(minibatches, path)] = &checkpoints(folder.path())[..] else { panic!("{label}: no checkpoint") };
            assert_eq!(*minibatches as usize, end, "{label}");
            let checkpoint = find::read(path).unwrap();
            let resumed = ready.run(Some(&checkpoint), folder.path(), None);
            assert_eq!(bits(&resumed.losses), bits(&uninterrupted.losses[end..]), "{label}");
            assert!(resumed.weights == uninterrupted.weights, "{label}");
        }
        assert_eq!(stopped, 3, "{label}: no run was stopped before its end");
    }
}

#[test]
fn a_run_that_flushes_goes_on_under_another_plan() {
    for model in [mlp(), cnn(), gpt(true)] {
        let first = plan(Schedule::OneFOneB, &[1, 1, 1], 2);
        let first = ready(&model, first, adam(), Policy::default());
        let folder = tempfile::tempdir().unwrap();
        let expected = first.run(None, folder.path(), None);
        for (schedule, stages) in
            [(Schedule::Gpipe, 2), (Schedule::OneFOneB, 1), (Schedule::ZbH1, 4), (Schedule::Interleaved, 4)]
        {
            let replanned = ready(&model, plan(schedule, &vec![1; stages], 2), adam(), Policy::default());
            let (minibatches, from) = &checkpoints(folder.path())[1];
            let mut checkpoint = find::read(from).unwrap();
            checkpoint.start.flight = None;
            let resumed_folder = tempfile::tempdir().unwrap();
            let resumed = replanned.run(Some(&checkpoint), resumed_folder.path(), None);
            assert_eq!(bits(&resumed.losses), bits(&expected.losses[*minibatches as usize..]), "{schedule} {stages}");
            assert!(resumed.weights == expected.weights, "{schedule} {stages}");
        }
    }
}

#[test]
fn everything_that_a_checkpoint_holds_matters() {
    let predict = Policy { staleness: Staleness::Predict, ..Policy::default() };
    for (schedule, replicas, policy) in [
        (Schedule::OneFOneBRr, &[1, 1, 1][..], Policy::default()),
        (Schedule::OneFOneBRr, &[1, 2], Policy::default()),
        (Schedule::OneFOneBRrNewest, &[1, 1, 1], predict),
    ] {
        let ready = ready(&cnn(), plan(schedule, replicas, 1), adam(), policy);
        let folder = tempfile::tempdir().unwrap();
        let expected = ready.run(None, folder.path(), None);
        let (minibatches, from) = &checkpoints(folder.path())[1];
        let check_differs = |part: &str, change: &dyn Fn(&mut Found)| {
            let mut checkpoint = find::read(from).unwrap();
            change(&mut checkpoint);
            let resumed = ready.run(Some(&checkpoint), tempfile::tempdir().unwrap().path(), None);
            let is_same = bits(&resumed.losses) == bits(&expected.losses[*minibatches as usize..])
                && resumed.weights == expected.weights;
            assert!(!is_same, "{schedule} {replicas:?}: without {part} the run is the same");
        };
        let zeros = |checkpoint: &mut Found, kind: &str| {
            let of_kind = checkpoint.start.optimizer.iter_mut().filter(|(name, _)| name.ends_with(kind));
            of_kind.for_each(|(_, tensor)| *tensor = Tensor::zeros(tensor.dtype(), tensor.shape()));
        };
        check_differs("what was in flight", &|checkpoint| checkpoint.start.flight = None);
        check_differs("counts of updates", &|checkpoint| zeros(checkpoint, "/step"));
        check_differs("first moments", &|checkpoint| zeros(checkpoint, "/exp_avg"));
        check_differs("second moments", &|checkpoint| zeros(checkpoint, "/exp_avg_sq"));
        check_differs("running statistics", &|checkpoint| {
            let statistics = checkpoint.weights.iter_mut().filter(|(name, _)| name.contains("running_"));
            statistics.for_each(|(_, tensor)| *tensor = Tensor::zeros(tensor.dtype(), tensor.shape()));
        });
        let mut checkpoint = find::read(from).unwrap();
        let flights = checkpoint.start.flight.iter_mut().flatten();
        flights.for_each(|(_, flight)| {
            flight.versions.clear();
            flight.forwards.clear();
        });
        let mut weights = ready.weights.clone();
        weights.extend(checkpoint.weights.clone());
        let options = RunOptions { start: Some(&checkpoint.start), ..RunOptions::default() };
        let fault =
            run(&ready.training(&weights), options, &mut |_| {}).err().expect("versions are missing").to_string();
        assert!(fault.starts_with("the checkpoint has no `v"), "{fault}");
    }
}

/// A batch normalisation that uses its running mean as its scale.
#[test]
fn a_state_that_is_read_where_it_follows_has_no_checkpoints_without_a_flush() {
    let mut graph = Graph::new("loop");
    let mut writer = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::new(DType::F32, vec![Dim::symbol("batch"), Dim::from(3usize)]);
    let x = writer.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    let fact = || Fact::of(DType::F32, &[3]);
    let scale = writer.emit(Op::State(State { name: "mean".into(), fact: fact() }), &[]);
    let bias = writer.emit(Op::Parameter(Parameter { name: "bias".into(), fact: fact() }), &[]);
    let norm = writer.emit_all(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[x, scale, bias]);
    graph.outputs.push(Output { name: "y".into(), value: norm[0] });
    graph.averages.push(MovingAverage { state: scale.node, sample: norm[1], keep: 0.9 });
    for (schedule, is_accepted) in [(Schedule::OneFOneB, true), (Schedule::OneFOneBRr, false), (Schedule::TwoBw, false)]
    {
        let dims = Bindings::from([("batch".to_string(), 4)]);
        let settings = Settings::new(dims, Loss::CrossEntropy, schedule, StepCount::minibatches(4));
        let prepared = prepare(&graph, &[0], plan(schedule, &[1], 1).pipeline, &settings).unwrap();
        let checked = check_states(&prepared.program, &prepared.codes).map_err(|fault| fault.to_string());
        assert_eq!(checked.is_ok(), is_accepted, "{schedule}");
        assert!(checked.err().is_none_or(|fault| fault.contains("the forward reads `mean`")));
    }
}

#[test]
fn without_a_flush_another_plan_begins_with_the_one_version_of_the_cut() {
    let first = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 1, 1], 1), adam(), Policy::default());
    let folder = tempfile::tempdir().unwrap();
    first.run(None, folder.path(), None);
    let mut checkpoint = find::read(&checkpoints(folder.path())[1].1).unwrap();
    checkpoint.start.flight = None;
    let steps = (STEPS - checkpoint.manifest.minibatches) as usize;
    for replanned in [
        plan(Schedule::OneFOneBRr, &[2, 1], 1),
        plan(Schedule::OneFOneBRr, &[1, 1], 1),
        plan(Schedule::OneFOneBRrNewest, &[1, 1, 1], 1),
        plan(Schedule::OneFOneB, &[1, 1], 1),
        plan(Schedule::TwoBw, &[1, 1], 2),
    ] {
        let label = format!("{}", replanned.schedule);
        let replanned = ready(&cnn(), replanned, adam(), Policy::default());
        let resumed = replanned.run(Some(&checkpoint), tempfile::tempdir().unwrap().path(), None);
        assert_eq!(resumed.losses.len(), steps, "{label}");
        assert!(resumed.losses.iter().all(|loss| loss.is_finite()), "{label}: {:?}", resumed.losses);
    }
    // After six minibatches, rounds of three end, but rounds of four do not.
    let four = ready(&mlp(), plan(Schedule::OneFOneBRr, &[4, 1], 1), adam(), Policy::default());
    let fault = checkpoint.start.check(&four.prepared.program).unwrap_err().to_string();
    assert!(fault.contains("from minibatch 6") && fault.contains("every 4 minibatches"), "{fault}");
}
