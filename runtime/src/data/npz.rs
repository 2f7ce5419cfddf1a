//! NumPy's npy and npz files.
//!
//! An npz file is a zip archive of npy arrays. Its contents are untrusted: duplicate names are rejected, declared sizes
//! are capped by the actual ones, object arrays (pickles) are rejected unread, and shape products are checked for
//! overflow.

use crate::data::weights::{FileError, read_regular};
use crate::device::host_memory;
use compiler::tensor::{DType, Tensor, element_count};
use std::collections::BTreeMap;
use std::io::{Cursor, Read, Seek, SeekFrom, Write};
use std::path::Path;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Maximum total size of an archive's arrays, in bytes.
const TOTAL_LIMIT: u64 = 64 << 30;

/// Maximum number of archive entries.
const ENTRY_LIMIT: usize = 1 << 16;

/// All arrays of an npz file, by name without `.npy`.
pub fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, FileError> {
    let file = std::fs::File::open(path).map_err(|fault| FileError::Read { path: path.to_path_buf(), fault })?;
    let metadata = file.metadata().map_err(|fault| FileError::Read { path: path.to_path_buf(), fault })?;
    let size = metadata.len();
    let npz_error = |fault: String| FileError::Npz { path: path.to_path_buf(), fault };
    let mut archive =
        ZipArchive::new(std::io::BufReader::new(file)).map_err(|e| match describe_truncation(path, size) {
            Some(missing) => FileError::Early { path: path.to_path_buf(), bytes: size, missing },
            None => npz_error(format!("not a zip archive: {e}")),
        })?;
    if archive.len() > ENTRY_LIMIT {
        return Err(npz_error(format!("{} entries; the limit is {ENTRY_LIMIT}", archive.len())));
    }
    // The zip library keeps only one of several entries with the same name; the archive's own count reveals duplicates.
    if let Some(declared) = entry_count(path).filter(|n| *n != archive.len()) {
        return Err(npz_error(format!("{declared} entries, but {} names: an array is duplicated", archive.len())));
    }
    let limit = host_memory::available().map_or(TOTAL_LIMIT, |bytes| TOTAL_LIMIT.min(bytes / 2));
    let mut arrays = BTreeMap::new();
    let mut total = 0u64;
    for i in 0..archive.len() {
        let entry = archive.by_index(i).map_err(|e| npz_error(e.to_string()))?;
        let name = entry.name().map_err(|e| npz_error(e.to_string()))?.to_string();
        let Some(name) = name.strip_suffix(".npy").map(str::to_string) else { continue };
        let array = |fault: String| FileError::Array { path: path.to_path_buf(), name: name.clone(), fault };
        // Deflate expands at most about 1000-fold. Reject larger declarations before allocating.
        let declared = entry.size();
        if declared > size.saturating_mul(1100) {
            return Err(array(format!("declares {declared} bytes in a file of {size}")));
        }
        total = total.saturating_add(declared);
        if total > limit {
            return Err(npz_error(format!("the arrays take more than {limit} bytes")));
        }
        let mut bytes = Vec::new();
        entry.take(declared.saturating_add(1)).read_to_end(&mut bytes).map_err(|e| array(e.to_string()))?;
        let tensor = decode(&bytes).map_err(array)?;
        if arrays.insert(name.clone(), tensor).is_some() {
            return Err(npz_error(format!("two arrays are named `{name}`")));
        }
    }
    Ok(arrays)
}

/// Entry count from the end record of a zip archive; `None` if it is in 64-bit form or not found.
fn entry_count(path: &Path) -> Option<usize> {
    let mut file = std::fs::File::open(path).ok()?;
    let size = file.metadata().ok()?.len();
    let (bytes, offset) = archive_end(&mut file, size)?;
    let offset = offset?;
    let count = u16::from_le_bytes(bytes.get(offset + 10..offset + 12)?.try_into().ok()?);
    (count != u16::MAX).then_some(usize::from(count))
}

/// The last bytes of a file, and the offset of the end-of-archive record in them.
fn archive_end(file: &mut std::fs::File, size: u64) -> Option<(Vec<u8>, Option<usize>)> {
    // The record has 22 bytes, followed by a comment of at most 65,535.
    let tail = size.min(22 + 65_535);
    file.seek(SeekFrom::Start(size - tail)).ok()?;
    let mut bytes = Vec::new();
    file.take(tail).read_to_end(&mut bytes).ok()?;
    let offset = bytes.windows(4).rposition(|w| w == b"PK\x05\x06");
    Some((bytes, offset))
}

