//! Output for people and other tools: traces, reports, plots and framework formats.
//!
//! [`trace`] writes Perfetto traces, [`report`] an HTML page about one plan, [`sweep`] plots of many plans. [`target`]
//! writes plans in the formats of other tools. All output is deterministic. Names come from untrusted files, so
//! pictures contain them only after [`escape`].

pub mod axis;
pub mod colour;
pub mod escape;
pub mod failure;
pub mod gradients;
pub mod metrics;
pub mod plot;
pub mod report;
pub mod stage_name;
pub mod svg;
pub mod sweep;
pub mod target;
pub mod trace;
