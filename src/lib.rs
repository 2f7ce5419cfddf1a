//! pipec partitions traced models into pipeline stages and trains them.
//!
//! Each request is plain data, and one function handles it:
//!
//! | request | function | result |
//! | --- | --- | --- |
//! | [`plan::request::PlanRequest`] | [`plan::solve::plan`] | [`plan::result::PlanResult`] |
//! | [`profile::ProfileRequest`] | [`profile::profile`] | `compiler::profile::Profile` |
//! | [`train::request::TrainRequest`] | [`train::run::train`] | [`train::run::TrainReport`] |
//!
//! ```
//! use models::zoo;
//! use pipec::events::Silent;
//! use pipec::plan::{request::PlanRequest, solve::plan};
//! use pipec::train::task::Length;
//! use pipec::train::request::{DataInput, PlanInput, TrainRequest};
//! use pipec::train::run::train;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let model = folder.path().join("mlp.onnx");
//! std::fs::write(&model, zoo::to_bytes(&zoo::build("mlp", &zoo::Options::default())?.model))?;
//!
//! // Two stages, one device each.
//! let mut request = PlanRequest::new(&model, 2);
//! request.options.replicas = Some(vec![1, 1]);
//! let plan = plan(&request, &Silent)?.planned.plan;
//! assert_eq!(plan.stages.len(), 2);
//!
//! let mut request = TrainRequest::new(&model, DataInput::Synthetic);
//! request.plan = Some(PlanInput::Plan(Box::new(plan)));
//! request.length = Some(Length::Steps(40));
//! let report = train(request, &Silent)?.expect("a run in one process has a report");
//! assert!(report.total.last_loss < report.total.first_loss);
//! # Ok(())
//! # }
//! ```
//!
//! Progress, notes and warnings go to an [`events::EventSink`]. Errors are [`error::Error`], with a help text. Nothing here
//! prints, reads environment variables, or parses a command line.

pub mod cluster;
pub mod costs;
pub mod error;
pub mod events;
pub mod files;
pub mod help;
pub mod launch;
pub mod loss;
pub mod model;
pub mod plan;
pub mod profile;
pub mod train;