/// Describes what a truncated archive lacks: the central directory at its end, and possibly part of an array. `None` if
/// the archive is not truncated.
fn describe_truncation(path: &Path, size: u64) -> Option<String> {
    let mut file = std::fs::File::open(path).ok()?;
    if archive_end(&mut file, size)?.1.is_some() {
        return None;
    }
    let mut offset = 0u64;
    loop {
        // Local file header: signature, sizes at offsets 18 and 22, name and extra field lengths at 26 and 28; then
        // name, extra field and data.
        let mut head = [0u8; 30];
        file.seek(SeekFrom::Start(offset)).ok()?;
        if file.read_exact(&mut head).is_err() || !head.starts_with(b"PK\x03\x04") {
            return (offset > 0 || size < 30 && head.starts_with(b"PK")).then(|| LIST.to_string());
        }
        let u16_at = |start: usize| u64::from(u16::from_le_bytes([head[start], head[start + 1]]));
        let packed = u32::from_le_bytes([head[18], head[19], head[20], head[21]]);
        let (name, extra) = (u16_at(26), u16_at(28));
        let mut name_and_extra = vec![0u8; (name + extra) as usize];
        if file.read_exact(&mut name_and_extra).is_err() {
            return Some(LIST.to_string());
        }
        let (name, extra) = name_and_extra.split_at(name as usize);
        // Zip64 sizes are in the extra field: id 1, length, uncompressed size, compressed size.
        let large = extra.get(12..20).filter(|_| packed == u32::MAX && extra.starts_with(&[1, 0]));
        let packed = large.and_then(|bytes| bytes.try_into().ok()).map_or(u64::from(packed), u64::from_le_bytes);
        let end = (offset + 30).checked_add(name_and_extra.len() as u64)?.checked_add(packed)?;
        if end > size {
            let name = String::from_utf8_lossy(name);
            return Some(format!("array `{}` extends to byte {end}", name.trim_end_matches(".npy").escape_debug()));
        }
        offset = end;
    }
}

const LIST: &str = "the archive's directory, at the end, is missing";

pub fn read_npy(path: &Path) -> Result<Tensor, FileError> {
    let bytes = read_regular(path)?;
    decode(&bytes).map_err(|fault| FileError::Array { path: path.to_path_buf(), name: "array".into(), fault })
}

/// Encodes an uncompressed npz file, ordered by name and without timestamps.
pub fn encode(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>, FileError> {
    let npz_error = |fault: String| FileError::Npz { path: path.to_path_buf(), fault };
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    zip.set_comment(OWN_COMMENT).map_err(|e| npz_error(e.to_string()))?;
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(true);
    for (name, tensor) in tensors {
        let array = encode_npy(tensor).ok_or_else(|| FileError::Array {
            path: path.to_path_buf(),
            name: name.clone(),
            fault: format!("npy has no element type {}", tensor.dtype()),
        })?;
        zip.start_file(format!("{name}.npy"), options).map_err(|e| npz_error(e.to_string()))?;
        zip.write_all(&array).map_err(|e| npz_error(e.to_string()))?;
    }
    Ok(zip.finish().map_err(|e| npz_error(e.to_string()))?.into_inner())
}

/// Comment at the end of an archive that pipec wrote; pipec replaces no others.
const OWN_COMMENT: &str = "written by pipec";

/// True for the last bytes of an archive that pipec wrote.
pub fn is_own(bytes: &[u8]) -> bool {
    bytes.ends_with(OWN_COMMENT.as_bytes())
}

const MAGIC: &[u8] = b"\x93NUMPY";

/// Decodes an npy file. The error describes the defect.
pub fn decode(bytes: &[u8]) -> Result<Tensor, String> {
    let versioned = bytes.strip_prefix(MAGIC).ok_or("not an npy array")?;
    let (length, body) = match versioned {
        [1, _, a, b, body @ ..] => (usize::from(u16::from_le_bytes([*a, *b])), body),
        [2 | 3, _, a, b, c, d, body @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, body),
        _ => return Err("unknown npy version".into()),
    };
    let header = body.get(..length).ok_or("the npy header is truncated")?;
    let header = std::str::from_utf8(header).map_err(|_| "the npy header is not text")?;
    let data = &body[length..];
    let type_text = field(header, "descr").ok_or("the npy header has no element type")?;
    let type_text = type_text.trim_matches(|c| c == '\'' || c == '"');
    if type_text.contains('O') {
        return Err("an object array is a pickle, which is never loaded; save plain numbers".into());
    }
    let (dtype, big_endian) =
        element(type_text).ok_or_else(|| format!("element type `{type_text}` is not supported"))?;
    let shape = shape(field(header, "shape").ok_or("the npy header has no shape")?)?;
    let needed = element_count(&shape).and_then(|n| n.checked_mul(dtype.size()));
    let needed = needed.ok_or_else(|| format!("shape {shape:?} overflows any size"))?;
    if needed != data.len() {
        return Err(format!("shape {shape:?} of {dtype} needs {needed} bytes, the file has {}", data.len()));
    }
    let mut data = data.to_vec();
    if big_endian {
        data.chunks_exact_mut(dtype.size()).for_each(<[u8]>::reverse);
    }
    if field(header, "fortran_order").is_some_and(|f| f.starts_with("True")) && shape.len() > 1 {
        data = row_major(&data, &shape, dtype.size());
    }
    Tensor::new(dtype, shape, data.into()).map_err(|e| e.to_string())
}

/// The text after `'key':`, up to the end of its value.
fn field<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let key_start = header.find(&format!("'{key}'")).or_else(|| header.find(&format!("\"{key}\"")))?;
    let value = header[key_start + key.len() + 2..].trim_start().strip_prefix(':')?.trim_start();
    let end = if value.starts_with('(') { value.find(')').map(|i| i + 1)? } else { value.find([',', '}'])? };
    Some(value[..end].trim())
}

