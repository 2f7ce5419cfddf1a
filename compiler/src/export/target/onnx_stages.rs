//! One ONNX model per stage (`stage_0.onnx` and so on). Run in sequence, they compute the same as the whole model.
//!
//! A stage contains the initializers it reads, so tied weights appear in several stages. Its inputs are model inputs
//! and tensors of earlier stages, under their names in the model; `stages.json` gives the source of each:
//!
//! ```text
//! {"stages": [{"file": "stage_0.onnx", "inputs": [{"name": "x", "from": "input"}], "outputs": ["h"], …},
//!             {"file": "stage_1.onnx", "inputs": [{"name": "h", "from": 0}], "outputs": ["y"], …}]}
//! ```
//!
//! Types and shapes of tensors between stages are those in the file, else those found by the importer.

use super::nodes::{self, assign_stages, reads};
use super::onnx::{describe, read};
use super::payloads::{self, INLINE};
use super::refusal::Refusal;
use super::{Bundle, ExportInput, File, Imported, fit};
use crate::graph::{Graph, Output};
use crate::import::import::{Batch, ImportError, from_onnx};
use crate::import::onnx::lower::error::LowerError;
use crate::import::onnx::lower::weight::dtype_of;
use crate::import::onnx::model::{OnnxModel, ValueInfo};
use crate::import::onnx::name::unique_names;
use crate::import::onnx::proto::tensor_proto::DataType;
use crate::import::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use crate::import::onnx::proto::type_proto::{self, Tensor as TensorType};
use crate::import::onnx::proto::{GraphProto, ModelProto, NodeProto, TensorShapeProto, TypeProto, ValueInfoProto};
use crate::tensor::dim::{Bindings, Dim};
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Maximum number of additional imports to find the shapes between stages.
const MOST_IMPORTS: usize = 64;

/// The first IR version in which an initializer need not be a graph input.
const IR_VERSION: i64 = 4;

/// Writes one model per stage and `stages.json`.
pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    fit::is_of_a_model(plan)?;
    let imported = fit::model(input)?;
    let (mut proto, model) = read(imported.path)?;
    let staged = assign_stages(plan, &imported.model.graph, &model)?;
    let stages = cut(&model, &staged.stages, plan.stages.len())?;
    let between: BTreeSet<&str> = stages.iter().flat_map(|stage| stage.outputs.iter().copied()).collect();
    let types = types(&proto, &model, imported, &between)?;
    let mut bundle = Bundle::default();
    let mut entries = Vec::new();
    let graph = proto.graph.take().unwrap_or_default();
    let parts = Parts::of(&proto, &graph, &model);
    for (at, stage) in stages.iter().enumerate() {
        let name = format!("stage_{at}.onnx");
        let mut stage_model = parts.stage(&model, stage, &types, at);
        describe(&mut stage_model, plan);
        let inputs: Vec<Value> = stage
            .inputs
            .iter()
            .map(|(name, from)| json!({"name": name, "from": from.map_or(json!("input"), |stage| json!(stage))}))
            .collect();
        let planned = &plan.stages[at];
        let mut entry = json!({
            "file": name,
            "inputs": inputs,
            "outputs": stage.outputs,
            "replicas": planned.replicas,
            "devices": planned.devices,
        });
        if planned.degree() > 1 {
            entry["tensor_degree"] = json!(planned.degree());
        }
        entries.push(entry);
        bundle.files.extend(payloads::files(stage_model, &name, INLINE));
    }
    let outputs: Vec<&str> = model.outputs.iter().map(|output| output.name.as_str()).collect();
    let manifest = json!({"stages": entries, "outputs": outputs});
    let text = serde_json::to_string_pretty(&manifest).unwrap_or_default() + "\n";
    bundle.files.push(File { name: "stages.json".to_string(), bytes: text.into_bytes() });
    bundle.notes.extend(nodes::moved_note(&staged.moved));
    Ok(bundle)
}

/// Contents of one stage, by name.
#[derive(Default)]
struct Stage<'a> {
    /// Indices of its nodes, in topological order.
    nodes: Vec<usize>,
    /// External inputs with the stage that produces each; `None` for model inputs.
    inputs: BTreeMap<&'a str, Option<u32>>,
    /// Tensors read by other stages, and model outputs.
    outputs: BTreeSet<&'a str>,
    reads: BTreeSet<&'a str>,
}

