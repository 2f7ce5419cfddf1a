//! Mixed-integer programs for one interconnect level, independent of the down-set searches.
//!
//! The solver starts from a known plan and looks for a faster one, so the result is never worse. `solve` is the entry
//! point. `replica_choices` enumerates replica counts; with these fixed, all costs are linear in the variables "op v is
//! before cut c". `formulation` writes the program, with rows from `times` and `memory`; `solver` passes it to good_lp.

pub mod formulation;
pub mod memory;
pub mod order;
pub mod replica_choices;
pub mod solve;
pub mod solver;
pub mod times;
