//! Where stages may end for frameworks that keep modules whole; see [`Units`].

use crate::partition::search::fused_graph::FusedGraph;
use crate::profile::module_units::Units;
use std::collections::{BTreeMap, BTreeSet};

pub struct Borders {
    /// Units of each fused op; a fused op may span several.
    units: Vec<BTreeSet<usize>>,
}

impl Borders {
    pub fn of(joined: &FusedGraph<'_>) -> Borders {
        let ops = &joined.full.ops;
        let names = Units::of(ops.iter().map(|op| op.module.as_str()));
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut units = vec![BTreeSet::new(); joined.len()];
        for (at, op) in ops.iter().enumerate() {
            let name = names.name(&op.module);
            if !name.is_empty() {
                let next = numbers.len();
                units[joined.place(at)].insert(*numbers.entry(name).or_insert(next));
            }
        }
        Borders { units }
    }

    /// The positions in an order of fused ops where no unit is cut.
    pub fn ends(&self, order: &[u32]) -> Vec<usize> {
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for (at, &op) in order.iter().enumerate() {
            self.units[op as usize].iter().for_each(|&unit| _ = last.insert(unit, at));
        }
        let mut ends = vec![0];
        let mut open = 0;
        for (at, &op) in order.iter().enumerate() {
            open = self.units[op as usize].iter().map(|unit| last[unit]).fold(open, usize::max);
            if open <= at && at + 1 < order.len() {
                ends.push(at + 1);
            }
        }
        ends.push(order.len());
        ends
    }
}
