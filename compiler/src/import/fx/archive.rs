//! The zip archive around an exported program: its entries by name, as slices of the mapped file.
//!
//! Every entry is stored, not compressed, so no entry can grow when it is read; every size is checked against the file
//! before it is used. Names never become paths: an entry that is called `../../x` is just an entry nobody asks for.

use crate::import::fx::error::FxError;
use crate::import::onnx::name::shown;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::io::Cursor;
use zip::read::{ArchiveOffset, Config};
use zip::{CompressionMethod, ZipArchive};

/// The most entries that are looked at. The largest models have some thousand weights.
const MOST_ENTRIES: usize = 1 << 20;

/// The most bytes of an entry whose checksum is verified. Weights are not read before they are used.
const CHECKED: usize = 1 << 24;

/// An opened archive.
#[derive(Debug)]
pub struct Archive {
    /// The entries under the archive's own folder, by their name behind it.
    entries: BTreeMap<String, Bytes>,
}

impl Archive {
    /// Opens the archive that these bytes are.
    pub fn open(bytes: &Bytes) -> Result<Archive, FxError> {
        Archive::whole(bytes).map_err(|error| match error {
            // An archive within this one may have been taken for it.
            FxError::Zip(_) | FxError::EntrySize { .. } | FxError::NoProgram if !ends(bytes) => {
                FxError::Ends { bytes: bytes.len() }
            }
            error => error,
        })
    }

    fn whole(bytes: &Bytes) -> Result<Archive, FxError> {
        // An archive starts where the file does. Searching for another start finds those of archives within this one:
        // the sample inputs are such, stored as they are.
        let start = Config { archive_offset: ArchiveOffset::Known(0) };
        let mut zip =
            ZipArchive::with_config(start, Cursor::new(&bytes[..])).map_err(|e| FxError::Zip(e.to_string()))?;
        if zip.len() > MOST_ENTRIES {
            return Err(FxError::Zip(format!("{} entries, more than {MOST_ENTRIES}", zip.len())));
        }
        if zip.has_duplicate_names() {
            return Err(FxError::Duplicate { entry: duplicate(bytes, &zip) });
        }
        let mut found = BTreeMap::new();
        for at in 0..zip.len() {
            let entry = zip.by_index_data(at).map_err(|e| FxError::Zip(e.to_string()))?;
            let name = String::from_utf8_lossy(entry.name_raw()).into_owned();
            let header = entry.header_start();
            if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
                found.insert(name.clone(), (at, Err(FxError::Compressed { entry: name })));
                continue;
            }
            let slice =
                slice(bytes, header, entry.compressed_size()).filter(|_| entry.size() == entry.compressed_size());
            let content = slice.ok_or_else(|| FxError::EntrySize { entry: name.clone(), size: entry.size() });
            found.insert(name, (at, content));
        }
        let folder = folder(found.keys())?;
        let mut entries = BTreeMap::new();
        for (name, (at, content)) in found {
            let Some(inner) = name.strip_prefix(&folder).and_then(|n| n.strip_prefix('/')) else { continue };
            let values = inner.starts_with("data/weights/") || inner.starts_with("data/constants/");
            let content = content?;
            if content.len() <= CHECKED && (!values || inner.ends_with(".json")) {
                let summed = zip.by_index(at).map_err(std::io::Error::from);
                let summed = summed.and_then(|mut entry| std::io::copy(&mut entry, &mut std::io::sink()));
                summed.map_err(|e| FxError::Zip(format!("entry `{}`: {e}", shown(inner))))?;
            }
            // Sample inputs are pickles: their checksum is all that is ever looked at.
            if !inner.starts_with("data/sample_inputs/") {
                entries.insert(inner.to_string(), content);
            }
        }
        Ok(Archive { entries })
    }

    /// The content of an entry, by its name within the archive's folder: `models/model.json`.
    pub fn get(&self, name: &str) -> Option<&Bytes> {
        self.entries.get(name)
    }

    /// The names within a folder, such as `models/`, without it.
    pub fn within<'a>(&'a self, folder: &'a str) -> impl Iterator<Item = &'a str> {
        self.entries.keys().filter_map(move |name| name.strip_prefix(folder))
    }
}

