//! The compiler: a model becomes a `Graph`, a `Graph` with costs becomes a `Plan`, a `Plan` becomes `Program`s.
//!
//! ```text
//! bytes --import--> Graph --profile--> Profile --partition--> Plan --schedule--> Programs --simulate--> Timeline
//! ```
//!
//! Nothing here starts a thread, reads a clock, knows a device or prints. Floors, from the ground up: `tensor`, `wording`;
//! `cluster`; `op`; `graph`; `profile`, `pass`; `import`, `tensor_parallel`; `plan`; `schedule`; `simulate`; `partition`
//! and `export`. A room imports only what stands below it.

pub mod cluster;
pub mod export;
pub mod graph;
pub mod import;
pub mod op;
pub mod partition;
pub mod pass;
pub mod plan;
pub mod profile;
pub mod schedule;
pub mod simulate;
pub mod tensor;
pub mod tensor_parallel;
pub mod wording;
