//! Importers: from a model file or a cost profile to a graph or a cost graph.

pub mod activation;
pub mod batched;
pub mod build;
pub mod constant_index;
pub mod einsum;
pub mod embedding;
pub mod equal_sizes;
pub mod fx;
// The entry point of this folder has the folder's name.
pub mod batch_in_axis;
pub mod fixed_batch_left;
pub mod formula;
#[allow(clippy::module_inception)]
pub mod import;
pub mod known_inputs;
pub mod lower_error;
pub mod norm;
pub mod onnx;
pub mod patches;
pub mod pipedream;
pub mod prune;
pub mod random;
pub mod row_dropout;
pub mod symbol;
pub mod symbolic_batch;
pub mod training_warning;
pub mod with_inputs;
