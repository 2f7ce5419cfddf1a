//! Peak memory of one device of each stage by component, against the limit. A device with several stages has the sum.

use crate::export::axis::{Axis, Unit};
use crate::export::escape::short;
use crate::export::report::markup::Table;
use crate::export::svg::{Anchor, Svg, width};
use crate::plan::device_memory::{DeviceMemory, held};
use crate::plan::{Plan, StageMemory};
use crate::text::quantity;

/// Maximum number of bars drawn; the table has all.
const MOST: usize = 256;
/// With more bars, thin bars are used.
const THICK: usize = 24;
const WIDE: f64 = 1060.0;
/// Minimum width of the label column.
const LEFT: f64 = 92.0;
const RIGHT: f64 = 96.0;
const TOP: f64 = 48.0;
/// Heights of thick and thin bars, without and with spacing.
const TALL: [f64; 2] = [20.0, 12.0];
const PITCH: [f64; 2] = [28.0, 16.0];

/// Memory components in drawing order.
fn parts(memory: &StageMemory) -> [(&'static str, u64); 9] {
    [
        ("weights", memory.weights),
        ("frozen weights", memory.frozen),
        ("versions", memory.versions),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("messages", memory.messages),
        ("workspace", memory.workspace),
        ("split backward", memory.split_backward),
    ]
}

/// `Stage 3`, or `Stages 3, 4` if they share a device.
fn name(bar: &DeviceMemory) -> String {
    let stages: Vec<String> = bar.stages.iter().map(usize::to_string).collect();
    let word = if stages.len() == 1 { "Stage" } else { "Stages" };
    short(&format!("{word} {}", stages.join(", ")), 14)
}

pub fn draw(plan: &Plan) -> Svg {
    let memories = held(plan);
    let bars = &memories[..memories.len().min(MOST)];
    let size = usize::from(bars.len() > THICK);
    let (height, pitch) = (TALL[size], PITCH[size]);
    let bottom = TOP + pitch * bars.len() as f64;
    let mut picture = Svg::new(WIDE, bottom + 28.0, "Memory of each stage by component");
    let peak = bars.iter().map(|bar| bar.memory.total).max().unwrap_or(0) as f64;
    let limit = plan.cluster.memory_per_device.map(|limit| limit.0 as f64);
    // A limit far above the memory used would make the bars invisible.
    let shows_limit = limit.filter(|limit| *limit <= 8.0 * peak);
    let axis = Axis::upto(shows_limit.unwrap_or(0.0).max(peak), 8, Unit::Bytes);
    let longest = bars.iter().map(|bar| width(&name(bar), 13.0)).fold(0.0, f64::max);
    let left = LEFT.max(longest + 24.0);
    let span = WIDE - left - RIGHT;
    let x = |bytes: f64| left + span * axis.share(bytes);
    let is_used = |part: usize| memories.iter().any(|bar| parts(&bar.memory)[part].1 > 0);
    let used = parts(&StageMemory::default()).into_iter().enumerate().filter(|(at, _)| is_used(*at));
    picture.legend(left, used.map(|(at, (name, _))| (format!("s{at}"), name)));
    picture.vertical_grid(&axis, &x, [TOP - 6.0, bottom]);
    for (at, bar) in bars.iter().enumerate() {
        let y = TOP + pitch * at as f64;
        let middle = y + height / 2.0 + 4.0;
        let class = if size == 0 { "" } else { "small" };
        picture.text(class, Anchor::End, [left - 12.0, middle], &name(bar));
        let mut from = 0.0;
        for (part, (part_name, bytes)) in parts(&bar.memory).into_iter().enumerate() {
            let to = from + bytes as f64;
            let hint = format!("{}: {part_name} {}", name(bar), quantity::bytes(bytes));
            if bytes > 0 {
                picture.rect(&format!("s{part}"), [x(from), y, x(to) - x(from), height], Some(&hint));
            }
            from = to;
        }
        let total = quantity::bytes(bar.memory.total);
        let (at, end) = (x(from) + 8.0, x(from) + 8.0 + width(&total, 11.0));
        // Keeps the label clear of the limit line.
        let limit_line = shows_limit.map(&x).filter(|line| (at - 4.0..end + 4.0).contains(line));
        picture.text("small figure", Anchor::Start, [limit_line.map_or(at, |line| line + 6.0), middle], &total);
    }
    picture.line("axis", [left, bottom], [WIDE - RIGHT, bottom]);
    if let Some(limit) = shows_limit {
        picture.line("limit", [x(limit), TOP - 10.0], [x(limit), bottom]);
        let label = format!("limit {}", quantity::bytes(limit as u64));
        picture.text("limit-text small", Anchor::Middle, [x(limit), TOP - 14.0], &label);
    }
    picture
}

pub fn table(plan: &Plan) -> String {
    let limit = plan.cluster.memory_per_device;
    let caption = match limit {
        Some(limit) => format!("Bytes per device of each stage; the limit is {}.", quantity::bytes(limit.0)),
        None => "Bytes per device of each stage; no limit was set.".to_string(),
    };
    let names = parts(&StageMemory::default()).map(|(name, _)| name);
    let header = [&["stage"][..], &names, &["total", "of the limit"]].concat();
    let mut table = Table::new(&caption, &header, &(1..header.len()).collect::<Vec<_>>());
    for bar in held(plan) {
        let mut cells = vec![bar.stages.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")];
        cells.extend(parts(&bar.memory).iter().map(|(_, bytes)| quantity::bytes(*bytes)));
        cells.push(quantity::bytes(bar.memory.total));
        cells.push(match limit {
            Some(limit) if limit.0 > 0 => format!("{:.1} %", bar.memory.total as f64 / limit.0 as f64 * 100.0),
            _ => String::new(),
        });
        table.row(&cells);
    }
    table.html()
}
