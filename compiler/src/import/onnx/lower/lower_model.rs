//! Lowers a model: each node is folded, evaluated as shape arithmetic, or lowered to core ops.

use super::error::{Faults, LowerError, OPSETS};
use super::frame::Frames;
use super::walk::Walk;
use super::{
    ImportedWeights, Known, LowerReason, StaticSizes, Weight, arithmetic, branch, call, flex, fold, loop_scan,
    opset_upgrade, prune, support, table, weight,
};
use crate::graph::{Graph, Origin, Output};
use crate::import::known_inputs::Known as Beyond;
use crate::import::onnx::model::{Function, Node, OnnxModel};
use crate::op::{Input, NodeId, Op, Value};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use std::collections::HashSet;

#[derive(Debug)]
pub struct Lowered {
    /// Dead nodes are removed and the nodes renumbered.
    pub graph: Graph,
    pub weights: Vec<Weight>,
    pub warnings: Vec<String>,
    /// Floats of the file that are neither parameters nor states.
    pub constants: Vec<String>,
}

pub fn check(model: &OnnxModel) -> Result<(), LowerError> {
    match model.opset("") {
        Some(found) if found < *OPSETS.start() => Err(LowerError::Opset { found }),
        _ => support::check(model).map_err(LowerError::Unsupported),
    }
}

/// Lowers a model that passed [`check`]. `inputs` are its input facts, `known_inputs` is further information about
/// them.
pub fn lower(
    model: &OnnxModel,
    inputs: &[Fact],
    frozen: &StaticSizes,
    known_inputs: &Beyond,
) -> Result<Lowered, LowerError> {
    let opset = model.opset("").unwrap_or(*OPSETS.end());
    let key = |f: &'_ Function| (f.domain.clone(), f.name.clone(), f.overload.clone());
    let mut walk = Walk {
        functions: model.functions.iter().map(|function| (key(function), function)).collect(),
        frozen,
        graph: Graph::new(&model.graph_name),
        lower_node,
        frames: Frames::new(opset),
        ledger: ImportedWeights {
            is_from_pytorch: model.producer.starts_with("pytorch"),
            ..ImportedWeights::default()
        },
        faults: Vec::new(),
    };
    if opset > *OPSETS.end() {
        let newest = OPSETS.end();
        walk.ledger
            .warnings
            .push(format!("standard operator set {opset} is newer than {newest}, the latest supported"));
    }
    let initializers = walk.initializers(&model.initializers, &model.nodes, &model.roles);
    walk.frames.top_mut().known.extend(initializers);
    for (input, fact) in model.inputs.iter().zip(inputs) {
        let op = Op::Input(Input { name: input.name.clone(), fact: fact.clone() });
        let node = walk.graph.add(op, &[], &Origin::default())?;
        let known = match known_inputs.values.get(&input.name) {
            Some(tensor) if fits(fact, tensor) => Known::Tensor(tensor.cast(fact.dtype)),
            Some(tensor) => {
                let (name, expected) = (input.name.clone(), fact.clone());
                return Err(LowerError::Given { name, expected, found: Fact::of(tensor.dtype(), tensor.shape()) });
            }
            None => Known::Value(Value { node, output: 0 }),
        };
        if model.optional.contains(&input.name) && known_inputs.leaves_out(&input.name) {
            walk.frames.top_mut().left_out.insert(input.name.clone());
        } else {
            walk.frames.top_mut().known.insert(input.name.clone(), known);
        }
    }
    // Errors are in `walk.faults`.
    let _whole = walk.nodes(&model.nodes);
    if !walk.faults.is_empty() {
        return Err(LowerError::Nodes(Faults(walk.faults)));
    }
    finish(walk, model)
}

/// True if a value matches an input for some values of its symbols.
fn fits(fact: &Fact, tensor: &Tensor) -> bool {
    let size_fits = |(dim, size): (&Dim, &usize)| dim.known().is_none_or(|known| i64::try_from(*size) == Ok(known));
    fact.rank() == tensor.shape().len() && fact.shape.iter().zip(tensor.shape()).all(size_fits)
}

