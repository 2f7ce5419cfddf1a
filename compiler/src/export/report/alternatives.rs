//! Compares the plan with a single device, data parallelism, the uniform pipeline and the lower bound.

use crate::export::axis::{Axis, Unit};
use crate::export::report::Report;
use crate::export::report::markup::{Column, Table};
use crate::export::svg::{Anchor, Svg};
use crate::text::quantity;

const WIDE: f64 = 1060.0;
const LEFT: f64 = 126.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 30.0;
const PITCH: f64 = 30.0;

pub fn draw(report: &Report<'_>) -> Svg {
    let all = &report.alternatives;
    let bottom = TOP + PITCH * all.len() as f64;
    let mut picture = Svg::new(WIDE, bottom + 28.0, "Minibatch time of this plan and its alternatives");
    let most = all.iter().map(|one| one.us).filter(|us| us.is_finite()).fold(0.0, f64::max);
    let axis = Axis::upto(most, 8, Unit::Time);
    let x = |us: f64| LEFT + (WIDE - LEFT - RIGHT) * axis.share(us);
    for (value, label) in &axis.ticks {
        picture.line("grid", [x(*value), TOP - 6.0], [x(*value), bottom]);
        picture.text("quiet small figure", Anchor::Middle, [x(*value), bottom + 17.0], label);
    }
    for (at, one) in all.iter().enumerate() {
        let y = TOP + PITCH * at as f64;
        let weight = if at == 0 { "strong" } else { "" };
        picture.text(weight, Anchor::End, [LEFT - 12.0, y + 15.0], &one.name);
        let class = match (at, one.fits) {
            (0, _) => "forward",
            (_, true) => "s6",
            (_, false) => "wait",
        };
        picture.rect(class, [LEFT, y, x(one.us) - LEFT, 20.0], None);
        let fits = if one.fits { "" } else { ", does not fit in memory" };
        let label = format!("{}{fits}", quantity::duration(one.us));
        picture.text("small figure", Anchor::Start, [x(one.us) + 8.0, y + 14.0], &label);
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
    let columns = [
        ("what", Column::Words),
        ("time per minibatch", Column::Numbers),
        ("relative to this plan", Column::Numbers),
        ("fits in memory", Column::Words),
    ];
    let mut table = Table::new("All times use the same cost model.", &columns);
    let own = report.alternatives.first().map_or(0.0, |own| own.us);
    for (at, one) in report.alternatives.iter().enumerate() {
        // The time of an alternative that cannot run is no advice.
        let ratio = if own > 0.0 && at > 0 && one.fits {
            format!("{} ×", quantity::short(one.us / own))
        } else {
            String::new()
        };
        let fits = if one.fits { "yes" } else { "no" };
        table.marked_row(
            if at == 0 { "own" } else { "" },
            &[one.name.clone(), quantity::duration(one.us), ratio, fits.to_string()],
        );
    }
    table.html()
}
