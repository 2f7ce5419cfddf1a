//! Helpers of the tests. Each test binary uses some of them.

#![allow(dead_code)]

pub mod builder;
pub mod console;
pub mod devices;
pub mod drawn;
pub mod emulator;
pub mod family;
pub mod gradients;
pub mod problems;
pub mod program;
pub mod reference;
pub mod shared;
pub mod simulated_gpus;
