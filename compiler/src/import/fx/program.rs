//! A decoded program: the graph, the roles of its placeholders, and its weights as tensors.
//!
//! The decoder checks that every value is defined once, before its use. Every weight in the signature has a type and a
//! shape; its values are present unless its whole entry is missing.

use crate::import::fx::archive::Archive;
use crate::import::fx::error::{FxError, WeightError};
use crate::import::fx::expression;
use crate::import::fx::guards;
use crate::import::fx::inline::inline_regions;
use crate::import::fx::schema::{
    Argument, ExportedProgram, Graph, InputSpec, Node, OptionalTensor, OutputSpec, Payload, SymArgument, SymInt,
    TensorMeta, Weights,
};
use crate::import::fx::weight::{WeightLocation, dtype_of, onnx_code};
use crate::import::onnx::model::{Dim as SourceDim, ValueInfo};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Supported major version of the schema.
const SCHEMA: i64 = 8;

const JOINT: &str = "a joint graph of forward and backward can be planned and evaluated, but not trained: pipec \
                     generates gradients itself; export the forward graph alone to train it";

/// Name given to the batch symbol; the exporter numbers symbols.
const BATCH: &str = "batch";

/// A decoded and checked program.
#[derive(Debug)]
pub struct Program {
    pub name: String,
    pub graph: Graph,
    /// User inputs, in order.
    pub inputs: Vec<ValueInfo>,
    /// Parameters, buffers and constants; each tied weight once.
    pub weights: Vec<Source>,
    /// Weight index of each weight placeholder.
    pub placeholders: HashMap<String, usize>,
    /// Pairs of output name and value name, in order.
    pub outputs: Vec<(String, String)>,
    /// Buffer mutations: pairs of value name and buffer name.
    pub mutations: Vec<(String, String)>,
    pub torch: String,
    pub warnings: Vec<String>,
    /// The graph contains the backward too and cannot be trained.
    pub joint: bool,
    /// SHA-256 of the graph, the signature and the list of weights.
    pub sha256: [u8; 32],
    /// The exporter's symbol for the batch.
    batch: Option<String>,
    /// Maps a symbol to the symbol that it equals.
    equal: HashMap<String, String>,
}

#[derive(Debug)]
pub struct Source {
    pub name: String,
    pub fact: Fact,
    /// The values, or the name of the missing entry.
    pub initial: Result<Tensor, String>,
    /// Set if the weight is trained.
    pub parameter: bool,
    /// Set for a parameter that is not trained: it becomes a state under its name.
    pub kept: bool,
}

