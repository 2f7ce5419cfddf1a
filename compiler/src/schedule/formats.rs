//! Formats of programs: text, JSON, tables as torch writes them, and charts.

pub mod chart;
pub mod csv;
pub mod json;
pub mod text;
