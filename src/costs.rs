//! The costs of a model on a cluster: from a data sheet, a profile, or a published profile.

use crate::error::Error;
use crate::files::input;
use crate::loss::{Attributed, CountedLoss, attribute_with_loss};
use crate::model::LoadedModel;
use crate::{cluster, help};
use compiler::cluster::device::{self, CPU, Kind};
use compiler::cluster::{Cluster, Device};
use compiler::graph::Graph;
use compiler::graph::hash::sha256;
use compiler::import::pipedream;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::{AttributionError, Training};
use compiler::pass::costs::{cost_graph, dtype, fill};
use compiler::pass::mixed_precision::mixed;
use compiler::pass::precision::precision;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::{PlannedModel, PlannedProfile};
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::precision::Precision;
use compiler::profile::{Method, Profile};
use compiler::tensor::DType;
use profiler::scratch::{batched_gradients, scratch};
use runtime::device::cpu::device::cpu;
use std::path::{Path, PathBuf};

pub mod cost_source;
pub mod model_match;

/// The plan option with the device whose costs were used.
pub const COSTS: &str = "costs";

/// The formats of models and published profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFormat {
    Onnx,
    /// A model written by `torch.export.save`.
    Pt2,
    /// A PipeDream profile, `graph.txt`.
    Pipedream,
    /// A device-placement instance: JSON of Microsoft's dnn-partitioning.
    DnnPartitioning,
    /// A Piper instance: JSON of Microsoft's Piper.
    Piper,
}

impl ModelFormat {
    /// The format of a file by its name.
    pub fn of(path: &Path) -> ModelFormat {
        match path.extension() {
            Some(extension) if extension == "txt" => ModelFormat::Pipedream,
            Some(extension) if extension == "pt2" => ModelFormat::Pt2,
            _ => ModelFormat::Onnx,
        }
    }
}

/// The source of op costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CostInput {
    /// The roofline of a device type; of the cluster's devices if absent.
    Analytic(Option<String>),
    Profile(PathBuf),
}

impl Default for CostInput {
    fn default() -> CostInput {
        CostInput::Analytic(None)
    }
}

impl From<&str> for CostInput {
    /// Reads `analytic`, `analytic:KIND`, or the path of a profile.
    fn from(text: &str) -> CostInput {
        match text.strip_prefix("analytic:") {
            Some(kind) => CostInput::Analytic(Some(kind.to_string())),
            None if text == "analytic" => CostInput::Analytic(None),
            None => CostInput::Profile(PathBuf::from(text)),
        }
    }
}

/// The costs of a model on a cluster.
#[derive(Clone)]
pub struct Costs {
    pub graph: CostGraph,
    /// The devices.
    pub cluster: Cluster,
    /// True if the memory of these devices is a limit; false for a default device.
    pub has_memory: bool,
    pub model: PlannedModel,
    /// The reason why the model cannot be trained, if any.
    pub untrainable: Option<String>,
    /// The source of the costs.
    pub profile: PlannedProfile,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Element type.
    pub dtype: String,
    /// The precision, if it is not that of the model file.
    pub precision: Option<Precision>,
    /// The device whose costs these are, if known.
    pub source: Option<String>,
    /// Input of tensor-parallel planning, if the ops are known.
    pub shareable: Option<ShardableModel>,
}

/// A model with known ops, whose costs on tensor-parallel groups can be computed.
#[derive(Clone)]
pub struct ShardableModel {
    /// The model at fixed sizes.
    pub graph: Graph,
    /// The training mode, for its backward and loss.
    pub training: Training,
    /// The device of the roofline.
    pub device: Device,
}

impl Costs {
    /// The planning problem for these costs, with default settings.
    pub fn problem(self, cost: CostModel) -> Problem {
        let mut problem = Problem::new(self.graph, self.cluster, cost);
        problem.model = self.model;
        problem.profile = self.profile;
        problem.micro_batch = self.micro_batch;
        problem.dtype = self.dtype;
        problem.precision = self.precision;
        problem
    }
}

/// A published profile or instance as the model of a plan.
pub fn without_graph(path: &Path, text: &str, ops: usize) -> PlannedModel {
    let (file, sha256) = (input::file_name(path), sha256(text.as_bytes()));
    PlannedModel { file, sha256, ops: ops as u64, ..PlannedModel::default() }
}

/// A published profile on a cluster.
pub fn published_on(path: &Path, cluster: Cluster, micro_batch: u64, dtype: &str) -> Result<Costs, Error> {
    let text = input::text(path, pipedream::MAX_BYTES as u64)?;
    let graph = pipedream::read(&text).map_err(|error| {
        Error::file("read the profile", path, error).with_help("`--from` sets the format of the file")
    })?;
    let model = without_graph(path, &text, graph.ops.len());
    Ok(Costs {
        untrainable: None,
        graph,
        cluster,
        has_memory: false,
        profile: PlannedProfile::new(model.sha256.clone(), Method::Imported),
        model,
        micro_batch,
        dtype: dtype.to_string(),
        precision: None,
        source: None,
        shareable: None,
    })
}

