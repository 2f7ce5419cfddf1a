//! Prints a [`Cluster`] as a cluster file that parses to the same cluster.

use crate::cluster::unit::{bandwidth, bytes, seconds};
use crate::cluster::{Bytes, BytesPerSecond, Cluster, Device, DeviceClass, SCHEMA, Seconds};
use std::fmt::Write;

pub fn to_toml(cluster: &Cluster) -> String {
    let mut text = format!("schema = \"{SCHEMA}\"\n");
    if cluster.classes.is_empty() {
        text += "\n[device]\n";
        device(&mut text, &cluster.device);
    }
    for class in &cluster.classes {
        text += "\n[[device]]\n";
        let DeviceClass { device: of, count, speed } = class;
        let _ = writeln!(text, "count = {count}");
        if let Some(speed) = speed {
            let _ = writeln!(text, "speed = {speed:?}");
        }
        device(&mut text, of);
    }
    for level in &cluster.levels {
        let _ = write!(text, "\n[[level]]\nname = {}\ncount = {}\n", quote(&level.name), level.count);
        let _ = writeln!(text, "bandwidth = \"{}\"", rate(level.bandwidth));
        if level.latency.0 > 0.0 {
            let _ = writeln!(text, "latency = \"{}\"", time(level.latency));
        }
        if level.shared {
            text += "shared = true\n";
        }
    }
    for host in &cluster.hosts {
        let _ = write!(text, "\n[[host]]\naddress = {}\ndevices = {}\n", quote(&host.address), host.devices);
    }
    text
}

/// The cluster file as JSON, valid under [`crate::cluster::read::schema`].
pub fn to_json(cluster: &Cluster) -> serde_json::Value {
    toml::from_str(&to_toml(cluster)).expect("what is written can be read")
}

fn device(text: &mut String, device: &Device) {
    let peak = device.peak_flops;
    let _ = writeln!(text, "kind = {}", quote(&device.kind));
    let _ = writeln!(text, "memory = \"{}\"", size(device.memory));
    let _ = writeln!(text, "memory_bandwidth = \"{}\"", rate(device.memory_bandwidth));
    if device.launch.0 > 0.0 {
        let _ = writeln!(text, "launch = \"{}\"", time(device.launch));
    }
    if let Some(fraction) = device.matmul_efficiency {
        let _ = writeln!(text, "matmul_efficiency = {fraction:?}");
    }
    let counts = [
        ("multiprocessors", device.multiprocessors),
        ("cores", device.cores),
        ("threads_per_worker", device.threads_per_worker),
    ];
    for (key, value) in counts {
        if let Some(value) = value {
            let _ = writeln!(text, "{key} = {value}");
        }
    }
    // Exponent notation is shorter, and valid in TOML.
    let [f64, f32, tf32, bf16, f16] =
        [peak.f64, peak.f32, peak.tf32, peak.bf16, peak.f16].map(|flops| format!("{flops:e}"));
    let _ = writeln!(text, "peak_flops = {{ f64 = {f64}, f32 = {f32}, tf32 = {tf32}, bf16 = {bf16}, f16 = {f16} }}");
}

fn quote(text: &str) -> String {
    toml::Value::String(text.to_string()).to_string()
}

fn size(bytes_: Bytes) -> String {
    let text = |unit: &str, scale: f64| format!("{}{unit}", bytes_.0 as f64 / scale);
    let units = [("GB", 1e9), ("GiB", f64::from(1u32 << 30)), ("MiB", f64::from(1u32 << 20))];
    let short = units.into_iter().map(|(unit, scale)| text(unit, scale)).find(|text| bytes(text).ok() == Some(bytes_));
    short.filter(|text| text.len() < 12).unwrap_or_else(|| format!("{}B", bytes_.0))
}

fn rate(rate: BytesPerSecond) -> String {
    let is_exact = |text: &str| bandwidth(text).ok() == Some(rate);
    shortest(rate.0, &[("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)], &is_exact)
}

fn time(time: Seconds) -> String {
    let is_exact = |text: &str| seconds(text).ok() == Some(time);
    shortest(time.0, &[("us", 1e-6), ("ms", 1e-3), ("ns", 1e-9), ("s", 1.0)], &is_exact)
}

/// The value with the fewest digits that reads back as the same, in the first unit that has one.
fn shortest(value: f64, units: &[(&str, f64)], is_exact: &dyn Fn(&str) -> bool) -> String {
    let round = |digits: usize, scale: f64| format!("{:.*e}", digits, value / scale).parse().unwrap_or(value / scale);
    let texts =
        units.iter().flat_map(|(unit, scale)| (0..17).map(move |digits| format!("{}{unit}", round(digits, *scale))));
    texts.into_iter().find(|text| is_exact(text)).unwrap_or_else(|| format!("{value}{}", units[units.len() - 1].0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::device::KINDS;
    use crate::cluster::read::{from_toml, levels};
    use crate::cluster::{Host, Level};

    fn comes_back(cluster: &Cluster) {
        let text = to_toml(cluster);
        assert_eq!(from_toml(&text).as_ref(), Ok(cluster), "{text}");
    }

    #[test]
    fn every_kind_and_every_part_comes_back() {
        let base = levels("4:10GB/s,2:1.25GB/s").unwrap();
        for kind in KINDS {
            comes_back(&Cluster { device: kind.device(), ..base.clone() });
        }
        let mut cluster = base.clone();
        cluster.device.kind = "own \"kind\"\n\u{1}".to_string();
        cluster.device.memory = Bytes(80_123_456_789);
        cluster.device.memory_bandwidth = BytesPerSecond(1.234_567_890_123e11);
        cluster.device.launch = Seconds(3.141_592_653e-6);
        cluster.levels[0] =
            Level { name: "näme".into(), latency: Seconds(1.1e-7), shared: true, ..cluster.levels[0].clone() };
        cluster.levels[1].bandwidth = BytesPerSecond(1e9 / 3.0);
        cluster.hosts =
            vec![Host { address: "a:1".into(), devices: 3 }, Host { address: "[::1]:2".into(), devices: 5 }];
        comes_back(&cluster);
        let of = |kind: usize, count, speed| DeviceClass { device: KINDS[kind].device(), count, speed };
        let classes = vec![of(3, 6, Some(0.3)), of(4, 2, None)];
        comes_back(&Cluster { device: KINDS[3].device(), classes, hosts: Vec::new(), ..base });
    }
}
