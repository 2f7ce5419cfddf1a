//! Many stages as a grid of small boxes, left to right, then top to bottom.
//!
//! Arrows connect consecutive stages. Transfers to later stages are listed in the sending box, since arrows over
//! several rows would cross too many others.

use crate::export::escape::short;
use crate::export::stage_name::{layers, ranges, sparing};
use crate::export::svg::{Anchor, Svg, width};
use crate::plan::{Edge, Plan, Stage};
use crate::text::quantity;

const ACROSS: usize = 6;
const BOX: [f64; 2] = [146.0, 90.0];
const GAP: [f64; 2] = [28.0, 34.0];
const LEFT: f64 = 14.0;
const TOP: f64 = 12.0;

/// Draws the stages; `load` returns the relative load from 0 to 1.
pub fn draw(plan: &Plan, stages: &[Stage], load: &dyn Fn(&Stage) -> f64) -> Svg {
    let rows = stages.len().div_ceil(ACROSS);
    let canvas_width = LEFT + ACROSS as f64 * (BOX[0] + GAP[0]);
    let mut picture =
        Svg::new(canvas_width, TOP + rows as f64 * (BOX[1] + GAP[1]), "Stages and the tensors sent between them");
    for (at, stage) in stages.iter().enumerate() {
        if at + 1 < stages.len() && plan.edges.iter().any(|edge| is_next(edge, at)) {
            arrow(&mut picture, at);
        }
        let edges_out: Vec<&Edge> = plan.edges.iter().filter(|edge| edge.from.index() == at).collect();
        draw_stage(&mut picture, stage, place(at), load(stage), &edges_out);
    }
    picture
}

fn is_next(edge: &Edge, at: usize) -> bool {
    edge.from.index() == at && edge.to.index() == at + 1
}

fn place(at: usize) -> [f64; 2] {
    let [column, row] = [at % ACROSS, at / ACROSS];
    [LEFT + column as f64 * (BOX[0] + GAP[0]), TOP + row as f64 * (BOX[1] + GAP[1])]
}

/// An arrow to the next stage: to the right, or to the start of the next row.
fn arrow(picture: &mut Svg, at: usize) {
    let [[x, y], [to, below]] = [place(at), place(at + 1)];
    let (right, middle) = (x + BOX[0], y + BOX[1] / 2.0);
    let end = below + BOX[1] / 2.0;
    if to > x {
        picture.line("arrow", [right + 9.0, middle], [to - 8.0, middle]);
    } else {
        let gap_y = y + BOX[1] + GAP[1] / 2.0 - 2.0;
        let turn = [right + 18.0, to - 12.0];
        let polyline = [
            [right + 9.0, middle],
            [turn[0], middle],
            [turn[0], gap_y],
            [turn[1], gap_y],
            [turn[1], end],
            [to - 6.0, end],
        ];
        picture.path("arrow", &polyline, false);
    }
    picture.path("head", &[[to - 1.0, end], [to - 8.0, end - 4.0], [to - 8.0, end + 4.0]], true);
}

/// Joins the list, or shortens it to its first entry and a count if it is wider than `max_width` pixels.
fn shorten(sends: &[String], max_width: f64) -> String {
    let text = sends.join(", ");
    match sends {
        [first, others @ ..] if width(&text, 11.0) > max_width && !others.is_empty() => {
            format!("{first}, {} more", others.len())
        }
        _ => text,
    }
}

fn draw_stage(picture: &mut Svg, stage: &Stage, [x, y]: [f64; 2], load: f64, edges_out: &[&Edge]) {
    for card in (1..=(stage.replicas.saturating_sub(1)).min(2)).rev() {
        let by = 3.0 * f64::from(card);
        picture.rounded_rect("behind", [x + by, y - by, BOX[0], BOX[1]], 6.0);
    }
    picture.rounded_rect("box", [x, y, BOX[0], BOX[1]], 6.0);
    let (left, inner_width) = (x + 10.0, BOX[0] - 20.0);
    let end = left + inner_width;
    picture.text("strong", Anchor::Start, [left, y + 18.0], &format!("Stage {}", stage.id.0));
    if stage.replicas > 1 {
        picture.text("quiet small", Anchor::End, [end, y + 18.0], &format!("{} replicas", stage.replicas));
    }
    picture.text("small quiet", Anchor::Start, [left, y + 34.0], &short(&layers(stage), 22));
    picture.text("small figure", Anchor::Start, [left, y + 51.0], &quantity::duration(stage.fwd_us + stage.bwd_us));
    picture.text("small figure", Anchor::End, [end, y + 51.0], &quantity::bytes(stage.memory.total));
    picture.rounded_rect("track", [left, y + 58.0, inner_width, 5.0], 2.5);
    picture.rounded_rect("forward", [left, y + 58.0, (inner_width * load).max(1.0), 5.0], 2.5);
    let edge_text = |edge: &&&Edge| match is_next(edge, edge.from.index()) {
        true => format!("→ {}", quantity::bytes(edge.bytes)),
        false => format!("{} to {}", quantity::bytes(edge.bytes), edge.to.0),
    };
    let sends: Vec<String> = edges_out.iter().map(|edge| edge_text(&edge)).collect();
    picture.text("small quiet figure", Anchor::Start, [left, y + 79.0], &shorten(&sends, inner_width));
    let weights =
        stage.weight_grad_us.map_or(String::new(), |us| format!(" ({} for weight gradients)", quantity::duration(us)));
    let sharing_text = stage.tensor_parallel.as_ref().map_or(String::new(), |sharing| {
        let (unsharded, collectives) = (
            sharing.unsharded_fwd_us + sharing.unsharded_bwd_us,
            sharing.collective_fwd_us + sharing.collective_bwd_us,
        );
        let [unsharded, collectives] = [unsharded, collectives].map(quantity::duration);
        format!(
            "tensor parallel, degree {}: {unsharded} on one device, {collectives} for collectives\n",
            stage.degree()
        )
    });
    let hint = format!(
        "stage {} on {}\n{} forward, {} backward{weights}, load {:.0} %\n{sharing_text}{} of memory{}\nsends {}",
        stage.id.0,
        short(&ranges(&stage.devices), 40),
        quantity::duration(stage.fwd_us),
        quantity::duration(stage.bwd_us),
        load * 100.0,
        quantity::bytes(stage.memory.total),
        sparing(stage),
        if sends.is_empty() { "nothing".to_string() } else { sends.join(", ") }
    );
    picture.rect("over", [x, y, BOX[0], BOX[1]], Some(&hint));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_text_fits_its_box() {
        let sends = ["→ 100.7 MB", "100.7 MB to 13"].map(str::to_string);
        assert_eq!(shorten(&sends, 200.0), "→ 100.7 MB, 100.7 MB to 13");
        assert_eq!(shorten(&sends, 128.0), "→ 100.7 MB, 1 more");
        assert_eq!(shorten(&sends[..1], 10.0), "→ 100.7 MB");
    }
}
