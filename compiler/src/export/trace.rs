//! A run as a trace: a row of spans for each worker and each link, and a curve for what each worker holds.
//!
//! Simulation and training write rows of the same names, so the two files can be laid above each other. `chrome` and `perfetto` are
//! the two ways to write it, `encode` chooses by the name of the file.

pub mod chrome;
pub mod encode;
pub mod perfetto;

use crate::simulate::{Timeline, Track};

/// Something that changes its value at moments.
#[derive(Clone, Debug, PartialEq)]
pub struct Counter {
    /// `memory 1.0` for what worker 1.0 holds.
    pub name: String,
    /// From each moment on, in microseconds, so many bytes.
    pub points: Vec<(f64, u64)>,
}

/// What a trace shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace<'a> {
    /// Which run it is: `simulation` or `training`.
    pub run: &'static str,
    /// Rows in their order: workers first, then links.
    pub rows: Vec<&'a Track>,
    /// Curves below the rows.
    pub counters: Vec<Counter>,
}

/// The forms of a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// JSON as chrome://tracing and Perfetto read it.
    Chrome,
    /// Perfetto's own protobuf.
    Perfetto,
}

impl Form {
    /// The form of a file of that name: Perfetto's for `.pftrace` and `.perfetto-trace`, else JSON.
    pub fn of(name: &str) -> Form {
        let is_perfetto = name.ends_with(".pftrace") || name.ends_with(".perfetto-trace");
        if is_perfetto { Form::Perfetto } else { Form::Chrome }
    }
}

impl<'a> Trace<'a> {
    /// A simulation, with what its workers hold.
    pub fn simulation(timeline: &'a Timeline) -> Trace<'a> {
        let held = timeline.workers.iter().zip(&timeline.memory).filter(|(_, points)| !points.is_empty());
        let counter = |(worker, points): (&Track, &Vec<(f64, u64)>)| Counter {
            name: format!("memory {}", worker.name),
            points: points.clone(),
        };
        let counters = held.map(counter).collect();
        Trace { run: "simulation", rows: timeline.workers.iter().chain(&timeline.links).collect(), counters }
    }

    /// A training run.
    pub fn training(tracks: &'a [Track]) -> Trace<'a> {
        Trace { run: "training", rows: tracks.iter().collect(), counters: Vec::new() }
    }
}
