//! External data: tensors whose values lie in files beside the model.
//!
//! A location is text from a file that a stranger may have written, so it is refused unless it stays inside the
//! model's folder, twice over:
//!
//! 1. as text: not empty, not absolute, no `..`, no backslash, no drive letter, no NUL;
//! 2. as it resolves: with every link followed, it still lies beneath the folder.
//!
//! One exception to 2 lets downloads of the Hugging Face hub work. There the model is a link in
//! `snapshots/REVISION/` to a file in `blobs/`, and so is its data: when the model given is itself a link to a file in
//! a folder named `blobs`, a data file that resolves directly into that same folder is read as well.
//! When the model is a link and the data lies beside its target instead, it is found there, under the same rules.
//!
//! Only regular files are opened; a pipe is recognised before it could block. Hard links are read like any file: to
//! make one takes write access to the same disk, and package tools make them all the time. Between the check and the
//! opening a program that can write into the model's folder could exchange a file; who can do that can write the
//! model too.
//!
//! Offsets and lengths are compared with the tensor's type and dims, and with the file's size, before anything is
//! sliced, and nothing is ever allocated: values are views into the mapped file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::import::onnx::file::{kind_name, map_file};
use crate::import::onnx::name::shown;
use crate::import::onnx::proto::StringStringEntryProto;
use crate::import::onnx::warning::Warning;

/// The external files of one model, each opened once.
#[derive(Debug, Default)]
pub struct Files {
    /// Folders to look in, resolved: the one the model was named in, then the one its file really lies in.
    roots: Vec<PathBuf>,
    /// The hub's `blobs` folder, when the model is a link into one.
    blobs: Option<PathBuf>,
    opened: BTreeMap<String, Result<Option<Bytes>, ExternalError>>,
    missing: BTreeMap<String, usize>,
    ignored: Vec<Warning>,
}

impl Files {
    /// For a model that did not come from a folder: any external data is an error.
    pub fn none() -> Self {
        Self::default()
    }

    /// For a model whose data lies beneath `folder`.
    pub fn beneath(folder: &Path) -> Self {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        // A folder that does not resolve holds no files either: each tensor then counts as missing.
        let root = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        Self { roots: vec![root], ..Self::default() }
    }

    /// For the model file at `path`.
    pub fn of_model(path: &Path) -> Self {
        let mut files = Self::beneath(path.parent().unwrap_or(Path::new("")));
        let linked = std::fs::symlink_metadata(path).is_ok_and(|about| about.is_symlink());
        if linked && let Some(real) = path.canonicalize().ok().as_deref().and_then(Path::parent) {
            if real.file_name().is_some_and(|name| name == "blobs") {
                files.blobs = Some(real.to_owned());
            } else if !files.roots.iter().any(|root| root == real) {
                files.roots.push(real.to_owned());
            }
        }
        files
    }

