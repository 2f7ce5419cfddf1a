//! The compiler: a model becomes a `Graph`, a `Graph` with costs becomes a `Plan`, a `Plan` becomes `Program`s.
//!
//! ```text
//! bytes --import--> Graph --profile--> Profile --partition--> Plan --schedule--> Programs --simulate--> Timeline
//! ```
//!
//! The crate starts no threads, reads no clock, depends on no device and prints nothing. Modules depend only on lower
//! layers. From the bottom: `tensor`, `text`; `cluster`; `op`; `graph`; `profile`, `pass`; `import`, `tensor_parallel`;
//! `plan`; `schedule`; `simulate`; `partition` and `export`.
//!
//! A complete example with an inline model; [`import::import::load`] reads one from a file:
//!
//! ```
//! use compiler::cluster::read::gpus;
//! use compiler::graph::text;
//! use compiler::partition::options::PlannerOptions;
//! use compiler::partition::planner::plan;
//! use compiler::pass::analytic::{Subject, profile};
//! use compiler::pass::attribution::{Training, attribute};
//! use compiler::pass::costs::{cost_graph, fill};
//! use compiler::plan::problem::{CostModel, Problem};
//! use compiler::profile::ProfiledModel;
//! use compiler::schedule::pipeline::{pipeline, generated};
//! use compiler::schedule::semantics::StepCount;
//! use compiler::schedule::generators::schedule;
//! use compiler::schedule::{check::verify::check, formats::chart::chart};
//! use compiler::simulate::run::{Machine, simulate};
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
//! // What every op costs on two H100, by their data sheet; `profiler` measures instead.
//! let cluster = gpus(2, None)?;
//! let attribution = attribute(&graph, Training::Gradient)?;
//! let model = ProfiledModel { file: "mlp".into(), sha256: String::new(), ops: 0 };
//! let subject = Subject { model, micro_batch: 4, loss: None };
//! let mut costs = cost_graph(&graph, &attribution);
//! fill(&mut costs, &profile(&graph, &attribution, &cluster.device, &subject), None)?;
//!
//! // Two stages, each on a device of its own.
//! let mut problem = Problem::new(costs, cluster, CostModel::Pipec);
//! problem.constraints.replicas = Some(vec![1, 1]);
//! problem.constraints.cut_after = Some(vec!["relu".into()]);
//! let plan = plan(&problem, &PlannerOptions::default())?.plan;
//! assert_eq!(plan.stages[0].ops, [(0, 2)]);
//! assert!(plan.lower_bound_us <= plan.predicted.minibatch_us);
//!
//! // Its programs for four minibatches, proven to run, and played.
//! let pipeline = pipeline(&plan)?;
//! let count = StepCount { minibatches: 4, microbatches: 1 };
//! let program = schedule(generated(plan.schedule.kind)?, &pipeline, count)?;
//! check(&program)?;
//! let timeline = simulate(&program, &pipeline, &Machine::of(&pipeline))?;
//! assert!(timeline.makespan > 0.0);
//! println!("{}", chart(&program)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cluster;
pub mod export;
pub mod graph;
pub mod import;
pub mod op;
pub mod partition;
pub mod pass;
pub mod plan;
pub mod profile;
pub mod schedule;
pub mod simulate;
pub mod tensor;
pub mod tensor_parallel;
pub mod text;
