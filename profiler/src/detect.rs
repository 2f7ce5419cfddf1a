//! Describes this machine's devices as a cluster: its GPUs if the driver reports any, else its CPU cores.

use crate::machine;
use compiler::cluster::device::{KINDS, Kind, find};
use compiler::cluster::read::{ClusterError, check};
use compiler::cluster::{Bytes, BytesPerSecond, Cluster, Device, DeviceClass, Level, Seconds};
use runtime::device::cuda::gpu::{Gpu, GpuError, GpuInfo, count, is_joined};
use thiserror::Error;

/// One direction of a PCIe 4.0 x16 slot, in bytes per second.
const PCIE: f64 = 32e9;

/// Latency of a message between two GPUs, in seconds.
const LATENCY: f64 = 5e-6;

/// Driver names and device types. The first match counts; among types that differ only in memory, the nearest.
const NAMES: &[(&str, &str)] = &[
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100", "a100"),
    ("V100", "v100"),
    ("L40S", "l40s"),
    ("A10", "a10"),
    ("L4", "l4"),
    ("T4", "t4"),
    ("RTX 4090", "rtx4090"),
    ("RTX 3090", "rtx3090"),
];

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum DetectError {
    #[error("GPU {ordinal} is a `{name}`, which pipec does not know")]
    Unknown { ordinal: usize, name: String },
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// This machine's GPUs in driver order, or the error of opening each.
pub fn gpus() -> Vec<Result<GpuInfo, GpuError>> {
    (0..count()).map(|ordinal| Ok(Gpu::open(ordinal)?.info().clone())).collect()
}

/// The GPUs as a cluster; without GPUs, `workers` workers on this CPU.
pub fn cluster(gpus: &[GpuInfo], workers: u32) -> Result<Cluster, DetectError> {
    let Some(first) = gpus.first() else { return Ok(machine::cluster_of_this_cpu(workers)?) };
    let known_link = kind(&first.name, first.memory as u64).map(Kind::link);
    let is_joined = gpus.len() > 1 && gpus.iter().all(|a| gpus.iter().all(|b| is_joined(a.ordinal, b.ordinal)));
    let (name, bandwidth) = known_link.filter(|_| is_joined).unwrap_or(("pcie", BytesPerSecond(PCIE)));
    gpu_cluster(gpus, name, bandwidth)
}

fn gpu_cluster(gpus: &[GpuInfo], name: &str, bandwidth: BytesPerSecond) -> Result<Cluster, DetectError> {
    let mut classes: Vec<DeviceClass> = Vec::new();
    for gpu in gpus {
        let device = device(gpu)?;
        match classes.last_mut().filter(|class| class.device == device) {
            Some(class) => class.count += 1,
            None => classes.push(DeviceClass { device, count: 1, speed: None }),
        }
    }
    let device = classes.first().map(|class| class.device.clone()).ok_or(ClusterError::NoLevel)?;
    if classes.len() == 1 {
        classes.clear();
    }
    let count = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let level = Level { name: name.to_string(), count, bandwidth, latency: Seconds(LATENCY), shared: false };
    Ok(check(Cluster { device, classes, levels: vec![level], hosts: Vec::new() })?)
}

/// The device type of a GPU, with the memory that it reports.
fn device(gpu: &GpuInfo) -> Result<Device, DetectError> {
    let unknown = || DetectError::Unknown { ordinal: gpu.ordinal, name: gpu.name.clone() };
    let kind = kind(&gpu.name, gpu.memory as u64).ok_or_else(unknown)?;
    Ok(Device { memory: Bytes(gpu.memory as u64), ..kind.device() })
}

/// The device type with this name and memory.
pub fn kind(name: &str, memory: u64) -> Option<&'static Kind> {
    let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let has_name = |wanted: &str| {
        let wanted: Vec<&str> = wanted.split(' ').collect();
        words.windows(wanted.len()).any(|window| {
            let is_same = |(word, wanted): (&&str, &&str)| word.strip_prefix(wanted).is_some_and(is_variant);
            window.iter().zip(&wanted).all(is_same)
        })
    };
    // MIG partitions and mobile GPUs are slower than the type of the same name.
    if ["MIG", "Laptop", "Mobile"].into_iter().any(|word| words.contains(&word)) {
        return None;
    }
    let (_, family) = NAMES.iter().find(|(wanted, _)| has_name(wanted))?;
    let distance = |kind: &&&Kind| kind.device().memory.0.abs_diff(memory);
    let is_family =
        |kind: &&Kind| kind.name == *family || kind.name.strip_prefix(family).is_some_and(|rest| rest.starts_with('-'));
    KINDS.iter().filter(is_family).min_by_key(|kind| distance(&kind)).or_else(|| find(family))
}

