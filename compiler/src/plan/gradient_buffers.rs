//! Buffers for the gradients that a stage sends to earlier stages.
//!
//! A stage reuses one buffer if the transfer ends before the next backward needs it, and double-buffers otherwise. The
//! time between is one forward. Schedules decide per edge, by its link (`schedule/lower.rs`). Plans decide with the
//! slowest link of the cluster and the forward time on the fastest device, because placement is not known yet.

use crate::cluster::{Cluster, class};
use crate::plan::links::Wire;

/// Relative tolerance for times that were summed in different orders.
const TOLERANCE: f64 = 1e-9;

#[derive(Clone, Copy, Debug)]
pub struct GradientBuffers {
    /// The slowest link; `None` without interconnect levels.
    pub wire: Option<Wire>,
    /// Speed of the fastest device relative to the profiled one.
    pub pace: f64,
}

impl GradientBuffers {
    /// For a cluster, as seen by one device of each tensor-parallel group.
    pub fn of(cluster: &Cluster) -> GradientBuffers {
        let outermost = cluster.levels.len().checked_sub(1);
        let wire = outermost.map(|level| Wire::of(&cluster.levels, level));
        GradientBuffers { wire, pace: class::fastest(&cluster.classes) }
    }

    /// Buffer bytes of a stage with gradients of `one` bytes per micro-batch and a forward of `forward_us`.
    pub fn bytes(&self, one: u64, forward_us: f64) -> u64 {
        let takes_longer = |wire: &Wire| wire.time(one as f64) > forward_us / self.pace * (1.0 + TOLERANCE);
        if self.wire.as_ref().is_some_and(takes_longer) { one.saturating_mul(2) } else { one }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;

    #[test]
    fn a_second_place_is_for_what_takes_longer_than_a_forward() {
        let passing = GradientBuffers::of(&levels("4:10GB/s,2:1GB/s").unwrap());
        assert_eq!([passing.bytes(3000, 2.0), passing.bytes(3000, 3.0), passing.bytes(0, 0.0)], [6000, 3000, 0]);
    }
}
