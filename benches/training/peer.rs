//! PyTorch in a separate process, which stays alive over all rounds and answers each request line with a line.

use crate::figures::Round;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub struct Peer {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pub version: String,
}

impl Peer {
    /// Starts `$PIPEC_PYTHON`, by default `python3`. Fails if it does not start or has no PyTorch.
    pub fn start() -> Result<Peer, String> {
        let python = std::env::var("PIPEC_PYTHON").unwrap_or_else(|_| "python3".to_string());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/training/peer.py");
        let spawned = Command::new(&python).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| format!("`{python}` does not start: {error}"))?;
        let requests = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("the output is a pipe"));
        let mut peer = Peer { child, requests, answers, version: String::new() };
        let greeting = peer.read_answer().map_err(|error| format!("`{python}`: {error}"))?;
        peer.version = greeting["torch"].as_str().unwrap_or("of an unknown version").to_string();
        Ok(peer)
    }

    /// Parameter count of its model.
    pub fn parameters(&mut self, model: &str) -> Result<u64, String> {
        let answer = self.exchange(&format!("count {model}"))?;
        answer["parameters"].as_u64().ok_or_else(|| format!("`{answer}` has no count"))
    }

    /// Trains `steps` minibatches of `batch` samples.
    pub fn run(&mut self, model: &str, mode: &str, steps: u32, batch: usize) -> Result<Round, String> {
        let answer = self.exchange(&format!("run {model} {mode} {steps}"))?;
        let number = |key: &str| answer[key].as_f64().filter(|it| it.is_finite());
        match (number("seconds"), number("cpu_seconds"), number("loss")) {
            (Some(seconds), Some(cpu_seconds), Some(_)) => Ok(Round::of(seconds, cpu_seconds, steps, batch)),
            _ => Err(format!("`{answer}` is not a training result")),
        }
    }

    fn exchange(&mut self, request: &str) -> Result<Value, String> {
        let requests = self.requests.as_mut().ok_or("the peer has no input")?;
        writeln!(requests, "{request}").and_then(|()| requests.flush()).map_err(|error| error.to_string())?;
        self.read_answer()
    }

    fn read_answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| error.to_string())?;
        if line.is_empty() {
            return Err("the peer has ended".to_string());
        }
        let value: Value = serde_json::from_str(&line).map_err(|error| format!("`{}`: {error}", line.trim()))?;
        match value["error"].as_str() {
            Some(error) => Err(error.to_string()),
            None => Ok(value),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Closing its input makes it and its subprocesses exit.
        self.requests = None;
        let _ = self.child.wait();
    }
}
