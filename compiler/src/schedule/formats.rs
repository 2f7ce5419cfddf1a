//! Program formats: text, JSON, torch's compute tables, and charts.

pub mod chart;
pub mod csv;
pub mod json;
pub mod text;
