//! Layers with choices: the planning problem of Piper (Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional
//! Planner for DNN Parallelization", NeurIPS 2021, section 3).
//!
//! A pipeline of contiguous stages trains with 1F1B on batches of N micro-batches. Stage S has d replicas of t devices
//! each (data and tensor parallelism). For each t a layer offers some choices, for example with and without
//! recomputation, and one is selected. The time of a stage per micro-batch and its memory per device are:
//!
//! ```text
//! time(S) = sum of p(v) / d  over v in S
//!         + sum of 2 (c(e) + s(v, e)) / (d B)  over v in S, over the edges e of v that end or begin outside S
//!         + sum of 4 (d - 1) / d * w(v) / (N B)  over v in S
//! memory(S) = sum of a(v) y + b(v)  over v in S,  y = ceil( D / d ),  D = the d of S and of all stages after it, summed
//! ```
//!
//! | paper           | here                     | unit                               |
//! | ---             | ---                      | ---                                |
//! | p, w, a, b      | fields of [`Choice`]     | the file's time, bytes             |
//! | c^fw, c^bw as s | `Choice::sync`           | bytes                              |
//! | c               | `Link::bytes`            | bytes                              |
//! | B               | `Hybrid::bandwidth`      | bytes per unit of the file's time  |
//! | N               | `Hybrid::microbatches`   |                                    |
//! | k               | `Hybrid::devices`        |                                    |
//!
//! The objective is to minimise the largest time(S), which is the time per sample in the unit of the file. Constraints:
//! at most k devices in total, and each d divides N. The sum of d over all stages is at most N, because at most N
//! micro-batches are in flight.
//!
//! Details that the paper leaves open follow its released planner. A transfer is charged to both ends, and twice
//! (activation and gradient). The factor 4 for data parallelism is that of PipeDream's planner. The bandwidth of a file
//! is per unit of its times.

/// Largest number of layers.
pub const MAX_LAYERS: usize = 10_000;

/// Largest number of tensor-parallel degrees, and of choices of a layer per degree.
pub const MAX_CHOICES: usize = 32;

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Choice {
    pub name: String,
    /// Forward plus backward time of one micro-batch.
    pub time: f64,
    /// Weights per device, all-reduced between replicas.
    pub weight_bytes: f64,
    /// Bytes per micro-batch in flight.
    pub bytes_in_flight: f64,
    /// Bytes independent of the micro-batches in flight.
    pub bytes_standing: f64,
    /// For each link of the layer: additional bytes moved by tensor parallelism if the link leaves the stage.
    pub sync: Vec<f64>,
    /// Recomputes forward before backward.
    pub recomputes: bool,
}

#[derive(Clone, Debug, PartialEq, Default)]
pub struct Layer {
    /// Id in the file.
    pub name: String,
    /// Display name in the file.
    pub title: String,
    /// By tensor-parallel degree, ascending; no list is empty.
    pub choices: Vec<(u32, Vec<Choice>)>,
    /// Indices of incident links, ascending.
    pub links: Vec<u32>,
}

/// A tensor between two layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub from: u32,
    pub to: u32,
    /// Per micro-batch.
    pub bytes: f64,
}

/// An instance. Its links are acyclic.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Hybrid {
    /// In file order.
    pub layers: Vec<Layer>,
    /// In file order.
    pub links: Vec<Link>,
    pub devices: u32,
    pub bytes_per_device: f64,
    /// Bytes per unit of time that a device sends or receives.
    pub bandwidth: f64,
    /// Micro-batches per batch.
    pub microbatches: u32,
}

impl Layer {
    /// The choices at a tensor-parallel degree; empty if it is not offered.
    pub fn at(&self, degree: u32) -> &[Choice] {
        let entry = self.choices.iter().find(|(known, _)| *known == degree);
        entry.map_or(&[], |(_, choices)| choices)
    }
}

impl Hybrid {
    /// Largest sum of replicas over all stages.
    pub fn most_replicas(&self) -> u32 {
        self.devices.min(self.microbatches)
    }

    /// Valid replica counts of a stage, ascending.
    pub fn replica_counts(&self) -> Vec<u32> {
        (1..=self.most_replicas()).filter(|&count| self.microbatches.is_multiple_of(count)).collect()
    }

    /// The layers in topological order; incomplete if the links have a cycle.
    pub fn order(&self) -> Vec<u32> {
        let mut missing = vec![0usize; self.layers.len()];
        self.links.iter().for_each(|link| missing[link.to as usize] += 1);
        // Smallest id first, so that the file order is kept if possible.
        let mut ready: std::collections::BTreeSet<u32> =
            (0..self.layers.len() as u32).filter(|&layer| missing[layer as usize] == 0).collect();
        let mut order = Vec::with_capacity(self.layers.len());
        while let Some(layer) = ready.pop_first() {
            order.push(layer);
            for &link in &self.layers[layer as usize].links {
                let link = &self.links[link as usize];
                if link.from == layer {
                    missing[link.to as usize] -= 1;
                    if missing[link.to as usize] == 0 {
                        ready.insert(link.to);
                    }
                }
            }
        }
        order
    }

    /// Lower bound on every plan: work spread over all replicas, work spread over all devices, and the slowest layer as
    /// a stage of its own without transfers.
    pub fn lower_bound(&self) -> f64 {
        let counts = self.replica_counts();
        let (mut time, mut device_time, mut slowest) = (0.0f64, 0.0f64, 0.0f64);
        for layer in &self.layers {
            let choices = || {
                let allowed = layer.choices.iter().filter(|(degree, _)| *degree <= self.devices);
                allowed.flat_map(|(degree, choices)| choices.iter().map(move |choice| (*degree, choice)))
            };
            time += choices().map(|(_, choice)| choice.time).fold(f64::INFINITY, f64::min);
            device_time +=
                choices().map(|(degree, choice)| choice.time * f64::from(degree)).fold(f64::INFINITY, f64::min);
            let best_time = |(degree, choice): (u32, &Choice)| {
                let feasible_counts =
                    counts.iter().filter(|&&count| u64::from(count) * u64::from(degree) <= u64::from(self.devices));
                let replicated_time = |count: f64| {
                    let sync = 4.0 * (count - 1.0) / count * choice.weight_bytes;
                    choice.time / count + sync / (f64::from(self.microbatches) * self.bandwidth)
                };
                feasible_counts.map(|&count| replicated_time(f64::from(count))).fold(f64::INFINITY, f64::min)
            };
            slowest = slowest.max(choices().map(best_time).fold(f64::INFINITY, f64::min));
        }
        slowest.max(time / f64::from(self.most_replicas().max(1))).max(device_time / f64::from(self.devices.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_knows_replicas_devices_and_the_slowest_layer() {
        let layer = |time: f64, degree: u32| Layer {
            choices: vec![(degree, vec![Choice { time, ..Choice::default() }])],
            ..Layer::default()
        };
        let layers = vec![layer(12.0, 1), layer(4.0, 2)];
        let hybrid = Hybrid { layers, devices: 4, microbatches: 2, bandwidth: 1.0, ..Hybrid::default() };
        assert_eq!(hybrid.replica_counts(), [1, 2]);
        assert_eq!(hybrid.lower_bound(), 8.0);
        assert_eq!(Hybrid { microbatches: 1, ..hybrid.clone() }.lower_bound(), 16.0);
        assert_eq!(Hybrid { microbatches: 4, devices: 5, ..hybrid }.lower_bound(), 4.0);
    }
}
