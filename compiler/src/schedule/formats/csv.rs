//! The compute-only table of torch's pipeline runtime: one row per rank, one cell per action.
//!
//! ```text
//! 0F0,0F1,0B0,0B1
//! ,1F0,1B0,1F1,1B1
//! ```
//!
//! `I` and `W` are the two passes of a split backward, and an empty cell is idle. `(0F3;7B0)OVERLAP_F_B` are actions
//! that torch overlaps and that run in sequence here. Tables are printed byte for byte as read, except for what
//! spreadsheets and editors add: spaces, quotes, a byte-order mark, leading zeros, trailing empty lines.
//!
//! Stages with replicas have one row per rank, which each replica follows for its own items. One row per worker, as
//! programs print, is also accepted if all replicas use the same order.
//!
//! A table has no versions or transfers, so it describes a synchronous schedule completely and an asynchronous one only
//! in its order.

use std::fmt;
use std::str::FromStr;

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::equal_replicas;
use crate::schedule::custom;
use crate::schedule::custom::ComputeOrder;
use crate::schedule::semantics::{StepCount, dealt};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

/// Most cells of a table: no larger program is possible.
const MAX_CELLS: usize = 1 << 24;

const OVERLAP: &str = "OVERLAP_F_B";

const BYTE_ORDER: char = '\u{feff}';

