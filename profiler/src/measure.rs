//! Measures the profile of a graph.
//!
//! Each kernel of an op is measured separately: its forward kernel, and the backward kernels of its gradient rule.
//! Equal kernels are measured once. If memory suffices, the whole model then runs as one stage and its per-op times
//! replace the sums, because fused ops take less. Ops with equal kernels get equal times, so that plans do not depend
//! on noise.

use crate::cache::{Cache, Time};
use crate::contention::{BackgroundFault, BackgroundWorkers};
use crate::kernel::{self, Runs, Subject};
use crate::machine::{cache_bytes, profiled_device};
use crate::scratch::{batched_gradients, chain_workspaces};
use crate::update;
use crate::whole::{Times, WholeStep, compile_whole_step};
use compiler::graph::Graph;
use compiler::graph::hash::hash;
use compiler::op::NodeId;
use compiler::pass::analytic::node_cost;
use compiler::pass::attribution::{Attribution, AttributionError, Training, attribute};
use compiler::pass::costs::{cost_graph, dtype};
use compiler::profile::{self, Method, OpProfile, Profile, ProfiledDevice, ProfiledModel, SCHEMA};
use compiler::tensor::Tensor;
use runtime::device::api::{Device, Kernel};
use runtime::device::error::DeviceError;
use runtime::exec::compile_error::CompileError;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};
use thiserror::Error;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub warmup: u32,
    /// Measured runs; fewer for slow kernels.
    pub runs: u32,
    pub seed: u64,
    /// Time limit per kernel; the whole model gets eight times as much.
    pub budget: Duration,
    /// Workers of a CPU that run the model at the same time, the measured one included.
    pub workers: u32,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { warmup: 3, runs: 25, seed: 0, budget: Duration::from_millis(250), workers: 1 }
    }
}

pub struct Model<'a> {
    /// The graph with static shapes, without a loss.
    pub graph: &'a Graph,
    pub training: Training,
    /// The loss, in profile notation.
    pub loss: Option<String>,
    /// File and fingerprint; `ops` is filled in.
    pub model: ProfiledModel,
    /// Samples per micro-batch, to which the graph was bound.
    pub micro_batch: u64,
    /// Initial weights by name. Missing ones are generated: times do not depend on the values.
    pub weights: &'a BTreeMap<String, Tensor>,
}

/// Measurement progress, reported before each measurement; cached times are not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    pub done: usize,
    pub total: usize,
    /// The op whose kernel is next, or the whole model.
    pub name: &'a str,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    pub profile: Profile,
    pub kernels: usize,
    /// Kernels that were measured and not taken from the cache.
    pub measured: usize,
    /// The first error of writing the cache.
    pub cache_fault: Option<String>,
}

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum MeasureError {
    #[error(transparent)]
    Attribution(#[from] AttributionError),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error("op `{name}` needs {bytes} bytes, {available} are free; use a smaller micro-batch or an analytic profile")]
    Memory { name: String, bytes: u64, available: u64 },
    #[error("op `{name}`: {fault}")]
    Kernel { name: String, fault: DeviceError },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{workers} workers need {bytes} bytes, and half of the {available} that are free may be used")]
    WorkersMemory { workers: u32, bytes: u64, available: u64 },
    #[error(
        "{workers} workers at the same time need a model that runs as a whole on synthetic data; this one does not"
    )]
    Workers { workers: u32 },
}

struct Job {
    subject: Subject,
    key: String,
    op: usize,
    time: Option<Time>,
    kernel: Arc<dyn Kernel>,
}

impl Job {
    fn workspace(&self) -> u64 {
        self.kernel.workspace() as u64
    }
}

