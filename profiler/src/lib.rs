//! Measures op costs on this machine, and describes it as a cluster.
//!
//! ```text
//! Graph --attribute--> nodes by op --kernel, cache--> times --measure--> Profile
//!                                   --whole--> the same nodes run as one stage, beside the sum
//! ```
//!
//! [`measure::measure`] fills a [`Profile`](compiler::profile::Profile), [`machine::cluster_of_this_cpu`] a
//! [`Cluster`](compiler::cluster::Cluster). Nothing here prints; progress goes to a callback.
//!
//! ```
//! use compiler::graph::text;
//! use compiler::pass::attribution::Training;
//! use compiler::profile::{Method, ProfiledModel};
//! use profiler::measure::{Model, Settings, measure};
//! use runtime::device::cpu::device::cpu;
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
//! let model = Model {
//!     graph: &graph,
//!     training: Training::Gradient,
//!     loss: None,
//!     model: ProfiledModel { file: "mlp".into(), sha256: String::new(), ops: 0 },
//!     micro_batch: 4,
//!     weights: &BTreeMap::new(),
//! };
//! let settings = Settings { runs: 3, ..Settings::default() };
//! let profile = measure(&model, &cpu(), &settings, None, &mut |progress| println!("{}", progress.name))?.profile;
//! assert_eq!((profile.method, profile.ops.len()), (Method::Measured, 3));
//! assert!(profile.ops.iter().all(|op| op.fwd_us > 0.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod cache;
mod contention;
pub mod detect;
pub mod host_links;
pub mod kernel;
pub mod links;
pub mod machine;
pub mod measure;
pub mod scratch;
pub mod update;
pub mod whole;
