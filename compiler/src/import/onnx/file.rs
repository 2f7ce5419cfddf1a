//! Opens a model file as a memory map, and recognises other file formats before protobuf decoding fails on them.

use std::fs::{File, FileType};
use std::io;
use std::path::Path;

use bytes::Bytes;
use memmap2::Mmap;

use crate::import::onnx::error::{DecodeError, FormatError};

/// Maps the file at `path`. Pages are read on first access, and slices of the map are not copied.
///
/// Refuses anything but a regular file, and checks before opening: opening a pipe would block.
pub fn map(path: &Path) -> Result<Bytes, DecodeError> {
    let open = |source| DecodeError::Open { path: path.to_owned(), source };
    let kind = std::fs::metadata(path).map_err(open)?.file_type();
    if !kind.is_file() {
        return Err(DecodeError::NotRegular { path: path.to_owned(), kind: kind_name(kind) });
    }
    let file = File::open(path).map_err(open)?;
    map_file(&file).map_err(open)
}

pub fn map_file(file: &File) -> io::Result<Bytes> {
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if metadata.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is private and read-only, and `Bytes` hands out shared slices only while it is alive. Another
    // process may still modify or truncate the file. That changes weights or ends this process with SIGBUS, as in any
    // program that maps its models. All size checks use the length of the map, so no slice exceeds it.
    let map = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(map))
}

/// A description with its article, such as `a directory`, of a path that is not a regular file.
pub fn kind_name(kind: FileType) -> &'static str {
    if kind.is_dir() {
        return "a directory";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    "a special file"
}

/// Refuses bytes that are recognisably another format. None of these prefixes is valid in an ONNX model: as protobuf
/// they would be fields or wire types that `ModelProto` does not have.
pub fn refuse_other_formats(bytes: &[u8]) -> Result<(), FormatError> {
    let known = match bytes {
        [] => FormatError::Empty,
        [b'P', b'K', 3 | 5, 4 | 6, ..] => FormatError::Zip,
        [0x80, 2..=5, ..] => FormatError::Pickle,
        [0x89, b'H', b'D', b'F', ..] => FormatError::Hdf5,
        [a, b, c, d, e, 0, 0, 0, b'{', b'"', ..] if length_fits([*a, *b, *c, *d, *e], bytes.len()) => {
            FormatError::Safetensors
        }
        _ if bytes.starts_with(b"version https://git-lfs") => FormatError::LfsPointer,
        _ => return Ok(()),
    };
    Err(known)
}

fn length_fits(low: [u8; 5], size: usize) -> bool {
    let length = low.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    length >= 2 && length.saturating_add(8) <= size as u64
}

/// True if bytes that failed to decode are plain text, which makes a clearer error message than protobuf's.
pub fn is_text(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(512)];
    head.iter().all(|byte| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~' | 0x80..))
        && head.iter().any(|b| *b == b'\n' || *b == b'<' || *b == b'{')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats() {
        for (bytes, expected) in [
            (&b""[..], Some(FormatError::Empty)),
            (b"version https://git-lfs.github.com/spec/v1\noid", Some(FormatError::LfsPointer)),
            (b"PK\x03\x04\0\0", Some(FormatError::Zip)),
            (b"\x80\x02}q\0.", Some(FormatError::Pickle)),
            (b"\x09\0\0\0\0\0\0\0{\"", None),
            (b"\x03\0\0\0\0\0\0\0{\"}", Some(FormatError::Safetensors)),
            (b"\x08\x09\x3a\x00", None),
        ] {
            assert_eq!(refuse_other_formats(bytes).err(), expected, "{bytes:?}");
        }
        assert!(is_text(b"<html>\n404</html>"));
        assert!(!is_text(b"\x08\x09"));
    }

    #[test]
    fn a_folder_is_no_model() {
        let error = map(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap_err();
        assert!(error.to_string().contains("is a directory, not a regular file"), "{error}");
    }
}
