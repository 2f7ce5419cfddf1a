//! Plots of many plans: throughput over devices and depth, memory, communication against data parallelism, bubbles over
//! micro-batches, and the largest model that fits.
//!
//! [`Sweep`] is the data, [`Sweep::pictures`] are the plots for which it has enough points. Each combination of
//! schedule, micro-batches and depth is a separate curve; names contain only the parameters that differ.

use crate::export::axis::Unit;
use crate::export::plot::{Curve, HorizontalAxis, Plot};
use crate::export::svg::Svg;
use crate::plan::device_memory::fullest;
use crate::plan::problem::CostModel;
use crate::plan::schedule::Schedule;
use crate::plan::{Plan, Stage};
use crate::text::quantity::plural;
use serde::Serialize;
use std::collections::BTreeSet;

/// The request and result of one plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub devices: u32,
    /// Number of stages, equally replicated; `None` if chosen by the planner.
    pub depth: Option<u32>,
    pub schedule: Schedule,
    pub micro_batch: u64,
    pub microbatches: u32,
    /// The plan's figures, or the reason why there is no plan.
    pub answer: Result<Figures, String>,
}

/// The parameters of one curve, without the number of devices. `None` for the parameter on the horizontal axis, or one
/// chosen by the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct CurveKey {
    depth: Option<u32>,
    schedule: Option<&'static str>,
    microbatches: Option<u32>,
    micro_batch: Option<u64>,
}

