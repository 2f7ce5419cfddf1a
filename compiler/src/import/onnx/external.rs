//! External data: tensor values stored in files next to the model.
//!
//! A location is untrusted text. It must stay inside the model's folder, and this is checked twice:
//!
//! 1. as text: not empty, not absolute, no `..`, no backslash, no drive letter, no NUL;
//! 2. after resolving all symbolic links.
//!
//! There is one exception to 2, for downloads of the Hugging Face hub. There the model is a link in
//! `snapshots/REVISION/` to a file in `blobs/`, and so is its data. If the model path is a link into a folder named
//! `blobs`, data files that resolve directly into that folder are accepted. If the model is another link, data next to
//! the link target is also found, under the same rules.
//!
//! Only regular files are opened, so a pipe cannot block. Hard links are accepted: creating one needs write access to
//! the same disk, and package tools use them. A program that can write to the model's folder could swap a file between
//! check and open, but it could also replace the model.
//!
//! Offsets and lengths are checked against type, dims and file size before slicing. Nothing is allocated: values are
//! views into the mapped file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::import::onnx::file::{kind_name, map_file};
use crate::import::onnx::proto::StringStringEntryProto;
use crate::import::onnx::tensor_error::ExternalError;
use crate::import::onnx::warning::Warning;
use crate::text::name::short_name;

/// The external data files of one model, each opened at most once.
#[derive(Debug, Default)]
pub struct Files {
    /// Resolved search folders: the folder of the given path, then the folder of the link target.
    roots: Vec<PathBuf>,
    /// The hub's `blobs` folder, if the model is a link into one.
    blobs: Option<PathBuf>,
    opened: BTreeMap<String, Result<Option<Bytes>, ExternalError>>,
    missing: BTreeMap<String, usize>,
    ignored: Vec<Warning>,
}

impl Files {
    /// For a model that was not read from a file: any external data is an error.
    pub fn none() -> Self {
        Self::default()
    }

    /// External data is searched in `folder`.
    pub fn beneath(folder: &Path) -> Self {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        // If the folder cannot be resolved, every external tensor is reported as missing.
        let root = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        Self { roots: vec![root], ..Self::default() }
    }

    /// Searches the folder of the model file at `path` and, if it is a link, that of its target.
    pub fn of_model(path: &Path) -> Self {
        let mut files = Self::beneath(path.parent().unwrap_or(Path::new("")));
        let linked = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
        if linked && let Some(real) = path.canonicalize().ok().as_deref().and_then(Path::parent) {
            if real.file_name().is_some_and(|name| name == "blobs") {
                files.blobs = Some(real.to_owned());
            } else if !files.roots.iter().any(|root| root == real) {
                files.roots.push(real.to_owned());
            }
        }
        files
    }

    /// Returns the `expected` bytes that `entries` refer to for the tensor named `tensor`, or `None` if the file does
    /// not exist.
    pub fn read(
        &mut self,
        tensor: &str,
        entries: &[StringStringEntryProto],
        expected: u64,
    ) -> Result<Option<Bytes>, ExternalError> {
        let keys = self.keys(tensor, entries)?;
        let offset = number("offset", keys.offset)?.unwrap_or(0);
        let length = number("length", keys.length)?.unwrap_or(expected);
        if length != expected {
            return Err(ExternalError::Length { length, expected });
        }
        let file = match self.opened.get(keys.location) {
            Some(known) => known.clone(),
            None => {
                let content = self.open(keys.location);
                self.opened.insert(keys.location.to_owned(), content.clone());
                content
            }
        };
        let Some(file) = file? else {
            *self.missing.entry(keys.location.to_owned()).or_default() += 1;
            return Ok(None);
        };
        let size = file.len() as u64;
        let past_end = || ExternalError::PastEnd { offset, length, size, location: keys.location.to_owned() };
        let end = offset.checked_add(length).filter(|end| *end <= size).ok_or_else(past_end)?;
        // Both fit a `usize`, since they are at most the length of a buffer.
        Ok(Some(file.slice(offset as usize..end as usize)))
    }

    pub fn paths(&self) -> BTreeSet<PathBuf> {
        let loaded = self.opened.iter().filter(|(_, found)| matches!(found, Ok(Some(_))));
        let full_path = |location: &String| self.roots.iter().find_map(|root| root.join(location).canonicalize().ok());
        loaded.filter_map(|(location, _)| full_path(location)).collect()
    }

