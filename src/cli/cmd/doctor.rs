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

struct Finding {
    subject: &'static str,
    state: State,
    detail: String,
    advice: Option<String>,
}

/// Runs the checks and prints them; fails with exit code 1 if something is broken.
pub fn run(_: &Arguments, screen: &Screen) -> Result<(), Error> {
    let mut findings = vec![cpu(), memory(), cache(), folder("temporary files", &env::temp_dir()), sockets()];
    let cuda = Cuda::examine();
    findings.extend(cuda.findings());
    let row = |finding: &Finding| vec![finding.subject.into(), finding.state.name().into(), finding.detail.clone()];
    let version = env!("CARGO_PKG_VERSION");
    screen.text(&format!("pipec {version} on {} {}\n", env::consts::OS, env::consts::ARCH));
    screen.prose(&stage_table::table(&["", "", ""], &[], findings.iter().map(row).collect()));
    if cuda.has_devices() {
        screen.wide(&cuda.tables());
    }
    let value = |finding: &Finding| json!({"what": finding.subject, "state": finding.state.name(), "found": finding.detail, "next": finding.advice});
    let values: Vec<_> = findings.iter().map(value).collect();
    screen.json(&json!({
        "version": version,
        "os": env::consts::OS,
        "architecture": env::consts::ARCH,
        "findings": values,
        "libraries": cuda.libraries_json(),
        "devices": cuda.devices_json(),
        "peers": cuda.peers_json(),
    }));
    for Finding { subject, advice, .. } in &findings {
        if let Some(advice) = advice {
            screen.note(&format!("{subject}: {advice}"));
        }
    }
    let broken: Vec<&str> = findings.iter().filter(|f| f.state == State::Broken).map(|f| f.subject).collect();
    match broken.is_empty() {
        true => Ok(()),
        false => Err(Error::negative(format!("checks failed: {}", broken.join(", ")))),
    }
}

fn cpu() -> Finding {
    let device = machine::this_cpu();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let vectors = device.driver.rsplit(' ').next().unwrap_or_default().to_string();
    let detail = format!("{}, {}, {vectors}", device.name, quantity::plural(cores as u64, "core", "cores"));
    let advice = (vectors == "sse2")
        .then(|| "without AVX2, kernels use vectors of two to four numbers and are slow".to_string());
    Finding { subject: "CPU", state: State::Fine, detail, advice }
}

fn memory() -> Finding {
    let (total, available) = (machine::memory_bytes(), machine::available_bytes());
    if total == 0 {
        let advice = "no memory limit is known: pass `--memory` if memory is scarce".to_string();
        return Finding {
            subject: "memory",
            state: State::Absent,
            detail: "not reported by the system".into(),
            advice: Some(advice),
        };
    }
    let detail = format!("{} of {} available", quantity::bytes(available), quantity::bytes(total));
    Finding { subject: "memory", state: State::Fine, detail, advice: None }
}

fn cache() -> Finding {
    match Cache::of_user() {
        Some(cache) => folder("profile cache", cache.folder()),
        None => Finding {
            subject: "profile cache",
            state: State::Absent,
            detail: "no home folder".into(),
            advice: Some("set HOME or XDG_CACHE_HOME; otherwise kernels are measured again every time".into()),
        },
    }
}

/// Checks that files can be written to a folder.
fn folder(subject: &'static str, folder: &Path) -> Finding {
    let probe = folder.join(format!("probe-{}", process::id()));
    // Other processes may write there too, so an existing file is never overwritten.
    let write = || OpenOptions::new().write(true).create_new(true).open(&probe)?.write_all(b"pipec");
    let result = fs::create_dir_all(folder).and_then(|()| write());
    let _ = if result.is_ok() { fs::remove_file(&probe) } else { Ok(()) };
    let (state, advice) = match result {
        Ok(()) => (State::Fine, None),
        Err(error) => (State::Broken, Some(format!("cannot write files to {}: {error}", folder.display()))),
    };
    Finding { subject, state, detail: folder.display().to_string(), advice }
}

/// Checks that processes of this machine can connect to each other.
fn sockets() -> Finding {
    let subject = "sockets";
    match TcpListener::bind("127.0.0.1:0") {
        Ok(_) => {
            Finding { subject, state: State::Fine, detail: "processes can connect on 127.0.0.1".into(), advice: None }
        }
        Err(error) => Finding {
            subject,
            state: State::Broken,
            detail: format!("cannot listen on 127.0.0.1: {error}"),
            advice: Some("needed by `train --processes` and `--hosts`, not by threads".into()),
        },
    }
}
