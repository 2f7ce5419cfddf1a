//! The cost of stale weights: an eight-layer perceptron on the bundled digits in eight stages, with the five staleness
//! methods, compared with training without a pipeline. The first stage's forward is seven updates old.
//!
//! ```text
//! cargo bench --bench staleness
//! ```
//!
//! Prints, for each method and learning rate over three seeds: mean loss of the last epoch, test accuracy, and peak
//! memory of the first stage.

use compiler::graph::bind::bind;
use compiler::graph::order;
use compiler::import::import::{Model, Options as Import, Weight, load};
use compiler::pass::loss::Loss;
use compiler::plan::schedule::Schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{Pipeline, StageSpec, published_caps};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use models::digits::{self, Digits, SAMPLE, Split};
use models::zoo::{Options, build, to_bytes};
use runtime::data::{Batches, Dataset, RowOrder};
use runtime::exec::evaluate::evaluate;
use runtime::optim::optimizer::{Optimizer, Rule};
use runtime::optim::policy::{Policy, Staleness};
use runtime::train::job::{TrainJob, Trained};
use runtime::train::prepare::{Settings, prepare};
use runtime::train::run::{feeds, train};
use std::collections::BTreeMap;

const STAGES: usize = 8;
const BATCH: usize = 16;
const EPOCHS: usize = 12;
const SEEDS: u64 = 3;
const RATES: [f64; 2] = [0.001, 0.003];

fn model(seed: u64) -> Model {
    let folder = tempfile::tempdir().expect("there is a place for temporary files");
    let path = folder.path().join("model.onnx");
    let options = Options { seed, ..Options::default() }.number("hidden", 64).number("layers", STAGES - 1);
    let built = build("mlp", &options).expect("the zoo builds its models");
    std::fs::write(&path, to_bytes(&built.model)).expect("the folder can be written to");
    load(&path, &Import::default()).expect("what the zoo writes can be read")
}

fn arrays(split: &Split) -> BTreeMap<String, Tensor> {
    let shape: Vec<usize> = [split.rows].into_iter().chain(SAMPLE).collect();
    let x = Tensor::from_f32(&shape, &split.x);
    BTreeMap::from([("x".to_string(), x), ("target".to_string(), Tensor::from_i64(&[split.rows], &split.y))])
}

fn weights(model: &Model) -> BTreeMap<String, Tensor> {
    let named_tensor = |(name, weight): (&String, &Weight)| match weight {
        Weight::Given(tensor) => Some((name.clone(), tensor.clone())),
        Weight::Missing { .. } => None,
    };
    model.weights.iter().filter_map(named_tensor).collect()
}

fn run(model: &Model, digits: &Digits, seed: u64, schedule: Schedule, staleness: Staleness, rate: f64) -> Trained {
    let stages = if schedule.flushes() { 1 } else { STAGES };
    let ops = order::numbered(&model.graph).len();
    let op_stages: Vec<usize> = (0..ops).map(|op| op * stages / ops).collect();
    let per_epoch = digits.train.rows / BATCH;
    let count = StepCount::minibatches((EPOCHS * per_epoch) as u32);
    let dims = Bindings::from([("batch".to_string(), BATCH as i64)]);
    let settings = Settings::new(dims, Loss::CrossEntropy, schedule, count);
    let pipeline = Pipeline::chain(vec![StageSpec::new(1, 1.0, 2.0); stages]);
    let pipeline = pipeline.with_caps(&published_caps(&vec![1; stages]));
    let prepared = prepare(&model.graph, &op_stages, pipeline, &settings).expect("the model can be partitioned");
    let data = Dataset::new(arrays(&digits.train), &feeds(&prepared.codes), BATCH).expect("the digits fit");
    let order = RowOrder::Shuffled { seed };
    let batches = Batches::new(data, BATCH, 1, EPOCHS * per_epoch, order).expect("there is an epoch of digits");
    let rule = Rule::Sgd { learning_rate: rate, momentum: 0.9, nesterov: false, weight_decay: 0.0 };
    let training = TrainJob {
        codes: &prepared.codes,
        program: &prepared.program,
        weights: &weights(model),
        batches: &batches,
        optimizer: &Optimizer::from(rule),
        policy: Policy { staleness, ..Policy::default() },
        keep_gradients: false,
    };
    train(&training, &mut |_| {}).expect("the program was checked")
}

/// Test accuracy; 0 if the weights are not finite.
fn accuracy(model: &Model, digits: &Digits, trained: &BTreeMap<String, Tensor>) -> f64 {
    let inputs = arrays(&digits.test);
    let dims = Bindings::from([("batch".to_string(), digits.test.rows as i64)]);
    let graph = bind(&model.graph, &dims).expect("the batch is the only symbol");
    let answers = evaluate(&graph, true, &inputs, trained).expect("the trained model can be run");
    let logits = answers.values().next().expect("the model has a result").to_f64();
    let correct = logits.chunks(10).zip(&digits.test.y).filter(|(row, label)| {
        let best = (0..10).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0);
        row.iter().all(|value| value.is_finite()) && best as i64 == **label
    });
    correct.count() as f64 / digits.test.rows as f64
}

fn main() {
    let anneal = (EPOCHS * 1437 / BATCH / 4) as u32;
    let methods = [
        ("no pipeline", Schedule::OneFOneB, Staleness::None),
        ("stash", Schedule::OneFOneBRr, Staleness::None),
        ("vertical-sync", Schedule::OneFOneBRrVsync, Staleness::None),
        ("predict", Schedule::OneFOneBRrNewest, Staleness::Predict),
        ("pipemare", Schedule::OneFOneBRrNewest, Staleness::PipeMare { anneal }),
        ("none", Schedule::OneFOneBRrNewest, Staleness::None),
    ];
    println!("| staleness | lr | loss of the last epoch | accuracy | memory of the first stage |");
    println!("| --- | --- | --- | --- | --- |");
    for rate in RATES {
        for (name, schedule, staleness) in methods {
            let (mut loss, mut accuracy_sum, mut peak_bytes) = (0.0, 0.0, 0);
            for seed in 0..SEEDS {
                let (model, digits) = (model(seed), digits::load(seed));
                let trained = run(&model, &digits, seed, schedule, staleness, rate);
                let last_epoch = &trained.losses[trained.losses.len() - digits.train.rows / BATCH..];
                loss += last_epoch.iter().sum::<f64>() / last_epoch.len() as f64;
                accuracy_sum += accuracy(&model, &digits, &trained.weights);
                peak_bytes = peak_bytes.max(trained.peak_memory_bytes[0]);
            }
            let runs = SEEDS as f64;
            println!("| {name} | {rate} | {:.4} | {:.2} % | {peak_bytes} |", loss / runs, accuracy_sum / runs * 100.0);
        }
    }
}
