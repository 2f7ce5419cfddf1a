//! How workers reach each other. Within one process, threads hand over references: no tensor is copied.

pub mod channel;
pub mod rendezvous;
