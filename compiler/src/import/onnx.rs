//! ONNX: from a model file to a decoded and checked model.
//!
//! ```text
//! file --map--> bytes --protobuf--> ModelProto --structure, payloads--> OnnxModel --lower--> Graph
//! ```
//!
//! `file` opens and maps the file, `decode` decodes it and collects all faults, `model` has the result. Tensor values
//! stay views into the mapped file: a 2 GB model is read in milliseconds.

pub mod check_graph;
pub mod decode;
pub mod element;
pub mod error;
pub mod external;
pub mod file;
pub mod fingerprint;
pub mod function;
pub mod lower;
pub mod model;
pub mod name;
pub mod order;
pub mod payload;
pub mod proto;
pub mod signature;
pub mod tensor_error;
pub mod training;
pub mod training_warnings;
pub mod warning;
