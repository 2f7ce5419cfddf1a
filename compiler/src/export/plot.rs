//! Line plots: throughput over devices, bubbles over micro-batches, loss over time.
//!
//! Each curve has its own colour, dash pattern and marker, so that it is identifiable without colour. The legend is
//! above the plot, in the order of the curves.

use crate::export::axis::{Axis, Unit};
use crate::export::svg::{Anchor, Svg, width};

#[derive(Clone, Debug, PartialEq)]
pub enum HorizontalAxis {
    /// Equidistant positions, one per value.
    Places(Vec<f64>),
    /// Linear from 0 to this value.
    Upto(f64),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// The name in the legend.
    pub name: String,
    /// Ordered from left to right.
    pub points: Vec<(f64, f64)>,
    /// True for a reference line instead of a result: grey and dotted.
    pub is_reference: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    pub title: String,
    /// Label of the horizontal axis.
    pub across_name: String,
    pub across: HorizontalAxis,
    /// Label of the vertical axis.
    pub up_name: String,
    pub up: Unit,
    pub curves: Vec<Curve>,
    /// Name and value of a horizontal limit line.
    pub limit: Option<(String, f64)>,
    /// Highlighted points, as index of the curve and horizontal value, drawn with a ring.
    pub rings: Vec<(usize, f64)>,
    pub ring_name: String,
}

const WIDE: f64 = 640.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 24.0;
const HEIGHT: f64 = 250.0;
/// Curves with more points have no markers.
const MARKED: usize = 40;

impl Plot {
    pub fn draw(&self) -> Svg {
        let rows = self.legend();
        let top = 40.0 + 20.0 * rows.len() as f64;
        let mut picture = Svg::new(WIDE, top + HEIGHT + 52.0, &self.title);
        picture.text("strong", Anchor::Start, [0.0, 15.0], &self.title);
        for (at, row) in rows.iter().enumerate() {
            let y = 38.0 + 20.0 * at as f64;
            for (x, index, name) in row {
                self.key(&mut picture, *index, [*x, y - 4.0]);
                picture.text("quiet", Anchor::Start, [x + 30.0, y], name);
            }
        }
        let max_value = self.curves.iter().flat_map(|curve| &curve.points).map(|(_, y)| *y);
        let max_value =
            max_value.chain(self.limit.iter().map(|(_, y)| *y)).filter(|y| y.is_finite()).fold(0.0, f64::max);
        let axis = Axis::upto(max_value, 5, self.up);
        let bottom = top + HEIGHT;
        let y = |value: f64| bottom - axis.share(value) * HEIGHT;
        for (value, label) in &axis.ticks {
            picture.line(if *value == 0.0 { "axis" } else { "grid" }, [LEFT, y(*value)], [WIDE - RIGHT, y(*value)]);
            picture.text("quiet small figure", Anchor::End, [LEFT - 8.0, y(*value) + 4.0], label);
        }
        picture.text("quiet small", Anchor::Start, [0.0, top - 10.0], &self.up_name);
        for (value, label) in self.stops() {
            let x = self.x(value);
            picture.line("axis", [x, bottom], [x, bottom + 5.0]);
            picture.text("quiet small figure", Anchor::Middle, [x, bottom + 19.0], &label);
        }
        let middle = (LEFT + WIDE - RIGHT) / 2.0;
        picture.text("quiet small", Anchor::Middle, [middle, bottom + 40.0], &self.across_name);
        if let Some((name, value)) = &self.limit {
            picture.line("limit", [LEFT, y(*value)], [WIDE - RIGHT, y(*value)]);
            picture.text("limit-text small", Anchor::End, [WIDE - RIGHT, y(*value) - 5.0], name);
        }
        for (index, curve) in self.curves.iter().enumerate() {
            let points: Vec<[f64; 2]> = curve.points.iter().map(|(x, value)| [self.x(*x), y(*value)]).collect();
            picture.path(&self.class(index), &points, false);
            if points.len() > MARKED || curve.is_reference {
                continue;
            }
            for (point, (x, value)) in points.iter().zip(&curve.points) {
                let hint = format!("{}: {} at {}", curve.name, format_value(*value, self.up), format_number(*x));
                if self.rings.contains(&(index, *x)) {
                    picture.circle(&format!("hollow l{}", self.colour(index)), *point, 8.0, None);
                }
                mark(&mut picture, self.colour(index), index, *point, &hint);
            }
        }
        picture
    }

    fn x(&self, value: f64) -> f64 {
        let span = WIDE - RIGHT - LEFT;
        match &self.across {
            HorizontalAxis::Upto(end) => LEFT + span * (value / end.max(1e-300)).clamp(0.0, 1.0),
            HorizontalAxis::Places(values) => {
                let at = values.iter().position(|known| *known == value).unwrap_or(0) as f64;
                LEFT + span * (at + 0.5) / values.len().max(1) as f64
            }
        }
    }

