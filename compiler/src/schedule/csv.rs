//! The compute-only table that torch's pipeline runtime reads and writes: a row for each worker, a cell for each piece of work.
//!
//! ```text
//! 0F0,0F1,0B0,0B1
//! ,1F0,1B0,1F1,1B1
//! ```
//!
//! `I` and `W` are the two parts of a backward, an empty cell is idle time, and `(0F3;7B0)OVERLAP_F_B` are pieces of work that torch
//! runs beside each other and a worker here one after the other. A table prints as it was read, to the byte.
//!
//! It says neither versions nor transfers, so it carries a synchronous schedule whole and an asynchronous one only in order.

use std::fmt;
use std::str::FromStr;

use crate::plan::StageId;
use crate::schedule::own::{self, OrderOfWork};
use crate::schedule::rule::StepCount;
use crate::schedule::work::{Part, Work};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

/// Cells that a table may have: beyond it no program of this form could be made.
const MAX_CELLS: usize = 1 << 24;

const OVERLAP: &str = "OVERLAP_F_B";

/// The table of a program, one line for each worker.
pub fn csv(program: &Program) -> String {
    let mut text = String::new();
    for worker in &program.workers {
        let work = worker.instructions.iter().filter_map(|instruction| instruction.work());
        let cells = work.map(|(work, ..)| work.to_string());
        text += &cells.collect::<Vec<_>>().join(",");
        text.push('\n');
    }
    text
}

/// One cell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cell {
    /// Nothing is computed.
    Idle,
    /// One piece of work.
    Work(Work),
    /// Pieces of work that may run beside each other.
    Overlap(Vec<Work>),
}

/// A table as it stands in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Table {
    /// A row for each rank.
    pub rows: Vec<Vec<Cell>>,
    /// What ends a line.
    newline: &'static str,
    /// Whether the last line is ended too.
    is_ended: bool,
}

/// Where and why a text is not a table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("row {row}, cell {cell}: expected {expected}, found `{found}`")]
pub struct TableError {
    /// The row, from 1.
    pub row: usize,
    /// The cell, from 1.
    pub cell: usize,
    /// What should stand there.
    pub expected: &'static str,
    /// What stands there.
    pub found: String,
}

impl Table {
    /// What a rank computes, in order.
    pub fn row(&self, rank: RankId) -> impl Iterator<Item = Work> + '_ {
        let cells = self.rows.get(rank.index()).into_iter().flatten();
        cells
            .flat_map(|cell| match cell {
                Cell::Idle => &[],
                Cell::Work(work) => std::slice::from_ref(work),
                Cell::Overlap(work) => &work[..],
            })
            .copied()
    }

    fn work(&self) -> impl Iterator<Item = Work> + '_ {
        (0..self.rows.len() as u32).flat_map(|rank| self.row(RankId(rank)))
    }

    /// Items of the minibatch that it orders.
    pub fn microbatches(&self) -> u32 {
        self.work().map(|work| work.item.0.saturating_add(1)).max().unwrap_or(0)
    }

    /// Stages that it speaks of.
    pub fn stages(&self) -> u32 {
        self.work().map(|work| work.stage.0.saturating_add(1)).max().unwrap_or(0)
    }

    /// Whether a backward in it comes in two parts.
    pub fn splits_backward(&self) -> bool {
        self.work().any(|work| work.part == Part::BackwardWeight)
    }

    /// The program in which every rank of the pipeline follows its row, for so many minibatches. The table is for all microbatches
    /// of one; replicas of a rank take their share of its row.
    pub fn program(&self, pipeline: &Pipeline, minibatches: u32) -> Result<Program, ScheduleError> {
        pipeline.validate()?;
        let wrong = |what: String| Err(ScheduleError::Table { what });
        let ranks = pipeline.ranks.iter().map(|rank| rank.index() + 1).max().unwrap_or(0);
        if self.rows.len() != ranks {
            return wrong(format!("it has {} rows, the pipeline {ranks} ranks", self.rows.len()));
        }
        let (stages, known) = (self.stages(), pipeline.stages.len());
        if stages as usize != known {
            return wrong(format!("it speaks of {stages} stages, the pipeline has {known}"));
        }
        own::program(self, pipeline, StepCount { minibatches, microbatches: self.microbatches() })
    }
}

