//! A lock on a checkpoint folder: one run at a time writes there.
//!
//! The operating system locks the folder itself, so the lock ends with the process and leaves no file behind. On a file
//! system without locks, every run may write.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum LockError {
    #[error("{} is writing checkpoints into {folder}", holder.map_or("another process".to_string(), |pid| format!("process {pid}")))]
    Taken { folder: PathBuf, holder: Option<u32> },
    #[error("cannot open {folder}: {fault}")]
    Open { folder: PathBuf, fault: io::Error },
}

/// A locked folder. Dropping it, or the end of the process, releases the lock.
#[derive(Debug)]
pub struct Held {
    _file: Option<File>,
}

/// Locks an existing folder.
pub fn hold(folder: &Path) -> Result<Held, LockError> {
    if cfg!(not(unix)) {
        return Ok(Held { _file: None });
    }
    let file = File::open(folder).map_err(|fault| LockError::Open { folder: folder.to_path_buf(), fault })?;
    match file.try_lock() {
        Ok(()) => Ok(Held { _file: Some(file) }),
        Err(TryLockError::WouldBlock) => Err(LockError::Taken { folder: folder.to_path_buf(), holder: holder(&file) }),
        Err(TryLockError::Error(_)) => Ok(Held { _file: None }),
    }
}

/// The process that holds the lock of this file, if the system reports it.
#[cfg(target_os = "linux")]
fn holder(file: &File) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    let inode = file.metadata().ok()?.ino();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    holder_of(inode, &locks)
}

/// Other systems do not report it.
#[cfg(not(target_os = "linux"))]
fn holder(_: &File) -> Option<u32> {
    None
}

/// The process holding a `flock` on this inode number. `None` if several match: numbers are unique only per file
/// system.
#[cfg(any(target_os = "linux", test))]
fn holder_of(inode: u64, locks: &str) -> Option<u32> {
    let holder_in_line = |line: &str| {
        // 1: FLOCK  ADVISORY  WRITE 708 00:13:17921 0 EOF
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file_id, ..] = words[..] else { return None };
        let is_match = file_id.rsplit(':').next()?.parse() == Ok(inode);
        // A process in another PID namespace is reported as 0.
        is_match.then(|| pid.parse().ok().filter(|pid| *pid > 0))
    };
    let mut holders = locks.lines().filter_map(holder_in_line);
    match (holders.next(), holders.next()) {
        (Some(pid), None) => pid,
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_folder_is_held_once_and_free_again() {
        let folder = std::env::temp_dir().join(format!("pipec-lock-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let held = hold(&folder).unwrap();
        match hold(&folder) {
            Err(LockError::Taken { holder, .. }) => {
                assert!(holder.is_none_or(|holder| holder == std::process::id()), "{holder:?}");
            }
            // A file system without locks.
            other => assert!(held._file.is_none(), "{other:?}"),
        }
        drop(held);
        assert!(hold(&folder).is_ok());
        fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(hold(&folder), Err(LockError::Open { .. })));
    }

    #[test]
    fn the_holder_is_who_the_system_says() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 00:13:42 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 708 08:01:42 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 709 08:01:42 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 11 08:01:43 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 12 08:02:43 0 EOF\n\
                     5: FLOCK  ADVISORY  WRITE 0 08:01:44 0 EOF\n";
        assert_eq!([42, 43, 44, 45].map(|inode| holder_of(inode, locks)), [Some(708), None, None, None]);
    }
}
