//! Graph passes; [`pipeline`] defines their order.
//!
//! `canonicalise`, `cse`, `attention` and `dce` run once over the imported graph, before ops are numbered for plans.
//! `fold`, `fragment`, `backward`, `concat_of_pads`, `fuse` and `memory` run per stage, at fixed sizes. Only
//! `attention` changes computed bits, and no pass depends on the stage cuts, so gradients are equal across plans.

pub mod analytic;
pub mod attention;
pub mod attribution;
pub mod backward;
pub mod batch_dependence;
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
pub mod minibatch_mean;
pub mod mixed_precision;
pub mod pipeline;
pub mod precision;
pub mod recompute_parts;
pub mod split_backward;
pub mod unbiased_variance;

/// Tells whether a pass changed the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    Yes,
    No,
}

impl From<bool> for Changed {
    fn from(changed: bool) -> Changed {
        if changed { Changed::Yes } else { Changed::No }
    }
}
