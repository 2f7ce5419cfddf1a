//! Edits of well-formed ONNX graphs.
#![no_main]

#[path = "../src/meet.rs"]
mod meet;

libfuzzer_sys::fuzz_target!(|data: &[u8]| meet::onnx_graph(data));