/// The source of op times.
#[derive(Clone)]
pub enum Times {
    /// The roofline of a device.
    Analytic(Device),
    /// A profile: its file, the SHA-256 of the file, and its content.
    Profile(PathBuf, String, Box<Profile>),
}

/// The precision of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrecisionChoice {
    /// That of the profile; without one, bf16 for an f32 model on devices with bf16 tensor cores, else that of the model.
    #[default]
    Usual,
    /// That of the model file.
    Model,
    Given(Precision),
}

impl PrecisionChoice {
    /// The precision, if it is not that of the model, whose floats are of type `model_dtype`.
    fn precision(self, model_dtype: DType, times: &Times) -> Option<Precision> {
        match (self, times) {
            (PrecisionChoice::Given(precision), _) => Some(precision),
            (PrecisionChoice::Model, _) => None,
            (PrecisionChoice::Usual, Times::Profile(_, _, profile)) => {
                let profiled = Precision::from_name(&profile.settings.dtype);
                profiled.filter(|precision| precision.dtype() != model_dtype || *precision == Precision::Tf32)
            }
            (PrecisionChoice::Usual, Times::Analytic(device)) => {
                Some(Precision::usual(device)).filter(|usual| model_dtype == DType::F32 && *usual != Precision::Fp32)
            }
        }
    }
}

pub fn in_precision(graph: &Graph, target: Precision, file: &str) -> Result<Graph, Error> {
    let converted = match target.is_mixed() {
        true => mixed(graph, target.dtype()),
        false => precision(graph, target.dtype()),
    };
    converted.map_err(|error| Error::input(format!("cannot use {file} in {}", target.name())).because(error))
}

/// The costs of a model at this micro-batch size.
pub fn assemble(
    loaded: &LoadedModel,
    micro_batch: u64,
    mut cluster: Cluster,
    times: Times,
    choice: PrecisionChoice,
    counted: CountedLoss,
) -> Result<Costs, Error> {
    let mut graph = loaded.with_samples(micro_batch)?;
    let model_dtype = dtype(&graph);
    let precision = choice.precision(model_dtype, &times);
    if let Some(precision) = precision {
        graph = in_precision(&graph, precision, &loaded.model.file)?;
    }
    let Attributed { attribution, counted, training, untrainable } =
        attribute_with_loss(&graph, counted).map_err(|error| {
            let failure = Error::input(format!("cannot compute the costs of {}", loaded.model.file)).because(&error);
            match error {
                AttributionError::Loss(loss) => {
                    failure.with_help(format!("{}; `--loss none` leaves the loss out", help::loss(&loss)))
                }
                _ => failure,
            }
        })?;
    let mut costs = cost_graph(&graph, &attribution);
    let model = loaded.planned(costs.ops.len(), counted.to_text());
    let (source, data_sheet) = match &times {
        Times::Analytic(device) => (device.kind.clone(), device.clone()),
        Times::Profile(_, _, profile) => {
            let name = &profile.device.name;
            (name.clone(), device::find(name).map_or_else(|| cluster.device.clone(), Kind::device))
        }
    };
    let profile = match times {
        Times::Analytic(device) => {
            let subject = Subject { model: loaded.profiled(), micro_batch, loss: counted.to_text() };
            let device = precision.map_or_else(|| device.clone(), |precision| precision.on(&device));
            let profile = analytic::profile(&graph, &attribution, &device, &subject);
            fill(&mut costs, &profile, None).map_err(|error| Error::bug(&error.to_string()))?;
            // The workspace of kernels is known only for CPUs.
            if device.kind == CPU {
                let workspace_bytes = scratch(&attribution);
                costs.ops.iter_mut().zip(workspace_bytes).for_each(|(op, bytes)| op.workspace_bytes = bytes);
                let batched = costs.ops.iter_mut().zip(batched_gradients(&attribution, &*cpu()));
                batched.for_each(|(op, batched)| [op.batched_grad_bytes, op.batched_grad_workspace_bytes] = batched);
            }
            PlannedProfile::new(String::new(), Method::Analytic)
        }
        Times::Profile(path, sha256, profile) => {
            fill(&mut costs, &profile, Some(&model.sha256)).map_err(|error| {
                let help = format!(
                    "`pipec profile {}` with the same sizes and flags writes a matching profile",
                    loaded.model.file
                );
                Error::file("use", &path, error).with_help(help)
            })?;
            PlannedProfile::of(&profile, sha256)
        }
    };
    let dtype = precision.map_or(model_dtype, Precision::dtype).name().to_string();
    let rates = if precision == Some(Precision::Tf32) { Precision::Tf32.name() } else { dtype.as_str() };
    cluster::set_relative_speeds(&mut cluster, &source, rates);
    Ok(Costs {
        graph: costs,
        cluster,
        has_memory: true,
        model,
        profile,
        untrainable,
        micro_batch,
        dtype,
        precision,
        source: Some(source),
        shareable: Some(ShardableModel {
            graph,
            training,
            device: precision.map_or_else(|| data_sheet.clone(), |precision| precision.on(&data_sheet)),
        }),
    })
}
