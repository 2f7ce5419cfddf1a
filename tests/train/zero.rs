//! ZeRO: bitwise equal to training without it, for any partition and schedule, and with the expected memory.

use crate::support::devices::train_everywhere;
use compiler::graph::bind::symbols;
use compiler::graph::order;
use compiler::import::import::{Model, Options as Import, Weight, load};
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::MOST;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Bucket, Instruction, Pipeline, Program, StageSpec, published_caps};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use models::zoo::{ENTRIES, build, to_bytes};
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Prepared, Settings, prepare};
use runtime::train::run::feeds;
use std::collections::BTreeMap;

const BATCH: usize = 12;

fn model(name: &str) -> Model {
    let entry = ENTRIES.iter().find(|entry| entry.name == name).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, to_bytes(&build(name, &entry.small()).unwrap().model)).unwrap();
    load(&path, &Import::default()).unwrap()
}

fn adam() -> Optimizer {
    let rule =
        Rule::Adam { learning_rate: 1e-2, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01, decoupled: true };
    Optimizer::from(rule)
}

fn momentum() -> Optimizer {
    Optimizer::from(Rule::Sgd { learning_rate: 0.05, momentum: 0.9, nesterov: false, weight_decay: 0.0 })
}

/// A run of a model in stages of equally many ops.
struct Run<'a> {
    model: &'a Model,
    replicas: &'a [u32],
    schedule: Schedule,
    count: StepCount,
    optimizer: Optimizer,
    buckets: usize,
    policy: Policy,
}

impl Run<'_> {
    fn prepared(&self, zero: u32) -> Prepared {
        let item = BATCH / self.count.microbatches as usize;
        let dims: Bindings = symbols(&self.model.graph).into_iter().map(|symbol| (symbol, item as i64)).collect();
        let bucket = Bucket { ready: 1.0, share: 1.0 / self.buckets as f64 };
        let shape = |r: &u32| StageSpec {
            buckets: vec![bucket; self.buckets],
            zero,
            ..StageSpec::new(*r, f64::from(*r), 2.0 * f64::from(*r))
        };
        let pipeline = Pipeline::chain(self.replicas.iter().map(shape).collect());
        let pipeline = pipeline.with_caps(&published_caps(self.replicas));
        let pipeline = if self.schedule == Schedule::Zbv { pipeline.folded() } else { pipeline };
        let ops = order::numbered(&self.model.graph).len();
        let stages: Vec<usize> = (0..ops).map(|op| op * self.replicas.len() / ops).collect();
        let (schedule, count) = (self.schedule, self.count);
        let settings = Settings { dims, loss: Loss::CrossEntropy, class_axis: None, schedule, count };
        prepare(&self.model.graph, &stages, pipeline, &settings).unwrap()
    }

    fn at(&self, zero: u32) -> Trained {
        let prepared = self.prepared(zero);
        let text = prepared.program.to_string();
        assert_eq!(text.parse::<Program>().unwrap(), prepared.program);
        let (item, steps) = (BATCH / self.count.microbatches as usize, self.count.minibatches as usize);
        let feeds = feeds(&prepared.codes);
        let arrays = synthetic(&prepared.graph, &feeds, item, steps * BATCH, 7);
        let data = Dataset::new(arrays, &feeds, item).unwrap();
        let batches = Batches::new(data, BATCH, self.count.microbatches as usize, steps, RowOrder::InOrder).unwrap();
        let weights = self.model.weights.iter().map(|(name, weight)| match weight {
            Weight::Given(tensor) => (name.clone(), tensor.clone()),
            Weight::Missing { path } => panic!("no weights at {path}"),
        });
        let weights: BTreeMap<String, Tensor> = weights.collect();
        let training = TrainJob {
            codes: &prepared.codes,
            program: &prepared.program,
            weights: &weights,
            batches: &batches,
            optimizer: &self.optimizer,
            policy: self.policy,
            keep_gradients: true,
        };
        train_everywhere(&training).unwrap()
    }
}

