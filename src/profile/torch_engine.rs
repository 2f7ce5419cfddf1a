//! Measures a model with PyTorch's kernels: runs the user's Python with a script that loads the exported program.
//!
//! The script reports the nodes of the exported program. An op of pipec takes the time of its node; the ops of one node
//! share it in proportion to their roofline. Nodes without an op, such as views, count for the next node that has one.
//! Memory and operations are those of pipec's graph. pipec itself executes nothing of the file, but torch loads it.

use crate::cluster;
use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::files::python;
use crate::loss::{Attributed, CountedLoss};
use crate::model::LoadedModel;
use compiler::cluster::device;
use compiler::graph::Graph;
use compiler::op::Op;
use compiler::pass::analytic::{self, Subject};
use compiler::profile::precision::Precision;
use compiler::profile::{Method, OpProfile, Profile, ProfiledDevice, Whole};
use compiler::text::name::short_name;
use compiler::text::quantity;
use profiler::machine;
use profiler::measure::Settings;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The program that Python runs.
const SCRIPT: &str = include_str!("torch_engine.py");

/// The source of a measured op in a profile.
const SOURCE: &str = "torch";

/// How PyTorch is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchEngine {
    /// The device, as torch names it: `cpu`, `cuda:0`.
    pub device: String,
    /// The Python; that of the virtual environment or `python3` if absent.
    pub python: Option<PathBuf>,
    /// True to measure the whole graph under `torch.compile` as well.
    pub compile: bool,
}

pub struct TorchSubject<'a> {
    pub loaded: &'a LoadedModel,
    pub file: &'a Path,
    /// The graph at this micro-batch size and precision.
    pub graph: &'a Graph,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// The precision, if it is not that of the model.
    pub precision: Option<Precision>,
    /// The op of every node, with the loss.
    pub attributed: Attributed,
}

/// Time of a node in microseconds.
#[derive(Clone, Copy, Default)]
struct NodeTime {
    forward: f64,
    backward: f64,
    weight_grad: f64,
    spread: f64,
}

impl NodeTime {
    fn of(line: &Value) -> NodeTime {
        let number = |name: &str| line[name].as_f64().filter(|us| us.is_finite() && *us >= 0.0).unwrap_or(0.0);
        NodeTime {
            forward: number("fwd_us"),
            backward: number("bwd_us"),
            weight_grad: number("weight_grad_us"),
            spread: number("spread"),
        }
    }

    fn add(&mut self, other: NodeTime) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.weight_grad += other.weight_grad;
        self.spread = self.spread.max(other.spread);
    }
}

/// What the script reports.
#[derive(Default)]
struct Report {
    device: Value,
    torch: String,
    nodes: Vec<(String, NodeTime)>,
    loss: Option<NodeTime>,
    /// Of one step of SGD with momentum over all parameters.
    update_us: Option<f64>,
    whole: Option<Whole>,
    compiled: Option<Whole>,
    peak_bytes: Option<u64>,
}

/// Measures the model.
pub fn measure(
    engine: &TorchEngine,
    subject: &TorchSubject<'_>,
    settings: &Settings,
    events: &dyn EventSink,
) -> Result<Profile, Error> {
    let name = &subject.loaded.model.file;
    let mut start = [0; 2];
    let is_archive =
        File::open(subject.file).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *b"PK";
    if !is_archive {
        return Err(Error::input(format!("cannot measure {} with torch", short_name(name)))
            .because("torch loads only files of torch.export.save")
            .with_help("export the model with torch.export, or use `--engine pipec`"));
    }
    events.note(&format!("torch loads {} and runs it; pipec executes nothing of it", short_name(name)));
    let report = run(engine, subject, settings, events)?;
    let kind = cluster::gpu_of(report.device["name"].as_str().unwrap_or_default());
    let roofline = kind.or_else(|| device::find("cpu")).ok_or_else(|| Error::bug("the table of devices has CPUs"))?;
    let subject_of_profile = Subject {
        model: subject.loaded.profiled(),
        micro_batch: subject.micro_batch,
        loss: subject.attributed.counted.to_text(),
    };
    let mut profile =
        analytic::profile(subject.graph, &subject.attributed.attribution, &roofline.device(), &subject_of_profile);
    let measured_ops = fill(&mut profile.ops, &report, predictions(subject));
    profile.method = Method::Measured;
    let name = report.device["name"].as_str().filter(|name| !name.is_empty());
    profile.device = match kind.map(|kind| kind.name).or(name) {
        Some(name) => ProfiledDevice {
            name: name.to_string(),
            driver: report.device["driver"].as_str().unwrap_or_default().to_string(),
            memory_bytes: report.device["memory_bytes"].as_u64().unwrap_or(0),
        },
        None => machine::this_cpu(),
    };
    (profile.settings.warmup, profile.settings.runs) = (settings.warmup, settings.runs);
    profile.settings.seed = settings.seed;
    profile.whole = report.whole;
    let nodes = quantity::plural(report.nodes.len() as u64, "node", "nodes");
    events.note(&format!("torch {} measured {nodes}, {measured_ops} of {} ops", report.torch, profile.ops.len()));
    if let Some(compiled) = report.compiled {
        let (forward, backward) = (quantity::time(compiled.fwd_us), quantity::time(compiled.bwd_us));
        events.note(&format!("under torch.compile, forward takes {forward} and backward {backward}"));
    }
    if let Some(peak) = report.peak_bytes {
        events.note(&format!("the eager graph has a peak of {} on the device", quantity::bytes(peak)));
    }
    Ok(profile)
}

