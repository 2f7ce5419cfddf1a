//! Shard versions say which weights a replica has stepped and not gathered yet (ZeRO).

/// A version that this replica has stepped but not yet gathered completely.
pub struct Stepped {
    /// Parameters that the step changed.
    pub parameters: Vec<usize>,
    /// Buckets not gathered yet.
    pub buckets: u32,
}
