//! pipec overwrites only files of the same type that it created: a plan with a plan, a model of pipec with another. Any other existing
//! file, such as a model that a user exported, is never overwritten.
//!
//! The content of a file determines its type, not its name. Empty files, pipes and devices may always be written.

use crate::error::Error;
use crate::files::detect;
use compiler::export::trace::Form;
use compiler::text::name::short_name;
use runtime::data::{npz, weights};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// The type of a file, as far as it decides whether another file may overwrite it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// A pipec file that names its type: `plan`, `profile`, `cluster`.
    Ours(String),
    /// A model made by pipec, from the zoo or an export.
    Model,
    /// Tensors by name that pipec wrote, as safetensors.
    Safetensors,
    /// Tensors by name that pipec wrote, as an archive of numpy.
    Npz,
    /// Metrics of a training run, one line per step.
    Metrics,
    /// A trace, as JSON.
    Trace,
    /// A trace, in Perfetto's native format.
    Perfetto,
    /// The HTML page of a report.
    Page,
    /// A picture of a report or of a sweep.
    Picture,
    /// A schedule: programs, or a table.
    Program,
    /// JSON with these top-level names.
    Names(BTreeSet<String>),
    /// Text that starts with this line.
    Line(String),
    /// Unknown content.
    Bytes,
}

impl Mark {
    pub fn plan() -> Mark {
        Mark::Ours("plan".to_string())
    }

    pub fn profile() -> Mark {
        Mark::Ours("profile".to_string())
    }

    /// The format of a trace with this file name.
    pub fn trace(path: &Path) -> Mark {
        match Form::of(&path.to_string_lossy()) {
            Form::Perfetto => Mark::Perfetto,
            Form::Chrome => Mark::Trace,
        }
    }

    /// The format of tensors with this file name.
    pub fn tensors(path: &Path) -> Mark {
        if path.extension().is_some_and(|extension| extension == "npz") { Mark::Npz } else { Mark::Safetensors }
    }

    /// The name of the file type, without article; `None` if it has no name.
    fn describe(&self) -> Option<String> {
        Some(match self {
            Mark::Ours(kind) => short_name(kind),
            Mark::Model => "model made by pipec".to_string(),
            Mark::Safetensors => ".safetensors file written by pipec".to_string(),
            Mark::Npz => ".npz file written by pipec".to_string(),
            Mark::Metrics => "metrics file of a run".to_string(),
            Mark::Trace | Mark::Perfetto => "trace".to_string(),
            Mark::Page => "page of `pipec report`".to_string(),
            Mark::Picture => "picture made by pipec".to_string(),
            Mark::Program => "schedule".to_string(),
            Mark::Names(_) | Mark::Line(_) | Mark::Bytes => return None,
        })
    }
}

/// Refuses an existing file of another type than `mark`.
pub fn check(path: &Path, mark: &Mark) -> Result<(), Error> {
    let Some(ends) = read_ends(path)? else { return Ok(()) };
    let existing = crate::files::overwrite::mark(&ends);
    // Raw numbers may look like text.
    let is_data = matches!(mark, Mark::Bytes | Mark::Line(_)) && is_own_data(path);
    if is_data || *mark == existing && existing != Mark::Bytes {
        return Ok(());
    }
    let content = match (detect::describe(&ends), existing.describe()) {
        (Some((what, _)), _) => format!(": {what}"),
        (None, Some(name)) => format!(": it is a {name}"),
        (None, None) => String::new(),
    };
    let why = match mark.describe() {
        Some(name) => format!("the existing file is not a {name} and pipec does not overwrite it{content}"),
        None => format!("the existing file is of another type and pipec does not overwrite it{content}"),
    };
    let help = format!("choose another file, or remove this one first: `rm {}`", path.display());
    Err(Error::file("write", path, why).with_help(help))
}

/// Refuses an existing file of another type than these bytes.
pub fn check_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    if read_ends(path)?.is_none() {
        return Ok(());
    }
    let ends = match bytes.len() > 2 * READ_BYTES as usize {
        true => &[&bytes[..READ_BYTES as usize], &bytes[bytes.len() - READ_BYTES as usize..]].concat(),
        false => bytes,
    };
    check(path, &mark(ends))
}

/// True for the external data of a model made by pipec in the same folder; the data itself has no type.
fn is_own_data(path: &Path) -> bool {
    let model = path.with_extension("");
    path.extension().is_some_and(|extension| extension == "data")
        && matches!(read_ends(&model), Ok(Some(bytes)) if mark(&bytes) == Mark::Model)
}

/// Bytes read at each end of a file to detect its type.
const READ_BYTES: u64 = 1 << 20;

