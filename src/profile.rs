//! Profiles a model: measures its ops on this machine, or computes them from the data sheet of a device.

use crate::cluster;
use crate::costs::in_precision;
use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::files::output;
use crate::loss::{Attributed, CountedLoss, attribute_with_loss};
use crate::model::{self, ImportRequest, LoadedModel};
use crate::train::device_request::{OneDevice, for_precision};
use crate::train::memory;
use compiler::graph::Graph;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::AttributionError;
use compiler::pass::costs::dtype;
use compiler::profile::Profile;
use compiler::profile::precision::Precision;
use compiler::tensor::DType;
use compiler::text::name::short_name;
use compiler::text::quantity;
use profiler::cache::Cache;
use profiler::measure::{MeasureError, Model, Settings, measure};
use runtime::device::api::Device;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;

pub mod torch_engine;

use torch_engine::{TorchEngine, TorchSubject};

/// Other processes are mentioned if they hold more than one part in this many of a GPU's memory. A CUDA context takes less.
const LEAST_SHARE_OF_OTHERS: u64 = 20;

/// The device whose ops are profiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfileDevice {
    /// A device of this machine, measured: one core, or a GPU.
    Measured(OneDevice),
    /// The roofline of a device type, computed.
    Analytic(String),
    /// A device that PyTorch runs on, measured with its kernels.
    Torch(TorchEngine),
}

#[derive(Clone, Debug)]
pub struct ProfileRequest {
    pub model: PathBuf,
    pub device: ProfileDevice,
    pub import: ImportRequest,
    /// Samples per micro-batch; the model's or 32 if absent.
    pub micro_batch: Option<u64>,
    /// The precision. If absent, measurements have that of the model; data sheets have the usual one of the device.
    pub precision: Option<Precision>,
    /// The loss whose costs are included.
    pub loss: CountedLoss,
    /// Measured runs and warm-up runs of each kernel.
    pub settings: Settings,
    /// True to read measurements from the user's cache and add new ones.
    pub uses_cache: bool,
    /// The output file of the profile, if it must not overwrite the profile of another model.
    pub protected_output: Option<PathBuf>,
}

/// Checks that several workers can be measured at the same time.
fn check_workers(request: &ProfileRequest) -> Result<(), Error> {
    let workers = request.settings.workers;
    if workers <= 1 {
        return Ok(());
    }
    if request.device != ProfileDevice::Measured(OneDevice::Cpu) {
        let help = "the workers of a CPU share its memory bandwidth; other costs do not depend on their number";
        return Err(Error::input("`--workers` requires `--device cpu` and `--engine pipec`").with_help(help));
    }
    let cores = available_parallelism().map_or(1, |cores| cores.get() as u64);
    if u64::from(workers) > cores {
        let cores = quantity::plural(cores, "core", "cores");
        return Err(Error::input(format!(
            "`--workers {workers}`: this machine has {cores}, and every worker needs one"
        )));
    }
    Ok(())
}

/// Profiles a model.
pub fn profile(request: &ProfileRequest, events: &dyn EventSink) -> Result<Profile, Error> {
    check_workers(request)?;
    match &request.device {
        ProfileDevice::Measured(device) => {
            let device = for_precision(vec![device.open()?], request.precision, events).remove(0);
            let loaded = load(request, events)?;
            let micro_batch = loaded.micro_batch(None, events);
            let graph = graph(&loaded, micro_batch, request.precision)?;
            let subject = MeasuredGraph { loaded: &loaded, graph: &graph, micro_batch, loss: request.loss };
            let measured = measure_graph(&subject, &device, &request.settings, request.uses_cache, events)?;
            Ok(with_precision(measured, request.precision.filter(|_| device.info().tf32)))
        }
        ProfileDevice::Torch(engine) => {
            let loaded = load(request, events)?;
            if !loaded.frozen().is_empty() {
                return Err(Error::input("the torch engine measures the module as it is, without `--freeze`")
                    .with_help("set `requires_grad_(False)` before `torch.export`, or profile with another engine"));
            }
            let micro_batch = loaded.micro_batch(None, events);
            let graph = graph(&loaded, micro_batch, request.precision)?;
            let attributed = attributed(&loaded, &graph, request.loss)?;
            let subject = TorchSubject {
                loaded: &loaded,
                file: &request.model,
                graph: &graph,
                micro_batch,
                precision: request.precision,
                attributed,
            };
            Ok(with_precision(torch_engine::measure(engine, &subject, &request.settings, events)?, request.precision))
        }
        ProfileDevice::Analytic(kind) => {
            let device = cluster::kind(kind)?.device();
            let loaded = load(request, events)?;
            let micro_batch = loaded.micro_batch(None, events);
            let model_dtype = dtype(&loaded.with_samples(micro_batch)?);
            let default_precision = Precision::usual(&device);
            let precision = request
                .precision
                .or((model_dtype == DType::F32 && default_precision.is_mixed()).then_some(default_precision));
            let graph = graph(&loaded, micro_batch, precision)?;
            let device = precision.map_or_else(|| device.clone(), |precision| precision.on(&device));
            let attributed = attributed(&loaded, &graph, request.loss)?;
            let subject = Subject { model: loaded.profiled(), micro_batch, loss: attributed.counted.to_text() };
            Ok(with_precision(analytic::profile(&graph, &attributed.attribution, &device, &subject), precision))
        }
    }
}

