//! Parses and prints quantities such as `450GB/s`, `25Gbit/s`, `141GB`, `16GiB` and `3us`.
//!
//! A number without a unit is always rejected: a bandwidth in Gbit/s read as GB/s would silently give a wrong plan.

use crate::cluster::{Bytes, BytesPerSecond, Seconds};
use crate::text::name::short_name;
use crate::text::suggest::hint;
use std::fmt;

/// Reasons why a quantity is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum UnitError {
    /// The text does not begin with a number.
    #[error("`{text}` is not a quantity; write {example}")]
    NoNumber { text: String, example: &'static str },
    /// A number without a unit.
    #[error("`{text}` has no unit; write {example}")]
    NoUnit { text: String, example: &'static str },
    /// A unit of another quantity, or an unknown one.
    #[error("`{unit}` in `{text}` is not a unit of {quantity}; known: {known}")]
    Unknown {
        text: String,
        /// The text after the number.
        unit: String,
        /// "bandwidth", "memory" or "time".
        quantity: &'static str,
        /// All valid units.
        known: String,
    },
    /// Out of range.
    #[error("`{text}` is out of range: {quantity} must be {range}")]
    Range {
        text: String,
        /// "bandwidth", "memory" or "time".
        quantity: &'static str,
        /// The accepted range.
        range: &'static str,
    },
}

const MEMORY: &[(&str, f64)] = &[
    ("B", 1.0),
    ("kB", 1e3),
    ("KB", 1e3),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("TiB", 1099511627776.0),
];

const RATE: &[(&str, f64)] = &[
    ("B/s", 1.0),
    ("kB/s", 1e3),
    ("KB/s", 1e3),
    ("MB/s", 1e6),
    ("GB/s", 1e9),
    ("TB/s", 1e12),
    ("KiB/s", 1024.0),
    ("MiB/s", 1048576.0),
    ("GiB/s", 1073741824.0),
    ("TiB/s", 1099511627776.0),
    ("bit/s", 0.125),
    ("kbit/s", 125.0),
    ("Mbit/s", 125e3),
    ("Gbit/s", 125e6),
    ("Tbit/s", 125e9),
];

const TIME: &[(&str, f64)] = &[("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];

/// The powers of ten of units that binary fractions cannot hold.
const TIME_EXPONENTS: [(f64, i32); 3] = [(1e-9, -9), (1e-6, -6), (1e-3, -3)];

/// Parses a memory size such as `141GB` or `16GiB`; at least one byte.
pub fn bytes(text: &str) -> Result<Bytes, UnitError> {
    let value = quantity(text, "memory", "\"16GiB\" or \"141GB\"", MEMORY)?;
    if !(1.0..9.2e18).contains(&value) {
        return Err(UnitError::Range {
            text: short_name(text),
            quantity: "memory",
            range: "at least one byte and below 9.2 EB",
        });
    }
    Ok(Bytes(value.round() as u64))
}

/// Parses a bandwidth such as `450GB/s` or `25Gbit/s`; at least 1 B/s.
pub fn bandwidth(text: &str) -> Result<BytesPerSecond, UnitError> {
    let value = quantity(text, "bandwidth", "\"450GB/s\" or \"25Gbit/s\"", RATE)?;
    if !(1.0..=1e18).contains(&value) {
        return Err(UnitError::Range {
            text: short_name(text),
            quantity: "bandwidth",
            range: "from 1 B/s to 1e18 B/s",
        });
    }
    Ok(BytesPerSecond(value))
}

/// Parses a time such as `3us` or `1ms`, from zero to one hour.
pub fn seconds(text: &str) -> Result<Seconds, UnitError> {
    let value = quantity(text, "time", "\"3us\" or \"1ms\"", TIME)?;
    if !(0.0..=3600.0).contains(&value) {
        return Err(UnitError::Range { text: short_name(text), quantity: "time", range: "from 0 to 3600 seconds" });
    }
    Ok(Seconds(value))
}

// Uses the longest prefix that parses as a number, so that `1e9B/s` works.
fn quantity(text: &str, what: &'static str, example: &'static str, units: &[(&str, f64)]) -> Result<f64, UnitError> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !(c.is_ascii_digit() || "+-.eE_".contains(c))).unwrap_or(trimmed.len());
    let parsed = (1..=digits)
        .rev()
        .filter(|&end| trimmed.is_char_boundary(end))
        .find_map(|end| Some((trimmed[..end].parse::<f64>().ok()?, &trimmed[end..])));
    let Some((number, suffix)) = parsed else { return Err(UnitError::NoNumber { text: short_name(text), example }) };
    let unit = suffix.trim();
    if unit.is_empty() {
        return Err(UnitError::NoUnit { text: short_name(text), example });
    }
    let Some((_, factor)) = units.iter().find(|(name, _)| *name == unit) else {
        let names = units.iter().map(|(name, _)| *name);
        let rate =
            units.iter().find(|(name, _)| name.strip_suffix("/s") == Some(unit) || rate(unit).as_deref() == Some(name));
        let suggestion = match rate {
            // States the value in bytes, so that bits are not mistaken for bytes.
            Some((name, factor)) if name.ends_with("bit/s") => {
                format!("; `{number}{name}` is {}", BytesPerSecond(number * factor))
            }
            Some((name, _)) => format!("; did you mean `{name}`?"),
            None => hint(unit, names.clone()),
        };
        let known = names.collect::<Vec<_>>().join(", ") + &suggestion;
        return Err(UnitError::Unknown { text: short_name(text), unit: short_name(unit), quantity: what, known });
    };
    // Read as decimals, so that `5us` is 5e-6 to the last bit; the product with 1e-6 is not.
    let value = match TIME_EXPONENTS.iter().find(|(of, _)| of == factor) {
        Some((_, exponent)) => format!("{number}e{exponent}").parse().unwrap_or(f64::NAN),
        None => number * factor,
    };
    if value.is_finite() {
        Ok(value)
    } else {
        Err(UnitError::Range { text: short_name(text), quantity: what, range: "finite" })
    }
}

// Maps common spellings to a unit: `gbps`, `Gb/s` and `Gbits` are bits, `GBps` is bytes.
fn rate(unit: &str) -> Option<String> {
    let bytes = unit.strip_suffix("Bps").map(|prefix| (prefix, "B/s"));
    let small = unit.to_ascii_lowercase();
    let bits = ["bps", "bits/s", "bit/s", "bits", "bit"].iter().find_map(|end| small.strip_suffix(end));
    let bits = bits.or_else(|| unit.strip_suffix("b/s")).map(|prefix| (prefix, "bit/s"));
    let (prefix, name) = bytes.or(bits)?;
    let standard = ["", "k", "M", "G", "T"].into_iter().find(|standard| standard.eq_ignore_ascii_case(prefix))?;
    Some(format!("{standard}{name}"))
}

impl fmt::Display for Bytes {
    /// Prints with a decimal unit and up to three decimals: `141GB`, `1.5MB`, `17B`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(out, self.0 as f64, &[("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)])
    }
}