/// The table of a program, one line per worker.
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

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cell {
    Idle,
    Work(Work),
    Overlap(Vec<Work>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ComputeTable {
    pub rows: Vec<Vec<Cell>>,
    newline: &'static str,
    is_ended: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("row {row}, cell {cell}: expected {expected}, found `{found}`")]
pub struct TableError {
    pub row: usize,
    pub cell: usize,
    pub expected: &'static str,
    pub found: String,
}

impl ComputeTable {
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

    /// Micro-batches of the minibatch.
    pub fn microbatches(&self) -> u32 {
        self.work().map(|work| work.item.0.saturating_add(1)).max().unwrap_or(0)
    }

    pub fn stages(&self) -> u32 {
        self.work().map(|work| work.stage.0.saturating_add(1)).max().unwrap_or(0)
    }

    pub fn splits_backward(&self) -> bool {
        self.work().any(|work| work.part == Phase::BackwardWeight)
    }

    /// The program in which every rank follows its row for `minibatches` minibatches. Replicas of a rank divide the
    /// items of its row.
    pub fn program(&self, pipeline: &Pipeline, minibatches: u32) -> Result<Program, ScheduleError> {
        pipeline.validate()?;
        let wrong = |what: String| Err(ScheduleError::Table { what });
        let ranks = pipeline.ranks.iter().map(|rank| rank.index() + 1).max().unwrap_or(0);
        let replicas = equal_replicas(Schedule::Csv, pipeline)?;
        let workers = ranks.saturating_mul(replicas as usize);
        // Trailing rows of workers without actions are omitted in the file.
        if replicas > 1 && (ranks + 1..workers).contains(&self.rows.len()) {
            let mut rows = self.rows.clone();
            rows.resize(workers, Vec::new());
            return ComputeTable { rows, ..*self }.program(pipeline, minibatches);
        }
        let is_by_worker = replicas > 1 && self.rows.len() == workers;
        if self.rows.len() != ranks && !is_by_worker {
            let workers = if replicas > 1 { format!(" of {replicas} workers") } else { String::new() };
            return wrong(format!("it has {} rows, the pipeline {ranks} ranks{workers}", self.rows.len()));
        }
        let (stages, known) = (self.stages(), pipeline.stages.len());
        if stages as usize != known {
            return wrong(format!("it has {stages} stages, the pipeline {known}"));
        }
        let count = StepCount { minibatches, microbatches: self.microbatches() };
        if is_by_worker {
            let first = self.first_replicas(replicas).map_err(|what| ScheduleError::Table { what })?;
            return custom::program(&first, pipeline, count);
        }
        custom::program(self, pipeline, count)
    }

    /// For one row per worker: the rows of each rank's first replica, provided that all replicas follow the same order
    /// with their own items.
    fn first_replicas(&self, replicas: u32) -> Result<ComputeTable, String> {
        let items = self.microbatches();
        let mut rows = Vec::with_capacity(self.rows.len() / replicas as usize);
        for at in (0..self.rows.len() as u32).step_by(replicas as usize) {
            for replica in 0..replicas {
                let row = at + replica;
                let dealt = dealt(items, replicas, replica);
                let local = |work: Work| Work { item: MicrobatchId(work.item.0 / replicas), ..work };
                if let Some(work) = self.row(RankId(row)).find(|work| work.item.0 % replicas != replica) {
                    let rank = at / replicas;
                    return Err(format!("row {}: {work} does not belong to replica {replica} of rank {rank}", row + 1));
                }
                let first = self.row(RankId(at)).map(local).filter(|work| u64::from(work.item.0) < dealt);
                if !first.eq(self.row(RankId(row)).map(local)) {
                    return Err(format!(
                        "row {}: its order differs from row {}; replicas of a rank need the same order",
                        row + 1,
                        at + 1
                    ));
                }
            }
            rows.extend(self.rows.get(at as usize).cloned());
        }
        Ok(ComputeTable { rows, ..*self })
    }
}

impl ComputeOrder for ComputeTable {
    /// Replica 0's items represent those of any replica with as many: only the order counts.
    fn work(&self, pipeline: &Pipeline, rank: RankId, items: u32) -> Vec<Work> {
        let replicas = pipeline.stages.first().map_or(1, |stage| stage.replicas.max(1));
        let of_share =
            |work: &Work| replicas == 1 || (work.item.0.is_multiple_of(replicas) && work.item.0 / replicas < items);
        let local = |work: Work| Work { item: MicrobatchId(work.item.0 / replicas), ..work };
        self.row(rank).filter(of_share).map(local).collect()
    }
}

impl fmt::Display for ComputeTable {
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

impl FromStr for ComputeTable {
    type Err = TableError;

    fn from_str(text: &str) -> Result<Self, TableError> {
        let text = text.strip_prefix(BYTE_ORDER).unwrap_or(text);
        let newline = if text.contains("\r\n") { "\r\n" } else { "\n" };
        let is_ended = text.ends_with('\n');
        let body = text.trim_end_matches(|c: char| c.is_whitespace());
        let mut rows = Vec::new();
        let mut cells = 0usize;
        for (row, line) in body.split('\n').enumerate() {
            let line = line.strip_suffix('\r').unwrap_or(line);
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
                    read_cell(strip_quotes(word))
                        .ok_or_else(|| error("work such as 2F0, 2B0, 2I0 or 2W0, nothing, or (2F1;2B0)OVERLAP_F_B"))?,
                );
            }
            // An empty row prints as one idle cell and means no action.
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
            let inner = rest.trim_end().strip_prefix('(')?.strip_suffix(')')?;
            Some(Cell::Overlap(inner.split(';').map(str::trim).map(read_work).collect::<Option<Vec<Work>>>()?))
        }
        None => read_work(word).map(Cell::Work),
    }
}

fn read_work(word: &str) -> Option<Work> {
    let (at, letter) = word.char_indices().find(|(_, c)| !c.is_ascii_digit())?;
    let part = Phase::ALL.into_iter().find(|part| part.letter() == letter)?;
    Some(Work { stage: StageId(number(&word[..at])?), item: MicrobatchId(number(&word[at + 1..])?), part })
}

/// Removes quotes and spaces around a cell.
fn strip_quotes(word: &str) -> &str {
    let word = word.trim();
    word.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(word).trim()
}

/// Digits only, without a sign.
fn number(digits: &str) -> Option<u32> {
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::generators::schedule;

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
        for (text, row, cell) in [
            ("0F0,0X0", 1, 2),
            ("0F0\n1F0,+1B0", 2, 2),
            ("(0F0;)OVERLAP_F_B", 1, 1),
            ("0F", 1, 1),
            ("0F0,\"0B0", 1, 2),
            ("0F0;0B0", 1, 1),
            ("0F4294967296", 1, 1),
        ] {
            let error = text.parse::<ComputeTable>().unwrap_err();
            assert_eq!((error.row, error.cell), (row, cell), "{text}");
        }
    }

    #[test]
    fn what_spreadsheets_add_is_left_out() {
        let plain = "0F0,0F1,0B0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n";
        let read = |text: &str| text.parse::<ComputeTable>().unwrap();
        let rows = read(plain).rows;
        for text in [
            "\u{feff}0F0,0F1,0B0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n",
            " 0F0 , 0F1,0B0 ,\t0B1\n ,1F0,1B0,(1F1 ; 1B1)OVERLAP_F_B \n",
            "\"0F0\",\"0F1\",\"0B0\",0B1\n\"\",1F0,\" 1B0\",\"(1F1;1B1)OVERLAP_F_B\"\n",
            "0F0,0F1,0B0,0B1\r\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n",
            "00F0,0F01,0B00,0B1\n,1F0,1B0,(01F1;1B1)OVERLAP_F_B\n",
            "0F0,0F1,0B0,0B1\n,1F0,1B0,(1F1;1B1)OVERLAP_F_B\n\n  \n",
        ] {
            assert_eq!(read(text).rows, rows, "{text:?}");
        }
        let ends = "0F0,0B0\r\n1F0,1B0\r\n";
        assert_eq!(read(ends).to_string(), ends);
        assert_eq!(read("\u{feff} 0F0,\"0B0\"").to_string(), "0F0,0B0");
    }

    /// Printed programs with replicas parse back to the same order.
    #[test]
    fn rows_may_be_those_of_workers() {
        let mut count = 0;
        for kind in [Schedule::Gpipe, Schedule::OneFOneB, Schedule::ZbH1] {
            for (replicas, microbatches) in [(2, 4), (2, 5), (3, 7)] {
                let pipeline = Pipeline::balanced(&[replicas, replicas], 2.0);
                let made = schedule(kind, &pipeline, StepCount { minibatches: 1, microbatches }).unwrap();
                let text = csv(&made);
                let back = text.parse::<ComputeTable>().unwrap().program(&pipeline, 1).unwrap();
                assert_eq!(csv(&back), text, "{kind} on {replicas} replicas, {microbatches} items");
                count += 1;
            }
        }
        assert_eq!(count, 9);
        let pipeline = Pipeline::balanced(&[2, 2], 2.0);
        let refused = |text: &str| text.parse::<ComputeTable>().unwrap().program(&pipeline, 1).unwrap_err().to_string();
        let rest = "1F0,1B0,1F2,1B2\n1F1,1B1,1F3,1B3";
        assert_eq!(
            refused(&format!("0F0,0F2,0B0,0B2\n0F1,0B1,0F3,0B3\n{rest}")),
            "table: row 2: its order differs from row 1; replicas of a rank need the same order"
        );
        assert_eq!(
            refused(&format!("0F0,0F1,0B0,0B1\n0F2,0F3,0B2,0B3\n{rest}")),
            "table: row 1: 0F1 does not belong to replica 0 of rank 0"
        );
        assert_eq!(refused("0F0,0B0"), "table: it has 1 rows, the pipeline 2 ranks of 2 workers");
    }

    #[test]
    fn a_table_that_cannot_run_is_refused() {
        let pipeline = Pipeline::balanced(&[1, 1], 1.0);
        let refused = |text: &str| text.parse::<ComputeTable>().unwrap().program(&pipeline, 1).unwrap_err().to_string();
        assert_eq!(refused("0F0,0B0\n1F0"), "table: rank 1: 1B0 is missing");
        assert_eq!(refused("0F0,0F0,0B0\n1F0,1B0"), "table: rank 0: 0F0 is a duplicate");
        assert_eq!(
            refused("0B0,0F0\n1F0,1B0"),
            "table: rank 0: 0B0 precedes the work it needs, or duplicates work that includes it"
        );
        assert_eq!(refused("0F0,0B0"), "table: it has 1 rows, the pipeline 2 ranks");
        let crossed = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1");
        assert!(crossed.contains("waits forever before 0B0"), "{crossed}");
    }
}
