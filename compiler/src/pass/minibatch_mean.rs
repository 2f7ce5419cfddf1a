//! Makes a loss that is a mean over labels, tokens or a mask the mean over the whole minibatch.
//!
//! A mean over the counted labels of each micro-batch, averaged over micro-batches, depends on how the labels are spread:
//! a label in a micro-batch with few others counts more. Here the loss of micro-batch k is scaled so that its average
//! over the micro-batches is the mean over all labels of the minibatch, whatever its number of micro-batches and
//! replicas. With c_k the count of micro-batch k of K:
//!
//! ```text
//! cross-entropy    l_k · c_k K / Σ c     l_k: its mean over the micro-batch
//! s_k / d_k        s_k · K / Σ d         d_k: a sum or mean that depends only on inputs, such as that of a mask
//! ```
//!
//! The counts depend on the data alone, so they are computed before the micro-batches run ([`MinibatchMeans::counts`])
//! and become inputs of the graph.

use crate::graph::{Graph, Output, Writer};
use crate::op::expr::formula;
use crate::op::unary::scalar;
use crate::op::{Binary, Cast, Emit, Input, NodeId, Op, ReduceKind, Unary, Value};
use crate::pass::dce::dce;
use crate::tensor::DType;
use crate::tensor::fact::Fact;
use std::collections::{BTreeSet, HashSet};

/// Prefix of the inputs that hold the factors.
const FACTOR: &str = "pipec.minibatch-mean.";

/// The means of a loss, and the ops that count.
#[derive(Debug)]
pub struct MinibatchMeans {
    /// One scalar output per mean: the count of a micro-batch.
    pub counts: Graph,
    pub means: Vec<Mean>,
}

/// One mean of the loss.
#[derive(Clone, Debug)]
pub struct Mean {
    /// The input that holds its factor.
    pub input: String,
    pub dtype: DType,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// The loss is multiplied by c_k K / Σ c.
    CrossEntropy,
    /// The sum is divided by Σ d / K, after these operations on Σ d.
    Quotient { after: Vec<(Binary, f64)> },
}

impl Mean {
    /// The value of the input, from the count of this micro-batch, and from those of all micro-batches of the minibatch.
    pub fn factor(&self, count: f64, counts: &[f64]) -> f64 {
        let (total, microbatches) = (counts.iter().sum::<f64>(), counts.len() as f64);
        match &self.kind {
            Kind::CrossEntropy => count * microbatches / total,
            Kind::Quotient { after } => {
                let applied = |sum: f64, (op, number): &(Binary, f64)| match op {
                    Binary::Max => sum.max(*number),
                    Binary::Min => sum.min(*number),
                    _ => sum + number,
                };
                after.iter().fold(total, applied) / microbatches
            }
        }
    }
}

/// True for the inputs that hold factors.
pub fn is_factor(name: &str) -> bool {
    name.starts_with(FACTOR)
}

/// What the loss of a graph is made of.
#[derive(Debug, Default)]
struct Found {
    cross_entropies: Vec<NodeId>,
    quotients: Vec<NodeId>,
    /// Nodes in which the loss is linear.
    linear: HashSet<NodeId>,
}

