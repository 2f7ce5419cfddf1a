//! The file operations of a checkpoint, as a trait so that tests can interrupt after any of them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// File operations for writing and removing checkpoints.
pub trait Files {
    /// Creates a folder that must not exist.
    fn make_folder(&self, path: &Path) -> io::Result<()>;
    /// Writes a new file and syncs it to disk.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Syncs a folder's entries to disk.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder recursively; links are removed, not followed. A missing folder is no error.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Files for Disk {
    fn make_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        // Other systems cannot open a folder as a file, and write its entries together with the files.
        if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        match fs::remove_dir_all(path) {
            Err(fault) if fault.kind() == ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}