impl Program {
    /// Decodes and checks an archive.
    pub fn read(bytes: &Bytes) -> Result<Program, FxError> {
        let archive = Archive::open(bytes)?;
        if let Some(order) = archive.get("byteorder").filter(|order| order.as_ref() != b"little") {
            return Err(FxError::ByteOrder { found: String::from_utf8_lossy(&order[..order.len().min(64)]).into() });
        }
        let name = name(&archive)?;
        let entry = format!("models/{name}.json");
        let document = archive.get(&entry).cloned().unwrap_or_default();
        let program: ExportedProgram = json(&entry, &document)?;
        if program.schema_version.major != SCHEMA {
            return Err(FxError::Schema { found: program.schema_version.major, known: SCHEMA });
        }
        let mut hash = Sha256::new();
        hash.update(&document);
        let stores = [("data/weights/", "weights"), ("data/constants/", "constants")].map(|(folder, kind)| {
            let entry = format!("{folder}{name}_{kind}_config.json");
            let document = archive.get(&entry).cloned().unwrap_or_default();
            hash.update(&document);
            let list = if document.is_empty() { Ok(Weights::default()) } else { json(&entry, &document) };
            list.map(|weights| Store { folder, weights })
        });
        let [weights, constants] = stores;
        let stores = [weights?, constants?];
        let loss_output = program.graph_module.loss_output();
        let graph = program.graph_module.graph;
        let signature = program.graph_module.signature;
        let joint = signature.output_specs.iter().any(|o| matches!(o, OutputSpec::GradientToParameter { .. }));
        check(&graph)?;
        let (graph, renamed) = inline_regions(graph)?;
        if !renamed.is_empty() {
            check(&graph)?;
        }
        let mut parsed = Program {
            name,
            graph,
            inputs: Vec::new(),
            weights: Vec::new(),
            placeholders: HashMap::new(),
            outputs: Vec::new(),
            mutations: Vec::new(),
            torch: program.torch_version,
            warnings: Vec::new(),
            sha256: hash.finalize().into(),
            batch: None,
            equal: HashMap::new(),
            joint,
        };
        parsed.equal = guards::merge_equal_symbols(&program.guards_code, &|input, axis| parsed.symbol(input, axis));
        if joint {
            parsed.warnings.push(JOINT.to_string());
        }
        parsed.sources(&signature.input_specs, &archive, &stores)?;
        parsed.results(&signature.output_specs, loss_output)?;
        let results = parsed.outputs.iter_mut().map(|(_, name)| name);
        for name in results.chain(parsed.mutations.iter_mut().map(|(name, _)| name)) {
            if let Some(inner) = renamed.get(name) {
                name.clone_from(inner);
            }
        }
        parsed.one_tensor_twice();
        Ok(parsed)
    }

