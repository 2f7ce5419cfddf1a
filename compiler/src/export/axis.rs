//! Plot axes with round tick values and units.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Microseconds, printed as µs, ms or s.
    Time,
    /// Printed with decimal prefixes.
    Bytes,
    Count,
    /// A fraction, printed in percent.
    Share,
    Plain,
}

/// An axis from 0 to `end`.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub end: f64,
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// An axis that ends at a round value of at least `max_value`, with approximately `target_ticks` ticks.
    pub fn upto(max_value: f64, target_ticks: usize, unit: Unit) -> Axis {
        let max_value = if max_value.is_finite() && max_value > 0.0 { max_value } else { 1.0 };
        let step = step(max_value, target_ticks, unit);
        let count = (max_value / step - 1e-9).ceil().max(1.0);
        let end = step * count;
        Axis { end, ticks: ticks(end, step, unit) }
    }

    /// An axis that ends exactly at `max_value`.
    pub fn of(max_value: f64, target_ticks: usize, unit: Unit) -> Axis {
        let max_value = if max_value.is_finite() && max_value > 0.0 { max_value } else { 1.0 };
        Axis { end: max_value, ticks: ticks(max_value, step(max_value, target_ticks, unit), unit) }
    }

    pub fn share(&self, value: f64) -> f64 {
        (value / self.end).clamp(0.0, 1.0)
    }
}

/// The tick distance: 1, 2 or 5 times a power of ten, for approximately `target_ticks` ticks.
fn step(max_value: f64, target_ticks: usize, unit: Unit) -> f64 {
    let raw = max_value / target_ticks.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0].into_iter().map(|digit| digit * power).find(|step| *step >= raw * 0.999);
    let step = round.unwrap_or(10.0 * power);
    if unit == Unit::Count { step.max(1.0) } else { step }
}

fn ticks(end: f64, step: f64, unit: Unit) -> Vec<(f64, String)> {
    let (scale, name) = scale(end, unit);
    let digits = (-(step / scale).log10().floor()).clamp(0.0, 6.0) as usize;
    let count = (end / step + 1e-9).floor() as usize;
    let label = |value: f64| match value {
        0.0 => "0".to_string(),
        value => format!("{:.digits$}{name}", value / scale),
    };
    (0..=count.min(100)).map(|at| at as f64 * step).map(|value| (value, label(value))).collect()
}

/// The scale factor and name of the unit prefix for values up to `end`.
fn scale(end: f64, unit: Unit) -> (f64, &'static str) {
    let of = |units: &[(f64, &'static str)]| {
        units.iter().rev().find(|(worth, _)| end >= *worth).or(units.first()).copied().unwrap_or((1.0, ""))
    };
    match unit {
        Unit::Time => of(&[(1.0, " µs"), (1e3, " ms"), (1e6, " s")]),
        Unit::Bytes => of(&[(1.0, " B"), (1e3, " kB"), (1e6, " MB"), (1e9, " GB"), (1e12, " TB"), (1e15, " PB")]),
        // 9000 is printed in full, 10000 as 10 k.
        Unit::Count if end < 1e4 => (1.0, ""),
        Unit::Count => of(&[(1e3, " k"), (1e6, " M"), (1e9, " G"), (1e12, " T"), (1e15, " P")]),
        Unit::Share => (0.01, " %"),
        Unit::Plain => (1.0, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_and_have_units() {
        assert_eq!(labels(&Axis::upto(43_000.0, 5, Unit::Time)), ["0", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms"]);
        assert_eq!(labels(&Axis::of(43_000.0, 5, Unit::Time)).last(), Some(&"40 ms"));
        assert_eq!(labels(&Axis::upto(1.2e9, 4, Unit::Bytes)), ["0", "0.5 GB", "1.0 GB", "1.5 GB"]);
        assert_eq!(labels(&Axis::upto(0.31, 4, Unit::Share)), ["0", "10 %", "20 %", "30 %", "40 %"]);
        assert_eq!(labels(&Axis::upto(3.0, 8, Unit::Count)), ["0", "1", "2", "3"]);
        assert_eq!(labels(&Axis::upto(20_000.0, 2, Unit::Count)), ["0", "10 k", "20 k"]);
        for max_value in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(Axis::upto(max_value, 4, Unit::Bytes).ticks.len() < 8);
        }
    }
}