/// Whether the end of a zip archive is where the file ends: 22 bytes, of which the last two count those of a comment behind them. Archives
/// within this one have such ends, too, and end elsewhere.
fn ends(bytes: &[u8]) -> bool {
    let from = bytes.len().saturating_sub(22 + usize::from(u16::MAX));
    bytes[from..].windows(22).enumerate().any(|(at, end)| {
        let comment = usize::from(u16::from_le_bytes([end[20], end[21]]));
        end.starts_with(b"PK\x05\x06") && from + at + 22 + comment == bytes.len()
    })
}

/// The bytes of a stored entry behind its local header: 30 bytes, then a name and an extra field of their own lengths.
fn slice(bytes: &Bytes, header: u64, size: u64) -> Option<Bytes> {
    let header = usize::try_from(header).ok()?;
    let local = bytes.get(header..header.checked_add(30)?)?;
    if !local.starts_with(b"PK\x03\x04") {
        return None;
    }
    let number = |at: usize| usize::from(u16::from_le_bytes([local[at], local[at + 1]]));
    let start = header.checked_add(30 + number(26) + number(28))?;
    let end = start.checked_add(usize::try_from(size).ok()?)?;
    (end <= bytes.len()).then(|| bytes.slice(start..end))
}

/// The one folder at the top of the archive, which has the archive's name: that of the entry `archive_format` or
/// `models/…`.
fn folder<'a>(names: impl Iterator<Item = &'a String>) -> Result<String, FxError> {
    let mut legacy = false;
    for name in names {
        let Some((first, rest)) = name.split_once('/') else {
            // Before torch 2.8 the entries stood at the top, under other names.
            legacy |= name.starts_with("serialized_exported_program");
            continue;
        };
        if rest == "archive_format" || rest == "archive_version" || rest.starts_with("models/") {
            return Ok(first.to_string());
        }
        legacy |= rest.starts_with("serialized_exported_program");
    }
    Err(if legacy { FxError::Legacy } else { FxError::NoProgram })
}

/// The name that the central directory has twice. The reader keeps one of each, so the directory itself is searched.
fn duplicate(bytes: &Bytes, zip: &ZipArchive<Cursor<&[u8]>>) -> String {
    let mut at = usize::try_from(zip.central_directory_start()).unwrap_or(usize::MAX);
    let mut seen = std::collections::BTreeSet::new();
    while let Some(record) = bytes.get(at..at.saturating_add(46)).filter(|r| r.starts_with(b"PK\x01\x02")) {
        let number = |at: usize| usize::from(u16::from_le_bytes([record[at], record[at + 1]]));
        let name = at + 46..at + 46 + number(28);
        at = name.end + number(30) + number(32);
        let Some(name) = bytes.get(name) else { break };
        if !seen.insert(name) {
            return String::from_utf8_lossy(name).into_owned();
        }
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_ends_where_its_file_does() {
        let end =
            |comment: &[u8]| [b"PK\x05\x06", &[0; 16][..], &(comment.len() as u16).to_le_bytes(), comment].concat();
        assert!(ends(&end(b"")) && ends(&end(b"said")) && ends(&[&b"PK\x03\x04"[..], &end(b"")].concat()));
        // The end of an archive within this one is not its own.
        let cut = [&b"PK\x03\x04"[..], &end(b""), b"more"].concat();
        assert!(!ends(&cut) && !ends(&end(b"said")[..24]) && !ends(b"PK") && !ends(b""));
        let told = Archive::open(&Bytes::from(cut)).unwrap_err().to_string();
        assert!(told.starts_with("the file ends early, after 30 bytes"), "{told}");
        let told = Archive::open(&Bytes::from(end(b""))).unwrap_err().to_string();
        assert!(!told.contains("early"), "{told}");
    }
}
