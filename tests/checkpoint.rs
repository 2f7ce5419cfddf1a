//! A run that goes on from a checkpoint is the run that was never interrupted, to the bit: losses, weights, running statistics, and
//! every file of every later checkpoint. And whatever ends a save, a complete checkpoint is left.

use compiler::graph::{Graph, MovingAverage, Origin, Output, Writer, order};
use compiler::import::import::{Model, Options as Import, Weight, load};
use compiler::op::{BatchNorm, Emit, Input, Op, Parameter, State};
use compiler::pass::loss::Loss;
use compiler::schedule::rest::period;
use compiler::schedule::rule::StepCount;
use compiler::schedule::{Pipeline, Schedule, StageShape, published_caps};
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use models::choice::Setting;
use models::zoo::{ENTRIES, Options, build, to_bytes};
use runtime::checkpoint::cuts::{Cuts, Gate};
use runtime::checkpoint::files::{Disk, Files};
use runtime::checkpoint::find::{self, Found};
use runtime::checkpoint::keeper::{Keeper, Kept, Saved};
use runtime::checkpoint::manifest::Dealt;
use runtime::checkpoint::start::check_states;
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, Order};
use runtime::optimizer::{Optimizer, Rule};
use runtime::policy::{Policy, Staleness, Statistics};
use runtime::prepare::{Prepared, Settings, prepare};
use runtime::rate::{Rate, Shape};
use runtime::train::{Course, StepDone, Trained, Training, feeds, run, train};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

const BATCH: usize = 4;
const STEPS: u32 = 12;

fn model(name: &str, settings: &[(&str, Setting)]) -> Model {
    let entry = ENTRIES.iter().find(|entry| entry.name == name).unwrap();
    let options = Options { loss: true, seed: 1, ..entry.small() };
    let options = settings.iter().fold(options, |options, (name, setting)| options.with(name, *setting));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::write(&path, to_bytes(&build(name, &options).unwrap().model)).unwrap();
    load(&path, &Import::default()).unwrap()
}

fn mlp() -> Model {
    model("mlp", &[("hidden", Setting::Number(12)), ("layers", Setting::Number(4)), ("inputs", Setting::Number(10))])
}

fn cnn() -> Model {
    model("residual-cnn", &[("hidden", Setting::Number(4))])
}

fn gpt(tied: bool) -> Model {
    model(
        "gpt",
        &[
            ("hidden", Setting::Number(8)),
            ("heads", Setting::Number(2)),
            ("vocabulary", Setting::Number(11)),
            ("context", Setting::Number(4)),
            ("tied", Setting::Truth(tied)),
            ("dropout", Setting::Fraction(0.2)),
        ],
    )
}

/// A run, ready to begin.
struct Ready {
    prepared: Prepared,
    weights: BTreeMap<String, Tensor>,
    batches: Batches,
    optimizer: Optimizer,
    policy: Policy,
    every: u32,
}

/// How a run is cut.
#[derive(Clone)]
struct Plan {
    schedule: Schedule,
    pipeline: Pipeline,
    microbatches: u32,
}

fn plan(schedule: Schedule, replicas: &[u32], microbatches: u32) -> Plan {
    let shapes = replicas.iter().map(|r| StageShape::new(*r, f64::from(*r), 2.0 * f64::from(*r))).collect();
    let pipeline = Pipeline::chain(shapes).with_caps(&published_caps(replicas));
    let pipeline = match schedule {
        Schedule::Interleaved | Schedule::Bfs => pipeline.looped(2),
        Schedule::Zbv | Schedule::DualPipeV => pipeline.folded(),
        _ => pipeline,
    };
    Plan { schedule, pipeline, microbatches }
}

fn momentum() -> Optimizer {
    let rule = Rule::Sgd { learning_rate: 0.05, momentum: 0.9, nesterov: false, weight_decay: 0.01 };
    Optimizer { rule, rate: Rate { warmup: 3, shape: Shape::Cosine { floor: 0.1 } } }
}

fn adam() -> Optimizer {
    Optimizer::from(Rule::Adam {
        learning_rate: 0.01,
        betas: (0.9, 0.99),
        epsilon: 1e-8,
        weight_decay: 0.01,
        decoupled: true,
    })
}

