//! Runs over several processes and hosts.

mod hosts;
mod processes;
mod signals;
mod strangers;
mod streams;

#[path = "../support/mod.rs"]
mod support;