/// The profile with its precision, if that is not the element type of its graph.
fn with_precision(mut profile: Profile, precision: Option<Precision>) -> Profile {
    if precision == Some(Precision::Tf32) {
        profile.settings.dtype = Precision::Tf32.name().to_string();
    }
    profile
}

/// Loads the model; fails if its profile would overwrite that of another model.
fn load(request: &ProfileRequest, events: &dyn EventSink) -> Result<LoadedModel, Error> {
    let loaded = model::load(&request.model, &request.import, events)?.with_micro_batch(request.micro_batch);
    if let Some(path) = &request.protected_output {
        output::protect(path, &request.model, &[("sha256", &loaded.profiled().sha256)], "profile")?;
    }
    Ok(loaded)
}

/// The graph at this micro-batch size, in this precision.
fn graph(loaded: &LoadedModel, micro_batch: u64, precision: Option<Precision>) -> Result<Graph, Error> {
    let graph = loaded.with_samples(micro_batch)?;
    precision.map_or(Ok(graph.clone()), |precision| in_precision(&graph, precision, &loaded.model.file))
}

/// A graph to measure.
pub struct MeasuredGraph<'a> {
    pub loaded: &'a LoadedModel,
    /// Its graph at this micro-batch size and precision.
    pub graph: &'a Graph,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// The loss whose costs are included.
    pub loss: CountedLoss,
}

/// Measures every kernel of a model on a device of this machine.
pub fn measure_graph(
    subject: &MeasuredGraph<'_>,
    device: &Arc<dyn Device>,
    settings: &Settings,
    uses_cache: bool,
    events: &dyn EventSink,
) -> Result<Profile, Error> {
    let &MeasuredGraph { loaded, graph, micro_batch, loss } = subject;
    memory::check("profiling this model", memory::of_graph(graph), "use a smaller `--micro-batch N`")?;
    note_other_users(&**device, events);
    let weights = loaded.known_weights();
    let attributed = attributed(loaded, graph, loss)?;
    let model = Model {
        graph,
        training: attributed.training,
        loss: attributed.counted.to_text(),
        model: loaded.profiled(),
        micro_batch,
        weights: &weights,
    };
    let cache = Cache::of_user().map(|cache| if uses_cache { cache } else { cache.unread() });
    let measured = measure(&model, device, settings, cache.as_ref(), &mut |progress| {
        let message = short_name(progress.name);
        let (done, total) = (progress.done as u64, progress.total as u64);
        events.event(Event::Progress { unit: "kernels", done, total, message: &message });
    });
    events.event(Event::ProgressEnd);
    let measured = measured.map_err(|error| {
        let failure = Error::input(format!("cannot profile {}", loaded.model.file)).because(&error);
        match error {
            MeasureError::Memory { .. } => failure.with_help("use a smaller `--micro-batch N`"),
            MeasureError::WorkersMemory { .. } => {
                failure.with_help("use fewer `--workers` or a smaller `--micro-batch N`")
            }
            MeasureError::Workers { .. } => failure.with_help("measure one worker, without `--workers`"),
            _ => failure,
        }
    })?;
    if let Some(fault) = &measured.cache_fault {
        events.warn(&format!("the measured times were not cached: {fault}"));
    }
    let kernels_text = quantity::plural(measured.kernels as u64, "kernel", "kernels");
    events.note(&match measured.measured {
        0 => format!("{kernels_text}: all from the cache; `--no-cache` measures again"),
        count if count == measured.kernels => format!("{kernels_text} measured"),
        count => format!("{kernels_text}: {count} measured, the others from the cache"),
    });
    Ok(measured.profile)
}

/// Says if other processes hold memory of a GPU: they may also slow it down.
fn note_other_users(device: &dyn Device, events: &dyn EventSink) {
    let (info, free) = (device.info(), device.available_memory());
    let Some((total, free)) = info.memory.zip(free) else { return };
    let used = total.saturating_sub(free);
    if used > total / LEAST_SHARE_OF_OTHERS {
        let (used, total) = (quantity::bytes(used), quantity::bytes(total));
        events.note(&format!("{used} of {total} of {} are in use: other processes may disturb the times", info.name));
    }
}

/// The op of every node, with the loss.
fn attributed(loaded: &LoadedModel, graph: &Graph, loss: CountedLoss) -> Result<Attributed, Error> {
    attribute_with_loss(graph, loss).map_err(|error| {
        let failure = Error::input(format!("cannot profile {}", loaded.model.file)).because(&error);
        match error {
            AttributionError::Loss(_) => failure.with_help("choose another `--loss`"),
            _ => failure,
        }
    })
}
