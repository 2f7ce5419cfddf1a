//! Entry point of the importers: reads a model file of any supported format.
//!
//! ```no_run
//! use compiler::import::import::{Options, load};
//! let model = load(std::path::Path::new("model.onnx"), &Options::default())?;
//! println!("{}", compiler::graph::text::print(&model.graph));
//! # Ok::<(), compiler::import::import::ImportError>(())
//! ```

use crate::graph::bind::bind;
use crate::graph::order::canonical;
use crate::graph::verify::{VerifyError, verify};
use crate::graph::{Graph, Output};
use crate::import::constant_index::{self, WrongIndex};
use crate::import::equal_sizes::EqualSymbols;
use crate::import::fixed_batch_left;
use crate::import::fx::error::{EXPORT, FxError};
use crate::import::fx::lower::walk as fx;
use crate::import::fx::program::Program;
use crate::import::known_inputs::Known;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::decode;
use crate::import::onnx::error::{DecodeError, FormatError};
use crate::import::onnx::file;
use crate::import::onnx::lower::error::LowerError;
use crate::import::onnx::lower::input::{self, InputError, Inputs};
use crate::import::onnx::lower::lower_model::{self, Lowered};
use crate::import::onnx::model::{Dim as SourceDim, OnnxModel, ValueInfo};
use crate::import::onnx::training::{TrainModeError, train_mode};
use crate::import::onnx::training_warnings;
use crate::import::prune::prune;
use crate::import::row_dropout;
use crate::import::training_warning::{Finding, TrainingWarning};
use crate::op::Op;
use crate::pass::pipeline::{self, PassBug};
use crate::tensor::Tensor;
use crate::tensor::dim::Bindings;
use crate::text::name::short_name;
use crate::text::quantity;
use std::collections::BTreeMap;
use std::path::Path;
use thiserror::Error;

/// Constants that are named in a message.
const FEW: usize = 8;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Sizes of open dimensions by name. The batch stays symbolic; its size here is the default.
    pub dims: Bindings,
    /// The batch axis of inputs by name; the default is axis 0.
    pub batch_axes: BTreeMap<String, usize>,
    /// Information about the inputs that is not in the file.
    pub known: Known,
    /// Restores training mode in a file exported for inference.
    pub train_mode: bool,
    /// All inputs have the batch along axis 0, where the file has a symbol of its own for it.
    pub one_batch: bool,
}

/// An imported model, ready for planning.
#[derive(Clone, Debug)]
pub struct Model {
    /// With a symbolic batch where possible. Node ids are dense and in canonical order.
    pub graph: Graph,
    /// The initial value of each parameter and state of the graph, by name.
    pub weights: BTreeMap<String, Weight>,
    pub batch: Batch,
    pub warnings: Vec<String>,
    /// Floats of the file that are neither parameters nor states, by name.
    pub constants: Vec<String>,
    /// Findings that make the file unsuitable for training.
    pub doubts: Vec<TrainingWarning>,
    /// The fingerprint of the source model, which does not depend on its weights: 64 hexadecimal digits.
    pub sha256: String,
    pub file: String,
    /// The exporting tool; may be empty.
    pub producer: String,
}

