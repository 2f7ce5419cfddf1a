//! The processes of a run and their connections, over TCP or MPI. Processes trust each other, and nobody else.
//!
//! ```text
//! worker ──▶ channel ──▶ worker of this process
//!                   └──▶ connection ──frames──▶ router of another process ──▶ its worker
//! ```
//!
//! [`authentication`] keeps strangers out, [`encryption`] hides the bytes between hosts, [`handshake`] compares inputs,
//! [`process_group`] connects all processes, and [`exchange`] creates the local ends of channels and communicators that
//! span processes. [`tensor_links`] lets tensors go from device to device. Every process learns of the first failure
//! through [`run_status`].

pub mod accept;
pub mod authentication;
pub mod chain_messages;
pub mod connection;
pub mod dial;
pub mod encryption;
pub mod exchange;
pub mod fields;
pub mod frame;
pub mod handshake;
pub mod meeting;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod parts;
pub mod placement;
pub mod process_group;
pub mod recv_buffers;
pub mod router;
pub mod run_status;
pub mod shard_messages;
pub mod stop;
pub mod tensor_links;
pub mod wire;
pub mod worker_result;
