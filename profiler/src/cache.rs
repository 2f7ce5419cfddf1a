//! An on-disk cache of measured times.
//!
//! There is one file per key, named by the key's SHA-256 and containing the key. Files are written under a temporary
//! name and renamed, so readers never see partial files. Unreadable or malformed files count as absent.

use compiler::graph::hash::sha256;
use serde_json::{Value as Json, json};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const SCHEMA: &str = "pipec.kernel-time/1";

/// Larger files are not cache entries.
const LARGEST: u64 = 1 << 20;

/// A measured time in whole picoseconds, so that it is read back exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    pub median_ps: u64,
    /// Interquartile range of the samples.
    pub spread_ps: u64,
}

#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    is_read: bool,
}

impl Cache {
    /// A cache in `folder`, which is created on the first write.
    pub fn new(folder: &Path) -> Cache {
        Cache { folder: folder.to_path_buf(), is_read: true }
    }

    /// The user's cache: `$XDG_CACHE_HOME/pipec/profile`, else `~/.cache/pipec/profile`; `None` without a home
    /// directory.
    pub fn of_user() -> Option<Cache> {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        // The XDG base directory specification: a relative path is invalid and is ignored.
        let base = variable("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let base = base.or_else(|| variable("HOME").map(|home| home.join(".cache")))?;
        Some(Cache::new(&base.join("pipec").join("profile")))
    }

    /// The same cache, whose times are replaced but not read.
    pub fn unread(self) -> Cache {
        Cache { is_read: false, ..self }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn get(&self, key: &str) -> Option<Vec<Time>> {
        let path = self.path(key);
        let size = std::fs::metadata(&path).ok()?.len();
        if size > LARGEST || !self.is_read {
            return None;
        }
        let entry: Json = serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?;
        if entry["schema"] != SCHEMA || entry["key"] != key {
            return None;
        }
        let time = |t: &Json| Some(Time { median_ps: t["median_ps"].as_u64()?, spread_ps: t["spread_ps"].as_u64()? });
        entry["times"].as_array()?.iter().map(time).collect()
    }

    pub fn put(&self, key: &str, times: &[Time]) -> io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.folder)?;
        let times: Vec<Json> =
            times.iter().map(|t| json!({ "median_ps": t.median_ps, "spread_ps": t.spread_ps })).collect();
        let entry = json!({ "schema": SCHEMA, "key": key, "times": times });
        let path = self.path(key);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}.part", std::process::id()));
        std::fs::write(&temporary, format!("{entry}\n"))?;
        std::fs::rename(&temporary, &path).inspect_err(|_| {
            let _ = std::fs::remove_file(&temporary);
        })
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{}.json", sha256(key.as_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found_and_what_is_broken_is_not() {
        let folder = std::env::temp_dir().join(format!("pipec-cache-{}", std::process::id()));
        let cache = Cache::new(&folder);
        let times = [Time { median_ps: 1_234_567, spread_ps: 89 }, Time { median_ps: u64::MAX, spread_ps: 0 }];
        assert_eq!(cache.get("a"), None);
        cache.put("a", &times).unwrap();
        assert_eq!(cache.get("a").unwrap(), times);
        assert_eq!(cache.get("b"), None);
        let path = cache.path("a");
        std::fs::copy(&path, cache.path("b")).unwrap();
        assert_eq!(cache.get("b"), None, "an entry under another key's name");
        let text = std::fs::read_to_string(&path).unwrap();
        for broken in ["", "{", "[]", &text.replace("1234567", "-3"), &text.replace("1234567", "1e999"), "{\"key\":1}"]
        {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(cache.get("a"), None, "{broken}");
        }
        cache.put("a", &times).unwrap();
        assert_eq!(cache.get("a").unwrap(), times);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
