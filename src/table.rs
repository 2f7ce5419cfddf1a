//! A schedule as the command line has it: the name of one, or a file with a table of the user's own.

use crate::failure::Failure;
use crate::source;
use compiler::plan::ScheduleKind;
use compiler::schedule::check::check;
use compiler::schedule::csv::Table;
use compiler::schedule::{Pipeline, Program};
use std::path::Path;

/// The most bytes of a table.
const MOST_BYTES: u64 = 256 << 20;

/// Reads `--schedule`: a name, or a path that ends in .csv.
pub fn said(text: &str) -> Result<String, String> {
    let known = ScheduleKind::ALL.into_iter().filter(|kind| *kind != ScheduleKind::Csv);
    if is_file(text) || known.clone().any(|kind| kind.name() == text) {
        return Ok(text.to_string());
    }
    let names: Vec<&str> = known.map(ScheduleKind::name).collect();
    Err(format!("write one of {}, or a table, FILE.csv", names.join(", ")))
}

/// The kind that was said.
pub fn kind(said: &str) -> Option<ScheduleKind> {
    if is_file(said) { Some(ScheduleKind::Csv) } else { ScheduleKind::from_name(said) }
}

/// The table that was said, if it is one.
pub fn read(said: Option<&str>) -> Result<Option<Table>, Failure> {
    let Some(path) = said.filter(|said| is_file(said)).map(Path::new) else { return Ok(None) };
    let text = source::text(path, MOST_BYTES)?;
    let table: Table = text.parse().map_err(|error| {
        Failure::file("read the schedule", path, error).help(
            "a row for each rank, cells such as 2F0, 2B0, 2I0, 2W0 for stage 2 and micro-batch 0, as torch writes them",
        )
    })?;
    if table.microbatches() == 0 {
        return Err(Failure::file("read the schedule", path, "it has no work"));
    }
    Ok(Some(table))
}

/// The program of a table over a pipeline, when the checker finds nothing wrong with it.
pub fn program(table: &Table, pipeline: &Pipeline, minibatches: u32) -> Result<Program, Failure> {
    let what = "the schedule's table does not fit the plan";
    let program = table.program(pipeline, minibatches).map_err(|error| Failure::input(what).because(error))?;
    check(&program).map_err(|error| Failure::no("the schedule's table gives no sound program").because(error))?;
    Ok(program)
}

/// Replicas of the stages that a table asks for where nothing else is said. Fails for a table with several stages on a rank.
pub fn replicas(table: &Table) -> Result<Vec<u32>, Failure> {
    let (stages, ranks) = (table.stages() as usize, table.rows.len());
    if stages == ranks {
        return Ok(vec![1; stages]);
    }
    Err(Failure::input(format!("the table has {stages} stages on {ranks} ranks"))
        .because("plans that are made here put one stage on each device")
        .help("a plan whose stages name the same devices, with `chunks` to say so, runs it: `--plan`"))
}

fn is_file(text: &str) -> bool {
    text.ends_with(".csv")
}