/// Assigns nodes to stages, with copies of the constant nodes they read.
fn cut<'a>(model: &'a OnnxModel, stages: &[Option<u32>], count: usize) -> Result<Vec<Stage<'a>>, Refusal> {
    let mut producer_of: HashMap<&str, usize> = HashMap::new();
    for (at, node) in model.nodes.iter().enumerate() {
        producer_of.extend(node.outputs.iter().filter(|name| !name.is_empty()).map(|name| (name.as_str(), at)));
    }
    let inputs: BTreeSet<&str> = model.inputs.iter().map(|input| input.name.as_str()).collect();
    let last = count.saturating_sub(1) as u32;
    let mut cut: Vec<Stage<'a>> = Vec::with_capacity(count);
    let mut nodes_of_stage: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); count];
    for (at, stage) in stages.iter().enumerate() {
        if let Some(nodes) = stage.and_then(|stage| nodes_of_stage.get_mut(stage as usize)) {
            nodes.insert(at);
        }
    }
    for (stage, mut nodes) in (0u32..).zip(nodes_of_stage) {
        let mut part = Stage::default();
        let mut open: Vec<usize> = nodes.iter().copied().collect();
        // Outputs that depend only on constants are computed by the last stage.
        let constant = |at: &usize| stages[*at].is_none();
        if stage == last {
            let results = model.outputs.iter().filter_map(|output| producer_of.get(output.name.as_str()).copied());
            open.extend(results.filter(constant).filter(|at| nodes.insert(*at)));
        }
        while let Some(at) = open.pop() {
            for name in reads(&model.nodes[at]) {
                part.reads.insert(name);
                match producer_of.get(name) {
                    Some(&producer) => match stages[producer] {
                        None => open.extend(nodes.insert(producer).then_some(producer)),
                        Some(producer_stage) if producer_stage != stage => {
                            part.inputs.insert(name, Some(producer_stage));
                        }
                        Some(_) => {}
                    },
                    None if inputs.contains(name) => {
                        part.inputs.insert(name, None);
                    }
                    None => {}
                }
            }
        }
        part.nodes = nodes.into_iter().collect();
        cut.push(part);
    }
    let crossing: Vec<(&str, u32)> =
        cut.iter().flat_map(|stage| &stage.inputs).filter_map(|(name, from)| Some((*name, (*from)?))).collect();
    let results = model.outputs.iter().map(|output| {
        let producer = producer_of.get(output.name.as_str());
        let stage = producer.map(|at| stages[*at].unwrap_or(last));
        stage.map(|stage| (output.name.as_str(), stage)).ok_or_else(|| Refusal::Model {
            what: format!("no node computes result `{}`, an input or a constant", short_name(&output.name)),
        })
    });
    for (name, stage) in crossing.into_iter().map(Ok).chain(results).collect::<Result<Vec<_>, Refusal>>()? {
        if let Some(stage) = cut.get_mut(stage as usize) {
            stage.outputs.insert(name);
        }
    }
    Ok(cut)
}

/// The parts of the source file from which stage models are built.
struct Parts<'a> {
    shell: &'a ModelProto,
    source: &'a GraphProto,
    nodes: HashMap<String, &'a NodeProto>,
    values: HashMap<&'a str, &'a Bytes>,
}

impl<'a> Parts<'a> {
    fn of(shell: &'a ModelProto, source: &'a GraphProto, model: &'a OnnxModel) -> Parts<'a> {
        let nodes = unique_names(&source.node).into_iter().zip(&source.node).collect();
        Parts { shell, source, nodes, values: payloads::external(model) }
    }

    fn stage(
        &self,
        model: &OnnxModel,
        stage: &Stage<'_>,
        types: &HashMap<String, ValueInfoProto>,
        at: usize,
    ) -> ModelProto {
        let type_of = |name: &str| types.get(name).cloned().unwrap_or_else(|| untyped(name));
        let source = self.source;
        let nodes: Vec<NodeProto> = { stage.nodes.iter() }
            .filter_map(|node| self.nodes.get(&model.nodes[*node].name).map(|node| (*node).clone()))
            .collect();
        let outputs: BTreeSet<&str> = nodes.iter().flat_map(|node| node.output.iter().map(String::as_str)).collect();
        let value_info = { source.value_info.iter() }
            .filter(|info| {
                (outputs.contains(info.name()) && !stage.outputs.contains(info.name()))
                    || stage.reads.contains(info.name()) && !stage.inputs.contains_key(info.name())
            })
            .cloned()
            .collect();
        // Model inputs and outputs are in model order, tensors between stages are sorted by name.
        let in_model_order = |names: Vec<&str>, order: &[ValueInfo]| {
            let position = |name: &str| order.iter().position(|info| info.name == name).unwrap_or(usize::MAX);
            let mut names: Vec<(usize, String)> =
                names.into_iter().map(|name| (position(name), name.to_string())).collect();
            names.sort();
            names.into_iter().map(|(_, name)| type_of(&name)).collect::<Vec<_>>()
        };
        let mut initializer: Vec<_> =
            source.initializer.iter().filter(|tensor| stage.reads.contains(tensor.name())).cloned().collect();
        initializer.iter_mut().for_each(|tensor| payloads::bring(tensor, &self.values));
        let graph = GraphProto {
            name: Some(format!("{}.stage_{at}", source.name())),
            doc_string: source.doc_string.clone(),
            input: in_model_order(stage.inputs.keys().copied().collect(), &model.inputs),
            output: in_model_order(stage.outputs.iter().copied().collect(), &model.outputs),
            node: nodes,
            initializer,
            value_info,
            ..GraphProto::default()
        };
        ModelProto {
            ir_version: Some(self.shell.ir_version().max(IR_VERSION)),
            graph: Some(graph),
            training_info: Vec::new(),
            ..self.shell.clone()
        }
    }
}

fn untyped(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.to_string()), ..Default::default() }
}

