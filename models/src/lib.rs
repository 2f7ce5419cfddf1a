//! A model zoo built in Rust and written as real ONNX, and a small data set to train on.
//!
//! The graphs come out the way PyTorch's exporter writes them in training mode: parameters keep module names
//! (`conv1.weight`), nodes tell their module (`/conv1/Conv`), BatchNormalization has its three training outputs, and the
//! batch dimension is symbolic. So what reads them reads the models of users too.

pub mod builder;
pub mod digits;
pub mod gpt;
pub mod mlp;
pub mod random;
pub mod residual_cnn;
pub mod zoo;