fn ready(model: &Model, plan: Plan, optimizer: Optimizer, policy: Policy) -> Ready {
    let Plan { schedule, pipeline, microbatches } = plan;
    let (ops, stages) = (order::numbered(&model.graph).len(), pipeline.stages.len());
    let placed: Vec<usize> = (0..ops).map(|op| op * stages / ops).collect();
    let item = BATCH / microbatches as usize;
    let dims = Bindings::from([("batch".to_string(), item as i64)]);
    let count = StepCount { minibatches: STEPS, microbatches };
    let settings = Settings { dims, loss: Loss::Output, class_axis: None, schedule, count };
    let prepared = prepare(&model.graph, &placed, pipeline, &settings).unwrap();
    let mut feeds = feeds(&prepared.codes);
    // However the model is cut, every feed draws the same numbers.
    feeds.sort_by(|a, b| a.name.cmp(&b.name));
    let arrays = synthetic(&prepared.graph, &feeds, item, 5 * BATCH, 1);
    let data = Dataset::new(arrays, &feeds, item).unwrap();
    let order = Order::Shuffled { seed: 5 };
    let batches = Batches::new(data, BATCH, microbatches as usize, STEPS as usize, order).unwrap().with_seed(9);
    let weights = model.weights.iter().map(|(name, weight)| match weight {
        Weight::Given(tensor) => (name.clone(), tensor.clone()),
        Weight::Missing { path } => panic!("{name} should be in {path}"),
    });
    Ready { prepared, weights: weights.collect(), batches, optimizer, policy, every: 3 }
}

impl Ready {
    fn training<'a>(&'a self, weights: &'a BTreeMap<String, Tensor>) -> Training<'a> {
        Training {
            codes: &self.prepared.codes,
            program: &self.prepared.program,
            weights,
            batches: &self.batches,
            optimizer: &self.optimizer,
            policy: self.policy,
            keep_gradients: false,
        }
    }

    fn cuts(&self) -> Cuts {
        Cuts { every: self.every, period: period(&self.prepared.program), whole: STEPS }
    }

    fn kept<'a>(&'a self, folder: &Path, weights: &'a BTreeMap<String, Tensor>) -> Kept<'a> {
        Kept {
            folder: folder.to_path_buf(),
            keep: None,
            run: BTreeMap::from([("seed".to_string(), "9".to_string())]),
            plan: Dealt::of(&self.prepared.program, &self.prepared.codes, self.policy.staleness),
            steps: STEPS,
            per_epoch: self.batches.per_epoch() as u32,
            codes: &self.prepared.codes,
            optimizer: &self.optimizer,
            given: weights,
        }
    }

    /// Runs from a checkpoint or the beginning, with checkpoints into a folder.
    fn run(&self, from: Option<&Found>, folder: &Path, gate: Option<&Gate<'_>>) -> Trained {
        let mut weights = self.weights.clone();
        weights.extend(from.iter().flat_map(|found| found.weights.clone()));
        let mut keeper = Keeper::new(Disk, self.kept(folder, &weights));
        let mut on_part = |part| match keeper.take(part) {
            None | Some(Saved::Done { left: None, .. }) => {}
            Some(other) => panic!("{other:?}"),
        };
        let course = Course {
            start: from.map(|found| &found.start),
            cuts: Some(self.cuts()),
            gate,
            on_part: Some(&mut on_part),
            on_checkpoint: None,
        };
        let mut steps = Vec::new();
        let done = run(&self.training(&weights), course, &mut |step: StepDone| steps.push(step.step));
        let done = done.unwrap_or_else(|fault| panic!("{fault}"));
        let first = from.map_or(0, |found| found.manifest.minibatches as usize);
        assert_eq!(steps, (first..first + done.losses.len()).collect::<Vec<_>>());
        done
    }
}

/// The files of a checkpoint with their bytes.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

fn checkpoints(folder: &Path) -> Vec<(u32, PathBuf)> {
    let mut found = find::all(folder).unwrap();
    found.reverse();
    found
}

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|loss| loss.to_bits()).collect()
}

