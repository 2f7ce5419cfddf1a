//! The devices of a request.

use crate::error::Error;
use crate::files::input;
use crate::help;
use compiler::cluster::device::{KINDS, Kind, find, hint, names};
use compiler::cluster::{Bytes, BytesPerSecond, Cluster, Device, Peak, Seconds, class, read};
use compiler::plan::PlannedCluster;
use compiler::profile::{OpProfile, Profile};
use compiler::text::name::short_name;
use profiler::machine;
use std::path::{Path, PathBuf};

use compiler::text::quantity;

pub mod torch_links;

/// Maximum size of a cluster file in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// A description of devices: a count on one link, interconnect levels, or a cluster file.
#[derive(Clone, Debug, Default)]
pub struct ClusterRequest {
    /// The number of devices on one link.
    pub gpus: Option<u32>,
    /// The bandwidth of that link per device and direction.
    pub bandwidth: Option<BytesPerSecond>,
    /// Interconnect levels, innermost first: `8:450GB/s,2:50GB/s`.
    pub levels: Option<String>,
    pub file: Option<PathBuf>,
}

/// The requested cluster; devices without a name are of `kind`.
pub fn cluster(devices: &ClusterRequest, kind: Option<&'static Kind>) -> Result<Cluster, Error> {
    let mut cluster = match devices {
        ClusterRequest { file: Some(path), .. } => {
            let text = input::text(path, MOST_BYTES)?;
            return from_toml(&text, path);
        }
        ClusterRequest { gpus: Some(count), bandwidth, .. } => {
            let default = kind.map(|kind| kind.link().1);
            read::gpus(*count, bandwidth.or(default)).map_err(|error| {
                Error::input("cannot use `--gpus`")
                    .because(error)
                    .with_help("`--gpus 8` means eight devices on one link")
            })?
        }
        ClusterRequest { levels: Some(text), .. } => read::levels(text).map_err(|error| {
            let help = "`--levels 8:450GB/s,2:50GB/s` means two servers of eight devices each";
            Error::input("cannot read `--levels`").because(error).with_help(help)
        })?,
        ClusterRequest { .. } => {
            return Err(Error::input("no devices specified").with_help(
                "describe them with `--gpus 4`, `--levels 8:450GB/s,2:50GB/s` or `--cluster cluster.toml`",
            ));
        }
    };
    if let Some(kind) = kind {
        cluster.device = kind.device();
        if let (Some(_), None, [level]) = (devices.gpus, &devices.bandwidth, &mut cluster.levels[..]) {
            level.name = kind.link().0.to_string();
        }
    }
    Ok(cluster)
}

/// The cluster of a file's text.
pub fn from_toml(text: &str, path: &Path) -> Result<Cluster, Error> {
    read::from_toml(text).map_err(|error| {
        let why = input::other_file(text, "cluster").unwrap_or_else(|| error.to_string());
        Error::file("read the cluster", path, why).with_help(help::cluster(&error))
    })
}

/// Sets the relative speeds of device classes without one, against the device whose costs are used.
pub fn set_relative_speeds(cluster: &mut Cluster, costs_of: &str, dtype: &str) {
    let own_device = cluster.device.clone();
    let reference = find(costs_of).map(Kind::device).or_else(|| (own_device.kind == costs_of).then_some(own_device));
    if let Some(reference) = reference {
        class::relate(&mut cluster.classes, &reference, dtype);
    }
}

/// The GPU type with the longest name in "NVIDIA H100 80GB HBM3" and the like.
pub fn gpu_of(name: &str) -> Option<&'static Kind> {
    let name = name.to_lowercase().replace(' ', "");
    let gpus = KINDS.iter().filter(|kind| kind.name != "cpu" && name.contains(kind.name));
    gpus.max_by_key(|kind| kind.name.len())
}

/// The device type called `name`.
pub fn kind(name: &str) -> Result<&'static Kind, Error> {
    find(name).ok_or_else(|| {
        let why = format!("known: {}{}", names(), hint(name));
        let help = "describe other device types in a cluster file (`pipec schema cluster` prints its fields)";
        Error::input(format!("unknown device type `{name}`")).because(why).with_help(help)
    })
}

/// The requested cluster, of the profiled devices.
pub fn cluster_of(devices: &ClusterRequest, profile: &Profile) -> Result<Cluster, Error> {
    let kind = find(&profile.device.name);
    if devices.file.is_some() || kind.is_some() {
        return cluster(devices, kind);
    }
    if profile.device.is_gpu() {
        return Ok(Cluster { device: measured_gpu(profile), ..cluster(devices, None)? });
    }
    // The cores of a CPU are known only if the profile was made on this one.
    let mut cluster = cluster(devices, find("cpu"))?;
    let workers = cluster.devices();
    if profile.device.name == machine::this_cpu().name {
        let this_machine = machine::cluster_of_this_cpu(workers)
            .map_err(|error| Error::input("cannot use this CPU").because(error))?;
        cluster.device = this_machine.device;
        if let (None, [level], [link]) = (&devices.bandwidth, &mut cluster.levels[..], &this_machine.levels[..])
            && devices.gpus.is_some()
        {
            *level = link.clone();
        }
    } else {
        cluster.device.memory = Bytes(profile.device.memory_bytes / u64::from(workers.max(1)));
    }
    Ok(cluster)
}

/// A GPU that the table of device types does not have: it has the highest rates of its measured ops, for all types.
fn measured_gpu(profile: &Profile) -> Device {
    let rate = |amount: fn(&OpProfile) -> u64| {
        let rates = profile.ops.iter().filter(|op| op.fwd_us > 0.0).map(|op| amount(op) as f64 * 1e6 / op.fwd_us);
        rates.fold(1.0, f64::max)
    };
    let flops = rate(|op| op.flops);
    // An op reads at least its parameters and as much as it writes.
    let bytes = rate(|op| op.param_bytes.saturating_add(op.out_bytes.saturating_mul(2)));
    Device {
        kind: profile.device.name.clone(),
        memory: Bytes(profile.device.memory_bytes),
        memory_bandwidth: BytesPerSecond(bytes),
        peak_flops: Peak { f64: flops, f32: flops, tf32: flops, bf16: flops, f16: flops },
        // Measured times have it.
        launch: Seconds(0.0),
        multiprocessors: None,
        matmul_efficiency: None,
        cores: None,
        threads_per_worker: None,
    }
}

/// The devices of a plan.
pub fn planned(planned: &PlannedCluster) -> Cluster {
    let PlannedCluster { device, classes, levels, .. } = planned.clone();
    Cluster { device, classes, levels, hosts: Vec::new() }
}

/// The cluster of a plan in one line.
pub fn describe(cluster: &PlannedCluster) -> String {
    in_one_line(&planned(cluster))
}

/// A cluster in one line: `16 x h100 (8 on nvlink at 450 GB/s, 2 on ib at 50 GB/s)`.
pub fn in_one_line(cluster: &Cluster) -> String {
    let level = |level: &compiler::cluster::Level| {
        format!("{} on {} at {}", level.count, level.name, quantity::rate(level.bandwidth.0))
    };
    let levels: Vec<String> = cluster.levels.iter().map(level).collect();
    let of_kind = |count: u32, kind: &str| format!("{count} x {}", short_name(kind));
    let devices = match cluster.classes.is_empty() {
        true => of_kind(cluster.devices(), &cluster.device.kind),
        false => {
            cluster.classes.iter().map(|class| of_kind(class.count, &class.device.kind)).collect::<Vec<_>>().join(" + ")
        }
    };
    format!("{devices} ({})", levels.join(", "))
}