impl CurveKey {
    fn of(point: &Point) -> CurveKey {
        CurveKey {
            depth: point.depth,
            schedule: Some(point.schedule.name()),
            microbatches: Some(point.microbatches),
            micro_batch: Some(point.micro_batch),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    pub replicas: Vec<u32>,
    /// Tensor-parallel degree.
    #[serde(rename = "tensor_degree")]
    pub degree: u32,
    pub throughput_per_s: f64,
    /// Samples per second of a single device, regardless of its memory limit.
    #[serde(skip)]
    pub single_per_s: f64,
    pub peak_bytes: u64,
    #[serde(skip)]
    pub limit_bytes: Option<u64>,
    /// Fraction of a step during which the busiest stage is idle because of pipeline fill and drain.
    pub bubble: f64,
    /// Bytes sent by all devices per sample.
    pub bytes_per_sample: f64,
    /// The same for data parallelism over the same number of devices.
    pub data_parallel_bytes_per_sample: f64,
    pub recompute: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Largest {
    /// Number of devices, one stage each.
    pub devices: u32,
    pub recompute: bool,
    /// Number of layers and of parameters; `None` if even the smallest model does not fit.
    pub found: Option<(u32, u64)>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sweep {
    /// In request order.
    pub points: Vec<Point>,
    /// Name and largest models of a model family.
    pub family: Option<(String, Vec<Largest>)>,
}

impl Figures {
    /// The figures of a plan for a model with `gradient_bytes` bytes of gradient sums.
    pub fn of(plan: &Plan, gradient_bytes: u64) -> Figures {
        let schedule = &plan.schedule;
        let is_training = schedule.kind.trains();
        let is_round_robin = schedule.kind.is_round_robin();
        let item = schedule.micro_batch.max(1) as f64;
        let minibatch = item * f64::from(schedule.microbatches.max(1));
        // In a ring all-reduce of r replicas each sends (r - 1) / r of the gradient sums twice: under 1F1B-RR after every r
        // micro-batches, else once per minibatch.
        let reduce_bytes = |replicas: u32, bytes: u64| {
            let samples = if is_round_robin { item * f64::from(replicas) } else { minibatch };
            if is_training { 2.0 * f64::from(replicas.saturating_sub(1)) * bytes as f64 / samples } else { 0.0 }
        };
        let directions = if is_training { 2.0 } else { 1.0 };
        let messages: f64 = plan.edges.iter().map(|edge| directions * edge.bytes as f64 / item).sum();
        let reduces: f64 = plan
            .stages
            .iter()
            .map(|stage| f64::from(stage.degree()) * reduce_bytes(stage.replicas, stage.reduced_bytes()))
            .sum();
        // The baseline is the time of a minibatch, or of a micro-batch if there is no flush.
        let of_items = plan.cost != CostModel::Pipec || !schedule.kind.trains();
        let samples = if of_items { item } else { minibatch };
        let single = plan.baselines.single;
        Figures {
            replicas: plan.stages.iter().map(|stage| stage.replicas).collect(),
            degree: plan.stages.iter().map(Stage::degree).max().unwrap_or(1),
            throughput_per_s: plan.predicted.throughput_per_s,
            single_per_s: if single > 0.0 { samples * 1e6 / single } else { 0.0 },
            peak_bytes: fullest(plan),
            limit_bytes: plan.cluster.memory_per_device.map(|limit| limit.0),
            bubble: plan.predicted.bubble,
            bytes_per_sample: messages + reduces,
            data_parallel_bytes_per_sample: reduce_bytes(plan.cluster.devices, gradient_bytes),
            recompute: plan.stages.iter().any(|stage| stage.recompute),
        }
    }
}

/// All file names that [`Sweep::pictures`] may return.
pub const PICTURES: [&str; 6] =
    ["throughput.svg", "memory.svg", "communication.svg", "throughput-by-depth.svg", "bubble.svg", "largest.svg"];

impl Sweep {
    pub fn pictures(&self) -> Vec<(&'static str, Svg)> {
        let mut pictures = Vec::new();
        let devices = self.values(|point| u64::from(point.devices));
        let depths: BTreeSet<Option<u32>> = self.lines(|line| line).iter().map(|line| line.depth).collect();
        let depths: Vec<Option<u32>> = depths.into_iter().collect();
        if !devices.is_empty() {
            pictures.push(("throughput.svg", self.throughput(&devices).draw()));
            pictures.push(("memory.svg", self.memory(&devices).draw()));
            pictures.push(("communication.svg", self.communication(&devices).draw()));
        }
        if depths.len() > 1 {
            pictures.push(("throughput-by-depth.svg", self.by_depth(&devices, &depths).draw()));
        }
        let flushes = |point: &&Point| !point.schedule.is_continuous();
        if self.points.iter().filter(flushes).any(|point| point.answer.is_ok()) {
            pictures.push(("bubble.svg", self.bubble().draw()));
        }
        if let Some((name, largest)) = &self.family {
            pictures.push(("largest.svg", family(name, largest).draw()));
        }
        pictures
    }

    fn values(&self, of: impl Fn(&Point) -> u64) -> Vec<f64> {
        self.points.iter().map(of).collect::<BTreeSet<u64>>().into_iter().map(|value| value as f64).collect()
    }

    /// The distinct curves of all successful plans; `of` clears parameters that do not distinguish curves. Requests
    /// without a plan would only appear in legends.
    fn lines(&self, of: impl Fn(CurveKey) -> CurveKey) -> Vec<CurveKey> {
        let planned = self.points.iter().filter(|point| point.answer.is_ok());
        planned.map(|point| of(CurveKey::of(point))).collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn at(&self, devices: f64, line: &CurveKey) -> Option<&Figures> {
        let mut points =
            self.points.iter().filter(|point| f64::from(point.devices) == devices && CurveKey::of(point) == *line);
        points.find_map(|point| point.answer.as_ref().ok())
    }

    /// Appends the parameters that distinguish a curve from the others.
    fn curve_name(&self, name: String, line: &CurveKey) -> String {
        let differs =
            |is_same: &dyn Fn(&Point, &Point) -> bool| self.points.iter().any(|point| !is_same(point, &self.points[0]));
        let schedule = line.schedule.filter(|_| differs(&|one, other| one.schedule.name() == other.schedule.name()));
        let count = line.microbatches.filter(|_| differs(&|one, other| one.microbatches == other.microbatches));
        let samples = line.micro_batch.filter(|_| differs(&|one, other| one.micro_batch == other.micro_batch));
        let parameters = [
            schedule.map(str::to_string),
            count.map(|count| plural(count.into(), "micro-batch", "micro-batches")),
            samples.map(|samples| plural(samples, "sample", "samples")),
        ];
        parameters.into_iter().flatten().fold(name, |name, parameter| format!("{name}, {parameter}"))
    }

    /// One curve over devices for each combination of parameters.
    fn over_devices(&self, devices: &[f64], of: impl Fn(&Figures) -> f64) -> Vec<Curve> {
        let curve = |line: &CurveKey| {
            let points = devices.iter().filter_map(|&n| Some((n, of(self.at(n, line)?))));
            Curve { name: self.curve_name(name(line.depth), line), points: points.collect(), is_reference: false }
        };
        self.lines(|line| line).iter().map(curve).collect()
    }

    /// Reference curves over devices, which do not depend on depth. `anywhere` allows values from plans for other
    /// numbers of devices.
    fn references(&self, what: &str, devices: &[f64], anywhere: bool, of: impl Fn(f64, &Figures) -> f64) -> Vec<Curve> {
        let curve = |line: &CurveKey| {
            let point = |&n: &f64| {
                let mut points =
                    self.points.iter().filter(|point| CurveKey { depth: None, ..CurveKey::of(point) } == *line);
                let is_at = |point: &&Point| f64::from(point.devices) == n && point.answer.is_ok();
                let nearest =
                    points.clone().find(is_at).or_else(|| points.find(|point| anywhere && point.answer.is_ok()))?;
                Some((n, of(n, nearest.answer.as_ref().ok()?)))
            };
            let points = devices.iter().filter_map(point).collect();
            Curve { name: self.curve_name(what.to_string(), line), points, is_reference: true }
        };
        self.lines(|line| CurveKey { depth: None, ..line }).iter().map(curve).collect()
    }

    fn throughput(&self, devices: &[f64]) -> Plot {
        let mut curves = self.over_devices(devices, |figures| figures.throughput_per_s);
        curves.extend(self.references("one device × devices", devices, true, |n, figures| n * figures.single_per_s));
        plot("Samples per second", "devices", devices, Unit::Count, curves)
    }

    fn memory(&self, devices: &[f64]) -> Plot {
        let curves = self.over_devices(devices, |figures| figures.peak_bytes as f64);
        let peak = curves.iter().flat_map(|curve| &curve.points).map(|(_, bytes)| *bytes).fold(0.0, f64::max);
        let limit = self.points.iter().find_map(|point| point.answer.as_ref().ok()?.limit_bytes);
        let limit = limit.map(|limit| ("limit".to_string(), limit as f64)).filter(|(_, limit)| *limit <= 8.0 * peak);
        Plot { limit, ..plot("Peak memory per device", "devices", devices, Unit::Bytes, curves) }
    }

    fn communication(&self, devices: &[f64]) -> Plot {
        let mut curves = self.over_devices(devices, |figures| figures.bytes_per_sample);
        curves.extend(
            self.references("data parallelism", devices, false, |_, figures| figures.data_parallel_bytes_per_sample),
        );
        plot("Bytes sent per sample", "devices", devices, Unit::Bytes, curves)
    }

    fn by_depth(&self, devices: &[f64], depths: &[Option<u32>]) -> Plot {
        let positions: Vec<f64> = depths.iter().flatten().map(|&depth| f64::from(depth)).collect();
        let lines = self.lines(|line| CurveKey { depth: None, ..line });
        let mut curves = Vec::new();
        for &n in devices {
            for line in &lines {
                let throughputs = depths.iter().flatten().filter_map(|&depth| {
                    let figures = self.at(n, &CurveKey { depth: Some(depth), ..*line })?;
                    Some((f64::from(depth), figures.throughput_per_s))
                });
                let points: Vec<(f64, f64)> = throughputs.collect();
                let name = self.curve_name(plural(n as u64, "device", "devices"), line);
                curves.extend((!points.is_empty()).then_some(Curve { name, points, is_reference: false }));
            }
        }
        plot("Samples per second by depth", "stages", &positions, Unit::Count, curves)
    }

    /// Bubbles at the largest number of devices for which each curve has a plan. Rings mark four micro-batches per
    /// stage.
    fn bubble(&self) -> Plot {
        let flushed: Vec<&Point> = self.points.iter().filter(|point| !point.schedule.is_continuous()).collect();
        let counts: BTreeSet<u32> = flushed.iter().map(|point| point.microbatches).collect();
        let counts: Vec<f64> = counts.into_iter().map(f64::from).collect();
        let (mut curves, mut rings) = (Vec::new(), Vec::new());
        for line in self.lines(|line| CurveKey { microbatches: None, ..line }) {
            let of_line = |point: &&&Point| {
                CurveKey { microbatches: None, ..CurveKey::of(point) } == line && point.answer.is_ok()
            };
            let Some(devices) = flushed.iter().filter(of_line).map(|point| point.devices).max() else { continue };
            let mut points = Vec::new();
            for &m in &counts {
                let is_at_count = |point: &&&Point| point.devices == devices && f64::from(point.microbatches) == m;
                let mut matches = flushed.iter().filter(of_line).filter(is_at_count);
                let Some(figures) = matches.find_map(|point| point.answer.as_ref().ok()) else { continue };
                points.push((m, figures.bubble));
                if figures.replicas.len() > 1 && m >= 4.0 * figures.replicas.len() as f64 {
                    rings.push((curves.len(), m));
                }
            }
            let name = self.curve_name(
                format!("{}, {}", name(line.depth), plural(u64::from(devices), "device", "devices")),
                &line,
            );
            curves.push(Curve { name, points, is_reference: false });
        }
        let ring_name = "at least four micro-batches per stage".to_string();
        let base = plot("Bubble: idle fraction of a step", "micro-batches per minibatch", &counts, Unit::Share, curves);
        Plot { rings, ring_name, ..base }
    }
}

fn family(name: &str, largest: &[Largest]) -> Plot {
    let devices: BTreeSet<u32> = largest.iter().map(|entry| entry.devices).collect();
    let devices: Vec<f64> = devices.into_iter().map(f64::from).collect();
    let curve = |recompute: bool| {
        let entries = largest.iter().filter(|entry| entry.recompute == recompute);
        let points = entries.filter_map(|entry| Some((f64::from(entry.devices), entry.found?.1 as f64)));
        let name = if recompute { "with recomputation" } else { "without" };
        Curve { name: name.to_string(), points: points.collect(), is_reference: false }
    };
    let title = format!("Parameters of the largest {name} that fits");
    plot(&title, "devices, one stage each", &devices, Unit::Count, vec![curve(true), curve(false)])
}

fn plot(title: &str, across_name: &str, positions: &[f64], up: Unit, curves: Vec<Curve>) -> Plot {
    Plot {
        title: title.to_string(),
        across_name: across_name.to_string(),
        across: HorizontalAxis::Places(positions.to_vec()),
        up_name: String::new(),
        up,
        curves,
        limit: None,
        rings: Vec::new(),
        ring_name: String::new(),
    }
}

pub fn name(depth: Option<u32>) -> String {
    match depth {
        None => "free".to_string(),
        Some(1) => "1 stage (data parallel)".to_string(),
        Some(depth) => format!("{depth} stages"),
    }
}
