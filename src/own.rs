//! A schedule as the command line has it: the name of one, or a file with an order of work of the user's own.
//!
//! A table, `FILE.csv`, says in which order ranks compute the items of one minibatch, and is repeated for as many as are run. A program,
//! `FILE.json`, says everything for a number of minibatches that it knows: it is what `pipec simulate --programs FILE.json` writes.

use crate::batch;
use crate::failure::Failure;
use crate::screen::Screen;
use crate::source;
use crate::stages::plural;
use compiler::plan::ScheduleKind;
use compiler::schedule::check::verify::check;
use compiler::schedule::fit::fit;
use compiler::schedule::formats::csv::ComputeTable;
use compiler::schedule::formats::json::from_json;
use compiler::schedule::{Instruction, Pipeline, Program, Schedule, ScheduleError};
use compiler::text::suggest::hint;
use std::path::Path;

/// The most bytes of a file.
const MOST_BYTES: u64 = 256 << 20;

/// What a program's file says, for those who gave something else.
const PROGRAM_HELP: &str =
    "`pipec simulate PLAN --programs FILE.json` writes one, `pipec schema program` prints what it looks like";

/// What others call these schedules.
const ELSEWHERE: [(&str, &str); 16] = [
    ("pipedream", "1f1b-rr"),
    ("async", "1f1b-rr"),
    ("pipedream-flush", "1f1b"),
    ("1f1b-flush", "1f1b"),
    ("dapple", "1f1b"),
    ("pipedream-2bw", "2bw"),
    ("fill-drain", "gpipe"),
    ("interleaved-1f1b", "interleaved"),
    ("interleaved1f1b", "interleaved"),
    ("looped-bfs", "bfs"),
    ("loopedbfs", "bfs"),
    ("breadth-first", "bfs"),
    ("zero-bubble", "zb-h1"),
    ("zb", "zb-h1"),
    ("zbvzerobubble", "zbv"),
    ("dualpipe", "dualpipev"),
];

/// An order of work from a file.
#[derive(Clone, Debug)]
pub enum Own {
    /// A row for each rank, for one minibatch.
    Table(ComputeTable),
    /// Programs for all workers, with everything they do.
    Program(Box<Program>),
}

/// Reads `--schedule`: a name, or the path of a file.
pub fn said(text: &str) -> Result<String, String> {
    let known = ScheduleKind::ALL.into_iter().filter(|kind| *kind != ScheduleKind::Csv);
    if is_file(text) || known.clone().any(|kind| kind.name() == text) {
        return Ok(text.to_string());
    }
    if text == batch::AUTO {
        return Err(
            "the best order of work is found by `pipec partition --schedule auto`; the plan that it writes names it"
                .to_string(),
        );
    }
    let names: Vec<&str> = known.map(ScheduleKind::name).collect();
    let lower = text.to_lowercase();
    let same = names.iter().copied().find(|name| *name == lower);
    let elsewhere = ELSEWHERE.iter().find(|(other, _)| *other == lower).map(|(_, own)| *own);
    let meant = match elsewhere.or(same) {
        Some(own) => format!("; did you mean `{own}`?"),
        None => hint(text, names.iter().copied()),
    };
    Err(format!(
        "write one of {}, or a file of your own: a table FILE.csv, programs FILE.json{meant}",
        names.join(", ")
    ))
}

/// Reads the path of a file, where only that will do.
pub fn said_file(text: &str) -> Result<String, String> {
    is_file(text)
        .then(|| text.to_string())
        .ok_or_else(|| "write a file of your own: a table FILE.csv, programs FILE.json".to_string())
}

/// The order of work that was said, if it is in a file.
pub fn read(said: Option<&str>) -> Result<Option<Own>, Failure> {
    let Some(path) = said.filter(|said| is_file(said)).map(Path::new) else { return Ok(None) };
    let text = source::text(path, MOST_BYTES)?;
    if is_program(path) {
        let program = from_json(&text).map_err(|error| {
            let why = source::other_file(&text, "program").unwrap_or_else(|| error.to_string());
            Failure::file("read the schedule", path, why).help(PROGRAM_HELP)
        })?;
        return Ok(Some(Own::Program(Box::new(program))));
    }
    let table: ComputeTable = text.parse().map_err(|error| {
        Failure::file("read the schedule", path, error).help(
            "a row for each rank, cells such as 2F0, 2B0, 2I0, 2W0 for stage 2 and micro-batch 0, as torch writes them",
        )
    })?;
    if table.microbatches() == 0 {
        return Err(Failure::file("read the schedule", path, "it has no work"));
    }
    Ok(Some(Own::Table(table)))
}

/// The same, and says beside the result what was read of it, so that nobody takes a minibatch for several.
pub fn open(said: Option<&str>, screen: &Screen) -> Result<Option<Own>, Failure> {
    let own = read(said)?;
    if let (Some(own), Some(path)) = (&own, said) {
        screen.note(&format!("{path}: {}", own.holds()));
    }
    Ok(own)
}

/// The kind of schedule: the one that was named, or that of the file.
pub fn kind(said: Option<&str>, own: Option<&Own>) -> Option<ScheduleKind> {
    own.map(Own::kind).or_else(|| said.and_then(ScheduleKind::from_name))
}

impl Own {
    /// The schedule whose rule it follows.
    pub fn kind(&self) -> ScheduleKind {
        match self {
            Own::Table(_) => ScheduleKind::Csv,
            Own::Program(program) => ScheduleKind::from_name(program.schedule.name()).unwrap_or(ScheduleKind::Csv),
        }
    }

