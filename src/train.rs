//! Training: from a request to trained weights.

pub mod arrays;
pub mod auto_device;
pub mod checkpoints;
pub mod data_digest;
pub mod device_request;
pub mod evaluation;
pub mod failures;
pub mod initial_weights;
pub mod interrupted;
pub mod memory;
pub mod metrics;
pub mod micro_batches;
pub mod prepare;
pub mod prepared;
pub mod request;
pub mod run;
pub mod run_inputs;
pub mod run_memory;
pub mod run_settings;
pub mod task;
pub mod tensor_parallel;
