//! Measures what ops cost on the machine at hand, and describes that machine.
//!
//! ```text
//! Graph --attribute--> nodes by op --kernel, cache--> times --measure--> Profile
//!                                   --whole--> the same nodes run as one stage, beside the sum
//! ```
//!
//! [`measure::measure`] fills a [`Profile`](compiler::profile::Profile), [`machine::cluster_of_this_cpu`] a
//! [`Cluster`](compiler::cluster::Cluster). Nothing here prints; progress goes to a callback.

pub mod cache;
pub mod detect;
pub mod kernel;
pub mod machine;
pub mod measure;
pub mod scratch;
pub mod update;
pub mod whole;
