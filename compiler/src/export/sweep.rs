//! Many plans side by side, as papers show them: speed against devices and depth, memory, traffic beside data parallelism, bubbles
//! against micro-batches, and the largest model that fits.
//!
//! [`Sweep`] is the data, [`Sweep::pictures`] the plots that it has enough points for. Where a plot leaves a choice open (the micro-batch, say),
//! it shows the fastest.

use crate::export::axis::Unit;
use crate::export::plot::{Across, Curve, Plot};
use crate::export::svg::Svg;
use crate::plan::held::fullest;
use crate::plan::problem::CostModel;
use crate::plan::{Plan, ScheduleKind};
use std::collections::BTreeSet;

/// What was asked in one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Devices.
    pub devices: u32,
    /// Stages, equally replicated; absent where the planner was free.
    pub depth: Option<u32>,
    /// Order of work.
    pub schedule: ScheduleKind,
    /// Samples in a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches in a minibatch.
    pub microbatches: u32,
    /// The plan in figures, or why there is none.
    pub answer: Result<Figures, String>,
}

/// A plan in figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// Replicas of each stage.
    pub replicas: Vec<u32>,
    /// Samples per second.
    pub throughput_per_s: f64,
    /// Samples per second of one device, whether the model fits it or not.
    pub single_per_s: f64,
    /// Bytes on the fullest device.
    pub peak_bytes: u64,
    /// Bytes that may be used there.
    pub limit_bytes: Option<u64>,
    /// Share of a step in which the busiest stage waits for the pipeline to fill and drain.
    pub bubble: f64,
    /// Bytes that all devices together send for one sample.
    pub bytes_per_sample: f64,
    /// The same under data parallelism over as many devices.
    pub data_parallel_bytes_per_sample: f64,
    /// Whether some stage is recomputed.
    pub recompute: bool,
}

/// The largest model of a family that fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Largest {
    /// Devices, each with one stage.
    pub devices: u32,
    /// Whether stages may be recomputed.
    pub recompute: bool,
    /// Its layers and parameters; absent where not even the smallest fits.
    pub found: Option<(u32, u64)>,
}

/// All of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sweep {
    /// Rows in the order in which they were asked.
    pub points: Vec<Point>,
    /// The family's name, and its largest members.
    pub family: Option<(String, Vec<Largest>)>,
}

impl Figures {
    /// Of a plan for a model with so many bytes of parameters.
    pub fn of(plan: &Plan, parameter_bytes: u64) -> Figures {
        let schedule = &plan.schedule;
        let trains = schedule.kind != ScheduleKind::Inference;
        let is_round_robin = schedule.kind.is_round_robin();
        let item = schedule.micro_batch.max(1) as f64;
        let minibatch = item * f64::from(schedule.microbatches.max(1));
        // A ring of r replicas sends (r - 1) / r of the weights twice from each; under 1F1B-RR after every r items, else once a minibatch.
        let reduced = |replicas: u32, bytes: u64| {
            let samples = if is_round_robin { item * f64::from(replicas) } else { minibatch };
            if trains { 2.0 * f64::from(replicas.saturating_sub(1)) * bytes as f64 / samples } else { 0.0 }
        };
        let ways = if trains { 2.0 } else { 1.0 };
        let messages: f64 = plan.edges.iter().map(|edge| ways * edge.bytes as f64 / item).sum();
        let reduces: f64 = plan.stages.iter().map(|stage| reduced(stage.replicas, stage.memory.weights)).sum();
        // The baseline is a time for all samples of a minibatch, or of an item where nothing is flushed.
        let of_items = plan.cost != CostModel::Pipec || schedule.kind == ScheduleKind::Inference;
        let samples = if of_items { item } else { minibatch };
        let single = plan.baselines.single;
        Figures {
            replicas: plan.stages.iter().map(|stage| stage.replicas).collect(),
            throughput_per_s: plan.predicted.throughput_per_s,
            single_per_s: if single > 0.0 { samples * 1e6 / single } else { 0.0 },
            peak_bytes: fullest(plan),
            limit_bytes: plan.cluster.memory_per_device.map(|limit| limit.0),
            bubble: plan.predicted.bubble,
            bytes_per_sample: messages + reduces,
            data_parallel_bytes_per_sample: reduced(plan.cluster.devices, parameter_bytes),
            recompute: plan.stages.iter().any(|stage| stage.recompute),
        }
    }
}