    /// Warnings: ignored keys first, then missing files in alphabetical order.
    pub fn into_warnings(self) -> Vec<Warning> {
        let missing_files = self.missing.into_iter().map(|(path, tensors)| Warning::MissingFile { path, tensors });
        self.ignored.into_iter().chain(missing_files).collect()
    }

    fn keys<'a>(&mut self, tensor: &str, entries: &'a [StringStringEntryProto]) -> Result<Keys<'a>, ExternalError> {
        let (mut location, mut offset, mut length) = (None, None, None);
        for entry in entries {
            let (slot, key) = match entry.key() {
                "location" => (&mut location, "location"),
                "offset" => (&mut offset, "offset"),
                "length" => (&mut length, "length"),
                // The SHA-1 checksum gives no protection against tampering and would need a full read.
                "checksum" => continue,
                other => {
                    self.ignored.push(Warning::ExternalKey { tensor: tensor.to_owned(), key: short_name(other) });
                    continue;
                }
            };
            match slot.replace(entry.value()) {
                Some(before) if before != entry.value() => return Err(ExternalError::TwoValues { key }),
                _ => {}
            }
        }
        let location = location.filter(|text: &&str| !text.is_empty()).ok_or(ExternalError::NoLocation)?;
        Ok(Keys { location, offset, length })
    }

    fn open(&self, location: &str) -> Result<Option<Bytes>, ExternalError> {
        if let Some(reason) = suspicious(location) {
            return Err(ExternalError::Escapes { location: location.to_owned(), why: reason });
        }
        if self.roots.is_empty() {
            return Err(ExternalError::NoFolder);
        }
        let unreadable = |error: std::io::Error| ExternalError::Unreadable {
            location: location.to_owned(),
            error: error.to_string(),
        };
        for (index, root) in self.roots.iter().enumerate() {
            let real = match root.join(location).canonicalize() {
                Ok(real) => real,
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(unreadable(error)),
            };
            let in_blobs = index == 0 && self.blobs.is_some() && real.parent() == self.blobs.as_deref();
            if !real.starts_with(root) && !in_blobs {
                return Err(ExternalError::LinkEscapes { location: location.to_owned() });
            }
            let kind = std::fs::metadata(&real).map_err(unreadable)?.file_type();
            if !kind.is_file() {
                return Err(ExternalError::NotRegular { location: location.to_owned(), kind: kind_name(kind) });
            }
            return File::open(&real).and_then(|file| map_file(&file)).map(Some).map_err(unreadable);
        }
        Ok(None)
    }
}

struct Keys<'a> {
    location: &'a str,
    offset: Option<&'a str>,
    length: Option<&'a str>,
}

/// The reason to refuse a location by its text alone, for all operating systems.
fn suspicious(location: &str) -> Option<&'static str> {
    let bytes = location.as_bytes();
    if bytes.contains(&0) {
        Some("has a NUL character")
    } else if bytes.contains(&b'\\') {
        Some("has a backslash")
    } else if bytes[0] == b'/' {
        Some("is absolute")
    } else if bytes.len() > 1 && bytes[1] == b':' && bytes[0].is_ascii_alphabetic() {
        Some("has a drive letter")
    } else if location.split('/').any(|part| part == "..") {
        Some("escapes through `..`")
    } else {
        None
    }
}

