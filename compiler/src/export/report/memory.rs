//! What one device of each stage holds at its fullest, part by part, against the limit.

use crate::export::axis::{Axis, Unit};
use crate::export::quantity;
use crate::export::report::markup::{Column, Table};
use crate::export::svg::{Anchor, Svg, width};
use crate::plan::{Plan, StageMemory};

/// Stages that are drawn at most; the table has them all.
const MOST: usize = 64;
const WIDE: f64 = 1060.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 96.0;
const TOP: f64 = 48.0;
const PITCH: f64 = 28.0;

/// The parts by name, in the order in which they are drawn.
fn parts(memory: &StageMemory) -> [(&'static str, u64); 8] {
    [
        ("weights", memory.weights),
        ("versions", memory.versions),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("messages", memory.messages),
        ("workspace", memory.workspace),
        ("split backward", memory.between),
    ]
}

/// The picture.
pub fn draw(plan: &Plan) -> Svg {
    let stages = &plan.stages[..plan.stages.len().min(MOST)];
    let bottom = TOP + PITCH * stages.len() as f64;
    let mut picture = Svg::new(WIDE, bottom + 28.0, "Memory of each stage by part");
    let fullest = stages.iter().map(|stage| stage.memory.total).max().unwrap_or(0) as f64;
    let limit = plan.cluster.memory_per_device.map(|limit| limit.0 as f64);
    // A limit far beyond what is held would leave nothing to see of the bars.
    let shows_limit = limit.filter(|limit| *limit <= 8.0 * fullest);
    let axis = Axis::upto(shows_limit.unwrap_or(0.0).max(fullest), 8, Unit::Bytes);
    let span = WIDE - LEFT - RIGHT;
    let x = |bytes: f64| LEFT + span * axis.share(bytes);
    let mut key = LEFT;
    for (at, (name, _)) in parts(&StageMemory::default()).iter().enumerate() {
        picture.rounded(&format!("s{at}"), [key, 4.0, 12.0, 12.0], 2.0);
        picture.text("quiet small", Anchor::Start, [key + 18.0, 14.0], name);
        key += 18.0 + width(name, 11.0) + 20.0;
    }
    for (value, label) in &axis.ticks {
        picture.line("grid", [x(*value), TOP - 6.0], [x(*value), bottom]);
        picture.text("quiet small figure", Anchor::Middle, [x(*value), bottom + 17.0], label);
    }
    for (at, stage) in stages.iter().enumerate() {
        let y = TOP + PITCH * at as f64;
        picture.text("", Anchor::End, [LEFT - 12.0, y + 15.0], &format!("Stage {}", stage.id.0));
        let mut from = 0.0;
        for (part, (name, bytes)) in parts(&stage.memory).into_iter().enumerate() {
            let to = from + bytes as f64;
            let hint = format!("stage {}: {name} {}", stage.id.0, quantity::bytes(bytes));
            if bytes > 0 {
                picture.rect(&format!("s{part}"), [x(from), y, x(to) - x(from), 20.0], Some(&hint));
            }
            from = to;
        }
        picture.text("small figure", Anchor::Start, [x(from) + 8.0, y + 14.0], &quantity::bytes(stage.memory.total));
    }
    picture.line("axis", [LEFT, bottom], [WIDE - RIGHT, bottom]);
    if let Some(limit) = shows_limit {
        picture.line("limit", [x(limit), TOP - 10.0], [x(limit), bottom]);
        let label = format!("limit {}", quantity::bytes(limit as u64));
        picture.text("limit-text small", Anchor::Middle, [x(limit), TOP - 14.0], &label);
    }
    picture
}

/// What the picture shows, in words and numbers.
pub fn table(plan: &Plan) -> String {
    let limit = plan.cluster.memory_per_device;
    let caption = match limit {
        Some(limit) => format!("Bytes on one device of each stage; the limit is {}.", quantity::bytes(limit.0)),
        None => "Bytes on one device of each stage; no limit was set.".to_string(),
    };
    let mut columns = vec![("stage", Column::Words)];
    columns.extend(parts(&StageMemory::default()).iter().map(|(name, _)| (*name, Column::Numbers)));
    columns.extend([("total", Column::Numbers), ("of the limit", Column::Numbers)]);
    let mut table = Table::new(&caption, &columns);
    for stage in &plan.stages {
        let mut cells = vec![stage.id.0.to_string()];
        cells.extend(parts(&stage.memory).iter().map(|(_, bytes)| quantity::bytes(*bytes)));
        cells.push(quantity::bytes(stage.memory.total));
        cells.push(match limit {
            Some(limit) if limit.0 > 0 => format!("{:.1} %", stage.memory.total as f64 / limit.0 as f64 * 100.0),
            _ => String::new(),
        });
        table.row(&cells);
    }
    table.html()
}
