//! Frames of a connection between two processes.
//!
//! ```text
//! mark     4 bytes  "pipc"
//! kind     4 bytes
//! number   4 bytes  frames sent before on this connection
//! length   8 bytes  of the content
//! checksum 4 bytes  CRC-32 of the 20 bytes before
//! content
//! checksum 4 bytes  CRC-32 of the content
//! ```
//!
//! All numbers are little-endian. The head has its own checksum, so a corrupt length is found before it is used.
//! Truncated, corrupt, repeated and missing frames are detected. No frame makes the reader allocate more than the
//! caller's limit, or more than has arrived plus one chunk.

use crate::comm::communicator::PEER_LOST;
use crate::device::error::DeviceError;
use crc32fast::Hasher;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::U32Deserializer;
use std::io::{self, ErrorKind, Read, Write};
use thiserror::Error;

const MARK: [u8; 4] = *b"pipc";
const HEAD: usize = 24;

/// Content is read in chunks of this size, so a wrong length costs no memory.
const PIECE: usize = 1 << 20;

/// Frames up to this size are written with one call.
const SMALL: usize = 1 << 16;

#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FrameError {
    #[error("it closed the connection")]
    Closed,
    #[error("the connection ended within a frame")]
    Cut,
    #[error("the bytes are not a pipec frame")]
    Foreign,
    #[error("the checksum of a frame's {what} is {found:08x}, expected {made:08x}")]
    Checksum { what: &'static str, found: u32, made: u32 },
    #[error("unknown frame kind {kind}")]
    Kind { kind: u32 },
    #[error("received frame {found}, expected frame {expected}")]
    Number { expected: u32, found: u32 },
    #[error("a frame of {length} bytes exceeds the limit of this run, {limit} bytes")]
    Long { length: u64, limit: u64 },
    #[error("a frame field is not valid: {what}")]
    Field { what: &'static str },
    #[error("unexpected {kind:?} frame")]
    Unexpected { kind: Kind },
    #[error("{why}")]
    System { kind: ErrorKind, why: String },
    /// The device of this process failed at what the frame brought.
    #[error("{what}")]
    Device { what: String },
}

impl FrameError {
    pub fn device(fault: DeviceError) -> FrameError {
        FrameError::Device { what: fault.to_string() }
    }

    /// A field that a collective has refused, or the failure of its device.
    pub fn of(fault: DeviceError, what: &'static str) -> FrameError {
        if fault == PEER_LOST { FrameError::Field { what } } else { FrameError::device(fault) }
    }
}

/// The type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum Kind {
    /// Identifies a connecting process and its inputs.
    Hello = 1,
    /// The process is accepted.
    Welcome,
    /// The process is rejected, with the reason.
    Refusal,
    /// Addresses of all processes.
    Roster,
    /// A process has all its connections.
    Ready,
    /// All processes are ready.
    Start,
    /// The tensors of a micro-batch over an edge.
    Message,
    Posted,
    /// A contribution to a communicator.
    Part,
    Loss,
    /// A result tensor of a worker.
    Tensor,
    /// Recorded activity of a worker.
    Spans,
    /// A worker's results are complete.
    Left,
    /// A sign of life with the progress of the sender's workers.
    Heartbeat,
    /// The run failed, with the reason.
    Abort,
    /// The run ended successfully.
    Bye,
    /// A stage snapshot.
    Checkpoint,
    /// A process was asked to stop, with the reason.
    Stop,
    /// Start no further minibatch, with the reason.
    Hold,
    /// Number of minibatches that a process has started.
    ResumedState,
    /// Number of minibatches after which the run ends.
    End,
    /// A snapshot was taken by process 0.
    Taken,
    /// The device that a process offers for tensor links.
    Devices,
    /// All tensor links of a process are open; from process 0, those of all processes.
    Linked,
    /// Numbers and nonce of a process that must prove that it belongs to the run.
    Challenge,
    /// Proof that a process knows the run token.
    Proof,
}

impl Kind {
    fn of(kind: u32) -> Result<Kind, FrameError> {
        // The numbers have no gaps.
        let variant: U32Deserializer<serde::de::value::Error> = kind.wrapping_sub(1).into_deserializer();
        Kind::deserialize(variant).map_err(|_| FrameError::Kind { kind })
    }
}

pub struct FrameWriter<W> {
    to: W,
    number: u32,
}

impl<W: Write> FrameWriter<W> {
    pub fn new(to: W) -> FrameWriter<W> {
        FrameWriter { to, number: 0 }
    }

    pub fn target(&mut self) -> &mut W {
        &mut self.to
    }

    /// Writes one frame; its content is the concatenation of `parts`.
    pub fn write(&mut self, kind: Kind, parts: &[&[u8]]) -> io::Result<()> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let mut start = Vec::with_capacity(HEAD + if length <= SMALL { length + 4 } else { 0 });
        start.extend(MARK);
        start.extend((kind as u32).to_le_bytes());
        start.extend(self.number.to_le_bytes());
        start.extend((length as u64).to_le_bytes());
        start.extend(crc32fast::hash(&start).to_le_bytes());
        self.number = self.number.wrapping_add(1);
        let mut sum = Hasher::new();
        parts.iter().for_each(|part| sum.update(part));
        let sum = sum.finalize().to_le_bytes();
        if length <= SMALL {
            parts.iter().for_each(|part| start.extend(*part));
            start.extend(sum);
            return self.to.write_all(&start);
        }
        self.to.write_all(&start)?;
        parts.iter().try_for_each(|part| self.to.write_all(part))?;
        self.to.write_all(&sum)
    }
}

