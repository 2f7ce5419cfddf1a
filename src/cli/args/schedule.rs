//! The `--schedule` flag.

use compiler::plan::schedule::Schedule;
use compiler::text::suggest::hint;
use pipec::plan::request::ScheduleChoice;
use std::path::PathBuf;

/// The argument that requests a schedule search.
const AUTO: &str = "auto";

/// Names of schedules in other frameworks.
const FOREIGN_NAMES: [(&str, &str); 16] = [
    ("pipedream", "1f1b-rr"),
    ("async", "1f1b-rr"),
    ("pipedream-flush", "1f1b"),
    ("1f1b-flush", "1f1b"),
    ("dapple", "1f1b"),
    ("pipedream-2bw", "2bw"),
    ("fill-drain", "gpipe"),
    ("interleaved-1f1b", "interleaved"),
    ("interleaved1f1b", "interleaved"),
    ("looped-bfs", "bfs"),
    ("loopedbfs", "bfs"),
    ("breadth-first", "bfs"),
    ("zero-bubble", "zb-h1"),
    ("zb", "zb-h1"),
    ("zbvzerobubble", "zbv"),
    ("dualpipe", "dualpipev"),
];

/// Reads `--schedule` of `partition`: `auto`, a name, or the path of a file.
pub fn any(text: &str) -> Result<ScheduleChoice, String> {
    if text == AUTO { Ok(ScheduleChoice::Auto) } else { name_or_file(text) }
}

/// Reads `--schedule`: a name, or the path of a file.
pub fn name_or_file(text: &str) -> Result<ScheduleChoice, String> {
    let named_schedules = Schedule::ALL.into_iter().filter(|kind| *kind != Schedule::Csv);
    if is_file(text) {
        return Ok(ScheduleChoice::File(PathBuf::from(text)));
    }
    if let Some(kind) = named_schedules.clone().find(|kind| kind.name() == text) {
        return Ok(ScheduleChoice::Named(kind));
    }
    if text == AUTO {
        return Err(
            "`pipec partition --schedule auto` searches for the best schedule; the plan it writes names the schedule"
                .to_string(),
        );
    }
    let names: Vec<&str> = named_schedules.map(Schedule::name).collect();
    let lower = text.to_lowercase();
    let exact = names.iter().copied().find(|name| *name == lower);
    let of_other_framework = FOREIGN_NAMES.iter().find(|(alias, _)| *alias == lower).map(|(_, name)| *name);
    let suggestion = match of_other_framework.or(exact) {
        Some(name) => format!("; did you mean `{name}`?"),
        None => hint(text, names.iter().copied()),
    };
    Err(format!(
        "write one of {}, or a custom schedule: a table FILE.csv, programs FILE.json{suggestion}",
        names.join(", ")
    ))
}

/// Reads a `--schedule` that must be a file.
pub fn file(text: &str) -> Result<PathBuf, String> {
    is_file(text)
        .then(|| PathBuf::from(text))
        .ok_or_else(|| "write a custom schedule: a table FILE.csv, programs FILE.json".to_string())
}

/// True if a schedule is the path of a file.
fn is_file(text: &str) -> bool {
    text.ends_with(".csv") || text.ends_with(".json")
}
