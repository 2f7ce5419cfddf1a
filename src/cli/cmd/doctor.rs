//! `pipec doctor`: checks what pipec can use on this machine, and suggests fixes.

mod cuda;

use self::cuda::Cuda;
use crate::cli::screen::Screen;
use crate::cli::stage_table;
use clap::Args;
use compiler::text::quantity;
use pipec::error::Error;
use profiler::cache::Cache;
use profiler::machine;
use serde_json::json;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::{env, fs, process};

/// Arguments of `pipec doctor`: none.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  pipec doctor")]
pub struct Arguments {}

/// Result of a check.
#[derive(Clone, Copy, PartialEq)]
enum State {
    /// It works.
    Fine,
    /// It is missing, and only some features need it.
    Absent,
    /// It should work but does not.
    Broken,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Fine => "ok",
            State::Absent => "absent",
            State::Broken => "broken",
        }
    }
}

/// One check.
struct Finding {
    what: &'static str,
    state: State,
    found: String,
    next: Option<String>,
}

/// Runs the checks and prints them; fails with exit code 1 if something is broken.
pub fn run(_: &Arguments, screen: &Screen) -> Result<(), Error> {
    let mut findings = vec![cpu(), memory(), cache(), folder("temporary files", &env::temp_dir()), sockets()];
    let cuda = Cuda::examine();
    findings.extend(cuda.findings());
    let row = |finding: &Finding| vec![finding.what.into(), finding.state.name().into(), finding.found.clone()];
    let version = env!("CARGO_PKG_VERSION");
    screen.text(&format!("pipec {version} on {} {}\n", env::consts::OS, env::consts::ARCH));
    screen.prose(&stage_table::table(&["", "", ""], &[], findings.iter().map(row).collect()));
    if cuda.has_devices() {
        screen.wide(&cuda.tables());
    }
    let value = |finding: &Finding| json!({"what": finding.what, "state": finding.state.name(), "found": finding.found, "next": finding.next});
    let all: Vec<_> = findings.iter().map(value).collect();
    screen.json(&json!({
        "version": version,
        "os": env::consts::OS,
        "architecture": env::consts::ARCH,
        "findings": all,
        "libraries": cuda.libraries_json(),
        "devices": cuda.devices_json(),
        "peers": cuda.peers_json(),
    }));
    for Finding { what, next, .. } in &findings {
        if let Some(next) = next {
            screen.note(&format!("{what}: {next}"));
        }
    }
    let broken: Vec<&str> = findings.iter().filter(|f| f.state == State::Broken).map(|f| f.what).collect();
    match broken.is_empty() {
        true => Ok(()),
        false => Err(Error::negative(format!("checks failed: {}", broken.join(", ")))),
    }
}

fn cpu() -> Finding {
    let device = machine::this_cpu();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let vectors = device.driver.rsplit(' ').next().unwrap_or_default().to_string();
    let found = format!("{}, {}, {vectors}", device.name, quantity::plural(cores as u64, "core", "cores"));
    let next = (vectors == "sse2")
        .then(|| "without AVX2, kernels use vectors of two to four numbers and are slow".to_string());
    Finding { what: "CPU", state: State::Fine, found, next }
}

fn memory() -> Finding {
    let (all, available) = (machine::memory_bytes(), machine::available_bytes());
    if all == 0 {
        let next = "no memory limit is known: pass `--memory` if memory is scarce".to_string();
        return Finding {
            what: "memory",
            state: State::Absent,
            found: "not reported by the system".into(),
            next: Some(next),
        };
    }
    let found = format!("{} of {} available", quantity::bytes(available), quantity::bytes(all));
    Finding { what: "memory", state: State::Fine, found, next: None }
}

fn cache() -> Finding {
    match Cache::of_user() {
        Some(cache) => folder("profile cache", cache.folder()),
        None => Finding {
            what: "profile cache",
            state: State::Absent,
            found: "no home folder".into(),
            next: Some("set HOME or XDG_CACHE_HOME; otherwise kernels are measured again every time".into()),
        },
    }
}

/// Checks that files can be written to a folder.
fn folder(what: &'static str, folder: &Path) -> Finding {
    let probe = folder.join(format!("probe-{}", process::id()));
    // Other processes may write there too, so an existing file is never overwritten.
    let write = || OpenOptions::new().write(true).create_new(true).open(&probe)?.write_all(b"pipec");
    let written = fs::create_dir_all(folder).and_then(|()| write());
    let _ = if written.is_ok() { fs::remove_file(&probe) } else { Ok(()) };
    let (state, next) = match written {
        Ok(()) => (State::Fine, None),
        Err(error) => (State::Broken, Some(format!("cannot write files to {}: {error}", folder.display()))),
    };
    Finding { what, state, found: folder.display().to_string(), next }
}

/// Checks that processes of this machine can connect to each other.
fn sockets() -> Finding {
    let what = "sockets";
    match TcpListener::bind("127.0.0.1:0") {
        Ok(_) => Finding { what, state: State::Fine, found: "processes can connect on 127.0.0.1".into(), next: None },
        Err(error) => Finding {
            what,
            state: State::Broken,
            found: format!("cannot listen on 127.0.0.1: {error}"),
            next: Some("needed by `train --processes` and `--hosts`, not by threads".into()),
        },
    }
}
