//! The messages of the ONNX protobuf description, as prost generates them from `proto/onnx.proto`.
//!
//! `bytes` fields are `bytes::Bytes`: views into the buffer that was decoded, not copies.

#![allow(missing_docs, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/onnx.rs"));
