//! Formats quantities with units, using three or four significant digits.

/// A time given in microseconds, in ASCII.
pub fn time(microseconds: f64) -> String {
    let (value, unit) = match microseconds.abs() {
        t if t < 1e3 => (microseconds, "us"),
        t if t < 1e6 => (microseconds / 1e3, "ms"),
        _ => (microseconds / 1e6, "s"),
    };
    format!("{} {unit}", short(value))
}

/// A time given in microseconds, with `µs`.
pub fn duration(microseconds: f64) -> String {
    time(microseconds).replace(" us", " µs")
}

/// A size in bytes, with decimal prefixes.
pub fn bytes(bytes: u64) -> String {
    with_prefix(bytes as f64, &["B", "kB", "MB", "GB", "TB", "PB", "EB"])
}

/// A size in bytes in the syntax of flags, rounded up.
pub fn at_least(bytes: u64) -> String {
    let (unit, name) = match bytes {
        b if b >= 1_000_000_000 => (1_000_000, "GB"),
        b if b >= 1_000_000 => (1_000, "MB"),
        b => return format!("{b}B"),
    };
    let parts = bytes.div_ceil(unit);
    format!("{}.{:03}{name}", parts / 1000, parts % 1000)
}

pub fn rate(bytes_per_second: f64) -> String {
    format!("{}/s", with_prefix(bytes_per_second, &["B", "kB", "MB", "GB", "TB", "PB"]))
}

pub fn flops(flops: f64) -> String {
    with_prefix(flops, &["flop", "kflop", "Mflop", "Gflop", "Tflop", "Pflop", "Eflop"])
}

/// A count with thousands separators.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let groups: Vec<&[u8]> = digits.as_bytes().rchunks(3).rev().collect();
    groups.iter().map(|group| String::from_utf8_lossy(group)).collect::<Vec<_>>().join(",")
}

/// `1 op`, `2 ops`.
pub fn plural(number: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(number), if number == 1 { one } else { many })
}

/// Samples per second, without the unit.
pub fn samples(per_second: f64) -> String {
    if per_second >= 1000.0 { count(per_second.round() as u64) } else { short(per_second) }
}

/// Three or four significant digits.
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_string(),
        v if v < 0.001 => format!("{value:.1e}"),
        v if v < 10.0 => format!("{value:.3}"),
        v if v < 100.0 => format!("{value:.2}"),
        v if v < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn with_prefix(value: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut at = 0;
    while value >= 999.95 && at + 1 < units.len() {
        value /= 1e3;
        at += 1;
    }
    if at == 0 { format!("{value:.0} {}", units[0]) } else { format!("{} {}", short(value), units[at]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(time(12.3456), "12.35 us");
        assert_eq!(time(176_349.2), "176.3 ms");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(141_000_000_000), "141.0 GB");
        assert_eq!([at_least(17), at_least(1_234_001), at_least(2_000_000_000)], ["17B", "1.235MB", "2.000GB"]);
        assert_eq!(rate(1.25e9), "1.250 GB/s");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(12), "12");
        assert_eq!(samples(25_912.4), "25,912");
        assert_eq!(short(0.0), "0");
    }
}