/// Measures every op of a model on a device of this machine. A CPU uses one thread.
pub fn measure(
    model: &Model<'_>,
    target: &Arc<dyn Device>,
    settings: &Settings,
    cache: Option<&Cache>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Measured, MeasureError> {
    let attribution = attribute(model.graph, model.training)?;
    let device = profiled_device(&**target);
    let whole_step = compile_whole_step(model.graph, &attribution, model.training, &**target)?;
    let rotation_bytes =
        choose_rotation(whole_step.as_ref(), target.info().cache.map_or_else(cache_bytes, |bytes| bytes as usize));
    let runs = Runs {
        warmup: settings.warmup,
        samples: settings.runs,
        seed: settings.seed,
        rotation_bytes,
        budget: settings.budget,
    };
    let workers = settings.workers.max(1);
    let mut head = key_head(&device, target.info().tf32, &runs);
    if workers > 1 {
        // Times depend on the model that the other workers run.
        head += &format!(" workers {workers} {:?} {} |", model.training, hash(model.graph));
    }
    let (mut jobs, uses) = jobs(&attribution, &**target, &head)?;
    let costs = cost_graph(model.graph, &attribution);
    let names: Vec<String> = costs.ops.iter().map(|op| op.name.clone()).collect();

    let whole_key = format!("{head} whole {:?} {}", model.training, hash(model.graph));
    let mut whole_times: Option<Times> = None;
    if let Some(cache) = cache {
        for job in &mut jobs {
            job.time = cache.get(&job.key).and_then(|times| times.first().copied());
        }
        whole_times = cache.get(&whole_key).and_then(|times| Times::of_list(&times, attribution.ops.len()));
    }
    let measures_whole = whole_step.is_some() && whole_times.is_none();
    let parameters = update::parameters(model.graph, &attribution);
    let update_key = |(dtype, bytes): &update::Size| format!("{head} update {dtype} {bytes}");
    let mut updates: BTreeMap<update::Size, Option<Time>> = BTreeMap::new();
    if attribution.backward.is_some() {
        for size in parameters.iter().flatten() {
            let cached = || cache.and_then(|cache| cache.get(&update_key(size))?.first().copied());
            updates.entry(*size).or_insert_with(cached);
        }
    }
    let unmeasured: Vec<&dyn Kernel> = jobs.iter().filter(|job| job.time.is_none()).map(|job| &*job.kernel).collect();
    target.load(&unmeasured)?;
    let measured = unmeasured.len();
    let measured = measured + updates.values().filter(|time| time.is_none()).count();
    let total = measured + usize::from(measures_whole);
    let mut writer = CacheWriter { cache, fault: None };
    let mut done = 0;
    let mut measure_all = || -> Result<(), MeasureError> {
        for job in jobs.iter_mut().filter(|job| job.time.is_none()) {
            let name = &names[job.op];
            progress(Progress { done, total, name });
            let time = run(job, name, &**target, &runs)?;
            job.time = Some(time);
            writer.write(&job.key, &[time]);
            done += 1;
        }
        for (size, time) in updates.iter_mut().filter(|(_, time)| time.is_none()) {
            progress(Progress { done, total, name: "an optimizer step" });
            let (bytes, available) = (size.1.saturating_mul(3), free_bytes(&**target));
            if bytes > available {
                return Err(MeasureError::Memory { name: "an optimizer step".to_string(), bytes, available });
            }
            let measured_time = update::time(*size, &**target, &runs)?;
            *time = Some(measured_time);
            writer.write(&update_key(size), &[measured_time]);
            done += 1;
        }
        if let (Some(whole_step), true) = (&whole_step, measures_whole) {
            progress(Progress { done, total, name: "the whole model" });
            let runs = Runs { budget: settings.budget * 8, ..runs };
            whole_times = whole_step.time(target, model.weights, &runs);
            if let Some(times) = &whole_times {
                writer.write(&whole_key, &times.list());
            }
        }
        Ok(())
    };
    if workers == 1 || total == 0 {
        measure_all()?;
    } else {
        let whole_step = whole_step.as_ref().ok_or(MeasureError::Workers { workers })?;
        let background = BackgroundWorkers { whole_step, device: target, weights: model.weights, seed: settings.seed };
        background.during(workers - 1, measure_all).map_err(|fault| match fault {
            BackgroundFault::Memory { bytes, available } => MeasureError::WorkersMemory { workers, bytes, available },
            BackgroundFault::Run => MeasureError::Workers { workers },
        })??;
    }

    let (chain_bytes, batched) =
        (chain_workspaces(&attribution, &**target), batched_gradients(&attribution, &**target));
    let whole_op_times = whole_times.as_ref().map(|times| average_equal_ops(&times.ops, &uses));
    let ops = costs.ops.into_iter().enumerate().map(|(i, op)| {
        let [forward, backward] = [&uses.forward[i], &uses.backward[i]];
        let op_jobs = || forward.iter().chain(backward).map(|job| &jobs[*job]);
        let flops: f64 = attribution.forward_nodes[i].iter().map(|id| node_cost(&attribution.forward, *id).flops).sum();
        let total_ps: u64 = op_jobs().filter_map(|job| job.time).map(|t| t.median_ps).sum();
        let spread_ps: u64 = op_jobs().filter_map(|job| job.time).map(|t| t.spread_ps).sum();
        let mut times = [forward, backward, &uses.weights[i]].map(|indices| microseconds(&jobs, indices));
        if let Some(whole_op_times) = &whole_op_times {
            let [forward, backward] = whole_op_times[i];
            let [_, kernel_backward, weights] = times;
            // The weight-gradient fraction of a backward is only known from its kernels.
            let weights =
                if kernel_backward > 0.0 { (1e3 * backward * weights / kernel_backward).round() / 1e3 } else { 0.0 };
            times = [forward, backward, weights];
        }
        let [fwd_us, bwd_us, weight_grad_us] = times;
        OpProfile {
            id: op.id,
            name: op.name,
            module: op.module,
            op: op.op,
            fwd_us,
            bwd_us,
            weight_grad_us: Some(weight_grad_us),
            update_us: update_us(&parameters[i], &updates),
            spread: (1e4 * spread_ps as f64 / (total_ps as f64).max(1.0)).round() / 1e4,
            param_bytes: op.param_bytes,
            saved_bytes: op.saved_bytes,
            out_bytes: op.out_bytes,
            batched_grad_bytes: batched[i][0],
            batched_grad_workspace_bytes: batched[i][1],
            workspace_bytes: op_jobs().map(Job::workspace).max().unwrap_or(0).max(chain_bytes[i]),
            flops: flops as u64,
            source: source(i, op_jobs().collect()),
        }
    });
    let ops: Vec<OpProfile> = ops.collect();
    let us = |time: Time| nanoseconds(time.median_ps) / 1e3;
    let profile = Profile {
        schema: SCHEMA.to_string(),
        model: ProfiledModel { ops: ops.len() as u64, ..model.model.clone() },
        device,
        settings: profile::Settings {
            dtype: dtype(model.graph).name().to_string(),
            micro_batch: model.micro_batch,
            warmup: settings.warmup,
            runs: settings.runs,
            seed: settings.seed,
            workers,
            loss: model.loss.clone(),
        },
        method: Method::Measured,
        ops,
        whole: whole_times.map(|Times { whole: [forward, backward], range, .. }| profile::Whole {
            fwd_us: us(forward),
            bwd_us: us(backward),
            range_us: Some(range.map(|picoseconds| nanoseconds(picoseconds) / 1e3)),
        }),
    };
    Ok(Measured { profile, kernels: jobs.len() + updates.len(), measured, cache_fault: writer.fault })
}

/// Writes the cache. The first error is kept; the measurement goes on.
struct CacheWriter<'a> {
    cache: Option<&'a Cache>,
    fault: Option<String>,
}

