//! Gantt chart of the simulated schedule: one row per worker.
//!
//! Below the computations of each worker, a thin lane shows its sends and the all-reduces of its stages. A run with too
//! many spans is drawn in time slices instead, each filled in proportion to the worker's busy time.

use crate::export::axis::{Axis, Unit};
use crate::export::report::Played;
use crate::export::report::markup::{Table, paragraph};
use crate::export::svg::{Anchor, Svg, width};
use crate::plan::StageId;
use crate::schedule::{Instruction, MicrobatchId, Payload};
use crate::simulate::{Activity, Span, Timeline, Track};
use crate::text::quantity;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of workers drawn; with more, only the first replica of each rank is drawn.
const MOST_WORKERS: usize = 64;
const MOST_ROWS: usize = 128;
/// Approximate maximum number of rectangles.
const MOST_SPANS: usize = 4_200;
/// Maximum number of time slices over all rows. It exceeds the number of rectangles because slices have no labels.
const MOST_SLICES: usize = 12_000;

const WIDE: f64 = 1060.0;
const LEFT: f64 = 54.0;
const TOP: f64 = 54.0;

/// Activity classes and their labels, in legend order.
const KINDS: [(&str, &str); 10] = [
    ("forward", "forward"),
    ("recompute", "recomputation"),
    ("backward", "backward"),
    ("backward-input", "backward, input gradients"),
    ("backward-weight", "backward, weight gradients"),
    ("step", "optimizer step"),
    ("activation", "activations sent"),
    ("gradient", "gradients sent"),
    ("all-reduce", "all-reduce"),
    ("wait", "wait"),
];

struct Drawn<'a> {
    timeline: &'a Timeline,
    /// Workers that have a row.
    rows: Vec<usize>,
    /// For each row, the spans in its lane.
    lanes: Vec<Vec<&'a Span>>,
    is_sliced: bool,
}

