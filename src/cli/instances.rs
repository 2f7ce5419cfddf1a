//! The command-line side of the published instances: `pipec partition FILE --from dnn-partitioning|piper`.

pub mod piper;
pub mod placement;
