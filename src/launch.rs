//! The processes of a training run: their roles, how they are started, signals.

pub mod children;
pub mod environment;
pub mod host_links;
pub mod role;
pub mod run_token;
pub mod signals;
pub mod stop_signal;
