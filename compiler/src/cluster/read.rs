//! Parses cluster files and the short forms of the command line into a [`Cluster`].
//!
//! All inputs pass [`check`]: a cluster has at least one level and one device, and an exact device count.

use crate::cluster::device::{self, DEFAULT_KIND};
use crate::cluster::unit::{self, UnitError};
use crate::cluster::{BytesPerSecond, Cluster, Device, DeviceClass, Host, Level, MAX_DEVICES, SCHEMA, Seconds};
use crate::text::{Format, plainly};
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Range of `speed`, relative to the profiled device.
const MIN_SPEED: f64 = 1e-6;
const MAX_SPEED: f64 = 1e6;

/// Reasons why a cluster is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// Invalid TOML, unknown key or wrong type; the message gives the line.
    #[error("{0}")]
    Toml(String),
    /// Unsupported schema version.
    #[error("schema is `{found}`, expected `{SCHEMA}`")]
    Schema { found: String },
    /// Invalid quantity.
    #[error("{key}: {error}")]
    Unit {
        /// For example "level `ib`: bandwidth".
        key: String,
        error: UnitError,
    },
    /// Unknown device type without all the figures that it would need.
    #[error(
        "unknown device type `{kind}` (known: {}){}; a custom type must set memory, memory_bandwidth and peak_flops",
        device::names(),
        device::hint(kind)
    )]
    Kind { kind: String },
    #[error("a cluster needs at least one level, for example `4:10GB/s`")]
    NoLevel,
    /// A level with a count of 0.
    #[error("level {level} has count 0; it must be at least 1")]
    Empty {
        /// Index, innermost first.
        level: usize,
    },
    /// Two levels of one name.
    #[error("two levels are named `{}`; give each its own name", name.escape_debug())]
    Twice { name: String },
    /// More than `MAX_DEVICES` devices.
    #[error("the level counts multiply to more than {MAX_DEVICES} devices")]
    TooMany,
    /// The host devices do not add up to the number of devices.
    #[error("the hosts have {hosts} devices, but the levels describe {levels}")]
    Hosts { hosts: u64, levels: u32 },
    /// The device classes do not add up to the number of devices.
    #[error("the device classes have {classes} devices in total, but the levels describe {levels}")]
    Classes { classes: u64, levels: u32 },
    /// `count` or `speed` on a single device table, or several tables without a `count`.
    #[error("{place}: {what}")]
    Class { place: String, what: &'static str },
    /// Speed out of range.
    #[error("{place}: speed is {value}; it must be from 1e-6 to 1e6, relative to the device whose costs are used")]
    Speed { place: String, value: f64 },
    /// `--levels` text that is not `COUNT:BANDWIDTH,…`.
    #[error("`{text}` is not a level; write COUNT:BANDWIDTH, innermost first, for example `4:10GB/s,4:1.25GB/s`")]
    LevelText { text: String },
    #[error("{key} is {value}; it must be from 0.01 to 1")]
    Fraction { key: String, value: f64 },
    /// A figure that is not finite and positive.
    #[error("{key} must be finite and positive, found {value}")]
    Figure { key: String, value: f64 },
}

/// Name of a link that is only known by its bandwidth.
pub const LINK: &str = "link";

/// `count` devices of the default type on one level, with the given bandwidth or that of the typical link.
pub fn gpus(count: u32, bandwidth: Option<BytesPerSecond>) -> Result<Cluster, ClusterError> {
    let kind = device::find(DEFAULT_KIND).ok_or_else(|| ClusterError::Kind { kind: DEFAULT_KIND.to_string() })?;
    let (name, default_bandwidth) = kind.link();
    let level = Level {
        name: if bandwidth.is_some() { LINK } else { name }.to_string(),
        count,
        bandwidth: bandwidth.unwrap_or(default_bandwidth),
        latency: Seconds(0.0),
        shared: false,
    };
    check(Cluster { device: kind.device(), classes: Vec::new(), levels: vec![level], hosts: Vec::new() })
}

/// Parses `4:10GB/s,4:1.25GB/s` (innermost first), with the default device type.
pub fn levels(text: &str) -> Result<Cluster, ClusterError> {
    let kind = device::find(DEFAULT_KIND).ok_or_else(|| ClusterError::Kind { kind: DEFAULT_KIND.to_string() })?;
    let mut levels = Vec::new();
    for (at, part) in text.split(',').enumerate() {
        let invalid = || ClusterError::LevelText { text: part.chars().take(40).filter(|c| !c.is_control()).collect() };
        let (count, bandwidth) = part.split_once(':').ok_or_else(invalid)?;
        let count: u32 = count.trim().parse().map_err(|_| invalid())?;
        let bandwidth = unit::bandwidth(bandwidth)
            .map_err(|error| ClusterError::Unit { key: format!("level {at} of `--levels`"), error })?;
        levels.push(Level { name: format!("level{at}"), count, bandwidth, latency: Seconds(0.0), shared: false });
    }
    check(Cluster { device: kind.device(), classes: Vec::new(), levels, hosts: Vec::new() })
}

