//! Lower bounds on the time and memory of all plans.

pub mod bisect;
pub mod chain;
pub mod crossings;
pub mod cut_space;
pub mod divisions;
pub mod flush_bound;
pub mod local_search;
pub mod lower_bound;
pub mod min_cut_bytes;
pub mod min_memory;

#[cfg(test)]
#[path = "../../tests/random/mod.rs"]
mod random;

#[cfg(test)]
pub mod test_graphs;
