//! Layers with choices: the problem of Tarnawski, Narayanan and Phanishayee, "Piper: Multidimensional Planner for DNN
//! Parallelization" (NeurIPS 2021, section 3).
//!
//! A pipeline of contiguous stages trains on batches of N micro-batches under 1F1B. Stage S has d replicas of t devices each: replicas
//! split the micro-batches, the devices of a replica split every layer. A layer offers for each t some choices, such as with
//! and without recomputation, and takes one of those for the t of its stage. A stage spends on each micro-batch
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
//! The largest time(S) is minimised: time per sample, in the unit of the file. At most k devices are used, each d divides N, and the d of
//! all stages sum up to N at most, since no more micro-batches than a batch has can be in flight.
//!
//! Where the paper leaves room, its released planner was read: a transfer is charged to both of its ends, and twice, for the
//! activation and its gradient; the factor 4 of data parallelism is that of PipeDream's planner; and a file's bandwidth is
//! taken against its times as it stands, whatever their unit.

/// The most layers of an instance.
pub const MAX_LAYERS: usize = 10_000;

/// The most degrees of tensor parallelism in an instance, and the most choices that a layer has for one of them.
pub const MAX_CHOICES: usize = 32;

/// One way of running a layer.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Choice {
    /// What the file calls it.
    pub name: String,
    /// Forward and backward time of one micro-batch.
    pub time: f64,
    /// Weights that replicas average, on one device.
    pub weight_bytes: f64,
    /// Bytes held for each micro-batch in flight.
    pub bytes_in_flight: f64,
    /// Bytes held whatever is in flight.
    pub bytes_standing: f64,
    /// For each of the layer's links, bytes that tensor parallelism moves besides where the link leaves the stage.
    pub sync: Vec<f64>,
    /// Whether forward runs again before backward.
    pub recomputes: bool,
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Layer {
    /// Its id in the file.
    pub name: String,
    /// What the file calls it.
    pub title: String,
    /// Choices by degree of tensor parallelism, ascending; none is empty.
    pub choices: Vec<(u32, Vec<Choice>)>,
    /// The links that end or begin here, ascending.
    pub links: Vec<u32>,
}

/// A tensor from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Who makes it.
    pub from: u32,
    /// Who reads it.
    pub to: u32,
    /// Its size for one micro-batch.
    pub bytes: f64,
}

/// An instance. Its links make no ring.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Hybrid {
    /// Layers, in the order of the file.
    pub layers: Vec<Layer>,
    /// Links, in the order of the file.
    pub links: Vec<Link>,
    /// How many devices there are.
    pub devices: u32,
    /// Bytes that one device holds.
    pub bytes_per_device: f64,
    /// What one device sends or receives in a unit of time.
    pub bandwidth: f64,
    /// Micro-batches of a batch.
    pub microbatches: u32,
}

impl Layer {
    /// The choices at a degree of tensor parallelism.
    pub fn at(&self, degree: u32) -> &[Choice] {
        let found = self.choices.iter().find(|(known, _)| *known == degree);
        found.map_or(&[], |(_, choices)| choices)
    }
}

impl Hybrid {
    /// The most replicas of all stages together.
    pub fn most_replicas(&self) -> u32 {
        self.devices.min(self.microbatches)
    }

    /// The replica counts that a stage may have, ascending.
    pub fn replica_counts(&self) -> Vec<u32> {
        (1..=self.most_replicas()).filter(|&count| self.microbatches.is_multiple_of(count)).collect()
    }

    /// The layers in an order that all links follow; fewer than all where links make a ring.
    pub fn order(&self) -> Vec<u32> {
        let mut missing = vec![0usize; self.layers.len()];
        self.links.iter().for_each(|link| missing[link.to as usize] += 1);
        // The smallest id of those that may come next, so that an order in the file is kept.
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

    /// What no plan can beat: the work spread over all replicas, over all devices, and the slowest layer in a stage of its own
    /// without transfers.
    pub fn lower_bound(&self) -> f64 {
        let counts = self.replica_counts();
        let (mut time, mut device_time, mut worst) = (0.0f64, 0.0f64, 0.0f64);
        for layer in &self.layers {
            let choices = || {
                let here = layer.choices.iter().filter(|(degree, _)| *degree <= self.devices);
                here.flat_map(|(degree, choices)| choices.iter().map(move |choice| (*degree, choice)))
            };
            time += choices().map(|(_, choice)| choice.time).fold(f64::INFINITY, f64::min);
            device_time +=
                choices().map(|(degree, choice)| choice.time * f64::from(degree)).fold(f64::INFINITY, f64::min);
            let alone = |(degree, choice): (u32, &Choice)| {
                let fits =
                    counts.iter().filter(|&&count| u64::from(count) * u64::from(degree) <= u64::from(self.devices));
                let spread = |count: f64| {
                    let shared = 4.0 * (count - 1.0) / count * choice.weight_bytes;
                    choice.time / count + shared / (f64::from(self.microbatches) * self.bandwidth)
                };
                fits.map(|&count| spread(f64::from(count))).fold(f64::INFINITY, f64::min)
            };
            worst = worst.max(choices().map(alone).fold(f64::INFINITY, f64::min));
        }
        worst.max(time / f64::from(self.most_replicas().max(1))).max(device_time / f64::from(self.devices.max(1)))
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
