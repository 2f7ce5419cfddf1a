//! The processes of a run, from the system's process table.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The children of a process, by rank.
pub fn children(parent: u32) -> Vec<u32> {
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(variables) = fs::read(entry.path().join("environ")) else { continue };
        let variable = variables.split(|byte| *byte == 0).find_map(|entry_text| {
            String::from_utf8_lossy(entry_text).strip_prefix("PIPEC_PROCESS=").map(str::to_string)
        });
        let Some(variable) = variable else { continue };
        let mut fields = variable.split(' ').map(str::to_string);
        if fields.next() == Some(parent.to_string()) {
            children.push((fields.next().unwrap().parse::<usize>().unwrap(), pid));
        }
    }
    children.sort_unstable();
    children.into_iter().map(|(_, pid)| pid).collect()
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
    let deadline = Instant::now() + Duration::from_secs(6);
    while pids.iter().any(|pid| is_there(*pid)) {
        assert!(Instant::now() < deadline, "left behind: {pids:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
