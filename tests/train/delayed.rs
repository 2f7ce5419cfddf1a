//! A plain loop with delayed weights: the reference of schedules without a flush, for any model. It takes the loss and
//! the gradients of each minibatch from one stage on the CPU in double precision, which tests compare with PyTorch. The
//! versions and the updates are its own.

use crate::parity::{Fixture, async_stages, load_fixture};
use crate::support::shared::data;
use compiler::graph::order;
use compiler::import::import::Batch;
use compiler::pass::loss::Loss;
use compiler::pass::precision::precision;
use compiler::plan::schedule::Schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec, published_caps};
use compiler::tensor::{DType, Tensor};
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::exec::stage_code::StageCode;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::Policy;
use runtime::train::job::TrainJob;
use runtime::train::prepare::{Prepared, Settings, prepare};
use runtime::train::run::{feeds, train};
use std::collections::BTreeMap;

/// Where a parameter is trained, as its schedule sees it.
pub struct Delays {
    pub schedule: Schedule,
    pub microbatches: u32,
    /// Replicas and in-flight limit of each stage.
    pub stages: Vec<(u32, u32)>,
    /// Stages of each parameter; several if it is tied.
    pub stages_of: BTreeMap<String, Vec<usize>>,
}

/// The stages of each parameter.
pub fn stages_of(codes: &[StageCode]) -> BTreeMap<String, Vec<usize>> {
    let mut stages_of: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (stage, code) in codes.iter().enumerate() {
        code.parameters.iter().for_each(|named| stages_of.entry(named.name.clone()).or_default().push(stage));
    }
    stages_of
}

impl Delays {
    /// The number of updates that a stage's weights have seen when minibatch `b` uses them.
    fn version(&self, stage: usize, b: u32) -> u32 {
        let stashed = |stage: usize| (b / self.stages[stage].0).saturating_sub(self.stages[stage].1 - 1);
        match self.schedule {
            Schedule::TwoBw => b.saturating_sub(1),
            Schedule::OneFOneBRr => stashed(stage),
            // What the first stage's version contains, in whole rounds of this stage.
            Schedule::OneFOneBRrVsync => stashed(0) * self.stages[0].0 / self.stages[stage].0,
            schedule => panic!("{schedule} delays no weights"),
        }
    }

    /// Minibatches that one update averages.
    fn round(&self, stage: usize) -> u32 {
        if self.schedule == Schedule::TwoBw { 1 } else { self.stages[stage].0 }
    }
}

/// One stage in double precision, for one minibatch at a time.
struct SingleStage<'a> {
    fixture: &'a Fixture,
    prepared: Prepared,
    microbatches: usize,
}

impl SingleStage<'_> {
    fn prepare(fixture: &Fixture, microbatches: usize) -> SingleStage<'_> {
        let graph = precision(&fixture.model.graph, DType::F64).unwrap();
        let Batch::Symbol { name, .. } = &fixture.model.batch else { panic!("the batch is fixed") };
        let dims = BTreeMap::from([(name.clone(), (fixture.batch / microbatches) as i64)]);
        let count = StepCount { minibatches: 1, microbatches: microbatches as u32 };
        let (loss, schedule) = (Loss::CrossEntropy, Schedule::OneFOneB);
        let settings = Settings::new(dims, loss, schedule, count);
        let stages = vec![0; order::numbered(&graph).len()];
        let pipeline = Pipeline::chain(vec![StageSpec::new(1, 1.0, 2.0)]);
        SingleStage { fixture, prepared: prepare(&graph, &stages, pipeline, &settings).unwrap(), microbatches }
    }

    /// The loss and all gradients of a minibatch.
    fn gradients(&self, weights: &BTreeMap<String, Tensor>, b: usize) -> (f64, BTreeMap<String, Vec<f64>>) {
        let rows = |(name, tensor): (&String, &Tensor)| {
            let shape = [&[self.fixture.batch], &tensor.shape()[1..]].concat();
            let bytes = shape.iter().product::<usize>() * tensor.dtype().size();
            (
                name.clone(),
                Tensor::new(tensor.dtype(), shape, tensor.bytes().slice(b * bytes..(b + 1) * bytes)).unwrap(),
            )
        };
        let arrays = self.fixture.arrays.iter().map(rows).collect();
        let data = Dataset::new(arrays, &feeds(&self.prepared.codes), self.fixture.batch / self.microbatches).unwrap();
        let batches = Batches::new(data, self.fixture.batch, self.microbatches, 1, RowOrder::InOrder).unwrap();
        let frozen_optimizer =
            Optimizer::from(Rule::Sgd { learning_rate: 0.0, momentum: 0.0, nesterov: false, weight_decay: 0.0 });
        let training = TrainJob {
            codes: &self.prepared.codes,
            program: &self.prepared.program,
            weights,
            batches: &batches,
            optimizer: &frozen_optimizer,
            policy: Policy::default(),
            keep_gradients: true,
        };
        let trained = train(&training, &mut |_| {}).unwrap();
        (trained.losses[0], trained.gradients.iter().map(|(name, tensor)| (name.clone(), tensor.to_f64())).collect())
    }
}