/// Rewrites the means of a loss; `None` if it has none.
pub fn by_minibatch(graph: &mut Graph, loss: Value) -> Option<MinibatchMeans> {
    let found = find(graph, loss);
    let mut counting = graph.clone();
    counting.outputs.clear();
    counting.averages.clear();
    let mut means = Vec::new();
    for node in found.cross_entropies {
        let Op::CrossEntropy(op) = &graph.node(node).op else { continue };
        let Some(ignore) = op.ignore else { continue };
        let labels = graph.inputs(node)[1];
        let value = counted(&mut counting, labels, ignore);
        add_count(&mut counting, value);
        let mean = Value { node, output: 0 };
        let dtype = graph.fact(mean).dtype;
        let is_narrow = matches!(dtype, DType::F16 | DType::Bf16);
        let wide = if is_narrow { DType::F32 } else { dtype };
        let input = format!("{FACTOR}{}", means.len());
        let origin = graph.node(node).origin.clone();
        let mut out = Writer { graph, origin };
        let factor = out.emit(Op::Input(Input { name: input.clone(), fact: Fact::new(wide, vec![]) }), &[]);
        let widened = if is_narrow { out.emit(Op::Cast(Cast { to: wide }), &[mean]) } else { mean };
        let product = out.emit(Op::Binary(Binary::Mul), &[widened, factor]);
        let scaled = if is_narrow { out.emit(Op::Cast(Cast { to: dtype }), &[product]) } else { product };
        graph.replace_uses(mean, scaled);
        graph.set_input(if is_narrow { widened.node } else { product.node }, 0, mean);
        for part in [widened, product, scaled].into_iter().filter(|part| *part != mean) {
            graph.node_mut(part.node).part_of = Some(node);
        }
        means.push(Mean { input, dtype: wide, kind: Kind::CrossEntropy });
    }
    for node in found.quotients {
        let divisor = graph.inputs(node)[1];
        let Some((sum, after)) = sum_of_inputs(graph, divisor) else { continue };
        let value =
            Writer { graph: &mut counting, origin: Default::default() }.emit(Op::Cast(Cast { to: DType::F64 }), &[sum]);
        add_count(&mut counting, value);
        let fact = graph.fact(divisor).clone();
        let (input, dtype) = (format!("{FACTOR}{}", means.len()), fact.dtype);
        let origin = graph.node(node).origin.clone();
        let total = Writer { graph, origin }.emit(Op::Input(Input { name: input.clone(), fact }), &[]);
        graph.set_input(node, 1, total);
        means.push(Mean { input, dtype, kind: Kind::Quotient { after } });
    }
    if means.is_empty() {
        return None;
    }
    let mut counts = counting;
    dce(&mut counts);
    let is_unread = |id: &NodeId| matches!(counts.node(*id).op, Op::Input(_)) && counts.successors(*id).is_empty();
    let unread: Vec<NodeId> = counts.ids().filter(is_unread).collect();
    unread.into_iter().for_each(|id| counts.remove(id));
    Some(MinibatchMeans { counts, means })
}

/// The labels that cross-entropies of a graph ignore.
pub fn ignored_labels(graph: &Graph) -> BTreeSet<i64> {
    let ignored = |id: NodeId| match &graph.node(id).op {
        Op::CrossEntropy(op) => op.ignore,
        _ => None,
    };
    graph.ids().filter_map(ignored).collect()
}

/// The inputs that hold labels of cross-entropies that ignore some; `None` if labels are computed.
pub fn label_inputs(graph: &Graph) -> Option<BTreeSet<&str>> {
    let losses = graph.ids().filter(|id| matches!(&graph.node(*id).op, Op::CrossEntropy(op) if op.ignore.is_some()));
    let input = |id: NodeId| {
        let mut labels = graph.inputs(id)[1].node;
        while let Op::Cast(_) | Op::Reshape(_) = graph.node(labels).op {
            labels = graph.inputs(labels)[0].node;
        }
        match &graph.node(labels).op {
            Op::Input(input) => Some(&*input.name),
            _ => None,
        }
    };
    losses.map(input).collect()
}

/// The cross-entropies and quotients of a loss that [`by_minibatch`] makes means over the minibatch.
pub fn minibatch_means(graph: &Graph, loss: Value) -> HashSet<NodeId> {
    let Found { cross_entropies, quotients, .. } = find(graph, loss);
    cross_entropies.into_iter().chain(quotients).collect()
}

