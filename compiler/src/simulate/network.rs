//! Transfer and all-reduce times of a simulation, and their ports.
//!
//! Transfers of one channel are serialized; others contend where they share a port.

use crate::plan::ports::Ports;
use crate::schedule::link_time::Link;
use crate::schedule::{Edge, Payload, Pipeline};

#[derive(Clone, PartialEq, Debug)]
pub struct Network {
    /// Per edge, microseconds per item of activations and of gradients.
    edges: Vec<[f64; 2]>,
    /// Per stage, microseconds of one all-reduce.
    all_reduce: Vec<f64>,
    pub ports: Ports,
}

impl Network {
    pub fn of(pipeline: &Pipeline) -> Self {
        Self {
            edges: pipeline.edges.iter().map(|edge| [edge.forward_us, edge.backward_us]).collect(),
            all_reduce: pipeline.stages.iter().map(|stage| stage.all_reduce).collect(),
            ports: pipeline.ports.clone(),
        }
    }

    /// Times from bytes: one link per edge, one among the replicas of each stage, no contention.
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

    /// Sets these times in the pipeline, so that schedules use them.
    pub fn apply(&self, pipeline: &mut Pipeline) {
        for (edge, &[forward, backward]) in pipeline.edges.iter_mut().zip(&self.edges) {
            (edge.forward_us, edge.backward_us) = (forward, backward);
        }
        for (stage, &time) in pipeline.stages.iter_mut().zip(&self.all_reduce) {
            stage.all_reduce = time;
        }
    }

    /// Microseconds of one transfer; 0 for an unknown edge.
    pub fn transfer(&self, edge: usize, kind: Payload) -> f64 {
        let way = usize::from(kind == Payload::Gradient);
        self.edges.get(edge).map_or(0.0, |times| times[way])
    }

    pub fn all_reduce(&self, stage: usize) -> f64 {
        self.all_reduce.get(stage).copied().unwrap_or(0.0)
    }
}