fn assert_same(one: &Trained, other: &Trained, what: &str) {
    assert_eq!(one.losses, other.losses, "losses of {what}");
    for (name, (one, other)) in
        [("weights", (&one.weights, &other.weights)), ("gradients", (&one.gradients, &other.gradients))]
    {
        assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>(), "{name} of {what}");
        for (key, tensor) in one {
            assert!(tensor.bytes() == other[key].bytes(), "{name} of {what}: {key}");
        }
    }
}

#[test]
fn shares_change_no_bits() {
    let by = |minibatches, microbatches| StepCount { minibatches, microbatches };
    for (name, replicas, schedule, count, buckets) in [
        ("mlp", &[2][..], Schedule::OneFOneB, by(4, 4), 1),
        ("mlp", &[3], Schedule::Gpipe, by(3, 3), 3),
        ("mlp", &[4, 1], Schedule::OneFOneB, by(3, 2), 2),
        ("mlp", &[2, 3], Schedule::OneFOneB, by(3, 4), 2),
        ("mlp", &[2, 1], Schedule::ZbH1, by(3, 4), 2),
        ("mlp", &[2, 2, 2, 2], Schedule::Zbv, by(3, 4), 2),
        ("mlp", &[3, 2], Schedule::OneFOneBRr, by(7, 1), 2),
        ("mlp", &[2, 1, 1], Schedule::OneFOneBRr, by(9, 1), 1),
        ("mlp", &[2, 3], Schedule::OneFOneBRrVsync, by(9, 1), 2),
        ("mlp", &[2, 1], Schedule::OneFOneBRrNewest, by(7, 1), 1),
        ("mlp", &[2, 2], Schedule::TwoBw, by(5, 4), 2),
        ("gpt", &[2], Schedule::OneFOneB, by(2, 2), 2),
        ("gpt", &[2, 2], Schedule::OneFOneB, by(2, 4), 1),
        ("gpt", &[2, 2], Schedule::OneFOneBRr, by(4, 1), 2),
        ("residual-cnn", &[2, 2], Schedule::OneFOneB, by(2, 4), 2),
    ] {
        let model = model(name);
        for optimizer in [momentum(), adam()] {
            let run = Run { model: &model, replicas, schedule, count, optimizer, buckets, policy: Policy::default() };
            let whole = run.at(0);
            // If a replica has several micro-batches per round, ZeRO 2 and 3 add in another order.
            let is_one_per_replica = replicas.iter().all(|r| *r == 1 || *r >= count.microbatches);
            for level in 1..=MOST {
                let what = format!("{name} {replicas:?} {schedule} zero {level}");
                let shared = run.at(level);
                match level == 1 || schedule.is_round_robin() || is_one_per_replica {
                    true => assert_same(&whole, &shared, &what),
                    false => assert_near(&whole, &shared, &what),
                }
            }
        }
    }
}

fn assert_near(one: &Trained, other: &Trained, what: &str) {
    for (one, other) in one.losses.iter().zip(&other.losses) {
        assert!((one - other).abs() <= 1e-5 * one.abs(), "{what}: {one}, {other}");
    }
}

/// From ZeRO 2 on the order of addition is independent of the number of replicas.
#[test]
fn sums_in_the_order_of_items_do_not_know_the_replicas() {
    let model = model("mlp");
    let count = StepCount { minibatches: 4, microbatches: 6 };
    for schedule in [Schedule::Gpipe, Schedule::OneFOneB, Schedule::ZbH1] {
        let run = |replicas: &[u32]| {
            let (optimizer, policy) = (adam(), Policy::default());
            Run { model: &model, replicas, schedule, count, optimizer, buckets: 2, policy }.at(2)
        };
        let two = run(&[2, 1]);
        for other in [&[3, 1][..], &[4, 1], &[6, 1]] {
            assert_same(&two, &run(other), &format!("{other:?} {schedule}"));
        }
    }
}

