//! ZeRO: bitwise equal to training without it, for any partition and schedule, and with the expected memory.

use crate::support::devices::train_everywhere;
use compiler::graph::bind::symbols;
use compiler::graph::order;
use compiler::import::import::{Model, Options as Import, Weight, load};
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::{MOST, Zero};
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

fn load_model(name: &str) -> Model {
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
    fn prepare(&self, zero: Zero) -> Prepared {
        let item = BATCH / self.count.microbatches as usize;
        let dims: Bindings = symbols(&self.model.graph).into_iter().map(|symbol| (symbol, item as i64)).collect();
        let bucket = Bucket { ready: 1.0, share: 1.0 / self.buckets as f64 };
        let shape = |r: &u32| StageSpec {
            buckets: vec![bucket; self.buckets],
            zero: zero.of_stage(*r).level,
            shard_degree: zero.of_stage(*r).degree,
            ..StageSpec::new(*r, f64::from(*r), 2.0 * f64::from(*r))
        };
        let pipeline = Pipeline::chain(self.replicas.iter().map(shape).collect());
        let pipeline = pipeline.with_caps(&published_caps(self.replicas));
        let pipeline = if self.schedule == Schedule::Zbv { pipeline.folded() } else { pipeline };
        let ops = order::numbered(&self.model.graph).len();
        let stages: Vec<usize> = (0..ops).map(|op| op * self.replicas.len() / ops).collect();
        let (schedule, count) = (self.schedule, self.count);
        let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
        prepare(&self.model.graph, &stages, pipeline, &settings).unwrap()
    }

    fn train(&self, level: u32) -> Trained {
        self.train_sharded(Zero::over_all(level))
    }

    fn train_sharded(&self, zero: Zero) -> Trained {
        let prepared = self.prepare(zero);
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

fn assert_same(left: &Trained, right: &Trained, label: &str) {
    assert_eq!(left.losses, right.losses, "losses of {label}");
    for (name, (left, right)) in
        [("weights", (&left.weights, &right.weights)), ("gradients", (&left.gradients, &right.gradients))]
    {
        assert_eq!(left.keys().collect::<Vec<_>>(), right.keys().collect::<Vec<_>>(), "{name} of {label}");
        for (key, tensor) in left {
            assert!(tensor.bytes() == right[key].bytes(), "{name} of {label}: {key}");
        }
    }
}

#[test]
fn shares_change_no_bits() {
    let steps = |minibatches, microbatches| StepCount { minibatches, microbatches };
    for (name, replicas, schedule, count, buckets) in [
        ("mlp", &[2][..], Schedule::OneFOneB, steps(4, 4), 1),
        ("mlp", &[3], Schedule::Gpipe, steps(3, 3), 3),
        ("mlp", &[4, 1], Schedule::OneFOneB, steps(3, 2), 2),
        ("mlp", &[2, 3], Schedule::OneFOneB, steps(3, 4), 2),
        ("mlp", &[2, 1], Schedule::ZbH1, steps(3, 4), 2),
        ("mlp", &[2, 2, 2, 2], Schedule::Zbv, steps(3, 4), 2),
        ("mlp", &[3, 2], Schedule::OneFOneBRr, steps(7, 1), 2),
        ("mlp", &[2, 1, 1], Schedule::OneFOneBRr, steps(9, 1), 1),
        ("mlp", &[2, 3], Schedule::OneFOneBRrVsync, steps(9, 1), 2),
        ("mlp", &[2, 1], Schedule::OneFOneBRrNewest, steps(7, 1), 1),
        ("mlp", &[2, 2], Schedule::TwoBw, steps(5, 4), 2),
        ("gpt", &[2], Schedule::OneFOneB, steps(2, 2), 2),
        ("gpt", &[2, 2], Schedule::OneFOneB, steps(2, 4), 1),
        ("gpt", &[2, 2], Schedule::OneFOneBRr, steps(4, 1), 2),
        ("residual-cnn", &[2, 2], Schedule::OneFOneB, steps(2, 4), 2),
    ] {
        let model = load_model(name);
        for optimizer in [momentum(), adam()] {
            let run = Run { model: &model, replicas, schedule, count, optimizer, buckets, policy: Policy::default() };
            let unsharded = run.train(0);
            // If a replica has several micro-batches per round, ZeRO 2 and 3 add in another order.
            let is_one_per_replica = replicas.iter().all(|r| *r == 1 || *r >= count.microbatches);
            for level in 1..=MOST {
                let label = format!("{name} {replicas:?} {schedule} zero {level}");
                let sharded = run.train(level);
                match level == 1 || schedule.is_round_robin() || is_one_per_replica {
                    true => assert_same(&unsharded, &sharded, &label),
                    false => assert_near(&unsharded, &sharded, &label),
                }
            }
        }
    }
}

/// Groups of two or three replicas shard. Each group adds its gradients first, so sums differ in their last bits; if one group
/// has all micro-batches, they do not.
#[test]
fn groups_that_shard_train_as_all_replicas_do() {
    let steps = |minibatches, microbatches| StepCount { minibatches, microbatches };
    for (name, replicas, schedule, count, degree) in [
        ("mlp", &[4][..], Schedule::OneFOneB, steps(4, 4), 2),
        ("mlp", &[4, 1], Schedule::OneFOneB, steps(3, 2), 2),
        ("mlp", &[6, 4], Schedule::Gpipe, steps(3, 12), 3),
        ("mlp", &[4, 2], Schedule::OneFOneBRr, steps(11, 1), 2),
        ("mlp", &[4, 2], Schedule::TwoBw, steps(5, 4), 2),
        ("mlp", &[4, 4, 4, 4], Schedule::Zbv, steps(3, 4), 2),
        ("gpt", &[4, 4], Schedule::OneFOneB, steps(2, 4), 2),
        ("residual-cnn", &[4], Schedule::OneFOneB, steps(2, 4), 2),
    ] {
        let model = load_model(name);
        for clip_norm in [None, Some(0.05)] {
            let (optimizer, policy) = (adam(), Policy { clip_norm, ..Policy::default() });
            let run = Run { model: &model, replicas, schedule, count, optimizer, buckets: 2, policy };
            for level in 1..=MOST {
                let label = format!("{name} {replicas:?} {schedule} zero {level}:{degree}");
                let (all, groups) = (run.train(level), run.train_sharded(Zero { level, degree }));
                match clip_norm.is_none()
                    && count.microbatches as usize <= degree as usize
                    && !schedule.is_round_robin()
                {
                    true => assert_same(&all, &groups, &label),
                    false => assert_near(&all, &groups, &label),
                }
                let most = |trained: &Trained| trained.peak_memory_bytes[..replicas[0] as usize].iter().max().copied();
                assert!(most(&groups) > most(&all), "{label}: shards of a group are larger");
            }
        }
    }
}

fn assert_near(left: &Trained, right: &Trained, label: &str) {
    for (left, right) in left.losses.iter().zip(&right.losses) {
        assert!((left - right).abs() <= 1e-5 * left.abs(), "{label}: {left}, {right}");
    }
}

/// From ZeRO 2 on the order of addition is independent of the number of replicas.
#[test]
fn sums_in_the_order_of_items_do_not_know_the_replicas() {
    let model = load_model("mlp");
    let count = StepCount { minibatches: 4, microbatches: 6 };
    for schedule in [Schedule::Gpipe, Schedule::OneFOneB, Schedule::ZbH1] {
        let run = |replicas: &[u32]| {
            let (optimizer, policy) = (adam(), Policy::default());
            Run { model: &model, replicas, schedule, count, optimizer, buckets: 2, policy }.train(2)
        };
        let expected = run(&[2, 1]);
        for replica_counts in [&[3, 1][..], &[4, 1], &[6, 1]] {
            assert_same(&expected, &run(replica_counts), &format!("{replica_counts:?} {schedule}"));
        }
    }
}

/// Each replica has a shard of the squares, which are added in another order.
#[test]
fn norms_of_shares_are_norms_of_the_whole() {
    let model = load_model("mlp");
    for (replicas, schedule, microbatches) in
        [(&[2, 1][..], Schedule::OneFOneB, 4), (&[3], Schedule::Gpipe, 4), (&[2, 1], Schedule::OneFOneBRr, 1)]
    {
        let count = StepCount { minibatches: 6, microbatches };
        let policy = Policy { clip_norm: Some(0.05), ..Policy::default() };
        let run = Run { model: &model, replicas, schedule, count, optimizer: momentum(), buckets: 2, policy };
        let (unsharded, unclipped) =
            (run.train(0), Run { policy: Policy::default(), optimizer: momentum(), ..run }.train(0));
        assert_ne!(unsharded.losses, unclipped.losses, "nothing was clipped");
        for level in 1..=MOST {
            let sharded = run.train(level);
            for (left, right) in unsharded.losses.iter().zip(&sharded.losses) {
                assert!((left - right).abs() <= 1e-6 * left.abs(), "{replicas:?} {schedule}: {left}, {right}");
            }
        }
    }
}

/// Each of r replicas has 1/r of the optimizer state, and from level 2 on of the gradient sums; the rest is unchanged.
#[test]
fn a_replica_holds_its_share() {
    let model = load_model("mlp");
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
        let unsharded = run.train(0).peak_memory_bytes;
        let share = parameters / u64::from(replicas);
        // Two state tensors; from level 2 on also the sums, but the gradient of one op at a time is whole.
        let sums = 3 * (parameters - share) - largest;
        // At level 3 also the weights, except those being read.
        let saved = [2 * (parameters - share), sums, sums + parameters - share];
        for (level, saved) in (1..).zip(saved) {
            for (unsharded, sharded) in unsharded.iter().zip(&run.train(level).peak_memory_bytes) {
                let saved_bytes = unsharded - sharded;
                let message =
                    format!("{replicas} replicas, level {level}: {saved_bytes} saved of {unsharded}, expected {saved}");
                assert!(saved_bytes.abs_diff(saved) <= saved / 50, "{message}");
            }
        }
    }
}

#[test]
fn programs_reduce_to_shares_and_gather() {
    let model = load_model("mlp");
    let count = StepCount { minibatches: 3, microbatches: 4 };
    let (schedule, policy) = (Schedule::OneFOneB, Policy::default());
    let run = Run { model: &model, replicas: &[2, 1], schedule, count, optimizer: adam(), buckets: 2, policy };
    let program = run.prepare(Zero::over_all(1)).program;
    let instructions: Vec<&Instruction> = program.workers.iter().flat_map(|worker| &worker.instructions).collect();
    let occurrences = |predicate: &dyn Fn(&Instruction) -> bool| {
        instructions.iter().filter(|instruction| predicate(instruction)).count()
    };
    assert_eq!(occurrences(&|i| matches!(i, Instruction::ReduceScatter { .. })), 2 * 3 * 2);
    assert_eq!(occurrences(&|i| matches!(i, Instruction::AllGather { .. })), 2 * 3 * 2);
    assert_eq!(occurrences(&|i| matches!(i, Instruction::AllReduce { .. })), 0);
}
