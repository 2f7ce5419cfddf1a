//! Custom schedules: a table `.csv` or programs `.json`.
//!
//! A table lists the order in which each rank computes the micro-batches of one minibatch, and is repeated for every minibatch. Programs
//! list every instruction for a fixed number of minibatches, in the format of `pipec simulate --programs FILE.json`.

use crate::error::Error;
use crate::events::EventSink;
use crate::files::input;
use compiler::plan::schedule::Schedule;
use compiler::schedule::check::verify::check;
use compiler::schedule::fit::fit;
use compiler::schedule::formats::csv::ComputeTable;
use compiler::schedule::formats::json::from_json;
use compiler::schedule::{Instruction, Pipeline, Program, ScheduleError};
use compiler::text::quantity::plural;
use std::path::Path;

/// Maximum size of a file in bytes.
const MOST_BYTES: u64 = 256 << 20;

/// Help for a file without programs.
const PROGRAM_HELP: &str =
    "`pipec simulate PLAN --programs FILE.json` writes one, `pipec schema program` prints the format";

#[derive(Clone, Debug)]
pub enum CustomSchedule {
    /// A row for each rank, for one minibatch.
    Table(ComputeTable),
    /// Programs for all workers, with every instruction.
    Program(Box<Program>),
}

pub fn read(path: Option<&Path>) -> Result<Option<CustomSchedule>, Error> {
    let Some(path) = path else { return Ok(None) };
    let text = input::text(path, MOST_BYTES)?;
    if is_program(path) {
        let program = from_json(&text).map_err(|error| {
            let why = input::other_file(&text, "program").unwrap_or_else(|| error.to_string());
            Error::file("read the schedule", path, why).with_help(PROGRAM_HELP)
        })?;
        return Ok(Some(CustomSchedule::Program(Box::new(program))));
    }
    let table: ComputeTable = text.parse().map_err(|error| {
        Error::file("read the schedule", path, error).with_help(
            "write one row per rank, with cells such as 2F0, 2B0, 2I0, 2W0 for stage 2 and micro-batch 0, in torch's format",
        )
    })?;
    if table.microbatches() == 0 {
        return Err(Error::file("read the schedule", path, "it has no instructions"));
    }
    Ok(Some(CustomSchedule::Table(table)))
}

/// Reads a custom schedule and notes its size.
pub fn open(path: Option<&Path>, events: &dyn EventSink) -> Result<Option<CustomSchedule>, Error> {
    let custom = read(path)?;
    if let (Some(custom), Some(path)) = (&custom, path) {
        events.note(&format!("{}: {}", path.display(), custom.summary()));
    }
    Ok(custom)
}

impl CustomSchedule {
    /// The schedule in plans: the one whose update rule it follows, if plans may have it.
    pub fn kind(&self) -> Schedule {
        Some(self.schedule()).filter(|schedule| Schedule::ALL.contains(schedule)).unwrap_or(Schedule::Csv)
    }

    fn as_program(&self) -> Option<&Program> {
        if let CustomSchedule::Program(program) = self { Some(program) } else { None }
    }

    /// The schedule whose update rule it follows.
    pub fn schedule(&self) -> Schedule {
        self.as_program().map_or(Schedule::Csv, |program| program.schedule)
    }

    /// Micro-batches per minibatch.
    pub fn microbatches(&self) -> u32 {
        match self {
            CustomSchedule::Table(table) => table.microbatches(),
            CustomSchedule::Program(program) => program.microbatches,
        }
    }

    /// Refuses a different number of micro-batches.
    pub fn agrees(&self, asked: Option<u32>) -> Result<(), Error> {
        let listed = self.microbatches();
        match asked.filter(|asked| *asked != listed) {
            None => Ok(()),
            Some(asked) => {
                let what = format!("`--microbatches {asked}` does not match a schedule of {listed} micro-batches");
                Err(Error::input(what).with_help("omit `--microbatches`: the file sets the number"))
            }
        }
    }

    /// The number of minibatches, if it is fixed.
    pub fn minibatches(&self) -> Option<u32> {
        self.as_program().map(|program| program.items / program.microbatches.max(1))
    }

    /// True if it splits the backward.
    pub fn splits_backward(&self) -> bool {
        match self {
            CustomSchedule::Table(table) => table.splits_backward(),
            CustomSchedule::Program(program) => {
                program.workers.iter().flat_map(|worker| &worker.instructions).any(is_split)
            }
        }
    }

