//! Compares the plan with a single device, data parallelism, the uniform pipeline and the lower bound.

use crate::export::axis::{Axis, Unit};
use crate::export::report::Report;
use crate::export::report::markup::Table;
use crate::export::svg::{Anchor, Svg};
use crate::text::quantity;

const WIDE: f64 = 1060.0;
const LEFT: f64 = 126.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 30.0;
const PITCH: f64 = 30.0;

pub fn draw(report: &Report<'_>) -> Svg {
    let alternatives = &report.alternatives;
    let bottom = TOP + PITCH * alternatives.len() as f64;
    let mut picture = Svg::new(WIDE, bottom + 28.0, "Minibatch time of this plan and its alternatives");
    let max_us = alternatives.iter().map(|alternative| alternative.us).filter(|us| us.is_finite()).fold(0.0, f64::max);
    let axis = Axis::upto(max_us, 8, Unit::Time);
    let x = |us: f64| LEFT + (WIDE - LEFT - RIGHT) * axis.share(us);
    picture.vertical_grid(&axis, &x, [TOP - 6.0, bottom]);
    for (at, alternative) in alternatives.iter().enumerate() {
        let y = TOP + PITCH * at as f64;
        let weight = if at == 0 { "strong" } else { "" };
        picture.text(weight, Anchor::End, [LEFT - 12.0, y + 15.0], &alternative.name);
        let class = match (at, alternative.fits) {
            (0, _) => "forward",
            (_, true) => "s6",
            (_, false) => "wait",
        };
        picture.rect(class, [LEFT, y, x(alternative.us) - LEFT, 20.0], None);
        let fits = if alternative.fits { "" } else { ", does not fit in memory" };
        let label = format!("{}{fits}", quantity::duration(alternative.us));
        picture.text("small figure", Anchor::Start, [x(alternative.us) + 8.0, y + 14.0], &label);
    }
    picture.line("axis", [LEFT, bottom], [WIDE - RIGHT, bottom]);
    if report.bound_us > 0.0 {
        let at = x(report.bound_us);
        picture.line("limit", [at, TOP - 8.0], [at, bottom]);
        picture.text("limit-text small", Anchor::Start, [at - 2.0, TOP - 14.0], "bound");
    }
    picture
}

pub fn table(report: &Report<'_>) -> String {
    let header = ["what", "time per minibatch", "relative to this plan", "fits in memory"];
    let mut table = Table::new("All times use the same cost model.", &header, &[1, 2]);
    let plan_us = report.alternatives.first().map_or(0.0, |plan_us| plan_us.us);
    for (at, alternative) in report.alternatives.iter().enumerate() {
        // The time of an alternative that cannot run is no advice.
        let ratio = if plan_us > 0.0 && at > 0 && alternative.fits {
            format!("{} ×", quantity::short(alternative.us / plan_us))
        } else {
            String::new()
        };
        let fits = if alternative.fits { "yes" } else { "no" };
        table.marked_row(
            if at == 0 { "own" } else { "" },
            &[alternative.name.clone(), quantity::duration(alternative.us), ratio, fits.to_string()],
        );
    }
    table.html()
}
