//! The entry: from a file to a model, whatever format the file has.
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
use crate::import::fx::error::{EXPORT, FxError};
use crate::import::fx::lower::walk as fx;
use crate::import::fx::program::Program;
use crate::import::onnx::decode;
use crate::import::onnx::error::{DecodeError, FormatError};
use crate::import::onnx::file;
use crate::import::onnx::lower::input::{self, InputError, Inputs};
use crate::import::onnx::lower::walk::{self, LowerError, Lowered};
use crate::import::onnx::model::{Dim as SourceDim, OnnxModel};
use crate::import::onnx::name::shown;
use crate::import::prune::prune;
use crate::op::Op;
use crate::pass::pipeline::{self, PassBug};
use crate::tensor::Tensor;
use crate::tensor::dim::Bindings;
use crate::tensor::fact::Fact;
use std::collections::BTreeMap;
use std::path::Path;
use thiserror::Error;

/// What the user says about a model beyond its file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Sizes of open dimensions by name. That of the batch is a default; the batch stays open.
    pub dims: Bindings,
    /// The batch axis of inputs by name; axis 0 where nothing is said.
    pub batch_axes: BTreeMap<String, usize>,
}

/// A model, ready to be planned.
#[derive(Clone, Debug)]
pub struct Model {
    /// The graph, with the batch as a symbol where it can be one. Ids are dense and in canonical order.
    pub graph: Graph,
    /// The initial value of every parameter and state of the graph, by name.
    pub weights: BTreeMap<String, Weight>,
    /// How the batch is known.
    pub batch: Batch,
    /// What the user should hear about though it stops nothing.
    pub warnings: Vec<String>,
    /// The fingerprint of the source model, which does not depend on its weights: 64 hexadecimal characters.
    pub sha256: String,
    /// The file.
    pub file: String,
    /// The tool that wrote it; may be empty.
    pub producer: String,
}

/// An initial value.
#[derive(Clone, Debug, PartialEq)]
pub enum Weight {
    /// The value, a view of the file.
    Given(Tensor),
    /// The file with the value does not exist. Planning goes on from shapes.
    Missing {
        /// The path that the model gives, relative to the model's folder.
        path: String,
    },
}

/// How the batch is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Batch {
    /// A symbol of the graph.
    Symbol {
        /// Its name.
        name: String,
        /// Its size unless the user says otherwise: in a static export, the size in the file.
        default: Option<i64>,
    },
    /// The size in the file, which cannot be changed.
    Fixed {
        /// It, when the model has an input with a batch axis.
        size: Option<i64>,
        /// Why it cannot.
        why: String,
    },
}

