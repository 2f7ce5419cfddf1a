//! Mutual authentication of two processes of a run, before either reads anything else from the other.
//!
//! ```text
//! connecting process                                        accepting process
//! challenge: protocol, own number, processes, nonce  ───▶
//!                                                    ◀───   challenge
//! proof                                              ───▶   checked before this side proves anything
//! checked                                            ◀───   proof
//! ```
//!
//! The proofs are the two messages of a Noise handshake (T. Perrin, "The Noise Protocol Framework", revision 34,
//! section 9): pattern NNpsk0, with the SHA-256 of the token as pre-shared key and the challenges as prologue. So they
//! also cover the protocol version and the process numbers. Both nonces are fresh, so a recorded proof is worthless on
//! another connection.
//!
//! Everything after it is encrypted with the keys of the handshake, unless both processes see each other at a loopback
//! address.

use crate::comm::members::encode;
use crate::process::encryption::Cipher;
use crate::process::fields::{Fields, decode};
use crate::process::frame::{FrameError, Kind};
use crate::process::handshake::{HandshakeConnection, PROTOCOL};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use snow::{Builder, HandshakeState};
use std::fmt;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;

/// Maximum content of a frame of a peer that has proved nothing.
pub const LONGEST_UNPROVED: u64 = 1 << 10;

/// Minimum length of a token, so that it cannot be guessed from a recorded proof.
pub const SHORTEST_TOKEN: usize = 16;

/// Bytes of a random token, and of a nonce.
const RANDOM: usize = 32;

const NOISE: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Bytes of a proof: a public key and a tag.
const PROOF: usize = 32 + 16;

/// The reason to refuse a process that does not know the token.
const WRONG: &str =
    "its proof does not match: the two processes have different run tokens, or only one of them has a token";

/// The reason to refuse a process of a version without authentication.
const EARLIER: &str = "it uses an earlier protocol version";

/// The secret that all processes of a run share. Without one, only processes of this machine may connect.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RunToken(Vec<u8>);

impl fmt::Debug for RunToken {
    /// Does not reveal the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_some() { "RunToken(..)" } else { "RunToken(none)" })
    }
}

impl RunToken {
    /// Reads a token. Space around it does not count. `None` if it is too short.
    pub fn of(text: &str) -> Option<RunToken> {
        let text = text.trim();
        (text.len() >= SHORTEST_TOKEN).then(|| RunToken(text.as_bytes().to_vec()))
    }

    pub fn is_some(&self) -> bool {
        !self.0.is_empty()
    }

    /// True if a process with this token may use the address: without a token, only one of this machine.
    pub fn permits(&self, address: IpAddr) -> bool {
        self.is_some() || !is_exposed(address)
    }

    /// The first of these addresses that this token does not permit. A name without an address is not judged here.
    pub fn exposed<'a>(&self, addresses: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
        let permits = |address: &str| {
            address.to_socket_addrs().map(|mut resolved| resolved.all(|address| self.permits(address.ip())))
        };
        addresses.into_iter().find(|address| !permits(address).unwrap_or(true))
    }

    fn handshake(&self, connects: bool, challenges: [&Challenge; 2]) -> Result<HandshakeState, snow::Error> {
        let (key, prologue) = (Sha256::digest(&self.0).into(), challenges.map(encode).concat());
        let builder = Builder::new(NOISE.parse()?).psk(0, &key)?.prologue(&prologue)?;
        if connects { builder.build_initiator() } else { builder.build_responder() }
    }
}

/// True for an address of another machine.
pub fn is_exposed(address: IpAddr) -> bool {
    !address.to_canonical().is_loopback()
}

