//! Imports a model and binds its symbolic dimensions.

use crate::error::Error;
use crate::events::EventSink;
use crate::files::{detect, input};
use crate::help;
use compiler::export::target::Imported;
use compiler::graph::bind::{bind, symbols};
use compiler::graph::hash::hash;
use compiler::graph::{Graph, order};
use compiler::import::import::{self, Batch, ImportError, Model, Options, Weight};
use compiler::import::onnx::decode;
use compiler::import::onnx::error::{DecodeError, FormatError};
use compiler::import::training_warning::TrainingWarning;
use compiler::import::with_inputs;
use compiler::op::Op;
use compiler::op::dropout::COUNTER;
use compiler::plan::{ImportSettings, Plan, PlannedModel};
use compiler::profile::ProfiledModel;
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use compiler::text::name::short_name;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

mod freeze;

/// Samples per micro-batch, if neither the user nor the file sets them.
pub const DEFAULT_MICRO_BATCH: u64 = 32;

const MAX_LISTED: usize = 5;

/// Import settings.
#[derive(Clone, Debug, Default)]
pub struct ImportRequest {
    /// Sizes of symbolic dimensions.
    pub dims: Vec<(String, u64)>,
    /// The batch axis of inputs; axis 0 of the first input if empty.
    pub batch_dims: Vec<(String, usize)>,
    /// True to put normalisation and dropout that were exported for inference back into training mode.
    pub train_mode: bool,
    /// Parameters that are not trained: names, or `prefix*`.
    pub freeze: Vec<String>,
}

impl ImportRequest {
    /// The settings of a plan's import.
    pub fn of(plan: &Plan) -> ImportRequest {
        let mut request = ImportRequest::default();
        request.follow(&plan.model.import);
        request
    }

    /// Adds the settings of a plan's import; settings of this request take precedence.
    pub fn follow(&mut self, planned: &ImportSettings) {
        let is_set = |name: &String| self.dims.iter().any(|(set_name, _)| set_name == name);
        let dims: Vec<_> =
            planned.dims.iter().filter(|(name, _)| !is_set(name)).map(|(n, v)| (n.clone(), *v)).collect();
        self.dims.extend(dims);
        if self.batch_dims.is_empty() {
            let axes = planned.batch_dims.iter().map(|(name, axis)| (name.clone(), *axis as usize));
            self.batch_dims.extend(axes);
        }
        self.train_mode |= planned.train_mode;
        if self.freeze.is_empty() {
            self.freeze.clone_from(&planned.freeze);
        }
    }
}

/// An imported model with its requested sizes.
pub struct LoadedModel {
    /// The model as imported.
    pub model: Model,
    path: PathBuf,
    options: Options,
    requested_micro_batch: Option<u64>,
    frozen: Vec<String>,
}

/// Imports the file for training or planning. Reports import warnings, and differences from the framework's training model.
pub fn load(path: &Path, import: &ImportRequest, events: &dyn EventSink) -> Result<LoadedModel, Error> {
    let loaded = read(path, import, events)?;
    loaded.model.doubts.iter().for_each(|doubt| warn_training(doubt, events));
    Ok(loaded)
}

/// Reports a training warning with its remedy.
pub fn warn_training(doubt: &TrainingWarning, events: &dyn EventSink) {
    events.warn(&format!("{doubt}; {}", doubt.remedy()));
}

/// Imports the file and reports its warnings.
pub fn read(path: &Path, import: &ImportRequest, events: &dyn EventSink) -> Result<LoadedModel, Error> {
    let options = Options {
        dims: import.dims.iter().map(|(name, size)| (name.clone(), *size as i64)).collect(),
        batch_axes: import.batch_dims.iter().cloned().collect(),
        train_mode: import.train_mode,
        one_batch: true,
        ..Options::default()
    };
    let model = import::load(path, &options).map_err(|error| import_error(path, &error))?;
    model.warnings.iter().for_each(|warning| events.warn(warning));
    if let Batch::Symbol { name, default: Some(size) } = &model.batch
        && options.batch_axes.is_empty()
        && !options.dims.contains_key(name)
    {
        events.note(&format!(
            "axis 0 of the first input, {size} in the file, is the batch; `--batch-dim INPUT=AXIS` sets another"
        ));
    }
    let frozen = import.freeze.clone();
    let loaded = LoadedModel { model, path: path.to_path_buf(), options, requested_micro_batch: None, frozen };
    // Unknown names are refused here.
    if !loaded.frozen.is_empty() {
        loaded.graph()?;
    }
    Ok(loaded)
}

