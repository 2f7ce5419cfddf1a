//! Detects ONNX files that were exported for inference, from nodes and initializers alone; see [`TrainingWarning`].
//!
//! | finding | evidence |
//! | --- | --- |
//! | folded BatchNorm | the rewriter's mark on a node (`FuseBatchNormInto…`), or a convolution whose weight was named by the older exporter |
//! | inference-mode BatchNorm | no `training_mode`; before operator set 14, no second output |
//! | inference-mode Dropout | `training_mode` absent or false at a non-zero ratio; always before operator set 12 |
//! | removed biases | the rewriter's mark (`RemoveOptionalBiasFrom…`) on a node whose source has a bias parameter |
//! | merged parameters | one vector that is a scale or bias of several modules, or both a parameter and a running statistic; a tensor whose nodes say that they read different parameters |
//! | untied parameters | an embedding and a projection with equal values; a weight, and another that the exporter computed from it |
//! | folded parameters | the optimiser's mark on an initializer that is too small for a weight |
//! | quantised | an operator of quantised models that rounds |
//! | lost detach | a node whose metadata names a detached value that no node makes |
//!
//! Uncertain cases are not reported: a vector with differing values was trained and is shared on purpose, and modules
//! with the same path are one module that runs several times. A Dropout that the exporter removed cannot be detected.

use crate::import::onnx::element;
use crate::import::onnx::lower::weight;
use crate::import::onnx::model::{Node, OnnxModel, Payload, Tensor};
use crate::import::onnx::proto::tensor_proto::DataType;
use crate::import::training_warning::{Finding, TrainingWarning};
use std::collections::{BTreeSet, HashMap};

/// Number of sampled elements in a comparison of two matrices. Equal samples count as equal matrices.
const COMPARED: usize = 512;

/// Maximum number of elements that are compared with the first.
const LOOKED_AT: usize = 1 << 16;

/// Maximum number of embeddings, and of projections per embedding, that are compared.
const TABLES: usize = 64;
const PROJECTIONS: usize = 4096;

/// First operator set in which BatchNormalization has `training_mode`.
const NORM_SAYS: i64 = 14;

/// First operator set in which Dropout has `training_mode`.
const DROPOUT_MODE_OPSET: i64 = 12;

/// All training warnings for a model, in a fixed order.
pub fn doubts(model: &OnnxModel) -> Vec<TrainingWarning> {
    let (readers, modes) = (readers(model), Modes::of(model));
    let trained_names = trained(model);
    let warnings = [
        folded(model),
        nodes(Finding::InferenceBatchNorm, model, |node| modes.is_inference_norm(node)),
        dropouts(model, &modes),
        unbiased(model),
        merged(model, &readers, &trained_names),
        find_untied(model, &readers, &trained_names),
        folded_parameters(model, &trained_names),
        nodes(Finding::Quantised, model, is_quantised),
        lost_detach(model),
    ];
    warnings.into_iter().flatten().collect()
}

/// Determines the mode of BatchNorm and Dropout nodes from the operator set and the constants of the model.
pub struct Modes<'a> {
    opset: Option<i64>,
    constants: HashMap<&'a str, &'a [u8]>,
    /// What nodes compute.
    computed: BTreeSet<&'a str>,
}