/// Lowers one node; `Err(None)` if an input is undefined because its producer failed.
fn lower_node(walk: &mut Walk<'_>, node: &Node) -> Result<Vec<Known>, Option<LowerReason>> {
    if !walk.functions.is_empty() {
        let key = (node.domain.clone(), node.op_type.clone(), node.overload.clone());
        if let Some(function) = walk.functions.get(&key) {
            return call::call(walk, node, function);
        }
    }
    let standard = node.domain.is_empty();
    match node.op_type.as_str() {
        "If" if standard => return branch::branch(walk, node),
        "Loop" if standard => return loop_scan::repeat(walk, node),
        "Scan" if standard => return loop_scan::scan(walk, node),
        _ if flex::is_changed(node) => return flex::flex(walk, node),
        _ => {}
    }
    let lower = table::find_in(&node.domain, &node.op_type);
    let lower =
        lower.ok_or_else(|| Some(LowerReason::Unsupported(format!("the operator {}", short_name(&node.op_type)))))?;
    let is_old = standard && walk.frames.top().opset < opset_upgrade::MODERN;
    let translated = if is_old { opset_upgrade::node(node)? } else { None };
    let node = translated.as_ref().unwrap_or(node);
    let mut scope = walk.scope(node).ok_or(None)?;
    if is_old {
        opset_upgrade::inputs(&mut scope)?;
    }
    if fold::applies(&scope)
        && let Some(outputs) = fold::fold(&mut scope, lower)?
    {
        return Ok(outputs);
    }
    if let Some(outputs) = arithmetic::lower(&scope)? {
        return Ok(outputs);
    }
    Ok(lower(&mut scope)?)
}

/// Exporters that deduplicate equal initial values may use one initializer both as a bias and as a running mean.
/// These diverge in training, so they are separated and the state gets a new name.
fn part(walk: &mut Walk<'_>) {
    let mut parted = Vec::new();
    for weight in walk.ledger.weights.iter_mut().filter(|w| w.parameter.is_some()) {
        let Some(state) = weight.state.take() else { continue };
        let mut name = format!("{}.running", weight.name);
        while walk.frames.find(&name).is_some() {
            name.push('_');
        }
        if let Op::State(op) = &mut walk.graph.node_mut(state.node).op {
            op.name.clone_from(&name);
        }
        parted.push(Weight { name, trainable: false, parameter: None, state: Some(state), ..weight.clone() });
    }
    if let Some(first) = parted.first() {
        walk.ledger.warnings.push(format!(
            "the exporter merged {} tensors as parameter and running statistic, because they start equal; the \
             statistics are now separate, starting with `{}`",
            parted.len(),
            short_name(&first.name)
        ));
    }
    walk.ledger.weights.extend(parted);
}

fn finish(mut walk: Walk<'_>, model: &OnnxModel) -> Result<Lowered, LowerError> {
    for output in &model.outputs {
        if let Some(Some(Known::Absent(what))) = walk.frames.find(&output.name) {
            // Exporters list the running statistics of normalisations among the graph outputs.
            walk.ledger.warnings.push(format!("graph output `{}` is dropped: it is {what}", short_name(&output.name)));
            continue;
        }
        // Graph outputs are read like the inputs of a node.
        let reader = Node { inputs: vec![output.name.clone()], ..Node::default() };
        let value = match walk.scope(&reader) {
            Some(mut scope) => scope.value(0),
            None => Err(LowerReason::Missing { slot: 0 }),
        };
        let value =
            value.map_err(|reason| LowerError::Output { name: output.name.clone(), reason: Box::new(reason) })?;
        walk.graph.outputs.push(Output { name: output.name.clone(), value });
    }
    if walk.graph.outputs.is_empty() {
        return Err(LowerError::NoOutputs);
    }
    walk.graph.averages = std::mem::take(&mut walk.ledger.averages);
    part(&mut walk);
    let graph = prune::prune(&walk.graph)?;
    let weights = used_weights(&graph, walk.ledger.weights);
    let mut warnings = walk.ledger.warnings;
    let inferred = weights.iter().filter(|w| w.trainable && !model.roles.parameters.contains(&w.name));
    warnings.extend(weight::warning(inferred.map(|w| w.name.as_str()), &model.roles));
    Ok(Lowered { graph, weights, warnings, constants: walk.ledger.constants })
}

pub fn used_weights(graph: &Graph, mut weights: Vec<Weight>) -> Vec<Weight> {
    let name = |id: NodeId| match &graph.node(id).op {
        Op::Parameter(o) => Some(o.name.as_str()),
        Op::State(o) => Some(o.name.as_str()),
        _ => None,
    };
    let names: HashSet<&str> = graph.ids().filter_map(name).collect();
    weights.retain(|w| names.contains(w.name.as_str()));
    weights
}
