//! The stages as boxes in a row, with their replicas and the transfers between them. Plans with many stages use `grid`.

use crate::export::escape::short;
use crate::export::report::grid;
use crate::export::report::markup::Table;
use crate::export::stage_name::{layers, ranges, replicas, sparing};
use crate::export::svg::{Anchor, Svg, width};
use crate::plan::{Edge, Plan, Stage};
use crate::text::quantity;

/// Maximum number of stages drawn; the table has all.
const MOST: usize = 256;
const IN_A_ROW: usize = 4;
const BOX: [f64; 2] = [176.0, 118.0];
const GAP: f64 = 92.0;
const TOP: f64 = 18.0;

pub fn draw(plan: &Plan) -> Svg {
    let stages = &plan.stages[..plan.stages.len().min(MOST)];
    let max_load = stages.iter().map(load).fold(0.0, f64::max);
    let share = |stage: &Stage| if max_load > 0.0 { load(stage) / max_load } else { 0.0 };
    if stages.len() > IN_A_ROW {
        return grid::draw(plan, stages, &share);
    }
    let is_next = |edge: &Edge| edge.to.index() == edge.from.index() + 1;
    // Edges that skip stages or go backwards: instances of device placement may send to an earlier stage.
    let skips: Vec<&Edge> = plan.edges.iter().filter(|edge| !is_next(edge)).collect();
    let spans: Vec<(u32, u32)> =
        skips.iter().map(|edge| (edge.from.0.min(edge.to.0), edge.from.0.max(edge.to.0))).collect();
    let (lanes, depth) = rows(&spans);
    let left = |at: usize| 2.0 + at as f64 * (BOX[0] + GAP);
    let lanes_height = if skips.is_empty() { 0.0 } else { 8.0 + 16.0 * depth as f64 };
    let canvas_width = left(stages.len().saturating_sub(1)) + BOX[0] + 14.0;
    let mut picture =
        Svg::new(canvas_width, TOP + BOX[1] + 12.0 + lanes_height, "Stages and the tensors sent between them");
    for (at, stage) in stages.iter().enumerate() {
        draw_stage(&mut picture, stage, [left(at), TOP], share(stage));
    }
    let middle = TOP + BOX[1] / 2.0;
    for edge in plan.edges.iter().filter(|edge| is_next(edge)) {
        let from = left(edge.from.index()) + BOX[0] + cards(&stages[edge.from.index()]);
        let to = left(edge.to.index()) - 1.0;
        picture.line("arrow", [from + 3.0, middle], [to - 7.0, middle]);
        picture.path("head", &[[to, middle], [to - 8.0, middle - 4.0], [to - 8.0, middle + 4.0]], true);
        let centre = (from + to) / 2.0;
        picture.text("small figure", Anchor::Middle, [centre, middle - 8.0], &quantity::bytes(edge.bytes));
        let tensors = match edge.tensors.len() {
            0 => String::new(),
            1 => "1 tensor".to_string(),
            count => format!("{count} tensors"),
        };
        picture.text("small quiet", Anchor::Middle, [centre, middle + 18.0], &tensors);
    }
    for (edge, lane) in skips.iter().zip(lanes) {
        // Backward edges attach at separate points.
        let side = if edge.to > edge.from { 18.0 } else { -50.0 };
        let from = left(edge.from.index()) + BOX[0] / 2.0 + side;
        let to = left(edge.to.index()) + BOX[0] / 2.0 - side;
        let (start, depth) = (TOP + BOX[1], TOP + BOX[1] + 22.0 + 16.0 * lane as f64);
        picture.path("arrow", &[[from, start + 7.0], [from, depth], [to, depth], [to, start + 9.0]], false);
        picture.path("head", &[[to, start + 2.0], [to - 4.0, start + 10.0], [to + 4.0, start + 10.0]], true);
        let label = quantity::bytes(edge.bytes);
        let label_width = width(&label, 11.0) + 10.0;
        picture.rounded_rect("lane", [(from + to) / 2.0 - label_width / 2.0, depth - 8.0, label_width, 16.0], 3.0);
        picture.text("small figure", Anchor::Middle, [(from + to) / 2.0, depth + 4.0], &label);
    }
    picture
}

