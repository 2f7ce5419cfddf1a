//! Search for the fastest plan: down-sets and linear orders of the graph, stage costs, dynamic programs, branch and
//! bound.

pub mod balanced_cuts;
pub mod branch_and_bound;
pub mod bucket_size;
pub mod build_plan;
pub mod candidates;
pub mod constraints;
pub mod context;
pub mod downset_lattice;
pub mod downsets;
pub mod finish_plan;
pub mod first_stage;
pub mod fixed_stages;
pub mod fused_graph;
pub mod in_flight;
pub mod interleaved;
pub mod largest_in_range;
pub mod layouts;
pub mod linear_dp;
pub mod linear_order;
pub mod linear_search;
pub mod memory_dp;
pub mod module_boundaries;
pub mod numbers;
pub mod partial_recompute;
pub mod pipec;
pub mod pipec_rules;
pub mod placement;
pub mod range_costs;
pub mod result;
pub mod select;
pub mod simulate_candidate;
pub mod suffix_dp;
pub mod tensor_parallel;
pub mod zero;