impl OrderOfWork for Table {
    /// Replica 0's share of the row stands for all that are dealt as many: only the order counts.
    fn work(&self, pipeline: &Pipeline, rank: RankId, items: u32) -> Vec<Work> {
        let replicas = pipeline.stages.first().map_or(1, |stage| stage.replicas.max(1));
        let of_share =
            |work: &Work| replicas == 1 || (work.item.0.is_multiple_of(replicas) && work.item.0 / replicas < items);
        let local = |work: Work| Work { item: MicrobatchId(work.item.0 / replicas), ..work };
        self.row(rank).filter(of_share).map(local).collect()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, row) in self.rows.iter().enumerate() {
            for (place, cell) in row.iter().enumerate() {
                f.write_str(if place > 0 { "," } else { "" })?;
                match cell {
                    Cell::Idle => {}
                    Cell::Work(work) => write!(f, "{work}")?,
                    Cell::Overlap(work) => {
                        let work: Vec<String> = work.iter().map(Work::to_string).collect();
                        write!(f, "({}){OVERLAP}", work.join(";"))?;
                    }
                }
            }
            if self.is_ended || at + 1 < self.rows.len() {
                f.write_str(self.newline)?;
            }
        }
        Ok(())
    }
}

impl FromStr for Table {
    type Err = TableError;

    fn from_str(text: &str) -> Result<Self, TableError> {
        let newline = if text.contains("\r\n") { "\r\n" } else { "\n" };
        let is_ended = text.ends_with(newline);
        let body = text.strip_suffix(newline).unwrap_or(text);
        let mut rows = Vec::new();
        let mut cells = 0usize;
        for (row, line) in body.split(newline).enumerate() {
            let mut read = Vec::new();
            for (cell, word) in line.split(',').enumerate() {
                let error = |expected| {
                    let found = word.chars().take(60).map(|c| if c.is_control() { '?' } else { c }).collect();
                    TableError { row: row + 1, cell: cell + 1, expected, found }
                };
                cells += 1;
                if cells > MAX_CELLS {
                    return Err(error("a table of at most 16777216 cells"));
                }
                read.push(
                    read_cell(word)
                        .ok_or_else(|| error("work such as 2F0, 2B0, 2I0 or 2W0, nothing, or (2F1;2B0)OVERLAP_F_B"))?,
                );
            }
            // A row without work is one idle cell in print and none at all in meaning.
            rows.push(read);
        }
        Ok(Self { rows, newline, is_ended })
    }
}

fn read_cell(word: &str) -> Option<Cell> {
    if word.is_empty() {
        return Some(Cell::Idle);
    }
    match word.strip_suffix(OVERLAP) {
        Some(rest) => {
            let inner = rest.strip_prefix('(')?.strip_suffix(')')?;
            Some(Cell::Overlap(inner.split(';').map(read_work).collect::<Option<Vec<Work>>>()?))
        }
        None => read_work(word).map(Cell::Work),
    }
}

fn read_work(word: &str) -> Option<Work> {
    let (at, letter) = word.char_indices().find(|(_, c)| !c.is_ascii_digit())?;
    let part = Part::ALL.into_iter().find(|part| part.letter() == letter)?;
    Some(Work { stage: StageId(number(&word[..at])?), item: MicrobatchId(number(&word[at + 1..])?), part })
}

/// Numbers as they are printed: no sign, no zeros in front.
fn number(digits: &str) -> Option<u32> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    plain.then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Schedule;
    use crate::schedule::scheduler::schedule;

    #[test]
    fn one_row_for_each_worker() {
        let count = StepCount { minibatches: 1, microbatches: 3 };
        let pipeline = Pipeline::balanced(&[1, 1], 1.0);
        let fill_drain = schedule(Schedule::Gpipe, &pipeline, count).unwrap();
        assert_eq!(csv(&fill_drain), "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n");
        let flush = schedule(Schedule::OneFOneB, &pipeline, count).unwrap();
        assert_eq!(csv(&flush), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
    }

    #[test]
    fn says_where_it_stumbled() {
        for (text, row, cell) in [("0F0,0X0", 1, 2), ("0F0\n1F0,01B0", 2, 2), ("(0F0;)OVERLAP_F_B", 1, 1), ("0F", 1, 1)]
        {
            let error = text.parse::<Table>().unwrap_err();
            assert_eq!((error.row, error.cell), (row, cell), "{text}");
        }
    }

    #[test]
    fn a_table_that_cannot_run_is_refused() {
        let pipeline = Pipeline::balanced(&[1, 1], 1.0);
        let refused = |text: &str| text.parse::<Table>().unwrap().program(&pipeline, 1).unwrap_err().to_string();
        assert_eq!(refused("0F0,0B0\n1F0"), "table: rank 1: 1B0 is missing");
        assert_eq!(refused("0F0,0F0,0B0\n1F0,1B0"), "table: rank 0: 0F0 comes twice");
        assert_eq!(
            refused("0B0,0F0\n1F0,1B0"),
            "table: rank 0: 0B0 comes without the work before it, or beside work that includes it"
        );
        assert_eq!(refused("0F0,0B0"), "table: it has 1 rows, the pipeline 2 ranks");
        let crossed = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1");
        assert!(crossed.contains("waits for ever before 0B0"), "{crossed}");
    }
}
