//! The costs that a planning request names.

use crate::cluster;
use crate::costs::{self, CostInput, Costs, ModelFormat, PrecisionChoice, Times};
use crate::error::Error;
use crate::events::EventSink;
use crate::files::input;
use crate::loss::CountedLoss;
use crate::model::{self, DEFAULT_MICRO_BATCH, LoadedModel};
use crate::plan::request::PlanRequest;
use crate::plan::variant::SizedCosts;
use compiler::cluster::Cluster;
use compiler::cluster::device::{self, Kind};
use compiler::import::import::Batch;
use compiler::plan::problem::Target;
use compiler::profile::Method;
use compiler::tensor::DType;
use compiler::text::name::short_name;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Reads the times that a request names, and its cluster, whose devices default to those of the times.
fn open(request: &PlanRequest) -> Result<(Times, Cluster), Error> {
    match &request.costs {
        CostInput::Analytic(kind) => {
            let kind = kind.as_deref().map(cluster::kind).transpose()?;
            let cluster = cluster::cluster(&request.cluster, kind)?;
            let device = kind.map_or_else(|| cluster.device.clone(), Kind::device);
            Ok((Times::Analytic(device), cluster))
        }
        CostInput::Profile(path) => {
            let text = path.display().to_string();
            if !path.exists() && device::find(&text).is_some() {
                return Err(Error::input(format!("no profile file `{}`", short_name(&text)))
                    .with_help(format!("`--profile analytic:{text}` uses the data sheet of that device type")));
            }
            let (sha256, profile) = input::read_profile(path)?;
            let cluster = cluster::cluster_of(&request.cluster, &profile)?;
            Ok((Times::Profile(path.clone(), sha256, Box::new(profile)), cluster))
        }
    }
}

/// The device type of the times, if the cluster's devices are of another type.
fn other_kind<'a>(times: &'a Times, cluster: &Cluster) -> Option<&'a str> {
    let is = |name: &str| cluster.device.kind.eq_ignore_ascii_case(name);
    match times {
        Times::Analytic(device) => Some(&*device.kind).filter(|kind| !is(kind)),
        Times::Profile(_, _, profile) => {
            let name = &profile.device.name;
            // A measured device is a CPU, named after its processor.
            let is_cpu = profile.method == Method::Measured && device::find(name).is_none() && is("cpu");
            (!is_cpu && !is(name)).then_some(name)
        }
    }
}

/// The micro-batch size of a profile.
fn profiled(times: &Times) -> Option<u64> {
    match times {
        Times::Profile(_, _, profile) => Some(profile.settings.micro_batch),
        Times::Analytic(_) => None,
    }
}

pub fn costs(request: &PlanRequest, events: &dyn EventSink) -> Result<Costs, Error> {
    match CostsBySize::open(request, events)? {
        CostsBySize::Published(costs) => Ok(*costs),
        CostsBySize::Imported(imported) => {
            let costs = imported.at(imported.default_size)?;
            if let Some(why) = &costs.untrainable {
                events.warn(&untrainable(why));
            }
            Ok(costs)
        }
    }
}

/// The warning about a model that cannot be trained.
pub fn untrainable(why: &str) -> String {
    format!("the model cannot be trained: {}; it is planned with its forward costs only", short_name(why))
}

/// The costs of a request at any micro-batch size.
pub enum CostsBySize {
    /// A published profile, which has one size.
    Published(Box<Costs>),
    /// A model with a source of op times.
    Imported(Box<ImportedCosts>),
}

/// A model with a source of op times.
pub struct ImportedCosts {
    loaded: LoadedModel,
    cluster: Cluster,
    times: Times,
    precision: PrecisionChoice,
    counted: CountedLoss,
    /// True if the request sets the micro-batch size.
    is_requested: bool,
    /// True if torch must run the file, which has a static batch size.
    is_for_torch: bool,
    /// The micro-batch size without a batch.
    default_size: u64,
}

impl CostsBySize {
    /// Reads the model and the source of its costs.
    pub fn open(request: &PlanRequest, events: &dyn EventSink) -> Result<CostsBySize, Error> {
        match request.format.unwrap_or_else(|| ModelFormat::of(&request.model)) {
            ModelFormat::Pipedream => Ok(CostsBySize::Published(Box::new(published(request)?))),
            ModelFormat::Onnx | ModelFormat::Pt2 => Ok(CostsBySize::Imported(Box::new(imported(request, events)?))),
            ModelFormat::DnnPartitioning | ModelFormat::Piper => Err(Error::bug("an instance has no cost graph")),
        }
    }

    pub fn cluster(&self) -> &Cluster {
        match self {
            CostsBySize::Published(costs) => &costs.cluster,
            CostsBySize::Imported(imported) => &imported.cluster,
        }
    }

