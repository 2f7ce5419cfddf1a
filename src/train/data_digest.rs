//! A digest of the training data.

use runtime::data::Batches;
use sha2::{Digest, Sha256};

/// A digest of all rows that a run is trained on, features and labels.
pub fn data(batches: &Batches) -> [u8; 32] {
    let mut sha = Sha256::new();
    batches.bytes().for_each(|(name, bytes)| add_bytes(&mut sha, name, bytes));
    sha.finalize().into()
}

/// Adds named bytes to a digest.
pub fn add_bytes(sha: &mut Sha256, name: &str, bytes: &[u8]) {
    sha.update((name.len() as u64).to_le_bytes());
    sha.update(name.as_bytes());
    sha.update((bytes.len() as u64).to_le_bytes());
    sha.update(bytes);
}
