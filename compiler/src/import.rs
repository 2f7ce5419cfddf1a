//! Importers: from the bytes of a file to a model or to measured costs.

// The verb of this folder has the folder's name.
#[allow(clippy::module_inception)]
pub mod import;
pub mod onnx;
pub mod pipedream;
