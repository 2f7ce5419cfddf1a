//! A CPU with the memory and the streams of a GPU, and a check that accesses of different streams are ordered.

mod clock;
pub mod device;
mod stream;
