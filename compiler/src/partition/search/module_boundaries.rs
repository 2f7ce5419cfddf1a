//! Where stages may end for frameworks that keep modules whole; see [`Units`].

use crate::partition::search::fused_graph::FusedGraph;
use crate::plan::problem::{Problem, Target};
use crate::profile::module_units::{Units, numbered};
use std::collections::{BTreeMap, BTreeSet};

pub struct Borders {
    /// Units of each fused op; a fused op may span several.
    units: Vec<BTreeSet<usize>>,
}

impl Borders {
    /// `None` if stages may end between any two ops.
    pub fn of(problem: &Problem, joined: &FusedGraph<'_>) -> Option<Borders> {
        let target = problem.constraints.target.filter(|target| target.keeps_modules())?;
        let ops = &joined.full.ops;
        let units = Units::of(ops.iter().map(|op| op.module.as_str()));
        let mut names: Vec<String> = ops.iter().map(|op| units.name(&op.module)).collect();
        if target == Target::Megatron {
            join_ends(&mut names);
        }
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut units = vec![BTreeSet::new(); joined.leaders.len()];
        for (at, name) in names.into_iter().enumerate().filter(|(_, name)| !name.is_empty()) {
            let next = numbers.len();
            units[joined.place(at)].insert(*numbers.entry(name).or_insert(next));
        }
        Some(Borders { units })
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

/// Makes one unit of the modules before the numbered layers, and one of those after them: Megatron keeps the former in
/// the first stage, and the final norm and the head in the last. It takes no model with several lists of layers.
fn join_ends(names: &mut [String]) {
    let lists: BTreeSet<&str> = names.iter().filter_map(|name| numbered(name)).map(|(list, _)| list).collect();
    let is_layer = |name: &String| numbered(name).is_some();
    let layers = names.iter().position(is_layer).zip(names.iter().rposition(is_layer));
    let Some((first, last)) = layers.filter(|_| lists.len() == 1) else { return };
    let [before, inside, after] = [&names[..first], &names[first..=last], &names[last + 1..]]
        .map(|names| names.iter().cloned().collect::<BTreeSet<String>>());
    for name in names.iter_mut().filter(|name| !name.is_empty() && !inside.contains(*name)) {
        match (before.contains(name), after.contains(name)) {
            (true, false) => *name = "first".to_string(),
            (false, true) => *name = "last".to_string(),
            // A module that is used at both ends stays as it is.
            _ => {}
        }
    }
}
