//! The handshake of two authenticated processes: the connecting one sends a hello, and is welcomed or refused with a
//! reason.
//!
//! A hello carries the run number, the process number, and everything that must be equal in all processes: settings by
//! value, and digests of programs, weights and data. A process of an earlier attempt has another run number and is refused.

use crate::process::connection::{DeadlineReader, Hangup};
use crate::process::encryption::{Cipher, EncryptingWriter};
use crate::process::fields::{LONGEST_TEXT, check, shorten as shorten_text};
use crate::process::frame::{FrameError, FrameReader, FrameWriter, Kind};
use crate::process::run_status::abort_reason;
use compiler::graph::hash::sha256;
use compiler::text::name::short_name;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};

/// Version of the frame protocol.
pub const PROTOCOL: u32 = 10;

/// Maximum content of a frame before the run begins.
pub const LONGEST: u64 = 1 << 20;

/// Maximum number of inputs in a hello.
const MOST_INPUTS: usize = 64;

/// Characters of the longest setting that messages contain whole.
const WHOLE: usize = 120;

/// Characters that messages contain of a longer one.
const BEGIN: usize = 40;

/// An input of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunInput {
    /// SHA-256 of something large.
    Digest([u8; 32]),
    /// A setting as text of at most [`WHOLE`] characters.
    Setting(String),
    /// A setting that may differ if the digests are equal, and else explains why they differ.
    Cause(String),
}

impl RunInput {
    /// A setting. A long one is represented by its beginning and its SHA-256.
    pub fn setting(value: String) -> RunInput {
        RunInput::Setting(shorten(value))
    }

    /// As [`setting`](Self::setting), for one that the digests cover.
    pub fn cause(value: String) -> RunInput {
        RunInput::Cause(shorten(value))
    }
}

fn shorten(value: String) -> String {
    if value.chars().count() <= WHOLE {
        return value;
    }
    let begin: String = value.chars().take(BEGIN).collect();
    format!("{begin}…, SHA-256 {}", sha256(value.as_bytes()))
}

/// The inputs of a run that must be equal in all processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Distinguishes runs with equal inputs.
    pub run: u64,
    /// The inputs by name.
    pub inputs: Vec<(String, RunInput)>,
}

/// The introduction of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub process: u32,
    pub pid: u32,
    pub address: String,
    pub identity: Identity,
}

impl Hello {
    /// True if no text and no list is longer than those of a process of pipec.
    pub fn is_short(&self) -> bool {
        let inputs = self.identity.inputs.iter().flat_map(|(name, input)| match input {
            RunInput::Digest(_) => [Some(name), None],
            RunInput::Setting(text) | RunInput::Cause(text) => [Some(name), Some(text)],
        });
        let mut texts = inputs.flatten().chain([&self.address]);
        self.identity.inputs.len() < MOST_INPUTS && texts.all(|text| text.len() <= LONGEST_TEXT)
    }

    /// Checks that the sender may take part in the run of `own`, or says why not.
    pub fn check_matches(&self, own: &Hello) -> Result<(), String> {
        if self.identity.run != own.identity.run {
            return Err(format!("it belongs to run {:x}, this is run {:x}", self.identity.run, own.identity.run));
        }
        let (mut reasons, mut causes, mut names) = (Vec::new(), Vec::new(), Vec::new());
        let is_same_set =
            self.identity.inputs.iter().map(|(name, _)| name).eq(own.identity.inputs.iter().map(|(name, _)| name));
        let describe_both = |name: &str, theirs: &str, ours: &str| {
            let [theirs, ours] = [theirs, ours].map(quote);
            format!("{name}: rank {} has {theirs}, rank {} {ours}", self.process, own.process)
        };
        for (name, input) in &own.identity.inputs {
            // An input that only one has follows from another that differs.
            let Some((_, peer_input)) = self.identity.inputs.iter().find(|(peer_name, _)| peer_name == name) else {
                continue;
            };
            match (peer_input, input) {
                _ if peer_input == input => {}
                (RunInput::Setting(theirs), RunInput::Setting(ours)) => reasons.push(describe_both(name, theirs, ours)),
                (RunInput::Cause(theirs), RunInput::Cause(ours)) => causes.push(describe_both(name, theirs, ours)),
                _ => names.push(name.as_str()),
            }
        }
        if reasons.is_empty() && names.is_empty() && is_same_set {
            return Ok(());
        }
        if !names.is_empty() {
            reasons.append(&mut causes);
        }
        // Digests may differ only because settings do.
        if reasons.is_empty() && !names.is_empty() {
            reasons.push(format!("{} differ", join_list(&names)));
        }
        Err(if reasons.is_empty() { "it has other settings than this process".into() } else { reasons.join("; ") })
    }
}

/// A setting in a message.
fn quote(setting: &str) -> String {
    match setting {
        "" => "none".to_string(),
        _ => format!("`{}`", short_name(setting)),
    }
}

/// A list in a sentence.
fn join_list(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => names.concat(),
    }
}