impl<'a> Modes<'a> {
    pub fn of(model: &'a OnnxModel) -> Modes<'a> {
        let initializers = model.initializers.iter().filter_map(|t| Some((t.name.as_str(), bytes(t)?)));
        let constants = model.nodes.iter().filter(|node| standard(node, "Constant")).filter_map(|node| {
            let value = node.attributes.iter().find(|a| a.name() == "value")?.t.as_ref()?;
            Some((node.outputs.first()?.as_str(), value.raw_data.as_deref()?))
        });
        let nodes = model.nodes.iter().filter(|node| !standard(node, "Identity") && !standard(node, "Constant"));
        let computed = nodes.flat_map(|node| &node.outputs).map(String::as_str).collect();
        Modes { opset: model.opset(""), constants: initializers.chain(constants).collect(), computed }
    }

    /// True for a BatchNorm that normalises with running statistics. Without them, PyTorch's exporter computes the
    /// statistics of the batch in front of it.
    pub fn is_inference_norm(&self, node: &Node) -> bool {
        let has_computed_mean = node.inputs.get(3).is_some_and(|mean| self.computed.contains(mean.as_str()));
        standard(node, "BatchNormalization")
            && !has_computed_mean
            && match self.opset {
                Some(..NORM_SAYS) => node.outputs.iter().skip(1).all(String::is_empty),
                _ => !node.attributes.iter().any(|a| a.name() == "training_mode" && a.i() != 0),
            }
    }

    /// True for a Dropout with a non-zero ratio in inference mode.
    pub fn is_inference_dropout(&self, node: &Node) -> bool {
        if !standard(node, "Dropout") {
            return false;
        }
        if self.opset.is_some_and(|version| version < DROPOUT_MODE_OPSET) {
            return node.attributes.iter().find(|a| a.name() == "ratio").is_none_or(|a| a.f() != 0.0);
        }
        // A `training_mode` computed at run time counts as training. An omitted ratio is 0.5.
        let trains = node.inputs.get(2).is_some_and(|name| !name.is_empty()) && !self.is_zero(node, 2);
        !trains && !self.is_zero(node, 1)
    }

    fn is_zero(&self, node: &Node, slot: usize) -> bool {
        let bytes = node.inputs.get(slot).and_then(|name| self.constants.get(name.as_str()));
        bytes.is_some_and(|bytes| bytes.iter().take(8).all(|byte| *byte == 0))
    }
}

fn bytes(tensor: &Tensor) -> Option<&[u8]> {
    match &tensor.payload {
        Payload::Bytes(bytes) => Some(bytes),
        _ => None,
    }
}

fn standard(node: &Node, operator: &str) -> bool {
    node.domain.is_empty() && node.op_type == operator
}

fn nodes(finding: Finding, model: &OnnxModel, matches_role: impl Fn(&Node) -> bool) -> Option<TrainingWarning> {
    let mut matches = model.nodes.iter().filter(|node| matches_role(node));
    let first = matches.next()?.name.clone();
    Some(TrainingWarning { finding, count: 1 + matches.count(), first, beside: String::new() })
}

fn dropouts(model: &OnnxModel, modes: &Modes<'_>) -> Option<TrainingWarning> {
    let warning = nodes(Finding::InferenceDropout, model, |node| modes.is_inference_dropout(node))?;
    let training = model.nodes.iter().filter(|node| standard(node, "Dropout")).count() - warning.count;
    let beside = if training > 0 { format!("while {training} others are in training mode") } else { String::new() };
    Some(TrainingWarning { beside, ..warning })
}

/// True if the node's metadata under `key` contains `value`.
fn has_attribute(node: &Node, key: &str, value: &str) -> bool {
    node.metadata.iter().any(|property| property.key() == key && property.value().contains(value))
}

const RULES: &str = "pkg.onnxscript.rewriter.rule_name";

/// A zero bias added by the exporter itself is no loss, so the FX source of the node must mention a bias.
fn unbiased(model: &OnnxModel) -> Option<TrainingWarning> {
    nodes(Finding::RemovedBias, model, |node| {
        has_attribute(node, RULES, "RemoveOptionalBias")
            && !has_attribute(node, RULES, "FuseBatchNorm")
            && node.torch_source().is_some_and(|source| source.contains("_bias"))
    })
}

fn folded(model: &OnnxModel) -> Option<TrainingWarning> {
    let marked = |node: &Node| has_attribute(node, RULES, "FuseBatchNorm");
    // The older exporter names a computed weight after its operator plus a number.
    let renamed = |node: &Node| {
        matches!(node.op_type.as_str(), "Conv" | "ConvTranspose")
            && node.inputs.get(1).is_some_and(|name| name.starts_with("onnx::Conv"))
            && node.inputs.get(2).is_some_and(|name| name.starts_with("onnx::Conv"))
    };
    nodes(Finding::FoldedBatchNorm, model, |node| node.domain.is_empty() && (marked(node) || renamed(node)))
}

/// True for operators that round. `DequantizeLinear` alone does not: gradients pass the constant weights that it reads.
fn is_quantised(node: &Node) -> bool {
    node.domain.is_empty()
        && matches!(
            node.op_type.as_str(),
            "QuantizeLinear"
                | "DynamicQuantizeLinear"
                | "QLinearConv"
                | "QLinearMatMul"
                | "ConvInteger"
                | "MatMulInteger"
        )
}

/// The names of values in the source of a node.
fn source_names(text: &str) -> impl Iterator<Item = &str> {
    let is_end = |c: char| !c.is_ascii_alphanumeric() && c != '_';
    text.split('%').skip(1).map(move |text| text.split(is_end).next().unwrap_or_default())
}

/// Nodes that read a detached value whose `Identity` the exporter's optimiser removed.
fn lost_detach(model: &OnnxModel) -> Option<TrainingWarning> {
    let sources: Vec<(&Node, &str)> =
        model.nodes.iter().filter_map(|node| Some((node, node.torch_source()?))).collect();
    let made: BTreeSet<&str> = sources.iter().filter_map(|(_, text)| source_names(text).next()).collect();
    let is_lost =
        |text: &str| source_names(text).skip(1).any(|name| name.starts_with("detach") && !made.contains(name));
    let mut lost = sources.iter().filter(|(_, text)| is_lost(text));
    let first = lost.next()?.0.name.clone();
    Some(TrainingWarning { finding: Finding::LostDetach, count: 1 + lost.count(), first, beside: String::new() })
}

/// The names of all initializers that are trained.
fn trained(model: &OnnxModel) -> BTreeSet<String> {
    let (_, weights) = weight::sort(&model.initializers, &model.nodes, &model.roles);
    weights.into_iter().filter(|weight| weight.trainable).map(|weight| weight.name).collect()
}

/// Small values that the exporter computed from a tensor of the model. Large ones are merged weights, and are trained.
fn folded_parameters(model: &OnnxModel, trained: &BTreeSet<String>) -> Option<TrainingWarning> {
    let constants = model.initializers.iter().filter(|t| is_float(t) && !trained.contains(&t.name));
    let mut matches = constants.filter_map(|tensor| {
        let source = model.roles.folded.get(&tensor.name)?.iter().find(|source| !weight::made_up(source))?;
        Some((&tensor.name, source))
    });
    let (first, beside) = matches.next()?;
    let count = 1 + matches.count();
    Some(TrainingWarning { finding: Finding::FoldedParameter, count, first: first.clone(), beside: beside.clone() })
}

type Readers<'a> = HashMap<&'a str, Vec<(&'a Node, usize)>>;

/// Readers of an `Identity` of an initializer count as readers of the initializer. PyTorch's older exporter adds an
/// `Identity` where it merged two initializers.
fn readers(model: &OnnxModel) -> Readers<'_> {
    let mut readers: Readers<'_> = model.initializers.iter().map(|tensor| (tensor.name.as_str(), Vec::new())).collect();
    let mut roots: HashMap<&str, &str> = readers.keys().map(|name| (*name, *name)).collect();
    for node in model.nodes.iter().filter(|node| node.domain.is_empty()) {
        if let ("Identity", [input], [output]) =
            (node.op_type.as_str(), node.inputs.as_slice(), node.outputs.as_slice())
            && let Some(&root) = roots.get(input.as_str())
        {
            roots.insert(output, root);
            continue;
        }
        for (slot, name) in node.inputs.iter().enumerate() {
            if let Some(list) = roots.get(name.as_str()).and_then(|root| readers.get_mut(root)) {
                list.push((node, slot));
            }
        }
    }
    readers
}

fn is_vector_parameter(node: &Node, slot: usize) -> bool {
    match node.op_type.as_str() {
        "LayerNormalization" | "GroupNormalization" | "InstanceNormalization" | "BatchNormalization" => {
            matches!(slot, 1 | 2)
        }
        "RMSNormalization" => slot == 1,
        "Conv" | "ConvTranspose" | "Gemm" => slot == 2,
        "Add" | "Mul" => true,
        _ => false,
    }
}

fn is_norm(node: &Node) -> bool {
    node.op_type.ends_with("Normalization")
}

fn is_float(tensor: &Tensor) -> bool {
    matches!(
        DataType::try_from(tensor.elem_type),
        Ok(DataType::Float | DataType::Double | DataType::Float16 | DataType::Bfloat16)
    )
}

fn merged(model: &OnnxModel, readers: &Readers<'_>, trained: &BTreeSet<String>) -> Option<TrainingWarning> {
    let merges = model.initializers.iter().filter(|t| is_float(t)).filter_map(|tensor| {
        let uses = readers.get(tensor.name.as_str())?;
        Some((&tensor.name, find_merge_reason(tensor, uses, trained.contains(&tensor.name))?))
    });
    let merges: Vec<(&String, String)> = merges.collect();
    let (first, beside) = merges.first()?.clone();
    Some(TrainingWarning { finding: Finding::Merged, count: merges.len(), first: first.clone(), beside })
}

/// Describes the modules that share a tensor unintentionally; `None` if sharing may be intended.
fn find_merge_reason(tensor: &Tensor, uses: &[(&Node, usize)], is_trained: bool) -> Option<String> {
    // Tensors with differing values were random or trained, so two of them would not be equal by chance.
    let has_one_value = bytes(tensor).map(|bytes| is_constant_valued(tensor, bytes));
    if uses.len() < 2 || has_one_value == Some(false) {
        return None;
    }
    let is_vector = tensor.dims.len() == 1 && tensor.dims[0] > 1;
    let statistic = uses.iter().find(|(node, slot)| node.op_type == "BatchNormalization" && matches!(slot, 3 | 4));
    let parameters: Vec<&Node> =
        uses.iter().filter(|(node, slot)| is_vector_parameter(node, *slot)).map(|(node, _)| *node).collect();
    if let (Some((node, _)), true, true) = (statistic, is_vector, !parameters.is_empty()) {
        return Some(format!("a parameter and a running statistic of {}", node.name));
    }
    let read_by = |nodes: &[&Node], first: &Node, second: &Node| {
        let count = nodes.iter().map(|node| &node.name).collect::<BTreeSet<_>>().len();
        format!("read by {count} nodes such as {} and {}", first.name, second.name)
    };
    // PyTorch's newer exporter names the parameters that each node read: `%p_` and the path.
    let nodes: Vec<&Node> = uses.iter().map(|(node, _)| *node).collect();
    let names = nodes.iter().map(|node| -> BTreeSet<&str> {
        source_names(node.torch_source().unwrap_or_default()).filter(|name| name.starts_with("p_")).collect()
    });
    let names: Vec<BTreeSet<&str>> = names.collect();
    if is_trained && names.iter().all(|names| !names.is_empty()) {
        let other = names.iter().position(|other| other.is_disjoint(&names[0]))?;
        return (is_vector || has_one_value.is_some()).then(|| read_by(&nodes, nodes[0], nodes[other]));
    }
    let modules: BTreeSet<&str> = parameters.iter().map(|node| node.module.as_str()).collect();
    let named = modules.iter().filter(|module| !module.is_empty()).count();
    // Without module paths, only a constant-valued scale or bias of several normalisations is certain.
    let norms = parameters.iter().filter(|node| is_norm(node)).count();
    let is_certain = named >= 2 || (named == 0 && has_one_value.is_some() && norms >= 2);
    let first = parameters.first()?;
    let second = parameters.iter().find(|node| node.module != first.module).or(parameters.last())?;
    (is_vector && is_certain).then(|| read_by(&parameters, first, second))
}

fn is_constant_valued(tensor: &Tensor, bytes: &[u8]) -> bool {
    let size = element::bits(tensor.elem_type).and_then(|bits| usize::try_from(bits / 8).ok()).unwrap_or_default();
    let Some(first) = bytes.get(..size).filter(|first| !first.is_empty()) else { return false };
    bytes.chunks_exact(size).take(LOOKED_AT).all(|element| element == first)
}

/// A matrix with values in rows of `size`-byte elements.
struct Matrix<'a> {
    tensor: &'a Tensor,
    bytes: &'a [u8],
    dims: [usize; 2],
    size: usize,
}