    /// [`Program::sha256`] in hexadecimal, 64 characters.
    pub fn sha256_hex(&self) -> String {
        self.sha256.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Inputs that no operator reads and that are not outputs.
    pub fn unread(&self) -> BTreeSet<String> {
        let nodes = self.graph.nodes.iter().flat_map(|node| &node.inputs).flat_map(|input| names(&input.arg));
        let used: HashSet<&str> = nodes.chain(self.outputs.iter().map(|(_, name)| name.as_str())).collect();
        let inputs = self.inputs.iter().map(|info| &info.name);
        inputs.filter(|name| !used.contains(name.as_str())).cloned().collect()
    }

    /// Converts a size of the file to a [`Dim`], with equal symbols merged and the batch symbol renamed.
    pub fn dim(&self, size: &SymInt) -> Result<Dim, crate::import::fx::error::ExpressionError> {
        let first = |name: &str| self.equal.get(name).map_or(name, String::as_str).to_string();
        let named = |name: &str| match &self.batch.as_deref().map(first) {
            Some(batch) if *batch == first(name) => Dim::symbol(BATCH),
            _ => Dim::symbol(&first(name)),
        };
        match size {
            SymInt::AsInt(value) => Ok(Dim::Known(*value)),
            SymInt::AsExpr(expression) => expression::parse(&expression.expr_str, &named),
        }
    }

    /// The element type and shape of a tensor; `None` if unsupported.
    pub fn fact(&self, meta: &TensorMeta) -> Option<Fact> {
        let shape = meta.sizes.iter().map(|d| self.dim(d).ok()).collect::<Option<_>>()?;
        Some(Fact::new(dtype_of(meta.dtype)?, shape))
    }

    /// Warns about an unused input whose shape equals that of a used one: the same tensor was passed twice at export.
    fn one_tensor_twice(&mut self) {
        let unread = self.unread();
        let alike = |a: &ValueInfo, b: &ValueInfo| (a.elem_type, &a.dims) == (b.elem_type, &b.dims);
        let is_twin = |info: &&ValueInfo| {
            let used = self.inputs.iter().filter(|other| !unread.contains(&other.name));
            unread.contains(&info.name) && used.into_iter().any(|other| alike(info, other))
        };
        if let Some(twin) = self.inputs.iter().find(is_twin) {
            self.warnings.push(format!(
                "no operator reads input `{}`: torch.export merges one tensor passed under two names, as in \
                 `model(input_ids=ids, labels=ids)`; export with a copy, `labels=ids.clone()`",
                short_name(&twin.name)
            ));
        }
    }

    fn sources(&mut self, specs: &[InputSpec], archive: &Archive, stores: &[Store; 2]) -> Result<(), FxError> {
        let user = |spec: &InputSpec| match spec {
            InputSpec::UserInput { arg: Argument::AsTensor(name) } => Some(name.name.clone()),
            _ => None,
        };
        let users: Vec<String> = specs.iter().filter_map(user).collect();
        self.batch = users.first().and_then(|name| self.symbol(name, 0));
        for name in users {
            let info = self.input(name)?;
            self.inputs.push(info);
        }
        let mut loader = Loader { archive, stores, kept: BTreeMap::new(), missing: Vec::new() };
        let mut frozen = Vec::new();
        for spec in specs {
            let (placeholder, name, parameter) = match spec {
                InputSpec::Parameter { arg, parameter_name } => {
                    let trained = self.trained(&arg.name);
                    if !trained && !self.joint {
                        frozen.push(parameter_name);
                    }
                    (arg, parameter_name, trained)
                }
                InputSpec::Buffer { arg, buffer_name } => (arg, buffer_name, false),
                InputSpec::TensorConstant { arg, tensor_constant_name } => (arg, tensor_constant_name, false),
                _ => continue,
            };
            let is_kept = !parameter && matches!(spec, InputSpec::Parameter { .. });
            let at = self
                .weight(&mut loader, &placeholder.name, name, parameter)
                .map_err(|reason| FxError::Weight { name: name.clone(), reason })?;
            self.weights[at].kept |= is_kept;
            self.placeholders.insert(placeholder.name.clone(), at);
        }
        if let Some(first) = frozen.first() {
            self.warnings.push(format!(
                "{} parameters, such as `{}`, have requires_grad=False in the program: they are frozen",
                frozen.len(),
                short_name(first)
            ));
        }
        if let Some(first) = loader.missing.first() {
            self.warnings.push(format!(
                "the archive has no values for {} weights, such as `{}`: it can be planned but not trained",
                loader.missing.len(),
                short_name(first)
            ));
        }
        Ok(())
    }

    /// Tests whether a placeholder requires a gradient (the default). Nothing is trained in a joint graph, whose
    /// outputs include the gradients.
    fn trained(&self, placeholder: &str) -> bool {
        !self.joint && self.graph.tensor_values.get(placeholder).and_then(|meta| meta.requires_grad).unwrap_or(true)
    }

    /// The symbol of an input size that is a single symbol.
    fn symbol(&self, input: &str, axis: usize) -> Option<String> {
        let size = self.dim(self.graph.tensor_values.get(input)?.sizes.get(axis)?).ok()?;
        let symbols = size.symbols();
        let [symbol] = symbols.as_slice() else { return None };
        (size == Dim::symbol(symbol)).then(|| symbol.clone())
    }

    fn input(&self, name: String) -> Result<ValueInfo, FxError> {
        let Some(meta) = self.graph.tensor_values.get(&name) else { return Err(FxError::NoFacts { name }) };
        let Some(dtype) = dtype_of(meta.dtype) else {
            return Err(FxError::Input { name, reason: format!("element type code {} is not supported", meta.dtype) });
        };
        let mut dims = Vec::with_capacity(meta.sizes.len());
        for size in &meta.sizes {
            let dim = self.dim(size).map_err(|reason| FxError::Expression { tensor: name.clone(), reason })?;
            match dim.known() {
                Some(value) if value < 0 => {
                    return Err(FxError::Input { name, reason: format!("a size of {value}") });
                }
                Some(value) => dims.push(SourceDim::Known(value)),
                None => dims.push(SourceDim::Param(dim.to_string())),
            }
        }
        Ok(ValueInfo { name, elem_type: onnx_code(dtype), dims: Some(dims) })
    }

    fn weight(
        &mut self,
        loader: &mut Loader<'_>,
        placeholder: &str,
        name: &str,
        parameter: bool,
    ) -> Result<usize, WeightError> {
        let (folder, payload) = loader.find(name).ok_or(WeightError::Unlisted)?;
        if payload.use_pickle {
            return Err(WeightError::Pickle);
        }
        let location = WeightLocation::read(payload.tensor_meta.as_ref().ok_or(WeightError::Unlisted)?)?;
        let fact = Fact::of(location.dtype, &location.sizes);
        let path = format!("{folder}{}", payload.path_name);
        let initial = match loader.archive.get(&path) {
            // Modules on the meta device and fake tensors have no values.
            Some(bytes) if bytes.is_empty() && !location.sizes.contains(&0) => Err(path.clone()),
            Some(bytes) => Ok(location.tensor(bytes)?),
            None => Err(path.clone()),
        };
        if let Some(graph) = self.graph.tensor_values.get(placeholder).and_then(|meta| self.fact(meta))
            && graph != fact
        {
            return Err(WeightError::Disagree { graph: graph.to_string(), list: fact.to_string() });
        }
        if initial.is_err() {
            loader.missing.push(path.clone());
        }
        // Without values, tied weights cannot be recognised.
        let is_empty = loader.archive.get(&path).is_some_and(|bytes| bytes.is_empty());
        // Two names for one storage are tied if they view the same elements.
        let aliases = loader.kept.entry(path).or_default();
        for (alias, at) in aliases.iter().filter(|(_, at)| parameter && !is_empty && self.weights[*at].parameter) {
            if *alias == location {
                self.warnings.push(format!(
                    "`{}` is tied to `{}`: they are one parameter under that name",
                    short_name(name),
                    short_name(&self.weights[*at].name)
                ));
                return Ok(*at);
            }
            if alias.meets(&location) {
                return Err(WeightError::Overlaps(short_name(&self.weights[*at].name)));
            }
        }
        aliases.push((location, self.weights.len()));
        self.weights.push(Source { name: name.to_string(), fact, initial, parameter, kept: false });
        Ok(self.weights.len() - 1)
    }

    /// Reads the outputs; the one at `loss` gets that name.
    fn results(&mut self, specs: &[OutputSpec], loss: Option<usize>) -> Result<(), FxError> {
        let mut user_outputs = 0;
        for spec in specs {
            user_outputs += usize::from(matches!(spec, OutputSpec::UserOutput { .. }));
            match spec {
                OutputSpec::UserOutput { arg: Argument::AsTensor(name) } | OutputSpec::LossOutput { arg: name } => {
                    let is_loss = loss.is_some_and(|at| at + 1 == user_outputs);
                    let output = if is_loss { "loss" } else { &name.name };
                    self.outputs.push((output.to_string(), name.name.clone()));
                }
                OutputSpec::GradientToParameter { arg, parameter_name: of }
                | OutputSpec::GradientToUserInput { arg, user_input_name: of } => {
                    self.outputs.push((format!("gradient of {of}"), arg.name.clone()));
                }
                OutputSpec::BufferMutation { arg, buffer_name: target }
                | OutputSpec::ParameterMutation { arg, parameter_name: target }
                | OutputSpec::UserInputMutation { arg, user_input_name: target } => {
                    self.mutations.push((arg.name.clone(), target.clone()));
                }
                // A symbolic number, or an effect token.
                _ => {}
            }
        }
        Ok(())
    }
}

struct Store {
    folder: &'static str,
    weights: Weights,
}

struct Loader<'a> {
    archive: &'a Archive,
    stores: &'a [Store; 2],
    /// Loaded weights per entry, with their locations.
    kept: BTreeMap<String, Vec<(WeightLocation, usize)>>,
    missing: Vec<String>,
}

