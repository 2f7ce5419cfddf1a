//! The communicators of a stage's replicas, for one of them. Under ZeRO, groups of replicas may shard; then each group
//! has its own exchange of shards, and each shard is summed across the groups.

use crate::comm::all_reduce::AllReduce;
use crate::comm::communicator::{Communicator, Tensors};
use crate::optim::grad_norm::Squares;
use crate::stage::gradient_buckets::BucketContribution;
use crate::zero::gradient_shards::GradientShards;
use std::sync::Arc;

#[derive(Clone)]
pub struct StageComms {
    pub replicas: Arc<Communicator<BucketContribution>>,
    /// Sums gradients in place over the replicas that shard together, or all; `None` for one alone.
    pub all_reduce: Option<Arc<dyn AllReduce>>,
    /// Sums the shards of this replica's rank over the groups that shard; `None` for one group.
    pub across_groups: Option<Arc<dyn AllReduce>>,
    /// Exchange of weight shards, under ZeRO.
    pub shard_comm: Option<Arc<Communicator<Tensors>>>,
    /// For gradient norms, if each replica of a group has only a shard of the gradients and not all workers share one norm.
    pub norms: Option<Arc<Communicator<Squares>>>,
    /// Gradient shards, under ZeRO 2 and 3.
    pub gradient_shards: Option<Arc<GradientShards>>,
}

impl StageComms {
    /// Fails all current and future waits, after a worker was lost.
    pub fn abandon(&self) {
        self.replicas.abandon();
        self.all_reduce.iter().chain(&self.across_groups).for_each(|all_reduce| all_reduce.abandon());
        self.shard_comm.iter().for_each(|shard_comm| shard_comm.abandon());
        self.gradient_shards.iter().for_each(|shards| shards.abandon());
        self.norms.iter().for_each(|norms| norms.abandon());
    }
}