impl fmt::Display for BytesPerSecond {
    /// Prints with a decimal unit: `450GB/s`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(out, self.0, &[("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)])
    }
}

impl fmt::Display for Seconds {
    /// Prints with a unit: `3us`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(out, self.0, &[("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)])
    }
}

fn print(out: &mut fmt::Formatter<'_>, value: f64, units: &[(&str, f64)]) -> fmt::Result {
    let last = units[units.len() - 1];
    let (unit, factor) = units.iter().find(|(_, factor)| value >= *factor).copied().unwrap_or(last);
    let text = format!("{:.3}", value / factor);
    let text = text.trim_end_matches('0').trim_end_matches('.');
    write!(out, "{text}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_units() {
        assert_eq!(bandwidth("450GB/s"), Ok(BytesPerSecond(450e9)));
        assert_eq!(bandwidth("25Gbit/s"), Ok(BytesPerSecond(3.125e9)));
        assert_eq!(bandwidth("1e9B/s"), Ok(BytesPerSecond(1e9)));
        assert_eq!(bytes("16GiB"), Ok(Bytes(17179869184)));
        assert_eq!(bytes(" 141 GB "), Ok(Bytes(141_000_000_000)));
        assert_eq!(seconds("1ms"), Ok(Seconds(0.001)));
        assert_eq!(seconds("0us"), Ok(Seconds(0.0)));
        let exact =
            [("5us", 5e-6), ("0.1us", 1e-7), ("0.05us", 5e-8), ("0.03ms", 3e-5), ("0.47ns", 4.7e-10), ("1e3us", 1e-3)];
        exact.into_iter().for_each(|(text, value)| assert_eq!(seconds(text), Ok(Seconds(value)), "{text}"));
    }

    #[test]
    fn refuses_what_is_not_a_quantity() {
        assert!(matches!(bandwidth("450"), Err(UnitError::NoUnit { .. })));
        assert!(matches!(bandwidth("GB/s"), Err(UnitError::NoNumber { .. })));
        assert!(matches!(bandwidth("3 apples"), Err(UnitError::Unknown { .. })));
        assert!(matches!(bandwidth("-3GB/s"), Err(UnitError::Range { .. })));
        assert!(matches!(bandwidth("1e400GB/s"), Err(UnitError::Range { .. })));
        assert!(matches!(bandwidth("nanGB/s"), Err(UnitError::NoNumber { .. })));
        assert!(matches!(bytes("0GB"), Err(UnitError::Range { .. })));
        assert!(matches!(bytes("9999999TB"), Err(UnitError::Range { .. })));
        for bits in ["10Gbps", "10gbps", "10Gb/s", "10gbit", "10Gbits", "10 gbit/s", "10GBIT/S"] {
            let message = bandwidth(bits).unwrap_err().to_string();
            assert!(message.ends_with("; `10Gbit/s` is 1.25GB/s"), "{message}");
        }
        assert!(bandwidth("10Mb/s").unwrap_err().to_string().ends_with("; `10Mbit/s` is 1.25MB/s"));
        assert!(bandwidth("10GBps").unwrap_err().to_string().ends_with("did you mean `GB/s`?"));
        assert!(bandwidth("10GB").unwrap_err().to_string().ends_with("did you mean `GB/s`?"));
        assert!(matches!(seconds("µ"), Err(UnitError::NoNumber { .. })));
        assert!(matches!(bytes(""), Err(UnitError::NoNumber { .. })));
    }

    #[test]
    fn prints_short() {
        assert_eq!(Bytes(141_000_000_000).to_string(), "141GB");
        assert_eq!(Bytes(0).to_string(), "0B");
        assert_eq!(BytesPerSecond(1.25e9).to_string(), "1.25GB/s");
        assert_eq!(Seconds(3e-6).to_string(), "3us");
        assert_eq!(Seconds(0.0).to_string(), "0ns");
    }
}
