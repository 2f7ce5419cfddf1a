//! Published planning problems other than pipec's own, each with a reader, a model, a search and an independent checker.
//!
//! - `placement`: device placement without replication, the JSON instances of Microsoft's dnn-partitioning. Tarnawski,
//!   Phanishayee, Devanur, Mahajan and Paravecino, "Efficient Algorithms for Device Placement of DNN Graph Operators",
//!   NeurIPS 2020.
//! - `piper`: layers with choices of data parallelism, tensor parallelism and recomputation, the JSON instances of
//!   Microsoft's Piper. Tarnawski, Narayanan and Phanishayee, "Piper: Multidimensional Planner for DNN
//!   Parallelization", NeurIPS 2021.
//!
//! Both return a `compiler::plan::Plan`, with the costs `load` and `hybrid`. The instances have costs but no ops, so
//! their plans can be printed, checked and drawn, but not trained.

pub mod piper;
pub mod placement;
