//! Training: from a graph and a plan to workers, their channels and their run.

pub mod channels;
pub mod losses;
pub mod prepare;
pub mod resume;
pub mod run;
pub mod tensor_parallel;
pub mod validate;
