//! Transfer and all-reduce times of a link.
//!
//! A transfer takes latency + bytes / bandwidth. A ring all-reduce over r replicas takes
//!
//!   T = 2 (r − 1) · latency + 2 (r − 1) / r · bytes / bandwidth

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Microseconds until the first byte arrives.
    pub latency: f64,
    /// Bytes per microsecond (MB/s); may be infinite.
    pub bandwidth: f64,
}

impl Link {
    pub const INSTANT: Link = Link { latency: 0.0, bandwidth: f64::INFINITY };

    pub fn time(self, bytes: u64) -> f64 {
        self.latency + bytes as f64 / self.bandwidth
    }

    pub fn all_reduce(self, replicas: u32, bytes: u64) -> f64 {
        let r = f64::from(replicas.max(1));
        2.0 * (r - 1.0) * self.latency + 2.0 * (r - 1.0) / r * bytes as f64 / self.bandwidth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring() {
        let link = Link { latency: 3.0, bandwidth: 1000.0 };
        assert_eq!(link.time(5000), 8.0);
        assert_eq!(link.all_reduce(4, 1000), 18.0 + 1.5);
        assert_eq!(link.all_reduce(1, 1000), 0.0);
        assert_eq!(Link::INSTANT.time(u64::MAX), 0.0);
    }
}
