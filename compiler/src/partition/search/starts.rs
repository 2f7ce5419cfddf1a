//! Where the climb of `improve` starts: layouts of known plans, and pipelines of balanced stages.

use crate::partition::search::context::SearchContext;
use crate::partition::search::downsets::DownSets;
use crate::partition::search::evaluate::Stages;
use crate::partition::search::module_boundaries::Borders;
use crate::partition::search::result::PlanCandidate;
use crate::partition::search::{build_plan, linear_order, linear_search};
use crate::plan::problem::{CostModel, Problem};

/// The largest number of devices on which all replicas of stages are starts.
const FEW: u32 = 8;

/// The largest number of devices on which pipelines on fewer devices are starts.
const SEVERAL: u32 = 32;

/// The largest number of stages of a start.
const MOST_STAGES: u32 = 64;

/// A topological order, and the positions at which it may be cut.
pub struct Order {
    pub ops: Vec<u32>,
    pub cuts: Vec<usize>,
    pub space: DownSets,
}

/// Stages along the order of this number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub order: usize,
    pub stages: Stages,
}

/// The layouts from which the climb may start.
pub struct Starts<'a> {
    context: &'a SearchContext<'a>,
    /// Orders of the whole graph.
    searched: Vec<Vec<u32>>,
    /// The place of each op in the last of them.
    rank: Vec<usize>,
    pub orders: Vec<Order>,
    pub layouts: Vec<Layout>,
}

impl<'a> Starts<'a> {
    pub fn new(context: &'a SearchContext<'a>) -> Starts<'a> {
        let searched = linear_search::orders(&context.problem.graph);
        let mut rank = vec![0; context.problem.graph.ops.len()];
        let depth_first = searched.last().into_iter().flatten();
        depth_first.enumerate().for_each(|(at, &op)| rank[op as usize] = at);
        Starts { context, searched, rank, orders: Vec::new(), layouts: Vec::new() }
    }

    pub fn problem(&self) -> &'a Problem {
        self.context.problem
    }

    /// The layout of a candidate, in an order of its own.
    pub fn layout_of(&mut self, candidate: &PlanCandidate) -> Layout {
        let (mut order, mut ends, mut replicas) = (Vec::with_capacity(self.rank.len()), vec![0], Vec::new());
        for leaf in candidate.shape.leaves() {
            let mut ops = leaf.ops.to_vec();
            ops.sort_unstable_by_key(|&op| self.rank[op as usize]);
            order.extend(ops);
            ends.push(order.len());
            replicas.push(leaf.replicas);
        }
        let firsts: Vec<u32> = candidate.spots.iter().map(|spot| spot.first).collect();
        let is_side_by_side = firsts == build_plan::firsts(&replicas);
        let stages = Stages { firsts: (!is_side_by_side).then_some(firsts), ..Stages::new(ends, replicas) };
        Layout { order: self.order(order), stages }
    }

    /// The number of an order.
    fn order(&mut self, ops: Vec<u32>) -> usize {
        if let Some(at) = self.orders.iter().position(|known| known.ops == ops) {
            return at;
        }
        let problem = self.context.problem;
        let borders = Borders::of(problem, self.context.joined);
        let cuts = borders.map_or_else(|| (0..=ops.len()).collect(), |borders| borders.ends(&ops));
        let space = DownSets::chain(&problem.graph, CostModel::Paper, ops.clone(), (0..=ops.len()).collect());
        self.orders.push(Order { ops, cuts, space });
        self.orders.len() - 1
    }

    /// Pipelines of balanced stages: with the given replicas, else on few devices with all, and on more with equal ones and
    /// with one larger stage.
    pub fn add_balanced_layouts(&mut self) {
        let problem = self.context.problem;
        let graph = &problem.graph;
        let most = problem.constraints.most_stages.unwrap_or(u32::MAX).min(graph.ops.len() as u32);
        let all = match &problem.constraints.replicas {
            Some(given) => vec![given.clone()],
            None => replicas_of_stages(problem.cluster.devices(), most),
        };
        for order in std::mem::take(&mut self.searched) {
            let at = self.order(order.clone());
            for replicas in &all {
                let ends = linear_order::balanced(graph, &order, replicas);
                let is_cut = |end: &usize| self.orders[at].cuts.binary_search(end).is_ok();
                if ends.len() == replicas.len() + 1 && ends.iter().all(is_cut) {
                    self.layouts.push(Layout { order: at, stages: Stages::new(ends, replicas.clone()) });
                }
            }
        }
    }
}

/// Replicas of the stages of pipelines on this many devices or fewer: with these, more devices seldom make a plan slower.
fn replicas_of_stages(devices: u32, most_stages: u32) -> Vec<Vec<u32>> {
    let is_tried = |fewer: &u32| devices <= FEW || devices <= SEVERAL && fewer.is_power_of_two();
    let fewer = (1..devices).filter(is_tried);
    let mut all: Vec<Vec<u32>> = fewer.chain([devices]).flat_map(|devices| on_all(devices, most_stages)).collect();
    all.retain(|replicas| replicas.len() as u32 <= most_stages);
    all.sort();
    all.dedup();
    all
}

/// Replicas of the stages of pipelines that use these devices, and of single replicas.
fn on_all(devices: u32, most_stages: u32) -> Vec<Vec<u32>> {
    let mut all: Vec<Vec<u32>> = Vec::new();
    for stages in 1..=devices.min(most_stages).min(MOST_STAGES) {
        all.push(vec![1; stages as usize]);
        all.push(vec![devices / stages; stages as usize]);
        let spare = devices + 1 - stages;
        for at in [0, stages / 2, stages - 1] {
            let mut replicas = vec![1; stages as usize];
            replicas[at as usize] = spare;
            all.push(replicas);
        }
    }
    if devices <= FEW {
        // Each bit is an end of a stage.
        for ends in 0..1u32 << (devices - 1) {
            let mut replicas = vec![1];
            for device in 0..devices - 1 {
                match ends >> device & 1 {
                    1 => replicas.push(1),
                    _ => *replicas.last_mut().expect("it is never empty") += 1,
                }
            }
            all.push(replicas);
        }
    }
    all
}
