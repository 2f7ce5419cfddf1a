//! Weight files: safetensors and npz, with the names of the source model.
//!
//! Files are untrusted: duplicate names are rejected, sizes are checked before allocation, and object arrays (pickles)
//! are rejected.

use compiler::tensor::{DType, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum FileError {
    #[error("cannot read {path}: {fault}")]
    Read { path: PathBuf, fault: std::io::Error },
    #[error("cannot write {path}: {fault}")]
    Write { path: PathBuf, fault: std::io::Error },
    #[error("{path} is not a safetensors file: {fault}")]
    Safetensors { path: PathBuf, fault: String },
    #[error("{path}: array `{name}`: {fault}")]
    Array { path: PathBuf, name: String, fault: String },
    #[error("{path} is not an npz file: {fault}")]
    Npz { path: PathBuf, fault: String },
    #[error("{path} ends early, after {bytes} bytes: {missing}")]
    Early { path: PathBuf, bytes: u64, missing: String },
    #[error("{path}: expected a file that ends in .safetensors, .npz or .npy")]
    Extension { path: PathBuf },
}

/// All tensors of a file, by name.
pub fn read(path: &Path) -> Result<BTreeMap<String, Tensor>, FileError> {
    match extension(path) {
        "safetensors" => read_safetensors(path),
        "npz" => crate::data::npz::read(path),
        "npy" => {
            let name = path.file_stem().and_then(|s| s.to_str()).unwrap_or("x").to_string();
            Ok(BTreeMap::from([(name, crate::data::npz::read_npy(path)?)]))
        }
        _ => Err(FileError::Extension { path: path.to_path_buf() }),
    }
}

/// Writes tensors in the format of the path's extension. A temporary file ensures that readers never see a partial
/// file.
pub fn write(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<(), FileError> {
    let bytes = match extension(path) {
        "npz" => crate::data::npz::encode(path, tensors)?,
        "safetensors" => {
            encode(path, tensors.iter().map(|(name, tensor)| (name.clone(), Piece::of(tensor))).collect())?
        }
        _ => return Err(FileError::Extension { path: path.to_path_buf() }),
    };
    write_atomically(path, &bytes)
}

/// Writes a file atomically.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let write_error = |fault| FileError::Write { path: path.to_path_buf(), fault };
    // Follow links so that their target changes. Pipes and devices are written to, never replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let path = target.as_path();
    let existing = fs::metadata(path).ok();
    if existing.as_ref().is_some_and(|m| !m.is_file()) {
        return fs::OpenOptions::new().write(true).open(path).and_then(|mut f| f.write_all(bytes)).map_err(write_error);
    }
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let result = fs::File::create(&part).and_then(|mut file| {
        file.write_all(bytes)?;
        if let Some(previous) = &existing {
            file.set_permissions(previous.permissions())?;
        }
        file.sync_all()?;
        fs::rename(&part, path)
    });
    result.map_err(|fault| {
        let _ = fs::remove_file(&part);
        write_error(fault)
    })
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or("")
}

/// Reads a regular file. A pipe could block forever and a device never end.
pub fn read_regular(path: &Path) -> Result<Vec<u8>, FileError> {
    let read_error = |fault| FileError::Read { path: path.to_path_buf(), fault };
    let metadata = fs::metadata(path).map_err(read_error)?;
    if !metadata.is_file() {
        return Err(read_error(std::io::Error::other("not a regular file")));
    }
    fs::read(path).map_err(read_error)
}

/// Maximum header size, in bytes.
const HEADER_LIMIT: u64 = 16 << 20;

fn read_safetensors(path: &Path) -> Result<BTreeMap<String, Tensor>, FileError> {
    decode(path, &read_regular(path)?)
}

/// Decodes a safetensors file. `path` is for messages.
pub fn decode(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, Tensor>, FileError> {
    let format_error = |fault: String| FileError::Safetensors { path: path.to_path_buf(), fault };
    let length =
        bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)).ok_or_else(|| format_error("too short".into()))?;
    if length > HEADER_LIMIT {
        return Err(format_error(format!("the header length is {length} bytes; the limit is {HEADER_LIMIT}")));
    }
    if let Some(header) = bytes.get(8..8 + length as usize) {
        check_duplicates(header).map_err(format_error)?;
    }
    if let Some(missing) = bytes.get(8..).and_then(|rest| describe_truncation(rest, length)) {
        return Err(FileError::Early { path: path.to_path_buf(), bytes: bytes.len() as u64, missing });
    }
    let file = SafeTensors::deserialize(bytes).map_err(|e| format_error(e.to_string()))?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.tensors() {
        let dtype = from_safetensors(view.dtype()).ok_or_else(|| FileError::Array {
            path: path.to_path_buf(),
            name: name.clone(),
            fault: format!("element type {:?} is not supported", view.dtype()),
        })?;
        let tensor = Tensor::new(dtype, view.shape().to_vec(), view.data().to_vec().into());
        tensors.insert(name, tensor.map_err(|e| format_error(e.to_string()))?);
    }
    Ok(tensors)
}

