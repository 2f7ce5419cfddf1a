//! The handshake of two authenticated processes: the connecting one sends a hello, and is welcomed or refused with a
//! reason.
//!
//! A hello carries the run number, the process number, and digests of everything that must be equal in all processes:
//! program, weights, data. A process of an earlier attempt has another run number and is refused.

use crate::process::connection::{DeadlineReader, Hangup};
use crate::process::fields::{Fields, put_text};
use crate::process::frame::{FrameError, FrameReader, FrameWriter, Kind};
use std::io::Write;

/// Version of the frame protocol.
pub const PROTOCOL: u32 = 7;

/// Maximum content of a frame before the run begins.
pub const LONGEST: u64 = 1 << 20;

/// Maximum number of digests in a hello.
const MOST_PARTS: u32 = 64;

/// The inputs of a run that must be equal in all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Distinguishes runs with equal inputs.
    pub run: u64,
    /// SHA-256 digests with the name of the input.
    pub parts: Vec<(String, [u8; 32])>,
}

/// The introduction of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub process: u32,
    pub pid: u32,
    pub address: String,
    pub identity: Identity,
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut content = Vec::new();
        for number in [self.process, self.pid] {
            content.extend(number.to_le_bytes());
        }
        content.extend(self.identity.run.to_le_bytes());
        put_text(&mut content, &self.address);
        content.extend((self.identity.parts.len() as u32).to_le_bytes());
        for (name, digest) in &self.identity.parts {
            put_text(&mut content, name);
            content.extend(digest);
        }
        content
    }

    pub fn decode(content: &[u8]) -> Result<Hello, FrameError> {
        let mut fields = Fields::of(content);
        let (process, pid) = (fields.u32("the process")?, fields.u32("the process id")?);
        let run = fields.u64("the run")?;
        let address = fields.text("the address")?;
        let count = fields.below(MOST_PARTS, "the number of digests")?;
        let mut parts = Vec::new();
        for _ in 0..count {
            let name = fields.text("the name of a digest")?;
            let digest = fields.bytes(32, "a digest")?.try_into();
            parts.push((name, digest.map_err(|_| FrameError::Field { what: "a digest" })?));
        }
        fields.end()?;
        Ok(Hello { process, pid, address, identity: Identity { run, parts } })
    }

    /// Checks that the sender may take part in the run of `own`, or says why not.
    pub fn meets(&self, own: &Hello) -> Result<(), String> {
        if self.identity.run != own.identity.run {
            return Err(format!("it belongs to run {:x}, this is run {:x}", self.identity.run, own.identity.run));
        }
        // A part that only one has follows from another that differs.
        let theirs = |name: &str| self.identity.parts.iter().find(|(other, _)| other == name);
        let differs = own.identity.parts.iter().filter(|part| theirs(&part.0).is_some_and(|other| other != *part));
        let names: Vec<&str> = differs.map(|(name, _)| name.as_str()).collect();
        match self.identity.parts == own.identity.parts {
            true => Ok(()),
            false if names.is_empty() => Err("it has other settings than this process".into()),
            false => Err(format!("{} differ", listed(&names))),
        }
    }
}

/// A list in a sentence.
fn listed(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => names.concat(),
    }
}

/// Roster entry of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    pub pid: u32,
    pub address: String,
}

pub fn encode_roster(roster: &[Known]) -> Vec<u8> {
    let mut content = (roster.len() as u32).to_le_bytes().to_vec();
    for known in roster {
        content.extend(known.pid.to_le_bytes());
        put_text(&mut content, &known.address);
    }
    content
}

pub fn decode_roster(content: &[u8], processes: usize) -> Result<Vec<Known>, FrameError> {
    let mut fields = Fields::of(content);
    if fields.u32("the number of processes")? as usize != processes {
        return Err(FrameError::Field { what: "the number of processes" });
    }
    let mut roster = Vec::new();
    for _ in 0..processes {
        roster.push(Known { pid: fields.u32("a process id")?, address: fields.text("an address")? });
    }
    fields.end()?;
    Ok(roster)
}

/// A connection during the handshake.
pub struct HandshakeConnection {
    pub reader: FrameReader<DeadlineReader>,
    pub writer: FrameWriter<Box<dyn Write + Send>>,
    pub hangup: Hangup,
}

impl HandshakeConnection {
    /// Reads a frame of the expected kind. A refusal, or the end of the run, returns its reason as the inner error.
    pub fn expect(&mut self, expected: Kind) -> Result<Result<Vec<u8>, String>, FrameError> {
        self.expect_within(expected, LONGEST)
    }

    /// As [`expect`](Self::expect), for a frame with at most `longest` bytes of content.
    pub fn expect_within(&mut self, expected: Kind, longest: u64) -> Result<Result<Vec<u8>, String>, FrameError> {
        match self.reader.read(longest)? {
            (kind, content) if kind == expected => Ok(Ok(content.to_vec())),
            (Kind::Refusal, content) => Ok(Err(Fields::of(content).text("the reason")?)),
            (Kind::Abort, content) => {
                let mut fields = Fields::of(content);
                fields.u32("the process that failed")?;
                Ok(Err(fields.text("the reason")?))
            }
            (kind, _) => Err(FrameError::Unexpected { kind }),
        }
    }

    /// Refuses the peer.
    pub fn refuse(&mut self, why: &str) {
        let mut content = Vec::new();
        put_text(&mut content, why);
        // The peer may have closed the connection.
        let _ = self.send_frame(Kind::Refusal, &content);
    }

    pub fn send_frame(&mut self, kind: Kind, content: &[u8]) -> Result<(), FrameError> {
        let written = self.writer.write(kind, &[content]);
        written.map_err(|error| FrameError::System { kind: error.kind(), why: error.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let parts = vec![("the program".to_string(), [1; 32]), ("the weights".to_string(), [2; 32])];
        let identity = Identity { run: 7, parts };
        Hello { process: 1, pid: 9, address: "127.0.0.1:1".into(), identity }
    }

    #[test]
    fn hellos_and_rosters_read_back() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        let roster = vec![Known { pid: 1, address: "a:1".into() }, Known { pid: 2, address: "b:2".into() }];
        assert_eq!(decode_roster(&encode_roster(&roster), 2), Ok(roster.clone()));
        assert!(decode_roster(&encode_roster(&roster), 3).is_err());
        let whole = hello().encode();
        for length in 0..whole.len() {
            assert!(Hello::decode(&whole[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn what_differs_is_named() {
        let check = |change: &dyn Fn(&mut Hello)| {
            let mut other = hello();
            change(&mut other);
            other.meets(&hello())
        };
        let refused = |what: &str| Err(what.to_string());
        assert_eq!(check(&|_| {}), Ok(()));
        assert_eq!(check(&|h| h.identity.parts[1].1[0] = 0), refused("the weights differ"));
        assert_eq!(check(&|h| drop(h.identity.parts.pop())), refused("it has other settings than this process"));
        assert_eq!(check(&|h| h.identity.parts[1].0.clear()), refused("it has other settings than this process"));
        let both = |h: &mut Hello| h.identity.parts.iter_mut().for_each(|part| part.1[0] = 0);
        assert_eq!(check(&both), refused("the program and the weights differ"));
        assert_eq!(check(&|h| h.identity.run = 8), refused("it belongs to run 8, this is run 7"));
    }
}
