//! Factors of means over whole minibatches; see [`compiler::pass::minibatch_mean`].

use crate::data::Batches;
use compiler::graph::evaluate::evaluate;
use compiler::op::Op;
use compiler::pass::minibatch_mean::MinibatchMeans;
use compiler::tensor::Tensor;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Minibatches whose counts are kept: replicas and stages may be in different ones.
const KEPT: usize = 4;

/// By minibatch, the counts of each mean in each micro-batch.
type Counts = BTreeMap<usize, Vec<Vec<f64>>>;

/// Computes factors from the rows of minibatches.
#[derive(Debug)]
pub struct Factors {
    means: MinibatchMeans,
    /// Constants that the counts read, such as class weights.
    constants: BTreeMap<String, Tensor>,
    counts: Mutex<Counts>,
}

impl Factors {
    pub fn new(means: MinibatchMeans, weights: &BTreeMap<String, Tensor>) -> Factors {
        let constant = |id| match &means.counts.node(id).op {
            Op::State(state) => {
                weights.get(&state.name).map(|tensor| (state.name.clone(), tensor.cast(state.fact.dtype)))
            }
            _ => None,
        };
        let constants = means.counts.ids().filter_map(constant).collect();
        Factors { means, constants, counts: Mutex::new(Counts::new()) }
    }

    /// The factor of a mean in a micro-batch, by the name of its input: a scalar.
    pub fn factor(&self, batches: &Batches, name: &str, item: u32) -> Tensor {
        let (minibatch, at) = (item as usize / batches.microbatches, item as usize % batches.microbatches);
        let mut known = self.counts.lock();
        let counts = known.entry(minibatch).or_insert_with(|| {
            let items = (0..batches.microbatches).map(|at| (minibatch * batches.microbatches + at) as u32);
            let by_item: Vec<Vec<f64>> = items.map(|item| self.counts(batches, item)).collect();
            (0..self.means.means.len()).map(|mean| by_item.iter().map(|counts| counts[mean]).collect()).collect()
        });
        let mean = self.means.means.iter().position(|mean| mean.input == name).expect("the name is that of a mean");
        let factor = self.means.means[mean].factor(counts[mean][at], &counts[mean]);
        while known.len() > KEPT {
            known.pop_first();
        }
        Tensor::from_f64(&[], &[factor]).cast(self.means.means[mean].dtype)
    }

    /// The count of each mean in a micro-batch.
    fn counts(&self, batches: &Batches, item: u32) -> Vec<f64> {
        let graph = &self.means.counts;
        let mut feeds = self.constants.clone();
        for id in graph.ids() {
            let Op::Input(input) = &graph.node(id).op else { continue };
            let shape = input.fact.concrete().expect("sizes were set before compiling");
            let mut bytes = vec![0; shape.iter().product::<usize>() * input.fact.dtype.size()];
            batches.fill(&input.name, item, &mut bytes);
            let tensor = Tensor::new(input.fact.dtype, shape, bytes.into()).expect("the bytes have this shape");
            feeds.insert(input.name.clone(), tensor);
        }
        // The stages report data that cannot be evaluated.
        let Ok(values) = evaluate(graph, &feeds) else { return vec![f64::NAN; graph.outputs.len()] };
        graph.outputs.iter().map(|output| values[&output.value].to_f64()[0]).collect()
    }
}
