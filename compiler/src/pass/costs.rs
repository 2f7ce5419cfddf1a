//! The planner's cost graph of a model graph, and its times from a profile.
//!
//! An op's id is its position in [`numbered`](crate::graph::order::numbered). Sizes come from the graph; times are zero
//! until [`fill`] takes them from a profile of the same graph.

use super::attribution::{Attribution, of_data};
use crate::graph::{Graph, order};
use crate::op::table::rule;
use crate::op::{NodeId, Op, Value, elements};
use crate::profile::Profile;
use crate::profile::cost_graph::{CostGraph, FrozenCost, OpCost, OpId, ParamCost, TensorCost};
use crate::tensor::DType;
use crate::text::name::short_name;
use std::collections::{BTreeSet, HashMap, HashSet};
use thiserror::Error;

/// The least bytes of a constant that counts as a frozen weight.
const LARGE_CONSTANT: u64 = 4096;

/// A profile that does not belong to the model.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum FillError {
    #[error("the profile is for another model, `{model}`: it has {profiled} ops, this one has {ops}")]
    Count { profiled: usize, model: String, ops: usize },
    #[error("the profile is for another model: its sha256 is {profiled}, this model's is {model}")]
    Sha { profiled: String, model: String },
    #[error("the profile is for another model: op {id} is `{profiled}` in the profile and `{model}` in the model")]
    Op { id: usize, profiled: String, model: String },
    #[error(
        "the profile has other trained parameters: op {id} `{name}` has {profiled} bytes of them in the profile and {model} here; profile again with the same `--freeze`"
    )]
    Trained { id: usize, name: String, profiled: u64, model: u64 },
    #[error(
        "the profile has other tensor sizes (micro-batch {micro_batch}, {dtype}): op {id} `{name}` outputs {profiled} bytes \
         in the profile and {model} here; profile again with this micro-batch and precision"
    )]
    Size { id: usize, name: String, profiled: u64, model: u64, micro_batch: u64, dtype: String },
}

/// The costs of a graph of fixed sizes, without times.
///
/// Model inputs and the bytes of a parameter count for the first op that reads them, so that bytes sum to those of the
/// model; `params` names all readers. Constant expressions are no tensors: every stage recomputes them. An op that
/// depends on no input joins its first data-dependent reader, or the last data-dependent op if there is none.
pub fn cost_graph(graph: &Graph, attribution: &Attribution) -> CostGraph {
    let op_index: HashMap<NodeId, OpId> =
        attribution.ops.iter().enumerate().map(|(i, id)| (*id, OpId(i as u32))).collect();
    let parts = parts(graph, &op_index);
    let readers = |value: Value| -> Vec<OpId> {
        let op = |node: NodeId| op_index.get(&graph.op_of(node)).copied();
        let producer = op(value.node);
        let readers = graph.consumers(value).into_iter().filter_map(|(node, _)| op(node));
        let mut ops: Vec<OpId> = readers.filter(|reader| Some(*reader) != producer).collect();
        ops.sort_unstable();
        ops.dedup();
        ops
    };
    let size = |value: Value| graph.fact(value).bytes().unwrap_or(u64::MAX);
    let results: HashSet<Value> = graph.outputs.iter().map(|o| o.value).collect();

    let joins = joins(graph, attribution, &readers);
    let mut costs = CostGraph::default();
    for (i, &id) in attribution.ops.iter().enumerate() {
        let node = graph.node(id);
        let values = graph.values(id);
        costs.ops.push(OpCost {
            id: i as u32,
            name: node.label().to_string(),
            module: node.origin.module.clone(),
            op: rule(&node.op).name().to_string(),
            saved_bytes: attribution.saved_bytes[i],
            out_bytes: values.iter().fold(0u64, |sum, v| sum.saturating_add(size(*v))),
            joins: joins[i],
            fed_bytes: attribution.target_bytes[i],
            live: attribution.live[i],
            between_bytes: attribution.between_bytes[i],
            arriving_bytes: attribution.arriving_bytes[i],
            reads_as_it_makes: attribution.read_as_made.contains(&i),
            is_view: rule(&node.op).is_view(),
            // The saved bytes may be statistics of an output that is not saved itself.
            unsaved: attribution.saved_bytes[i] < values.iter().map(|v| size(*v)).max().unwrap_or(0),
            ..OpCost::default()
        });
        let tensors =
            values.into_iter().chain(parts.get(&id).into_iter().flatten().flat_map(|part| graph.values(*part)));
        for value in tensors {
            let consumers = readers(value);
            if consumers.is_empty() && !results.contains(&value) {
                continue;
            }
            let name = match value.output {
                0 => node.label().to_string(),
                n => format!("{}#{n}", node.label()),
            };
            costs.tensors.push(TensorCost { name, producer: OpId(i as u32), bytes: size(value), consumers });
        }
    }
    for id in graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Input(_))) {
        let value = Value { node: id, output: 0 };
        if let Some(first) = readers(value).first() {
            let op = &mut costs.ops[first.index()];
            op.fed_bytes = op.fed_bytes.saturating_add(size(value));
        }
    }
    for id in graph.ids() {
        let Op::Parameter(parameter) = &graph.node(id).op else { continue };
        let value = Value { node: id, output: 0 };
        let users = readers(value);
        let Some(first) = users.first() else { continue };
        let op = &mut costs.ops[first.index()];
        op.param_bytes = op.param_bytes.saturating_add(size(value));
        let (bytes, dtype) = (size(value), graph.fact(value).dtype);
        // Gradients of two-byte types accumulate in f32.
        let sum_bytes = if dtype.is_float() && dtype.size() == 2 { bytes.saturating_mul(2) } else { bytes };
        costs.params.push(ParamCost { name: parameter.name.clone(), bytes, sum_bytes, users });
    }
    for id in graph.ids() {
        let node = graph.node(id);
        let value = Value { node: id, output: 0 };
        let (name, bytes) = match &node.op {
            Op::State(state) => (state.name.clone(), size(value)),
            Op::Constant(_) if size(value) >= LARGE_CONSTANT => (node.label().to_string(), size(value)),
            _ => continue,
        };
        // A running average is held where its sample is made.
        let samples = graph.averages.iter().filter(|average| average.state == id).map(|average| average.sample.node);
        let holders = samples.filter_map(|sample| op_index.get(&graph.op_of(sample)).copied());
        let users: BTreeSet<OpId> = readers(value).into_iter().chain(holders).collect();
        let users = Vec::from_iter(users);
        if !users.is_empty() {
            costs.frozen.push(FrozenCost { name, bytes, users });
        }
    }
    for (op, omitted) in costs.ops.iter_mut().zip(omitted_grads(graph, &attribution.ops)) {
        op.omitted_grads = omitted;
    }
    costs
}