/// Runs whole, and from every checkpoint to the end.
fn goes_on(what: &str, ready: &Ready) {
    let plain = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let whole = ready.run(None, folder.path(), None);
    assert_eq!(bits(&whole.losses), bits(&plain.losses), "{what}: checkpoints change the run");
    assert!(whole.weights == plain.weights, "{what}: checkpoints change the run");
    let all = checkpoints(folder.path());
    assert!(all.len() >= 2, "{what}: {all:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), all.len(), "{what}: nothing else is left");
    for (done, from) in &all {
        let found = find::read(from).unwrap_or_else(|fault| panic!("{what}: {fault}"));
        let again = tempfile::tempdir().unwrap();
        let rest = ready.run(Some(&found), again.path(), None);
        assert_eq!(bits(&rest.losses), bits(&whole.losses[*done as usize..]), "{what}, from {done}");
        assert!(rest.weights == whole.weights, "{what}, from {done}: weights");
        let later: Vec<_> = all.iter().filter(|(of, _)| of > done).collect();
        let made = checkpoints(again.path());
        assert_eq!(made.len(), later.len(), "{what}, from {done}");
        for ((of, one), (_, other)) in later.into_iter().zip(&made) {
            let (one, other) = (contents(one), contents(other));
            assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{what}, {of} from {done}");
            for (name, bytes) in &one {
                assert!(other[name] == *bytes, "{what}, {of} from {done}: {name}");
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
            goes_on(&format!("{name} {schedule} {replicas:?}"), &ready);
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
            goes_on(&format!("{name} {schedule} {replicas:?}"), &ready);
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
                    goes_on(&format!("{name} {staleness:?} {replicas:?}"), &ready);
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
        goes_on(&format!("{schedule} {replicas:?} every one"), &Ready { every: 1, ..whole });
    }
    let policy = Policy { staleness: Staleness::Predict, ..Policy::default() };
    let whole = ready(&mlp(), plan(Schedule::OneFOneBRrNewest, &[1, 1, 1, 1], 1), adam(), policy);
    goes_on("predicted, every one", &Ready { every: 1, ..whole });
}

#[test]
fn what_is_done_beside_goes_on() {
    let clipped =
        Policy { clip_norm: Some(0.05), statistics: Statistics::Deferred { unbiased: true }, ..Policy::default() };
    let flush = ready(&cnn(), plan(Schedule::OneFOneB, &[1, 2], 2), momentum(), clipped);
    goes_on("clipped, deferred", &flush);
    let stale = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 1, 1], 1), momentum(), clipped);
    goes_on("clipped by stage", &stale);
    for rule in [
        Rule::RmsProp { learning_rate: 0.01, alpha: 0.9, epsilon: 1e-8, weight_decay: 0.0, momentum: 0.5 },
        Rule::Adagrad { learning_rate: 0.01, decay: 0.1, epsilon: 1e-8, weight_decay: 0.0 },
        Rule::Sgd { learning_rate: 0.01, momentum: 0.0, nesterov: false, weight_decay: 0.0 },
    ] {
        let what = format!("{rule:?}");
        let run = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), Optimizer::from(rule), Policy::default());
        goes_on(&what, &run);
    }
}

#[test]
fn a_run_that_is_told_to_stop_leaves_a_checkpoint_to_go_on_from() {
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
        let plain = train(&ready.training(&ready.weights), &mut |_| {}).unwrap();
        let what = format!("{schedule} {replicas:?}");
        // Whenever it is told: here at the beginning of a minibatch that some worker begins.
        for _ in 0..3 {
            let (stop, folder) = (AtomicBool::new(false), tempfile::tempdir().unwrap());
            let gate = Gate::new(&stop, period(&ready.prepared.program), 0);
            let first = std::thread::scope(|scope| {
                let run = scope.spawn(|| ready.run(None, folder.path(), Some(&gate)));
                stop.store(true, Ordering::Relaxed);
                run.join().unwrap()
            });
            let end = gate.end().expect("it was told before it began") as usize;
            assert!(end < STEPS as usize, "{what}: {end}");
            assert_eq!(bits(&first.losses), bits(&plain.losses[..end]), "{what}");
            let [(done, at)] = &checkpoints(folder.path())[..] else { panic!("{what}: no checkpoint") };
            assert_eq!(*done as usize, end, "{what}");
            let found = find::read(at).unwrap();
            let rest = ready.run(Some(&found), folder.path(), None);
            assert_eq!(bits(&rest.losses), bits(&plain.losses[end..]), "{what}");
            assert!(rest.weights == plain.weights, "{what}");
        }
    }
}

