//! Importers: from the bytes of a file to a model or to measured costs.

pub mod batched;
pub mod build;
pub mod dnn_partitioning;
pub mod doubt;
pub mod fx;
// The verb of this folder has the folder's name.
#[allow(clippy::module_inception)]
pub mod import;
pub mod known;
pub mod leftover;
pub mod merged;
pub mod onnx;
pub mod opening;
pub mod pipedream;
pub mod piper;
pub mod prune;
pub mod random;
pub mod reason;
pub mod row_dropout;
pub mod supply;
pub mod symbol;