/// Checks the rest of a word after the device type: empty, or a version letter as in `A10G`.
fn is_variant(rest: &str) -> bool {
    rest.len() <= 1 && rest.chars().all(|c| c == 'G')
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::device::cuda::compile::Architecture;

    fn card(ordinal: usize, name: &str, gigabytes: f64) -> GpuInfo {
        let memory = (gigabytes * 1e9) as usize;
        GpuInfo {
            ordinal,
            name: name.to_string(),
            architecture: Architecture { major: 9, minor: 0 },
            memory,
            driver: 13000,
            cache: 50 << 20,
        }
    }

    #[test]
    fn cards_are_known_by_their_names() {
        for (name, gigabytes, wanted) in [
            ("NVIDIA H100 80GB HBM3", 85.0, Some("h100")),
            ("NVIDIA H200", 150.7, Some("h200")),
            ("NVIDIA A100-SXM4-40GB", 42.4, Some("a100-40")),
            ("NVIDIA A100 80GB PCIe", 85.1, Some("a100")),
            ("Tesla V100-SXM2-16GB", 16.9, Some("v100")),
            ("Tesla V100-SXM2-32GB", 34.1, Some("v100-32")),
            ("NVIDIA A10G", 23.7, Some("a10")),
            ("NVIDIA L4", 23.6, Some("l4")),
            ("NVIDIA L40S", 47.8, Some("l40s")),
            ("Tesla T4", 15.8, Some("t4")),
            ("NVIDIA GeForce RTX 4090", 25.4, Some("rtx4090")),
            ("NVIDIA GeForce GTX 1080", 8.5, None),
            ("NVIDIA L40", 47.8, None),
            ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5.0, None),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, None),
            ("NVIDIA A1000", 8.0, None),
            ("", 8.0, None),
        ] {
            assert_eq!(kind(name, (gigabytes * 1e9) as u64).map(|kind| kind.name), wanted, "{name}");
        }
    }

    #[test]
    fn cards_of_several_kinds_are_classes() {
        let same_kind = [card(0, "NVIDIA H200", 150.0), card(1, "NVIDIA H200", 150.0)];
        let cluster = gpu_cluster(&same_kind, "nvlink", BytesPerSecond(450e9)).unwrap();
        assert_eq!((cluster.devices(), cluster.classes.len()), (2, 0));
        assert_eq!((cluster.device.kind.as_str(), cluster.device.memory), ("h200", Bytes(150_000_000_000)));
        let mixed = [same_kind[0].clone(), card(1, "Tesla T4", 15.8), card(2, "Tesla T4", 15.8)];
        let cluster = gpu_cluster(&mixed, "pcie", BytesPerSecond(PCIE)).unwrap();
        assert_eq!(cluster.classes.iter().map(|class| class.count).collect::<Vec<_>>(), [1, 2]);
        let unknown = [card(0, "Quadro", 8.0)];
        assert!(gpu_cluster(&unknown, "pcie", BytesPerSecond(PCIE)).unwrap_err().to_string().contains("Quadro"));
        assert_eq!(super::cluster(&[], 3).unwrap().devices(), 3);
    }
}