    fn stops(&self) -> Vec<(f64, String)> {
        match &self.across {
            HorizontalAxis::Places(values) => values.iter().map(|value| (*value, format_number(*value))).collect(),
            HorizontalAxis::Upto(end) => Axis::of(*end, 8, Unit::Count).ticks,
        }
    }

    /// Legend entries, wrapped to the plot width.
    fn legend(&self) -> Vec<Vec<(f64, usize, String)>> {
        let mut rows: Vec<Vec<(f64, usize, String)>> = Vec::new();
        let mut x = WIDE;
        let names = self.curves.iter().enumerate().map(|(index, curve)| (index, curve.name.clone()));
        let rings = (!self.rings.is_empty()).then(|| (usize::MAX, self.ring_name.clone()));
        for (index, name) in names.chain(rings) {
            let entry_width = 30.0 + width(&name, 12.0) + 22.0;
            if x + entry_width > WIDE {
                rows.push(Vec::new());
                x = 0.0;
            }
            if let Some(row) = rows.last_mut() {
                row.push((x, index, name));
            }
            x += entry_width;
        }
        rows
    }

    fn key(&self, picture: &mut Svg, index: usize, [x, y]: [f64; 2]) {
        if index == usize::MAX {
            picture.circle("hollow l6", [x + 12.0, y], 6.0, None);
            return;
        }
        picture.path(&self.class(index), &[[x, y], [x + 24.0, y]], false);
        if !self.curves[index].is_reference {
            mark(picture, self.colour(index), index, [x + 12.0, y], &self.curves[index].name);
        }
    }

    /// Results cycle through colours; reference lines are grey.
    fn colour(&self, index: usize) -> usize {
        let before = self.curves[..index].iter().filter(|curve| !curve.is_reference).count();
        if self.curves[index].is_reference { 6 } else { [0, 2, 4, 5, 3, 1][before % 6] }
    }

    fn class(&self, index: usize) -> String {
        let dash = match () {
            () if self.curves[index].is_reference => " dotted",
            () if index >= 6 => " dashed",
            () => "",
        };
        format!("curve l{}{dash}", self.colour(index))
    }
}

/// Markers cycle through disc, square, triangle, diamond.
fn mark(picture: &mut Svg, colour: usize, index: usize, [x, y]: [f64; 2], hint: &str) {
    let class = format!("s{colour}");
    match index % 4 {
        0 => picture.circle(&class, [x, y], 4.2, Some(hint)),
        1 => picture.rect(&class, [x - 3.8, y - 3.8, 7.6, 7.6], Some(hint)),
        2 => picture.path(&class, &[[x, y - 5.0], [x + 4.8, y + 3.6], [x - 4.8, y + 3.6]], true),
        _ => picture.path(&class, &[[x, y - 5.2], [x + 5.2, y], [x, y + 5.2], [x - 5.2, y]], true),
    }
}

/// Integers without decimals, other numbers with two.
fn format_number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

fn format_value(value: f64, unit: Unit) -> String {
    use crate::text::quantity;
    match unit {
        Unit::Time => quantity::duration(value),
        Unit::Bytes => quantity::bytes(value.max(0.0) as u64),
        Unit::Count => quantity::samples(value),
        Unit::Plain => quantity::short(value),
        Unit::Share => format!("{:.1} %", value * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_curve_is_drawn_and_named() {
        let curve = |name: &str, points: &[(f64, f64)]| Curve {
            name: name.to_string(),
            points: points.to_vec(),
            is_reference: false,
        };
        let plot = Plot {
            title: "speed".to_string(),
            across_name: "devices".to_string(),
            across: HorizontalAxis::Places(vec![1.0, 2.0, 4.0]),
            up_name: "samples/s".to_string(),
            up: Unit::Count,
            curves: vec![curve("<a>", &[(1.0, 10.0), (2.0, 19.0)]), curve("b", &[(4.0, 30.0)])],
            limit: Some(("most".to_string(), 35.0)),
            rings: vec![(0, 2.0)],
            ring_name: "enough".to_string(),
        };
        let text = plot.draw().inline();
        assert!(text.contains(">&lt;a&gt;</text>") && text.contains(">enough</text>"), "{text}");
        // Two discs and one in the legend, one ring in the plot and one in the legend, one square and its legend entry.
        assert_eq!(text.matches("<circle class=\"s").count(), 3);
        assert_eq!(text.matches("<circle class=\"hollow").count(), 2);
        assert_eq!(text.matches("<rect").count(), 2);
        let empty = Plot { curves: Vec::new(), rings: Vec::new(), limit: None, ..plot };
        assert!(empty.draw().inline().contains("speed"));
    }
}
