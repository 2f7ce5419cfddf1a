//! Finds out whether the loss of a minibatch is the average of the losses of its micro-batches.
//!
//! That is so for means over samples, and for what is linear in them. It is not so for a sum over samples, nor for a
//! function of the whole batch, such as the square root of a mean, or an op that combines samples with each other. An op
//! leaves samples apart if a tensor-parallel group could split it along the batch without communication
//! ([`strategies`]). A batch normalisation also depends on the micro-batch, in every schedule and framework, and does
//! not count here.

use crate::graph::Graph;
use crate::graph::order::canonical;
use crate::op::sharding::{Group, Sharding, SplitDim, size, strategies};
use crate::op::{Binary, NodeId, Op, ReduceKind, Scatter, ScatterAdd, Unary, Value};
use crate::pass::minibatch_mean::minibatch_means;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;
use std::collections::{HashMap, HashSet};

/// How a loss depends on the division into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchDependence {
    /// It adds up samples.
    Sum,
    /// This op combines samples in another way than by a mean.
    Other(NodeId),
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Equal in all micro-batches.
    Constant,
    /// Depends on the number of samples only.
    Size,
    /// Depends on the position of each sample in the batch.
    Position,
    /// Has an entry for each sample along this axis.
    Samples(SplitDim),
    /// Integers computed from the position and the sample: indices of elements of the same sample.
    OwnIndex(SplitDim),
    /// Samples divided by a count of the minibatch: their sum is a mean.
    Shares(SplitDim),
    Mean,
    Sum,
    Other(NodeId),
}

impl Kind {
    fn axis(self) -> Option<SplitDim> {
        match self {
            Kind::Samples(axis) | Kind::OwnIndex(axis) | Kind::Shares(axis) => Some(axis),
            _ => None,
        }
    }
}

/// A minibatch that is divided into micro-batches.
pub struct Minibatch<'a> {
    /// The symbol for the number of samples.
    pub symbol: &'a str,
    /// Its number of samples. Each could be a micro-batch of its own.
    pub samples: usize,
    /// The graph with that many samples, and the node ids of the symbolic one.
    pub whole: &'a Graph,
    /// True if samples may have labels that do not count.
    pub ignores_labels: bool,
}

/// The dependence of a loss, or of an output from which one is computed.
pub fn batch_dependence(graph: &Graph, minibatch: &Minibatch<'_>, loss: Value) -> Option<BatchDependence> {
    let leads_to_loss = graph.ancestors(loss);
    let routes = graph.ids().any(|id| matches!(graph.node(id).op, Op::GroupedMatMul(_)));
    let analysis = Analysis { graph, minibatch, means: minibatch_means(graph, loss), routes };
    let mut kinds: HashMap<Value, Kind> = HashMap::new();
    for node in canonical(graph).into_iter().filter(|node| leads_to_loss.contains(node)) {
        let mut inputs: Vec<Kind> = graph.inputs(node).iter().map(|input| kinds[input]).collect();
        match &graph.node(node).op {
            // Where the groups of rows end does not change what a row becomes.
            Op::GroupedMatMul(_) => inputs.truncate(2),
            // The divisor becomes that of the minibatch.
            Op::Binary(Binary::Div) if analysis.means.contains(&node) => inputs.truncate(1),
            _ => {}
        }
        for value in graph.values(node) {
            let other = inputs.iter().find(|kind| matches!(kind, Kind::Other(_)));
            kinds.insert(value, other.map_or_else(|| analysis.kind(value, &inputs), |other| *other));
        }
    }
    match kinds[&loss] {
        Kind::Sum => Some(BatchDependence::Sum),
        Kind::Other(node) => Some(BatchDependence::Other(node)),
        _ => None,
    }
}

struct Analysis<'a> {
    graph: &'a Graph,
    minibatch: &'a Minibatch<'a>,
    /// What becomes a mean over the minibatch.
    means: HashSet<NodeId>,
    /// True if rows are sorted by expert, and back.
    routes: bool,
}