/// Parses a cluster file with schema `pipec.cluster/1`.
pub fn from_toml(text: &str) -> Result<Cluster, ClusterError> {
    let file: File = toml::from_str(text)
        .map_err(|error| ClusterError::Toml(plainly(error.to_string().trim_end(), Format::Toml)))?;
    if file.schema != SCHEMA {
        let found = file.schema.chars().take(40).filter(|c| !c.is_control()).collect();
        return Err(ClusterError::Schema { found });
    }
    let (device, classes) = devices_of(file.device)?;
    let mut levels = Vec::new();
    for (at, level) in file.level.into_iter().enumerate() {
        let name = level.name.unwrap_or_else(|| format!("level{at}"));
        let key = |what: &str| format!("level `{}`: {what}", name.escape_debug());
        let bandwidth =
            unit::bandwidth(&level.bandwidth.0).map_err(|error| ClusterError::Unit { key: key("bandwidth"), error })?;
        let latency = match &level.latency {
            Some(text) => unit::seconds(&text.0).map_err(|error| ClusterError::Unit { key: key("latency"), error })?,
            None => Seconds(0.0),
        };
        levels.push(Level { name, count: level.count, bandwidth, latency, shared: level.shared });
    }
    let hosts = file.host.into_iter().map(|host| Host { address: host.address, devices: host.devices }).collect();
    let mut cluster = check(Cluster { device, classes, levels, hosts })?;
    // A single class without a speed is a homogeneous cluster.
    if matches!(&cluster.classes[..], [only] if only.speed.is_none()) {
        cluster.classes.clear();
    }
    Ok(cluster)
}

/// JSON Schema of the cluster file, for editors.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(File).to_value()
}

/// Validates a cluster from any source.
pub fn check(cluster: Cluster) -> Result<Cluster, ClusterError> {
    if cluster.levels.is_empty() {
        return Err(ClusterError::NoLevel);
    }
    let mut devices: u64 = 1;
    for (at, level) in cluster.levels.iter().enumerate() {
        if level.count == 0 {
            return Err(ClusterError::Empty { level: at });
        }
        if cluster.levels[..at].iter().any(|other| other.name == level.name) {
            return Err(ClusterError::Twice { name: level.name.clone() });
        }
        devices = devices.saturating_mul(u64::from(level.count));
        if devices > MAX_DEVICES {
            return Err(ClusterError::TooMany);
        }
        positive(&format!("level `{}`: bandwidth", level.name.escape_debug()), level.bandwidth.0)?;
    }
    figures("device", &cluster.device)?;
    for (at, class) in cluster.classes.iter().enumerate() {
        figures(&format!("device[{at}]"), &class.device)?;
        if class.count == 0 {
            return Err(ClusterError::Class {
                place: format!("device[{at}]"),
                what: "a class has at least one device",
            });
        }
        if let Some(value) = class.speed.filter(|speed| !(MIN_SPEED..=MAX_SPEED).contains(speed)) {
            return Err(ClusterError::Speed { place: format!("device[{at}]"), value });
        }
    }
    let classes: u64 = cluster.classes.iter().map(|class| u64::from(class.count)).sum();
    if cluster.is_mixed() && classes != devices {
        return Err(ClusterError::Classes { classes, levels: cluster.devices() });
    }
    let hosts: u64 = cluster.hosts.iter().map(|host| u64::from(host.devices)).sum();
    if !cluster.hosts.is_empty() && hosts != devices {
        return Err(ClusterError::Hosts { hosts, levels: cluster.devices() });
    }
    Ok(cluster)
}