/// Imports a model of the zoo from memory.
pub fn of_zoo(name: &str, bytes: Vec<u8>) -> Result<LoadedModel, Error> {
    let path = PathBuf::from(name);
    let options = Options::default();
    let source =
        decode::parse(bytes.into(), Some(Path::new("."))).map_err(|error| import_error(&path, &error.into()))?;
    let model = import::from_onnx(&source, name, &options).map_err(|error| import_error(&path, &error))?;
    Ok(LoadedModel { model, path, options, requested_micro_batch: None, frozen: Vec::new() })
}

/// Imports the file to evaluate these arrays; their values may become constants that the model needs.
pub fn load_for(path: &Path, arrays: &BTreeMap<String, Tensor>, events: &dyn EventSink) -> Result<LoadedModel, Error> {
    let loaded = with_inputs::load(path, &Options::default(), arrays);
    let (model, options) = loaded.map_err(|error| import_error(path, &error))?;
    if !options.known.values.is_empty() {
        let names: Vec<String> = options.known.values.keys().cloned().collect();
        events.note(&format!("the values of {} become constants of the model", list(&names)));
    }
    model.warnings.iter().for_each(|warning| events.warn(warning));
    Ok(LoadedModel { model, path: path.to_path_buf(), options, requested_micro_batch: None, frozen: Vec::new() })
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| format!("`{}`", short_name(name))).collect::<Vec<_>>().join(", ")
}

/// The error for a file that cannot be imported; files of pipec are named by their type.
fn import_error(path: &Path, error: &ImportError) -> Error {
    let message = format!("cannot import {}", path.display());
    if let ImportError::Decode(DecodeError::Format(FormatError::Text)) = error
        && let Ok(text) = input::text(path, input::MOST_PLAN_BYTES)
        && let Some(other) = input::other_file(&text, "model")
    {
        return Error::input(message).because(other).with_help("pass the model, an .onnx or .pt2 file");
    }
    if matches!(error, ImportError::Decode(_) | ImportError::Archive(_) | ImportError::NoArchive { .. })
        && let Some((why, help)) = detect::describe_non_model(path)
    {
        return Error::input(message).because(why).with_help(help);
    }
    Error::input(message).because(error).with_help(help::import(path, error))
}

/// The first names, and the number of names if more.
pub fn list_names(names: &[String]) -> String {
    let first =
        names.iter().take(MAX_LISTED).map(|name| format!("`{}`", short_name(name))).collect::<Vec<_>>().join(", ");
    match names.len() {
        count if count > MAX_LISTED => format!("{first} … ({count} in all)"),
        _ => first,
    }
}

impl LoadedModel {
    /// Sets the requested number of samples per micro-batch.
    pub fn with_micro_batch(self, samples: Option<u64>) -> LoadedModel {
        LoadedModel { requested_micro_batch: samples, ..self }
    }

    /// Samples per micro-batch: requested, else `fallback`, else the file's, else 32, which is reported.
    pub fn micro_batch(&self, fallback: Option<u64>, events: &dyn EventSink) -> u64 {
        self.known_micro_batch(fallback).unwrap_or_else(|| {
            events.note(&format!("micro-batch {DEFAULT_MICRO_BATCH}; `--micro-batch N` sets another"));
            DEFAULT_MICRO_BATCH
        })
    }

    /// The same; `None` if it is not set anywhere.
    pub fn known_micro_batch(&self, fallback: Option<u64>) -> Option<u64> {
        match &self.model.batch {
            Batch::Symbol { name, default } => {
                let from_dims = self.options.dims.get(name).map(|size| *size as u64);
                self.requested_micro_batch.or(from_dims).or(fallback).or(default.map(|size| size as u64))
            }
            Batch::Fixed { size, .. } => {
                self.requested_micro_batch.or(fallback).or(Some(size.map_or(1, |size| size as u64)))
            }
        }
    }

    /// The only batch size with which torch runs the file unchanged, if it was exported with a static one.
    pub fn exported_batch(&self) -> Option<u64> {
        match self.model.batch {
            Batch::Symbol { default: Some(size), .. }
                if self.path.extension().is_some_and(|extension| extension == "pt2") =>
            {
                Some(size as u64)
            }
            _ => None,
        }
    }

