//! A model zoo that writes ONNX, and a small dataset to train on.
//!
//! The graphs have the form of PyTorch's exporter in training mode. Parameters keep module names (`conv1.weight`),
//! nodes name their module (`/conv1/Conv`), BatchNormalization has its three training outputs, and the batch dimension
//! is symbolic. They exercise the same import path as user models.

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
pub mod gpt_oss;
pub mod image;
pub mod layer;
pub mod llama;
pub mod mlp;
pub mod moe;
pub mod prediction;
pub mod random;
pub mod recurrent;
pub mod residual_cnn;
pub mod resnet;
pub mod rotary;
pub mod s2vt;
pub mod transformer;
pub mod unet;
pub mod vgg;
pub mod zoo;