#[test]
fn a_run_that_flushes_goes_on_under_another_plan() {
    for model in [mlp(), cnn(), gpt(true)] {
        let first = plan(Schedule::OneFOneB, &[1, 1, 1], 2);
        let first = ready(&model, first, adam(), Policy::default());
        let folder = tempfile::tempdir().unwrap();
        let whole = first.run(None, folder.path(), None);
        for (schedule, stages) in
            [(Schedule::Gpipe, 2), (Schedule::OneFOneB, 1), (Schedule::ZbH1, 4), (Schedule::Interleaved, 4)]
        {
            let other = ready(&model, plan(schedule, &vec![1; stages], 2), adam(), Policy::default());
            let (done, from) = &checkpoints(folder.path())[1];
            let mut found = find::read(from).unwrap();
            found.start.flight = None;
            let again = tempfile::tempdir().unwrap();
            let rest = other.run(Some(&found), again.path(), None);
            assert_eq!(bits(&rest.losses), bits(&whole.losses[*done as usize..]), "{schedule} {stages}");
            assert!(rest.weights == whole.weights, "{schedule} {stages}");
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
        let whole = ready.run(None, folder.path(), None);
        let (done, from) = &checkpoints(folder.path())[1];
        let differs = |what: &str, change: &dyn Fn(&mut Found)| {
            let mut found = find::read(from).unwrap();
            change(&mut found);
            let rest = ready.run(Some(&found), tempfile::tempdir().unwrap().path(), None);
            let is_same = bits(&rest.losses) == bits(&whole.losses[*done as usize..]) && rest.weights == whole.weights;
            assert!(!is_same, "{schedule} {replicas:?}: without {what} the run is the same");
        };
        let zeros = |found: &mut Found, kind: &str| {
            let of_kind = found.start.optimizer.iter_mut().filter(|(name, _)| name.ends_with(kind));
            of_kind.for_each(|(_, tensor)| *tensor = Tensor::zeros(tensor.dtype(), tensor.shape()));
        };
        differs("what was in flight", &|found| found.start.flight = None);
        differs("counts of updates", &|found| zeros(found, "/step"));
        differs("first moments", &|found| zeros(found, "/exp_avg"));
        differs("second moments", &|found| zeros(found, "/exp_avg_sq"));
        differs("running statistics", &|found| {
            let statistics = found.weights.iter_mut().filter(|(name, _)| name.contains("running_"));
            statistics.for_each(|(_, tensor)| *tensor = Tensor::zeros(tensor.dtype(), tensor.shape()));
        });
        let mut found = find::read(from).unwrap();
        let flights = found.start.flight.iter_mut().flatten();
        flights.for_each(|(_, flight)| {
            flight.versions.clear();
            flight.forwards.clear();
        });
        let mut weights = ready.weights.clone();
        weights.extend(found.weights.clone());
        let course = Course { start: Some(&found.start), ..Course::default() };
        let fault =
            run(&ready.training(&weights), course, &mut |_| {}).err().expect("versions are missing").to_string();
        assert!(fault.starts_with("the checkpoint has no `v"), "{fault}");
    }
}

/// A batch normalisation whose scale is its own running mean.
#[test]
fn a_state_that_is_read_where_it_follows_has_no_checkpoints_without_a_flush() {
    let mut graph = Graph::new("loop");
    let mut out = Writer { graph: &mut graph, origin: Origin::default() };
    let fact = Fact::new(DType::F32, vec![Dim::symbol("batch"), Dim::from(3usize)]);
    let x = out.emit(Op::Input(Input { name: "x".into(), fact }), &[]);
    let fact = || Fact::of(DType::F32, &[3]);
    let scale = out.emit(Op::State(State { name: "mean".into(), fact: fact() }), &[]);
    let bias = out.emit(Op::Parameter(Parameter { name: "bias".into(), fact: fact() }), &[]);
    let norm = out.emit_all(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[x, scale, bias]);
    graph.outputs.push(Output { name: "y".into(), value: norm[0] });
    graph.averages.push(MovingAverage { state: scale.node, sample: norm[1], keep: 0.9 });
    for (schedule, may) in [(Schedule::OneFOneB, true), (Schedule::OneFOneBRr, false), (Schedule::TwoBw, false)] {
        let dims = Bindings::from([("batch".to_string(), 4)]);
        let settings =
            Settings { dims, loss: Loss::CrossEntropy, class_axis: None, schedule, count: StepCount::minibatches(4) };
        let made = prepare(&graph, &[0], plan(schedule, &[1], 1).pipeline, &settings).unwrap();
        let checked = check_states(&made.program, &made.codes).map_err(|fault| fault.to_string());
        assert_eq!(checked.is_ok(), may, "{schedule}");
        assert!(checked.err().is_none_or(|fault| fault.contains("the forward reads `mean`")));
    }
}

#[test]
fn without_a_flush_another_plan_begins_with_the_one_version_of_the_cut() {
    let first = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 1, 1], 1), adam(), Policy::default());
    let folder = tempfile::tempdir().unwrap();
    first.run(None, folder.path(), None);
    let mut found = find::read(&checkpoints(folder.path())[1].1).unwrap();
    found.start.flight = None;
    let steps = (STEPS - found.manifest.minibatches) as usize;
    for other in [
        plan(Schedule::OneFOneBRr, &[2, 1], 1),
        plan(Schedule::OneFOneBRr, &[1, 1], 1),
        plan(Schedule::OneFOneBRrNewest, &[1, 1, 1], 1),
        plan(Schedule::OneFOneB, &[1, 1], 1),
        plan(Schedule::TwoBw, &[1, 1], 2),
    ] {
        let what = format!("{}", other.schedule);
        let other = ready(&cnn(), other, adam(), Policy::default());
        let rest = other.run(Some(&found), tempfile::tempdir().unwrap().path(), None);
        assert_eq!(rest.losses.len(), steps, "{what}");
        assert!(rest.losses.iter().all(|loss| loss.is_finite()), "{what}: {:?}", rest.losses);
    }
    // Rounds of three do not end after six minibatches where those of four do not either.
    let four = ready(&mlp(), plan(Schedule::OneFOneBRr, &[4, 1], 1), adam(), Policy::default());
    let fault = found.start.check(&four.prepared.program).unwrap_err().to_string();
    assert!(fault.contains("after minibatch 6") && fault.contains("every 4 minibatches"), "{fault}");
}

