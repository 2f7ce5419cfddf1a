//! This machine: its CPU, its memory, and the cluster of workers on its cores.

use crate::detect;
use compiler::cluster::device::find;
use compiler::cluster::read::{ClusterError, check};
use compiler::cluster::{Bytes, BytesPerSecond, Cluster, Level, Seconds};
use compiler::profile::ProfiledDevice;
use runtime::device::api::{Device, DeviceInfo};
use runtime::device::host_memory;
use std::hint::black_box;
use std::sync::mpsc::channel;
use std::time::Instant;

/// Last-level cache size if the system does not report it, in bytes.
const USUAL_CACHE: usize = 32 << 20;

/// Upper limit of the cache size, for machines that report the sum of all caches.
const MOST_CACHE: usize = 128 << 20;

const COPIED: usize = 64 << 20;

/// Round trips to measure latency.
const MESSAGES: u32 = 2000;

/// A device as profiles name it: a GPU of a known type by the name of the type.
pub fn profiled_device(device: &dyn Device) -> ProfiledDevice {
    let DeviceInfo { model, driver, memory, .. } = device.info();
    let Some(memory_bytes) = *memory else { return this_cpu() };
    let name = detect::kind(model, memory_bytes).map_or(model.as_str(), |kind| kind.name).to_string();
    ProfiledDevice { name, driver: format!("{driver}, pipec {}", env!("CARGO_PKG_VERSION")), memory_bytes }
}

pub fn this_cpu() -> ProfiledDevice {
    ProfiledDevice {
        name: name(),
        driver: format!("pipec {} {}", env!("CARGO_PKG_VERSION"), vector_instructions()),
        memory_bytes: memory_bytes(),
    }
}

fn name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_string());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "cpu".to_string())
}

/// The widest vector instruction set that kernels use on this CPU.
fn vector_instructions() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if std::arch::is_x86_feature_detected!("avx512f") {
            return "avx512";
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return "avx2";
        }
        "sse2"
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        std::env::consts::ARCH
    }
}

/// Total memory in bytes; 0 if unknown.
pub fn memory_bytes() -> u64 {
    host_memory::total().unwrap_or(0)
}

/// Memory in bytes that this process can use; `u64::MAX` if unknown.
pub fn available_bytes() -> u64 {
    host_memory::available().unwrap_or(u64::MAX)
}

/// Memory in bytes that processes of this machine can use together; `u64::MAX` if unknown.
pub fn available_to_all() -> u64 {
    host_memory::available_to_all().unwrap_or(u64::MAX)
}

/// Size of the largest cache of CPU 0, in bytes.
pub fn cache_bytes() -> usize {
    let sizes = (0..8).filter_map(|i| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{i}/size");
        let text = std::fs::read_to_string(path).ok()?;
        let text = text.trim();
        let (digits, unit) = match text.as_bytes().last()? {
            b'K' => (&text[..text.len() - 1], 1 << 10),
            b'M' => (&text[..text.len() - 1], 1 << 20),
            _ => (text, 1),
        };
        digits.parse::<usize>().ok()?.checked_mul(unit)
    });
    sizes.max().filter(|size| *size > 0).unwrap_or(USUAL_CACHE).min(MOST_CACHE)
}

/// A cluster of `workers` workers with one thread each, sharing this machine's cores and memory.
///
/// Messages within a process pass references: latency is the time to wake the receiver, and the bytes go through memory
/// when the receiver reads them. Except for cores and memory, the values come from the device table and are equal on
/// every run; [`measure_links`] replaces them by measurements.
pub fn cluster_of_this_cpu(workers: u32) -> Result<Cluster, ClusterError> {
    let kind = find("cpu").ok_or_else(|| ClusterError::Kind { kind: "cpu".to_string() })?;
    let (name, bandwidth) = kind.link();
    let mut device = kind.device();
    device.cores = Some(std::thread::available_parallelism().map_or(1, |n| n.get() as u32));
    device.threads_per_worker = Some(1);
    let share = memory_bytes() / u64::from(workers.max(1));
    if share > 0 {
        device.memory = Bytes(share);
    }
    let level = Level { name: name.to_string(), count: workers, bandwidth, latency: Seconds(5e-6), shared: false };
    check(Cluster { device, classes: Vec::new(), levels: vec![level], hosts: Vec::new() })
}

/// Measures memory copy bandwidth, an upper bound of the cost of reading another worker's tensor, and half of a thread
/// round trip as latency. Takes a fraction of a second.
pub fn measure_links(cluster: &mut Cluster) {
    let bandwidth = copy_bandwidth();
    let latency = message_latency();
    for level in &mut cluster.levels {
        if let Some(bandwidth) = bandwidth {
            level.bandwidth = BytesPerSecond(bandwidth);
        }
        if let Some(latency) = latency {
            level.latency = Seconds(latency);
        }
    }
    if let Some(bandwidth) = bandwidth {
        // A copy reads and writes every byte.
        cluster.device.memory_bandwidth = BytesPerSecond(2.0 * bandwidth);
    }
}

fn copy_bandwidth() -> Option<f64> {
    let from = vec![1u8; COPIED];
    let mut to = vec![0u8; COPIED];
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        best = best.min(start.elapsed().as_secs_f64());
    }
    (best > 0.0).then(|| COPIED as f64 / best)
}

fn message_latency() -> Option<f64> {
    let (sender, receiver) = channel::<u32>();
    let (reply_sender, replies) = channel::<u32>();
    let thread = std::thread::Builder::new().spawn(move || {
        while let Ok(message) = receiver.recv() {
            if reply_sender.send(message).is_err() {
                break;
            }
        }
    });
    let thread = thread.ok()?;
    let start = Instant::now();
    for message in 0..MESSAGES {
        sender.send(message).ok()?;
        replies.recv().ok()?;
    }
    let seconds = start.elapsed().as_secs_f64() / f64::from(2 * MESSAGES);
    drop(sender);
    thread.join().ok()?;
    Some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cluster_is_sound_before_and_after_links_are_measured() {
        assert!(cluster_of_this_cpu(0).is_err());
        let mut cluster = cluster_of_this_cpu(3).unwrap();
        assert_eq!(cluster, cluster_of_this_cpu(3).unwrap());
        assert_eq!((cluster.devices(), cluster.device.threads_per_worker), (3, Some(1)));
        measure_links(&mut cluster);
        let level = &cluster.levels[0];
        assert!(level.bandwidth.0 > 1e8 && level.latency.0 > 0.0 && level.latency.0 < 1.0, "{level:?}");
        check(cluster).unwrap();
    }

    #[test]
    fn this_machine_has_a_name_and_a_cache() {
        assert!(!this_cpu().name.is_empty());
        assert!(this_cpu().driver.starts_with("pipec "));
        assert!((1 << 10..=MOST_CACHE).contains(&cache_bytes()));
    }
}
