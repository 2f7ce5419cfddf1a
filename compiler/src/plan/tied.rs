//! The exchange of gradients of tied parameters, which several stages use.
//!
//! Each stage sums the gradients of its own uses. After the last backward of an update the stages add their sums up, as a
//! ring over one device of each, and every stage steps its copy:
//!
//! ```text
//! X  =  2 (k - 1) l + 2 (k - 1) / k · w / B        k stages that share w bytes of gradient sums
//! ```
//!
//! Stages on the same devices exchange nothing. Replicas exchange at the same time, each with its own counterpart.

use crate::cluster::Level;
use crate::plan::links::Wire;
use crate::profile::cost_graph::ParamCost;

/// Microseconds per update that each stage spends on the exchange. `stages` are the first device and the replicas of
/// each, and `stage_of` is the stage of each op.
pub fn exchange_us(
    levels: &[Level],
    params: &[ParamCost],
    stages: &[(u32, u32)],
    stage_of: &dyn Fn(usize) -> usize,
) -> Vec<f64> {
    let mut us = vec![0.0; stages.len()];
    for param in params.iter().filter(|param| param.users.len() > 1 && param.sum_bytes > 0) {
        let mut users: Vec<usize> = param.users.iter().map(|op| stage_of(op.index())).collect();
        users.sort_unstable();
        users.dedup();
        let mut devices: Vec<(u32, u32)> = users.iter().map(|&stage| stages[stage]).collect();
        devices.sort_unstable();
        devices.dedup();
        let ends = devices.iter().flat_map(|&(first, replicas)| [first, first + replicas.max(1) - 1]);
        let Some(wire) = Wire::between(levels, ends).filter(|_| devices.len() > 1) else { continue };
        let count = devices.len() as f64;
        let bytes = param.sum_bytes as f64;
        let time = 2.0 * (count - 1.0) * (wire.latency_us + bytes / count / wire.bytes_per_us);
        users.iter().for_each(|&stage| us[stage] += time);
    }
    us
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::profile::cost_graph::OpId;

    #[test]
    fn stages_that_share_a_parameter_exchange_its_gradient() {
        let cluster = levels("4:1MB/s").unwrap().levels;
        let params = [ParamCost::new("tied", 100, vec![OpId(0), OpId(2)]), ParamCost::new("own", 50, vec![OpId(1)])];
        let us = |stages: &[(u32, u32)]| exchange_us(&cluster, &params, stages, &|op| op.min(stages.len() - 1));
        assert_eq!(us(&[(0, 1), (1, 1), (2, 1)]), [100.0, 0.0, 100.0]);
        assert_eq!(us(&[(0, 1), (1, 3)]), [100.0, 100.0]);
        assert_eq!(us(&[(0, 4)]), [0.0]);
        // Chunks of one rank hold the parameter once.
        assert_eq!(us(&[(0, 1), (1, 1), (0, 1)]), [0.0; 3]);
    }
}
