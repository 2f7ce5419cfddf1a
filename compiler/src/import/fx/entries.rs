//! The entries of a zip archive as slices of its bytes.
//!
//! Every entry must be stored uncompressed, so reading cannot expand it; every size is checked against the file. Names
//! never become paths: an entry named `../../x` is simply never looked up.

use crate::import::fx::error::FxError;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::io::Cursor;
use zip::read::{ArchiveOffset, Config};
use zip::{CompressionMethod, ZipArchive};

/// Limit on the number of entries. The largest models have some thousand weights.
const MOST_ENTRIES: usize = 1 << 20;

/// Opens the archive; duplicate names are an error.
pub fn open_zip(bytes: &Bytes) -> Result<ZipArchive<Cursor<&[u8]>>, FxError> {
    // The archive must start at offset 0. Searching for another start would find nested archives: the sample inputs are
    // stored uncompressed.
    let start = Config { archive_offset: ArchiveOffset::Known(0) };
    let zip = ZipArchive::with_config(start, Cursor::new(&bytes[..])).map_err(|e| FxError::Zip(e.to_string()))?;
    if zip.len() > MOST_ENTRIES {
        return Err(FxError::Zip(format!("{} entries, more than {MOST_ENTRIES}", zip.len())));
    }
    match zip.has_duplicate_names() {
        true => Err(FxError::Duplicate { entry: duplicate(bytes, &zip) }),
        false => Ok(zip),
    }
}

/// The entries by name: index, and bytes or the error for a compressed, encrypted or truncated entry.
pub type Entries = BTreeMap<String, (usize, Result<Bytes, FxError>)>;

/// Lists the entries of an open archive.
pub fn entries(bytes: &Bytes, zip: &mut ZipArchive<Cursor<&[u8]>>) -> Result<Entries, FxError> {
    let mut contents = BTreeMap::new();
    let mut total = 0u64;
    for at in 0..zip.len() {
        let entry = zip.by_index_data(at).map_err(|e| FxError::Zip(e.to_string()))?;
        let name = String::from_utf8_lossy(entry.name_raw()).into_owned();
        let header = entry.header_start();
        // Overlapping entries would be read once per name (a zip bomb).
        total = total.saturating_add(entry.compressed_size());
        if total > bytes.len() as u64 {
            return Err(FxError::Zip("its entries together are longer than the file".to_string()));
        }
        if entry.compression() != CompressionMethod::Stored || entry.encrypted() {
            contents.insert(name.clone(), (at, Err(FxError::Compressed { entry: name })));
            continue;
        }
        let slice = slice(bytes, header, entry.compressed_size()).filter(|_| entry.size() == entry.compressed_size());
        let content = slice.ok_or_else(|| FxError::EntrySize { entry: name.clone(), size: entry.size() });
        contents.insert(name, (at, content));
    }
    Ok(contents)
}

/// The entries of a nested archive, all of which must be uncompressed.
pub fn stored(bytes: &Bytes) -> Result<BTreeMap<String, Bytes>, FxError> {
    let mut zip = open_zip(bytes)?;
    entries(bytes, &mut zip)?.into_iter().map(|(name, (_, content))| Ok((name, content?))).collect()
}

/// The bytes of a stored entry, after its local header: 30 bytes, then a name and an extra field of given lengths.
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

/// The first duplicate name in the central directory. The zip reader drops duplicates, so the directory itself is
/// scanned.
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
