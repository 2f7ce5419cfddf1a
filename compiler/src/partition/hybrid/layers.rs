//! Layers as the search walks them: from the end of the pipeline, since what a stage holds follows from the stages after it.
//!
//! A layer that weighs nothing, such as the mask of an attention, would only multiply the closed sets: it is left out, those before
//! it come before those after it, and at the end it stands where its last input does.

use crate::profile::hybrid::{Choice, Hybrid, Layer};
use std::collections::BTreeSet;

/// Pairs of neighbours that leaving a layer out may make.
const MOST_PAIRS: usize = 64;

/// The layers that weigh something, numbered from the end.
#[derive(Clone, Debug)]
pub struct Layers<'a> {
    /// The instance.
    pub hybrid: &'a Hybrid,
    /// Degrees of tensor parallelism that some layer has and the devices allow, ascending.
    pub degrees: Vec<u32>,
    /// The layer of each unit.
    pub layer: Vec<u32>,
    /// The unit of each layer, or none where it is left out.
    unit: Vec<Option<u32>>,
    /// What reads each unit, and so comes before it here.
    pub before: Vec<Vec<u32>>,
    /// What each unit reads.
    pub after: Vec<Vec<u32>>,
    /// Neighbours of each unit and the bytes between.
    pub links: Vec<Vec<(u32, f64)>>,
    /// Least time of each unit over its choices.
    pub time: Vec<f64>,
    /// Least time of each unit times the devices of a replica.
    pub device_time: Vec<f64>,
    /// Whether any choice moves bytes besides those of the links.
    pub syncs: bool,
    order: Vec<u32>,
}

impl Layers<'_> {
    /// The layers of an instance.
    pub fn of(hybrid: &Hybrid) -> Layers<'_> {
        let degrees: BTreeSet<u32> =
            hybrid.layers.iter().flat_map(|layer| layer.choices.iter().map(|(degree, _)| *degree)).collect();
        let degrees: Vec<u32> = degrees.into_iter().filter(|&degree| degree <= hybrid.devices).collect();
        let order = hybrid.order();
        let mut reads: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); hybrid.layers.len()];
        let mut read_by = reads.clone();
        for link in &hybrid.links {
            reads[link.to as usize].insert(link.from);
            read_by[link.from as usize].insert(link.to);
        }
        let syncs: Vec<bool> = hybrid.layers.iter().map(syncs).collect();
        let mut unit: Vec<Option<u32>> = vec![None; hybrid.layers.len()];
        let mut kept = Vec::new();
        for &at in order.iter().rev() {
            let (above, below) = (reads[at as usize].clone(), read_by[at as usize].clone());
            if above.len() * below.len() > MOST_PAIRS || !is_light(hybrid, &degrees, &syncs, at) {
                unit[at as usize] = Some(kept.len() as u32);
                kept.push(at);
                continue;
            }
            for &from in &above {
                read_by[from as usize].remove(&at);
                read_by[from as usize].extend(&below);
            }
            for &to in &below {
                reads[to as usize].remove(&at);
                reads[to as usize].extend(&above);
            }
        }
        let units_of = |layers: &BTreeSet<u32>| -> Vec<u32> {
            let mut units: Vec<u32> = layers.iter().filter_map(|&layer| unit[layer as usize]).collect();
            units.sort_unstable();
            units
        };
        let choices = |layer: u32| {
            let offered = hybrid.layers[layer as usize].choices.iter();
            let offered = offered.filter(|(degree, _)| *degree <= hybrid.devices);
            offered.flat_map(|(degree, choices)| choices.iter().map(move |choice| (f64::from(*degree), choice.time)))
        };
        let links = |&layer: &u32| {
            let ends = hybrid.layers[layer as usize].links.iter().map(|&link| &hybrid.links[link as usize]);
            let other = |from: u32, to: u32| unit[if from == layer { to } else { from } as usize];
            ends.filter_map(|link| other(link.from, link.to).map(|unit| (unit, link.bytes))).collect()
        };
        Layers {
            hybrid,
            before: kept.iter().map(|&layer| units_of(&read_by[layer as usize])).collect(),
            after: kept.iter().map(|&layer| units_of(&reads[layer as usize])).collect(),
            links: kept.iter().map(links).collect(),
            time: kept
                .iter()
                .map(|&layer| choices(layer).map(|(_, time)| time).fold(f64::INFINITY, f64::min))
                .collect(),
            device_time: kept
                .iter()
                .map(|&layer| choices(layer).map(|(degree, time)| degree * time).fold(f64::INFINITY, f64::min))
                .collect(),
            syncs: syncs.contains(&true),
            degrees,
            layer: kept,
            unit,
            order,
        }
    }

    /// All layers in an order that links follow.
    pub fn in_order(&self) -> &[u32] {
        &self.order
    }

    /// The unit of a layer, unless it was left out.
    pub fn unit_of(&self, layer: u32) -> Option<u32> {
        self.unit[layer as usize]
    }

    /// How many units there are.
    pub fn len(&self) -> usize {
        self.layer.len()
    }

    /// Whether every layer weighs nothing.
    pub fn is_empty(&self) -> bool {
        self.layer.is_empty()
    }

    /// The choices of a unit at a degree of tensor parallelism.
    pub fn choices(&self, unit: u32, degree: u32) -> &[Choice] {
        self.hybrid.layers[self.layer[unit as usize] as usize].at(degree)
    }

    /// What a choice of a unit moves besides where its links leave the stage, whose units `holds` tells.
    pub fn synced(&self, unit: u32, choice: &Choice, holds: &dyn Fn(u32) -> bool) -> f64 {
        let at = self.layer[unit as usize];
        let mut bytes = 0.0;
        for (&link, sync) in self.hybrid.layers[at as usize].links.iter().zip(&choice.sync) {
            let link = &self.hybrid.links[link as usize];
            let other = if link.from == at { link.to } else { link.from };
            if self.unit[other as usize].is_none_or(|unit| !holds(unit)) {
                bytes += sync;
            }
        }
        bytes
    }

    /// The stage of every layer, from those of the units: what weighs nothing joins its last input.
    pub fn spread(&self, stage_of_unit: &[u32]) -> Vec<u32> {
        let mut stage_of = vec![0; self.hybrid.layers.len()];
        for &at in &self.order {
            let layer = &self.hybrid.layers[at as usize];
            let inputs = layer.links.iter().map(|&link| &self.hybrid.links[link as usize]).filter(|link| link.to == at);
            let last = inputs.map(|link| stage_of[link.from as usize]).max().unwrap_or(0);
            stage_of[at as usize] = self.unit[at as usize].map_or(last, |unit| stage_of_unit[unit as usize]);
        }
        stage_of
    }
}

