//! The dictionary of core ops.
