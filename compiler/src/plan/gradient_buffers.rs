//! Gradients on their way back: how many items' a stage has room for of those that it gives to stages before it.
//!
//! A stage makes the next gradients where the last ones lay, as soon as those have gone. Where they take longer than the forward that it
//! runs in between, it would wait for that, and so they lie in two places in turn. Programs take the second place by the link that an edge
//! goes over (`schedule/lower.rs`). Plans count it where they do on the slowest link of the cluster, after the forward of the fastest of
//! its devices: that is known of ops before it is known where they will stand.

use crate::cluster::{Cluster, class};
use crate::plan::links::Wire;

/// Times are sums in different orders: what differs by less takes equally long.
const ALIKE: f64 = 1e-9;

/// What decides the places of gradients.
#[derive(Clone, Copy, Debug)]
pub struct GradientBuffers {
    /// The slowest way; none where there is no level.
    pub wire: Option<Wire>,
    /// How many times as fast as the costs the fastest device is.
    pub pace: f64,
}

impl GradientBuffers {
    /// Between the devices of a cluster, as one device of each group sees them.
    pub fn of(cluster: &Cluster) -> GradientBuffers {
        let outermost = cluster.levels.len().checked_sub(1);
        let wire = outermost.map(|level| Wire::of(&cluster.levels, level));
        GradientBuffers { wire, pace: class::fastest(&cluster.classes) }
    }

    /// Bytes of the places of a stage that gives gradients of so many for each item, and whose forward takes so many microseconds.
    pub fn bytes(&self, one: u64, forward_us: f64) -> u64 {
        let takes_longer = |wire: &Wire| wire.time(one as f64) > forward_us / self.pace * (1.0 + ALIKE);
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
