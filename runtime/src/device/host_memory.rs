//! Host memory, as the system reports it.

/// Bytes of memory. `None` if the system does not report it.
pub fn total() -> Option<u64> {
    reported("MemTotal:")
}

/// Bytes that can be used without swapping. `None` if the system does not report it.
pub fn available() -> Option<u64> {
    reported("MemAvailable:")
}

fn reported(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}