impl<'a> Loader<'a> {
    /// Non-persistent buffers are listed among the constants.
    fn find(&self, name: &str) -> Option<(&'static str, &'a Payload)> {
        self.stores.iter().find_map(|store| Some((store.folder, store.weights.config.get(name)?)))
    }
}

fn name(archive: &Archive) -> Result<String, FxError> {
    let names: Vec<&str> = archive.within("models/").filter_map(|n| n.strip_suffix(".json")).collect();
    match names.as_slice() {
        [name] => Ok((*name).to_string()),
        [] if archive.within("data/aotinductor/").next().is_some() => Err(FxError::Compiled),
        [] => Err(FxError::NoProgram),
        several => {
            let listed: Vec<_> = several.iter().take(8).map(|n| short_name(n)).collect();
            Err(FxError::Several { count: several.len(), names: listed.join(", ") })
        }
    }
}

/// Parses JSON. The parser limits the depth; Python's `NaN` is rejected.
fn json<T: DeserializeOwned>(entry: &str, bytes: &[u8]) -> Result<T, FxError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut reader).map_err(|error| FxError::Json {
        entry: entry.to_string(),
        at: error.path().to_string(),
        reason: error.inner().to_string(),
    })
}

/// Checks that every value is defined once and before its use, nested graphs included.
fn check(graph: &Graph) -> Result<(), FxError> {
    let mut defined: HashSet<&str> = HashSet::new();
    for input in &graph.inputs {
        defined.extend(names(input));
    }
    for node in &graph.nodes {
        for input in &node.inputs {
            if let Some(name) = names(&input.arg).find(|name| !defined.contains(name)) {
                return Err(FxError::Unknown { node: label(node), name: name.to_string() });
            }
            if let Argument::AsGraph(inner) = &input.arg {
                check(&inner.graph)?;
            }
        }
        for name in node.outputs.iter().flat_map(names) {
            if !defined.insert(name) {
                return Err(FxError::MadeTwice { node: label(node), name: name.to_string() });
            }
        }
    }
    match graph.outputs.iter().flat_map(names).find(|name| !defined.contains(name)) {
        Some(name) => Err(FxError::Unknown { node: "output".to_string(), name: name.to_string() }),
        None => Ok(()),
    }
}