/// Types and shapes of model inputs and outputs and of the tensors `between` stages.
fn types(
    proto: &ModelProto,
    model: &OnnxModel,
    imported: &Imported<'_>,
    between: &BTreeSet<&str>,
) -> Result<HashMap<String, ValueInfoProto>, Refusal> {
    let mut types: HashMap<String, ValueInfoProto> = HashMap::new();
    if let Some(graph) = &proto.graph {
        let annotated = graph.value_info.iter().filter(|info| between.contains(info.name()) && has_shape(info));
        for info in annotated.chain(&graph.input).chain(&graph.output) {
            types.insert(info.name().to_string(), info.clone());
        }
    }
    let mut missing: BTreeSet<String> =
        between.iter().filter(|name| !types.contains_key(**name)).map(|name| name.to_string()).collect();
    for _ in 0..MOST_IMPORTS {
        if missing.is_empty() {
            break;
        }
        let mut probe = model.clone();
        let info = |name: &String| ValueInfo { name: name.clone(), elem_type: 0, dims: None };
        probe.outputs.extend(missing.iter().map(info));
        match from_onnx(&probe, &imported.model.file, imported.options) {
            Ok(probed) => {
                types.extend(
                    facts(&probed.graph, &missing, &probed.batch)
                        .into_iter()
                        .map(|info| (info.name().to_string(), info)),
                );
                break;
            }
            // Symbolic sizes are not tensors of the imported graph.
            Err(ImportError::Lower(LowerError::Output { name, .. })) if missing.remove(&name) => {
                types.insert(name.clone(), tensor(&name, integer(model, &name), None));
            }
            Err(error) => return Err(Refusal::Model { what: format!("shapes between stages are unknown: {error}") }),
        }
    }
    match between.iter().find(|name| !types.contains_key(**name)) {
        None => Ok(types),
        Some(name) => Err(Refusal::Model {
            what: format!("the type of `{}`, which is sent between stages, is unknown", short_name(name)),
        }),
    }
}

/// True if the file declares type and shape of a tensor.
fn has_shape(info: &ValueInfoProto) -> bool {
    match info.r#type.as_ref().and_then(|kind| kind.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => tensor.elem_type() != 0 && tensor.shape.is_some(),
        _ => false,
    }
}

/// The element type of a size tensor: that of a `Cast`, else that of `Shape` (int64).
fn integer(model: &OnnxModel, name: &str) -> i32 {
    let producer =
        model.nodes.iter().find(|node| node.op_type == "Cast" && node.outputs.iter().any(|output| output == name));
    let to = producer.and_then(|node| node.attributes.iter().find(|attribute| attribute.name() == "to"));
    to.and_then(|to| i32::try_from(to.i()).ok()).unwrap_or(DataType::Int64 as i32)
}

/// Types and shapes found by the importer. A static batch stays static, because constants may depend on it.
fn facts(graph: &Graph, names: &BTreeSet<String>, batch: &Batch) -> Vec<ValueInfoProto> {
    let mut bindings = Bindings::new();
    if let Batch::Symbol { name, default: Some(size) } = batch {
        bindings.insert(name.clone(), *size);
    }
    let type_info = |output: &Output| {
        let fact = graph.fact(output.value);
        let fact: Fact = fact.substitute(&bindings).unwrap_or_else(|_| fact.clone());
        let code = (1..64).find(|code| dtype_of(*code) == Some(fact.dtype)).unwrap_or(0);
        let dim = |dim: &Dim| {
            let value = match dim.known() {
                Some(size) => dimension::Value::DimValue(size),
                None => dimension::Value::DimParam(dim.to_string()),
            };
            Dimension { value: Some(value), ..Default::default() }
        };
        tensor(&output.name, code, Some(fact.shape.iter().map(dim).collect()))
    };
    graph.outputs.iter().filter(|output| names.contains(&output.name)).map(type_info).collect()
}

fn tensor(name: &str, elem_type: i32, dims: Option<Vec<Dimension>>) -> ValueInfoProto {
    let shape = dims.map(|dim| TensorShapeProto { dim });
    let kind = type_proto::Value::TensorType(TensorType { elem_type: Some(elem_type), shape });
    let kind = TypeProto { value: Some(kind), ..Default::default() };
    ValueInfoProto { name: Some(name.to_string()), r#type: Some(kind), ..Default::default() }
}