fn draw_stage(picture: &mut Svg, stage: &Stage, [x, y]: [f64; 2], share: f64) {
    for card in (1..=(stage.replicas.saturating_sub(1)).min(3)).rev() {
        let by = 4.0 * f64::from(card);
        picture.rounded_rect("behind", [x + by, y - by, BOX[0], BOX[1]], 7.0);
    }
    picture.rounded_rect("box", [x, y, BOX[0], BOX[1]], 7.0);
    let left = x + 13.0;
    picture.text("strong", Anchor::Start, [left, y + 22.0], &format!("Stage {}", stage.id.0));
    let copies =
        format!("{} replica{}", replicas(stage), if stage.replicas == 1 && stage.degree() == 1 { "" } else { "s" });
    picture.text("quiet small", Anchor::End, [x + BOX[0] - 13.0, y + 22.0], &copies);
    picture.text("small quiet", Anchor::Start, [left, y + 41.0], &short(&layers(stage), 26));
    let time = quantity::duration(stage.fwd_us + stage.bwd_us);
    picture.text("small figure", Anchor::Start, [left, y + 60.0], &format!("{time} per micro-batch"));
    let memory = quantity::bytes(stage.memory.total);
    let recomputed = sparing(stage);
    picture.text("small figure", Anchor::Start, [left, y + 77.0], &format!("{memory} of memory{recomputed}"));
    let bar_width = BOX[0] - 26.0;
    picture.rounded_rect("track", [left, y + 90.0, bar_width, 6.0], 3.0);
    picture.rounded_rect("forward", [left, y + 90.0, (bar_width * share).max(1.0), 6.0], 3.0);
    picture.text("small quiet figure", Anchor::Start, [left, y + 109.0], &format!("load {:.0} %", share * 100.0));
}

/// Time of a stage per micro-batch, with micro-batches distributed round-robin over the replicas.
fn load(stage: &Stage) -> f64 {
    (stage.fwd_us + stage.bwd_us) / f64::from(stage.replicas.max(1))
}

fn cards(stage: &Stage) -> f64 {
    4.0 * f64::from(stage.replicas.saturating_sub(1).min(3))
}

/// Assigns spans to rows without overlap; also returns the number of rows.
fn rows(spans: &[(u32, u32)]) -> (Vec<usize>, usize) {
    let mut ends: Vec<Vec<(u32, u32)>> = Vec::new();
    let mut lanes = Vec::with_capacity(spans.len());
    for &(from, to) in spans {
        let is_free = |lane: &Vec<(u32, u32)>| lane.iter().all(|(start, end)| to <= *start || from >= *end);
        let at = ends.iter().position(is_free).unwrap_or(ends.len());
        if at == ends.len() {
            ends.push(Vec::new());
        }
        ends[at].push((from, to));
        lanes.push(at);
    }
    (lanes, ends.len())
}

pub fn table(plan: &Plan) -> String {
    let who = ["stage", "ops", "layers", "replicas", "all-reduces", "devices"];
    let what = ["forward", "backward", "weight gradients", "memory", "in flight", "versions", "sends"];
    let caption = "Stages. Times are per micro-batch on one replica.";
    let mut table = Table::new(caption, &[&who[..], &what].concat(), &[1, 3, 4, 6, 7, 8, 9, 10, 11]);
    for (at, stage) in plan.stages.iter().enumerate() {
        let sends = plan.edges.iter().filter(|edge| edge.from == stage.id);
        let sends = sends.map(|edge| format!("{} to {}", quantity::bytes(edge.bytes), edge.to.0));
        let number = |list: &[u32]| list.get(at).map_or(String::new(), u32::to_string);
        table.row(&[
            stage.id.0.to_string(),
            quantity::count(stage.op_ids().count() as u64),
            short(&layers(stage), 60),
            replicas(stage),
            if stage.replicas > 1 { stage.buckets.len().max(1).to_string() } else { String::new() },
            short(&ranges(&stage.devices), 40),
            quantity::duration(stage.fwd_us),
            quantity::duration(stage.bwd_us),
            stage.weight_grad_us.map_or(String::new(), quantity::duration),
            quantity::bytes(stage.memory.total) + &sparing(stage),
            number(&plan.schedule.in_flight),
            number(&plan.schedule.weight_versions),
            sends.collect::<Vec<_>>().join(", "),
        ]);
    }
    let hidden_stages = plan.stages.len().saturating_sub(MOST);
    let note = if hidden_stages > 0 {
        format!("<p class=\"quiet\">The graph leaves out the last {hidden_stages} stages.</p>")
    } else {
        String::new()
    };
    note + &table.html()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_that_overlap_get_rows_of_their_own() {
        assert_eq!(rows(&[(0, 2), (1, 3), (2, 4)]), (vec![0, 1, 0], 2));
    }
}
