//! Any bytes as an ONNX file.
#![no_main]

#[path = "../src/meet.rs"]
mod meet;

libfuzzer_sys::fuzz_target!(|data: &[u8]| meet::onnx_bytes(data));