impl<'a> Drawn<'a> {
    fn of(played: &'a Played) -> Drawn<'a> {
        let timeline = &played.timeline;
        let workers: Vec<usize> = (0..timeline.workers.len()).collect();
        let rows: Vec<usize> = if workers.len() <= MOST_WORKERS {
            workers
        } else {
            // The first replica; the others do the same slightly later.
            let first = workers.into_iter().filter(|&worker| timeline.workers[worker].name.ends_with(".0"));
            first.take(MOST_ROWS).collect()
        };
        let lane = |&worker: &usize| -> Vec<&Span> {
            let Track { name, spans } = &timeline.workers[worker];
            let stages: BTreeSet<StageId> = spans.iter().filter_map(|span| Some(item(span.activity)?.0)).collect();
            let reduces: Vec<String> = stages.iter().map(|stage| format!("all-reduce {}", stage.0)).collect();
            let sends = format!("{name} > ");
            let links =
                timeline.links.iter().filter(|link| link.name.starts_with(&sends) || reduces.contains(&link.name));
            links.flat_map(|link| &link.spans).collect()
        };
        let lanes: Vec<Vec<&Span>> = rows.iter().map(lane).collect();
        let spans: usize = rows.iter().map(|&row| timeline.workers[row].spans.len()).sum();
        let transfers: usize = lanes.iter().map(Vec::len).sum();
        Drawn { timeline, rows, lanes, is_sliced: spans + transfers > MOST_SPANS }
    }
}

pub fn draw(played: &Played) -> Svg {
    let drawn = Drawn::of(played);
    let timeline = drawn.timeline;
    let heights = if drawn.rows.len() > 16 { [13.0, 4.0, 4.0] } else { [21.0, 6.0, 7.0] };
    let pitch: f64 = heights.iter().sum();
    let bottom = TOP + pitch * drawn.rows.len() as f64;
    let mut picture = Svg::new(WIDE, bottom + 30.0, "Pipeline schedule: computation and transfers over time");
    let axis = Axis::of(timeline.makespan, 10, Unit::Time);
    let span = WIDE - LEFT - 12.0;
    let x = |time: f64| LEFT + span * axis.share(time);
    legend(&mut picture, &drawn);
    picture.vertical_grid(&axis, &x, [TOP - 4.0, bottom]);
    phases(&mut picture, played, &x, bottom);
    let versions = versions(played);
    for (at, &worker) in drawn.rows.iter().enumerate() {
        let y = TOP + pitch * at as f64;
        let track = &timeline.workers[worker];
        picture.text("quiet small figure", Anchor::End, [LEFT - 8.0, y + heights[0] / 2.0 + 4.0], &track.name);
        let busy = if timeline.makespan > 0.0 { timeline.busy(worker) / timeline.makespan } else { 0.0 };
        let tooltip = format!("worker {}\nbusy {:.1} % of the time", track.name, busy * 100.0);
        picture.rect("lane", [LEFT, y, span, heights[0]], Some(&tooltip));
        let lane_y = y + heights[0] + 1.0;
        if drawn.is_sliced {
            let (spans, row) = (track.spans.iter().collect::<Vec<_>>(), [y, heights[0]]);
            for (spans, row) in [(&spans, row), (&drawn.lanes[at], [lane_y, heights[1]])] {
                slices(&mut picture, spans, timeline.makespan, slots(&drawn), row, &x);
            }
            continue;
        }
        for span in &track.spans {
            let span_width = x(span.end) - x(span.start);
            let hint = hint(span, &versions);
            let drawn_width = (span_width - 0.4).max(0.3);
            picture.rect(class(span.activity), [x(span.start), y, drawn_width, heights[0]], Some(&hint));
            let Some((_, item)) = item(span.activity) else { continue };
            let number = item.0.to_string();
            if span_width > 7.0 + 6.0 * number.len() as f64 && heights[0] > 12.0 {
                let class = format!("on on-{}", class(span.activity));
                let middle = [x(span.start) + span_width / 2.0, y + heights[0] / 2.0 + 3.5];
                picture.text(&class, Anchor::Start, middle, &number);
            }
        }
        for span in &drawn.lanes[at] {
            let span_width = (x(span.end) - x(span.start)).max(0.3);
            let hint = hint(span, &versions);
            picture.rect(class(span.activity), [x(span.start), lane_y, span_width, heights[1]], Some(&hint));
        }
    }
    picture.line("axis", [LEFT, bottom], [WIDE - 12.0, bottom]);
    picture
}

fn legend(picture: &mut Svg, drawn: &Drawn<'_>) {
    let spans = drawn.rows.iter().flat_map(|&row| &drawn.timeline.workers[row].spans);
    let all_spans = spans.chain(drawn.lanes.iter().flatten().copied());
    let kinds: BTreeSet<&str> = all_spans.map(|span| class(span.activity)).collect();
    picture.legend(LEFT, KINDS.into_iter().filter(|(kind, _)| kinds.contains(kind)));
}

/// Marks warm-up, steady state and drain; under a flush, the ends of minibatches.
fn phases(picture: &mut Svg, played: &Played, x: &dyn Fn(f64) -> f64, bottom: f64) {
    let timeline = &played.timeline;
    let (y, height) = (26.0, 16.0);
    let mut band = |from: f64, to: f64, name: &str| {
        let (left, right) = (x(from), x(to));
        picture.rect("phase", [left, y, (right - left - 2.0).max(0.0), height], Some(name));
        if right - left > width(name, 11.0) + 8.0 {
            picture.text("quiet small", Anchor::Middle, [(left + right) / 2.0 - 1.0, y + 12.0], name);
        }
    };
    if !played.program.schedule.flushes() {
        let Some((warm_end, drain_start)) = steady_interval(timeline) else { return };
        band(0.0, warm_end, "warm-up");
        band(warm_end, drain_start, "steady");
        band(drain_start, timeline.makespan, "drain");
        return;
    }
    let ends = flush_times(played);
    let mut from = 0.0;
    for (at, end) in ends.iter().enumerate() {
        // The last minibatch ends when its gradients are reduced and applied, which no later computation waits for.
        let end = if at + 1 == ends.len() { &timeline.makespan } else { end };
        let name = if ends.len() == 1 {
            "one minibatch: fill, steady state, drain".to_string()
        } else {
            format!("minibatch {at}")
        };
        band(from, *end, &name);
        from = *end;
    }
    for end in ends.iter().take(ends.len().saturating_sub(1)) {
        picture.line("flush", [x(*end), y], [x(*end), bottom]);
    }
}

/// The steady state: from the first backward of the last worker (or its first computation in inference) to the last
/// forward of the first stage.
fn steady_interval(timeline: &Timeline) -> Option<(f64, f64)> {
    let has_backward =
        timeline.workers.iter().flat_map(|track| &track.spans).any(|span| class(span.activity).starts_with("backward"));
    let is_counted = |span: &&Span| match has_backward {
        true => class(span.activity).starts_with("backward"),
        false => span.activity.computes(),
    };
    let starts = timeline.workers.iter().map(|track| track.spans.iter().find(is_counted).map(|span| span.start));
    let warm_end = starts.collect::<Option<Vec<f64>>>()?.into_iter().fold(0.0, f64::max);
    let first = timeline.workers.first()?;
    let forwards = first.spans.iter().filter(|span| class(span.activity) == "forward");
    let drain_start = forwards.map(|span| span.end).fold(0.0, f64::max);
    (drain_start > warm_end).then_some((warm_end, drain_start))
}

fn flush_times(played: &Played) -> Vec<f64> {
    let last = |items: &[f64]| items.iter().copied().fold(0.0, f64::max);
    let ends = played.timeline.finished.chunks(played.program.microbatches.max(1) as usize).map(last);
    ends.take(64).collect()
}

fn slots(drawn: &Drawn<'_>) -> usize {
    (MOST_SLICES / drawn.rows.len().max(1)).clamp(48, 480)
}

/// Fills each time slice from below with the fraction of each activity class.
fn slices(
    picture: &mut Svg,
    spans: &[&Span],
    makespan: f64,
    slots: usize,
    [y, row_height]: [f64; 2],
    x: &dyn Fn(f64) -> f64,
) {
    if makespan <= 0.0 {
        return;
    }
    let slot_us = makespan / slots as f64;
    let mut shares: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    for span in spans {
        let kind = KINDS.iter().position(|(kind, _)| *kind == class(span.activity)).unwrap_or(KINDS.len() - 1);
        let (from, to) = ((span.start / slot_us) as usize, (span.end / slot_us) as usize);
        for slot in from..=to.min(slots - 1) {
            let [left, right] = [slot as f64 * slot_us, (slot + 1) as f64 * slot_us];
            let overlap = (span.end.min(right) - span.start.max(left)).max(0.0);
            *shares.entry((slot, kind)).or_default() += overlap / slot_us;
        }
    }
    let mut filled = (usize::MAX, 0.0);
    let mut blocks: [Vec<[f64; 4]>; KINDS.len()] = Default::default();
    for ((slot, kind), share) in shares {
        if filled.0 != slot {
            filled = (slot, 0.0);
        }
        let share = share.min(1.0 - filled.1);
        if share < 0.004 {
            continue;
        }
        let [left, right] = [slot, slot + 1].map(|slot| x(slot as f64 * slot_us));
        let top = y + row_height * (1.0 - filled.1 - share);
        match blocks[kind].last_mut() {
            // Consecutive slices with equal filling are merged into one block.
            Some([x, y, width, height])
                if (*x + *width - left).abs() < 0.2 && *y == top && *height == row_height * share =>
            {
                *width = right - *x + 0.1;
            }
            _ => blocks[kind].push([left, top, right - left + 0.1, row_height * share]),
        }
        filled.1 += share;
    }
    KINDS.iter().zip(&blocks).for_each(|((kind, _), blocks)| picture.blocks(kind, blocks));
}

fn class(activity: Activity) -> &'static str {
    match activity {
        Activity::Transfer(_, Payload::Activation, _) => "activation",
        Activity::Transfer(_, Payload::Gradient, _) => "gradient",
        other => other.kind(),
    }
}

