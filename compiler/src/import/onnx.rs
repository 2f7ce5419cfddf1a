//! ONNX: from the bytes of a model file to a decoded model in which every later step can trust.
//!
//! ```text
//! file --map--> bytes --protobuf--> ModelProto --structure, payloads--> OnnxModel --lower--> Graph
//! ```
//!
//! `file` opens and maps, `decode` walks the road and gathers every fault it can see, `model` holds what comes out.
//! A tensor's values stay views into the mapped file: a model of two gigabytes is read in milliseconds.

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
pub mod training;
pub mod training_warnings;
pub mod warning;