impl Analysis<'_> {
    fn has_batch(&self, size: &Dim) -> bool {
        size.has_symbol(self.minibatch.symbol)
    }

    fn kind(&self, value: Value, inputs: &[Kind]) -> Kind {
        let (node, op) = (value.node, &self.graph.node(value.node).op);
        let shape = &self.graph.fact(value).shape;
        let batch_axes: Vec<usize> = (0..shape.len()).filter(|axis| self.has_batch(&shape[*axis])).collect();
        let has_total = inputs.iter().any(|kind| matches!(kind, Kind::Mean | Kind::Sum));
        let has_samples = inputs.iter().any(|kind| kind.axis().is_some());
        match (batch_axes.as_slice(), has_samples, has_total) {
            ([axis, ..], ..) if matches!(op, Op::Input(_) | Op::Uniform(_)) => {
                Kind::Samples(SplitDim { axis: *axis, blocks: 1 })
            }
            _ if matches!(op, Op::Iota(iota) if self.has_batch(&iota.fact.shape[iota.axis])) => Kind::Position,
            (_, false, false) if inputs.contains(&Kind::Position) => Kind::Position,
            ([], false, false) if !inputs.contains(&Kind::Size) => Kind::Constant,
            (_, false, false) => Kind::Size,
            // Each sample depends on all.
            ([_, ..], _, true) | (_, true, true) => Kind::Other(node),
            ([axis, ..], ..) => self.of_samples(value, inputs, *axis),
            ([], true, false) => self.reduced(node, inputs),
            ([], false, true) => self.of_totals(node, inputs),
        }
    }

    /// The kind of a value that has entries for samples along `axis`, if the op leaves them apart.
    fn of_samples(&self, value: Value, inputs: &[Kind], axis: usize) -> Kind {
        let op = &self.graph.node(value.node).op;
        let is_own_index = |at: usize| matches!(inputs.get(at), Some(Kind::OwnIndex(_)));
        let split = match op {
            Op::BatchNorm(_) => inputs[0].axis(),
            Op::Gather(op) if is_own_index(1) && inputs[0].axis().is_none_or(|split| split.axis == op.axis) => {
                inputs[1].axis().map(|split| SplitDim { axis: op.axis + split.axis, ..split })
            }
            Op::Scatter(Scatter { axis, .. }) | Op::ScatterAdd(ScatterAdd { axis, .. }) if is_own_index(1) => {
                Some(SplitDim { axis: *axis, blocks: 1 })
            }
            _ if self.routes => Some(SplitDim { axis, blocks: 1 }),
            _ => self.split(value, inputs),
        };
        let is_float = self.graph.fact(value).dtype.is_float();
        let is_division = matches!(op, Op::Binary(Binary::Div));
        let counts = self.graph.inputs(value.node).into_iter().zip(inputs).map(|(input, kind)| {
            *kind == Kind::Size && !self.graph.fact(input).shape.iter().any(|size| self.has_batch(size))
        });
        let has_count = is_float && counts.into_iter().any(|is_count| is_count);
        let is_quotient = is_division && (self.means.contains(&value.node) || has_count);
        let has_shares = inputs.iter().any(|kind| matches!(kind, Kind::Shares(_)));
        let has_index = inputs.iter().any(|kind| matches!(kind, Kind::OwnIndex(_) | Kind::Position));
        match split {
            None => Kind::Other(value.node),
            Some(_) if has_count && !is_division => Kind::Other(value.node),
            Some(split) if is_quotient || has_shares && is_linear(op, inputs) => Kind::Shares(split),
            Some(split) if has_index && !is_float => Kind::OwnIndex(split),
            Some(_) if inputs.contains(&Kind::Position) => Kind::Other(value.node),
            Some(split) => Kind::Samples(split),
        }
    }

    /// The axis of samples after an op that could be computed for each micro-batch alone.
    fn split(&self, value: Value, inputs: &[Kind]) -> Option<SplitDim> {
        let whole = self.minibatch.whole;
        let node = whole.node(value.node);
        let facts: Vec<&Fact> = whole.inputs(value.node).iter().map(|input| whole.fact(*input)).collect();
        let mut group = Group::of(self.minibatch.samples);
        for (fact, split) in facts.iter().zip(inputs).filter_map(|(fact, kind)| Some((fact, kind.axis()?))) {
            group.blocks.insert(size(fact, split.axis)?, vec![split.blocks]);
        }
        let is_apart = |(sharding, kind): (&Sharding, &Kind)| match (sharding, kind.axis()) {
            (Sharding::Split(split), Some(axis)) => *split == axis,
            (sharding, axis) => axis.is_none() && *sharding != Sharding::Partial,
        };
        let strategies = strategies(&node.op, &facts, &node.facts, &group);
        let strategy = strategies.iter().find(|strategy| strategy.inputs.iter().zip(inputs).all(is_apart))?;
        match strategy.outputs[value.output as usize] {
            Sharding::Split(split) => Some(split),
            _ => None,
        }
    }

    /// The kind of a value without entries for samples, of some that have them.
    fn reduced(&self, node: NodeId, inputs: &[Kind]) -> Kind {
        let is_of_shares = inputs.iter().any(|kind| matches!(kind, Kind::Shares(_)));
        match &self.graph.node(node).op {
            Op::CrossEntropy(op) => {
                let counts_all = op.ignore.is_none() || !self.minibatch.ignores_labels;
                if counts_all || self.means.contains(&node) { Kind::Mean } else { Kind::Other(node) }
            }
            Op::Reduce(op) if op.kind == ReduceKind::Mean && !is_of_shares => Kind::Mean,
            Op::Reduce(op) if op.kind == ReduceKind::Sum && is_of_shares => Kind::Mean,
            Op::Reduce(op) if op.kind == ReduceKind::Sum => Kind::Sum,
            Op::MatMul(_) if !is_of_shares => Kind::Sum,
            _ => Kind::Other(node),
        }
    }

    /// The kind of a value computed from means and sums over samples.
    fn of_totals(&self, node: NodeId, inputs: &[Kind]) -> Kind {
        let op = &self.graph.node(node).op;
        let has_sum = inputs.contains(&Kind::Sum);
        // Beside a sum, anything else would weigh more with more micro-batches.
        if has_sum && inputs.iter().any(|kind| *kind != Kind::Sum) && !is_scaling(op) {
            return Kind::Other(node);
        }
        match (op, inputs) {
            (Op::Binary(Binary::Div), _) if self.means.contains(&node) => Kind::Mean,
            (Op::Binary(Binary::Mul), [Kind::Sum, Kind::Size] | [Kind::Size, Kind::Sum])
            | (Op::Binary(Binary::Div), [Kind::Sum, Kind::Size]) => Kind::Mean,
            (op, inputs) if is_linear(op, inputs) => {
                if has_sum {
                    Kind::Sum
                } else {
                    Kind::Mean
                }
            }
            _ => Kind::Other(node),
        }
    }
}