fn element(described: &str) -> Option<(DType, bool)> {
    let (order, kind) = described.split_at_checked(1)?;
    let (order, kind) = if "<>|=".contains(order) { (order, kind) } else { ("=", described) };
    let dtype = match kind {
        "f8" => DType::F64,
        "f4" => DType::F32,
        "f2" => DType::F16,
        "i8" => DType::I64,
        "i4" => DType::I32,
        "i2" => DType::I16,
        "i1" => DType::I8,
        "u8" => DType::U64,
        "u4" => DType::U32,
        "u2" => DType::U16,
        "u1" => DType::U8,
        "b1" | "?" => DType::Bool,
        _ => return None,
    };
    Some((dtype, order == ">"))
}

fn shape(text: &str) -> Result<Vec<usize>, String> {
    let malformed = || format!("the shape {text} has a size that overflows or is not a number");
    let inner = text.strip_prefix('(').and_then(|t| t.strip_suffix(')')).ok_or_else(malformed)?;
    let dims = inner.split(',').map(str::trim).filter(|d| !d.is_empty());
    dims.map(|d| d.trim_end_matches('L').parse().map_err(|_| malformed())).collect()
}

fn row_major(data: &[u8], shape: &[usize], size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len());
    for index in compiler::tensor::view::indices(shape) {
        // Column-major: the first axis is the fastest.
        let flat = index.iter().zip(shape).rev().fold(0, |flat, (i, d)| flat * d + i);
        out.extend_from_slice(&data[flat * size..(flat + 1) * size]);
    }
    out
}

fn encode_npy(tensor: &Tensor) -> Option<Vec<u8>> {
    let kind = match tensor.dtype() {
        DType::F64 => "<f8",
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::I64 => "<i8",
        DType::I32 => "<i4",
        DType::I16 => "<i2",
        DType::I8 => "|i1",
        DType::U64 => "<u8",
        DType::U32 => "<u4",
        DType::U16 => "<u2",
        DType::U8 => "|u1",
        DType::Bool => "|b1",
        DType::Bf16 => return None,
    };
    let dims: String = tensor.shape().iter().map(|d| format!("{d}, ")).collect();
    let mut header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({}), }}", dims.trim_end());
    // The data begins at a multiple of 64 bytes; the header ends with a newline.
    while !(MAGIC.len() + 4 + header.len() + 1).is_multiple_of(64) {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend_from_slice(tensor.bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_come_back() {
        for tensor in [
            Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, f32::NAN]),
            Tensor::from_i64(&[], &[-7]),
            Tensor::from_bool(&[1], &[true]),
            Tensor::zeros(DType::U8, &[0, 4]),
        ] {
            assert_eq!(decode(&encode_npy(&tensor).unwrap()).unwrap(), tensor);
        }
    }

    #[test]
    fn inconsistent_archives_are_rejected() {
        let header = |text: &str| {
            let mut bytes = MAGIC.to_vec();
            bytes.extend([1, 0]);
            bytes.extend((text.len() as u16).to_le_bytes());
            bytes.extend(text.as_bytes());
            decode(&bytes).unwrap_err()
        };
        assert!(header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}").contains("pickle"));
        assert!(
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (1208925819614629174706176,)}")
                .contains("overflow")
        );
        assert!(
            header("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 2)}")
                .contains("overflow")
        );
        assert!(header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}").contains("needs 12 bytes"));
        assert!(decode(b"\x93NUMPY\x01\x00\xff\xff").is_err());
    }

    #[test]
    fn fortran_order_is_turned() {
        let text = "{'descr': '<u1', 'fortran_order': True, 'shape': (2, 3)}";
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.extend([1, 4, 2, 5, 3, 6]);
        assert_eq!(decode(&bytes).unwrap().to_i64(), [1, 2, 3, 4, 5, 6]);
    }
}
