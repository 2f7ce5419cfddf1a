//! Reads text files: plans, profiles. Every read is bounded.

use crate::error::Error;
use crate::files::{detect, missing};
use compiler::graph::hash::sha256;
use compiler::plan::{Plan, read};
use compiler::profile::{self, Profile};
use compiler::text::name::short_name;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Maximum size of a plan file in bytes.
pub const MOST_PLAN_BYTES: u64 = 256 << 20;

/// The text of a file of at most `max_bytes` bytes.
pub fn text(path: &Path, max_bytes: u64) -> Result<String, Error> {
    let fail = |why: String| Error::file("read", path, why);
    let file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => fail("no such file".to_string()).with_help(missing::help(path)),
        _ => fail(error.to_string()).with_help("check its permissions"),
    })?;
    let metadata = file.metadata().map_err(|error| fail(error.to_string()))?;
    if metadata.is_dir() {
        return Err(fail("it is a folder".to_string()).with_help("pass a file in it"));
    }
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
    let is_text = str::from_utf8(&bytes).is_ok();
    if let Some((description, help)) = detect::describe(&bytes).filter(|_| !is_text) {
        return Err(fail(description.to_string()).with_help(help));
    }
    if bytes.len() as u64 > max_bytes {
        return Err(fail(format!("it is larger than {max_bytes} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| fail(format!("it is not UTF-8 text: {error}")))
}

pub fn plan(path: &Path) -> Result<Plan, Error> {
    if path.extension().is_some_and(|extension| extension == "onnx" || extension == "pt2") {
        let help = format!("`pipec partition {}` makes a plan of it", path.display());
        return Err(Error::file("read the plan", path, "its name is that of a model; expected a plan").with_help(help));
    }
    let text = text(path, MOST_PLAN_BYTES)?;
    read::from_json(&text).map_err(|error| {
        // A small model without weights may also be valid text.
        let (why, help) = match detect::describe(text.as_bytes()) {
            Some((description, help)) => (description.to_string(), help),
            None => match (other_file(&text, "plan"), cut_short(&text)) {
                (None, Some(why)) => (why, "copy it again, or write it again with `pipec partition`"),
                (described, _) => {
                    (described.unwrap_or_else(|| error.to_string()), "`pipec schema plan` prints the format of a plan")
                }
            },
        };
        Error::file("read the plan", path, why).with_help(help)
    })
}

/// Describes a file whose schema names another format of pipec than expected.
pub fn other_file(text: &str, expected: &str) -> Option<String> {
    let value = serde_json::from_str::<serde_json::Value>(text);
    let schema = match &value {
        Ok(value) => value.get("schema")?.as_str()?,
        // A cluster is TOML.
        Err(_) => text.lines().find_map(|line| line.strip_prefix("schema = \"")?.split('"').next())?,
    };
    let kind = schema.strip_prefix("pipec.")?.split('/').next()?;
    (kind != expected)
        .then(|| format!("it is a {} (`{}`); expected a {expected}", short_name(kind), short_name(schema)))
}

/// Describes a JSON file that ends early.
fn cut_short(text: &str) -> Option<String> {
    let error = serde_json::from_str::<serde_json::Value>(text).err().filter(serde_json::Error::is_eof)?;
    Some(format!("it ends early, after {} bytes, in line {}", text.len(), error.line()))
}

/// A profile and the SHA-256 of its file.
pub fn read_profile(path: &Path) -> Result<(String, Profile), Error> {
    let text = text(path, MOST_PLAN_BYTES)?;
    let profile = profile::read::from_json(&text).map_err(|error| {
        let described = other_file(&text, "profile");
        let advice = "`pipec profile MODEL -o profile.json` writes one".to_string();
        let help = match described.as_deref() {
            Some(described) if described.starts_with("it is a cluster") => {
                format!("pass it with `--cluster {}`; {advice}", short_name(&path.display().to_string()))
            }
            _ => advice,
        };
        let why = described.or_else(|| cut_short(&text)).unwrap_or_else(|| error.to_string());
        Error::file("read the profile", path, why).with_help(help)
    })?;
    Ok((sha256(text.as_bytes()), profile))
}

/// The name of a file without its folder.
pub fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
