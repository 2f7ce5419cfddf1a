//! The command line.

mod cli;
mod cluster;
mod doctor;
mod export;
mod gpus;
mod interrupted_search;
mod planned_memory;
mod profile;
mod profiled_workers;
mod report;
mod sweep;
mod torch_engine;
mod verdicts;

#[path = "../support/mod.rs"]
mod support;