/// Why a file cannot be imported.
#[derive(Debug, Error)]
pub enum ImportError {
    /// The file is no ONNX model, or what it says cannot be.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// An archive that holds no program of `torch.export.save`, or one that cannot be.
    #[error(transparent)]
    Archive(#[from] FxError),
    /// A file that is called an archive and is none.
    #[error("called .pt2, but {found}: it is not the zip archive that torch.export.save writes; {EXPORT}")]
    NoArchive {
        /// What it is.
        found: String,
    },
    /// The inputs do not say what to start from.
    #[error(transparent)]
    Input(#[from] InputError),
    /// Nodes or operators that cannot be lowered.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The importer built a graph that does not hold together.
    #[error("this is a bug in pipec: the imported graph does not hold together: {0}")]
    Verify(Box<VerifyError>),
    /// A pass broke the graph.
    #[error(transparent)]
    Pass(#[from] PassBug),
}

/// Imports a file. What it is shows in its first bytes; the extension only decides how a wrong one is told.
pub fn load(path: &Path, options: &Options) -> Result<Model, ImportError> {
    let archive = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("pt2"));
    match decode::read(path) {
        Ok(source) => from_onnx(&source, &path.display().to_string(), options),
        Err(DecodeError::Format(FormatError::Zip)) => {
            let program = Program::read(&file::map(path)?)?;
            from_program(&program, &path.display().to_string(), options)
        }
        Err(DecodeError::Format(FormatError::Pickle)) if archive => {
            let found = "a Python pickle, as torch.save writes them, and pipec never opens pickles".to_string();
            Err(ImportError::NoArchive { found })
        }
        Err(DecodeError::Format(found)) if archive => Err(ImportError::NoArchive { found: found.to_string() }),
        Err(DecodeError::Protobuf { .. }) if archive => {
            Err(ImportError::NoArchive { found: "something else".to_string() })
        }
        Err(other) => Err(other.into()),
    }
}

/// Imports a decoded ONNX model, named after `file`.
pub fn from_onnx(source: &OnnxModel, file: &str, options: &Options) -> Result<Model, ImportError> {
    walk::check(source)?;
    let inputs = input::read(&source.inputs, &options.dims, &options.batch_axes)?;
    let open = |facts: &[Fact], frozen: &Bindings| walk::lower(source, facts, frozen);
    let (lowered, batch) = lower(&inputs, open, |graph| differs(source, graph, &inputs))?;
    let about = About {
        warnings: source.warnings.iter().map(ToString::to_string).collect(),
        sha256: source.sha256_hex(),
        file: file.to_string(),
        producer: source.producer.clone(),
    };
    finish(lowered, batch, &inputs, about)
}

/// Imports a decoded program of `torch.export`, named after `file`.
pub fn from_program(program: &Program, file: &str, options: &Options) -> Result<Model, ImportError> {
    fx::check(program)?;
    let inputs = input::read(&program.inputs, &options.dims, &options.batch_axes)?;
    // Every result is compared with what the file says while it is lowered.
    let open = |facts: &[Fact], frozen: &Bindings| fx::lower(program, facts, frozen);
    let (lowered, batch) = lower(&inputs, open, |_| None)?;
    let about = About {
        warnings: program.warnings.clone(),
        sha256: program.sha256_hex(),
        file: file.to_string(),
        producer: format!("pytorch {}", program.torch),
    };
    finish(lowered, batch, &inputs, about)
}

/// What a file says beside its graph.
struct About {
    warnings: Vec<String>,
    sha256: String,
    file: String,
    producer: String,
}

/// The last steps, the same for every format: verify, bring into canonical form, keep the weights that are read.
fn finish(lowered: Lowered, batch: Batch, inputs: &Inputs, about: About) -> Result<Model, ImportError> {
    verify(&lowered.graph).map_err(|e| ImportError::Verify(Box::new(e)))?;
    let mut graph = lowered.graph;
    // Before equal ops are merged: two dropouts of one value are not equal.
    number_streams(&mut graph);
    pipeline::canonical(&mut graph)?;
    let graph = prune(&graph).map_err(LowerError::from)?;
    let About { mut warnings, sha256, file, producer } = about;
    warnings.extend(lowered.warnings);
    warnings.extend(inputs.open.iter().map(|s| format!("dimension `{s}` is open; give it a size with `--dim {s}=N`")));
    let weight = |initial| match initial {
        Ok(tensor) => Weight::Given(tensor),
        Err(path) => Weight::Missing { path },
    };
    let weights = walk::kept(&graph, lowered.weights).into_iter().map(|w| (w.name, weight(w.initial))).collect();
    Ok(Model { graph, weights, batch, warnings, sha256, file, producer })
}

/// Gives every dropout a stream of its own: its place among the dropouts.
fn number_streams(graph: &mut Graph) {
    let mut stream = 0;
    for id in canonical(graph) {
        if let Op::Dropout(op) = &mut graph.node_mut(id).op {
            op.stream = stream;
            stream += 1;
        }
    }
}

/// Lowers with an open batch if that works and does not differ from the file, else with the batch in the file.
fn lower(
    inputs: &Inputs,
    with: impl Fn(&[Fact], &Bindings) -> Result<Lowered, LowerError>,
    differs: impl Fn(&Graph) -> Option<String>,
) -> Result<(Lowered, Batch), ImportError> {
    let Some(name) = &inputs.batch else {
        let why = "no input has an axis for it".to_string();
        return Ok((with(&inputs.facts, &inputs.frozen)?, Batch::Fixed { size: None, why }));
    };
    let open = with(&inputs.facts, &inputs.frozen);
    let batch = Batch::Symbol { name: name.clone(), default: inputs.default };
    let Some(fixed) = &inputs.fixed else { return Ok((open?, batch)) };
    let why = match open {
        Ok(lowered) => match differs(&lowered.graph) {
            None => return Ok((lowered, batch)),
            Some(why) => why,
        },
        Err(LowerError::Nodes(faults)) => match faults.0.first() {
            Some(fault) => fault.to_string(),
            None => "the model depends on its size".to_string(),
        },
        Err(other) => other.to_string(),
    };
    let lowered = with(fixed, &Bindings::new())?;
    Ok((lowered, Batch::Fixed { size: inputs.frozen.get(name).copied(), why }))
}

/// Whether the open graph, at the size in the file, gives other shapes than the file says.
fn differs(source: &OnnxModel, graph: &Graph, inputs: &Inputs) -> Option<String> {
    let bound = match bind(graph, &inputs.frozen) {
        Ok(bound) => bound,
        Err(error) => return Some(error.to_string()),
    };
    let declared = |o: &Output| source.outputs.iter().find(|info| info.name == o.name)?.dims.as_ref();
    bound.outputs.iter().find_map(|output| {
        let fact = bound.fact(output.value);
        let dims = declared(output)?;
        let same = |(have, said): (&crate::tensor::dim::Dim, &SourceDim)| match said {
            SourceDim::Known(size) => have.known().is_none_or(|v| v == *size),
            _ => true,
        };
        let fits = fact.rank() == dims.len() && fact.shape.iter().zip(dims).all(same);
        (!fits).then(|| format!("graph output `{}` would be {fact}, the file says {dims:?}", shown(&output.name)))
    })
}