impl CacheWriter<'_> {
    fn write(&mut self, key: &str, times: &[Time]) {
        if let (Some(cache), None) = (self.cache, &self.fault)
            && let Err(error) = cache.put(key, times)
        {
            self.fault = Some(format!("{}: {error}", cache.folder().display()));
        }
    }
}

/// For each op, indices into the list of jobs; `weights` is the weight-gradient subset of `backward`.
struct Uses {
    forward: Vec<Vec<usize>>,
    backward: Vec<Vec<usize>>,
    weights: Vec<Vec<usize>>,
}

fn jobs(attribution: &Attribution, device: &dyn Device, head: &str) -> Result<(Vec<Job>, Uses), DeviceError> {
    let mut list: Vec<Job> = Vec::new();
    let mut by_key: HashMap<String, usize> = HashMap::new();
    let mut find = |graph: &Graph, nodes: &[NodeId], op: usize| -> Result<Vec<usize>, DeviceError> {
        let indices = nodes.iter().map(|id| {
            let subject = Subject::of(graph, *id);
            let key = format!("{head} {}", subject.key());
            if let Some(index) = by_key.get(&key) {
                return Ok(*index);
            }
            let kernel = subject.kernel(device)?;
            by_key.insert(key.clone(), list.len());
            list.push(Job { subject, key, op, time: None, kernel });
            Ok(list.len() - 1)
        });
        indices.collect()
    };
    let mut uses = Uses { forward: Vec::new(), backward: Vec::new(), weights: Vec::new() };
    for op in 0..attribution.ops.len() {
        uses.forward.push(find(&attribution.forward, &attribution.forward_nodes[op], op)?);
        let nodes = &attribution.backward_nodes[op];
        let backward = match &attribution.backward {
            Some(graph) => find(graph, nodes, op)?,
            None => Vec::new(),
        };
        let second = nodes.iter().zip(&backward).filter(|(id, _)| attribution.second.contains(id));
        uses.weights.push(second.map(|(_, job)| *job).collect());
        uses.backward.push(backward);
    }
    Ok((list, uses))
}

