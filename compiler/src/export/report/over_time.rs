//! Worker memory over time: weight versions, gradients and activations of in-flight micro-batches.

use crate::export::axis::{Axis, Unit};
use crate::export::report::Played;
use crate::export::report::markup::{Table, paragraph};
use crate::export::svg::{Anchor, Svg};
use crate::text::quantity;

/// Maximum number of curves.
const MOST: usize = 128;
/// With more curves, small ones are used.
const LARGE: usize = 12;
/// Maximum number of points of a large and of a small curve; longer curves show the maximum per time slice.
const POINTS: [usize; 2] = [700, 160];
const WIDE: f64 = 1060.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 96.0;
/// Heights of large and small curves, without and with spacing.
const TALL: [f64; 2] = [40.0, 15.0];
const PITCH: [f64; 2] = [52.0, 19.0];

/// The first replica of each rank.
fn workers(played: &Played) -> Vec<usize> {
    let workers = &played.timeline.workers;
    let first = (0..workers.len()).filter(|&worker| workers[worker].name.ends_with(".0"));
    first.filter(|&worker| !played.timeline.memory[worker].is_empty()).take(MOST).collect()
}

/// `None` if the plan has no sizes.
pub fn draw(played: &Played) -> Option<Svg> {
    let timeline = &played.timeline;
    let workers = workers(played);
    if workers.is_empty() || timeline.makespan <= 0.0 {
        return None;
    }
    let size = usize::from(workers.len() > LARGE);
    let (height, pitch) = (TALL[size], PITCH[size]);
    let bottom = 8.0 + pitch * workers.len() as f64;
    let mut picture = Svg::new(WIDE, bottom + 28.0, "Memory over time");
    let axis = Axis::of(timeline.makespan, 10, Unit::Time);
    let x = |time: f64| LEFT + (WIDE - LEFT - RIGHT) * axis.share(time);
    picture.vertical_grid(&axis, &x, [8.0, bottom]);
    let max_bytes = workers.iter().map(|&worker| timeline.peak_memory(worker)).max().unwrap_or(0).max(1) as f64;
    for (at, &worker) in workers.iter().enumerate() {
        let base = 8.0 + pitch * at as f64 + height;
        let y = |bytes: u64| base - height * bytes as f64 / max_bytes;
        let points = thin_out(&timeline.memory[worker], timeline.makespan, POINTS[size]);
        let mut line: Vec<[f64; 2]> = Vec::new();
        for (time, bytes) in points {
            if let Some(last) = line.last().copied() {
                line.push([x(time), last[1]]);
            }
            line.push([x(time), y(bytes)]);
        }
        let last = line.last().map_or(base, |last| last[1]);
        line.push([x(timeline.makespan), last]);
        let mut area = line.clone();
        area.extend([[x(timeline.makespan), base], [LEFT, base]]);
        picture.path("s0 area", &area, true);
        picture.path("curve l0", &line, false);
        picture.line("axis", [LEFT, base], [WIDE - RIGHT, base]);
        picture.text("small figure", Anchor::End, [LEFT - 12.0, base - 4.0], &timeline.workers[worker].name);
        let label = quantity::bytes(timeline.peak_memory(worker));
        picture.text("small figure", Anchor::Start, [WIDE - RIGHT + 10.0, base - 4.0], &label);
    }
    Some(picture)
}

/// Reduces the number of points to approximately `max_points`, keeping all peaks.
fn thin_out(points: &[(f64, u64)], makespan: f64, max_points: usize) -> Vec<(f64, u64)> {
    if points.len() <= max_points {
        return points.to_vec();
    }
    let width = makespan / max_points as f64;
    let mut sparse: Vec<(f64, u64)> = Vec::new();
    let mut slot = usize::MAX;
    for &(time, bytes) in points {
        let at = (time / width) as usize;
        match sparse.last_mut() {
            Some(last) if at == slot => last.1 = last.1.max(bytes),
            _ => sparse.push((at as f64 * width, bytes)),
        }
        slot = at;
    }
    sparse
}

pub fn table(played: &Played) -> String {
    let workers = workers(played);
    let header = ["worker", "at the start", "most", "peak at"];
    let mut table = Table::new("The first replica of each rank.", &header, &[1, 2, 3]);
    for &worker in &workers {
        let points = &played.timeline.memory[worker];
        let peak = played.timeline.peak_memory(worker);
        let when = points.iter().find(|(_, bytes)| *bytes == peak).map_or(0.0, |(time, _)| *time);
        table.row(&[
            played.timeline.workers[worker].name.clone(),
            quantity::bytes(points.first().map_or(0, |(_, bytes)| *bytes)),
            quantity::bytes(peak),
            quantity::duration(when),
        ]);
    }
    let note = "Simulated weight versions, gradients and saved activations. Optimizer state, messages and workspace \
                are constant and shown in the bars above. All curves share one scale.";
    paragraph("quiet", note) + &table.html()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_peaks() {
        let points: Vec<(f64, u64)> = (0..10_000).map(|at| (f64::from(at), if at == 6_173 { 99 } else { 1 })).collect();
        let sparse = thin_out(&points, 10_000.0, 700);
        assert!(sparse.len() <= 700 && sparse.iter().any(|(_, bytes)| *bytes == 99));
    }
}
