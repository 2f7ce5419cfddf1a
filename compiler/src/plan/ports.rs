//! Where the transfers of a pipeline leave and enter its devices.
//!
//! A device has a port at each level of the cluster, which sends and receives at the same time; at a shared level all devices of a unit
//! have one port together. A message takes the port of its sender and that of its reader at the level that joins their stages, a part of
//! an all-reduce those of all replicas at its level. What goes over one port at a time shares it. These are the ports that
//! cost model `pipec` sums up, see `plan::links`.

use crate::cluster::Level;
use crate::plan::Stage;
use crate::plan::links::Ring;
use std::collections::BTreeMap;

/// One direction of one port.
pub type Port = u32;

/// The ports of a pipeline's workers; of a pipeline without a cluster nothing is known, and all its transfers go apart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ports {
    /// For each level, the number of each worker's port.
    of: Vec<Vec<u32>>,
    /// The level that joins the stages of each edge; none where they are on the same workers.
    edges: Vec<Option<usize>>,
    /// The parts of each stage's all-reduce.
    reductions: Vec<Vec<AllReducePart>>,
}

/// What an all-reduce does at one level.
#[derive(Clone, Debug, PartialEq)]
pub struct AllReducePart {
    /// Of the time of the whole.
    pub share: f64,
    /// Over which ports.
    pub ports: Vec<Port>,
}

impl Ports {
    /// The ports of stages on ranks, whose workers are numbered in the order of the ranks, given for each edge the level that it takes and for
    /// each stage its rings.
    pub fn new(
        levels: &[Level],
        stages: &[Stage],
        ranks: impl Iterator<Item = usize>,
        edges: Vec<Option<usize>>,
        rings: &[Vec<Ring>],
    ) -> Ports {
        let mut devices: Vec<u32> = Vec::new();
        let mut first = Vec::with_capacity(stages.len());
        let mut begins: Vec<usize> = Vec::new();
        for (stage, rank) in stages.iter().zip(ranks) {
            if rank == begins.len() {
                begins.push(devices.len());
                devices.extend(&stage.devices);
            }
            first.push(begins[rank]);
        }
        let mut numbers: BTreeMap<(usize, u64), u32> = BTreeMap::new();
        let mut unit = 1u64;
        let of = levels.iter().enumerate().map(|(at, level)| {
            let owner = |device: u32| if level.shared { u64::from(device) / unit } else { u64::from(device) };
            let mut number = |device| {
                let next = numbers.len() as u32;
                *numbers.entry((at, owner(device))).or_insert(next)
            };
            let row = devices.iter().map(|&device| number(device)).collect();
            unit = unit.saturating_mul(u64::from(level.count.max(1)));
            row
        });
        let of: Vec<Vec<u32>> = of.collect();
        let reductions = rings.iter().enumerate().map(|(stage, rings)| {
            let whole: f64 = rings.iter().map(|ring| ring.us).sum();
            let part = |ring: &Ring| {
                let of = &of[ring.level][first[stage]..][..stages[stage].devices.len()];
                let mut ports: Vec<Port> = of.iter().flat_map(|&port| [out_of(port), into(port)]).collect();
                ports.sort_unstable();
                ports.dedup();
                AllReducePart { share: if whole > 0.0 { ring.us / whole } else { 0.0 }, ports }
            };
            rings.iter().map(part).collect()
        });
        let reductions = reductions.collect();
        Ports { of, edges, reductions }
    }

    /// The ports of a message over the edge with this number, from one worker to another.
    pub fn message(&self, edge: usize, from: usize, to: usize) -> Vec<Port> {
        let of = self.edges.get(edge).copied().flatten().and_then(|level| self.of.get(level));
        let ends = of.and_then(|of| Some((of.get(from)?, of.get(to)?)));
        ends.map_or(Vec::new(), |(&from, &to)| vec![out_of(from), into(to)])
    }

    /// The parts of a stage's all-reduce, one after the other; none where nothing is known.
    pub fn reduction(&self, stage: usize) -> &[AllReducePart] {
        self.reductions.get(stage).map_or(&[], Vec::as_slice)
    }
}

fn out_of(port: u32) -> Port {
    2 * port
}

fn into(port: u32) -> Port {
    2 * port + 1
}