/// Whether a layer may stand anywhere that its links allow without a difference: at every degree it has a choice that takes
/// nothing, and so have its links.
fn is_light(hybrid: &Hybrid, degrees: &[u32], syncs: &[bool], at: u32) -> bool {
    let layer: &Layer = &hybrid.layers[at as usize];
    let is_free = |link: u32| {
        let link = &hybrid.links[link as usize];
        link.bytes == 0.0 && !syncs[link.from as usize] && !syncs[link.to as usize]
    };
    degrees.iter().all(|&degree| layer.at(degree).iter().any(takes_nothing))
        && layer.links.iter().all(|&link| is_free(link))
}

/// Whether some choice of a layer moves bytes besides those of the links.
fn syncs(layer: &Layer) -> bool {
    let mut choices = layer.choices.iter().flat_map(|(_, choices)| choices);
    choices.any(|choice| choice.sync.iter().any(|&bytes| bytes > 0.0))
}

/// Whether a choice spends no time and holds no bytes.
pub fn takes_nothing(choice: &Choice) -> bool {
    [choice.time, choice.weight_bytes, choice.bytes_in_flight, choice.bytes_standing].iter().all(|&part| part == 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::hybrid::Link;

    #[test]
    fn what_weighs_nothing_is_left_out_and_keeps_its_order() {
        let layer = |time: f64, links: &[u32]| {
            let choice = Choice { time, sync: vec![0.0; links.len()], ..Choice::default() };
            Layer { choices: vec![(1, vec![choice])], links: links.to_vec(), ..Layer::default() }
        };
        // 0 -> 1 -> 2, where 1 weighs nothing, and 3 -> 2.
        let layers = vec![layer(1.0, &[0]), layer(0.0, &[0, 1]), layer(2.0, &[1, 2]), layer(4.0, &[2])];
        let link = |from: u32, to: u32| Link { from, to, bytes: 0.0 };
        let hybrid =
            Hybrid { layers, links: vec![link(0, 1), link(1, 2), link(3, 2)], devices: 2, ..Hybrid::default() };
        let layers = Layers::of(&hybrid);
        assert_eq!(layers.layer, [2, 3, 0]);
        assert_eq!((&layers.before[2], &layers.after[0]), (&vec![0], &vec![1, 2]));
        assert_eq!(layers.spread(&[2, 0, 1]), [1, 1, 2, 0]);
    }
}
