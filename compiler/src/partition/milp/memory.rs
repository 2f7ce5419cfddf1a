//! Rows of the integer program that limit the memory of each stage.

use crate::partition::milp::formulation::Formulation;
use crate::partition::search::build_plan;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::profile::arena::{Arena, ArenaPosition, Way};
use crate::profile::cost_graph::Flows;
use crate::profile::recompute_scope::RecomputeTerms;
use good_lp::{Expression, variable};

/// Input gradients that a stage sends back per micro-batch.
#[derive(Default)]
struct Back {
    /// Bytes of each tensor, and whether it is an input of the stage.
    tensors: Vec<(u64, Expression)>,
    /// Size of one buffer for all of them relative to the limit, and its maximum.
    held: Expression,
    most: f64,
}

impl Back {
    fn add(&mut self, bytes: u64, factor: f64, is_there: Expression) {
        self.held.add_mul(factor, is_there.clone());
        self.most += factor;
        self.tensors.push((bytes, is_there));
    }
}

impl Formulation<'_> {
    /// Limits the memory per replica of each stage. The coefficients come from `MemoryTerms::held`, which is linear
    /// except for the rounding of optimizer state.
    pub(super) fn memory(&mut self) {
        const MANY: u64 = 1 << 40;
        let problem = self.scope.problem;
        let (replicas, caps) = (&self.choice.replicas, &self.choice.caps);
        let pending = build_plan::pending_weight_grads(problem, replicas, caps);
        let multiples = build_plan::multiples(problem, replicas, caps, &pending);
        let (used, flows) = (problem.graph.summed_bytes(), problem.graph.flows());
        for (stage, multiples) in multiples.into_iter().enumerate() {
            let Some(limit) = problem.limit_of(self.choice.devices(stage)) else { continue };
            let limit = limit as f64;
            let multiples = MemoryMultipliers { recompute: self.choice.recompute[stage], ..multiples };
            let each = |holdings: MemoryTerms| holdings.held(&multiples).total as f64 / MANY as f64 / limit;
            let none = MemoryTerms::default();
            let weights = each(MemoryTerms { weights: MANY, ..none });
            let (summed, masters) =
                (each(MemoryTerms { summed: MANY, ..none }), each(MemoryTerms { masters: MANY, ..none }));
            let mut sum = self.parameters(stage, 1.0, |param| {
                let moved = summed * param.sum_bytes as f64 + masters * param.master_bytes() as f64;
                weights * param.bytes as f64 + moved
            });
            sum += self.frozen(stage, 1.0, each(MemoryTerms { frozen: MANY, ..none }));
            // ZeRO: weights that are also used by other stages are not sharded.
            let whole = each(MemoryTerms { weights: MANY, shared: MANY, ..none }) - weights;
            sum += self.shared(stage, 1.0, |param| whole * param.sum_bytes as f64);
            let terms = each(MemoryTerms { terms: MANY, ..none });
            // Stages are recomputed at once.
            let recompute = RecomputeTerms { freed: MANY, layer: u64::MAX, ..RecomputeTerms::default() };
            let saves = MemoryTerms { saved: MANY, recompute, ..none };
            let saved = each(saves);
            // Model inputs are kept even if the stage is recomputed.
            let fed = each(MemoryTerms { saved: MANY, ..none });
            let batched_grads = each(MemoryTerms { batched_grads: MANY, ..none });
            // Conservative: every stage but the first sends input gradients, and no output gradient arrives unchanged.
            let halves = if stage == 0 { 0.0 } else { f64::from(multiples.pending_weight_grads) / limit };
            sum += self.sum(stage, 1.0, |op| {
                let gradients = terms * used[op] as f64;
                let op = &problem.graph.ops[op];
                let kept = saved * op.saved_bytes as f64 + fed * op.fed_bytes as f64;
                let kept = kept + batched_grads * op.batched_grad_bytes as f64;
                gradients + kept + halves * op.pending_weight_grad_bytes() as f64
            });
            let (input, passed) =
                (each(MemoryTerms { inputs: MANY, ..none }), each(MemoryTerms { passed: MANY, ..none }));
            // Recomputation does not free what is saved and sent.
            let stays = RecomputeTerms { outputs: MANY, ..recompute };
            let output = each(MemoryTerms { outputs: MANY, recompute: stays, ..saves }) - saved;
            let sent = each(MemoryTerms { sent: MANY, outputs: MANY, ..saves }) - saved - output;
            let mut back = Back::default();
            for (at, tensor) in problem.graph.tensors.iter().enumerate() {
                let bytes = tensor.bytes as f64;
                let output = output + if problem.graph.is_only_sent(at) { sent } else { 0.0 };
                if let Some(factor) = self.factor(output * bytes, 1.0) {
                    let goes_out = self.crosses(at, stage, false);
                    sum.add_mul(factor, goes_out);
                }
                if let Some(factor) = self.factor((input + passed) * bytes, 1.0) {
                    let comes_in = self.crosses(at, stage, true);
                    sum.add_mul(factor, comes_in.clone());
                    back.add(tensor.bytes, factor * passed / (input + passed), comes_in);
                }
            }
            if problem.schedule.trains() {
                sum += self.second_places(stage, back);
            }
            // Conservative: assumes that each stage contains the op with the largest parameters.
            let largest = problem.graph.largest_bytes().into_iter().max().unwrap_or(0);
            let needed = problem.graph.needed_bytes().into_iter().max().unwrap_or(0);
            sum += each(MemoryTerms { largest: MANY, ..none }) * largest as f64;
            sum += each(MemoryTerms { needed: MANY, ..none }) * needed as f64;
            let arena = each(MemoryTerms { arena: Arena::always(MANY), ..none });
            // A stage without inputs has a whole backward; the larger of both variants counts.
            let way = multiples.way(u64::from(stage > 0));
            let whole = Way { is_split: false, ..way };
            let mut scratch = Vec::new();
            for op in 0..self.ops() {
                for (place, others) in self.ends(&flows, op) {
                    let needs = problem.graph.ops[op].arena(place);
                    if let Some(factor) = self.factor(arena * needs.of(way).max(needs.of(whole)) as f64, 1.0) {
                        let mut one = Expression::from(-factor * others.len() as f64);
                        for op in others.into_iter().chain([op]) {
                            self.add_inside(&mut one, factor, op, stage);
                        }
                        scratch.push(one);
                    }
                }
            }
            sum += self.at_least(scratch);
            // Tolerance for rounding in long sums.
            self.keep(sum.leq(1.0 + 1e-9));
        }
    }

    /// The positions of an op in its stage that need different arenas, each with the ops that must be in the stage too.
    fn ends(&self, flows: &Flows, op: usize) -> Vec<(ArenaPosition, Vec<usize>)> {
        let [before, after] = [&flows.before[op], &flows.after[op]];
        let of = |first: bool, last: bool| self.scope.problem.graph.ops[op].arena(ArenaPosition { first, last });
        let ArenaPosition { first: is_first, last: is_last } = flows.ends(op);
        let mut ends = vec![(ArenaPosition { first: is_first, last: is_last }, Vec::new())];
        if of(false, is_last) != of(is_first, is_last) {
            ends.extend(before.iter().map(|&op| (ArenaPosition { first: false, last: is_last }, vec![op as usize])));
        }
        if of(is_first, false) != of(is_first, is_last) {
            ends.extend(after.iter().map(|&op| (ArenaPosition { first: is_first, last: false }, vec![op as usize])));
        }
        if [of(false, is_last), of(is_first, false)].into_iter().all(|arena| arena != of(false, false)) {
            let both =
                before.iter().flat_map(|&one| after.iter().map(move |&other| vec![one as usize, other as usize]));
            ends.extend(both.map(|both| (ArenaPosition::default(), both)));
        }
        ends
    }

    /// Size of the second gradient buffers relative to the limit: doubled if transfers are slow (see
    /// `plan/gradient_buffers`), otherwise 0.
    fn second_places(&mut self, stage: usize, back: Back) -> Expression {
        let problem = self.scope.problem;
        let GradientBuffers { wire: Some(wire), pace } = GradientBuffers::of(&problem.cluster) else {
            return Expression::default();
        };
        // Times are relative to the forward of the whole model; a longer transfer is always slow.
        let whole = problem.graph.ops.iter().map(|op| op.fwd_us).sum::<f64>() / pace;
        let latency = wire.latency_us / whole;
        if back.tensors.is_empty() {
            return Expression::default();
        }
        if whole <= 0.0 || latency > 1.0 {
            return back.held;
        }
        let is_slow = self.variables.add(variable().binary());
        let mut longer = Expression::from(latency);
        let mut most = latency;
        for (bytes, is_there) in back.tensors {
            let share = (bytes as f64 / wire.bytes_per_us / whole).min(2.0);
            longer.add_mul(share, is_there);
            most += share;
        }
        for op in 0..self.ops() {
            self.add_inside(&mut longer, -problem.graph.ops[op].fwd_us / pace / whole, op, stage);
        }
        longer.add_mul(-most, is_slow);
        self.keep(longer.leq(0.0));
        let mut beyond = back.held;
        beyond += -back.most;
        beyond.add_mul(back.most, is_slow);
        self.at_least(vec![beyond]).into()
    }

    /// 1 if a tensor enters a stage from another stage (`comes_in`) or leaves it, otherwise 0.
    fn crosses(&mut self, tensor: usize, stage: usize, comes_in: bool) -> Expression {
        let tensor = &self.scope.problem.graph.tensors[tensor];
        let mut sums = Vec::with_capacity(tensor.consumers.len());
        for reader in &tensor.consumers {
            let mut sum = Expression::default();
            let sign = if comes_in { 1.0 } else { -1.0 };
            self.add_inside(&mut sum, sign, reader.index(), stage);
            self.add_inside(&mut sum, -sign, tensor.producer.index(), stage);
            sums.push(sum);
        }
        if sums.is_empty() { Expression::default() } else { self.at_least(sums).into() }
    }
}
