//! A model zoo built in Rust and written as real ONNX, and a small data set to train on.
//!
//! The graphs come out the way PyTorch's exporter writes them in training mode: parameters keep module names
//! (`conv1.weight`), nodes tell their module (`/conv1/Conv`), BatchNormalization has its three training outputs, and
//! the batch dimension is symbolic. So what reads them reads the models of users too.

pub mod alexnet;
pub mod amoebanet;
pub mod attention;
pub mod awd_lm;
pub mod bert;
pub mod builder;
pub mod choice;
pub mod digits;
pub mod gnmt;
pub mod gpt;
pub mod image;
pub mod layer;
pub mod mlp;
pub mod moe;
pub mod prediction;
pub mod random;
pub mod recurrent;
pub mod residual_cnn;
pub mod resnet;
pub mod s2vt;
pub mod transformer;
pub mod unet;
pub mod vgg;
pub mod zoo;