pub struct FrameReader<R> {
    from: R,
    number: u32,
    content: Vec<u8>,
}

impl<R: Read> FrameReader<R> {
    pub fn new(from: R) -> FrameReader<R> {
        FrameReader { from, number: 0, content: Vec::new() }
    }

    pub fn source(&mut self) -> &mut R {
        &mut self.from
    }

    /// Reads the next frame, of at most `limit` bytes of content.
    pub fn read(&mut self, limit: u64) -> Result<(Kind, &[u8]), FrameError> {
        let mut head = [0; HEAD];
        let mut received = 0;
        while received < HEAD {
            match self.from.read(&mut head[received..]) {
                Ok(0) if received == 0 => return Err(FrameError::Closed),
                Ok(0) => return Err(FrameError::Cut),
                Ok(count) => received += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(system_error(&error)),
            }
            // A peer with another protocol may wait for an answer before it sends a full head.
            let checked = received.min(MARK.len());
            if head[..checked] != MARK[..checked] {
                return Err(FrameError::Foreign);
            }
        }
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        check("head", word(HEAD - 4), crc32fast::hash(&head[..HEAD - 4]))?;
        let (kind, number) = (Kind::of(word(4))?, word(8));
        if number != self.number {
            return Err(FrameError::Number { expected: self.number, found: number });
        }
        self.number = self.number.wrapping_add(1);
        let length = u64::from(word(12)) | u64::from(word(16)) << 32;
        let in_memory = usize::try_from(length).ok().filter(|_| length <= limit);
        let Some(length) = in_memory else { return Err(FrameError::Long { length, limit }) };
        self.content.clear();
        while self.content.len() < length {
            let before = self.content.len();
            self.content.resize(before + PIECE.min(length - before), 0);
            read_exactly(&mut self.from, &mut self.content[before..])?;
        }
        let mut sum = [0; 4];
        read_exactly(&mut self.from, &mut sum)?;
        check("content", u32::from_le_bytes(sum), crc32fast::hash(&self.content))?;
        Ok((kind, &self.content))
    }
}

fn check(what: &'static str, found: u32, made: u32) -> Result<(), FrameError> {
    if found == made { Ok(()) } else { Err(FrameError::Checksum { what, found, made }) }
}

fn read_exactly(from: &mut impl Read, bytes: &mut [u8]) -> Result<(), FrameError> {
    from.read_exact(bytes).map_err(|error| system_error(&error))
}

fn system_error(error: &io::Error) -> FrameError {
    match error.kind() {
        ErrorKind::UnexpectedEof => FrameError::Cut,
        kind => FrameError::System { kind, why: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(frames: &[(Kind, &[u8])]) -> Vec<u8> {
        let mut writer = FrameWriter::new(Vec::new());
        frames.iter().for_each(|(kind, content)| writer.write(*kind, &[content]).unwrap());
        writer.to
    }

    fn read(bytes: &[u8], limit: u64) -> Result<Vec<(Kind, Vec<u8>)>, FrameError> {
        let mut reader = FrameReader::new(bytes);
        let mut frames = Vec::new();
        loop {
            match reader.read(limit) {
                Ok((kind, content)) => frames.push((kind, content.to_vec())),
                Err(FrameError::Closed) => return Ok(frames),
                Err(error) => return Err(error),
            }
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let large = vec![7; 3 * PIECE + 5];
        let frames: [(Kind, &[u8]); 3] = [(Kind::Hello, b"abc"), (Kind::Bye, b""), (Kind::Message, &large)];
        let expected: Vec<_> = frames.iter().map(|(kind, content)| (*kind, content.to_vec())).collect();
        assert_eq!(read(&encode(&frames), 1 << 30), Ok(expected));
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let bytes = encode(&[(Kind::Hello, b"who"), (Kind::Loss, b"what")]);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&flipped, 100).is_err(), "bit {bit}");
        }
        let frame_ends = [0, HEAD + 3 + 4, bytes.len()];
        for length in (0..bytes.len()).filter(|length| !frame_ends.contains(length)) {
            assert_eq!(read(&bytes[..length], 100), Err(FrameError::Cut), "{length} bytes");
        }
    }

    #[test]
    fn what_is_repeated_left_out_or_too_long_is_found() {
        let bytes = encode(&[(Kind::Bye, b""), (Kind::Bye, b""), (Kind::Bye, b"")]);
        let length = bytes.len() / 3;
        let repeated = [&bytes[..length], &bytes[..length]].concat();
        assert_eq!(read(&repeated, 9), Err(FrameError::Number { expected: 1, found: 0 }));
        let skipped = [&bytes[..length], &bytes[2 * length..]].concat();
        assert_eq!(read(&skipped, 9), Err(FrameError::Number { expected: 1, found: 2 }));
        assert_eq!(read(&encode(&[(Kind::Loss, &[0; 10])]), 9), Err(FrameError::Long { length: 10, limit: 9 }));
        assert_eq!(read(b"GET / HTTP/1.1\r\n", 9), Err(FrameError::Foreign));
    }

    #[test]
    fn a_false_length_allocates_nothing() {
        let mut bytes = encode(&[(Kind::Message, b"x")]);
        bytes[12..20].copy_from_slice(&(1u64 << 40).to_le_bytes());
        let sum = crc32fast::hash(&bytes[..20]);
        bytes[20..24].copy_from_slice(&sum.to_le_bytes());
        let mut reader = FrameReader::new(&bytes[..]);
        assert_eq!(reader.read(u64::MAX).unwrap_err(), FrameError::Cut);
        assert!(reader.content.capacity() <= 2 * PIECE);
    }
}
