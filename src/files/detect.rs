//! Detects the type of an unexpected file by its first bytes, and the command or flag that reads it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Help that shows how to export a PyTorch model.
pub const EXPORT: &str = "`torch.export.save(torch.export.export(model.train(), (x,)), \"model.pt2\")` in Python writes a model, graph and weights";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Model,
    Arrays,
    Other,
}

/// Description and help for a file with these bytes; `None` if its type is unknown.
pub fn describe(bytes: &[u8]) -> Option<(&'static str, &'static str)> {
    detect(bytes).map(|(_, description, help)| (description, help))
}

fn detect(bytes: &[u8]) -> Option<(Content, &'static str, &'static str)> {
    const MODEL: &str = "`pipec partition FILE` plans a model, `pipec inspect FILE` summarises it";
    const ARRAYS: &str = "`pipec train MODEL --data FILE` reads arrays as data, `--weights FILE` as weights";
    let starts = |prefix: &[u8]| bytes.starts_with(prefix);
    let has =
        |word: &[u8]| bytes[..bytes.len().min(ARCHIVE_SEARCH_BYTES)].windows(word.len()).any(|window| window == word);
    Some(match () {
        () if starts(b"PK") && (has(b"models/model.json") || has(b"archive_version")) => {
            (Content::Model, "it looks like a .pt2, a model written by torch.export.save", MODEL)
        }
        () if starts(b"PK") && has(b".npy") => (Content::Arrays, "it looks like an .npz, an archive of arrays", ARRAYS),
        () if starts(b"PK") && has(b"code/__torch__") => {
            (Content::Other, "it looks like TorchScript, which pipec never reads", TORCHSCRIPT_HELP)
        }
        () if starts(b"PK") && has(b"data.pkl") => (
            Content::Other,
            "it looks like a pickle of torch.save, which pipec never reads",
            "`torch.export.save` in Python writes models, `safetensors.torch.save_file` weights",
        ),
        () if starts(b"PK") => (Content::Other, "it looks like a zip archive", MODEL),
        () if starts(b"\x93NUMPY") => (Content::Arrays, "it looks like an .npy, an array", ARRAYS),
        () if is_safetensors(bytes) => (Content::Arrays, "it looks like a .safetensors file", ARRAYS),
        () if is_onnx(bytes) => (Content::Model, "it looks like an ONNX model", MODEL),
        () => return None,
    })
}

const TORCHSCRIPT_HELP: &str = "export the original module with `torch.export`: run these lines where it is defined, not on the result of torch.jit.load";

/// Help for a torch file without an exported program.
pub fn export_help(path: &Path) -> &'static str {
    match start(path).and_then(|start| detect(&start)) {
        Some((_, _, help)) if help == TORCHSCRIPT_HELP => TORCHSCRIPT_HELP,
        _ => "run these lines where the model is defined",
    }
}

/// Description and help for a file that is not a model, if its first bytes or its name show that.
pub fn describe_non_model(path: &Path) -> Option<(String, String)> {
    if path.extension().is_some_and(|extension| extension == "py" || extension == "ipynb") && path.is_file() {
        let description = "it is Python source; pipec reads exported models".to_string();
        return Some((description, EXPORT.to_string()));
    }
    let (content, description, help) = detect(&start(path)?)?;
    (content == Content::Arrays).then(|| (format!("{description}; expected a model"), help.to_string()))
}

/// Description and help for a file without arrays, if its first bytes show that.
pub fn describe_non_arrays(path: &Path) -> Option<(String, String)> {
    let start = start(path)?;
    if start.starts_with(b"{") && String::from_utf8_lossy(&start).contains("\"pipec.plan/") {
        return Some((
            "it looks like a plan of `pipec partition`".to_string(),
            "pass a plan with `--plan FILE`".to_string(),
        ));
    }
    let (_, description, _) = detect(&start).filter(|(content, ..)| *content == Content::Model)?;
    Some((
        description.to_string(),
        "pass the model as the first argument, without a flag: `pipec train MODEL --data FILE`".to_string(),
    ))
}

/// The first bytes of a file.
fn start(path: &Path) -> Option<Vec<u8>> {
    let file = path.is_file().then(|| File::open(path).ok()).flatten()?;
    let mut bytes = Vec::new();
    file.take(ARCHIVE_SEARCH_BYTES as u64).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Bytes searched for the names in an archive.
const ARCHIVE_SEARCH_BYTES: usize = 1 << 16;

/// Maximum size of a safetensors header in bytes.
const MAX_HEADER_BYTES: u64 = 16 << 20;

/// True for a header length followed by a JSON object.
fn is_safetensors(bytes: &[u8]) -> bool {
    let length = bytes.first_chunk::<8>().map(|length| u64::from_le_bytes(*length));
    length.is_some_and(|length| (2..=MAX_HEADER_BYTES).contains(&length)) && bytes.get(8) == Some(&b'{')
}

/// True for field 1, `ir_version`, with a small value, followed by field 2, `producer_name`, or another field of the message.
fn is_onnx(bytes: &[u8]) -> bool {
    matches!(bytes, [0x08, 1..=0x3f, next, ..] if [0x12, 0x1a, 0x22, 0x28, 0x32, 0x3a, 0x42].contains(next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_known_by_their_first_bytes() {
        let kind = |bytes: &[u8]| describe(bytes).map(|(kind, _)| kind.split(['.', ',']).nth(1).unwrap_or(kind).trim());
        assert_eq!(kind(b"PK\x03\x04....m/models/model.json"), Some("pt2"));
        assert_eq!(kind(b"PK\x03\x04....x.npy"), Some("npz"));
        assert_eq!(kind(b"\x93NUMPY\x01"), Some("npy"));
        assert_eq!(kind(b"\x02\0\0\0\0\0\0\0{}"), Some("safetensors file"));
        assert_eq!(kind(b"\x08\x08\x12\x07pytorch"), Some("it looks like an ONNX model"));
        assert_eq!(
            [b"{\"schema\"".as_slice(), b"", b"schema = 1", b"PK"].map(kind),
            [None, None, None, Some("it looks like a zip archive")]
        );
    }
}