fn find(graph: &Graph, loss: Value) -> Found {
    let mut found = Found::default();
    let (mut seen, mut open) = (HashSet::new(), vec![loss]);
    while let Some(value) = open.pop() {
        let node = value.node;
        if !seen.insert(node) {
            continue;
        }
        let inputs = graph.inputs(node);
        let passed = match &graph.node(node).op {
            Op::CrossEntropy(op) if op.ignore.is_some() && value.output == 0 => {
                found.cross_entropies.extend(depends_only_on_inputs(graph, inputs[1]).then_some(node));
                continue;
            }
            Op::Binary(Binary::Add | Binary::Sub) => inputs,
            Op::Binary(Binary::Mul) => match (is_constant(graph, inputs[0]), is_constant(graph, inputs[1])) {
                (_, true) => vec![inputs[0]],
                (true, _) => vec![inputs[1]],
                _ => continue,
            },
            Op::Binary(Binary::Div) if is_constant(graph, inputs[1]) => vec![inputs[0]],
            Op::Binary(Binary::Div) => {
                let divisor = sum_of_inputs(graph, inputs[1]).and_then(|(value, _)| batch_reduction(graph, value.node));
                let of_numerator = numerator_reduction(graph, node);
                let agree = |kind: &ReduceKind| of_numerator.is_none_or(|other| other == *kind);
                found.quotients.extend(divisor.filter(agree).map(|_| node));
                continue;
            }
            Op::Cast(_) | Op::Reshape(_) | Op::Broadcast(_) | Op::Unary(Unary::Neg) => vec![inputs[0]],
            Op::Reduce(op) if matches!(op.kind, ReduceKind::Sum | ReduceKind::Mean) => vec![inputs[0]],
            _ => continue,
        };
        found.linear.insert(node);
        open.extend(passed);
    }
    let leads_to_loss = graph.ancestors(loss);
    let is_linear = |node: &NodeId| {
        let (mut seen, mut open) = (HashSet::new(), graph.successors(*node));
        while let Some(reader) = open.pop() {
            if leads_to_loss.contains(&reader) && seen.insert(reader) {
                if !found.linear.contains(&reader) {
                    return false;
                }
                open.extend(graph.successors(reader));
            }
        }
        true
    };
    let linear = |nodes: &[NodeId]| nodes.iter().copied().filter(is_linear).collect::<Vec<NodeId>>();
    let (mut cross_entropies, mut quotients) = (linear(&found.cross_entropies), linear(&found.quotients));
    cross_entropies.sort_unstable();
    quotients.sort_unstable();
    Found { cross_entropies, quotients, ..found }
}

/// A sum or mean over all elements of a value that depends only on inputs, below the casts of a divisor and operations with
/// numbers; and these, in order. A mean per sample is none, also if a micro-batch has only one sample.
fn sum_of_inputs(graph: &Graph, divisor: Value) -> Option<(Value, Vec<(Binary, f64)>)> {
    let (mut value, mut after) = (divisor, Vec::new());
    loop {
        let inputs = graph.inputs(value.node);
        match &graph.node(value.node).op {
            Op::Cast(_) | Op::Reshape(_) | Op::Broadcast(_) => value = inputs[0],
            Op::Binary(op @ (Binary::Max | Binary::Min | Binary::Add)) => {
                let (number, other) = match graph.number(inputs[1]) {
                    Some(number) => (number, inputs[0]),
                    None => (graph.number(inputs[0])?, inputs[1]),
                };
                after.push((*op, number));
                value = other;
            }
            Op::Reduce(op) if matches!(op.kind, ReduceKind::Sum | ReduceKind::Mean) => {
                let covers_all = op.axes.len() == graph.fact(inputs[0]).rank();
                after.reverse();
                let is_counted = covers_all && has_input(graph, value) && depends_only_on_inputs(graph, value);
                return is_counted.then_some((value, after));
            }
            _ => return None,
        }
    }
}

/// How a node reduces the batch, the first axis.
fn batch_reduction(graph: &Graph, node: NodeId) -> Option<ReduceKind> {
    match &graph.node(node).op {
        Op::Reduce(op) if op.axes.contains(&0) => Some(op.kind),
        _ => None,
    }
}

/// How the batch of a quotient's numerator is reduced, before the division or after it, if that is known. A sum over a
/// mean, or a mean over a sum, grows with the number of samples, so it is no mean.
fn numerator_reduction(graph: &Graph, quotient: NodeId) -> Option<ReduceKind> {
    let mut node = graph.inputs(quotient)[0].node;
    loop {
        let inputs = graph.inputs(node);
        match (&graph.node(node).op, batch_reduction(graph, node)) {
            (_, Some(kind)) => return Some(kind),
            (Op::Cast(_) | Op::Reshape(_) | Op::Broadcast(_) | Op::Reduce(_) | Op::Unary(Unary::Neg), _) => {}
            (Op::Binary(Binary::Mul | Binary::Div), _) if is_constant(graph, inputs[1]) => {}
            _ => break,
        }
        node = inputs[0].node;
    }
    let mut node = quotient;
    while graph.fact(Value { node, output: 0 }).rank() > 0 {
        let [reader] = graph.successors(node)[..] else { break };
        node = reader;
        if let Some(kind) = batch_reduction(graph, node) {
            return Some(kind);
        }
    }
    None
}

fn is_constant(graph: &Graph, value: Value) -> bool {
    depends_only_on_inputs(graph, value) && !has_input(graph, value)
}

