//! Communication between the workers of one process: channels between stages, and communicators whose members exchange
//! tensors in rank order.

pub mod channel;
pub mod communicator;
pub mod device_all_reduce;
pub mod tensor_group;