/// The losses of the plain loop, under SGD with momentum.
pub fn losses(fixture: &Fixture, delays: &Delays, minibatches: u32, (lr, momentum): (f64, f64)) -> Vec<f64> {
    let model = SingleStage::prepare(fixture, delays.microbatches as usize);
    let initial_weights: BTreeMap<String, Tensor> = fixture.weights();
    let min_over_stages = |name: &str, stage_value: &dyn Fn(usize) -> u32| {
        delays.stages_of[name].iter().map(|stage| stage_value(*stage)).min()
    };
    let mut versions: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
    let mut velocities: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut pending_gradients: BTreeMap<&str, Vec<Vec<f64>>> = BTreeMap::new();
    for name in delays.stages_of.keys() {
        versions.insert(name, vec![initial_weights[name].to_f64()]);
        velocities.insert(name, vec![0.0; initial_weights[name].len()]);
        pending_gradients.insert(name, Vec::new());
    }
    let mut losses = Vec::new();
    for minibatch in 0..minibatches {
        let mut weights = initial_weights.clone();
        for (name, versions) in &versions {
            // All copies of a tied parameter have the oldest version of any.
            let version = min_over_stages(name, &|stage| delays.version(stage, minibatch)).unwrap() as usize;
            weights.insert(name.to_string(), Tensor::from_f64(initial_weights[*name].shape(), &versions[version]));
        }
        let (loss, gradients) = model.gradients(&weights, minibatch as usize);
        losses.push(loss);
        for (name, versions) in &mut versions {
            let (pending, velocity) = (pending_gradients.get_mut(name).unwrap(), velocities.get_mut(name).unwrap());
            pending.push(gradients[*name].clone());
            let round_length = min_over_stages(name, &|stage| delays.round(stage)).unwrap() as usize;
            if pending.len() == round_length || minibatch + 1 == minibatches {
                let mut updated = versions.last().unwrap().clone();
                for (i, weight) in updated.iter_mut().enumerate() {
                    let mean = pending.iter().map(|gradient| gradient[i]).sum::<f64>() / pending.len() as f64;
                    velocity[i] = momentum * velocity[i] + mean;
                    *weight -= lr * velocity[i];
                }
                versions.push(updated);
                pending.clear();
            }
        }
    }
    losses
}

#[test]
fn the_plain_loop_has_the_losses_of_pytorch() {
    let Some(root) = data("parity") else { return };
    let fixture = load_fixture(&root, "async_mlp3", "model.onnx");
    let [three_stages, two_stages] = async_stages(&fixture);
    for (mode, schedule, stages, replicas) in [
        ("stash", Schedule::OneFOneBRr, &three_stages, &[1, 1, 1][..]),
        ("vsync", Schedule::OneFOneBRrVsync, &three_stages, &[1, 1, 1]),
        ("2bw", Schedule::TwoBw, &three_stages, &[1, 1, 1]),
        ("rr_2_1", Schedule::OneFOneBRr, &two_stages, &[2, 1]),
    ] {
        let Batch::Symbol { name, .. } = &fixture.model.batch else { panic!("the batch is fixed") };
        let dims = BTreeMap::from([(name.clone(), fixture.batch as i64)]);
        let (loss, count) = (Loss::CrossEntropy, StepCount::minibatches(20));
        let settings = Settings::new(dims, loss, schedule, count);
        let pipeline = Pipeline::balanced(replicas, 2.0);
        let codes = prepare(&fixture.model.graph, stages, pipeline, &settings).unwrap().codes;
        let limits = replicas.iter().copied().zip(published_caps(replicas)).collect();
        let delays = Delays { schedule, microbatches: 1, stages: limits, stages_of: stages_of(&codes) };
        for (key, rule) in [("sgd", (0.05, 0.0)), ("sgd_m09", (0.01, 0.9))] {
            let expected = fixture.expected[&format!("{mode}.{key}.f64")].to_f64();
            let difference = losses(&fixture, &delays, 20, rule)
                .iter()
                .zip(&expected)
                .map(|(got, expected)| (got - expected).abs())
                .fold(0.0, f64::max);
            assert!(difference <= 1e-12, "{mode} {key}: {difference:.1e}");
        }
    }
}
