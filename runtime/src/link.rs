//! How workers reach each other. Within one process, threads hand over references: no tensor is copied. Between processes the same
//! messages go over TCP, among hosts that trust each other, or over MPI.
//!
//! ```text
//! worker ──▶ channel ──▶ worker of this process
//!                   └──▶ line ──frames──▶ switchboard of another process ──▶ its worker
//! ```
//!
//! [`handshake`] says who may take part, [`group`] brings all processes of a run together, [`exchange`] makes the ends of channels and
//! meetings that lie in other processes. What ends a run early is its [`fate`], which every process of the group learns.

pub mod carry;
pub mod channel;
pub mod exchange;
pub mod fate;
pub mod fields;
pub mod frame;
pub mod group;
pub mod handshake;
pub mod leaving;
pub mod line;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod parts;
pub mod rendezvous;
pub mod ring;
pub mod seats;
pub mod stopping;
pub mod switchboard;
