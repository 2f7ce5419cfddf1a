//! Table of known device types: peak arithmetic throughput, memory, and typical link.
//!
//! Figures are from vendor data sheets, dense (no structured sparsity), for the server module if there are several
//! variants. A dtype without hardware support has the f32 rate. The CPU row is one worker on one current server core
//! with AVX-512. A cluster file can override every figure.

use crate::cluster::{Bytes, BytesPerSecond, Device, Peak, Seconds};
use crate::text::suggest;

/// Device type of `--gpus` and `--levels`.
pub const DEFAULT_KIND: &str = "h100";

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Lower case.
    pub name: &'static str,
    /// f64, f32, tf32, bf16, f16, in 10¹² operations per second.
    tera: [f64; 5],
    memory_gb: u64,
    memory_gb_per_s: f64,
    launch_us: f64,
    /// Name and bandwidth (GB/s per direction) of the typical link between two such devices in one server.
    link: (&'static str, f64),
}

const fn kind(
    name: &'static str,
    tera: [f64; 5],
    memory_gb: u64,
    memory_gb_per_s: f64,
    launch_us: f64,
    link: (&'static str, f64),
) -> Kind {
    Kind { name, tera, memory_gb, memory_gb_per_s, launch_us, link }
}

pub const KINDS: &[Kind] = &[
    kind("v100", [7.8, 15.7, 15.7, 15.7, 125.0], 16, 900.0, 5.0, ("nvlink", 150.0)),
    kind("v100-32", [7.8, 15.7, 15.7, 15.7, 125.0], 32, 900.0, 5.0, ("nvlink", 150.0)),
    kind("a100-40", [9.7, 19.5, 156.0, 312.0, 312.0], 40, 1555.0, 4.0, ("nvlink", 300.0)),
    kind("a100", [9.7, 19.5, 156.0, 312.0, 312.0], 80, 2039.0, 4.0, ("nvlink", 300.0)),
    kind("h100", [33.5, 66.9, 494.7, 989.4, 989.4], 80, 3350.0, 3.5, ("nvlink", 450.0)),
    kind("h200", [33.5, 66.9, 494.7, 989.4, 989.4], 141, 4800.0, 3.5, ("nvlink", 450.0)),
    kind("b200", [37.0, 75.0, 1125.0, 2250.0, 2250.0], 180, 7700.0, 3.5, ("nvlink", 900.0)),
    kind("a10", [0.98, 31.2, 62.5, 125.0, 125.0], 24, 600.0, 4.0, ("pcie", 32.0)),
    kind("l4", [0.47, 30.3, 60.0, 121.0, 121.0], 24, 300.0, 4.0, ("pcie", 32.0)),
    kind("l40s", [1.43, 91.6, 183.0, 362.0, 362.0], 48, 864.0, 4.0, ("pcie", 32.0)),
    kind("t4", [0.25, 8.1, 8.1, 8.1, 65.0], 16, 320.0, 5.0, ("pcie", 16.0)),
    kind("rtx3090", [0.56, 35.6, 35.6, 71.0, 71.0], 24, 936.0, 4.0, ("pcie", 32.0)),
    kind("rtx4090", [1.29, 82.6, 82.6, 165.2, 165.2], 24, 1008.0, 3.5, ("pcie", 32.0)),
    kind("cpu", [0.06, 0.12, 0.12, 0.12, 0.12], 16, 15.0, 0.2, ("memory", 8.0)),
];

/// Finds a device type by name, ignoring case.
pub fn find(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name.eq_ignore_ascii_case(name))
}

/// A "did you mean" suffix for messages about an unknown device type.
pub fn hint(name: &str) -> String {
    suggest::hint(name, KINDS.iter().map(|kind| kind.name))
}

/// All names, comma-separated, for messages.
pub fn names() -> String {
    KINDS.iter().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

impl Kind {
    /// The device of this row.
    pub fn device(&self) -> Device {
        let [f64, f32, tf32, bf16, f16] = self.tera.map(|tera| tera * 1e12);
        let cpu = self.name == "cpu";
        Device {
            kind: self.name.to_string(),
            memory: Bytes(self.memory_gb * 1_000_000_000),
            memory_bandwidth: BytesPerSecond(self.memory_gb_per_s * 1e9),
            peak_flops: Peak { f64, f32, tf32, bf16, f16 },
            launch: Seconds(self.launch_us * 1e-6),
            // The number of cores depends on the host.
            cores: None,
            threads_per_worker: cpu.then_some(1),
        }
    }

    /// Name and bandwidth per direction of the typical link between two such devices in one server.
    pub fn link(&self) -> (&'static str, BytesPerSecond) {
        (self.link.0, BytesPerSecond(self.link.1 * 1e9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sane_and_named_once() {
        for (at, row) in KINDS.iter().enumerate() {
            assert!(KINDS[..at].iter().all(|other| other.name != row.name), "{} twice", row.name);
            let peak = row.device().peak_flops;
            assert!(peak.f64 <= peak.f32 && peak.f32 <= peak.tf32 && peak.tf32 <= peak.bf16 && peak.bf16 <= peak.f16);
        }
        assert!(find(DEFAULT_KIND).is_some());
        assert_eq!(find("H200").map(|row| row.device().memory), Some(Bytes(141_000_000_000)));
        assert!(find("h2000").is_none());
    }
}
