//! The costs of a model on a cluster: from a data sheet, a profile, or a published profile.

use crate::cluster;
use crate::error::Error;
use crate::events::EventSink;
use crate::files::input;
use crate::help;
use crate::loss::{Attributed, CountedLoss, attributed};
use crate::model::{self, LoadedModel};
use crate::plan::request::PlanRequest;
use crate::plan::tensor_parallel::Shareable;
use compiler::cluster::device::{self, Kind};
use compiler::cluster::{Cluster, Device};
use compiler::graph::hash::sha256;
use compiler::import::onnx::name::shown;
use compiler::import::pipedream;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::AttributionError;
use compiler::pass::costs::{cost_graph, dtype, fill};
use compiler::pass::precision::precision;
use compiler::plan::problem::{CostModel, Problem};
use compiler::plan::{PlannedModel, PlannedProfile};
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::{Method, Profile};
use compiler::tensor::DType;
use profiler::scratch::{of_joint, scratch};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub mod cost_source;

/// The device type with pipec's own kernels.
pub const CPU: &str = "cpu";

/// The plan option with the device whose costs were used.
pub const COSTS: &str = "costs";

/// The formats of models and published profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFormat {
    /// A model in ONNX.
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
    /// A profile.
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
    /// The costs.
    pub graph: CostGraph,
    /// The devices.
    pub cluster: Cluster,
    /// True if the memory of these devices is a limit; false for a default device.
    pub has_memory: bool,
    /// The model.
    pub model: PlannedModel,
    /// The reason why the model cannot be trained, if any.
    pub untrainable: Option<String>,
    /// The source of the costs.
    pub profile: PlannedProfile,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Element type.
    pub dtype: String,
    /// The device whose costs these are, if known.
    pub source: Option<String>,
    /// Input of tensor-parallel planning, if the ops are known.
    pub shareable: Option<Shareable>,
}

impl Costs {
    /// The planning problem for these costs, with default settings.
    pub fn problem(self, cost: CostModel) -> Problem {
        let mut problem = Problem::new(self.graph, self.cluster, cost);
        problem.model = self.model;
        problem.profile = self.profile;
        problem.micro_batch = self.micro_batch;
        problem.dtype = self.dtype;
        problem
    }
}

/// A cost source that has been opened.
enum OpenedCosts {
    /// The roofline of a device type, or of the cluster's devices.
    Analytic(Option<&'static Kind>),
    /// A profile: its file, the SHA-256 of the file, and its content.
    Profile(PathBuf, String, Box<Profile>),
}

impl OpenedCosts {
    fn open(input: &CostInput) -> Result<OpenedCosts, Error> {
        match input {
            CostInput::Analytic(None) => Ok(OpenedCosts::Analytic(None)),
            CostInput::Analytic(Some(kind)) => Ok(OpenedCosts::Analytic(Some(cluster::kind(kind)?))),
            CostInput::Profile(path) => {
                let text = path.display().to_string();
                if !path.exists() && device::find(&text).is_some() {
                    return Err(Error::input(format!("no profile file `{}`", shown(&text)))
                        .with_help(format!("`--profile analytic:{text}` uses the data sheet of that device type")));
                }
                let (sha256, profile) = input::read_profile(path)?;
                Ok(OpenedCosts::Profile(path.clone(), sha256, Box::new(profile)))
            }
        }
    }

    /// The device type of the costs, if the cluster's devices are of another type.
    fn other_kind(&self, cluster: &Cluster) -> Option<String> {
        let kind = &cluster.device.kind;
        let is = |name: &str| kind.eq_ignore_ascii_case(name);
        match self {
            OpenedCosts::Analytic(known) => known.map(|known| known.name.to_string()).filter(|name| !is(name)),
            OpenedCosts::Profile(_, _, profile) => {
                let name = &profile.device.name;
                // A measured device is a CPU, named after its processor.
                let is_cpu = profile.method == Method::Measured && device::find(name).is_none() && is("cpu");
                (!is_cpu && !is(name)).then(|| name.clone())
            }
        }
    }
}

/// The costs of a request.
pub fn costs(request: &PlanRequest, events: &dyn EventSink) -> Result<Costs, Error> {
    match request.format.unwrap_or_else(|| ModelFormat::of(&request.model)) {
        ModelFormat::Pipedream => published(request),
        ModelFormat::Onnx | ModelFormat::Pt2 => imported(request, events),
        ModelFormat::DnnPartitioning | ModelFormat::Piper => Err(Error::bug("an instance has no cost graph")),
    }
}

fn published(request: &PlanRequest) -> Result<Costs, Error> {
    let flags = [("--profile", request.costs != CostInput::default()), ("--loss", request.loss.is_some())];
    if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
        return Err(Error::input(format!(
            "`{flag}` cannot be combined with `--from pipedream`: the file has its own costs"
        )));
    }
    let cluster = cluster::cluster(&request.cluster, None)?;
    let micro_batch = request.micro_batch.unwrap_or(1);
    let dtype = request.options.dtype.unwrap_or(DType::F32).name();
    let costs = published_on(&request.model, cluster, micro_batch, dtype)?;
    Ok(Costs { has_memory: request.cluster.file.is_some(), ..costs })
}

