//! The stage plan.