/// Roster entry of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterEntry {
    pub pid: u32,
    pub address: String,
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
            (Kind::Refusal, content) => Ok(Err(decode_refusal(content)?)),
            (Kind::Abort, content) => Ok(Err(abort_reason(content)?.1)),
            (kind, _) => Err(FrameError::Unexpected { kind }),
        }
    }

    /// Encrypts all later frames of both sides.
    pub fn encrypt(&mut self, cipher: &Cipher) {
        self.reader.source().decrypt(cipher);
        let to = std::mem::replace(self.writer.target(), Box::new(io::sink()));
        *self.writer.target() = Box::new(EncryptingWriter::new(to, cipher.clone()));
    }

    /// Refuses the peer.
    pub fn refuse(&mut self, why: &str) {
        let why = shorten_text(why);
        // The peer may have closed the connection.
        let _ = self.send_frame(Kind::Refusal, &[&(why.len() as u32).to_le_bytes(), why.as_bytes()].concat());
    }

    pub fn send_frame(&mut self, kind: Kind, content: &[u8]) -> Result<(), FrameError> {
        let written = self.writer.write(kind, &[content]);
        written.map_err(|error| FrameError::System { kind: error.kind(), why: error.to_string() })
    }
}

/// The reason in a refusal: a length of four bytes and a text in every version of the protocol.
fn decode_refusal(content: &[u8]) -> Result<String, FrameError> {
    let invalid = || FrameError::Field { what: "the reason" };
    let (length, text) = content.split_first_chunk().ok_or_else(invalid)?;
    check(u32::from_le_bytes(*length) as usize == text.len(), "the reason")?;
    let text = std::str::from_utf8(text).map_err(|_| invalid())?;
    Ok(shorten_text(text).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::members::encode;
    use crate::process::fields::decode;

    fn hello() -> Hello {
        let inputs = [
            ("the programs", RunInput::Digest([1; 32])),
            ("the weights", RunInput::Digest([2; 32])),
            ("seed", RunInput::Setting("3".to_string())),
        ];
        let identity = Identity { run: 7, inputs: inputs.map(|(name, input)| (name.to_string(), input)).into() };
        Hello { process: 1, pid: 9, address: "127.0.0.1:1".into(), identity }
    }

    #[test]
    fn a_hello_has_an_end() {
        assert!(hello().is_short());
        let long = "a".repeat(LONGEST_TEXT + 1);
        let mut others = [hello(), hello(), hello(), hello()];
        others[0].address.clone_from(&long);
        others[1].identity.inputs[0].0.clone_from(&long);
        others[2].identity.inputs[2].1 = RunInput::Setting(long);
        others[3].identity.inputs = vec![hello().identity.inputs[0].clone(); MOST_INPUTS];
        assert!(others.iter().all(|hello| !hello.is_short()));
    }

    #[test]
    fn a_long_setting_is_compared_in_full() {
        let hello_with = |last: &str| {
            let mut hello = hello();
            hello.identity.inputs[2].1 = RunInput::setting("ä".repeat(WHOLE) + last);
            hello
        };
        let decoded: Hello = decode(&encode(&hello_with("b")), "a hello").unwrap();
        assert_eq!(decoded.check_matches(&hello_with("b")), Ok(()));
        let why = decoded.check_matches(&hello_with("c")).unwrap_err();
        let begin = "ä".repeat(BEGIN);
        assert!(why.starts_with(&format!("seed: rank 1 has `{begin}…, SHA-256 ")), "{why}");
        assert!(why.contains(&format!("`, rank 1 `{begin}…, SHA-256 ")), "{why}");
    }

    #[test]
    fn a_cause_matters_only_if_a_digest_differs() {
        let hello_with = |frozen: &str, program: u8| {
            let mut hello = hello();
            hello.identity.inputs[0].1 = RunInput::Digest([program; 32]);
            hello.identity.inputs.push(("frozen".to_string(), RunInput::cause(frozen.to_string())));
            hello
        };
        assert_eq!(hello_with("a,b", 1).check_matches(&hello_with("b,a", 1)), Ok(()));
        assert_eq!(
            hello_with("a", 2).check_matches(&hello_with("b", 1)),
            Err("frozen: rank 1 has `a`, rank 1 `b`".to_string())
        );
        assert_eq!(hello_with("a", 2).check_matches(&hello_with("a", 1)), Err("the programs differ".to_string()));
    }

    #[test]
    fn what_differs_is_named() {
        let check = |change: &dyn Fn(&mut Hello)| {
            let mut changed = hello();
            change(&mut changed);
            changed.check_matches(&hello())
        };
        let refused = |what: &str| Err(what.to_string());
        assert_eq!(check(&|_| {}), Ok(()));
        let other_digest = RunInput::Digest([0; 32]);
        let seed = |seed: &str| RunInput::Setting(seed.to_string());
        assert_eq!(check(&|h| h.identity.inputs[1].1 = other_digest.clone()), refused("the weights differ"));
        assert_eq!(check(&|h| drop(h.identity.inputs.pop())), refused("it has other settings than this process"));
        assert_eq!(check(&|h| h.identity.inputs[1].0.clear()), refused("it has other settings than this process"));
        let change_both_digests =
            |h: &mut Hello| h.identity.inputs[..2].iter_mut().for_each(|input| input.1 = other_digest.clone());
        assert_eq!(check(&change_both_digests), refused("the programs and the weights differ"));
        assert_eq!(check(&|h| h.identity.inputs[2].1 = seed("4\u{1b}")), refused("seed: rank 1 has `4`, rank 1 `3`"));
        let change_process_and_inputs = |h: &mut Hello| {
            (h.process, h.identity.inputs[0].1, h.identity.inputs[2].1) = (2, other_digest.clone(), seed(""));
        };
        assert_eq!(check(&change_process_and_inputs), refused("seed: rank 2 has none, rank 1 `3`"));
        assert_eq!(check(&|h| h.identity.run = 8), refused("it belongs to run 8, this is run 7"));
    }
}
