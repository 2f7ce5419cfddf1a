//! Fields of a frame: little-endian numbers, and texts with a length prefix.
//!
//! Bytes from another process are untrusted: every field is checked, and no length allocates more than the frame
//! contains.

use crate::process::frame::FrameError;

/// Maximum text length, in bytes.
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

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FrameError> {
        self.bytes(N, what)?.try_into().map_err(|_| FrameError::Field { what })
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, FrameError> {
        Ok(self.array::<1>(what)?[0])
    }

    /// Reads a byte below `bound`.
    pub fn below_byte(&mut self, bound: u8, what: &'static str) -> Result<u8, FrameError> {
        let number = self.u8(what)?;
        if number < bound { Ok(number) } else { Err(FrameError::Field { what }) }
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    /// Reads a `u32` below `bound`.
    pub fn below(&mut self, bound: u32, what: &'static str) -> Result<u32, FrameError> {
        let number = self.u32(what)?;
        if number < bound { Ok(number) } else { Err(FrameError::Field { what }) }
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub fn f64(&mut self, what: &'static str) -> Result<f64, FrameError> {
        Ok(f64::from_le_bytes(self.array(what)?))
    }

    /// Reads a UTF-8 text of at most [`LONGEST_TEXT`] bytes.
    pub fn text(&mut self, what: &'static str) -> Result<String, FrameError> {
        let length = self.u32(what)? as usize;
        if length > LONGEST_TEXT {
            return Err(FrameError::Field { what });
        }
        String::from_utf8(self.bytes(length, what)?.to_vec()).map_err(|_| FrameError::Field { what })
    }

    /// Checks that no bytes are left.
    pub fn end(&self) -> Result<(), FrameError> {
        if self.unread.is_empty() { Ok(()) } else { Err(FrameError::Field { what: "its end" }) }
    }
}

/// Appends a text, truncated to [`LONGEST_TEXT`] bytes.
pub fn put_text(to: &mut Vec<u8>, text: &str) {
    let mut length = text.len().min(LONGEST_TEXT);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    to.extend((length as u32).to_le_bytes());
    to.extend(&text.as_bytes()[..length]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_read() {
        let mut bytes = 7u32.to_le_bytes().to_vec();
        put_text(&mut bytes, "wörter");
        let mut fields = Fields::of(&bytes);
        assert_eq!(fields.below(8, "n"), Ok(7));
        assert_eq!(fields.text("t").as_deref(), Ok("wörter"));
        assert_eq!(fields.end(), Ok(()));
        assert_eq!(fields.u8("more"), Err(FrameError::Field { what: "more" }));
    }

    #[test]
    fn nothing_is_believed() {
        let lies = [u32::MAX.to_le_bytes().to_vec(), [&5u32.to_le_bytes()[..], b"abc"].concat(), vec![1, 0]];
        for bytes in lies {
            assert_eq!(Fields::of(&bytes).text("t"), Err(FrameError::Field { what: "t" }));
        }
        let not_text = [&2u32.to_le_bytes()[..], &[0xff, 0xfe]].concat();
        assert_eq!(Fields::of(&not_text).text("t"), Err(FrameError::Field { what: "t" }));
        assert!(Fields::of(&[0; 4]).below(0, "n").is_err());
        let mut bytes = Vec::new();
        put_text(&mut bytes, &"ä".repeat(LONGEST_TEXT));
        assert_eq!(bytes.len(), 4 + LONGEST_TEXT);
    }
}
