//! Generators: one file per schedule, which orders the compute actions of every worker.

pub mod bfs;
pub mod dualpipev;
pub mod gpipe;
pub mod inference;
pub mod interleaved;
pub mod one_f_one_b;
pub mod one_f_one_b_rr;
pub mod one_f_one_b_rr_newest;
pub mod two_bw;
pub mod zbv;
pub mod zero_bubble;