    /// The `expected` bytes that `entries` point at, for the tensor called `tensor`; `None` where the file does not
    /// exist.
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
                let found = self.open(keys.location);
                self.opened.insert(keys.location.to_owned(), found.clone());
                found
            }
        };
        let Some(file) = file? else {
            *self.missing.entry(keys.location.to_owned()).or_default() += 1;
            return Ok(None);
        };
        let size = file.len() as u64;
        let past = || ExternalError::PastEnd { offset, length, size, location: keys.location.to_owned() };
        let end = offset.checked_add(length).filter(|end| *end <= size).ok_or_else(past)?;
        // Both fit a usize, being at most the length of a buffer.
        Ok(Some(file.slice(offset as usize..end as usize)))
    }

    /// The files that were read.
    pub fn paths(&self) -> BTreeSet<PathBuf> {
        let read = self.opened.iter().filter(|(_, found)| matches!(found, Ok(Some(_))));
        let place = |location: &String| self.roots.iter().find_map(|root| root.join(location).canonicalize().ok());
        read.filter_map(|(location, _)| place(location)).collect()
    }

    /// What there is to tell: keys that were ignored, then files that do not exist, in the order of their names.
    pub fn into_warnings(self) -> Vec<Warning> {
        let missing = self.missing.into_iter().map(|(path, tensors)| Warning::MissingFile { path, tensors });
        self.ignored.into_iter().chain(missing).collect()
    }

    fn keys<'a>(&mut self, tensor: &str, entries: &'a [StringStringEntryProto]) -> Result<Keys<'a>, ExternalError> {
        let (mut location, mut offset, mut length) = (None, None, None);
        for entry in entries {
            let (slot, key) = match entry.key() {
                "location" => (&mut location, "location"),
                "offset" => (&mut offset, "offset"),
                "length" => (&mut length, "length"),
                // A digest by SHA-1 over the whole file proves nothing against a stranger, and costs a full read.
                "checksum" => continue,
                other => {
                    self.ignored
                        .push(Warning::ExternalKey { tensor: tensor.to_owned(), key: shown(other).into_owned() });
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
        if let Some(why) = suspicious(location) {
            return Err(ExternalError::Escapes { location: location.to_owned(), why });
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

/// What is wrong with a reference to an external file. The texts follow "external data".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExternalError {
    /// There is no folder to look in: the model did not come from a file.
    #[error("in a file, but the model was not read from one")]
    NoFolder,
    /// No location.
    #[error("without a location")]
    NoLocation,
    /// A location that could lead outside the model's folder.
    #[error("at location `{}`, which {why}: it must stay inside the model's folder", shown(location))]
    Escapes {
        /// The location.
        location: String,
        /// Why it is refused.
        why: &'static str,
    },
    /// The location resolves, by links, to a place outside the model's folder.
    #[error("at location `{}`, a link that leads outside the model's folder", shown(location))]
    LinkEscapes {
        /// The location.
        location: String,
    },
    /// Not a regular file.
    #[error("at location `{}`, which is {kind}, not a regular file", shown(location))]
    NotRegular {
        /// The location.
        location: String,
        /// What it is, with its article.
        kind: &'static str,
    },
    /// It exists and cannot be read.
    #[error("at location `{}`, which cannot be read: {error}", shown(location))]
    Unreadable {
        /// The location.
        location: String,
        /// What the system said.
        error: String,
    },
    /// `offset` or `length` is not a number.
    #[error("whose {key} `{}` is not a number of bytes", shown(value))]
    Number {
        /// Which key.
        key: &'static str,
        /// Its text.
        value: String,
    },
    /// One key with two values.
    #[error("with two different values for `{key}`")]
    TwoValues {
        /// Which key.
        key: &'static str,
    },
    /// The stated length is not what type and dims say.
    #[error("whose length is {length} bytes, but its type and dims take {expected}")]
    Length {
        /// As stated.
        length: u64,
        /// What type and dims say.
        expected: u64,
    },
    /// The range ends after the file's end.
    #[error("at offset {offset} with length {length} of `{}`, whose size is {size} bytes", shown(location))]
    PastEnd {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// The file's size in bytes.
        size: u64,
        /// The location.
        location: String,
    },
}

struct Keys<'a> {
    location: &'a str,
    offset: Option<&'a str>,
    length: Option<&'a str>,
}

/// Why a location must not even be tried, on any operating system.
fn suspicious(location: &str) -> Option<&'static str> {
    let bytes = location.as_bytes();
    if bytes.contains(&0) {
        Some("holds a NUL")
    } else if bytes.contains(&b'\\') {
        Some("holds a backslash")
    } else if bytes[0] == b'/' {
        Some("is absolute")
    } else if bytes.len() > 1 && bytes[1] == b':' && bytes[0].is_ascii_alphabetic() {
        Some("names a drive")
    } else if location.split('/').any(|part| part == "..") {
        Some("escapes through `..`")
    } else {
        None
    }
}

/// A number of bytes in plain decimal digits.
fn number(key: &'static str, text: Option<&str>) -> Result<Option<u64>, ExternalError> {
    let Some(text) = text else { return Ok(None) };
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let value = if plain { text.parse().ok() } else { None };
    value.map(Some).ok_or_else(|| ExternalError::Number { key, value: shown(text).into_owned() })
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

    /// A fresh folder under the system's temporary one, removed when dropped.
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
        let two = entries(&[("location", "w.bin"), ("location", "v.bin")]);
        assert_eq!(files.read("w", &two, 4), Err(ExternalError::TwoValues { key: "location" }));
        assert_eq!(files.paths(), BTreeSet::from([folder.0.join("w.bin")]));
        assert_eq!(files.into_warnings(), [Warning::MissingFile { path: "gone.bin".into(), tensors: 1 }]);
    }

    #[cfg(unix)]
    #[test]
    fn links_must_stay_inside_except_in_the_hubs_layout() {
        use std::os::unix::fs::symlink;
        let folder = Folder::new("links");
        let at = |path: &str| folder.0.join(path);
        for made in ["blobs", "snapshots/abc/onnx", "other"] {
            std::fs::create_dir_all(at(made)).unwrap();
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
        // A model that is a link elsewhere: its data is also found beside its target, and nowhere else.
        let mut linked = Files::of_model(&at("snapshots/abc/onnx/link.onnx"));
        assert!(matches!(read(&mut linked, "secret"), Err(ExternalError::LinkEscapes { .. })));
        std::fs::write(at("other/link.bin"), b"01234567").unwrap();
        assert_eq!(read(&mut linked, "link.bin").unwrap().unwrap(), &b"2345"[..]);
    }
}