/// A new token, as text for the environment of a process.
pub fn random_token() -> Result<String, String> {
    Ok(random()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn random() -> Result<[u8; RANDOM], String> {
    let mut bytes = [0; RANDOM];
    getrandom::fill(&mut bytes).map_err(|error| format!("the system provides no random numbers: {error}"))?;
    Ok(bytes)
}

/// What a process says about itself first, and its nonce.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// In every version of the protocol, a challenge begins with it.
    #[serde(with = "postcard::fixint::le")]
    pub protocol: u32,
    #[serde(with = "postcard::fixint::le")]
    pub process: u32,
    #[serde(with = "postcard::fixint::le")]
    pub processes: u32,
    /// True if it sees the other process at no loopback address.
    pub is_exposed: bool,
    pub nonce: [u8; RANDOM],
}

impl Challenge {
    /// The challenge of this process, with a fresh nonce.
    pub fn new(process: usize, processes: usize, is_exposed: bool) -> Result<Challenge, String> {
        let (process, processes) = (process as u32, processes as u32);
        Ok(Challenge { protocol: PROTOCOL, process, processes, is_exposed, nonce: random()? })
    }

    /// Reads the challenge of a peer and checks it.
    fn read(content: &[u8], own: &Challenge) -> Result<Challenge, String> {
        let invalid = |error: FrameError| error.to_string();
        let protocol = Fields::of(content).bytes(4, "the protocol").map_err(invalid)?;
        let protocol = u32::from_le_bytes(protocol.try_into().expect("four bytes were read"));
        if protocol != own.protocol {
            return Err(format!(
                "rank {} uses protocol version {}, the other process {protocol}",
                own.process, own.protocol
            ));
        }
        let challenge: Challenge = decode(content, "the challenge").map_err(invalid)?;
        let Challenge { process, processes, .. } = challenge;
        if processes != own.processes {
            return Err(format!(
                "rank {process} expects {processes} processes, rank {} expects {}",
                own.process, own.processes
            ));
        }
        if process >= processes || process == own.process {
            return Err(format!("it claims to be rank {process} of {processes}, this is rank {}", own.process));
        }
        Ok(challenge)
    }
}

/// Authenticates with a process that this one connects to, which must have the number `expected`.
pub fn connect(
    connection: &mut HandshakeConnection,
    token: &RunToken,
    own: &Challenge,
    expected: usize,
) -> Result<(), String> {
    let invalid = |error: FrameError| error.to_string();
    connection.send_frame(Kind::Challenge, &encode(own)).map_err(invalid)?;
    let peer = Challenge::read(&receive_frame(connection, Kind::Challenge)?, own)?;
    if peer.process as usize != expected {
        return Err(format!("it claims to be rank {}, not {expected}", peer.process));
    }
    let mut handshake = token.handshake(true, [own, &peer]).map_err(|error| error.to_string())?;
    prove(connection, &mut handshake)?;
    check(connection, &mut handshake)?;
    encrypt(connection, handshake, [own, &peer])
}

/// Authenticates with a process that connects to this one, and returns its number. A stranger whose first bytes are no
/// frame gets no answer.
pub fn accept(connection: &mut HandshakeConnection, token: &RunToken, own: &Challenge) -> Result<usize, String> {
    let accepted = match receive_frame(connection, Kind::Challenge) {
        Err(why) if why != EARLIER => return Err(why),
        received => received.and_then(|challenge| answer_challenge(connection, &challenge, token, own)),
    };
    if let Err(why) = &accepted {
        connection.refuse(why);
    }
    accepted
}

fn answer_challenge(
    connection: &mut HandshakeConnection,
    challenge: &[u8],
    token: &RunToken,
    own: &Challenge,
) -> Result<usize, String> {
    let invalid = |error: FrameError| error.to_string();
    let peer = Challenge::read(challenge, own)?;
    connection.send_frame(Kind::Challenge, &encode(own)).map_err(invalid)?;
    let mut handshake = token.handshake(false, [&peer, own]).map_err(|error| error.to_string())?;
    check(connection, &mut handshake)?;
    prove(connection, &mut handshake)?;
    encrypt(connection, handshake, [&peer, own])?;
    Ok(peer.process as usize)
}

/// Sends the proof of this process.
fn prove(connection: &mut HandshakeConnection, handshake: &mut HandshakeState) -> Result<(), String> {
    let mut proof = [0; PROOF];
    let length = handshake.write_message(&[], &mut proof).map_err(|error| error.to_string())?;
    connection.send_frame(Kind::Proof, &proof[..length]).map_err(|error| error.to_string())
}

/// Checks the proof of the other process.
fn check(connection: &mut HandshakeConnection, handshake: &mut HandshakeState) -> Result<(), String> {
    let proof = receive_frame(connection, Kind::Proof)?;
    handshake.read_message(&proof, &mut [0; LONGEST_UNPROVED as usize]).map_err(|_| WRONG.to_string())?;
    Ok(())
}

/// Encrypts what follows, if others may read it.
fn encrypt(
    connection: &mut HandshakeConnection,
    handshake: HandshakeState,
    challenges: [&Challenge; 2],
) -> Result<(), String> {
    if challenges.iter().any(|challenge| challenge.is_exposed) {
        let cipher: Cipher = Arc::new(handshake.into_stateless_transport_mode().map_err(|error| error.to_string())?);
        connection.encrypt(&cipher);
    }
    Ok(())
}

/// Reads a short frame of a peer that has proved nothing. Its texts may hold anything, so they are escaped.
fn receive_frame(connection: &mut HandshakeConnection, expected: Kind) -> Result<Vec<u8>, String> {
    match connection.expect_within(expected, LONGEST_UNPROVED) {
        Ok(Ok(content)) => Ok(content),
        Ok(Err(why)) => Err(format!("it answers: {}", why.escape_debug())),
        Err(FrameError::Unexpected { kind: Kind::Hello }) => Err(EARLIER.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::process::connection::tests;
    use crate::process::meeting::connection;
    use std::time::Duration;

    type Outcome = (Result<(), String>, Result<usize, String>);

    fn pair() -> (HandshakeConnection, HandshakeConnection) {
        let (connecting, accepting) = tests::pair();
        let connection = |stream| connection(stream, Duration::from_secs(5), Arc::default());
        (connection(connecting), connection(accepting))
    }

    fn token(text: &str) -> RunToken {
        RunToken::of(text).unwrap()
    }

    const ONE: &str = "0123456789abcdef";
    const OTHER: &str = "0123456789abcdeF";

    fn authenticate(tokens: [RunToken; 2], connecting: Challenge, accepting: Challenge) -> Outcome {
        let (mut connecting_end, mut accepting_end) = pair();
        let [first, second] = tokens;
        let accepting = std::thread::spawn(move || accept(&mut accepting_end, &second, &accepting));
        let connected = connect(&mut connecting_end, &first, &connecting, 0);
        drop(connecting_end);
        (connected, accepting.join().unwrap())
    }

    fn challenge(process: usize) -> Challenge {
        Challenge::new(process, 3, false).unwrap()
    }

    fn challenges() -> (Challenge, Challenge) {
        (challenge(2), challenge(0))
    }

    /// The keys of a connecting and an accepting process.
    pub fn ciphers() -> [Cipher; 2] {
        let challenges = challenges();
        let handshake = |connects| token(ONE).handshake(connects, [&challenges.0, &challenges.1]).unwrap();
        let (mut connecting, mut accepting, mut proof) = (handshake(true), handshake(false), [0; PROOF]);
        connecting.write_message(&[], &mut proof).unwrap();
        accepting.read_message(&proof, &mut []).unwrap();
        accepting.write_message(&[], &mut proof).unwrap();
        connecting.read_message(&proof, &mut []).unwrap();
        [connecting, accepting].map(|handshake| Arc::new(handshake.into_stateless_transport_mode().unwrap()))
    }

    #[test]
    fn processes_with_one_token_meet() {
        let (connecting, accepting) = challenges();
        assert_ne!(connecting.nonce, accepting.nonce);
        assert_eq!(authenticate([token(ONE), token(ONE)], connecting.clone(), accepting.clone()), (Ok(()), Ok(2)));
        assert_eq!(authenticate([RunToken::default(), RunToken::default()], connecting, accepting), (Ok(()), Ok(2)));
    }

    #[test]
    fn another_token_version_or_number_is_refused() {
        let check_refusal = |tokens: [RunToken; 2], change: &dyn Fn(&mut Challenge), why: &str| {
            let (mut connecting, accepting) = challenges();
            change(&mut connecting);
            let (connected, accepted) = authenticate(tokens, connecting, accepting);
            assert_eq!(accepted, Err(why.to_string()));
            assert_eq!(connected, Err(format!("it answers: {why}")));
        };
        let same = || [token(ONE), token(ONE)];
        check_refusal([token(ONE), token(OTHER)], &|_| {}, WRONG);
        check_refusal([RunToken::default(), token(ONE)], &|_| {}, WRONG);
        check_refusal(
            same(),
            &|challenge| challenge.protocol = 1,
            &format!("rank 0 uses protocol version {PROTOCOL}, the other process 1"),
        );
        check_refusal(same(), &|challenge| challenge.processes = 4, "rank 2 expects 4 processes, rank 0 expects 3");
        check_refusal(same(), &|challenge| challenge.process = 3, "it claims to be rank 3 of 3, this is rank 0");
        check_refusal(same(), &|challenge| challenge.process = 0, "it claims to be rank 0 of 3, this is rank 0");
        // The process at the address has another number.
        let (connected, _) = authenticate(same(), challenge(2), challenge(1));
        assert_eq!(connected, Err("it claims to be rank 1, not 0".to_string()));
    }

    /// One that sees the other at a loopback address, as through a tunnel, encrypts too if the other does not.
    #[test]
    fn frames_between_hosts_are_encrypted() {
        for exposed in [[false, false], [true, false], [false, true], [true, true]] {
            let ((mut connecting_end, mut accepting_end), (mut connecting, mut accepting)) = (pair(), challenges());
            [connecting.is_exposed, accepting.is_exposed] = exposed;
            let accepting = std::thread::spawn(move || {
                accept(&mut accepting_end, &token(ONE), &accepting).unwrap();
                accepting_end.expect(Kind::Hello).unwrap().unwrap()
            });
            connect(&mut connecting_end, &token(ONE), &connecting, 0).unwrap();
            connecting_end.send_frame(Kind::Hello, b"hello").unwrap();
            assert_eq!(accepting.join().unwrap(), b"hello");
        }
    }

    #[test]
    fn nobody_on_the_way_turns_encryption_off() {
        let ((mut connector, mut one), (mut other, mut acceptor)) = (pair(), pair());
        let connecting = Challenge { is_exposed: true, ..challenge(2) };
        let connected = std::thread::spawn(move || connect(&mut connector, &token(ONE), &connecting, 0));
        let accepted = std::thread::spawn(move || accept(&mut acceptor, &token(ONE), &challenge(0)));
        let mut content = receive_frame(&mut one, Kind::Challenge).unwrap();
        content[12] = 0;
        other.send_frame(Kind::Challenge, &content).unwrap();
        one.send_frame(Kind::Challenge, &receive_frame(&mut other, Kind::Challenge).unwrap()).unwrap();
        other.send_frame(Kind::Proof, &receive_frame(&mut one, Kind::Proof).unwrap()).unwrap();
        assert_eq!(accepted.join().unwrap(), Err(WRONG.to_string()));
        drop((one, other));
        assert!(connected.join().unwrap().is_err());
    }

    #[test]
    fn an_accepting_process_proves_nothing_to_a_stranger() {
        let (mut stranger, mut acceptor) = pair();
        let accepting = std::thread::spawn(move || accept(&mut acceptor, &token(ONE), &challenge(0)));
        stranger.send_frame(Kind::Challenge, &encode(&challenge(1))).unwrap();
        receive_frame(&mut stranger, Kind::Challenge).unwrap();
        stranger.send_frame(Kind::Proof, &[]).unwrap();
        assert_eq!(receive_frame(&mut stranger, Kind::Proof), Err(format!("it answers: {WRONG}")));
        assert_eq!(accepting.join().unwrap(), Err(WRONG.to_string()));
    }

    #[test]
    fn a_process_of_an_earlier_version_learns_why_it_is_refused() {
        let (mut early, mut acceptor) = pair();
        let accepting = std::thread::spawn(move || accept(&mut acceptor, &token(ONE), &challenge(0)));
        // Without authentication, the hello came first.
        early.send_frame(Kind::Hello, &[7; 700]).unwrap();
        assert_eq!(early.expect(Kind::Welcome), Ok(Err(EARLIER.to_string())));
        assert_eq!(accepting.join().unwrap(), Err(EARLIER.to_string()));
    }

    #[test]
    fn texts_of_strangers_are_escaped() {
        let (mut receiver, mut stranger) = pair();
        stranger.refuse("\u{1b}[2Jno");
        assert_eq!(receive_frame(&mut receiver, Kind::Challenge), Err("it answers: \\u{1b}[2Jno".to_string()));
    }

    #[test]
    fn without_a_token_only_this_machine_is_permitted() {
        let no_token = RunToken::default();
        let addresses = ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "no such name:1", "10.0.0.1:1", "0.0.0.0:1"];
        assert_eq!(no_token.exposed(addresses), Some("10.0.0.1:1"));
        assert_eq!(no_token.exposed(["0.0.0.0:1"]), Some("0.0.0.0:1"));
        assert_eq!(token(ONE).exposed(addresses), None);
        assert_eq!(RunToken::of(" 0123456789abcde \n"), None);
        assert_eq!(format!("{:?} {no_token:?}", token(ONE)), "RunToken(..) RunToken(none)");
        assert_eq!(RunToken::of(&random_token().unwrap()).unwrap().0.len(), 64);
    }
}
