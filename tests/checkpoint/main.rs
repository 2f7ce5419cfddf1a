//! Checkpoints and resumed runs.

mod checkpoint;
mod group;
mod ready;
mod resume;
mod saves;