    /// The micro-batch size without a batch.
    pub fn default_size(&self) -> u64 {
        match self {
            CostsBySize::Published(costs) => costs.micro_batch,
            CostsBySize::Imported(imported) => imported.default_size,
        }
    }
}

impl SizedCosts for CostsBySize {
    fn at(&self, micro_batch: u64) -> Result<Costs, Error> {
        match self {
            CostsBySize::Published(costs) => Ok((**costs).clone()),
            CostsBySize::Imported(imported) => imported.at(micro_batch),
        }
    }

    fn only_size(&self) -> Option<u64> {
        match self {
            CostsBySize::Published(costs) => Some(costs.micro_batch),
            CostsBySize::Imported(imported) => {
                let is_fixed = matches!(imported.loaded.model.batch, Batch::Fixed { .. }) || imported.is_for_torch;
                let profiled = profiled(&imported.times);
                let known = imported.loaded.known_micro_batch(profiled);
                known.filter(|_| is_fixed || profiled.is_some() || imported.is_requested)
            }
        }
    }
}

impl ImportedCosts {
    fn at(&self, micro_batch: u64) -> Result<Costs, Error> {
        let (cluster, times) = (self.cluster.clone(), self.times.clone());
        costs::assemble(&self.loaded, micro_batch, cluster, times, self.precision, self.counted)
    }
}

fn published(request: &PlanRequest) -> Result<Costs, Error> {
    let flags = [("--profile", request.costs != CostInput::default()), ("--loss", request.loss.is_some())];
    if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
        return Err(Error::conflict(flag, "`--from pipedream`: the file has its own costs"));
    }
    let cluster = cluster::cluster(&request.cluster, None)?;
    let micro_batch = request.micro_batch.unwrap_or(1);
    let dtype = match request.options.precision {
        PrecisionChoice::Given(precision) => precision.dtype(),
        PrecisionChoice::Usual | PrecisionChoice::Model => DType::F32,
    };
    let costs = costs::published_on(&request.model, cluster, micro_batch, dtype.name())?;
    Ok(Costs { has_memory: request.cluster.file.is_some(), ..costs })
}

fn imported(request: &PlanRequest, events: &dyn EventSink) -> Result<ImportedCosts, Error> {
    let (times, cluster) = open(request)?;
    // With several device classes, relative speeds convert the costs.
    if let Some(other) = other_kind(&times, &cluster).filter(|_| !cluster.is_mixed()) {
        let kind = &cluster.device.kind;
        events.warn(&format!(
            "the costs are for {}, but the cluster's devices are of type {}: times are valid only for the former \
             (`--profile analytic` uses the data sheet of the latter)",
            short_name(other),
            short_name(kind)
        ));
    }
    if let Some(format) = request.format {
        check_format(format, &request.model)?;
    }
    let loaded = model::load(&request.model, &request.import, events)?.with_micro_batch(request.micro_batch);
    let profiled = profiled(&times);
    let default_size = match request.batch {
        Some(_) => loaded.known_micro_batch(profiled).unwrap_or(DEFAULT_MICRO_BATCH),
        None => loaded.micro_batch(profiled, events),
    };
    let is_for_torch = request.options.target == Some(Target::Torch) && loaded.exported_batch().is_some();
    if is_for_torch {
        loaded.runs_in_torch(default_size)?;
    }
    if let Times::Analytic(device) = &times {
        events.note(&format!(
            "costs are analytic, from the data sheet of {}, not measured (`pipec profile` measures them)",
            device.kind
        ));
    }
    let counted = counted(request, &times)?;
    let (precision, is_requested) = (request.options.precision, request.micro_batch.is_some());
    Ok(ImportedCosts { loaded, cluster, times, precision, counted, is_requested, is_for_torch, default_size })
}

/// The loss included in the costs: that of the profile, whose times include it, else the requested one.
fn counted(request: &PlanRequest, times: &Times) -> Result<CountedLoss, Error> {
    let (requested, is_inference) = (request.loss, request.options.is_inference());
    if is_inference && requested.is_some_and(|loss| loss != CountedLoss::None) {
        return Err(Error::conflict("--loss", "a plan for inference").because("nothing is trained"));
    }
    let Times::Profile(path, _, profile) = times else {
        return Ok(requested.unwrap_or(if is_inference { CountedLoss::None } else { CountedLoss::Default }));
    };
    let profiled = CountedLoss::read(profile.settings.loss.as_deref())?;
    match requested.filter(|requested| *requested != profiled) {
        None => Ok(profiled),
        Some(_) => {
            let has = profiled.to_text().map_or("no loss".to_string(), |loss| format!("the loss `{loss}`"));
            Err(Error::input("`--loss` does not match this profile")
                .because(format!("{} includes {has}", path.display()))
                .with_help("`pipec profile MODEL --loss …` measures another loss"))
        }
    }
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