fn is_scaling(op: &Op) -> bool {
    matches!(op, Op::Binary(Binary::Mul | Binary::Div) | Op::MatMul(_) | Op::Gather(_))
}

/// True for an op that is linear in its inputs that vary.
fn is_linear(op: &Op, inputs: &[Kind]) -> bool {
    let constants = inputs.iter().filter(|kind| matches!(kind, Kind::Constant)).count();
    match op {
        Op::Cast(_) | Op::Reshape(_) | Op::Broadcast(_) | Op::Transpose(_) | Op::Slice(_) | Op::Concat(_) => true,
        Op::StopGradient(_) | Op::Unary(Unary::Neg) | Op::Binary(Binary::Add | Binary::Sub) => true,
        Op::Reduce(op) => matches!(op.kind, ReduceKind::Sum | ReduceKind::Mean),
        Op::Gather(_) | Op::MatMul(_) | Op::Binary(Binary::Mul) => constants == 1,
        Op::Binary(Binary::Div) => matches!(inputs, [_, Kind::Constant]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::bind::bind;
    use crate::graph::text::parse;

    /// The dependence of the loss `%l` after these ops on `%x`: [batch, 3], the mask `%k`: [batch, 3] and `%m`: [3, 3].
    fn dependence(ops: &[&str]) -> Option<BatchDependence> {
        let text = format!(
            r#"graph "loss" {{
            %x = input fact={{"dtype":"f32","shape":["batch",3]}} name="x" : f32[batch, 3]
            %m = parameter fact={{"dtype":"f32","shape":[3,3]}} name="m" : f32[3, 3]
            %s = parameter fact={{"dtype":"f32","shape":[]}} name="s" : f32[]
            %k = input fact={{"dtype":"f32","shape":["batch",3]}} name="k" : f32[batch, 3]
            %h = matmul %x %m transpose_a=false transpose_b=false : f32[batch, 3]
            {}
            output "loss" %l
            }}"#,
            ops.join("\n")
        );
        let graph = parse(&text).unwrap();
        let whole = bind(&graph, &[("batch".to_string(), 8)].into()).unwrap();
        let minibatch = Minibatch { symbol: "batch", samples: 8, whole: &whole, ignores_labels: true };
        let dependence = batch_dependence(&graph, &minibatch, graph.outputs[0].value);
        // The first op that is no mean is called `%f`.
        if let Some(BatchDependence::Other(node)) = dependence {
            assert_eq!(graph.node(node).name, "f");
        }
        dependence
    }

    #[test]
    fn only_means_over_samples_average_over_micro_batches() {
        const MEAN: &str = "%a = reduce %h axes=[0,1] keep=false kind=\"mean\" : f32[]";
        const SUM: &str = "%a = reduce %h axes=[0,1] keep=false kind=\"sum\" : f32[]";
        const COUNT: &str = "%d = reduce %k axes=[0,1] keep=false kind=\"sum\" : f32[]";
        const NORM: &str = "%n = reduce %m axes=[0,1] keep=false kind=\"sum\" : f32[]";
        let other = Some(BatchDependence::Other(NodeId(0)));
        for (ops, expected) in [
            (&[MEAN, "%l = neg %a : f32[]"][..], None),
            (&[MEAN, NORM, "%l = add %a %n : f32[]"], None),
            (&[MEAN, "%l = mul %s %a : f32[]"], None),
            (&[MEAN, "%l = div %a %s : f32[]"], None),
            (&[MEAN, "%l = sqrt %s : f32[]"], None),
            (&[SUM, "%l = div %a %s : f32[]"], Some(BatchDependence::Sum)),
            (&[SUM, "%l = cast %a to=\"f64\" : f64[]"], Some(BatchDependence::Sum)),
            (&[SUM, NORM, "%f = add %a %n : f32[]", "%l = neg %f : f32[]"], other),
            (&[SUM, COUNT, "%l = div %a %d : f32[]"], None),
            (
                &[COUNT, "%q = div %h %d : f32[batch, 3]", "%l = reduce %q axes=[0,1] keep=false kind=\"sum\" : f32[]"],
                None,
            ),
            (&[MEAN, "%f = sqrt %a : f32[]", "%l = neg %f : f32[]"], other),
            (&[MEAN, "%f = mul %a %a : f32[]", "%l = neg %f : f32[]"], other),
            (&[MEAN, "%f = div %s %a : f32[]", "%l = neg %f : f32[]"], other),
            (&["%f = reduce %h axes=[0,1] keep=false kind=\"max\" : f32[]", "%l = neg %f : f32[]"], other),
            (
                &[
                    "%f = flip %h axes=[0] : f32[batch, 3]",
                    "%l = reduce %f axes=[0,1] keep=false kind=\"mean\" : f32[]",
                ],
                other,
            ),
            (
                &[
                    "%p = softmax %h axis=1 : f32[batch, 3]",
                    "%q = reshape %p shape=[\"batch*3\"] : f32[batch*3]",
                    "%l = reduce %q axes=[0] keep=false kind=\"mean\" : f32[]",
                ],
                None,
            ),
            (
                &[
                    "%q = reshape %h shape=[\"batch*3\"] : f32[batch*3]",
                    "%f = softmax %q axis=0 : f32[batch*3]",
                    "%l = reduce %f axes=[0] keep=false kind=\"mean\" : f32[]",
                ],
                other,
            ),
            (
                &[
                    "%f = matmul %h %x transpose_a=false transpose_b=true : f32[batch, batch]",
                    "%l = reduce %f axes=[0,1] keep=false kind=\"mean\" : f32[]",
                ],
                other,
            ),
            (
                &[MEAN, "%f = sub %h %a : f32[batch, 3]", "%l = reduce %f axes=[0,1] keep=false kind=\"mean\" : f32[]"],
                other,
            ),
        ] {
            let found = dependence(ops);
            let is_expected = match (found, expected) {
                (Some(BatchDependence::Other(_)), Some(BatchDependence::Other(_))) => true,
                _ => found == expected,
            };
            assert!(is_expected, "{found:?} {ops:?}");
        }
    }
}
