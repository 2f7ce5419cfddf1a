//! Communication between the workers of one process: channels between stages, and communicators whose members exchange
//! tensors in rank order.

pub mod all_reduce;
pub mod chain;
pub mod channel;
pub mod communicator;
pub mod host_all_reduce;
pub mod members;
pub mod monitor;
pub mod pipelined_all_reduce;
pub mod tensor_group;