/// Each replica has a shard of the squares, which are added in another order.
#[test]
fn norms_of_shares_are_norms_of_the_whole() {
    let model = model("mlp");
    for (replicas, schedule, microbatches) in
        [(&[2, 1][..], Schedule::OneFOneB, 4), (&[3], Schedule::Gpipe, 4), (&[2, 1], Schedule::OneFOneBRr, 1)]
    {
        let count = StepCount { minibatches: 6, microbatches };
        let policy = Policy { clip_norm: Some(0.05), ..Policy::default() };
        let run = Run { model: &model, replicas, schedule, count, optimizer: momentum(), buckets: 2, policy };
        let (whole, free) = (run.at(0), Run { policy: Policy::default(), optimizer: momentum(), ..run }.at(0));
        assert_ne!(whole.losses, free.losses, "nothing was clipped");
        for level in 1..=MOST {
            let shared = run.at(level);
            for (one, other) in whole.losses.iter().zip(&shared.losses) {
                assert!((one - other).abs() <= 1e-6 * one.abs(), "{replicas:?} {schedule}: {one}, {other}");
            }
        }
    }
}

/// Each of r replicas has 1/r of the optimizer state, and from level 2 on of the gradient sums; the rest is unchanged.
#[test]
fn a_replica_holds_its_share() {
    let model = model("mlp");
    let parameters: u64 = model
        .weights
        .values()
        .map(|weight| match weight {
            Weight::Given(tensor) => tensor.bytes().len() as u64,
            Weight::Missing { .. } => 0,
        })
        .sum();
    let largest = model.weights.values().map(|weight| match weight {
        Weight::Given(tensor) => tensor.bytes().len() as u64,
        Weight::Missing { .. } => 0,
    });
    let largest = largest.max().unwrap();
    for replicas in [2u32, 4] {
        let count = StepCount { minibatches: 3, microbatches: 4 };
        let (schedule, policy) = (Schedule::OneFOneB, Policy::default());
        let run = Run { model: &model, replicas: &[replicas], schedule, count, optimizer: adam(), buckets: 1, policy };
        let whole = run.at(0).peak_memory_bytes;
        let share = parameters / u64::from(replicas);
        // Two state tensors; from level 2 on also the sums, but the gradient of one op at a time is whole.
        let sums = 3 * (parameters - share) - largest;
        // At level 3 also the weights, except those being read.
        let saved = [2 * (parameters - share), sums, sums + parameters - share];
        for (level, saved) in (1..).zip(saved) {
            for (whole, shared) in whole.iter().zip(&run.at(level).peak_memory_bytes) {
                let found = whole - shared;
                let what = format!("{replicas} replicas, level {level}: {found} saved of {whole}, expected {saved}");
                assert!(found.abs_diff(saved) <= saved / 50, "{what}");
            }
        }
    }
}

#[test]
fn programs_reduce_to_shares_and_gather() {
    let model = model("mlp");
    let count = StepCount { minibatches: 3, microbatches: 4 };
    let (schedule, policy) = (Schedule::OneFOneB, Policy::default());
    let run = Run { model: &model, replicas: &[2, 1], schedule, count, optimizer: adam(), buckets: 2, policy };
    let program = run.prepared(1).program;
    let all: Vec<&Instruction> = program.workers.iter().flat_map(|worker| &worker.instructions).collect();
    let of = |is: &dyn Fn(&Instruction) -> bool| all.iter().filter(|instruction| is(instruction)).count();
    assert_eq!(of(&|i| matches!(i, Instruction::ReduceScatter { .. })), 2 * 3 * 2);
    assert_eq!(of(&|i| matches!(i, Instruction::AllGather { .. })), 2 * 3 * 2);
    assert_eq!(of(&|i| matches!(i, Instruction::AllReduce { .. })), 0);
}
