//! Ports that the transfers of a pipeline use.
//!
//! A device has a full-duplex port at each level of the cluster; at a shared level the devices of a unit share one. A
//! message uses the ports of sender and receiver at the level that joins their stages. An all-reduce uses the ports of
//! all replicas at each of its levels. Concurrent transfers share a port's bandwidth. Cost model `pipec` sums over the
//! same ports, see `plan::links`.

use crate::cluster::Level;
use crate::plan::Stage;
use crate::plan::links::Ring;
use std::collections::{BTreeMap, BTreeSet};

/// One direction of one port: even numbers send, odd numbers receive.
pub type Port = u32;

/// The ports of a pipeline's workers. Without a cluster it is empty, and transfers do not contend.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ports {
    /// For each level, the port of each worker.
    of: Vec<Vec<u32>>,
    /// The level that joins the stages of each edge; `None` if they are on the same workers.
    edges: Vec<Option<usize>>,
    reductions: Vec<Vec<AllReducePart>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct AllReducePart {
    /// Fraction of the all-reduce's time.
    pub share: f64,
    pub ports: Vec<Port>,
}

impl Ports {
    /// Assigns ports to the workers of all ranks, numbered in rank order. `edges` gives the level of each edge, `rings`
    /// the all-reduce of each stage.
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

    /// The ports of the first worker of each rank, where each rank has `replicas` workers. `None` if workers share ports.
    pub fn of_first(&self, replicas: usize) -> Option<Ports> {
        let mut is_used = BTreeSet::new();
        if self.of.iter().flatten().any(|port| !is_used.insert(*port)) {
            return None;
        }
        let of: Vec<Vec<u32>> = self.of.iter().map(|row| row.iter().step_by(replicas).copied().collect()).collect();
        let is_kept: BTreeSet<Port> = of.iter().flatten().flat_map(|&port| [out_of(port), into(port)]).collect();
        let part = |part: &AllReducePart| AllReducePart {
            ports: part.ports.iter().copied().filter(|port| is_kept.contains(port)).collect(),
            share: part.share,
        };
        let reductions = self.reductions.iter().map(|parts| parts.iter().map(part).collect()).collect();
        Some(Ports { of, edges: self.edges.clone(), reductions })
    }

    pub fn message(&self, edge: usize, from: usize, to: usize) -> Vec<Port> {
        let of = self.edges.get(edge).copied().flatten().and_then(|level| self.of.get(level));
        let ends = of.and_then(|of| Some((of.get(from)?, of.get(to)?)));
        ends.map_or(Vec::new(), |(&from, &to)| vec![out_of(from), into(to)])
    }

    /// The parts of a stage's all-reduce, run one after the other; empty without a cluster.
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
