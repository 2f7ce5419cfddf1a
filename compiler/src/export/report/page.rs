//! Renders the report as one HTML file, without network access or other files.
//!
//! Its content security policy allows only its own style sheet and script, by hash. A name from a model file therefore
//! can neither execute nor load anything. The script only shows tooltips faster; without it nothing is missing. The
//! page has no timestamp, so equal reports give equal bytes.

use crate::export::colour::{PICTURE, variables};
use crate::export::escape::escape;
use crate::export::gradients::gradients;
use crate::export::report::markup::{details, figure, paragraph};
use crate::export::report::{
    Report, alternatives, costs, gantt, graph, measured, memory, over_time, provenance, what_if,
};
use crate::export::svg::Svg;
use crate::plan::{Stage, device_memory};
use crate::text::quantity;
use sha2::{Digest, Sha256};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

pub fn html(report: &Report<'_>) -> String {
    let style = format!("{}{STYLE}{PICTURE}", variables());
    let sections = sections(report);
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src '{}'; script-src '{}'; base-uri 'none'; form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n<style>{style}</style>\n\
         </head>\n<body>\n",
        hash(&style),
        hash(SCRIPT),
        escape(&title(report))
    );
    text += &header(report, &sections);
    for (id, name, content) in &sections {
        text += &format!("<section id=\"{id}\">\n<h2>{}</h2>\n{content}</section>\n", escape(name));
    }
    text + &format!("<div id=\"hint\" hidden></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n")
}

/// All file names that [`pictures`] may return.
pub const PICTURES: [&str; 4] = ["graph.svg", "memory.svg", "gantt.svg", "memory-over-time.svg"];

pub fn pictures(report: &Report<'_>) -> Vec<(&'static str, Svg)> {
    let mut pictures = vec![("graph.svg", graph::draw(report.plan)), ("memory.svg", memory::draw(report.plan))];
    if let Ok(played) = &report.played {
        pictures.push(("gantt.svg", gantt::draw(played)));
        pictures.extend(over_time::draw(played).map(|picture| ("memory-over-time.svg", picture)));
    }
    pictures
}

fn title(report: &Report<'_>) -> String {
    let file = &report.plan.model.file;
    let name = if file.is_empty() { "the model" } else { file };
    format!("{name} in {}", quantity::plural(report.plan.stages.len() as u64, "stage", "stages"))
}

type Section = (&'static str, &'static str, String);

fn sections(report: &Report<'_>) -> Vec<Section> {
    let plan = report.plan;
    let with = |picture: Svg, table: String| figure(&picture.inline()) + &details("As a table", &table);
    let mut sections: Vec<Section> = vec![("stages", "Stages", with(graph::draw(plan), graph::table(plan)))];
    match &report.played {
        Ok(played) => {
            let sums = gradients(plan)
                .map_or(String::new(), |sentence| paragraph("quiet", &format!("Gradients: {sentence}.")));
            sections.push(("time", "Pipeline schedule", sums + &with(gantt::draw(played), gantt::table(played))));
        }
        Err(why) => {
            let text = format!("The programs of this plan cannot be simulated: {why}");
            sections.push(("time", "Pipeline schedule", paragraph("quiet", &text)));
        }
    }
    sections.push(("memory", "Memory", with(memory::draw(plan), memory::table(plan))));
    if let Ok(played) = &report.played
        && let Some(picture) = over_time::draw(played)
    {
        let note = "Weight versions, gradients and saved activations. Optimizer state, messages and workspace are \
                       constant and come on top.";
        let text = paragraph("quiet", note) + &with(picture, over_time::table(played));
        sections.push(("held", "Memory over time", text));
    }
    let bound = paragraph("", &report.bound);
    sections.push((
        "else",
        "Alternatives and lower bound",
        bound + &with(alternatives::draw(report), alternatives::table(report)),
    ));
    sections.push((
        "costs",
        "Costs and cuts",
        match &report.modelled {
            Ok(modelled) => costs::tables(plan, modelled),
            Err(why) => paragraph("quiet", why),
        },
    ));
    if !report.what_if.is_empty() {
        sections.push(("if", "What-if analysis", what_if::strip(report)));
    }
    if let Some(measured) = &report.measured {
        sections.push(("measured", "Measured", measured::section(plan, measured)));
    }
    sections.push(("source", "Provenance", provenance::provenance(report)));
    sections
}

fn header(report: &Report<'_>, sections: &[Section]) -> String {
    let plan = report.plan;
    let mut text = format!("<header>\n<h1>{}</h1>\n", escape(&title(report)));
    report.heading.iter().for_each(|line| text += &paragraph("quiet", line));
    text += &report.verdict.iter().map(|verdict| paragraph("verdict", verdict)).collect::<String>();
    text += &plan.warnings.iter().map(|warning| paragraph("warning", warning)).collect::<String>();
    let limit = plan.cluster.memory_per_device.map(|limit| format!("of {}", quantity::bytes(limit.0)));
    // Stages on the same devices share their workers.
    let ranks = device_memory::held(plan);
    let devices = |stage: &Stage| u64::from(stage.replicas) * u64::from(stage.degree());
    let used_devices: u64 = ranks.iter().map(|rank| devices(&plan.stages[rank.stages[0]])).sum();
    let replicas = plan.stages.iter().map(|stage| stage.replicas.to_string()).collect::<Vec<_>>();
    let shape = if replicas.len() <= 12 {
        replicas.join("-")
    } else {
        quantity::plural(replicas.len() as u64, "stage", "stages")
    };
    let figures = [
        (
            "Time per minibatch",
            quantity::duration(plan.predicted.step_us),
            format!("bottleneck: {}", plan.predicted.bottleneck),
        ),
        (
            "Samples per second",
            quantity::samples(plan.predicted.throughput_per_s),
            format!("schedule {}", plan.schedule.kind.name()),
        ),
        (
            "Replicas per stage",
            shape,
            format!("{used_devices} of {}", quantity::plural(u64::from(plan.cluster.devices), "device", "devices")),
        ),
        (
            "Peak memory per device",
            quantity::bytes(device_memory::fullest(plan)),
            limit.unwrap_or_else(|| "no limit was set".to_string()),
        ),
    ];
    text += "<dl class=\"figures\">";
    for (name, value, note) in figures {
        text += &format!(
            "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>",
            escape(name),
            escape(&value),
            escape(&crate::export::escape::short(&note, 44))
        );
    }
    text += "</dl>\n<nav aria-label=\"Sections\">";
    sections.iter().for_each(|(id, name, _)| text += &format!("<a href=\"#{id}\">{}</a>", escape(name)));
    text + "</nav>\n</header>\n"
}

/// The hash of a style sheet or script in CSP syntax.
fn hash(text: &str) -> String {
    format!("sha256-{}", base64(&Sha256::digest(text.as_bytes())))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_as_policies_name_them() {
        assert_eq!(
            ["", "f", "fo", "foo", "foob"].map(|text| base64(text.as_bytes())),
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]
        );
        assert_eq!(hash(""), "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
    }

    #[test]
    fn page_contains_no_url() {
        assert!(![STYLE, SCRIPT, PICTURE].iter().any(|text| text.contains("http") || text.contains("url(")));
        assert!(!STYLE.contains("</style") && !SCRIPT.contains("</script"));
    }
}
