//! What leaves the house for people's eyes: traces, and pictures of plans and of what was measured.

pub mod axis;
pub mod colour;
pub mod escape;
pub mod plot;
pub mod quantity;
pub mod stage_name;
pub mod svg;
pub mod trace;
