//! Communication between the workers of one process: channels from stage to stage, and communicators whose members exchange tensors in rank
//! order.

pub mod channel;
pub mod communicator;
pub mod tensor_group;
