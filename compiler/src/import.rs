//! Importers: from the bytes of a file to a model or to measured costs.

pub mod onnx;
pub mod pipedream;
