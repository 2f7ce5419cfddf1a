//! Table of known device types: peak arithmetic throughput, memory, and typical link.
//!
//! Figures are from vendor data sheets, dense (no structured sparsity), for the server module if there are several
//! variants. A dtype without hardware support has the f32 rate. The CPU row is one worker on one current server core
//! with AVX-512. A cluster file can override every figure.

use crate::cluster::{Bytes, BytesPerSecond, Device, Peak, Seconds};
use crate::text::suggest;

/// Device type of `--gpus` and `--levels`.
pub const DEFAULT_KIND: &str = "h100";

/// The device type of a worker on a CPU.
pub const CPU: &str = "cpu";

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
    /// Multiprocessors, and the fraction of the peak that large matrix products sustain.
    matmul: Option<(u32, f64)>,
}

const fn gpu(
    name: &'static str,
    tera: [f64; 5],
    memory: (u64, f64),
    launch_us: f64,
    link: (&'static str, f64),
    matmul: (u32, f64),
) -> Kind {
    Kind { name, tera, memory_gb: memory.0, memory_gb_per_s: memory.1, launch_us, link, matmul: Some(matmul) }
}

/// Fraction of the peak that large matrix products sustain on devices for which no figure is published.
const USUAL: f64 = 0.65;

/// Sustained fraction of the A100: its clock under load is 1,305 of 1,410 MHz (NVIDIA's HPL figures), and cuBLAS keeps
/// the tensor cores busy for 0.84 of it.
const AMPERE: f64 = 0.78;

/// Sustained fraction of the H100: at 700 W its clock under load is about 1,450 of 1,830 MHz, 0.88 of it in use.
const HOPPER: f64 = 0.70;

/// Sustained fraction of the H20: its few multiprocessors keep their clock.
const H20: f64 = 0.90;

#[rustfmt::skip]
pub const KINDS: &[Kind] = &[
    gpu("p100", [5.3, 10.6, 10.6, 10.6, 21.2], (16, 732.0), 5.0, ("nvlink", 80.0), (56, 0.85)),
    gpu("v100", [7.8, 15.7, 15.7, 15.7, 125.0], (16, 900.0), 5.0, ("nvlink", 150.0), (80, 0.72)),
    gpu("v100-32", [7.8, 15.7, 15.7, 15.7, 125.0], (32, 900.0), 5.0, ("nvlink", 150.0), (80, 0.72)),
    gpu("a100-40", [9.7, 19.5, 156.0, 312.0, 312.0], (40, 1555.0), 4.0, ("nvlink", 300.0), (108, AMPERE)),
    gpu("a100", [9.7, 19.5, 156.0, 312.0, 312.0], (80, 2039.0), 4.0, ("nvlink", 300.0), (108, AMPERE)),
    gpu("a800", [9.7, 19.5, 156.0, 312.0, 312.0], (80, 2039.0), 4.0, ("nvlink", 200.0), (108, AMPERE)),
    gpu("h100", [33.5, 66.9, 494.7, 989.4, 989.4], (80, 3350.0), 3.5, ("nvlink", 450.0), (132, HOPPER)),
    gpu("h100-pcie", [25.6, 51.2, 378.0, 756.0, 756.0], (80, 2000.0), 3.5, ("pcie", 64.0), (114, USUAL)),
    gpu("h200", [33.5, 66.9, 494.7, 989.4, 989.4], (141, 4800.0), 3.5, ("nvlink", 450.0), (132, HOPPER)),
    gpu("h800", [0.99, 66.9, 494.7, 989.4, 989.4], (80, 3350.0), 3.5, ("nvlink", 200.0), (132, HOPPER)),
    gpu("h20", [0.99, 44.0, 74.0, 148.0, 148.0], (96, 4000.0), 3.5, ("nvlink", 450.0), (78, H20)),
    gpu("b200", [37.0, 75.0, 1125.0, 2250.0, 2250.0], (180, 7700.0), 3.5, ("nvlink", 900.0), (148, HOPPER)),
    gpu("gb200", [40.0, 80.0, 1250.0, 2500.0, 2500.0], (186, 8000.0), 3.5, ("nvlink", 900.0), (148, HOPPER)),
    gpu("b300", [1.25, 75.0, 1125.0, 2250.0, 2250.0], (288, 8000.0), 3.5, ("nvlink", 900.0), (148, HOPPER)),
    gpu("gb300", [1.3, 80.0, 1250.0, 2500.0, 2500.0], (288, 8000.0), 3.5, ("nvlink", 900.0), (152, HOPPER)),
    // One of the two dies of the module, as frameworks see it.
    gpu("mi250x", [23.9, 23.9, 23.9, 191.5, 191.5], (64, 1638.0), 5.0, ("xgmi", 200.0), (110, USUAL)),
    gpu("mi300x", [81.7, 163.4, 653.7, 1307.4, 1307.4], (192, 5300.0), 5.0, ("xgmi", 448.0), (304, 0.5)),
    gpu("mi325x", [81.7, 163.4, 653.7, 1307.4, 1307.4], (256, 6000.0), 5.0, ("xgmi", 448.0), (304, 0.5)),
    // Without xf32.
    gpu("mi355x", [78.6, 157.3, 157.3, 2516.6, 2516.6], (288, 8000.0), 5.0, ("xgmi", 538.0), (256, 0.5)),
    gpu("a10", [0.98, 31.2, 62.5, 125.0, 125.0], (24, 600.0), 4.0, ("pcie", 32.0), (72, USUAL)),
    gpu("l4", [0.47, 30.3, 60.0, 121.0, 121.0], (24, 300.0), 4.0, ("pcie", 32.0), (58, USUAL)),
    gpu("l40s", [1.43, 91.6, 183.0, 362.0, 362.0], (48, 864.0), 4.0, ("pcie", 32.0), (142, USUAL)),
    gpu("t4", [0.25, 8.1, 8.1, 8.1, 65.0], (16, 320.0), 5.0, ("pcie", 16.0), (40, USUAL)),
    gpu("rtx3090", [0.56, 35.6, 35.6, 71.0, 71.0], (24, 936.0), 4.0, ("pcie", 32.0), (82, USUAL)),
    gpu("rtx4090", [1.29, 82.6, 82.6, 165.2, 165.2], (24, 1008.0), 3.5, ("pcie", 32.0), (128, USUAL)),
    gpu("rtx5090", [1.64, 104.8, 104.8, 209.5, 209.5], (32, 1792.0), 3.5, ("pcie", 64.0), (170, USUAL)),
    Kind {
        name: CPU, tera: [0.06, 0.12, 0.12, 0.12, 0.12], memory_gb: 16, memory_gb_per_s: 15.0, launch_us: 0.2,
        link: ("memory", 8.0), matmul: None,
    },
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

impl Device {
    /// True for a worker on a CPU: its type, cores or threads say so.
    pub fn is_cpu(&self) -> bool {
        self.kind == CPU || self.cores.is_some() || self.threads_per_worker.is_some()
    }
}

impl Kind {
    pub fn device(&self) -> Device {
        let [f64, f32, tf32, bf16, f16] = self.tera.map(|tera| tera * 1e12);
        let cpu = self.name == CPU;
        Device {
            kind: self.name.to_string(),
            memory: Bytes(self.memory_gb * 1_000_000_000),
            memory_bandwidth: BytesPerSecond(self.memory_gb_per_s * 1e9),
            peak_flops: Peak { f64, f32, tf32, bf16, f16 },
            launch: Seconds(self.launch_us * 1e-6),
            multiprocessors: self.matmul.map(|(count, _)| count),
            matmul_efficiency: self.matmul.map(|(_, fraction)| fraction),
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