/// The gradients of each op's product that training does not compute.
fn omitted_grads(graph: &Graph, ops: &[NodeId]) -> Vec<u8> {
    let order = order::canonical(graph);
    let trained = order::dependents(graph, &order, |op| matches!(op, Op::Parameter(_)));
    let fed = order::dependents(graph, &order, |op| matches!(op, Op::Input(_)));
    let of = |id: &NodeId| {
        let operands = match &graph.node(*id).op {
            Op::MatMul(_) | Op::GroupedMatMul(_) | Op::Conv(_) | Op::Attention(_) => graph.inputs(*id),
            _ => return 0,
        };
        let is_trained = |value: &Value| trained.contains(&value.node);
        let is_frozen = |value: &Value| !is_trained(value) && !fed.contains(&value.node);
        let factors = || operands.iter().take(2);
        if factors().any(is_trained) { u8::from(factors().any(is_frozen)) } else { 2 }
    };
    ops.iter().map(of).collect()
}

/// The values of the tensors of a cost graph, in its order; `ops` are those of the graph that the costs describe, which
/// may have a loss besides.
pub fn tensor_values(graph: &Graph, ops: &[NodeId]) -> Vec<Value> {
    let op_index: HashMap<NodeId, OpId> = ops.iter().enumerate().map(|(i, id)| (*id, OpId(i as u32))).collect();
    let parts = parts(graph, &op_index);
    let tensors_of = |id: &NodeId| {
        let parts = parts.get(id).into_iter().flatten().flat_map(|part| graph.values(*part));
        graph.values(*id).into_iter().chain(parts).collect::<Vec<_>>()
    };
    ops.iter().flat_map(tensors_of).filter(|value| is_tensor(graph, &op_index, *value)).collect()
}

/// True if another op reads the value, or if it is a result of the model.
fn is_tensor(graph: &Graph, op_index: &HashMap<NodeId, OpId>, value: Value) -> bool {
    let op = |node: NodeId| op_index.get(&graph.op_of(node)).copied();
    let producer = op(value.node);
    let is_read =
        graph.consumers(value).into_iter().filter_map(|(node, _)| op(node)).any(|reader| Some(reader) != producer);
    is_read || graph.outputs.iter().any(|output| output.value == value)
}

fn parts(graph: &Graph, number: &HashMap<NodeId, OpId>) -> HashMap<NodeId, Vec<NodeId>> {
    let mut parts: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
    for id in graph.ids() {
        if let Some(op) = graph.node(id).part_of.filter(|op| number.contains_key(op)) {
            parts.entry(op).or_default().push(id);
        }
    }
    parts
}

