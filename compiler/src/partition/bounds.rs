//! Lower bounds on the time and memory of all plans.

pub mod bisect;
pub mod cut_space;
pub mod local_search;
pub mod lower_bound;
pub mod min_cut_bytes;
pub mod min_memory;
