//! Prepared runs of small models under any schedule, from the start or from a checkpoint.

use compiler::graph::order;
use compiler::import::import::{Model, Options as Import, Weight, load};
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::resume::period;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec, published_caps};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use models::choice::Setting;
use models::zoo::{ENTRIES, Options, build, to_bytes};
use runtime::checkpoint::barrier::MinibatchBarrier;
use runtime::checkpoint::files::Disk;
use runtime::checkpoint::find::{self, Found};
use runtime::checkpoint::manifest::ShardLayout;
use runtime::checkpoint::points::Cuts;
use runtime::checkpoint::writer::{CheckpointWriter, Saved, WriterConfig};
use runtime::data::synthetic::synthetic;
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::optim::lr_schedule::{Rate, Shape};
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::{RunOptions, StepDone, TrainJob, Trained};
use runtime::train::prepare::{Prepared, Settings, prepare};
use runtime::train::run::{feeds, run};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

pub const BATCH: usize = 4;
pub const STEPS: u32 = 12;

pub fn model(name: &str, settings: &[(&str, Setting)]) -> Model {
    let entry = ENTRIES.iter().find(|entry| entry.name == name).unwrap();
    let options = Options { loss: true, seed: 1, ..entry.small() };
    let options = settings.iter().fold(options, |options, (name, setting)| options.with(name, *setting));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    fs::write(&path, to_bytes(&build(name, &options).unwrap().model)).unwrap();
    load(&path, &Import::default()).unwrap()
}

pub fn mlp() -> Model {
    model("mlp", &[("hidden", Setting::Number(12)), ("layers", Setting::Number(4)), ("inputs", Setting::Number(10))])
}

pub fn cnn() -> Model {
    model("residual-cnn", &[("hidden", Setting::Number(4))])
}

pub fn gpt(tied: bool) -> Model {
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

/// A prepared run.
pub struct Ready {
    pub prepared: Prepared,
    pub weights: BTreeMap<String, Tensor>,
    pub batches: Batches,
    pub optimizer: Optimizer,
    pub policy: Policy,
    pub every: u32,
}

#[derive(Clone)]
pub struct Plan {
    pub schedule: Schedule,
    pub pipeline: Pipeline,
    pub microbatches: u32,
}

pub fn plan(schedule: Schedule, replicas: &[u32], microbatches: u32) -> Plan {
    let shapes = replicas.iter().map(|r| StageSpec::new(*r, f64::from(*r), 2.0 * f64::from(*r))).collect();
    let pipeline = Pipeline::chain(shapes).with_caps(&published_caps(replicas));
    let pipeline = match schedule {
        Schedule::Interleaved | Schedule::Bfs => pipeline.looped(2),
        Schedule::Zbv | Schedule::DualPipeV => pipeline.folded(),
        _ => pipeline,
    };
    Plan { schedule, pipeline, microbatches }
}

pub fn momentum() -> Optimizer {
    let rule = Rule::Sgd { learning_rate: 0.05, momentum: 0.9, nesterov: false, weight_decay: 0.01 };
    Optimizer { rule, rate: Rate { warmup: 3, shape: Shape::Cosine { floor: 0.1 } } }
}

pub fn adam() -> Optimizer {
    Optimizer::from(Rule::Adam {
        learning_rate: 0.01,
        betas: (0.9, 0.99),
        epsilon: 1e-8,
        weight_decay: 0.01,
        decoupled: true,
    })
}

pub fn ready(model: &Model, plan: Plan, optimizer: Optimizer, policy: Policy) -> Ready {
    let Plan { schedule, pipeline, microbatches } = plan;
    let (ops, stages) = (order::numbered(&model.graph).len(), pipeline.stages.len());
    let stage_of: Vec<usize> = (0..ops).map(|op| op * stages / ops).collect();
    let item = BATCH / microbatches as usize;
    let dims = Bindings::from([("batch".to_string(), item as i64)]);
    let count = StepCount { minibatches: STEPS, microbatches };
    let settings = Settings::new(dims, Loss::Output, schedule, count);
    let prepared = prepare(&model.graph, &stage_of, pipeline, &settings).unwrap();
    let mut feeds = feeds(&prepared.codes);
    // Feeds are sorted so that every partition draws the same numbers.
    feeds.sort_by(|a, b| a.name.cmp(&b.name));
    let arrays = synthetic(&prepared.graph, &feeds, item, 5 * BATCH, 1);
    let data = Dataset::new(arrays, &feeds, item).unwrap();
    let order = RowOrder::Shuffled { seed: 5 };
    let batches = Batches::new(data, BATCH, microbatches as usize, STEPS as usize, order).unwrap().with_seed(9);
    let weights = model.weights.iter().map(|(name, weight)| match weight {
        Weight::Given(tensor) => (name.clone(), tensor.clone()),
        Weight::Missing { path } => panic!("{name} should be in {path}"),
    });
    Ready { prepared, weights: weights.collect(), batches, optimizer, policy, every: 3 }
}

impl Ready {
    pub fn training<'a>(&'a self, weights: &'a BTreeMap<String, Tensor>) -> TrainJob<'a> {
        TrainJob {
            codes: &self.prepared.codes,
            program: &self.prepared.program,
            weights,
            batches: &self.batches,
            optimizer: &self.optimizer,
            policy: self.policy,
            keep_gradients: false,
        }
    }

    pub fn cuts(&self) -> Cuts {
        Cuts { every: Some(self.every), period: period(&self.prepared.program), minibatches: STEPS }
    }

    pub fn writer_config<'a>(&'a self, folder: &Path, weights: &'a BTreeMap<String, Tensor>) -> WriterConfig<'a> {
        WriterConfig {
            folder: folder.to_path_buf(),
            keep: None,
            resumed_at: None,
            run: BTreeMap::from([("seed".to_string(), "9".to_string())]),
            plan: ShardLayout::of(&self.prepared.program, &self.prepared.codes, self.policy.staleness),
            steps: STEPS,
            per_epoch: self.batches.per_epoch() as u32,
            codes: &self.prepared.codes,
            optimizer: &self.optimizer,
            initial: weights,
        }
    }

    /// Runs from a checkpoint or the start, and writes checkpoints to a folder.
    pub fn run(&self, from: Option<&Found>, folder: &Path, barrier: Option<&MinibatchBarrier<'_>>) -> Trained {
        let mut weights = self.weights.clone();
        weights.extend(from.iter().flat_map(|found| found.weights.clone()));
        let mut writer = CheckpointWriter::new(Disk, self.writer_config(folder, &weights));
        let mut on_snapshot = |snapshot| match writer.take(snapshot) {
            None | Some(Saved::Done { left: None, .. }) => {}
            Some(outcome) => panic!("{outcome:?}"),
        };
        let options = RunOptions {
            start: from.map(|found| &found.start),
            cuts: Some(self.cuts()),
            barrier,
            on_snapshot: Some(&mut on_snapshot),
            ..RunOptions::default()
        };
        let mut steps = Vec::new();
        let trained = run(&self.training(&weights), options, &mut |step: StepDone| steps.push(step.step));
        let trained = trained.unwrap_or_else(|fault| panic!("{fault}"));
        let first = from.map_or(0, |found| found.manifest.minibatches as usize);
        assert_eq!(steps, (first..first + trained.losses.len()).collect::<Vec<_>>());
        trained
    }
}

/// File contents of a checkpoint, by name.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

pub fn checkpoints(folder: &Path) -> Vec<(u32, PathBuf)> {
    let mut checkpoints = find::all(folder).unwrap();
    checkpoints.reverse();
    checkpoints
}

pub fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|loss| loss.to_bits()).collect()
}