/// For each op of parameters, random numbers and constants alone, the op it joins: the first data-dependent reader,
/// also through other such ops. All its consumers then come after that op. In a graph without inputs no op joins
/// another.
fn joins(graph: &Graph, attribution: &Attribution, readers: &dyn Fn(Value) -> Vec<OpId>) -> Vec<Option<OpId>> {
    let data = of_data(graph);
    let depends_on_data = |op: usize| data.contains(&attribution.ops[op]);
    let last = (0..attribution.ops.len()).rev().find(|&op| depends_on_data(op)).map(|op| OpId(op as u32));
    let mut joins: Vec<Option<OpId>> = vec![None; attribution.ops.len()];
    let mut leads: Vec<Option<OpId>> = vec![None; attribution.ops.len()];
    for op in (0..attribution.ops.len()).rev() {
        if depends_on_data(op) {
            continue;
        }
        let reader_ops = graph.values(attribution.ops[op]).into_iter().flat_map(readers);
        leads[op] =
            reader_ops.filter_map(|to| if depends_on_data(to.index()) { Some(to) } else { leads[to.index()] }).min();
        joins[op] = leads[op].or(last);
    }
    joins
}

/// The model's element type: that of most elements of its float parameters, or else of its first float value.
pub fn dtype(graph: &Graph) -> DType {
    let mut sizes: Vec<(DType, f64)> = Vec::new();
    for id in graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Parameter(_))) {
        let fact = &graph.node(id).facts[0];
        match sizes.iter_mut().find(|(dtype, _)| *dtype == fact.dtype) {
            Some((_, size)) => *size += elements(fact),
            None => sizes.push((fact.dtype, elements(fact))),
        }
    }
    // The first of equals.
    let floats = sizes.into_iter().rev().filter(|(dtype, _)| dtype.is_float());
    let majority = floats.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(dtype, _)| dtype);
    let first = || graph.ids().flat_map(|id| graph.node(id).facts.iter().map(|f| f.dtype)).find(|d| d.is_float());
    majority.or_else(first).unwrap_or(DType::F32)
}

/// Copies times and workspaces from a profile, after checking that it belongs to this model at these sizes. Without
/// `sha256`, the model file's fingerprint is not compared.
pub fn fill(costs: &mut CostGraph, profile: &Profile, sha256: Option<&str>) -> Result<(), FillError> {
    if profile.ops.len() != costs.ops.len() {
        let model = short_name(&profile.model.file);
        return Err(FillError::Count { profiled: profile.ops.len(), model, ops: costs.ops.len() });
    }
    for (id, (op, profiled)) in costs.ops.iter().zip(&profile.ops).enumerate() {
        if op.name != profiled.name || op.op != profiled.op {
            let describe = |name: &str, op: &str| format!("{} ({})", short_name(name), short_name(op));
            let (profiled_op, model_op) = (describe(&profiled.name, &profiled.op), describe(&op.name, &op.op));
            return Err(FillError::Op { id, profiled: profiled_op, model: model_op });
        }
    }
    if let Some(sha256) = sha256.filter(|sha| *sha != profile.model.sha256) {
        return Err(FillError::Sha { profiled: short_name(&profile.model.sha256), model: short_name(sha256) });
    }
    for (id, (op, profiled)) in costs.ops.iter().zip(&profile.ops).enumerate() {
        if op.out_bytes != profiled.out_bytes {
            return Err(FillError::Size {
                id,
                name: short_name(&op.name),
                profiled: profiled.out_bytes,
                model: op.out_bytes,
                micro_batch: profile.settings.micro_batch,
                dtype: short_name(&profile.settings.dtype),
            });
        }
    }
    let trained = costs.ops.iter().zip(&profile.ops).enumerate();
    if let Some((id, (op, profiled))) = { trained }.find(|(_, (op, profiled))| op.param_bytes != profiled.param_bytes) {
        let (profiled, model) = (profiled.param_bytes, op.param_bytes);
        return Err(FillError::Trained { id, name: short_name(&op.name), profiled, model });
    }
    for (op, profiled) in costs.ops.iter_mut().zip(&profile.ops) {
        op.fwd_us = profiled.fwd_us;
        op.bwd_us = profiled.bwd_us;
        op.weight_grad_us = profiled.weight_grad_us;
        op.update_us = profiled.update_us.unwrap_or(0.0);
        op.workspace_bytes = profiled.workspace_bytes;
        op.flops = profiled.flops as f64;
        (op.batched_grad_bytes, op.batched_grad_workspace_bytes) =
            (profiled.batched_grad_bytes, profiled.batched_grad_workspace_bytes);
    }
    Ok(())
}