impl<'a> Matrix<'a> {
    fn of(tensor: &'a Tensor) -> Option<Matrix<'a>> {
        let &[rows, columns] = tensor.dims.as_slice() else { return None };
        let dims = [usize::try_from(rows).ok()?, usize::try_from(columns).ok()?];
        let size = usize::try_from(element::bits(tensor.elem_type)? / 8).ok()?;
        let bytes = bytes(tensor).filter(|_| is_float(tensor) && dims[0] > 1 && dims[1] > 1)?;
        Some(Matrix { tensor, bytes, dims, size })
    }

    fn at(&self, row: usize, column: usize) -> Option<&[u8]> {
        let begin = row.checked_mul(self.dims[1])?.checked_add(column)?.checked_mul(self.size)?;
        self.bytes.get(begin..begin.checked_add(self.size)?)
    }

    /// True if two matrices agree at all sampled elements and are not constant-valued. With `transposed`, compares with
    /// the transpose of `other`.
    fn is_equal_to(&self, other: &Matrix<'_>, transposed: bool) -> bool {
        let [rows, columns] = self.dims;
        let same_shape = if transposed { other.dims == [columns, rows] } else { other.dims == self.dims };
        if !same_shape || self.tensor.elem_type != other.tensor.elem_type {
            return false;
        }
        let (mut differ, first) = (false, self.at(0, 0));
        for n in 0..COMPARED {
            // Samples are spread over rows and columns without a regular pattern.
            let (row, column) = (n.wrapping_mul(7919) % rows, n.wrapping_mul(104_729) % columns);
            let mine = self.at(row, column);
            let theirs = if transposed { other.at(column, row) } else { other.at(row, column) };
            if mine != theirs {
                return false;
            }
            differ |= mine != first;
        }
        differ
    }
}

fn find_untied(model: &OnnxModel, readers: &Readers<'_>, trained: &BTreeSet<String>) -> Option<TrainingWarning> {
    let tensor_of = |tensor: &Tensor, matches_role: fn(&Node, usize) -> bool| {
        readers.get(tensor.name.as_str()).is_some_and(|uses| uses.iter().any(|(node, slot)| matches_role(node, *slot)))
    };
    let embeds = |node: &Node, slot: usize| node.op_type == "Gather" && slot == 0;
    let projects =
        |node: &Node, slot: usize| matches!((node.op_type.as_str(), slot), ("MatMul" | "Gemm", 1) | ("Transpose", 0));
    let matrices = |matches_role: fn(&Node, usize) -> bool, max_uses: usize| -> Vec<Matrix<'_>> {
        model.initializers.iter().filter(|t| tensor_of(t, matches_role)).filter_map(Matrix::of).take(max_uses).collect()
    };
    let (tables, projections) = (matrices(embeds, TABLES), matrices(projects, PROJECTIONS));
    let tied = tables.iter().flat_map(|table| {
        let copies = projections.iter().filter(|p| table.is_equal_to(p, false) || table.is_equal_to(p, true));
        copies.map(|copy| [table.tensor.name.as_str(), &copy.tensor.name])
    });
    let folded = model.roles.folded.iter().filter(|(name, _)| trained.contains(*name)).flat_map(|(name, sources)| {
        let is_read = |source: &&String| readers.get(source.as_str()).is_some_and(|uses| !uses.is_empty());
        let kept = sources.iter().filter(|source| trained.contains(*source)).filter(is_read);
        kept.map(|source| [source.as_str(), name])
    });
    let mut pairs: Vec<[&str; 2]> = Vec::new();
    for [one, other] in tied.chain(folded).filter(|[one, other]| one != other) {
        if !pairs.contains(&[one, other]) && !pairs.contains(&[other, one]) {
            pairs.push([one, other]);
        }
    }
    let [first, beside] = pairs.first()?.map(str::to_string);
    Some(TrainingWarning { finding: Finding::Untied, count: pairs.len(), first, beside })
}
