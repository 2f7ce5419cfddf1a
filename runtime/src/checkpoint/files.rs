//! The file operations of a checkpoint, one by one, so that tests can interrupt after any of them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The operations by which checkpoints come and go.
pub trait Files {
    /// Makes a folder that is not there yet.
    fn make_folder(&self, path: &Path) -> io::Result<()>;
    /// Writes a new file, and returns when the disk has it.
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Returns when the disk has the names in a folder.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Gives another name to a folder.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder and what is in it; links in it are removed, not followed. One that is gone is fine.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The disk itself.
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
        // Elsewhere a folder is no file that could be opened, and its names are written with what they name.
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
