//! Host memory that this process may use: what the system has, within the limits of its control group and of `ulimit -v`.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// The folder of control groups, version 2.
const GROUPS: &str = "/sys/fs/cgroup";

/// Bytes of memory. `None` if the system does not report it.
pub fn total() -> Option<u64> {
    let bytes = meminfo("MemTotal:")?;
    Some(groups().iter().filter_map(|group| limit(group)).fold(bytes, u64::min))
}

/// Bytes that this process can use without swapping. `None` if the system does not report it.
pub fn available() -> Option<u64> {
    available_to_all().map(|all| all.min(address_space().unwrap_or(u64::MAX)))
}

/// Bytes that this process and others of its control group can use together without swapping.
pub fn available_to_all() -> Option<u64> {
    let bytes = meminfo("MemAvailable:")?;
    Some(groups().iter().filter_map(|group| available_in_group(group)).fold(bytes, u64::min))
}

fn meminfo(key: &str) -> Option<u64> {
    kibibytes(&read_to_string("/proc/meminfo").ok()?, key)
}

/// The bytes of a line such as `MemTotal:  16 kB`.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    number(line.split_whitespace().next()?)?.checked_mul(1024)
}

/// A number; `None` for `max` and `unlimited`.
fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// The control group of this process and those that contain it.
fn groups() -> Vec<PathBuf> {
    let text = read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let group = group.map(|group| Path::new(GROUPS).join(group));
    group
        .iter()
        .flat_map(|group| group.ancestors())
        .take_while(|at| at.starts_with(GROUPS))
        .map(PathBuf::from)
        .collect()
}

fn limit(group: &Path) -> Option<u64> {
    number(&read_to_string(group.join("memory.max")).ok()?)
}

/// Bytes that a control group can still take. The system reclaims cached files first.
fn available_in_group(group: &Path) -> Option<u64> {
    let used = number(&read_to_string(group.join("memory.current")).ok()?)?;
    let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let field = |key: &str| stat.lines().find_map(|line| number(line.strip_prefix(key)?)).unwrap_or(0);
    let cached: u64 = ["inactive_file ", "active_file ", "slab_reclaimable "].into_iter().map(field).sum();
    Some(limit(group)?.saturating_sub(used.saturating_sub(cached)))
}

/// Bytes of address space that the process can still take; `None` without a limit.
fn address_space() -> Option<u64> {
    let limits = read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit = number(limit.split_whitespace().next()?)?;
    let used = kibibytes(&read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_group_limits_memory() {
        let group = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(group.path().join(name), text).unwrap();
        assert_eq!(available_in_group(group.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "600\n");
        assert_eq!((limit(group.path()), available_in_group(group.path())), (None, None));
        write("memory.max", "1000\n");
        assert_eq!((limit(group.path()), available_in_group(group.path())), (Some(1000), Some(400)));
        write("memory.stat", "anon 400\ninactive_file 150\nactive_file 50\n");
        assert_eq!(available_in_group(group.path()), Some(600));
        write("memory.current", "2000\n");
        assert_eq!(available_in_group(group.path()), Some(0));
    }

    #[test]
    fn numbers_are_read_as_the_system_writes_them() {
        assert_eq!(kibibytes("MemTotal:       24 kB\nMemFree: 3 kB\n", "MemFree:"), Some(3072));
        assert_eq!(kibibytes("MemTotal:       24 kB\n", "MemAvailable:"), None);
        assert_eq!((number("unlimited"), number(" 7\n")), (None, Some(7)));
    }
}