/// The first and last bytes of an existing file, which would be lost. A file that cannot be read is an error.
fn read_ends(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    let Some(metadata) = fs::metadata(path).ok().filter(fs::Metadata::is_file) else { return Ok(None) };
    let read = || {
        let mut file = File::open(path)?;
        let mut bytes = Vec::new();
        file.by_ref().take(READ_BYTES).read_to_end(&mut bytes)?;
        if metadata.len() > 2 * READ_BYTES {
            file.seek(SeekFrom::Start(metadata.len() - READ_BYTES))?;
        }
        file.take(READ_BYTES).read_to_end(&mut bytes)?;
        Ok((!bytes.is_empty()).then_some(bytes))
    };
    read().map_err(|error: io::Error| {
        let why = format!("the existing file cannot be read ({error}), so its type is unknown");
        Error::file("write", path, why).with_help("choose another file, or remove this one first")
    })
}

/// The type of these bytes.
fn mark(bytes: &[u8]) -> Mark {
    match detect::describe(bytes) {
        // A `.pt2` has no type here, because pipec does not write one.
        Some((what, _)) if what.contains(".npz") && npz::is_own(bytes) => return Mark::Npz,
        Some((what, _)) if what.contains(".safetensors") && weights::is_own(bytes) => return Mark::Safetensors,
        Some((what, _)) if what.contains("ONNX") && is_own_model(bytes) => return Mark::Model,
        Some(_) => return Mark::Bytes,
        None => {}
    }
    // The first packet of a pipec trace: a process track.
    if bytes.starts_with(b"\x0a") && bytes.get(2..4) == Some(b"\x50\x01") {
        return Mark::Perfetto;
    }
    let start = &bytes[..bytes.len().min(READ_BYTES as usize)];
    let text = match str::from_utf8(start) {
        Ok(text) => text,
        // The bytes read may end within a character.
        Err(error) if start.len() - error.valid_up_to() < 4 => {
            str::from_utf8(&start[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return Mark::Bytes,
    };
    let head: String = text.chars().take(HEAD_CHARS).collect();
    let line = text.lines().next().unwrap_or_default();
    if let Some(kind) = own_kind(&head) {
        return if kind == "program" { Mark::Program } else { Mark::Ours(kind) };
    }
    match () {
        () if head.contains("\"traceEvents\"") => Mark::Trace,
        () if is_step(line) => Mark::Metrics,
        () if head.starts_with("<!doctype html>")
            && head.contains("content=\"default-src 'none'; style-src 'sha256-") =>
        {
            Mark::Page
        }
        () if head.starts_with("<?xml") && head.contains("role=\"img\" aria-label=") => Mark::Picture,
        () if is_program(line) => Mark::Program,
        () if line.starts_with("node") && line.contains("stage_id=") => Mark::Line("stage_id=".to_string()),
        () if line.starts_with('{') => match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(object)) => Mark::Names(object.keys().cloned().collect()),
            _ => Mark::Bytes,
        },
        () => Mark::Line(line.split_whitespace().take(HEADING_WORDS).collect::<Vec<_>>().join(" ")),
    }
}

/// Characters searched for the type.
const HEAD_CHARS: usize = 4096;

/// Words of the first line that identify a text file; the following words may depend on the plan.
const HEADING_WORDS: usize = 2;

/// Maximum length of a truncated first line of a metrics file.
const MAX_FIRST_LINE: usize = 1000;

/// The type that a pipec file names: `"schema": "pipec.plan/1"`, or the same in TOML.
fn own_kind(head: &str) -> Option<String> {
    let at = head.find("schema")?;
    let value = head[at..].trim_start_matches("schema").trim_start_matches('"').trim_start();
    let name = value.strip_prefix([':', '='])?.trim_start().strip_prefix("\"pipec.")?;
    Some(name.split(['/', '"']).next()?.to_string())
}

/// True for a line of a metrics file.
fn is_step(line: &str) -> bool {
    let value = serde_json::from_str::<Value>(line);
    let is_complete = value
        .is_ok_and(|value| value["step"].is_u64() && value.get("loss").is_some() || value["total"]["steps"].is_u64());
    // A run may have been killed within its first line.
    is_complete || line.len() < MAX_FIRST_LINE && line.starts_with("{\"step\":0,\"lo") && !line.ends_with('}')
}

/// True for the first line of a schedule: `program 1f1b {`, or a table whose first cell is `0F0`.
fn is_program(line: &str) -> bool {
    let cell = line.split(',').map(str::trim).find(|cell| !cell.is_empty()).unwrap_or_default();
    let work = cell.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_cell = work.len() < cell.len()
        && work.strip_prefix(['F', 'B', 'I', 'W']).is_some_and(|item| item.starts_with(|c: char| c.is_ascii_digit()));
    is_cell || line.starts_with("program ") && line.ends_with('{')
}

/// True for a model made by pipec, by its producer or the metadata that an export appends.
fn is_own_model(bytes: &[u8]) -> bool {
    let has = |bytes: &[u8], word: &[u8]| bytes.windows(word.len()).any(|window| window == word);
    has(&bytes[..bytes.len().min(16)], b"\x12\x05pipec") || has(bytes, b"pipec.stages")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_mark(kind: &str) -> Mark {
        Mark::Ours(kind.to_string())
    }

    #[test]
    fn what_is_written_is_known_again() {
        assert_eq!(mark(b"{\n  \"schema\": \"pipec.plan/1\",\n  \"model\": {"), own_mark("plan"));
        assert_eq!(mark(b"schema = \"pipec.cluster/1\"\n\n[device]"), own_mark("cluster"));
        assert_eq!(mark(b"{\"schema\":\"pipec.program/1\"}"), Mark::Program);
        for program in ["program 1f1b {\n  items 4", "0F0,0F1,0B0\n1F0", ",,2F0\n"] {
            assert_eq!(mark(program.as_bytes()), Mark::Program, "{program}");
        }
        assert_eq!(mark(b"{\"step\":0,\"loss\":1.4,\"seconds\":0.1}\n{\"step\":1"), Mark::Metrics);
        assert_eq!(mark(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[]}"), Mark::Trace);
        assert_eq!(mark(b"\x08\x0a\x12\x05pipec\x1a\x050.1.0"), Mark::Model);
        assert_eq!(mark(b"\x08\x0a\x12\x07pytorch\x1a\x050.1.0"), Mark::Bytes);
    }

    #[test]
    fn what_others_wrote_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let refusal = |content: &[u8], mark: &Mark| {
            fs::write(&path, content).unwrap();
            check(&path, mark).err().map(|failure| failure.reason())
        };
        let marks = [Mark::plan(), Mark::Model, Mark::Metrics, Mark::Trace, Mark::Page, Mark::Npz, Mark::Safetensors];
        let others: [&[u8]; 8] = [
            b"\x0e\x00\x00\x00\x00\x00\x00\x00{\"a\":{\"dtype\":",
            b"PK\x03\x04x.npy",
            b"import torch\n",
            b"\x08\x0a\x12\x07pytorch\x1a",
            b"{\"a\": 1}",
            b"<!doctype html><p>",
            b"\xff\xfe",
            b"notes",
        ];
        for mark in &marks {
            assert!(others.iter().all(|other| refusal(other, mark).is_some()), "{mark:?}");
            assert_eq!(refusal(b"", mark), None);
        }
        assert!(
            refusal(others[3], &Mark::plan())
                .unwrap()
                .contains("is not a plan and pipec does not overwrite it: it looks like an ONNX model")
        );
        assert!(refusal(b"{\"schema\": \"pipec.profile/1\"}", &Mark::plan()).unwrap().contains("it is a profile"));
        assert_eq!(refusal(b"{\"schema\": \"pipec.plan/2\"}", &Mark::plan()), None);
        // Files without a type are identified by their JSON names, text by its first words.
        let (stages, script) = (b"{\"micro_batch\": 32, \"ranks\": []}", b"\"\"\"Trains a model in 3 stages.\n");
        assert!(refusal(b"{\"ranks\": [1], \"micro_batch\": 1}", &mark(stages)).is_none());
        assert!(refusal(b"{\"ranks\": [1]}", &mark(stages)).is_some());
        assert!(refusal(b"\"\"\"Trains a model in 4 stages.\n", &mark(script)).is_none());
        assert!(refusal(b"import torch\n", &mark(script)).is_some());
    }

    /// External data is identified only by the model in the same folder.
    #[test]
    fn external_data_is_that_of_a_model_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let (model, data) = (folder.path().join("m.onnx"), folder.path().join("m.onnx.data"));
        fs::write(&data, b"\xff\xfe\x00").unwrap();
        assert!(check(&data, &Mark::Bytes).is_err());
        fs::write(&model, b"\x08\x0a\x12\x07pytorch\x1a").unwrap();
        assert!(check(&data, &Mark::Bytes).is_err());
        fs::write(&model, b"\x08\x0a\x12\x05pipec\x1a\x050.1.0").unwrap();
        assert!(check(&data, &Mark::Bytes).is_ok());
    }

    #[cfg(unix)]
    #[test]
    fn devices_hold_nothing() {
        assert!(check(Path::new("/dev/null"), &Mark::plan()).is_ok());
        assert!(check(Path::new("/no/such/file"), &Mark::plan()).is_ok());
    }
}