/// A disk that ends with its operation number `left`: as a process that is killed there, whose write may be half done, or as a disk
/// that is full from then on.
struct Ending {
    left: Cell<usize>,
    is_killed: bool,
}

impl Ending {
    fn ends(&self) -> Option<io::Error> {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        (left == 0).then(|| io::Error::from(io::ErrorKind::StorageFull))
    }
}

impl Files for Ending {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        self.ends().map_or_else(|| Disk.make_folder(path), Err)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let Some(fault) = self.ends() else { return Disk.write(path, bytes) };
        // The first that does not fit is written in part, if there is a folder for it.
        let _ = fs::write(path, &bytes[..bytes.len() / 2]);
        Err(fault)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.ends().map_or_else(|| Disk.sync_folder(path), Err)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.ends().map_or_else(|| Disk.rename(from, to), Err)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        // A full disk can still be emptied; who is killed does nothing more.
        match self.is_killed {
            true => self.ends().map_or_else(|| Disk.remove_folder(path), Err),
            false => Disk.remove_folder(path),
        }
    }
}

#[test]
fn whatever_ends_a_save_leaves_a_complete_checkpoint() {
    let ready = ready(&cnn(), plan(Schedule::OneFOneBRr, &[1, 2], 1), momentum(), Policy::default());
    let undisturbed = tempfile::tempdir().unwrap();
    let whole = ready.run(None, undisturbed.path(), None);
    for is_killed in [true, false] {
        for left in 0.. {
            let folder = tempfile::tempdir().unwrap();
            let files = Ending { left: Cell::new(left), is_killed };
            let mut keeper = Keeper::new(files, Kept { keep: Some(1), ..ready.kept(folder.path(), &ready.weights) });
            let mut seen: Vec<Saved> = Vec::new();
            // What a kill ends is looked at as it is left; a full disk is looked at when the run is over.
            let mut best: Option<u32> = None;
            let mut parts = Vec::new();
            let course =
                Course { cuts: Some(ready.cuts()), on_part: Some(&mut |part| parts.push(part)), ..Course::default() };
            let done = run(&ready.training(&ready.weights), course, &mut |_| {}).unwrap();
            assert_eq!(bits(&done.losses), bits(&whole.losses));
            for part in parts {
                seen.extend(keeper.take(part));
                let complete = find::all(folder.path()).unwrap();
                let complete = complete.iter().filter_map(|(of, path)| find::read(path).ok().map(|_| *of)).max();
                assert!(complete >= best, "killed {is_killed}, after {left}: {best:?} was complete, {complete:?} is");
                best = complete;
            }
            let failed = seen.iter().filter(|saved| matches!(saved, Saved::Failed { .. })).count();
            let told = seen.iter().find_map(|saved| match saved {
                Saved::Failed { fault, .. } => Some(fault.to_string()),
                Saved::Done { left, .. } => left.as_ref().map(ToString::to_string),
            });
            if let Some(told) = &told {
                assert!(told.starts_with("cannot write"), "{told}");
            }
            // Everything that is not complete is gone, but for what a kill leaves.
            let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(is_killed || names.iter().all(|name| !name.to_str().unwrap().starts_with('.')), "{names:?}");
            let Some(best) = best else { continue };
            let found = find::read(&folder.path().join(find::name(best))).unwrap();
            let again = tempfile::tempdir().unwrap();
            let rest = ready.run(Some(&found), again.path(), None);
            assert_eq!(bits(&rest.losses), bits(&whole.losses[best as usize..]));
            assert!(rest.weights == whole.weights);
            // The next run clears away what this one left.
            drop(Keeper::new(Disk, ready.kept(folder.path(), &ready.weights)));
            let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(names.iter().all(|name| !name.to_str().unwrap().starts_with('.')), "{names:?}");
            if failed == 0 && told.is_none() {
                assert!(left > 20, "a save has more operations than {left}");
                assert_eq!(names.len(), 1, "one is kept");
                break;
            }
        }
    }
}