    /// The in-flight limit of each stage, if the file gives one.
    pub fn caps(&self) -> Option<Vec<u32>> {
        self.as_program().map(|program| program.stages.iter().map(|stage| stage.cap).collect())
    }

    /// A description of its size.
    fn summary(&self) -> String {
        let items = plural(self.microbatches().into(), "micro-batch", "micro-batches");
        match self {
            CustomSchedule::Table(table) => {
                let stages = plural(table.stages().into(), "stage", "stages");
                let ranks = plural(table.rows.len() as u64, "rank", "ranks");
                format!("a table of one minibatch of {items}, {stages} on {ranks}; it is repeated for every minibatch")
            }
            CustomSchedule::Program(program) => {
                let minibatches = self.minibatches().unwrap_or(0);
                let minibatches = plural(minibatches.into(), "minibatch", "minibatches");
                let workers = plural(program.workers.len() as u64, "worker", "workers");
                format!("programs of {minibatches} of {items} each for {workers}")
            }
        }
    }

    /// The programs over a pipeline, unchecked.
    pub fn unchecked(&self, pipeline: &Pipeline, minibatches: u32) -> Result<Program, ScheduleError> {
        match self {
            CustomSchedule::Table(table) => table.program(pipeline, minibatches),
            CustomSchedule::Program(program) => fit(program, pipeline),
        }
    }

    /// The programs over a pipeline, checked.
    pub fn program(&self, pipeline: &Pipeline, minibatches: u32) -> Result<Program, Error> {
        let program = self
            .unchecked(pipeline, minibatches)
            .map_err(|error| Error::input(format!("{} does not fit the plan", self.name())).because(error))?;
        check(&program).map_err(|error| self.unsound(error))?;
        Ok(program)
    }

    /// The error for programs that the checker refuses.
    pub fn unsound(&self, why: impl std::fmt::Display) -> Error {
        Error::negative(format!("{} gives no valid program", self.name())).because(why)
    }

    fn name(&self) -> &'static str {
        match self {
            CustomSchedule::Table(_) => "the schedule's table",
            CustomSchedule::Program(_) => "the schedule's file",
        }
    }

    /// The number of minibatches to run: the requested one, which must match programs.
    pub fn count(&self, flag: &str, asked: Option<u32>) -> Result<Option<u32>, Error> {
        match (self.minibatches(), asked) {
            (Some(known), Some(asked)) if known != asked => {
                let minibatches = plural(u64::from(known), "minibatch", "minibatches");
                Err(Error::input(format!("`{flag} {asked}` does not match programs for {minibatches}")).with_help(
                    format!("omit `{flag}`, or use a table FILE.csv, which has no fixed number of minibatches"),
                ))
            }
            (known, asked) => Ok(known.or(asked)),
        }
    }

    /// Replicas of the stages. Fails if a rank has several stages.
    pub fn replicas(&self) -> Result<Vec<u32>, Error> {
        let (replicas, ranks) = match self {
            CustomSchedule::Table(table) => (vec![1; table.stages() as usize], table.rows.len()),
            CustomSchedule::Program(program) => {
                let replicas: Vec<u32> = program.stages.iter().map(|stage| stage.replicas).collect();
                let ranks = program.stages.iter().map(|stage| stage.rank.index() + 1).max().unwrap_or(0);
                (replicas, ranks)
            }
        };
        if replicas.len() == ranks {
            return Ok(replicas);
        }
        Err(self.has_several(replicas.len(), ranks))
    }

    fn has_several(&self, stages: usize, ranks: usize) -> Error {
        if stages > 0 && ranks > stages && ranks.is_multiple_of(stages) {
            let replicas = vec![(ranks / stages).to_string(); stages].join(",");
            return Error::input(format!("{} has {stages} stages and {ranks} rows", self.name()))
                .because("it has one row per worker")
                .with_help(format!("use `--stages {replicas}`"));
        }
        Error::input(format!("{} has {stages} stages on {ranks} ranks", self.name()))
            .because("the planner puts only one stage on each device")
            .with_help("pass a plan with `chunks` and several stages per device with `--plan`")
    }
}

fn is_split(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::BackwardInput { .. } | Instruction::BackwardWeight { .. })
}

fn is_program(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}