impl Model {
    /// The number of [`Model::constants`], with their names if they are few.
    pub fn constants_text(&self) -> String {
        let names: Vec<String> = self.constants.iter().take(FEW).map(|name| short_name(name)).collect();
        let more = if self.constants.len() > FEW { ", …" } else { "" };
        let count = quantity::plural(self.constants.len() as u64, "named float tensor", "named float tensors");
        format!("{count}: {}{more}", names.join(", "))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Weight {
    /// A view of the file.
    Given(Tensor),
    /// The external file does not exist. Planning needs only the shape.
    Missing {
        /// As given in the model, relative to the model's folder.
        path: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Batch {
    Symbol {
        name: String,
        /// The default size; for a static export, the size in the file.
        default: Option<i64>,
    },
    /// The batch size cannot be changed.
    Fixed {
        /// `None` if no input has a batch axis.
        size: Option<i64>,
        /// The reason why the batch could not be made symbolic.
        why: String,
    },
}

#[derive(Debug, Error)]
pub enum ImportError {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Archive(#[from] FxError),
    /// The file has the extension of an archive, but is not one.
    #[error("named .pt2, but {found}: it is not the zip archive that torch.export.save writes; {EXPORT}")]
    NoArchive {
        /// Description of the detected format.
        found: String,
    },
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Lower(#[from] LowerError),
    #[error(transparent)]
    Index(#[from] WrongIndex),
    #[error(transparent)]
    TrainMode(#[from] TrainModeError),
    /// The imported graph failed verification: a bug in pipec.
    #[error("bug in pipec: the imported graph is not valid: {0}")]
    Verify(Box<VerifyError>),
    /// A pass broke the graph: a bug in pipec.
    #[error(transparent)]
    Pass(#[from] PassBug),
}

/// A decoded file before lowering.
#[derive(Debug)]
pub enum Source {
    Onnx { model: Box<OnnxModel>, file: String },
    Program { program: Box<Program>, file: String },
}

impl Source {
    /// Reads a file. The format is detected from the first bytes; the extension only affects error messages.
    pub fn read(path: &Path) -> Result<Source, ImportError> {
        let archive = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("pt2"));
        let file = path.display().to_string();
        match decode::read(path) {
            Ok(model) => Ok(Source::Onnx { model: Box::new(model), file }),
            Err(DecodeError::Format(FormatError::Zip)) => {
                let program = Box::new(Program::read(&file::map(path)?)?);
                Ok(Source::Program { program, file })
            }
            Err(DecodeError::Format(FormatError::Pickle)) if archive => {
                let found = "a Python pickle, as written by torch.save; pipec never opens pickles".to_string();
                Err(ImportError::NoArchive { found })
            }
            Err(DecodeError::Format(found)) if archive => Err(ImportError::NoArchive { found: found.to_string() }),
            Err(DecodeError::Protobuf { .. }) if archive => {
                Err(ImportError::NoArchive { found: "an unknown file type".to_string() })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Lowers the decoded file. Can be called repeatedly.
    pub fn import(&self, options: &Options) -> Result<Model, ImportError> {
        match self {
            Source::Onnx { model, file } => from_onnx(model, file, options),
            Source::Program { program, file } => from_program(program, file, options),
        }
    }
}

pub fn load(path: &Path, options: &Options) -> Result<Model, ImportError> {
    Source::read(path)?.import(options)
}

/// Imports a decoded ONNX model; `file` is its name.
pub fn from_onnx(source: &OnnxModel, file: &str, options: &Options) -> Result<Model, ImportError> {
    lower_model::check(source)?;
    let doubts = training_warnings::doubts(source);
    if let Some(folded) = doubts.iter().find(|d| options.train_mode && d.finding == Finding::FoldedBatchNorm) {
        return Err(TrainModeError::Folded(folded.clone()).into());
    }
    let trained_model = if options.train_mode { Some(train_mode(source)?) } else { None };
    let doubts = trained_model.as_ref().map_or(doubts, training_warnings::doubts);
    let source = trained_model.as_ref().unwrap_or(source);
    let lower_inputs = |inputs: &Inputs, open: bool| match (open, &inputs.fixed) {
        (false, Some(fixed)) => lower_model::lower(source, fixed, &Bindings::new(), &options.known),
        _ => lower_model::lower(source, &inputs.facts, &inputs.frozen, &options.known),
    };
    let differs = |graph: &Graph, inputs: &Inputs| differs(source, graph, inputs);
    let lowered = lower(&source.inputs, options, lower_inputs, differs, Exporter::Onnx)?;
    let metadata = FileMetadata {
        warnings: source.warnings.iter().map(ToString::to_string).collect(),
        doubts,
        sha256: source.sha256_hex(),
        file: file.to_string(),
        producer: source.producer.clone(),
    };
    finish(lowered, metadata)
}

/// Imports a decoded `torch.export` program; `file` is its name.
pub fn from_program(program: &Program, file: &str, options: &Options) -> Result<Model, ImportError> {
    fx::check(program)?;
    if options.train_mode {
        return Err(TrainModeError::Program.into());
    }
    // Lowering itself compares each result with the shape in the file.
    let lower_inputs = |inputs: &Inputs, open: bool| match (open, &inputs.fixed) {
        (false, Some(fixed)) => fx::lower(program, fixed, &Bindings::new(), &inputs.equal),
        _ => fx::lower(program, &inputs.facts, &inputs.frozen, &inputs.equal),
    };
    let mut options = options.clone();
    options.known.unread = program.unread();
    let lowered = lower(&program.inputs, &options, lower_inputs, |_, _| None, Exporter::Program)?;
    let metadata = FileMetadata {
        warnings: program.warnings.clone(),
        doubts: Vec::new(),
        sha256: program.sha256_hex(),
        file: file.to_string(),
        producer: format!("pytorch {}", program.torch),
    };
    finish(lowered, metadata)
}

struct FileMetadata {
    warnings: Vec<String>,
    doubts: Vec<TrainingWarning>,
    sha256: String,
    file: String,
    producer: String,
}

/// Final steps for all formats: verification, canonical form, selection of the weights that are read.
fn finish(lowering: LoweredWithBatch, metadata: FileMetadata) -> Result<Model, ImportError> {
    let LoweredWithBatch { lowered, batch, inputs, remarks } = lowering;
    verify(&lowered.graph).map_err(|e| ImportError::Verify(Box::new(e)))?;
    let mut graph = lowered.graph;
    row_dropout::row_dropout(&mut graph);
    // Must precede the merging of equal ops, because two dropouts of one value are different.
    number_streams(&mut graph);
    pipeline::canonical(&mut graph)?;
    let graph = prune(&graph).map_err(LowerError::from)?;
    constant_index::check(&graph)?;
    let FileMetadata { mut warnings, doubts, sha256, file, producer } = metadata;
    warnings.extend(lowered.warnings);
    warnings.extend(remarks);
    warnings.extend(inputs.open.iter().map(|s| format!("dimension `{s}` has no size; give one with `--dim {s}=N`")));
    let weight = |initial| match initial {
        Ok(tensor) => Weight::Given(tensor),
        Err(path) => Weight::Missing { path },
    };
    let weights =
        lower_model::used_weights(&graph, lowered.weights).into_iter().map(|w| (w.name, weight(w.initial))).collect();
    Ok(Model { graph, weights, batch, warnings, constants: lowered.constants, doubts, sha256, file, producer })
}

/// Assigns each random op its own RNG stream.
fn number_streams(graph: &mut Graph) {
    let mut streams = 0..;
    for id in canonical(graph) {
        let stream = match &mut graph.node_mut(id).op {
            Op::Dropout(op) => &mut op.stream,
            Op::Uniform(op) => &mut op.stream,
            _ => continue,
        };
        *stream = streams.next().expect("there are fewer nodes than numbers");
    }
}

struct LoweredWithBatch {
    lowered: Lowered,
    batch: Batch,
    inputs: Inputs,
    /// Warnings about the batch.
    remarks: Vec<String>,
}

#[derive(Clone, Copy)]
enum Exporter {
    Onnx,
    Program,
}

impl Exporter {
    /// The export command for a dynamic batch.
    fn open_batch(self, input: &str) -> String {
        let input = short_name(input);
        match self {
            Exporter::Onnx => format!(
                "`torch.onnx.export(…, dynamo=False, dynamic_axes={{\"{input}\": {{0: \"batch\"}}}})`, for all inputs \
                that have it,"
            ),
            Exporter::Program => {
                "`torch.export.export(…, dynamic_shapes=({0: torch.export.Dim(\"batch\")}, …))`".to_string()
            }
        }
    }
}

/// Lowers with a symbolic batch if that succeeds and agrees with the file, else with the static batch.
///
/// If an op shows that another input also has the batch axis, lowering restarts with that input's axis symbolic. If
/// axis 0 turns out to be the time axis of a recurrent layer, it restarts with axis 1 as the batch. If an op shows that
/// two symbols are equal, it restarts with one of them; sizes that the caller gave are set when all equal symbols are
/// known.
fn lower(
    infos: &[ValueInfo],
    options: &Options,
    lower_inputs: impl Fn(&Inputs, bool) -> Result<Lowered, LowerError>,
    differs: impl Fn(&Graph, &Inputs) -> Option<String>,
    exporter: Exporter,
) -> Result<LoweredWithBatch, ImportError> {
    let mut axes = options.batch_axes.clone();
    let mut remarks = Vec::new();
    let infos = &options.known.declared(infos);
    let unread = &options.known.unread;
    let mut equal = EqualSymbols::new();
    // A size of 1 may broadcast, so it shows nothing.
    let ones: Bindings = options.dims.iter().filter(|(_, size)| **size == 1).map(|(n, s)| (n.clone(), *s)).collect();
    let mut are_equal_known = options.dims.is_empty();
    loop {
        let sizes = if are_equal_known { &options.dims } else { &ones };
        let inputs = input::read(infos, sizes, &axes, unread, &equal)?;
        if !are_equal_known && inputs.has_one_symbol() {
            are_equal_known = true;
            continue;
        }
        inputs.refuse_empty(infos, options.known.empty)?;
        let dynamic = lower_inputs(&inputs, true);
        // Terminates: each iteration has fewer symbols, or sets the sizes.
        let pairs = dynamic.as_ref().err().map(LowerError::equal_symbols).unwrap_or_default();
        let before = equal.len();
        pairs.iter().for_each(|(one, other)| inputs.merge(one, other, &mut equal));
        if equal.len() > before {
            continue;
        }
        if !are_equal_known {
            are_equal_known = true;
            continue;
        }
        let Some(name) = inputs.batch.clone() else {
            let batch = Batch::Fixed { size: None, why: "no input has a batch axis".to_string() };
            return Ok(LoweredWithBatch { lowered: dynamic?, batch, inputs, remarks });
        };
        let others = if options.one_batch && dynamic.is_ok() { inputs.other_batches(infos) } else { Vec::new() };
        for (input, symbol) in others {
            if equal.contains_key(&symbol) {
                continue;
            }
            remarks.push(format!(
                "no operator relates `{symbol}`, axis 0 of input `{}`, to the batch; it is taken as the batch",
                short_name(&input)
            ));
            inputs.merge(&name, &symbol, &mut equal);
        }
        if equal.len() > before {
            continue;
        }
        let batch = Batch::Symbol { name: name.clone(), default: inputs.default };
        if inputs.fixed.is_none() {
            return Ok(LoweredWithBatch { lowered: dynamic?, batch, inputs, remarks });
        }
        let reason = match dynamic {
            Ok(lowered) => {
                match differs(&lowered.graph, &inputs)
                    .or_else(|| fixed_batch_left::warn_fixed_output(&lowered.graph, &inputs))
                {
                    None => {
                        remarks.extend(undetected_batch_input(&lowered.graph, &inputs));
                        remarks.extend(fixed_batch_left::warn_fixed_divisor(&lowered.graph, &inputs));
                        return Ok(LoweredWithBatch { lowered, batch, inputs, remarks });
                    }
                    Some(reason) => reason,
                }
            }
            Err(LowerError::Nodes(faults)) => match faults.0.first().map(|fault| (fault, &fault.reason)) {
                // Terminates: each iteration makes one more input symbolic.
                Some((_, LowerReason::Batch { input, axis })) if !inputs.opened.contains_key(input) => {
                    axes = inputs.opened.clone();
                    axes.insert(input.clone(), *axis);
                    continue;
                }
                Some((fault, LowerReason::Time)) if axes.is_empty() && inputs.facts[0].rank() > 1 => {
                    let first = &infos[0].name;
                    remarks.push(format!(
                        "axis 0 of input `{}` is the time axis of node `{}`, so axis 1 is the batch",
                        short_name(first),
                        short_name(&fault.node)
                    ));
                    axes.insert(first.clone(), 1);
                    continue;
                }
                Some((fault, _)) => fault.to_string(),
                None => "the model depends on its size".to_string(),
            },
            Err(error) => error.to_string(),
        };
        let lowered = lower_inputs(&inputs, false)?;
        let size = inputs.frozen.get(&name).copied();
        let first = infos.first().map(|info| info.name.as_str()).unwrap_or_default();
        // Equal sizes are ambiguous; another exported batch size resolves that.
        let advice = if reason.contains("7 or 11") {
            ""
        } else {
            "; a batch size that divides no other size, such as 7 or 11, can resolve the ambiguity"
        };
        remarks = vec![format!(
            "the batch keeps the exported size {}: {reason}; {} makes it dynamic{}{advice}",
            size.unwrap_or_default(),
            exporter.open_batch(first),
            if options.batch_axes.is_empty() { other_batch_axis_hint(infos, &inputs) } else { String::new() }
        )];
        return Ok(LoweredWithBatch { lowered, batch: Batch::Fixed { size, why: reason }, inputs, remarks });
    }
}

/// Suggests flags for a batch axis of another input.
fn other_batch_axis_hint(infos: &[ValueInfo], inputs: &Inputs) -> String {
    let number = inputs.frozen.values().next().copied().unwrap_or_default();
    let static_inputs = || infos.iter().zip(&inputs.facts).filter(|(info, _)| !inputs.opened.contains_key(&info.name));
    let equal =
        static_inputs().find_map(|(info, fact)| Some((info, fact.shape.iter().position(|dim| dim.is(number))?)));
    let first_axis = static_inputs().find(|(_, fact)| fact.rank() > 0);
    match (equal, first_axis) {
        (Some((info, axis)), _) => {
            let (name, flags) = (short_name(&info.name), batch_dim_flags(inputs, &info.name, axis));
            format!(", or, if axis {axis} of input `{name}` is also the batch, `{flags}`")
        }
        (None, Some((info, _))) => {
            let name = short_name(&info.name);
            format!(", or, if the batch is an axis of input `{name}`, `--batch-dim {name}=0`")
        }
        (None, None) => String::new(),
    }
}

/// The flags that declare this batch axis in addition to the known ones.
fn batch_dim_flags(inputs: &Inputs, name: &str, axis: usize) -> String {
    let axes_by_name = inputs.opened.iter().map(|(name, axis)| (name.as_str(), *axis)).chain([(name, axis)]);
    axes_by_name.map(|(name, axis)| format!("--batch-dim {}={axis}", short_name(name))).collect::<Vec<_>>().join(" ")
}

/// Reports an input that may also have the batch axis, without evidence.
fn undetected_batch_input(graph: &Graph, inputs: &Inputs) -> Option<String> {
    let number = inputs.frozen.values().next().copied()?;
    let static_batch = |id| match &graph.node(id).op {
        Op::Input(input) if input.fact.shape.first().is_some_and(|dim| dim.is(number)) => {
            let is_read = !graph.successors(id).is_empty() && !inputs.opened.contains_key(&input.name);
            is_read.then(|| input.name.clone())
        }
        _ => None,
    };
    let name = graph.ids().find_map(static_batch)?;
    Some(format!(
        "input `{}` has size {number} along axis 0 like the batch, but no op relates the two: it keeps that size; \
        `{}` makes it the batch",
        short_name(&name),
        batch_dim_flags(inputs, &name, 0)
    ))
}

/// Reports an output shape that differs from the file when the symbol has its static value.
fn differs(source: &OnnxModel, graph: &Graph, inputs: &Inputs) -> Option<String> {
    let static_graph = match bind(graph, &inputs.frozen) {
        Ok(static_graph) => static_graph,
        Err(error) => return Some(error.to_string()),
    };
    let declared = |o: &Output| source.outputs.iter().find(|info| info.name == o.name)?.dims.as_ref();
    static_graph.outputs.iter().find_map(|output| {
        let fact = static_graph.fact(output.value);
        let dims = declared(output)?;
        let is_same = |(dim, declared_dim): (&crate::tensor::dim::Dim, &SourceDim)| match declared_dim {
            SourceDim::Known(size) => dim.known().is_none_or(|v| v == *size),
            _ => true,
        };
        let agrees = fact.rank() == dims.len() && fact.shape.iter().zip(dims).all(is_same);
        (!agrees).then(|| {
            format!("graph output `{}` would be {fact}, but the file declares {dims:?}", short_name(&output.name))
        })
    })
}
