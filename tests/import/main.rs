//! Importing models: ONNX and `torch.export`.

mod aten;
mod control_flow;
mod decode;
mod exported;
mod functions;
mod fx;
mod import;
mod known;
mod truth;
mod zoo;

#[path = "../support/mod.rs"]
mod support;