#[test]
fn broken_checkpoints_are_named_and_not_read() {
    let ready = ready(&mlp(), plan(Schedule::OneFOneBRr, &[1, 1], 1), momentum(), Policy::default());
    let whole = tempfile::tempdir().unwrap();
    ready.run(None, whole.path(), None);
    let good = &checkpoints(whole.path())[0].1;
    let broken = |change: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in contents(good) {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        change(folder.path());
        find::read(folder.path()).unwrap_err().to_string()
    };
    for name in contents(good).into_keys() {
        let missing = broken(&|folder| fs::remove_file(folder.join(&name)).unwrap());
        assert!(missing.contains(&name) && missing.contains("missing"), "{missing}");
        let flipped = broken(&|folder| {
            let mut bytes = fs::read(folder.join(&name)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(folder.join(&name), bytes).unwrap();
        });
        assert!(flipped.contains(&name), "{flipped}");
        let short = broken(&|folder| {
            let bytes = fs::read(folder.join(&name)).unwrap();
            fs::write(folder.join(&name), &bytes[..bytes.len() / 3]).unwrap();
        });
        assert!(short.contains(&name), "{short}");
        let long = broken(&|folder| {
            let bytes = fs::read(folder.join(&name)).unwrap();
            fs::write(folder.join(&name), [bytes, vec![b'}'; 9]].concat()).unwrap();
        });
        assert!(long.contains(&name), "{long}");
    }
    #[cfg(unix)]
    {
        let link = broken(&|folder| {
            fs::remove_file(folder.join("stage-0.safetensors")).unwrap();
            std::os::unix::fs::symlink(good.join("stage-0.safetensors"), folder.join("stage-0.safetensors")).unwrap();
        });
        assert!(link.contains("not a regular file"), "{link}");
    }
    // A checkpoint whose files are whole and whose tensors are others is refused where a run would begin with it.
    let mut found = find::read(good).unwrap();
    let name = found.start.optimizer.keys().find(|name| name.ends_with("momentum_buffer")).unwrap().clone();
    found.start.optimizer.insert(name.clone(), Tensor::zeros(DType::F32, &[1]));
    let mut weights = ready.weights.clone();
    weights.extend(found.weights.clone());
    let course = Course { start: Some(&found.start), ..Course::default() };
    let fault = run(&ready.training(&weights), course, &mut |_| {}).err().unwrap().to_string();
    assert!(fault.contains("the run needs f32["), "{fault}");
    found.start.optimizer.remove(&name);
    let course = Course { start: Some(&found.start), ..Course::default() };
    let fault = run(&ready.training(&weights), course, &mut |_| {}).err().unwrap().to_string();
    assert!(fault.contains("the checkpoint has no") && fault.contains(&name), "{fault}");
}