fn number(key: &'static str, text: Option<&str>) -> Result<Option<u64>, ExternalError> {
    let Some(text) = text else { return Ok(None) };
    let is_decimal = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let value = if is_decimal { text.parse().ok() } else { None };
    value.map(Some).ok_or_else(|| ExternalError::Number { key, value: short_name(text) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(pairs: &[(&str, &str)]) -> Vec<StringStringEntryProto> {
        let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
            key: Some((*key).into()),
            value: Some((*value).into()),
        };
        pairs.iter().map(entry).collect()
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pipec_external_{name}_{}", std::process::id()));
            std::fs::remove_dir_all(&path).ok();
            std::fs::create_dir_all(&path).unwrap();
            Self(path.canonicalize().unwrap())
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).ok();
        }
    }

    fn read(files: &mut Files, location: &str) -> Result<Option<Bytes>, ExternalError> {
        files.read("w", &entries(&[("location", location), ("offset", "2")]), 4)
    }

    #[test]
    fn locations_are_refused_as_text() {
        let mut files = Files::beneath(Path::new("/"));
        for bad in ["/etc/passwd", "../x", "a/../../x", "..\\x", "C:x", "c:/x", "a\0b", "a/.."] {
            assert!(matches!(read(&mut files, bad), Err(ExternalError::Escapes { .. })), "{bad:?}");
        }
        assert_eq!(read(&mut files, ""), Err(ExternalError::NoLocation));
        assert_eq!(read(&mut Files::none(), "w.bin"), Err(ExternalError::NoFolder));
    }

    #[test]
    fn ranges_are_checked_against_the_tensor_and_the_file() {
        let folder = Folder::new("ranges");
        std::fs::write(folder.0.join("w.bin"), b"01234567").unwrap();
        let mut files = Files::beneath(&folder.0);
        assert_eq!(read(&mut files, "./w.bin").unwrap().unwrap(), &b"2345"[..]);
        let mut ask = |offset: &str, length: &str, expected| {
            files.read("w", &entries(&[("location", "w.bin"), ("offset", offset), ("length", length)]), expected)
        };
        assert_eq!(ask("8", "0", 0).unwrap().unwrap(), Bytes::new());
        assert!(matches!(ask("5", "4", 4), Err(ExternalError::PastEnd { size: 8, .. })));
        assert!(matches!(ask("18446744073709551615", "4", 4), Err(ExternalError::PastEnd { .. })));
        assert!(matches!(ask("0", "5", 4), Err(ExternalError::Length { length: 5, expected: 4 })));
        for bad in ["-1", "+1", "1e3", "", " 1", "18446744073709551616"] {
            assert!(matches!(ask(bad, "4", 4), Err(ExternalError::Number { key: "offset", .. })), "{bad:?}");
        }
        assert_eq!(read(&mut files, "gone.bin"), Ok(None));
        assert!(matches!(read(&mut files, "."), Err(ExternalError::NotRegular { kind: "a directory", .. })));
        let duplicated = entries(&[("location", "w.bin"), ("location", "v.bin")]);
        assert_eq!(files.read("w", &duplicated, 4), Err(ExternalError::TwoValues { key: "location" }));
        assert_eq!(files.paths(), BTreeSet::from([folder.0.join("w.bin")]));
        assert_eq!(files.into_warnings(), [Warning::MissingFile { path: "gone.bin".into(), tensors: 1 }]);
    }

    #[cfg(unix)]
    #[test]
    fn links_must_stay_inside_except_in_the_hubs_layout() {
        use std::os::unix::fs::symlink;
        let folder = Folder::new("links");
        let at = |path: &str| folder.0.join(path);
        for subfolder in ["blobs", "snapshots/abc/onnx", "other"] {
            std::fs::create_dir_all(at(subfolder)).unwrap();
        }
        for file in ["blobs/m", "blobs/d", "other/secret", "snapshots/abc/onnx/plain.onnx", "other/real.onnx"] {
            std::fs::write(at(file), b"01234567").unwrap();
        }
        symlink("../../../blobs/m", at("snapshots/abc/onnx/model.onnx")).unwrap();
        symlink("../../../blobs/d", at("snapshots/abc/onnx/model.onnx_data")).unwrap();
        symlink("../../../other/secret", at("snapshots/abc/onnx/secret")).unwrap();
        symlink("../../../other", at("snapshots/abc/onnx/folder")).unwrap();
        symlink("../../../other/real.onnx", at("snapshots/abc/onnx/link.onnx")).unwrap();

        let mut hub = Files::of_model(&at("snapshots/abc/onnx/model.onnx"));
        assert_eq!(read(&mut hub, "model.onnx_data").unwrap().unwrap(), &b"2345"[..]);
        for escape in ["secret", "folder/secret"] {
            assert!(matches!(read(&mut hub, escape), Err(ExternalError::LinkEscapes { .. })), "{escape}");
        }
        let mut plain = Files::of_model(&at("snapshots/abc/onnx/plain.onnx"));
        assert!(matches!(read(&mut plain, "model.onnx_data"), Err(ExternalError::LinkEscapes { .. })));
        // If the model is a link to another folder, its data is also found beside the link target, and nowhere else.
        let mut linked = Files::of_model(&at("snapshots/abc/onnx/link.onnx"));
        assert!(matches!(read(&mut linked, "secret"), Err(ExternalError::LinkEscapes { .. })));
        std::fs::write(at("other/link.bin"), b"01234567").unwrap();
        assert_eq!(read(&mut linked, "link.bin").unwrap().unwrap(), &b"2345"[..]);
    }
}