/// Describes what a file lacks that ends before the size in its header.
fn describe_truncation(rest: &[u8], header: u64) -> Option<String> {
    let Some(text) = rest.get(..header as usize) else {
        return Some(format!("the header alone has {} bytes", header.saturating_add(8)));
    };
    let tensors: BTreeMap<String, serde_json::Value> = serde_json::from_slice(text).ok()?;
    let offsets = tensors.values().filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64());
    let length = offsets.max()?.checked_add(header)?.checked_add(8)?;
    (length > rest.len() as u64 + 8).then(|| format!("its header names {length}"))
}

/// The safetensors reader keeps the last of two equal names; reject both.
fn check_duplicates(header: &[u8]) -> Result<(), String> {
    struct Names;
    impl<'de> serde::de::Visitor<'de> for Names {
        type Value = ();
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a header object")
        }
        fn visit_map<M: serde::de::MapAccess<'de>>(self, mut map: M) -> Result<(), M::Error> {
            let mut seen = std::collections::HashSet::new();
            while let Some(name) = map.next_key::<String>()? {
                map.next_value::<serde::de::IgnoredAny>()?;
                if !seen.insert(name.clone()) {
                    return Err(serde::de::Error::custom(format!("two tensors are named `{name}`")));
                }
            }
            Ok(())
        }
    }
    let mut json = serde_json::Deserializer::from_slice(header);
    serde::Deserializer::deserialize_map(&mut json, Names).map_err(|e| e.to_string())
}

/// A tensor to write.
pub struct Piece<'a> {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> Piece<'a> {
    pub fn of(tensor: &'a Tensor) -> Piece<'a> {
        Piece { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes: Cow::Borrowed(tensor.bytes()) }
    }
}

/// Header of a safetensors file that pipec wrote; pipec replaces no others.
const OWN_HEADER: &[u8] = br#"{"__metadata__":{"writer":"pipec"}"#;

/// True for the first bytes of a safetensors file that pipec wrote.
pub fn is_own(bytes: &[u8]) -> bool {
    bytes.get(8..).is_some_and(|header| header.starts_with(OWN_HEADER))
}

/// Encodes a safetensors file. `path` is for messages.
pub fn encode(path: &Path, pieces: Vec<(String, Piece<'_>)>) -> Result<Vec<u8>, FileError> {
    let format_error = |fault: String| FileError::Safetensors { path: path.to_path_buf(), fault };
    let mut views = Vec::new();
    for (name, Piece { dtype, shape, bytes }) in &pieces {
        let view = TensorView::new(to_safetensors(*dtype), shape.clone(), bytes);
        views.push((name, view.map_err(|e| format_error(e.to_string()))?));
    }
    let writer = HashMap::from([("writer".to_string(), "pipec".to_string())]);
    safetensors::serialize(views, Some(writer)).map_err(|e| format_error(e.to_string()))
}

const DTYPES: [(DType, safetensors::Dtype); 13] = [
    (DType::F64, safetensors::Dtype::F64),
    (DType::F32, safetensors::Dtype::F32),
    (DType::F16, safetensors::Dtype::F16),
    (DType::Bf16, safetensors::Dtype::BF16),
    (DType::I64, safetensors::Dtype::I64),
    (DType::I32, safetensors::Dtype::I32),
    (DType::I16, safetensors::Dtype::I16),
    (DType::I8, safetensors::Dtype::I8),
    (DType::U64, safetensors::Dtype::U64),
    (DType::U32, safetensors::Dtype::U32),
    (DType::U16, safetensors::Dtype::U16),
    (DType::U8, safetensors::Dtype::U8),
    (DType::Bool, safetensors::Dtype::BOOL),
];

fn from_safetensors(dtype: safetensors::Dtype) -> Option<DType> {
    DTYPES.iter().find(|(_, s)| *s == dtype).map(|(d, _)| *d)
}

fn to_safetensors(dtype: DType) -> safetensors::Dtype {
    DTYPES.iter().find(|(d, _)| *d == dtype).map(|(_, s)| *s).expect("every element type has its name in the format")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_names_are_refused() {
        assert!(check_duplicates(br#"{"a":{"x":1},"b":[]}"#).is_ok());
        assert!(check_duplicates(br#"{"a":{},"a":{}}"#).unwrap_err().contains("`a`"));
    }
}
