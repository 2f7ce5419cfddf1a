//! The graph of core ops.
