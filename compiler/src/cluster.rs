//! The machines of a plan: one or several device classes, and interconnect levels.
//!
//! Levels are listed innermost first: for example 8 devices on NVLink, then 16 servers on a network. The bandwidth of a
//! level is full duplex and per direction, for one device (innermost level) or one group of the level below.
//!
//! ```toml
//! schema = "pipec.cluster/1"
//! [device]
//! kind = "h200"
//! [[level]]
//! name = "nvlink"
//! count = 8
//! bandwidth = "450GB/s"
//! latency = "3us"
//! ```
//!
//! Several device classes are `[[device]]` tables in device order, each with a `count`. `speed` is relative to the
//! profiled device and required if it cannot be derived from the device types.
//!
//! `read` parses the file and the short forms of the command line; `write` prints the file. `device` is the table of
//! known device types, `class` aggregates device classes, `unit` parses and prints quantities.

pub mod class;
pub mod device;
pub mod read;
pub mod unit;
pub mod write;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Value of the `schema` field of a cluster file.
pub const SCHEMA: &str = "pipec.cluster/1";

/// Largest number of devices; keeps the product of level counts exact.
pub const MAX_DEVICES: u64 = 65_536;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A transfer rate in bytes per second, finite and positive.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct BytesPerSecond(pub f64);

/// A duration in seconds, finite and not negative.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Default, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Seconds(pub f64);

/// Peak dense floating-point operations per second of one device, by element type.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Peak {
    /// Double precision.
    pub f64: f64,
    /// Single precision without reduced inputs.
    pub f32: f64,
    /// Single precision with inputs rounded to TF32; equal to `f32` if the device has no such mode.
    pub tf32: f64,
    /// bfloat16 with f32 accumulation.
    pub bf16: f64,
    /// half precision with f32 accumulation.
    pub f16: f64,
}

/// Compute and memory of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Device type: a known name or a custom one.
    pub kind: String,
    /// Memory of one device, in bytes.
    pub memory: Bytes,
    /// Memory bandwidth, in bytes per second.
    pub memory_bandwidth: BytesPerSecond,
    /// Peak operations per second.
    pub peak_flops: Peak,
    /// Time to start one kernel, in seconds.
    pub launch: Seconds,
    /// Multiprocessors (compute units), each of which computes one tile of a matrix product at a time; for GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiprocessors: Option<u32>,
    /// Fraction of the peak that a large matrix product sustains; for GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_efficiency: Option<f64>,
    /// Cores of one host, shared by its workers; for CPU devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<u32>,
    /// Kernel threads per worker; for CPU devices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads_per_worker: Option<u32>,
}

/// Consecutive devices of one type in a heterogeneous cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceClass {
    /// The device type.
    pub device: Device,
    /// Number of devices; at least one.
    pub count: u32,
    /// Speed relative to the device whose costs are used; absent if neither the file nor the device types give it.
    pub speed: Option<f64>,
}

/// One interconnect level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Name of the level, for example "nvlink".
    pub name: String,
    /// Number of devices (innermost level) or of groups of the level below that it connects; at least one.
    pub count: u32,
    /// Bandwidth in bytes per second, one direction.
    pub bandwidth: BytesPerSecond,
    /// Latency of one message, in seconds.
    pub latency: Seconds,
    /// True if all devices below one member of this level share its link.
    pub shared: bool,
}

/// A host that serves devices over the network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// `name:port` for connections between processes.
    pub address: String,
    /// Devices on this host.
    pub devices: u32,
}

/// The devices of a run and the links between them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// The device type, or the first of several.
    pub device: Device,
    /// Device classes in device order; empty if all devices are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<DeviceClass>,
    /// Links, innermost first; never empty.
    pub levels: Vec<Level>,
    /// Hosts of multi-process runs; empty for one process.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<Host>,
}

impl Cluster {
    /// Number of devices: the product of the level counts.
    pub fn devices(&self) -> u32 {
        self.levels.iter().fold(1u32, |product, level| product.saturating_mul(level.count))
    }

    /// Returns whether there are several device classes.
    pub fn is_mixed(&self) -> bool {
        !self.classes.is_empty()
    }

    /// Merges all levels into one with the lowest bandwidth and the highest latency. Cost models that require whole
    /// groups use it for plans whose stages do not fill whole groups.
    pub fn flattened(&self) -> Cluster {
        let slowest = self.levels.iter().map(|level| level.bandwidth.0).fold(f64::INFINITY, f64::min);
        let latency = self.levels.iter().map(|level| level.latency.0).fold(0.0, f64::max);
        let name = self.levels.iter().map(|level| level.name.as_str()).collect::<Vec<_>>().join("+");
        let shared = self.levels.iter().any(|level| level.shared);
        let level = Level {
            name,
            count: self.devices(),
            bandwidth: BytesPerSecond(slowest),
            latency: Seconds(latency),
            shared,
        };
        Cluster { levels: vec![level], ..self.clone() }
    }
}