/// Index of the op that computes the predictions of the loss.
fn predictions(subject: &TorchSubject<'_>) -> Option<usize> {
    let value = subject.graph.outputs.first()?.value;
    let op = subject.graph.op_of(value.node);
    subject.attributed.attribution.ops.iter().position(|id| *id == op)
}

/// Sets the times of the ops. Returns the number of ops with a measured node.
fn fill(ops: &mut [OpProfile], report: &Report, predictions: Option<usize>) -> usize {
    let mut indices_of: HashMap<&str, Vec<usize>> = HashMap::new();
    let names: Vec<String> = ops.iter().map(|op| op.name.clone()).collect();
    names.iter().enumerate().for_each(|(at, name)| indices_of.entry(name).or_default().push(at));
    let mut times = vec![None::<NodeTime>; ops.len()];
    let (mut pending, mut last) = (NodeTime::default(), None);
    for (name, time) in &report.nodes {
        pending.add(*time);
        let Some(indices) = indices_of.get(name.as_str()) else { continue };
        let weight = |at: &usize| ops[*at].fwd_us + ops[*at].bwd_us;
        let total: f64 = indices.iter().map(weight).sum();
        for at in indices {
            let share = if total > 0.0 { weight(at) / total } else { 1.0 / indices.len() as f64 };
            times[*at].get_or_insert_default().add(NodeTime {
                forward: pending.forward * share,
                backward: pending.backward * share,
                weight_grad: pending.weight_grad * share,
                spread: time.spread,
            });
        }
        (pending, last) = (NodeTime::default(), indices.last().copied());
    }
    if let Some(last) = last {
        times[last].get_or_insert_default().add(pending);
    }
    if let (Some(loss), Some(at)) = (report.loss, predictions) {
        times[at].get_or_insert_default().add(loss);
    }
    let bytes: f64 = ops.iter().filter(|op| op.update_us.is_some()).map(|op| op.param_bytes as f64).sum();
    let mut matched = 0;
    for (op, time) in ops.iter_mut().zip(&times) {
        // Ops without a node, such as constants, take next to no time.
        let time = time.inspect(|_| matched += 1).unwrap_or_default();
        (op.fwd_us, op.bwd_us) = (nanoseconds(time.forward), nanoseconds(time.backward));
        op.weight_grad_us = Some(nanoseconds(time.weight_grad).min(op.bwd_us));
        op.spread = (time.spread * 1e4).round() / 1e4;
        op.source = SOURCE.to_string();
        if let (Some(update), Some(us)) = (&mut op.update_us, report.update_us) {
            *update = nanoseconds(us * op.param_bytes as f64 / bytes.max(1.0));
        }
    }
    matched
}

/// Rounds microseconds to whole nanoseconds.
fn nanoseconds(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}

fn run(
    engine: &TorchEngine,
    subject: &TorchSubject<'_>,
    settings: &Settings,
    events: &dyn EventSink,
) -> Result<Report, Error> {
    let python = python::find(engine.python.as_deref());
    let failed =
        |why: String| Error::input(format!("cannot measure {} with torch", subject.loaded.model.file)).because(why);
    let (loss, class_axis) = match subject.attributed.counted {
        CountedLoss::One(loss, axis) => (loss.name(), axis),
        CountedLoss::Default | CountedLoss::None => ("none", None),
    };
    let inputs = subject.graph.ids().filter_map(|id| match &subject.graph.node(id).op {
        Op::Input(input) => Some(json!({"name": input.name, "shape": input.fact.concrete()?})),
        _ => None,
    });
    let request = json!({
        "model": subject.file,
        "device": engine.device,
        "precision": subject.precision.map_or("", Precision::name),
        "inputs": inputs.collect::<Vec<_>>(),
        "loss": loss,
        "class_axis": class_axis,
        "warmup": settings.warmup,
        "runs": settings.runs,
        "seed": settings.seed,
        "compile": engine.compile,
    });
    let mut report = Report::default();
    let result = python::run(&python, SCRIPT, &request, &mut |line| report.read_line(&line, events), &failed);
    events.event(Event::ProgressEnd);
    result?;
    match report.nodes.is_empty() {
        true => Err(failed("torch measured no node".to_string())),
        false => Ok(report),
    }
}

impl Report {
    /// Takes a line of the script.
    fn read_line(&mut self, line: &Value, events: &dyn EventSink) {
        let text = |name: &str| line[name].as_str().unwrap_or_default().to_string();
        let whole_times = |times: &Value| Whole {
            fwd_us: times["fwd_us"].as_f64().unwrap_or(0.0),
            bwd_us: times["bwd_us"].as_f64().unwrap_or(0.0),
            range_us: None,
        };
        if let Some(device) = line.get("device") {
            (self.device, self.torch) = (device.clone(), text("torch"));
        } else if line.get("node").is_some() {
            self.nodes.push((text("node"), NodeTime::of(line)));
        } else if let Some(progress) = line.get("progress") {
            let number = |at: usize| progress[at].as_u64().unwrap_or(0);
            let name = text("name");
            events.event(Event::Progress {
                unit: "nodes",
                done: number(0),
                total: number(1),
                message: &short_name(&name),
            });
        } else if let Some(loss) = line.get("loss") {
            self.loss = Some(NodeTime::of(loss));
        } else if let Some(update) = line.get("update") {
            self.update_us = update["us"].as_f64();
        } else if let Some(times) = line.get("whole") {
            self.whole = Some(whole_times(times));
        } else if let Some(times) = line.get("compiled") {
            self.compiled = Some(whole_times(times));
        } else if let Some(peak) = line.get("peak_bytes") {
            self.peak_bytes = peak.as_u64();
        } else if line.get("note").is_some() {
            events.note(&short_name(&text("note")));
        }
    }
}
