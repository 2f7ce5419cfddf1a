//! How long transfers and all-reduces take in a simulation, and over which ports they go.
//!
//! Transfers of one kind from one worker to another follow each other; others disturb each other where they share a port.

use crate::plan::ports::Ports;
use crate::schedule::link_time::Link;
use crate::schedule::{Edge, Payload, Pipeline};

/// Transfer and reduce times of a pipeline, where nothing else is carried.
#[derive(Clone, PartialEq, Debug)]
pub struct Network {
    /// For each edge, microseconds of an item's activations and of its gradients.
    edges: Vec<[f64; 2]>,
    /// For each stage, microseconds of one all-reduce.
    all_reduce: Vec<f64>,
    /// What they share.
    pub ports: Ports,
}

impl Network {
    /// The times that the pipeline itself states.
    pub fn of(pipeline: &Pipeline) -> Self {
        Self {
            edges: pipeline.edges.iter().map(|edge| [edge.forward_us, edge.backward_us]).collect(),
            all_reduce: pipeline.stages.iter().map(|stage| stage.all_reduce).collect(),
            ports: pipeline.ports.clone(),
        }
    }

    /// Times from bytes, with a link for each edge and one among the replicas of each stage, and no port that any of them share.
    pub fn new(pipeline: &Pipeline, edge: impl Fn(&Edge) -> Link, replicas: impl Fn(usize) -> Link) -> Self {
        let times = |e: &Edge| [edge(e).time(e.forward_bytes), edge(e).time(e.backward_bytes)];
        let reduce = |(index, stage): (usize, &crate::schedule::StageSpec)| match stage.replicas {
            0 | 1 => 0.0,
            r => replicas(index).all_reduce(r, stage.param_bytes),
        };
        Self {
            edges: pipeline.edges.iter().map(times).collect(),
            all_reduce: pipeline.stages.iter().enumerate().map(reduce).collect(),
            ports: Ports::default(),
        }
    }

    /// Writes these times into the pipeline, so that schedules are made for them.
    pub fn apply(&self, pipeline: &mut Pipeline) {
        for (edge, &[forward, backward]) in pipeline.edges.iter_mut().zip(&self.edges) {
            (edge.forward_us, edge.backward_us) = (forward, backward);
        }
        for (stage, &time) in pipeline.stages.iter_mut().zip(&self.all_reduce) {
            stage.all_reduce = time;
        }
    }

    /// Microseconds of one transfer over an edge; an edge it does not know takes none.
    pub fn transfer(&self, edge: usize, kind: Payload) -> f64 {
        let way = usize::from(kind == Payload::Gradient);
        self.edges.get(edge).map_or(0.0, |times| times[way])
    }

    /// Microseconds of one all-reduce of a stage.
    pub fn all_reduce(&self, stage: usize) -> f64 {
        self.all_reduce.get(stage).copied().unwrap_or(0.0)
    }
}
