//! Runs over several processes and hosts.

mod hosts;
mod processes;
mod signals;
mod strangers;
mod streams;
mod tensor_parallel;

#[path = "../support/mod.rs"]
mod support;