    /// Refuses a micro-batch size with which torch cannot run the file.
    pub fn runs_in_torch(&self, samples: u64) -> Result<(), Error> {
        let Some(size) = self.exported_batch().filter(|size| *size != samples) else { return Ok(()) };
        let inputs = self.model.graph.ids().filter_map(|id| match &self.model.graph.node(id).op {
            Op::Input(input) if input.name != COUNTER => {
                Some(format!("\"{}\": {{0: torch.export.Dim.AUTO}}", short_name(&input.name)))
            }
            _ => None,
        });
        let shapes = inputs.collect::<Vec<_>>().join(", ");
        Err(Error::input(format!("torch runs {} with {size} samples only, and the micro-batch is {samples}", self.path.display()))
            .because("it was exported with a static batch size")
            .with_help(format!(
                "export it with `torch.export.export(model, args, dynamic_shapes={{{shapes}}})`, or plan with `--micro-batch {size}`"
            )))
    }

    /// The patterns of the parameters that are not trained.
    pub fn frozen(&self) -> &[String] {
        &self.frozen
    }

    /// The imported graph; parameters that are not trained are states.
    pub fn graph(&self) -> Result<Graph, Error> {
        let mut graph = self.model.graph.clone();
        freeze::freeze(&mut graph, &self.frozen)?;
        Ok(graph)
    }

    /// The graph with that many samples and no symbolic sizes.
    pub fn with_samples(&self, samples: u64) -> Result<Graph, Error> {
        let mut dims = self.options.dims.clone();
        match &self.model.batch {
            Batch::Symbol { name, .. } => {
                dims.insert(name.clone(), samples as i64);
            }
            Batch::Fixed { size, why } => {
                let fixed = size.map_or(1, |size| size as u64);
                if fixed != samples {
                    let message =
                        format!("{} cannot run with {samples} samples, only with {fixed}", self.path.display());
                    return Err(Error::input(message)
                        .because(why)
                        .with_help("export the model with a dynamic batch dimension; `--batch-dim INPUT=AXIS` sets the batch axis, if it is not axis 0 of the first input"));
                }
            }
        }
        self.with_dims(&dims)
    }

    /// The graph with these sizes; no dimension may stay symbolic.
    pub fn with_dims(&self, dims: &Bindings) -> Result<Graph, Error> {
        let message = format!("cannot set the sizes of {}", self.path.display());
        let mut graph = bind(&self.model.graph, dims).map_err(|error| Error::input(&message).because(error))?;
        freeze::freeze(&mut graph, &self.frozen)?;
        match symbols(&graph).first() {
            None => Ok(graph),
            Some(symbol) => Err(Error::input(message)
                .because(format!("dimension `{symbol}` has no size"))
                .with_help(format!("set it with `--dim {symbol}=N`"))),
        }
    }

    /// The model as recorded in plans, with the loss included in its costs.
    pub fn planned(&self, ops: usize, loss: Option<String>) -> PlannedModel {
        let dims = self.options.dims.iter().map(|(name, size)| (name.clone(), *size as u64)).collect();
        PlannedModel {
            file: self.file(),
            sha256: self.model.sha256.clone(),
            ops: ops as u64,
            graph_hash: hash(&self.model.graph),
            import: ImportSettings {
                dims,
                train_mode: self.options.train_mode,
                batch_dims: self.options.batch_axes.iter().map(|(name, axis)| (name.clone(), *axis as u64)).collect(),
                loss,
                freeze: self.frozen.clone(),
            },
        }
    }

    /// The model as recorded in profiles.
    pub fn profiled(&self) -> ProfiledModel {
        let ops = order::numbered(&self.model.graph).len() as u64;
        ProfiledModel { file: self.file(), sha256: self.model.sha256.clone(), ops }
    }

    /// The model with its import options, for code that reads the file again.
    pub fn imported(&self) -> Imported<'_> {
        Imported { path: &self.path, options: &self.options, model: &self.model }
    }

    /// The initial weights; fails if a file with one of them does not exist.
    pub fn weights(&self) -> Result<BTreeMap<String, Tensor>, Error> {
        let read_weight = |(name, weight): (&String, &Weight)| match weight {
            Weight::Given(tensor) => Ok((name.clone(), tensor.clone())),
            Weight::Missing { path } => Err(Error::input(format!("{} has no weights", self.path.display()))
                .because(format!("`{name}` should be in `{path}` next to the model, but that file does not exist"))
                .with_help("pass them with `--weights FILE`")),
        };
        self.model.weights.iter().map(read_weight).collect()
    }

    /// The weights that exist, for callers that do not need all.
    pub fn known_weights(&self) -> BTreeMap<String, Tensor> {
        let weights = self.model.weights.iter().filter_map(|(name, weight)| match weight {
            Weight::Given(tensor) => Some((name.clone(), tensor.clone())),
            Weight::Missing { .. } => None,
        });
        weights.collect()
    }

    fn file(&self) -> String {
        self.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}
