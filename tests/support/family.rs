//! The processes of a run, from the system's process table.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The children of a process, by rank.
pub fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(variables) = fs::read(entry.path().join("environ")) else { continue };
        let own = variables
            .split(|byte| *byte == 0)
            .find_map(|one| String::from_utf8_lossy(one).strip_prefix("PIPEC_PROCESS=").map(str::to_string));
        let Some(own) = own else { continue };
        let mut words = own.split(' ').map(str::to_string);
        if words.next() == Some(parent.to_string()) {
            found.push((words.next().unwrap().parse::<usize>().unwrap(), pid));
        }
    }
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

pub fn send(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap().success());
}

/// True if the process exists and is not a zombie.
pub fn is_there(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub fn all_gone(pids: &[u32]) {
    let until = Instant::now() + Duration::from_secs(6);
    while pids.iter().any(|pid| is_there(*pid)) {
        assert!(Instant::now() < until, "left behind: {pids:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
