//! The runtime: device kernels, communication between workers, the worker that runs a schedule's program, and training.
//!
//! ```text
//! Graph + placement --compile--> StageCode (kernels and memory, forward and backward)
//! StageCode + Program + data --train--> weights, losses, spans
//! ```
//!
//! A worker is a thread with one loop and one `match` over the instructions of its program ([`worker`]). It knows no
//! schedule: which weights a run uses, what it waits for and when it steps are operands of its instructions.
//!
//! A model of two stages, trained by two workers in one process:
//!
//! ```
//! use compiler::graph::text;
//! use compiler::pass::loss::Loss;
//! use compiler::schedule::semantics::StepCount;
//! use compiler::plan::schedule::Schedule;
//! use compiler::schedule::Pipeline;
//! use compiler::tensor::Tensor;
//! use runtime::data::{Batches, Dataset, RowOrder};
//! use runtime::optim::optimizer::{Optimizer, Rule};
//! use runtime::optim::policy::Policy;
//! use runtime::train::prepare::{Settings, prepare};
//! use runtime::train::job::TrainJob;
//! use runtime::train::run::{feeds, train};
//! use std::collections::BTreeMap;
//!
//! let graph = text::parse(r#"
//!     graph "mlp" {
//!       %x = input fact={"dtype":"f32","shape":[4,6]} name="x" : f32[4, 6]
//!       %w1 = parameter fact={"dtype":"f32","shape":[8,6]} name="fc1.weight" : f32[8, 6]
//!       %h = matmul %x %w1 transpose_a=false transpose_b=true : f32[4, 8] from "/fc1/Gemm" in "fc1"
//!       %a = relu %h : f32[4, 8] from "/relu/Relu" in "relu"
//!       %w2 = parameter fact={"dtype":"f32","shape":[3,8]} name="fc2.weight" : f32[3, 8]
//!       %y = matmul %a %w2 transpose_a=false transpose_b=true : f32[4, 3] from "/fc2/Gemm" in "fc2"
//!       output "logits" %y
//!     }
//! "#)?;
//!
//! // The stage of every op; 1F1B over two micro-batches of four rows, five times.
//! let count = StepCount { minibatches: 5, microbatches: 2 };
//! let settings = Settings {
//!     dims: Default::default(),
//!     loss: Loss::CrossEntropy,
//!     class_axis: None,
//!     minibatch_means: false,
//!     schedule: Schedule::OneFOneB,
//!     count,
//! };
//! let prepared = prepare(&graph, &[0, 0, 1], Pipeline::balanced(&[1, 1], 2.0), &settings)?;
//!
//! let numbers = |shape: &[usize]| {
//!     let count: usize = shape.iter().product();
//!     Tensor::from_f32(shape, &(0..count).map(|at| (at as f32).sin()).collect::<Vec<_>>())
//! };
//! let rows = [("x", numbers(&[8, 6])), ("target", Tensor::from_i64(&[8], &[0, 1, 2, 0, 1, 2, 0, 1]))];
//! let rows = rows.map(|(name, tensor)| (name.to_string(), tensor)).into();
//! let data = Dataset::new(rows, &feeds(&prepared.codes), 4)?;
//! let weights = [("fc1.weight", numbers(&[8, 6])), ("fc2.weight", numbers(&[3, 8]))];
//! let weights: BTreeMap<String, Tensor> = weights.map(|(name, tensor)| (name.to_string(), tensor)).into();
//! let rule = Rule::Sgd { learning_rate: 0.1, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
//! let training = TrainJob {
//!     codes: &prepared.codes,
//!     program: &prepared.program,
//!     weights: &weights,
//!     batches: &Batches::new(data, 8, 2, 5, RowOrder::InOrder)?,
//!     optimizer: &Optimizer::from(rule),
//!     policy: Policy::default(),
//!     keep_gradients: false,
//! };
//! let trained = train(&training, &mut |step| println!("step {}: loss {:.4}", step.step, step.loss))?;
//! assert!(trained.losses[4] < trained.losses[0]);
//! assert_ne!(trained.weights["fc1.weight"], weights["fc1.weight"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod checkpoint;
pub mod comm;
pub mod data;
pub mod device;
pub mod exec;
pub mod optim;
pub mod process;
pub mod stage;
pub mod train;
pub mod zero;
