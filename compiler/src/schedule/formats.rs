//! Program formats: text, prose, JSON, torch's compute tables, and charts.

pub mod chart;
pub mod csv;
pub mod json;
pub mod prose;
pub mod text;