fn item(activity: Activity) -> Option<(StageId, MicrobatchId)> {
    match activity {
        Activity::Forward(stage, item)
        | Activity::Recompute(stage, item)
        | Activity::Backward(stage, item)
        | Activity::BackwardInput(stage, item)
        | Activity::BackwardWeight(stage, item) => Some((stage, item)),
        _ => None,
    }
}

fn versions(played: &Played) -> BTreeMap<(StageId, MicrobatchId), u32> {
    let instructions = played.program.workers.iter().flat_map(|worker| &worker.instructions);
    let forwards = instructions.filter_map(|instruction| match instruction {
        Instruction::Forward { stage, item, version, .. } => Some(((*stage, *item), version.0)),
        _ => None,
    });
    forwards.collect()
}

fn hint(span: &Span, versions: &BTreeMap<(StageId, MicrobatchId), u32>) -> String {
    let when = format!(
        "{} to {}, {}",
        quantity::duration(span.start),
        quantity::duration(span.end),
        quantity::duration(span.end - span.start)
    );
    let what = match span.activity {
        Activity::Transfer(stage, kind, item) => {
            let what = if kind == Payload::Activation { "activations" } else { "gradients" };
            format!("stage {} sends {what} of micro-batch {}", stage.0, item.0)
        }
        Activity::Step(stage, round) => format!("stage {} runs the optimizer step of round {round}", stage.0),
        Activity::AllReduce(stage, round, bucket) => {
            let part = if bucket == 0 { String::new() } else { format!(", bucket {bucket}") };
            format!("stage {} all-reduces round {round}{part}", stage.0)
        }
        other => match item(other) {
            Some((stage, item)) => {
                let version = versions.get(&(stage, item)).map_or(String::new(), |v| format!(", weight version {v}"));
                format!("stage {}, {} of micro-batch {}{version}", stage.0, other.kind(), item.0)
            }
            None => other.to_string(),
        },
    };
    format!("{what}\n{when}")
}

