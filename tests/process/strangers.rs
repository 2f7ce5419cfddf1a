//! Connections that do not belong to a run: they are refused by name, and the run is unharmed.

use crate::processes::{PATIENCE, command, make_small_model, port, run_ok, start_rank, text, wait_for_exit};
use runtime::process::authentication::{Challenge, RunToken, connect};
use runtime::process::connection::{DeadlineReader, Stream};
use runtime::process::frame::{FrameReader, FrameWriter, Kind};
use runtime::process::handshake::HandshakeConnection;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

const TOKEN: &str = "a token of the tests";
const MISMATCH: &str =
    "its proof does not match: the two processes have different run tokens, or only one of them has a token";

fn connect_stream(address: &str) -> TcpStream {
    let until = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn connection(stream: TcpStream, record: Option<Arc<Mutex<Vec<u8>>>>) -> HandshakeConnection {
    let Stream { reader, writer, hangup } = Stream::tcp(stream).unwrap();
    let reader = DeadlineReader::new(reader, PATIENCE, Box::new(|| false));
    let writer: Box<dyn Write + Send> = match record {
        Some(record) => Box::new(Recorded { to: writer, record }),
        None => writer,
    };
    HandshakeConnection { reader: FrameReader::new(reader), writer: FrameWriter::new(writer), hangup }
}

/// A writer that keeps what it writes.
struct Recorded {
    to: Box<dyn Write + Send>,
    record: Arc<Mutex<Vec<u8>>>,
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.to.write(bytes)?;
        self.record.lock().unwrap().extend(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Sends bytes and returns the answer.
fn send_and_read(address: &str, bytes: &[u8]) -> Vec<u8> {
    let mut stream = connect_stream(address);
    stream.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    // The connection may also end with a reset.
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// The head of a frame that announces 1 TiB.
fn huge_frame_head() -> Vec<u8> {
    let mut head = b"pipc".to_vec();
    head.extend((Kind::Challenge as u32).to_le_bytes());
    head.extend(0u32.to_le_bytes());
    head.extend((1u64 << 40).to_le_bytes());
    let bit = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    let crc = head.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| bit(crc)));
    head.extend((!crc).to_le_bytes());
    head
}

/// The threads' result of the run of [`start_rank`] with 5 steps.
fn thread_result(folder: &Path) -> Vec<u8> {
    let flags = ["--synthetic-data", "--batch", "8", "--stages", "1,1", "--steps", "5", "-q"];
    run_ok(folder, &[&["train", "m.onnx", "--save", "threads.safetensors"][..], &flags].concat());
    fs::read(folder.join("threads.safetensors")).unwrap()
}

/// As [`start_rank`], with a token in the environment.
fn start_with_token(folder: &Path, number: &str, address: &str, token: &str, extra: &[&str]) -> Child {
    let flags = ["train", "m.onnx", "--synthetic-data", "--batch", "8", "--stages", "1,1", "--rank", number];
    let mut command = command(folder, &[&flags[..], &["--address", address, "--steps", "5"], extra].concat());
    command.env("PIPEC_RUN_TOKEN", token).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn strangers_are_refused_by_name_and_harm_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let expected = thread_result(root);
    fs::write(root.join("run.token"), format!("{TOKEN}\n")).unwrap();
    let address = format!("127.0.0.1:{}", port());
    let extra = ["--steps", "5", "--save", "w.safetensors", "--token-file", "run.token"];
    let first = start_rank(root, "0", &address, &extra);
    // Strangers who send bytes, a long frame, or the challenge of another version.
    assert_eq!(send_and_read(&address, b"GET / HTTP/1.1\r\n\r\n"), b"");
    assert_eq!(send_and_read(&address, &huge_frame_head()), b"");
    let token = RunToken::of(TOKEN).unwrap();
    let mut challenge = Challenge::new(1, 2, false).unwrap();
    let refusal = |challenge: &Challenge, token: &RunToken| {
        connect(&mut connection(connect_stream(&address), None), token, challenge, 0).unwrap_err()
    };
    challenge.protocol = 99;
    assert!(refusal(&challenge, &token).contains(", the other process 99"));
    let challenge = Challenge::new(1, 3, false).unwrap();
    assert!(refusal(&challenge, &token).contains("rank 1 expects 3 processes, rank 0 expects 2"));
    // A stranger who repeats what a process of the run has sent.
    let challenge = Challenge::new(1, 2, false).unwrap();
    assert!(refusal(&challenge, &RunToken::default()).contains(MISMATCH));
    let record = Arc::new(Mutex::new(Vec::new()));
    let recorded = connect(&mut connection(connect_stream(&address), Some(record.clone())), &token, &challenge, 0);
    recorded.unwrap();
    let bytes = record.lock().unwrap().clone();
    assert!(text(&send_and_read(&address, &bytes)).contains(MISMATCH));
    // Processes of other runs: another token, no token, another plan, other settings.
    let wait = ["--connect-timeout", "2"];
    let processes = [
        start_with_token(root, "1", &address, "another token of the tests", &wait),
        start_with_token(root, "1", &address, "", &wait),
        start_with_token(root, "1", &address, TOKEN, &["--lr", "0.5"]),
        start_with_token(root, "1", &address, TOKEN, &["--schedule", "gpipe", "--microbatches", "4"]),
    ];
    for (child, why) in processes.into_iter().zip([
        MISMATCH,
        MISMATCH,
        "optimizer: rank 1 has `sgd, lr 0.5, ",
        "schedule: rank 1 has `gpipe`, rank 0 `1f1b-rr`",
    ]) {
        let (code, printed) = wait_for_exit(child);
        assert_eq!(code, Some(1), "{printed}");
        assert!(printed.contains(why), "{why}: {printed}");
    }
    // Many who say nothing.
    let silent: Vec<TcpStream> = (0..200).map(|_| connect_stream(&address)).collect();
    let start = Instant::now();
    let second = wait_for_exit(start_with_token(root, "1", &address, TOKEN, &["-q"]));
    assert_eq!(second, (Some(0), String::new()));
    let (code, printed) = wait_for_exit(first);
    assert_eq!(code, Some(0), "{printed}");
    assert!(start.elapsed() < PATIENCE);
    drop(silent);
    assert!(fs::read(root.join("w.safetensors")).unwrap() == expected);
    let reasons = [
        "rejected a connection from 127.0.0.1:",
        "the bytes are not a pipec frame",
        "a frame of 1099511627776 bytes exceeds the limit of this run, 1024 bytes",
        "rank 0 uses protocol version ",
        "rank 1 expects 3 processes, rank 0 expects 2",
        MISMATCH,
        "rejected process ",
        ": optimizer: rank 1 has `sgd, lr 0.5, ",
        "too many others connected",
    ];
    for reason in reasons {
        assert!(printed.contains(reason), "{reason}: {printed}");
    }
}

#[test]
fn a_run_that_only_strangers_join_names_the_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let address = format!("127.0.0.1:{}", port());
    let first = start_rank(root, "0", &address, &["--steps", "5", "--connect-timeout", "4", "-q"]);
    let second = start_rank(root, "1", &address, &["--steps", "5", "--lr", "0.5", "-q"]);
    let (code, printed) = wait_for_exit(second);
    assert_eq!(code, Some(1), "{printed}");
    assert!(printed.contains("rejected this process: optimizer: rank 1 has `sgd, lr 0.5, "), "{printed}");
    let (code, printed) = wait_for_exit(first);
    assert_eq!(code, Some(1), "{printed}");
    let named =
        format!("rank 1 (worker 1.0 of stage 1) did not connect to {address} within 4 s; rejected last: process ");
    assert!(printed.contains(&named) && printed.contains(": optimizer: rank 1 has `sgd, lr 0.5, "), "{printed}");
}

/// Answers every connection with its own frames, as process 0, `times` times.
fn reflect(address: &str, times: usize) {
    let listener = TcpListener::bind(address).unwrap();
    for _ in 0..times {
        let mut connection = connection(listener.accept().unwrap().0, None);
        let mut challenge = connection.expect(Kind::Challenge).unwrap().unwrap();
        challenge[4..8].fill(0);
        connection.send_frame(Kind::Challenge, &challenge).unwrap();
        let proof = connection.expect(Kind::Proof).unwrap().unwrap();
        connection.send_frame(Kind::Proof, &proof).unwrap();
        assert!(connection.expect(Kind::Hello).is_err(), "it believes a stranger");
    }
}

#[test]
fn a_stranger_cannot_be_process_0() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let expected = thread_result(root);
    let address = format!("127.0.0.1:{}", port());
    let second = start_with_token(root, "1", &address, TOKEN, &[]);
    reflect(&address, 2);
    // The right process 0 comes later.
    let first = start_with_token(root, "0", &address, TOKEN, &["--save", "w.safetensors", "-q"]);
    let (code, printed) = wait_for_exit(second);
    assert_eq!(code, Some(0), "{printed}");
    let named = format!("rejected what listens at {address}: {MISMATCH}");
    assert_eq!(printed.matches(&named).count(), 1, "{printed}");
    assert_eq!(wait_for_exit(first).0, Some(0));
    assert!(fs::read(root.join("w.safetensors")).unwrap() == expected);
    // It does not come.
    let second = start_with_token(root, "1", &address, TOKEN, &["--connect-timeout", "2", "-q"]);
    reflect(&address, 1);
    let (code, printed) = wait_for_exit(second);
    assert_eq!(code, Some(1), "{printed}");
    let error = format!("no process of this run answered at {address} within 2 s: {MISMATCH}");
    assert!(printed.contains(&error), "{printed}");
}

#[test]
fn other_machines_need_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    make_small_model(root);
    let address = format!("0.0.0.0:{}", port());
    let (code, printed) = wait_for_exit(start_rank(root, "0", &address, &["--steps", "5"]));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains(&format!("other machines can reach {address}, but the run has no token")), "{printed}");
    assert!(printed.contains("--token-file run.token"), "{printed}");
    let (code, printed) = wait_for_exit(start_rank(root, "1", "192.0.2.1:4100", &["--steps", "5"]));
    assert_eq!(code, Some(2), "{printed}");
    let (code, printed) = wait_for_exit(start_with_token(root, "0", &address, "short", &[]));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("the run token is too short") && printed.contains("PIPEC_RUN_TOKEN"), "{printed}");
    // With one, they may listen everywhere.
    let first = start_with_token(root, "0", &address, TOKEN, &["-q"]);
    let second = start_with_token(root, "1", &address.replace("0.0.0.0", "127.0.0.1"), TOKEN, &["-q"]);
    assert_eq!((wait_for_exit(first).0, wait_for_exit(second)), (Some(0), (Some(0), String::new())));
}
