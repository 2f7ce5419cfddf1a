//! Mixed-integer programs: a second way to a plan on one level, which shares nothing with the searches over closed sets.
//!
//! It starts from a plan that is known, asks for a faster one, and its answer is never worse. `solve` is the door. `choices` lists
//! who may run how many replicas; for each such choice all costs are linear in which op stands before which cut, and `formulation`
//! writes that down, with its rows in `times` and `memory`; `solver` hands it to good_lp.

pub mod formulation;
pub mod memory;
pub mod order;
pub mod replica_choices;
pub mod solve;
pub mod solver;
pub mod times;
