//! Inlines subgraphs: a region under `no_grad`, autocast or activation checkpointing is a node that runs a nested
//! graph. Its nodes replace that node and record the region they come from.
//!
//! Names are local to a nested graph. They get the region's number as a prefix; placeholders get the names of the
//! arguments. An in-place change in a region thus reaches the outer tensor.

use super::error::FxError;
use super::program::{label, names};
use super::schema::{Argument, Graph, Node, OptionalTensor, Region, SymArgument};
use std::collections::HashMap;

/// Tests for a higher-order operator that runs its graph argument exactly once.
pub fn is_wrapper(target: &str) -> bool {
    let Some(name) = target.strip_prefix("torch.ops.higher_order.") else { return false };
    let name = name.split('.').next().unwrap_or(name);
    matches!(
        name,
        SET_GRAD
            | AUTOCAST
            | "tag_activation_checkpoint"
            | "wrap_activation_checkpoint"
            | "wrap"
            | "hints_wrapper"
            | "invoke_subgraph"
            | "strict_mode"
    )
}

const SET_GRAD: &str = "wrap_with_set_grad_enabled";

const AUTOCAST: &str = "wrap_with_autocast";

/// Inlines all regions; also returns the inlined name of each region result.
pub fn inline_regions(graph: Graph) -> Result<(Graph, HashMap<String, String>), FxError> {
    if !graph.nodes.iter().any(|node| is_wrapper(&node.target)) {
        return Ok((graph, HashMap::new()));
    }
    let Graph { inputs, mut outputs, nodes, tensor_values } = graph;
    let mut inliner = Inliner { nodes: Vec::new(), tensor_values, regions: 0 };
    let mut renames = HashMap::new();
    inliner.graph(nodes, Region::default(), "", &mut renames)?;
    for output in &mut outputs {
        rename(output, "", &renames);
    }
    Ok((Graph { inputs, outputs, nodes: inliner.nodes, tensor_values: inliner.tensor_values }, renames))
}

struct Inliner {
    nodes: Vec<Node>,
    tensor_values: HashMap<String, super::schema::TensorMeta>,
    regions: usize,
}

impl Inliner {
    /// Adds the nodes of one graph; names get `prefix` unless `renames` maps them.
    fn graph(
        &mut self,
        nodes: Vec<Node>,
        region: Region,
        prefix: &str,
        renames: &mut HashMap<String, String>,
    ) -> Result<(), FxError> {
        for mut node in nodes {
            for input in &mut node.inputs {
                rename(&mut input.arg, prefix, renames);
            }
            if is_wrapper(&node.target) {
                self.region(node, region, renames)?;
                continue;
            }
            node.name = Some(label(&node));
            for output in &mut node.outputs {
                rename(output, prefix, renames);
            }
            node.region = region;
            self.nodes.push(node);
        }
        Ok(())
    }

    /// Adds the graph that a node runs. The operands follow the graph among the node's arguments.
    fn region(&mut self, node: Node, outer: Region, renames: &mut HashMap<String, String>) -> Result<(), FxError> {
        let error = FxError::Region { node: label(&node) };
        let (mut switch, mut inner, mut arguments) = (None, None, Vec::new());
        for input in node.inputs {
            match input.arg {
                Argument::AsGraph(graph) if inner.is_none() => inner = Some(graph.graph),
                Argument::AsBool(on) if inner.is_none() && switch.is_none() => switch = Some(on),
                argument if inner.is_some() => arguments.extend(names(&argument).map(String::from)),
                _ => {}
            }
        }
        let Some(inner) = inner else { return Err(error) };
        let placeholders: Vec<String> = inner.inputs.iter().flat_map(names).map(String::from).collect();
        if placeholders.len() != arguments.len() {
            return Err(error);
        }
        let mut region = outer;
        match (node.target.rsplit('.').next(), switch) {
            // Regions nested in a `no_grad` region have no gradients either.
            (Some(SET_GRAD), Some(on)) => region.no_gradients |= !on,
            (Some(AUTOCAST), Some(on)) => region.autocast = on,
            (Some(SET_GRAD | AUTOCAST), None) => return Err(error),
            _ => {}
        }
        self.regions += 1;
        let prefix = format!("{}:", self.regions);
        let mut inner_renames: HashMap<String, String> = placeholders.into_iter().zip(arguments).collect();
        for (name, meta) in inner.tensor_values {
            if !inner_renames.contains_key(&name) {
                self.tensor_values.insert(format!("{prefix}{name}"), meta);
            }
        }
        self.graph(inner.nodes, region, &prefix, &mut inner_renames)?;
        let mut results = inner.outputs;
        for result in &mut results {
            rename(result, &prefix, &inner_renames);
        }
        let output_names: Vec<&str> = node.outputs.iter().flat_map(names).collect();
        let result_names: Vec<&str> = results.iter().flat_map(names).collect();
        if output_names.len() > result_names.len() {
            return Err(error);
        }
        for (name, result) in output_names.into_iter().zip(result_names) {
            renames.insert(name.to_string(), result.to_string());
        }
        Ok(())
    }
}

/// Rewrites every name in an argument to its inlined name.
fn rename(argument: &mut Argument, prefix: &str, renames: &HashMap<String, String>) {
    let rewrite = |name: &mut String| match renames.get(name.as_str()) {
        Some(renamed) => name.clone_from(renamed),
        None if prefix.is_empty() => {}
        None => name.insert_str(0, prefix),
    };
    match argument {
        Argument::AsTensor(name) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(name)) => {
            rewrite(&mut name.name);
        }
        Argument::AsTensors(list) => list.iter_mut().for_each(|name| rewrite(&mut name.name)),
        Argument::AsOptionalTensors(list) => {
            for tensor in list {
                if let OptionalTensor::AsTensor(name) = tensor {
                    rewrite(&mut name.name);
                }
            }
        }
        Argument::AsSymInt(SymArgument::AsName(name)) => rewrite(name),
        Argument::AsSymInts(list) => {
            for size in list {
                if let SymArgument::AsName(name) = size {
                    rewrite(name);
                }
            }
        }
        Argument::AsSymBool(number) | Argument::AsSymFloat(number) => {
            number.as_name.iter_mut().for_each(rewrite);
        }
        Argument::AsSymBools(list) | Argument::AsSymFloats(list) => {
            list.iter_mut().flat_map(|number| number.as_name.iter_mut()).for_each(rewrite);
        }
        _ => {}
    }
}