/// True if no parameter, changing state or random number leads to the value.
fn depends_only_on_inputs(graph: &Graph, value: Value) -> bool {
    graph.ancestors(value).into_iter().all(|node| match &graph.node(node).op {
        Op::State(_) => graph.averages.iter().all(|average| average.state != node),
        op => !matches!(op, Op::Parameter(_) | Op::Dropout(_) | Op::Uniform(_)),
    })
}

fn has_input(graph: &Graph, value: Value) -> bool {
    graph.ancestors(value).into_iter().any(|node| matches!(graph.node(node).op, Op::Input(_)))
}

/// Emits the number of labels that are not ignored.
fn counted(graph: &mut Graph, labels: Value, ignore: i64) -> Value {
    let mut out = Writer { graph, origin: Default::default() };
    formula(&mut out, [labels], |[labels]| {
        let is_ignored = labels.equal(labels.number(ignore as f64));
        let [zero, one] = [0.0, 1.0].map(|number| labels.source(scalar(DType::F64, number)));
        is_ignored.select(zero, one).sum()
    })
}

fn add_count(graph: &mut Graph, value: Value) {
    let name = format!("count {}", graph.outputs.len());
    graph.outputs.push(Output { name, value });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Origin;
    use crate::graph::evaluate::evaluate;
    use crate::op::Parameter;
    use crate::tensor::Tensor;
    use std::collections::BTreeMap;

    /// Σ x w mask / max(Σ mask, 1), squared on request.
    fn masked(is_squared: bool) -> (Graph, Value) {
        quotient(is_squared, ReduceKind::Sum)
    }

    fn quotient(is_squared: bool, kind: ReduceKind) -> (Graph, Value) {
        let mut graph = Graph::new("masked");
        let mut out = Writer { graph: &mut graph, origin: Origin::default() };
        let input = |name: &str| Op::Input(Input { name: name.into(), fact: Fact::of(DType::F32, &[2, 3]) });
        let (x, mask) = (out.emit(input("x"), &[]), out.emit(input("mask"), &[]));
        let w = out.emit(Op::Parameter(Parameter { name: "w".into(), fact: Fact::of(DType::F32, &[3]) }), &[]);
        let value = formula(&mut out, [x, w, mask], |[x, w, mask]| {
            let total = (x * w * mask).reduce(kind, vec![0, 1], false);
            let count = mask.sum();
            let loss = total / count.binary(Binary::Max, count.number(1.0));
            if is_squared { loss * loss } else { loss }
        });
        graph.outputs.push(Output { name: "loss".into(), value });
        (graph, value)
    }

    #[test]
    fn a_mean_over_a_sum_is_no_mean() {
        let (graph, loss) = quotient(false, ReduceKind::Mean);
        assert_eq!(minibatch_means(&graph, loss), HashSet::new());
    }

    #[test]
    fn micro_batches_average_to_the_minibatch() {
        let (mut graph, loss) = masked(false);
        assert_eq!(minibatch_means(&graph, loss), HashSet::from([loss.node]));
        let means = by_minibatch(&mut graph, loss).unwrap();
        let masks = [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]];
        let x = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]];
        let tensor = |values: &[f32]| Tensor::from_f32(&[2, 3], values);
        let feeds =
            |at: usize| BTreeMap::from([("x".to_string(), tensor(&x[at])), ("mask".to_string(), tensor(&masks[at]))]);
        let count = |at: usize| {
            let mut feeds = feeds(at);
            feeds.remove("x");
            evaluate(&means.counts, &feeds).unwrap()[&means.counts.outputs[0].value].to_f64()[0]
        };
        let counts = [count(0), count(1)];
        assert_eq!(counts, [2.0, 5.0]);
        let losses = [0, 1].map(|at| {
            let mut feeds = feeds(at);
            feeds.insert("w".to_string(), Tensor::from_f32(&[3], &[1.0; 3]));
            let factor = means.means[0].factor(counts[at], &counts);
            feeds.insert(means.means[0].input.clone(), Tensor::from_f64(&[], &[factor]).cast(DType::F32));
            evaluate(&graph, &feeds).unwrap()[&graph.outputs[0].value].to_f64()[0]
        });
        let whole = (1.0 + 2.0 + 7.0 + 8.0 + 9.0 + 10.0 + 11.0) / 7.0;
        assert!(((losses[0] + losses[1]) / 2.0 - whole).abs() < 1e-6, "{losses:?}");
    }

    #[test]
    fn a_squared_quotient_is_no_mean() {
        let (graph, loss) = masked(true);
        assert!(minibatch_means(&graph, loss).is_empty());
    }
}
