//! The content of a frame: values as `postcard` encodes them, and the bytes of tensors.
//!
//! Bytes from another process are untrusted: every value is checked, and no length allocates much more than the frame
//! contains.

use crate::process::frame::FrameError;
use serde::Deserialize;

/// Maximum length of a text from another process, in bytes.
pub const LONGEST_TEXT: usize = 1 << 12;

/// The unread fields of a frame.
pub struct Fields<'a> {
    unread: &'a [u8],
}

impl<'a> Fields<'a> {
    pub fn of(bytes: &'a [u8]) -> Fields<'a> {
        Fields { unread: bytes }
    }

    /// Reads `count` bytes. `what` names the field in errors.
    pub fn bytes(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], FrameError> {
        let (bytes, unread) = self.unread.split_at_checked(count).ok_or(FrameError::Field { what })?;
        self.unread = unread;
        Ok(bytes)
    }

    pub fn value<T: Deserialize<'a>>(&mut self, what: &'static str) -> Result<T, FrameError> {
        let (value, unread) = postcard::take_from_bytes(self.unread).map_err(|_| FrameError::Field { what })?;
        self.unread = unread;
        Ok(value)
    }

    /// Checks that no bytes are left.
    pub fn end(&self) -> Result<(), FrameError> {
        if self.unread.is_empty() { Ok(()) } else { Err(FrameError::Field { what: "its end" }) }
    }
}

/// Fails unless `is_valid`. `what` names the field.
pub fn check(is_valid: bool, what: &'static str) -> Result<(), FrameError> {
    if is_valid { Ok(()) } else { Err(FrameError::Field { what }) }
}

/// Reads a value that is the whole content of a frame.
pub fn decode<'a, T: Deserialize<'a>>(content: &'a [u8], what: &'static str) -> Result<T, FrameError> {
    let mut fields = Fields::of(content);
    let value = fields.value(what)?;
    fields.end()?;
    Ok(value)
}

/// The beginning of a text, of at most [`LONGEST_TEXT`] bytes.
pub fn shorten(text: &str) -> &str {
    let mut length = text.len().min(LONGEST_TEXT);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    &text[..length]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::members::encode;

    #[test]
    fn nothing_is_believed() {
        let bytes = encode(&(7u32, "wörter"));
        assert_eq!(decode(&bytes, "a text"), Ok((7u32, "wörter")));
        let invalid = Err(FrameError::Field { what: "a text" });
        assert!((0..bytes.len()).all(|length| decode::<(u32, &str)>(&bytes[..length], "a text") == invalid));
        assert!(decode::<(u32, &str)>(&[&bytes[..], &[0]].concat(), "a text").is_err());
        // A length beyond the frame, and bytes that are no text.
        for lie in [&[255, 255, 255, 255, 15, 7][..], &[2, 0xff, 0xfe]] {
            assert!(decode::<Vec<u64>>(lie, "a list").is_err() && decode::<&str>(lie, "a text").is_err());
        }
        assert_eq!(shorten(&format!("a{}", "ä".repeat(LONGEST_TEXT))).len(), LONGEST_TEXT - 1);
    }
}
