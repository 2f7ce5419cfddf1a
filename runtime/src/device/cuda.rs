//! NVIDIA GPUs: every core op as kernels in CUDA C++, written for its shapes.
//!
//! A [`Recipe`](recipe::Recipe) is what an op comes to at fixed shapes: launches in order, each with a kernel's text, its geometry and
//! where its arguments lie. Sizes stand in the texts as numbers, so that a kernel takes addresses only and its compiler
//! sees every bound. The texts need no header: NVRTC compiles them on any machine, one without a GPU as well.
//!
//! Results depend on shapes and inputs alone. Nothing is added by atomics: a sum over a block is a tree, a sum over
//! blocks is taken in their order, and slices that meet in one place are joined in the order of their indices.

pub mod batch_norm;
pub mod card;
pub mod compile;
pub mod conv;
pub mod cross_entropy;
pub mod draft;
pub mod element;
pub mod elementwise;
pub mod gather;
pub mod grouped_matmul;
pub mod gru;
pub mod layer_norm;
pub mod library;
pub mod lstm;
pub mod matmul;
pub mod movement;
pub mod offsets;
pub mod ordering;
pub mod pool;
pub mod prelude;
pub mod recipe;
pub mod reduce;
pub mod rnn;
pub mod softmax;
pub mod table;
pub mod windows;
