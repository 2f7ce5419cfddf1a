//! The command line: parses arguments, calls the library, renders results.

pub mod args;
pub mod candidates;
pub mod cmd;
pub mod color;
pub mod instances;
pub mod path_conflicts;
pub mod plan_differences;
pub mod prediction;
pub mod render_error;
#[cfg(test)]
pub mod sample_plan;
pub mod screen;
pub mod shell;
pub mod stage_rows;
pub mod stage_table;
pub mod table;
pub mod train_report;
pub mod usage;
pub mod what_if;
pub mod worker_table;
