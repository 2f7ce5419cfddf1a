//! Passes: functions from a graph to a graph, run in an order that one can read in [`pipeline`].
//!
//! `canonicalise`, `cse` and `dce` run once over the whole imported graph, before ops are numbered for plans. `fold`,
//! `fragment`, `backward`, `join`, `fuse` and `memory` run for each stage, at fixed sizes. None of them changes a number that the graph
//! computes, in any bit, and none depends on where stages are cut: that is why gradients are equal across plans.

pub mod analytic;
pub mod attribution;
pub mod backward;
pub mod batched_weight_grad;
pub mod canonicalise;
pub mod concat_of_pads;
pub mod costs;
pub mod cse;
pub mod dce;
pub mod fold;
pub mod fragment;
pub mod fuse;
pub mod gradient_accumulation;
pub mod inference;
pub mod loss;
pub mod memory;
pub mod mixed_precision;
pub mod pipeline;
pub mod precision;
pub mod split_backward;
pub mod unbiased_variance;

/// Whether a pass changed anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// The graph is another one now.
    Yes,
    /// Nothing was found to do.
    No,
}

impl From<bool> for Changed {
    fn from(changed: bool) -> Changed {
        if changed { Changed::Yes } else { Changed::No }
    }
}