/// Checks the figures of one device.
pub fn figures(place: &str, device: &Device) -> Result<(), ClusterError> {
    positive(&format!("{place}.memory_bandwidth"), device.memory_bandwidth.0)?;
    let peak = &device.peak_flops;
    for (name, value) in
        [("f64", peak.f64), ("f32", peak.f32), ("tf32", peak.tf32), ("bf16", peak.bf16), ("f16", peak.f16)]
    {
        positive(&format!("{place}.peak_flops.{name}"), value)?;
    }
    let fraction = device.matmul_efficiency.unwrap_or(1.0);
    if !(0.01..=1.0).contains(&fraction) {
        return Err(ClusterError::Fraction { key: format!("{place}.matmul_efficiency"), value: fraction });
    }
    let counts = [
        ("multiprocessors", device.multiprocessors),
        ("cores", device.cores),
        ("threads_per_worker", device.threads_per_worker),
    ];
    if let Some((key, _)) = counts.into_iter().find(|(_, count)| *count == Some(0)) {
        return Err(ClusterError::Figure { key: format!("{place}.{key}"), value: 0.0 });
    }
    Ok(())
}

/// The first device, and the device classes if there are several.
fn devices_of(devices: Devices) -> Result<(Device, Vec<DeviceClass>), ClusterError> {
    let invalid = |place: String, what| ClusterError::Class { place, what };
    let tables = match devices {
        Devices::One(file) if file.count.is_some() || file.speed.is_some() => {
            return Err(invalid(
                "device".to_string(),
                "`count` and `speed` are only valid in a list of `[[device]]` \
                tables",
            ));
        }
        Devices::One(file) => return Ok((device_of(*file, "device")?, Vec::new())),
        Devices::Many(tables) => tables,
    };
    let mut classes: Vec<DeviceClass> = Vec::with_capacity(tables.len());
    for (at, file) in tables.into_iter().enumerate() {
        let place = format!("device[{at}]");
        let Some(count) = file.count else { return Err(invalid(place, "`count` is missing")) };
        let speed = file.speed;
        classes.push(DeviceClass { device: device_of(file, &place)?, count, speed });
    }
    let first = classes.first().map(|class| class.device.clone());
    let device = first.ok_or_else(|| invalid("device".to_string(), "no device is given"))?;
    Ok((device, classes))
}

fn positive(key: &str, value: f64) -> Result<(), ClusterError> {
    let is_positive = value.is_finite() && value > 0.0;
    if is_positive { Ok(()) } else { Err(ClusterError::Figure { key: key.to_string(), value }) }
}

fn device_of(file: DeviceFile, place: &str) -> Result<Device, ClusterError> {
    let quantity = |key: &str, error| ClusterError::Unit { key: format!("{place}.{key}"), error };
    let memory = file.memory.map(|text| unit::bytes(&text.0)).transpose().map_err(|e| quantity("memory", e))?;
    let bandwidth = file
        .memory_bandwidth
        .map(|text| unit::bandwidth(&text.0))
        .transpose()
        .map_err(|e| quantity("memory_bandwidth", e))?;
    let launch = file.launch.map(|text| unit::seconds(&text.0)).transpose().map_err(|e| quantity("launch", e))?;
    let name = file.kind.unwrap_or_else(|| DEFAULT_KIND.to_string());
    let mut device = match (device::find(&name), memory, bandwidth, &file.peak_flops) {
        (Some(kind), ..) => kind.device(),
        (None, Some(memory), Some(memory_bandwidth), Some(_)) => {
            let zero = crate::cluster::Peak { f64: 0.0, f32: 0.0, tf32: 0.0, bf16: 0.0, f16: 0.0 };
            Device {
                kind: name,
                memory,
                memory_bandwidth,
                peak_flops: zero,
                launch: Seconds(0.0),
                multiprocessors: None,
                matmul_efficiency: None,
                cores: None,
                threads_per_worker: None,
            }
        }
        _ => return Err(ClusterError::Kind { kind: name.chars().take(40).filter(|c| !c.is_control()).collect() }),
    };
    device.memory = memory.unwrap_or(device.memory);
    device.memory_bandwidth = bandwidth.unwrap_or(device.memory_bandwidth);
    device.launch = launch.unwrap_or(device.launch);
    device.multiprocessors = file.multiprocessors.or(device.multiprocessors);
    device.matmul_efficiency = file.matmul_efficiency.or(device.matmul_efficiency);
    device.cores = file.cores.or(device.cores);
    device.threads_per_worker = file.threads_per_worker.or(device.threads_per_worker);
    if let Some(flops) = file.peak_flops {
        let peak = &mut device.peak_flops;
        peak.f32 = flops.f32.unwrap_or(peak.f32);
        peak.f64 = flops.f64.unwrap_or(if peak.f64 > 0.0 { peak.f64 } else { peak.f32 / 2.0 });
        peak.tf32 = flops.tf32.unwrap_or(if peak.tf32 > 0.0 { peak.tf32 } else { peak.f32 });
        peak.bf16 = flops.bf16.unwrap_or(if peak.bf16 > 0.0 { peak.bf16 } else { peak.f32 });
        peak.f16 = flops.f16.unwrap_or(if peak.f16 > 0.0 { peak.f16 } else { peak.bf16 });
    }
    Ok(device)
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Cluster")]
struct File {
    /// The name and version of this format.
    #[schemars(extend("const" = SCHEMA))]
    schema: String,
    /// The devices.
    device: Devices,
    /// The links, innermost first.
    #[serde(default)]
    level: Vec<LevelFile>,
    /// The hosts of runs over a network.
    #[serde(default)]
    host: Vec<HostFile>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct DeviceFile {
    /// A device type known to pipec, whose figures are the defaults here, or a custom name.
    kind: Option<String>,
    /// Memory of one device, "141GB".
    memory: Option<Quantity>,
    /// Memory bandwidth, "4.8TB/s".
    memory_bandwidth: Option<Quantity>,
    /// Peak operations per second.
    peak_flops: Option<PeakFile>,
    /// Time to start one kernel, "5us".
    launch: Option<Quantity>,
    /// Multiprocessors (compute units); for GPUs.
    multiprocessors: Option<u32>,
    /// Fraction of the peak that large matrix products sustain, from 0.01 to 1; for GPUs.
    matmul_efficiency: Option<f64>,
    /// Cores of one host; for CPU devices.
    cores: Option<u32>,
    /// Kernel threads per worker; for CPU devices.
    threads_per_worker: Option<u32>,
    /// Number of devices; for several device types.
    count: Option<u32>,
    /// Speed relative to the device whose costs are used; for several device types.
    speed: Option<f64>,
}

/// One `[device]` table, or several `[[device]]` tables in device order.
#[derive(schemars::JsonSchema)]
#[schemars(untagged)]
enum Devices {
    One(Box<DeviceFile>),
    Many(Vec<DeviceFile>),
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Devices, D::Error> {
        struct Tables;
        impl<'de> Visitor<'de> for Tables {
            type Value = Devices;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a `[device]` table, or several `[[device]]` tables")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Devices, A::Error> {
                let table = DeviceFile::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Devices::One(Box::new(table)))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Devices, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(list)).map(Devices::Many)
            }
        }
        from.deserialize_any(Tables)
    }
}