/// Microseconds per op (forward, backward) in the run of the whole model, averaged over ops with equal kernels.
fn average_equal_ops(ops: &[[u64; 2]], uses: &Uses) -> Vec<[f64; 2]> {
    let kernels = |op: usize| (&uses.forward[op], &uses.backward[op]);
    let mut sums: HashMap<_, ([u64; 2], u64)> = HashMap::new();
    for (op, [forward, backward]) in ops.iter().enumerate() {
        let (sum, count) = sums.entry(kernels(op)).or_default();
        (*sum, *count) = ([sum[0] + forward, sum[1] + backward], *count + 1);
    }
    let mean = |op| {
        let (sum, count) = sums[&kernels(op)];
        sum.map(|sum| nanoseconds(sum / count) / 1e3)
    };
    (0..ops.len()).map(mean).collect()
}

fn free_bytes(device: &dyn Device) -> u64 {
    device.available_memory().unwrap_or(u64::MAX)
}

fn run(job: &Job, name: &str, device: &dyn Device, runs: &Runs) -> Result<Time, MeasureError> {
    let available = free_bytes(device);
    let bytes = job.subject.bytes().saturating_add(job.workspace());
    if bytes > available {
        return Err(MeasureError::Memory { name: name.to_string(), bytes, available });
    }
    kernel::time(&job.subject, device, &*job.kernel, runs)
        .map_err(|fault| MeasureError::Kernel { name: name.to_string(), fault })
}

/// Rotation size of a kernel's tensor copies, see [`kernel`]: the model's footprint up to twice the cache. A power of
/// two, so that models of similar size share cache entries.
fn choose_rotation(whole_step: Option<&WholeStep>, cache: usize) -> usize {
    let limit = 2 * cache.max(1);
    whole_step.map_or(limit, |step| step.footprint().min(limit).next_power_of_two().min(limit))
}

/// The part of the cache key that all kernels share.
fn key_head(device: &ProfiledDevice, tf32: bool, runs: &Runs) -> String {
    let Runs { warmup, samples, seed, rotation_bytes, budget } = runs;
    format!(
        "{} | {} {}{} | warmup {warmup} runs {samples} seed {seed} rotation {rotation_bytes} budget {}us |",
        device.name,
        device.driver,
        build(),
        if tf32 { " tf32" } else { "" },
        budget.as_micros()
    )
}

/// Identifies the build: another compiler or other kernels give other times.
fn build() -> String {
    let file = std::env::current_exe().and_then(std::fs::metadata);
    let description = file.ok().map(|file| {
        let changed = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        format!("{}-{}", file.len(), changed.unwrap_or_default().as_nanos())
    });
    description.unwrap_or_default()
}

fn microseconds(jobs: &[Job], uses: &[usize]) -> f64 {
    let sum = uses.iter().filter_map(|job| jobs[*job].time).map(|t| t.median_ps).sum();
    nanoseconds(sum) / 1e3
}

/// Optimizer step time of all parameters of an op; `None` without parameters or training.
fn update_us(parameters: &[update::Size], updates: &BTreeMap<update::Size, Option<Time>>) -> Option<f64> {
    let times: Vec<u64> =
        parameters.iter().filter_map(|size| updates.get(size).copied().flatten()).map(|time| time.median_ps).collect();
    (!times.is_empty()).then(|| nanoseconds(times.iter().sum()) / 1e3)
}

/// Rounds to whole nanoseconds: finer than the clock, and read back exactly.
fn nanoseconds(picoseconds: u64) -> f64 {
    (picoseconds as f64 / 1e3).round()
}

fn source(op: usize, jobs: Vec<&Job>) -> String {
    let Some(first) = jobs.first() else { return "view".to_string() };
    let description = match jobs.iter().all(|job| job.op < op) {
        true => format!("equal to op {}", first.op),
        false => "measured".to_string(),
    };
    match jobs.iter().any(|job| job.kernel.is_reference()) {
        true => format!("{description}, reference kernel"),
        false => description,
    }
}
