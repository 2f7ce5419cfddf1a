//! A run as a trace: one row of spans per worker and link, and one memory counter per worker.
//!
//! Simulation and training use the same row names, so that their traces can be compared. `chrome` and `perfetto` are
//! the file formats; `encode` selects one by file name.

pub mod chrome;
pub mod encode;
pub mod perfetto;

use crate::simulate::{Timeline, Track};

#[derive(Clone, Debug, PartialEq)]
pub struct Counter {
    /// `memory 1.0` for the memory of worker 1.0.
    pub name: String,
    /// Time in microseconds, and the bytes from then on.
    pub points: Vec<(f64, u64)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Trace<'a> {
    /// `simulation` or `training`.
    pub run: &'static str,
    /// Workers first, then links.
    pub rows: Vec<&'a Track>,
    pub counters: Vec<Counter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// JSON for chrome://tracing and Perfetto.
    Chrome,
    Perfetto,
}

impl Form {
    /// Perfetto for `.pftrace` and `.perfetto-trace`, else JSON.
    pub fn of(name: &str) -> Form {
        let is_perfetto = name.ends_with(".pftrace") || name.ends_with(".perfetto-trace");
        if is_perfetto { Form::Perfetto } else { Form::Chrome }
    }
}

impl<'a> Trace<'a> {
    /// The trace of a simulation, with worker memory.
    pub fn simulation(timeline: &'a Timeline) -> Trace<'a> {
        let with_memory = timeline.workers.iter().zip(&timeline.memory).filter(|(_, points)| !points.is_empty());
        let counter = |(worker, points): (&Track, &Vec<(f64, u64)>)| Counter {
            name: format!("memory {}", worker.name),
            points: points.clone(),
        };
        let counters = with_memory.map(counter).collect();
        Trace { run: "simulation", rows: timeline.workers.iter().chain(&timeline.links).collect(), counters }
    }

    pub fn training(tracks: &'a [Track]) -> Trace<'a> {
        Trace { run: "training", rows: tracks.iter().collect(), counters: Vec::new() }
    }
}