impl Sweep {
    /// The plots by the names of their files.
    pub fn pictures(&self) -> Vec<(&'static str, Svg)> {
        let mut all = Vec::new();
        let devices = self.values(|point| u64::from(point.devices));
        let depths = self.depths();
        if !devices.is_empty() {
            all.push(("throughput.svg", self.throughput(&devices, &depths).draw()));
            all.push(("memory.svg", self.memory(&devices, &depths).draw()));
            all.push(("communication.svg", self.communication(&devices, &depths).draw()));
        }
        if depths.len() > 1 {
            all.push(("throughput-by-depth.svg", self.by_depth(&devices, &depths).draw()));
        }
        let flushes = |point: &&Point| !point.schedule.is_continuous();
        if self.points.iter().filter(flushes).any(|point| point.answer.is_ok()) {
            all.push(("bubble.svg", self.bubble(&depths).draw()));
        }
        if let Some((name, largest)) = &self.family {
            all.push(("largest.svg", family(name, largest).draw()));
        }
        all
    }

    fn values(&self, of: impl Fn(&Point) -> u64) -> Vec<f64> {
        self.points.iter().map(of).collect::<BTreeSet<u64>>().into_iter().map(|value| value as f64).collect()
    }

    fn depths(&self) -> Vec<Option<u32>> {
        // A depth without any plan would only stand in the legends.
        let planned = self.points.iter().filter(|point| point.answer.is_ok());
        planned.map(|point| point.depth).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The fastest plan for so many devices at that depth.
    fn best(&self, devices: f64, depth: Option<u32>) -> Option<&Figures> {
        let points = self.points.iter().filter(|point| f64::from(point.devices) == devices && point.depth == depth);
        let figures = points.filter_map(|point| point.answer.as_ref().ok());
        figures.max_by(|a, b| a.throughput_per_s.total_cmp(&b.throughput_per_s))
    }

    /// A curve over devices for each depth.
    fn over_devices(&self, devices: &[f64], depths: &[Option<u32>], of: impl Fn(&Figures) -> f64) -> Vec<Curve> {
        let curve = |&depth: &Option<u32>| {
            let points = devices.iter().filter_map(|&n| Some((n, of(self.best(n, depth)?))));
            Curve { name: name(depth), points: points.collect(), is_reference: false }
        };
        depths.iter().map(curve).collect()
    }

    fn throughput(&self, devices: &[f64], depths: &[Option<u32>]) -> Plot {
        let mut curves = self.over_devices(devices, depths, |figures| figures.throughput_per_s);
        let known = self.points.iter().find_map(|point| point.answer.as_ref().ok());
        if let Some(figures) = known {
            let points = devices.iter().map(|&n| (n, n * figures.single_per_s)).collect();
            curves.push(Curve { name: "one device × devices".to_string(), points, is_reference: true });
        }
        plot("Samples per second", "devices", devices, Unit::Count, curves)
    }

    fn memory(&self, devices: &[f64], depths: &[Option<u32>]) -> Plot {
        let curves = self.over_devices(devices, depths, |figures| figures.peak_bytes as f64);
        let most = curves.iter().flat_map(|curve| &curve.points).map(|(_, bytes)| *bytes).fold(0.0, f64::max);
        let limit = self.points.iter().find_map(|point| point.answer.as_ref().ok()?.limit_bytes);
        let limit = limit.map(|limit| ("limit".to_string(), limit as f64)).filter(|(_, limit)| *limit <= 8.0 * most);
        Plot { limit, ..plot("Memory of the fullest device", "devices", devices, Unit::Bytes, curves) }
    }

    fn communication(&self, devices: &[f64], depths: &[Option<u32>]) -> Plot {
        let mut curves = self.over_devices(devices, depths, |figures| figures.bytes_per_sample);
        let data_parallel = devices.iter().filter_map(|&n| {
            let found = depths.iter().find_map(|&depth| self.best(n, depth))?;
            Some((n, found.data_parallel_bytes_per_sample))
        });
        let points = data_parallel.collect();
        curves.push(Curve { name: "data parallelism".to_string(), points, is_reference: true });
        plot("Bytes sent for one sample", "devices", devices, Unit::Bytes, curves)
    }

    fn by_depth(&self, devices: &[f64], depths: &[Option<u32>]) -> Plot {
        let places: Vec<f64> = depths.iter().flatten().map(|&depth| f64::from(depth)).collect();
        let curve = |&n: &f64| {
            let found = depths
                .iter()
                .flatten()
                .filter_map(|&depth| Some((f64::from(depth), self.best(n, Some(depth))?.throughput_per_s)));
            Curve { name: format!("{n:.0} devices"), points: found.collect(), is_reference: false }
        };
        plot("Samples per second by depth", "stages", &places, Unit::Count, devices.iter().map(curve).collect())
    }

    /// Bubbles at the most devices for which each depth has a plan; rings where there are four micro-batches for each stage.
    fn bubble(&self, depths: &[Option<u32>]) -> Plot {
        let flushed: Vec<&Point> = self.points.iter().filter(|point| !point.schedule.is_continuous()).collect();
        let counts: BTreeSet<u32> = flushed.iter().map(|point| point.microbatches).collect();
        let counts: Vec<f64> = counts.into_iter().map(f64::from).collect();
        let (mut curves, mut rings) = (Vec::new(), Vec::new());
        for &depth in depths {
            let of_depth = |point: &&&Point| point.depth == depth && point.answer.is_ok();
            let Some(devices) = flushed.iter().filter(of_depth).map(|point| point.devices).max() else { continue };
            let mut points = Vec::new();
            for &m in &counts {
                let here = |point: &&&Point| point.devices == devices && f64::from(point.microbatches) == m;
                let found = flushed.iter().filter(of_depth).filter(here).filter_map(|point| point.answer.as_ref().ok());
                let Some(best) = found.min_by(|a, b| a.bubble.total_cmp(&b.bubble)) else { continue };
                points.push((m, best.bubble));
                if best.replicas.len() > 1 && m >= 4.0 * best.replicas.len() as f64 {
                    rings.push((curves.len(), m));
                }
            }
            curves.push(Curve { name: format!("{}, {devices} devices", name(depth)), points, is_reference: false });
        }
        let ring_name = "at least four micro-batches a stage".to_string();
        let base = plot("Idle share of a step", "micro-batches in a minibatch", &counts, Unit::Share, curves);
        Plot { rings, ring_name, ..base }
    }
}

fn family(name: &str, largest: &[Largest]) -> Plot {
    let devices: BTreeSet<u32> = largest.iter().map(|one| one.devices).collect();
    let devices: Vec<f64> = devices.into_iter().map(f64::from).collect();
    let curve = |recompute: bool| {
        let found = largest.iter().filter(|one| one.recompute == recompute);
        let points = found.filter_map(|one| Some((f64::from(one.devices), one.found?.1 as f64)));
        let name = if recompute { "with recomputation" } else { "without" };
        Curve { name: name.to_string(), points: points.collect(), is_reference: false }
    };
    let title = format!("Parameters of the largest {name} that fits");
    plot(&title, "devices, one stage each", &devices, Unit::Count, vec![curve(true), curve(false)])
}

fn plot(title: &str, across_name: &str, places: &[f64], up: Unit, curves: Vec<Curve>) -> Plot {
    Plot {
        title: title.to_string(),
        across_name: across_name.to_string(),
        across: Across::Places(places.to_vec()),
        up_name: String::new(),
        up,
        curves,
        limit: None,
        rings: Vec::new(),
        ring_name: String::new(),
    }
}

/// What a depth is called.
pub fn name(depth: Option<u32>) -> String {
    match depth {
        None => "free".to_string(),
        Some(1) => "1 stage (data parallel)".to_string(),
        Some(depth) => format!("{depth} stages"),
    }
}
