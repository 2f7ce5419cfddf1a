//! Any bytes as a .pt2 archive.
#![no_main]

#[path = "../src/meet.rs"]
mod meet;

libfuzzer_sys::fuzz_target!(|data: &[u8]| meet::pt2_zip(data));