/// A published profile on a cluster.
pub fn published_on(path: &Path, cluster: Cluster, micro_batch: u64, dtype: &str) -> Result<Costs, Error> {
    let text = input::text(path, pipedream::MAX_BYTES as u64)?;
    let graph = pipedream::read(&text).map_err(|error| {
        Error::file("read the profile", path, error).with_help("`--from` sets the format of the file")
    })?;
    let model = PlannedModel {
        file: input::file_name(path),
        sha256: sha256(text.as_bytes()),
        ops: graph.ops.len() as u64,
        ..PlannedModel::default()
    };
    Ok(Costs {
        untrainable: None,
        graph,
        cluster,
        has_memory: false,
        profile: PlannedProfile { sha256: model.sha256.clone(), method: Method::Imported },
        model,
        micro_batch,
        dtype: dtype.to_string(),
        source: None,
        shareable: None,
    })
}

fn imported(request: &PlanRequest, events: &dyn EventSink) -> Result<Costs, Error> {
    let opened = OpenedCosts::open(&request.costs)?;
    let cluster = match &opened {
        OpenedCosts::Analytic(kind) => cluster::cluster(&request.cluster, *kind)?,
        OpenedCosts::Profile(_, _, profile) => cluster::cluster_of(&request.cluster, profile)?,
    };
    // With several device classes, relative speeds convert the costs.
    if let Some(other) = opened.other_kind(&cluster).filter(|_| !cluster.is_mixed()) {
        let kind = &cluster.device.kind;
        events.warn(&format!(
            "the costs are for {}, but the cluster's devices are of type {}: times are valid only for the former \
             (`--profile analytic` uses the data sheet of the latter)",
            shown(&other),
            shown(kind)
        ));
    }
    if let Some(format) = request.format {
        check_format(format, &request.model)?;
    }
    let loaded = model::load(&request.model, &request.import, events)?.with_micro_batch(request.micro_batch);
    let profiled = match &opened {
        OpenedCosts::Profile(_, _, profile) => Some(profile.settings.micro_batch),
        OpenedCosts::Analytic(_) => None,
    };
    let micro_batch = loaded.micro_batch(profiled, events);
    let times = match opened {
        OpenedCosts::Analytic(kind) => {
            let device = kind.map_or_else(|| cluster.device.clone(), Kind::device);
            events.note(&format!(
                "costs are analytic, from the data sheet of {}, not measured (`pipec profile` measures them)",
                device.kind
            ));
            Times::Analytic(device)
        }
        OpenedCosts::Profile(path, sha256, profile) => Times::Profile(path, sha256, profile),
    };
    let counted = counted(request, &times)?;
    let costs = assemble(&loaded, micro_batch, cluster, times, request.options.dtype, counted)?;
    if let Some(why) = &costs.untrainable {
        events.warn(&format!("the model cannot be trained: {}; it is planned with its forward costs only", shown(why)));
    }
    Ok(costs)
}

/// The loss included in the costs: that of the profile, whose times include it, else the requested one.
fn counted(request: &PlanRequest, times: &Times) -> Result<CountedLoss, Error> {
    let (requested, is_inference) = (request.loss, request.options.is_inference());
    if is_inference && requested.is_some_and(|loss| loss != CountedLoss::None) {
        return Err(Error::input("`--loss` cannot be combined with a plan for inference").because("nothing is trained"));
    }
    let Times::Profile(path, _, profile) = times else {
        return Ok(requested.unwrap_or(if is_inference { CountedLoss::None } else { CountedLoss::Default }));
    };
    let profiled = CountedLoss::read(profile.settings.loss.as_deref())?;
    match requested.filter(|requested| *requested != profiled) {
        None => Ok(profiled),
        Some(_) => {
            let has = profiled.written().map_or("no loss".to_string(), |loss| format!("the loss `{loss}`"));
            Err(Error::input("`--loss` does not match this profile")
                .because(format!("{} includes {has}", path.display()))
                .with_help("`pipec profile MODEL --loss …` measures another loss"))
        }
    }
}

