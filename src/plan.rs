//! Planning: from a request to a plan.

pub mod batch_search;
pub mod configuration_search;
pub mod custom_schedule;
pub mod from_costs;
pub mod infeasible;
pub mod interruptible;
pub mod model_family;
pub mod optimizer;
pub mod parallel;
pub mod read;
pub mod remedies;
pub mod replan;
pub mod request;
pub mod request_costs;
pub mod result;
pub mod schedule_memory;
pub mod solve;
pub mod tensor_parallel;
pub mod tied_weights;
pub mod variant;
pub mod zero;
