//! Encrypted bytes of a connection between hosts, after the handshake of [`authentication`](super::authentication).
//!
//! ```text
//! length   2 bytes  of the message, little-endian
//! message  a Noise transport message: up to 65,519 bytes, encrypted, and a tag of 16 bytes
//! ```
//!
//! Messages are numbered, so one that is changed, repeated, left out or moved does not decrypt. Source: T. Perrin,
//! "The Noise Protocol Framework", revision 34, sections 3 and 11.4.

use snow::StatelessTransportState;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;

/// Bytes of the longest message, of its tag, and of a length.
const LONGEST: usize = 65_535;
const TAG: usize = 16;
const LENGTH: usize = 2;

/// The keys of both directions.
pub type Cipher = Arc<StatelessTransportState>;

/// Encrypts what is written.
pub struct EncryptingWriter {
    to: Box<dyn Write + Send>,
    cipher: Cipher,
    /// Number of the next message.
    number: u64,
    message: Vec<u8>,
}

impl EncryptingWriter {
    pub fn new(to: Box<dyn Write + Send>, cipher: Cipher) -> EncryptingWriter {
        EncryptingWriter { to, cipher, number: 0, message: vec![0; LENGTH + LONGEST] }
    }
}

impl Write for EncryptingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(LONGEST - TAG)];
        let encrypted = self.cipher.write_message(self.number, bytes, &mut self.message[LENGTH..]);
        let length = encrypted.map_err(io::Error::other)?;
        self.number += 1;
        self.message[..LENGTH].copy_from_slice(&(length as u16).to_le_bytes());
        self.to.write_all(&self.message[..LENGTH + length])?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Decrypts what is read.
pub struct DecryptingReader {
    from: Box<dyn Read + Send>,
    cipher: Cipher,
    /// Number of the next message.
    number: u64,
    /// A length and its message, and how much of them has arrived.
    message: Vec<u8>,
    received: usize,
    /// Decrypted bytes; those before `start` were read.
    content: Vec<u8>,
    start: usize,
}

impl DecryptingReader {
    pub fn new(from: Box<dyn Read + Send>, cipher: Cipher) -> DecryptingReader {
        let (message, content) = (vec![0; LENGTH + LONGEST], Vec::new());
        DecryptingReader { from, cipher, number: 0, message, received: 0, content, start: 0 }
    }

    /// Bytes of the next message with its length, as far as known.
    fn expected(&self) -> usize {
        let length = u16::from_le_bytes([self.message[0], self.message[1]]);
        if self.received < LENGTH { LENGTH } else { LENGTH + usize::from(length) }
    }

    fn decrypt(&mut self) -> io::Result<()> {
        self.content.resize(LONGEST, 0);
        let message = &self.message[LENGTH..self.received];
        let decrypted = self.cipher.read_message(self.number, message, &mut self.content);
        self.content.truncate(*decrypted.as_ref().unwrap_or(&0));
        self.start = 0;
        let changed = "what arrived was not encrypted by the other process, or is not what comes next";
        decrypted.map_err(|_| io::Error::new(ErrorKind::InvalidData, changed))?;
        (self.number, self.received) = (self.number + 1, 0);
        Ok(())
    }
}

impl Read for DecryptingReader {
    /// Fails with `WouldBlock` while a message is not whole, so that its reader checks its deadline. What has arrived
    /// is kept.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.start == self.content.len() {
            let expected = self.expected();
            if self.received >= LENGTH && self.received == expected {
                self.decrypt()?;
                continue;
            }
            match self.from.read(&mut self.message[self.received..expected])? {
                0 if self.received == 0 => return Ok(0),
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => self.received += count,
            }
            if self.received < self.expected() && self.received > LENGTH {
                return Err(ErrorKind::WouldBlock.into());
            }
        }
        let count = bytes.len().min(self.content.len() - self.start);
        bytes[..count].copy_from_slice(&self.content[self.start..self.start + count]);
        self.start += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::authentication::tests::ciphers;
    use crate::process::connection::{DeadlineReader, NO_DATA};
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    /// Bytes that were written.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns a few bytes at a time, and fails as a read without data does in between.
    struct Slow(io::Cursor<Vec<u8>>, bool);

    impl Read for Slow {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            let count = bytes.len().min(40_000);
            if self.1 { Err(ErrorKind::WouldBlock.into()) } else { self.0.read(&mut bytes[..count]) }
        }
    }

    fn encrypt(cipher: &Cipher, parts: &[&[u8]]) -> Vec<u8> {
        let written = Written::default();
        let mut writer = EncryptingWriter::new(Box::new(written.clone()), cipher.clone());
        parts.iter().for_each(|part| writer.write_all(part).unwrap());
        drop(writer);
        written.0.lock().unwrap().clone()
    }

    fn decrypt(cipher: &Cipher, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut reader = DecryptingReader::new(Box::new(Slow(io::Cursor::new(bytes), false)), cipher.clone());
        let (mut read, mut some) = (Vec::new(), [0; 1000]);
        loop {
            match reader.read(&mut some) {
                Ok(0) => return Ok(read),
                Ok(count) => read.extend(&some[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    #[test]
    fn what_is_written_is_read_and_not_seen() {
        let [one, other] = ciphers();
        let (name, long) = (&b"transformer.wte.weight"[..], vec![7; 3 * LONGEST]);
        let sent = encrypt(&one, &[name, &[], &long]);
        let contains = |what: &[u8]| sent.windows(what.len()).any(|window| window == what);
        assert!(!contains(name) && !contains(&long[..16]));
        assert!(sent.len() < long.len() + 200);
        assert_eq!(decrypt(&other, sent).unwrap(), [name, &long].concat());
        // The other direction has another key.
        assert!(decrypt(&one, encrypt(&one, &[name])).is_err());
    }

    /// One byte at a time, more often than a read without data fails.
    struct Drip(u64);

    impl Read for Drip {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            std::thread::sleep(Duration::from_millis(self.0));
            bytes[0] = 0xff;
            Ok(1)
        }
    }

    #[test]
    fn a_byte_of_a_message_now_and_then_buys_no_time() {
        let [one, _] = ciphers();
        let reader = DecryptingReader::new(Box::new(Drip(10)), one);
        let mut reader = DeadlineReader::new(Box::new(reader), Duration::from_secs(60), Box::new(|| false));
        let start = Instant::now();
        reader.end_at(start + Duration::from_millis(200));
        assert_eq!(reader.read(&mut [0]).unwrap_err().kind(), NO_DATA);
        assert!(start.elapsed() < Duration::from_secs(3));
    }

    #[test]
    fn what_is_changed_cut_or_moved_is_refused() {
        let [one, other] = ciphers();
        let kind = |bytes: Vec<u8>| decrypt(&other, bytes).map_err(|error| error.kind());
        let sent = encrypt(&one, &[b"first", b"second"]);
        let (first, second) = sent.split_at(LENGTH + 5 + TAG);
        assert_eq!(kind([first, second].concat()), Ok(b"firstsecond".to_vec()));
        assert_eq!(kind([second, first].concat()), Err(ErrorKind::InvalidData));
        assert_eq!(kind([first, first].concat()), Err(ErrorKind::InvalidData));
        assert_eq!(kind(vec![0; 9]), Err(ErrorKind::InvalidData));
        for at in 0..sent.len() {
            let mut changed = sent.clone();
            changed[at] ^= 1;
            assert!(kind(changed).is_err(), "byte {at}");
            let is_whole = [0, first.len()].contains(&at);
            assert_eq!(kind(sent[..at].to_vec()).is_ok(), is_whole, "cut at {at}");
        }
    }
}