pub fn table(played: &Played) -> String {
    let drawn = Drawn::of(played);
    let timeline = &played.timeline;
    let mut notes = format!(
        "{} simulated in {}; {:.1} % of all workers' time is idle, including fill and drain.",
        quantity::plural(u64::from(played.minibatches), "minibatch", "minibatches"),
        quantity::duration(timeline.makespan),
        timeline.bubble() * 100.0
    );
    if !played.program.schedule.flushes()
        && let Some((warm_end, drain_start)) = steady_interval(timeline)
    {
        notes += &format!(
            " Warm-up ends when every worker has begun its first backward, after {}; the drain begins when the first \
             stage has begun its last micro-batch, after {}.",
            quantity::duration(warm_end),
            quantity::duration(drain_start)
        );
    }
    if let Some(cores) = played.shared_cores {
        notes += &format!(" The {} workers share {cores} cores.", timeline.workers.len());
    }
    if drawn.rows.len() < timeline.workers.len() {
        notes += &format!(
            " Of {} workers the timeline shows {}: the first replica of each rank, first ranks first.",
            timeline.workers.len(),
            drawn.rows.len()
        );
    }
    if drawn.is_sliced {
        notes += &format!(
            " The run has too many activities to draw one by one. It is drawn in {} time slices, each filled to the \
             fraction of time the worker was busy.",
            slots(&drawn)
        );
    }
    let header =
        ["worker", "busy", "forwards", "backwards", "first start", "last end", "peak in flight", "peak memory"];
    let mut table = Table::new("Workers, as stage.replica.", &header, &[1, 2, 3, 4, 5, 6, 7]);
    for &worker in &drawn.rows {
        let spans = &timeline.workers[worker].spans;
        let count = |kind: &str| spans.iter().filter(|span| class(span.activity).starts_with(kind)).count().to_string();
        let busy = if timeline.makespan > 0.0 { timeline.busy(worker) / timeline.makespan } else { 0.0 };
        table.row(&[
            timeline.workers[worker].name.clone(),
            format!("{:.1} %", busy * 100.0),
            count("forward"),
            count("backward"),
            quantity::duration(spans.first().map_or(0.0, |span| span.start)),
            quantity::duration(spans.last().map_or(0.0, |span| span.end)),
            timeline.peak_in_flight[worker].to_string(),
            quantity::bytes(timeline.peak_memory(worker)),
        ]);
    }
    paragraph("quiet", &notes) + &table.html()
}