/// The source of op times.
pub enum Times {
    /// The roofline of a device.
    Analytic(Device),
    /// A profile: its file, the SHA-256 of the file, and its content.
    Profile(PathBuf, String, Box<Profile>),
}

/// The costs of a model at this micro-batch size, with floats of the given type or the model's own.
pub fn assemble(
    loaded: &LoadedModel,
    micro_batch: u64,
    mut cluster: Cluster,
    times: Times,
    floats: Option<DType>,
    counted: CountedLoss,
) -> Result<Costs, Error> {
    let mut graph = loaded.at(micro_batch)?;
    if let Some(floats) = floats {
        graph = precision(&graph, floats)
            .map_err(|error| Error::input(format!("cannot plan {} in {floats}", loaded.model.file)).because(error))?;
    }
    let Attributed { attribution, counted, training, untrainable } = attributed(&graph, counted).map_err(|error| {
        let failure = Error::input(format!("cannot compute the costs of {}", loaded.model.file)).because(&error);
        match error {
            AttributionError::Loss(loss) => {
                failure.with_help(format!("{}; `--loss none` leaves the loss out", help::loss(&loss)))
            }
            _ => failure,
        }
    })?;
    let mut costs = cost_graph(&graph, &attribution);
    let model = loaded.planned(costs.ops.len(), counted.written());
    let (source, sheet) = match &times {
        Times::Analytic(device) => (device.kind.clone(), device.clone()),
        Times::Profile(_, _, profile) => {
            let name = &profile.device.name;
            (name.clone(), device::find(name).map_or_else(|| cluster.device.clone(), Kind::device))
        }
    };
    let profile = match times {
        Times::Analytic(device) => {
            let subject = Subject { model: loaded.profiled(), micro_batch, loss: counted.written() };
            let profile = analytic::profile(&graph, &attribution, &device, &subject);
            fill(&mut costs, &profile, None).map_err(|error| Error::bug(&error.to_string()))?;
            // The workspace of kernels is known only for CPUs.
            if device.kind == CPU {
                let needed = scratch(&attribution);
                costs.ops.iter_mut().zip(needed).for_each(|(op, bytes)| op.workspace_bytes = bytes);
                let joint = costs.ops.iter_mut().zip(of_joint(&attribution));
                joint.for_each(|(op, joint)| [op.joint_bytes, op.joint_workspace_bytes] = joint);
            }
            PlannedProfile { sha256: String::new(), method: Method::Analytic }
        }
        Times::Profile(path, sha256, profile) => {
            fill(&mut costs, &profile, Some(&model.sha256)).map_err(|error| {
                let help = format!(
                    "`pipec profile {}` with the same sizes and flags makes a matching profile",
                    loaded.model.file
                );
                Error::file("use", &path, error).with_help(help)
            })?;
            PlannedProfile { sha256, method: profile.method }
        }
    };
    let dtype = dtype(&graph).name().to_string();
    cluster::relate(&mut cluster, &source, &dtype);
    Ok(Costs {
        graph: costs,
        cluster,
        has_memory: true,
        model,
        profile,
        untrainable,
        micro_batch,
        dtype,
        source: Some(source),
        shareable: Some(Shareable { graph, training, device: sheet }),
    })
}

/// Refuses a model of another format than requested, because importers detect the format from the content.
fn check_format(format: ModelFormat, path: &Path) -> Result<(), Error> {
    let mut start = [0; 2];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    // The importer reports a file that cannot be read.
    let is_archive = read.is_ok() && start == *b"PK";
    let why = match (format, is_archive) {
        (ModelFormat::Pt2, false) if read.is_ok() => "it is not a zip archive of torch.export.save",
        (ModelFormat::Onnx, true) => "it is a zip archive; use `--from pt2` if torch.export.save wrote it",
        _ => return Ok(()),
    };
    Err(Error::file("import", path, why)
        .with_help("omit `--from`: the format of a model is detected from its first bytes"))
}
