//! What leaves the house for people's eyes: traces, and pictures of plans and of what was measured.
//!
//! [`trace`] is a run as Perfetto opens it, [`report`] one page about one plan, [`sweep`] the plots of many plans, [`target`] a plan in the words
//! of other tools. All of them are text or
//! bytes made from plain data: the same data gives the same bytes. Names come from files that nobody vouches for, so they pass
//! through [`escape`] wherever they are put into a picture.

pub mod axis;
pub mod colour;
pub mod escape;
pub mod failure;
pub mod gradients;
pub mod metrics;
pub mod plot;
pub mod quantity;
pub mod report;
pub mod stage_name;
pub mod svg;
pub mod sweep;
pub mod target;
pub mod trace;