    /// The same, as programs call it.
    pub fn schedule(&self) -> Schedule {
        match self {
            Own::Table(_) => Schedule::Csv,
            Own::Program(program) => program.schedule,
        }
    }

    /// Items of a minibatch.
    pub fn microbatches(&self) -> u32 {
        match self {
            Own::Table(table) => table.microbatches(),
            Own::Program(program) => program.microbatches,
        }
    }

    /// Refuses another number of micro-batches than it is for.
    pub fn agrees(&self, asked: Option<u32>) -> Result<(), Failure> {
        let listed = self.microbatches();
        match asked.filter(|asked| *asked != listed) {
            None => Ok(()),
            Some(asked) => {
                let what = format!("`--microbatches {asked}` does not go with a schedule of {listed} micro-batches");
                Err(Failure::input(what).help("leave out `--microbatches`: the file says how many there are"))
            }
        }
    }

    /// The minibatches that it is for, where it is not for any number.
    pub fn minibatches(&self) -> Option<u32> {
        match self {
            Own::Table(_) => None,
            Own::Program(program) => Some(program.items / program.microbatches.max(1)),
        }
    }

    /// Whether a backward in it comes in two parts.
    pub fn splits_backward(&self) -> bool {
        match self {
            Own::Table(table) => table.splits_backward(),
            Own::Program(program) => program.workers.iter().flat_map(|worker| &worker.instructions).any(is_split),
        }
    }

    /// The most items that a replica of each stage may have in flight, where the file says it.
    pub fn caps(&self) -> Option<Vec<u32>> {
        match self {
            Own::Table(_) => None,
            Own::Program(program) => Some(program.stages.iter().map(|stage| stage.cap).collect()),
        }
    }

    /// What is in it, in words.
    fn holds(&self) -> String {
        let items = plural(self.microbatches().into(), "micro-batch", "micro-batches");
        match self {
            Own::Table(table) => {
                let stages = plural(table.stages().into(), "stage", "stages");
                let ranks = plural(table.rows.len() as u64, "rank", "ranks");
                format!(
                    "a table of one minibatch of {items}, {stages} on {ranks}; it is repeated for as many minibatches as are run"
                )
            }
            Own::Program(program) => {
                let minibatches = self.minibatches().unwrap_or(0);
                let minibatches = plural(minibatches.into(), "minibatch", "minibatches");
                let workers = plural(program.workers.len() as u64, "worker", "workers");
                format!("programs of {minibatches} of {items} each for {workers}")
            }
        }
    }

    /// The programs over a pipeline. Nobody has checked them yet.
    pub fn unchecked(&self, pipeline: &Pipeline, minibatches: u32) -> Result<Program, ScheduleError> {
        match self {
            Own::Table(table) => table.program(pipeline, minibatches),
            Own::Program(program) => fit(program, pipeline),
        }
    }

    /// The programs over a pipeline, when the checker finds nothing wrong with them.
    pub fn program(&self, pipeline: &Pipeline, minibatches: u32) -> Result<Program, Failure> {
        let program = self
            .unchecked(pipeline, minibatches)
            .map_err(|error| Failure::input(format!("{} does not fit the plan", self.told())).because(error))?;
        check(&program).map_err(|error| self.unsound(error))?;
        Ok(program)
    }

    /// What is said when the checker finds something.
    pub fn unsound(&self, why: impl std::fmt::Display) -> Failure {
        Failure::no(format!("{} gives no sound program", self.told())).because(why)
    }

    fn told(&self) -> &'static str {
        match self {
            Own::Table(_) => "the schedule's table",
            Own::Program(_) => "the schedule's file",
        }
    }

    /// How many minibatches to run: as many as are asked for, or as a program says, which is for no other number.
    pub fn count(&self, flag: &str, asked: Option<u32>) -> Result<Option<u32>, Failure> {
        match (self.minibatches(), asked) {
            (Some(known), Some(asked)) if known != asked => {
                let minibatches = plural(u64::from(known), "minibatch", "minibatches");
                Err(Failure::input(format!("`{flag} {asked}` does not go with programs for {minibatches}"))
                    .help(format!("leave out `{flag}`; a table, FILE.csv, is for any number of minibatches")))
            }
            (known, asked) => Ok(known.or(asked)),
        }
    }

    /// Replicas of the stages where nothing else is said. Fails where a rank has several stages.
    pub fn replicas(&self) -> Result<Vec<u32>, Failure> {
        let (replicas, ranks) = match self {
            Own::Table(table) if table.stages() as usize == table.rows.len() => return Ok(vec![1; table.rows.len()]),
            Own::Table(table) => {
                let (stages, ranks) = (table.stages(), table.rows.len());
                return Err(self.has_several(stages as usize, ranks));
            }
            Own::Program(program) => {
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

    fn has_several(&self, stages: usize, ranks: usize) -> Failure {
        if stages > 0 && ranks > stages && ranks.is_multiple_of(stages) {
            let replicas = vec![(ranks / stages).to_string(); stages].join(",");
            return Failure::input(format!("{} has {stages} stages and {ranks} rows", self.told()))
                .because("its rows are those of workers")
                .help(format!("`--stages {replicas}` gives each stage as many"));
        }
        Failure::input(format!("{} has {stages} stages on {ranks} ranks", self.told()))
            .because("plans that are made here put one stage on each device")
            .help("a plan whose stages name the same devices, with `chunks` to say so, runs it: `--plan`")
    }
}

fn is_split(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::BackwardInput { .. } | Instruction::BackwardWeight { .. })
}

/// Whether a schedule that was said is in a file.
pub fn is_file(text: &str) -> bool {
    text.ends_with(".csv") || text.ends_with(".json")
}

fn is_program(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}
