//! The zip archive of an exported program: its entries by name, as slices of the mapped file.

use crate::import::fx::entries::{entries, open_zip};
use crate::import::fx::error::FxError;
use crate::import::fx::legacy;
use crate::text::name::short_name;
use bytes::Bytes;
use std::collections::BTreeMap;

/// Entries up to this many bytes have their checksum verified. Weights are not read before they are used.
const CHECKED: usize = 1 << 24;

#[derive(Debug)]
pub struct Archive {
    /// The entries by name, without the archive's top folder.
    entries: BTreeMap<String, Bytes>,
}

impl Archive {
    pub fn open(bytes: &Bytes) -> Result<Archive, FxError> {
        Archive::read_zip(bytes).map_err(|error| match error {
            // The directory that was found may belong to a nested archive.
            FxError::Zip(_) | FxError::EntrySize { .. } | FxError::NoProgram if !ends(bytes) => {
                FxError::Ends { bytes: bytes.len() }
            }
            error => error,
        })
    }

    fn read_zip(bytes: &Bytes) -> Result<Archive, FxError> {
        let mut zip = open_zip(bytes)?;
        let zip_entries = entries(bytes, &mut zip)?;
        if zip_entries.contains_key(legacy::PROGRAM) {
            let mut entries = BTreeMap::new();
            for (name, (_, content)) in zip_entries {
                entries.insert(name, content?);
            }
            return Ok(Archive { entries: legacy::rename_entries(entries)? });
        }
        let folder = folder(zip_entries.keys())?;
        let mut entries = BTreeMap::new();
        for (name, (at, content)) in zip_entries {
            let Some(inner) = name.strip_prefix(&folder).and_then(|n| n.strip_prefix('/')) else { continue };
            let values = inner.starts_with("data/weights/") || inner.starts_with("data/constants/");
            let content = content?;
            if content.len() <= CHECKED && (!values || inner.ends_with(".json")) {
                let summed = zip.by_index(at).map_err(std::io::Error::from);
                let summed = summed.and_then(|mut entry| std::io::copy(&mut entry, &mut std::io::sink()));
                summed.map_err(|e| FxError::Zip(format!("entry `{}`: {e}", short_name(inner))))?;
            }
            // Sample inputs are pickles and are never read.
            if !inner.starts_with("data/sample_inputs/") {
                entries.insert(inner.to_string(), content);
            }
        }
        Ok(Archive { entries })
    }

    /// The content of an entry by its name within the archive's folder: `models/model.json`.
    pub fn get(&self, name: &str) -> Option<&Bytes> {
        self.entries.get(name)
    }

    /// The entry names below a folder such as `models/`, without that prefix.
    pub fn within<'a>(&'a self, folder: &'a str) -> impl Iterator<Item = &'a str> {
        self.entries.keys().filter_map(move |name| name.strip_prefix(folder))
    }
}

/// Tests whether the file ends with an end-of-central-directory record: 22 bytes, the last two of which give the length
/// of a trailing comment. Nested archives have such records too, but not at the end of the file.
fn ends(bytes: &[u8]) -> bool {
    let from = bytes.len().saturating_sub(22 + usize::from(u16::MAX));
    bytes[from..].windows(22).enumerate().any(|(at, end)| {
        let comment = usize::from(u16::from_le_bytes([end[20], end[21]]));
        end.starts_with(b"PK\x05\x06") && from + at + 22 + comment == bytes.len()
    })
}

/// The archive's single top folder, found by its entry `archive_format`, `archive_version` or `models/…`.
fn folder<'a>(names: impl Iterator<Item = &'a String>) -> Result<String, FxError> {
    for name in names {
        let Some((first, rest)) = name.split_once('/') else { continue };
        if rest == "archive_format" || rest == "archive_version" || rest.starts_with("models/") {
            return Ok(first.to_string());
        }
    }
    Err(FxError::NoProgram)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_ends_where_its_file_does() {
        let end =
            |comment: &[u8]| [b"PK\x05\x06", &[0; 16][..], &(comment.len() as u16).to_le_bytes(), comment].concat();
        assert!(ends(&end(b"")) && ends(&end(b"said")) && ends(&[&b"PK\x03\x04"[..], &end(b"")].concat()));
        // The directory end of a nested archive does not end the outer file.
        let cut = [&b"PK\x03\x04"[..], &end(b""), b"more"].concat();
        assert!(!ends(&cut) && !ends(&end(b"said")[..24]) && !ends(b"PK") && !ends(b""));
        let message = Archive::open(&Bytes::from(cut)).unwrap_err().to_string();
        assert!(message.starts_with("the file ends early, after 30 bytes"), "{message}");
        let message = Archive::open(&Bytes::from(end(b""))).unwrap_err().to_string();
        assert!(!message.contains("early"), "{message}");
    }
}