/// Dense operations per second by element type, as plain numbers without a unit.
#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct PeakFile {
    f64: Option<f64>,
    f32: Option<f64>,
    tf32: Option<f64>,
    bf16: Option<f64>,
    f16: Option<f64>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct LevelFile {
    /// Name, "nvlink".
    name: Option<String>,
    /// Number of devices, or of groups of the previous level, that it connects.
    count: u32,
    /// Bandwidth of one device or group in one direction, "450GB/s" or "100Gbit/s".
    bandwidth: Quantity,
    /// Latency of one message, "3us".
    latency: Option<Quantity>,
    /// True if all devices below share one link.
    #[serde(default)]
    shared: bool,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
struct HostFile {
    /// `name:port`.
    address: String,
    /// Devices on this host.
    devices: u32,
}

/// The text of a quantity; a bare number gets a message of its own.
#[derive(schemars::JsonSchema)]
#[schemars(transparent)]
struct Quantity(String);

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Quantity, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Quantity;
            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a quoted quantity with a unit, such as \"450GB/s\", \"141GB\" or \"3us\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
                Ok(Quantity(text.to_string()))
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Quantity, E> {
                Err(E::custom(format!(
                    "{value} has no unit; write a quoted quantity, such as \"{value}GB/s\", \"{value}GB\" or \"{value}us\""
                )))
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Quantity, E> {
                Err(E::custom(format!(
                    "{value} has no unit; write a quoted quantity, such as \"{value}GB/s\", \"{value}GB\" or \"{value}us\""
                )))
            }
        }
        from.deserialize_any(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Bytes;

    const FILE: &str = r#"
schema = "pipec.cluster/1"
[device]
kind = "h200"
memory = "100GB"
[[level]]
name = "nvlink"
count = 8
bandwidth = "450GB/s"
latency = "3us"
[[level]]
name = "ib"
count = 2
bandwidth = "50GB/s"
latency = "8us"
shared = true
"#;

    #[test]
    fn reads_the_documented_file() {
        let cluster = from_toml(FILE).unwrap();
        assert_eq!(cluster.devices(), 16);
        assert_eq!(cluster.device.memory, Bytes(100_000_000_000));
        assert!(cluster.levels[1].shared);
        assert_eq!(cluster.flattened().levels[0].bandwidth, BytesPerSecond(50e9));
        assert_eq!(cluster.flattened().devices(), 16);
    }

    #[test]
    fn refuses_bare_numbers_and_unknown_keys() {
        let error = from_toml(&FILE.replace("\"450GB/s\"", "450")).unwrap_err().to_string();
        assert!(error.contains("has no unit"), "{error}");
        let unknown = from_toml(&FILE.replace("latency = \"3us\"", "latnecy = \"3us\"")).unwrap_err().to_string();
        assert!(unknown.contains("latnecy") && unknown.contains("latency"), "{unknown}");
        assert!(matches!(from_toml(&FILE.replace("cluster/1", "cluster/9")), Err(ClusterError::Schema { .. })));
        assert!(matches!(from_toml(&FILE.replace("\"h200\"", "\"h2000\"")), Err(ClusterError::Kind { .. })));
        assert!(matches!(from_toml(&FILE.replace("count = 8", "count = 0")), Err(ClusterError::Empty { level: 0 })));
        assert_eq!(from_toml(&FILE.replace("count = 8", "count = 4000000000")), Err(ClusterError::TooMany));
        assert!(matches!(from_toml(&FILE.replace("\"50GB/s\"", "\"50GB\"")), Err(ClusterError::Unit { .. })));
    }

    #[test]
    fn several_classes_are_tables_in_device_order() {
        let file = |classes: &str| {
            let file = FILE.replace("[device]\nkind = \"h200\"\nmemory = \"100GB\"\n", classes);
            from_toml(&file).map_err(|error| error.to_string())
        };
        let (fast, slow) =
            ("[[device]]\nkind = 'h200'\ncount = 4\n", "[[device]]\nkind = 't4'\ncount = 12\nspeed = 0.5\n");
        let cluster = file(&format!("{fast}{slow}")).unwrap();
        assert_eq!((cluster.device.kind.as_str(), cluster.classes.len()), ("h200", 2));
        assert_eq!((cluster.classes[0].speed, cluster.classes[1].speed), (None, Some(0.5)));
        assert_eq!(cluster.classes[1].device.memory, Bytes(16_000_000_000));
        let homogeneous = file("[[device]]\nkind = 'h200'\ncount = 16\n").unwrap();
        assert!(!homogeneous.is_mixed());
        assert_eq!(file(fast).unwrap_err(), "the device classes have 4 devices in total, but the levels describe 16");
        for (from, to, why) in [
            ("count = 12", "count = 4294967295", "the device classes have 4294967299 devices"),
            ("count = 12", "count = 0", "device[1]: a class has at least one device"),
            ("count = 12\n", "", "device[1]: `count` is missing"),
            ("speed = 0.5", "speed = nan", "device[1]: speed is NaN; it must be from 1e-6 to 1e6"),
            ("speed = 0.5", "speed = -1.0", "device[1]: speed is -1; it must be from 1e-6 to 1e6"),
            ("speed = 0.5", "sped = 0.5", "unknown field `sped`"),
        ] {
            let error = file(&format!("{fast}{}", slow.replace(from, to))).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        let error = from_toml(&FILE.replace("kind = \"h200\"", "kind = \"h200\"\nspeed = 2.0")).unwrap_err();
        assert!(matches!(error, ClusterError::Class { .. }), "{error}");
    }

    #[test]
    fn short_forms() {
        let cluster = levels("4:10GB/s,4:1.25GB/s").unwrap();
        assert_eq!((cluster.devices(), cluster.levels[1].bandwidth), (16, BytesPerSecond(1.25e9)));
        assert_eq!(gpus(8, None).unwrap().devices(), 8);
        assert!(matches!(gpus(0, None), Err(ClusterError::Empty { .. })));
        assert!(matches!(levels("4"), Err(ClusterError::LevelText { .. })));
        assert!(matches!(levels("4:10"), Err(ClusterError::Unit { .. })));
        assert!(matches!(levels(""), Err(ClusterError::LevelText { .. })));
    }

    #[test]
    fn an_own_kind_states_its_figures() {
        let text = "schema='pipec.cluster/1'\n[device]\nkind='mine'\nmemory='8GB'\nmemory_bandwidth='1TB/s'\n\
                   peak_flops={f32=1e13}\n[[level]]\ncount=2\nbandwidth='1GB/s'\n";
        assert_eq!(from_toml(text).unwrap().device.peak_flops.bf16, 1e13);
        assert!(matches!(from_toml(&text.replace("f32=1e13", "f32=nan")), Err(ClusterError::Figure { .. })));
    }
}
