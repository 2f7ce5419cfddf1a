//! Plans for other numbers of devices and other minibatch sizes.

use crate::export::escape::escape;
use crate::export::report::markup::paragraph;
use crate::export::report::{Report, WhatIf};
use crate::text::quantity;

const SHADES: f64 = 4.0;

/// A heat map of throughput: one column per number of devices, one row per size.
pub fn strip(report: &Report<'_>) -> String {
    let cells = &report.what_if;
    let mut devices: Vec<u32> = cells.iter().map(|cell| cell.devices).collect();
    let mut sizes: Vec<(u64, u32)> = cells.iter().map(|cell| (cell.micro_batch, cell.microbatches)).collect();
    devices.sort_unstable();
    devices.dedup();
    sizes.sort_unstable();
    sizes.dedup();
    let rate = |cell: &WhatIf| cell.answer.as_ref().map_or(0.0, |answer| answer.throughput_per_s);
    let max_rate = cells.iter().map(rate).fold(0.0, f64::max);
    let caption = "Samples per second, replicas of each stage, and peak memory per device; darker is faster. The \
                framed cell is this plan. The others are planned with ops grouped into about 64 runs, and could be \
                slightly faster.";
    let mut text = paragraph("quiet", caption) + "<div class=\"scroll grid-table\"><table><thead><tr><td></td>";
    for &count in &devices {
        let name = quantity::plural(u64::from(count), "device", "devices");
        text += &format!("<th scope=\"col\">{}</th>", escape(&name));
    }
    text += "</tr></thead><tbody>";
    for &(micro_batch, microbatches) in &sizes {
        let size = match microbatches {
            1 => quantity::plural(micro_batch, "sample", "samples"),
            m => format!("{m} × {}", quantity::plural(micro_batch, "sample", "samples")),
        };
        text += &format!("<tr><th scope=\"row\">{}</th>", escape(&size));
        for &count in &devices {
            let found = cells
                .iter()
                .find(|cell| (cell.devices, cell.micro_batch, cell.microbatches) == (count, micro_batch, microbatches));
            text += &found.map_or_else(|| "<td></td>".to_string(), |found| cell(report, found, rate(found), max_rate));
        }
        text += "</tr>";
    }
    text + "</tbody></table></div>\n"
}

fn cell(report: &Report<'_>, cell: &WhatIf, rate: f64, max_rate: f64) -> String {
    let schedule = &report.plan.schedule;
    let is_own = cell.devices == report.plan.cluster.devices
        && (cell.micro_batch, cell.microbatches) == (schedule.micro_batch, schedule.microbatches);
    let class = if is_own { " own-cell" } else { "" };
    match &cell.answer {
        Err(why) => format!("<td class=\"h0 why{class}\"><span>{}</span></td>", escape(why)),
        Ok(answer) => {
            let shade = if max_rate > 0.0 { (rate / max_rate * SHADES).round().clamp(0.0, SHADES) } else { 0.0 };
            let replicas = answer.replicas.iter().map(u32::to_string).collect::<Vec<_>>();
            let shape = match replicas.len() {
                0..=8 => replicas.join("-"),
                count => format!("{count} stages"),
            };
            format!(
                "<td class=\"h{shade:.0}{class}\"><b>{}</b><span>{}</span><span>{}</span></td>",
                escape(&quantity::samples(answer.throughput_per_s)),
                escape(&shape),
                escape(&quantity::bytes(answer.peak_bytes))
            )
        }
    }
}
