//! Layers prepared for the search, numbered from the end of the pipeline, because a stage's memory depends on later
//! stages.
//!
//! A layer without time and bytes, such as an attention mask, would only multiply the down-sets. It is left out of the
//! search, its precedence is kept, and finally it joins the stage of its last input.

use crate::piper::model::{Choice, Hybrid, Layer};
use std::collections::BTreeSet;

/// Largest number of new edges from removing a layer.
const MOST_PAIRS: usize = 64;

/// The layers with a cost ("units").
#[derive(Clone, Debug)]
pub struct Layers<'a> {
    pub hybrid: &'a Hybrid,
    /// Tensor-parallel degrees that some layer offers and the devices allow, ascending.
    pub degrees: Vec<u32>,
    pub layer: Vec<u32>,
    /// The unit of each layer; `None` if it is left out.
    unit: Vec<Option<u32>>,
    /// Units that read each unit; they come first in this numbering.
    pub before: Vec<Vec<u32>>,
    pub after: Vec<Vec<u32>>,
    /// Linked units of each unit, with the bytes of the link.
    pub links: Vec<Vec<(u32, f64)>>,
    /// Smallest time of each unit over its options.
    pub time: Vec<f64>,
    /// Smallest product of time and devices per replica of each unit.
    pub device_time: Vec<f64>,
    /// True if any option moves more bytes than its links.
    pub syncs: bool,
    order: Vec<u32>,
}

impl Layers<'_> {
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
        let mut unit_layers = Vec::new();
        for &at in order.iter().rev() {
            let (inputs, outputs) = (reads[at as usize].clone(), read_by[at as usize].clone());
            if inputs.len() * outputs.len() > MOST_PAIRS || !is_light(hybrid, &degrees, &syncs, at) {
                unit[at as usize] = Some(unit_layers.len() as u32);
                unit_layers.push(at);
                continue;
            }
            for &from in &inputs {
                read_by[from as usize].remove(&at);
                read_by[from as usize].extend(&outputs);
            }
            for &to in &outputs {
                reads[to as usize].remove(&at);
                reads[to as usize].extend(&inputs);
            }
        }
        let units_of = |layers: &BTreeSet<u32>| -> Vec<u32> {
            let mut units: Vec<u32> = layers.iter().filter_map(|&layer| unit[layer as usize]).collect();
            units.sort_unstable();
            units
        };
        let choices = |layer: u32| {
            let allowed = hybrid.layers[layer as usize].choices.iter();
            let allowed = allowed.filter(|(degree, _)| *degree <= hybrid.devices);
            allowed.flat_map(|(degree, choices)| choices.iter().map(move |choice| (f64::from(*degree), choice.time)))
        };
        let links = |&layer: &u32| {
            let ends = hybrid.layers[layer as usize].links.iter().map(|&link| &hybrid.links[link as usize]);
            let other_unit = |from: u32, to: u32| unit[if from == layer { to } else { from } as usize];
            ends.filter_map(|link| other_unit(link.from, link.to).map(|unit| (unit, link.bytes))).collect()
        };
        Layers {
            hybrid,
            before: unit_layers.iter().map(|&layer| units_of(&read_by[layer as usize])).collect(),
            after: unit_layers.iter().map(|&layer| units_of(&reads[layer as usize])).collect(),
            links: unit_layers.iter().map(links).collect(),
            time: unit_layers
                .iter()
                .map(|&layer| choices(layer).map(|(_, time)| time).fold(f64::INFINITY, f64::min))
                .collect(),
            device_time: unit_layers
                .iter()
                .map(|&layer| choices(layer).map(|(degree, time)| degree * time).fold(f64::INFINITY, f64::min))
                .collect(),
            syncs: syncs.contains(&true),
            degrees,
            layer: unit_layers,
            unit,
            order,
        }
    }

    /// All layers in topological order.
    pub fn in_order(&self) -> &[u32] {
        &self.order
    }

    /// The unit of a layer; `None` if it is left out.
    pub fn unit_of(&self, layer: u32) -> Option<u32> {
        self.unit[layer as usize]
    }

    pub fn len(&self) -> usize {
        self.layer.len()
    }

    pub fn is_empty(&self) -> bool {
        self.layer.is_empty()
    }

    pub fn choices(&self, unit: u32, degree: u32) -> &[Choice] {
        self.hybrid.layers[self.layer[unit as usize] as usize].at(degree)
    }

    /// Additional bytes that an option moves on links that leave the stage; `contains` tells the units of the stage.
    pub fn sync_bytes(&self, unit: u32, choice: &Choice, contains: &dyn Fn(u32) -> bool) -> f64 {
        let at = self.layer[unit as usize];
        let mut bytes = 0.0;
        for (&link, sync) in self.hybrid.layers[at as usize].links.iter().zip(&choice.sync) {
            let link = &self.hybrid.links[link as usize];
            let neighbour = if link.from == at { link.to } else { link.from };
            if self.unit[neighbour as usize].is_none_or(|unit| !contains(unit)) {
                bytes += sync;
            }
        }
        bytes
    }

    /// The stage of every layer; a layer without cost joins its last input.
    pub fn stages_of_layers(&self, stage_of_unit: &[u32]) -> Vec<u32> {
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

/// Returns whether a layer can be left out: at every degree it has an option without cost, and its links carry no
/// bytes.
fn is_light(hybrid: &Hybrid, degrees: &[u32], syncs: &[bool], at: u32) -> bool {
    let layer: &Layer = &hybrid.layers[at as usize];
    let is_free = |link: u32| {
        let link = &hybrid.links[link as usize];
        link.bytes == 0.0 && !syncs[link.from as usize] && !syncs[link.to as usize]
    };
    degrees.iter().all(|&degree| layer.at(degree).iter().any(takes_nothing))
        && layer.links.iter().all(|&link| is_free(link))
}

/// Returns whether some option of a layer moves more bytes than its links.
fn syncs(layer: &Layer) -> bool {
    let mut choices = layer.choices.iter().flat_map(|(_, choices)| choices);
    choices.any(|choice| choice.sync.iter().any(|&bytes| bytes > 0.0))
}

pub fn takes_nothing(choice: &Choice) -> bool {
    [choice.time, choice.weight_bytes, choice.bytes_in_flight, choice.bytes_standing].iter().all(|&part| part == 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piper::model::Link;

    #[test]
    fn what_weighs_nothing_is_left_out_and_keeps_its_order() {
        let layer = |time: f64, links: &[u32]| {
            let choice = Choice { time, sync: vec![0.0; links.len()], ..Choice::default() };
            Layer { choices: vec![(1, vec![choice])], links: links.to_vec(), ..Layer::default() }
        };
        // 0 -> 1 -> 2, layer 1 has no cost; and 3 -> 2.
        let layers = vec![layer(1.0, &[0]), layer(0.0, &[0, 1]), layer(2.0, &[1, 2]), layer(4.0, &[2])];
        let link = |from: u32, to: u32| Link { from, to, bytes: 0.0 };
        let hybrid =
            Hybrid { layers, links: vec![link(0, 1), link(1, 2), link(3, 2)], devices: 2, ..Hybrid::default() };
        let layers = Layers::of(&hybrid);
        assert_eq!(layers.layer, [2, 3, 0]);
        assert_eq!((&layers.before[2], &layers.after[0]), (&vec![0], &vec![1, 2]));
        assert_eq!(layers.stages_of_layers(&[2, 0, 1]), [1, 1, 2, 0]);
    }
}