/// Names of the tensors and symbolic values in an argument.
pub fn names(argument: &Argument) -> impl Iterator<Item = &str> {
    let list: Vec<&str> = match argument {
        Argument::AsTensor(name) | Argument::AsOptionalTensor(OptionalTensor::AsTensor(name)) => vec![&name.name],
        Argument::AsTensors(list) => list.iter().map(|n| n.name.as_str()).collect(),
        Argument::AsOptionalTensors(list) => list.iter().filter_map(tensor_name).collect(),
        Argument::AsSymInt(SymArgument::AsName(name)) => vec![name],
        Argument::AsSymInts(list) => list.iter().filter_map(size_name).collect(),
        Argument::AsSymBool(number) | Argument::AsSymFloat(number) => number.as_name.as_deref().into_iter().collect(),
        Argument::AsSymBools(list) | Argument::AsSymFloats(list) => {
            list.iter().filter_map(|number| number.as_name.as_deref()).collect()
        }
        _ => Vec::new(),
    };
    list.into_iter()
}

pub fn tensor_name(tensor: &OptionalTensor) -> Option<&str> {
    match tensor {
        OptionalTensor::AsTensor(name) => Some(&name.name),
        OptionalTensor::AsNone(_) => None,
    }
}

fn size_name(size: &SymArgument) -> Option<&str> {
    match size {
        SymArgument::AsName(name) => Some(name),
        SymArgument::AsInt(_) => None,
    }
}

/// The node's name for messages; without one, that of its first output.
pub fn label(node: &Node) -> String {
    let named = node.name.clone().filter(|n| !n.is_empty());
    named.unwrap_or_else(|| node.outputs.iter().flat_map(names).next().unwrap_or(&node.target).to_string())
}
