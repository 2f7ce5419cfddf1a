//! `pipec sweep`: plans for ranges of device counts, depths and batch sizes, as a table and as the plots that papers show.

use crate::cli::args::optimizer::{self, optimizers};
use crate::cli::args::shared_plan::SharedPlanArguments;
use crate::cli::args::{self, Import};
use crate::cli::screen::{Screen, clean};
use crate::cli::table::{Shrink, fit_table};
use clap::Args;
use compiler::export::sweep::{Figures, Largest, PICTURES, Point, Sweep, name};
use compiler::plan::coarsen;
use compiler::plan::problem::{Recomputation, set_recompute_scopes};
use compiler::plan::schedule::Schedule;
use compiler::profile::cost_graph::CostGraph;
use compiler::profile::shared::TensorParallelCosts;
use compiler::text::quantity;
use pipec::cluster::{self, ClusterRequest};
use pipec::costs::cost_source::CostSource;
use pipec::costs::{CostInput, Costs};
use pipec::error::{Error, ErrorKind};
use pipec::files::output;
use pipec::plan::from_costs::{solve, solve_with_groups};
use pipec::plan::model_family::Family;
use pipec::plan::optimizer::Optimizer;
use pipec::plan::request::{PlanOptions, ScheduleChoice};
use pipec::plan::tensor_parallel::TensorParallel;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const MOST_ROWS: usize = 2000;

/// The most devices in a row.
const MOST_DEVICES: u32 = 4096;

/// Arguments of `pipec sweep`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec sweep model.onnx --gpus 4,8,16 --microbatches 4,16 --svg plots\n  pipec sweep gpt.onnx --levels 8:450GB/s,4:50GB/s --gpus 8,32 --tensor 8 --microbatches 32 --optimizer adam\n  pipec sweep --family gpt2-xl --gpus 2,4 --memory 16GB"
)]
pub struct Arguments {
    /// The model, or a published profile
    #[arg(value_name = "MODEL", required_unless_present = "family")]
    file: Option<PathBuf>,
    /// Numbers of devices [default: all of --levels]
    #[arg(long, value_name = "N,…", value_delimiter = ',', required_unless_present = "levels", value_parser = devices, help_heading = "Devices")]
    gpus: Vec<u32>,
    /// Interconnect levels, innermost first, for example 8:450GB/s,32:50GB/s; fewer devices fill them from the innermost
    #[arg(long, value_name = "N:RATE,…", conflicts_with = "bandwidth", help_heading = "Devices")]
    levels: Option<String>,
    /// Link bandwidth per device and direction, for example 1.25GB/s or 10Gbit/s
    #[arg(long, value_name = "RATE", help_heading = "Devices")]
    bandwidth: Option<String>,
    /// Numbers of stages; each stage gets equally many replicas, and cuts are chosen for the most micro-batches [default: the planner chooses]
    #[arg(long, value_name = "D,…", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096), help_heading = "Sweep ranges")]
    depth: Vec<u32>,
    /// Micro-batches per minibatch
    #[arg(long, value_name = "M,…", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Sweep ranges")]
    microbatches: Vec<u32>,
    /// Samples per micro-batch [default: the model's, else 32]
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Sweep ranges")]
    micro_batch: Vec<u64>,
    /// Pipeline schedules [default: 1f1b-rr, or 1f1b with micro-batches]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zbv", "dualpipev", "1f1b-rr", "1f1b-rr-vsync", "2bw"], help_heading = "Sweep ranges")]
    schedule: Vec<String>,
    /// Costs: a file of `pipec profile`, or analytic[:KIND] for the roofline of a device type [default: analytic]
    #[arg(long, value_name = "FILE|analytic[:KIND]", help_heading = "Model")]
    profile: Option<CostInput>,
    /// Memory limit per device, for example 16GB [default: the memory of the device]
    #[arg(long, value_name = "SIZE", help_heading = "Devices")]
    memory: Option<String>,
    /// Optimizer, for its memory
    #[arg(long, value_parser = optimizers(), value_name = "NAME", default_value = "sgd", help_heading = "Sweep ranges")]
    optimizer: Optimizer,
    /// sgd, rmsprop: momentum used in training; a non-zero value adds one optimizer-state value per weight
    #[arg(long, value_name = "X", value_parser = optimizer::positive, help_heading = "Sweep ranges")]
    momentum: Option<f64>,
    /// Activation recomputation: auto (as few ops as needed, in stages that do not fit otherwise), never, or full (all ops)
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = ["auto", "never", "full"], help_heading = "Sweep ranges")]
    recompute: String,
    /// Also find the largest model of this zoo family that fits, for example gpt2-xl with more layers
    #[arg(long, value_name = "NAME", help_heading = "Sweep ranges")]
    family: Option<String>,
    #[command(flatten)]
    shared: SharedPlanArguments,
    #[command(flatten)]
    import: Import,
    /// Write the plots as SVG into this folder, created if missing
    #[arg(long, value_name = "FOLDER", help_heading = "Results")]
    svg: Option<PathBuf>,
}

/// Reads one number of `--gpus`.
fn devices(text: &str) -> Result<u32, String> {
    let count = args::devices(text)?;
    match count {
        1..=MOST_DEVICES => Ok(count),
        _ => Err(format!("write 1 to {MOST_DEVICES}")),
    }
}

/// The requested clusters, with their numbers of devices.
fn clusters(arguments: &Arguments) -> Result<Vec<(u32, ClusterRequest)>, Error> {
    let bandwidth = args::bandwidth(arguments.bandwidth.as_deref())?;
    let Some(text) = arguments.levels.as_deref() else {
        let request =
            |&count: &u32| (count, ClusterRequest { gpus: Some(count), bandwidth, ..ClusterRequest::default() });
        return Ok(arguments.gpus.iter().map(request).collect());
    };
    let request = |levels: String| ClusterRequest { levels: Some(levels), ..ClusterRequest::default() };
    let total = cluster::cluster(&request(text.to_string()), None)?.devices();
    let counts = if arguments.gpus.is_empty() { vec![total] } else { arguments.gpus.clone() };
    let with_levels = |count: u32| filled_levels(text, count).map(|levels| (count, request(levels)));
    let mismatch = |count: u32| {
        Error::input(format!("{count} devices do not fill `--levels {text}`"))
            .because("devices fill a level completely before the next one, and there cannot be more than in all levels")
    };
    counts.into_iter().map(|count| with_levels(count).ok_or_else(|| mismatch(count))).collect()
}

/// The part of the levels that this many devices fill from the innermost; `None` if they do not.
fn filled_levels(levels: &str, devices: u32) -> Option<String> {
    let (mut remaining, mut parts) = (devices, Vec::new());
    for part in levels.split(',') {
        let (count, rate) = part.split_once(':')?;
        let count = count.trim().parse::<u32>().ok().filter(|count| *count > 0)?;
        let used_count = if remaining < count { remaining } else { count };
        if !remaining.is_multiple_of(used_count) {
            return None;
        }
        parts.push(format!("{used_count}:{rate}"));
        remaining /= used_count;
        if remaining == 1 {
            break;
        }
    }
    (remaining == 1).then(|| parts.join(","))
}

/// Runs the sweep, prints the tables and writes the plots.
pub fn run(arguments: Box<Arguments>, screen: &Screen) -> Result<(), Error> {
    let mut sweep = Sweep::default();
    arguments.svg.iter().try_for_each(|folder| output::pictures(folder, PICTURES))?;
    if let Some(path) = &arguments.file {
        sweep.points = points(&arguments, path, screen)?;
        screen.text(&table(&sweep.points, screen.width()));
    }
    if let Some(name) = &arguments.family {
        let largest = find_largest(&arguments, name, screen)?;
        screen.text(&family_table(name, &largest, arguments.shared.tensor, screen));
        sweep.family = Some((name.clone(), largest));
    }
    let mut files = Vec::new();
    if let Some(folder) = &arguments.svg {
        for (name, picture) in sweep.pictures() {
            output::write(&folder.join(name), picture.file().as_bytes())?;
            files.push(folder.join(name).display().to_string());
        }
        screen.note(&format!("wrote {}", files.join(", ")));
    }
    screen.json(&json!({
        "rows": sweep.points.iter().map(point_json).collect::<Vec<_>>(),
        "family": sweep.family.as_ref().map(|(name, largest)| json!({
            "name": name,
            "largest": largest.iter().map(largest_json).collect::<Vec<_>>(),
        })),
        "files": files,
    }));
    Ok(())
}

fn options(arguments: &Arguments) -> Result<PlanOptions, Error> {
    let default = if arguments.microbatches.iter().any(|m| *m > 1) { Schedule::OneFOneB } else { Schedule::OneFOneBRr };
    let options = arguments.shared.apply(PlanOptions {
        memory_limit: args::memory(arguments.memory.as_deref())?,
        optimizer: arguments.optimizer,
        momentum: arguments.momentum,
        recompute: Recomputation::from_name(&arguments.recompute).unwrap_or_default(),
        schedule: Some(ScheduleChoice::Named(default)),
        ..PlanOptions::default()
    });
    options.zero().validate(true, options.target)?;
    Ok(options)
}

fn schedules(arguments: &Arguments) -> Vec<Schedule> {
    arguments.schedule.iter().filter_map(|name| Schedule::from_name(name)).collect()
}

fn points(arguments: &Arguments, path: &Path, screen: &Screen) -> Result<Vec<Point>, Error> {
    let base = options(arguments)?;
    if !arguments.depth.is_empty() && base.tensor_parallel() == TensorParallel::Auto {
        return Err(Error::input("`--depth` cannot be combined with `--tensor auto`")
            .because("the number of replicas of a stage depends on the degree")
            .with_help("set the degree, for example `--tensor 8`"));
    }
    let clusters = clusters(arguments)?;
    let input = arguments.profile.clone().unwrap_or_default();
    let source = CostSource::open(path, &input, &arguments.import.clone().into(), screen)?;
    let sizes = match &arguments.micro_batch[..] {
        [] => vec![source.micro_batch(screen)],
        sizes => sizes.to_vec(),
    };
    let schedules = match &schedules(arguments)[..] {
        [] => vec![base.schedule.as_ref().and_then(ScheduleChoice::named).unwrap_or(Schedule::OneFOneBRr)],
        given => given.to_vec(),
    };
    let depths: Vec<Option<u32>> = match &arguments.depth[..] {
        [] => vec![None],
        depths => depths.iter().copied().map(Some).collect(),
    };
    let rows = [&clusters.len(), &sizes.len(), &schedules.len(), &depths.len(), &arguments.microbatches.len()];
    let rows = rows.into_iter().fold(1usize, |product, count| product.saturating_mul(*count));
    if rows > MOST_ROWS {
        return Err(Error::input(format!("these lists give {rows} rows, more than the limit of {MOST_ROWS}")));
    }
    let bar = screen.progress(rows as u64, "{bar:30} {pos}/{len} plans, {elapsed}, {msg}");
    // Cuts of a depth are chosen for the most micro-batches and reused for fewer.
    let mut counts = arguments.microbatches.clone();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts.dedup();
    let mut points = Vec::with_capacity(rows);
    let (mut failures, mut attempts) = (Vec::new(), 0usize);
    for (devices, request) in clusters {
        let cluster = source.cluster(&request)?;
        for &micro_batch in &sizes {
            let with_groups = |costs: Costs| {
                let groups = base.tensor_parallel().costs(&costs, base.target)?;
                Ok((costs, groups))
            };
            let costs = match source.with(cluster.clone(), micro_batch, base.precision).and_then(with_groups) {
                Err(failure) if failure.kind() == ErrorKind::Bug => return Err(failure),
                costs => costs,
            };
            for &kind in &schedules {
                for &depth in &depths {
                    let mut answers: BTreeMap<u32, Result<Figures, String>> = BTreeMap::new();
                    let mut cut = None;
                    for &microbatches in &counts {
                        let device_text = quantity::plural(u64::from(devices), "device", "devices");
                        bar.set_message(format!("{device_text}, {}", name(depth)));
                        let schedule = Some(ScheduleChoice::Named(kind));
                        let options = PlanOptions { schedule, microbatches, ..base.clone() };
                        let figures_of = |costs: &(Costs, Vec<TensorParallelCosts>)| {
                            figures(path, costs, devices, depth, options.clone(), &mut cut)
                        };
                        let answer = match costs.as_ref().map_err(Error::clone).and_then(figures_of) {
                            Ok(answer) => answer,
                            Err(failure) if failure.kind() == ErrorKind::Bug => return Err(failure),
                            // A row with invalid input does not stop the others.
                            Err(failure) => {
                                let why = failure.line();
                                failures.push(failure);
                                Err(why)
                            }
                        };
                        bar.println(clean(&describe(devices, depth, kind, microbatches, &answer)));
                        answers.insert(microbatches, answer);
                        attempts += 1;
                        bar.inc(1);
                    }
                    for &microbatches in &arguments.microbatches {
                        let Some(answer) = answers.get(&microbatches).cloned() else { continue };
                        points.push(Point { devices, depth, schedule: kind, micro_batch, microbatches, answer });
                    }
                }
            }
        }
    }
    bar.finish_and_clear();
    let is_each_refused = failures.len() == attempts;
    match failures.into_iter().next() {
        // If every row has invalid input, the sweep itself is wrong.
        Some(failure) if is_each_refused => Err(failure),
        _ => Ok(points),
    }
}

/// A finished row, in one line.
fn describe(devices: u32, depth: Option<u32>, kind: Schedule, m: u32, answer: &Result<Figures, String>) -> String {
    let result = match answer {
        Ok(figures) => {
            format!(
                "{} samples/s, {}",
                quantity::samples(figures.throughput_per_s),
                quantity::bytes(figures.peak_bytes)
            )
        }
        Err(why) => why.clone(),
    };
    let (devices, m) = (
        quantity::plural(u64::from(devices), "device", "devices"),
        quantity::plural(u64::from(m), "micro-batch", "micro-batches"),
    );
    format!("{devices}, {}, {}, {m}: {result}", name(depth), kind.name())
}

/// The figures of one row, or the reason why it has no plan; only invalid input is an error. `cut` is the model coarsened to the
/// stages of an earlier row, if any.
fn figures(
    path: &Path,
    (costs, groups): &(Costs, Vec<TensorParallelCosts>),
    devices: u32,
    depth: Option<u32>,
    mut options: PlanOptions,
    coarsened: &mut Option<CostGraph>,
) -> Result<Result<Figures, String>, Error> {
    let degree = if let TensorParallel::Degree(degree) = options.tensor_parallel() { degree } else { 1 };
    let group_text = || match degree {
        1 => quantity::plural(u64::from(devices), "device", "devices"),
        _ => format!("{} of {degree} devices", quantity::plural(u64::from(devices / degree), "group", "groups")),
    };
    match depth {
        Some(depth) if depth > devices / degree => return Ok(Err(format!("{depth} stages on {}", group_text()))),
        Some(depth) if !(devices / degree).is_multiple_of(depth) => {
            return Ok(Err(format!("{} cannot be divided into {depth} equal stages", group_text())));
        }
        Some(depth) if depth as usize > costs.graph.ops.len() => {
            return Ok(Err(format!("the model has only {} ops", costs.graph.ops.len())));
        }
        Some(depth) => options.replicas = Some(vec![devices / degree / depth; depth as usize]),
        None => {}
    }
    let gradients = costs.graph.params.iter().fold(0u64, |sum, param| sum.saturating_add(param.sum_bytes));
    if let Some(coarsened) = coarsened {
        let costs = Costs { graph: coarsened.clone(), ..costs.clone() };
        // If these cuts do not fit with this count, new ones are searched.
        if let Ok(planned) = solve(path, costs, &options) {
            return Ok(Ok(Figures::of(&planned.plan, gradients)));
        }
    }
    match solve_with_groups(path, costs.clone(), groups.clone(), &options, true) {
        Ok(planned) => {
            // Costs on groups are those of the ops of the whole model.
            if depth.is_some() && groups.is_empty() {
                let mut graph = costs.graph.clone();
                set_recompute_scopes(&mut graph, options.target);
                *coarsened = coarsen::stages(&graph, &planned.plan);
            }
            Ok(Ok(Figures::of(&planned.plan, gradients)))
        }
        Err(failure) if failure.kind() == ErrorKind::Infeasible => Ok(Err(failure.reason())),
        Err(failure) => Err(failure),
    }
}

fn find_largest(arguments: &Arguments, name: &str, screen: &Screen) -> Result<Vec<Largest>, Error> {
    let kind = match arguments.profile.clone().unwrap_or_default() {
        CostInput::Analytic(kind) => kind,
        CostInput::Profile(_) => {
            return Err(Error::input(
                "`--family` cannot be combined with a profile file: its models were not measured",
            ));
        }
    };
    let base = options(arguments)?;
    let schedule = schedules(arguments).first().map(|kind| ScheduleChoice::Named(*kind)).or(base.schedule.clone());
    let microbatches = arguments.microbatches.iter().copied().max().unwrap_or(1);
    let options = PlanOptions { schedule, microbatches, ..base };
    let micro_batch = arguments.micro_batch.first().copied().unwrap_or(1);
    let family = Family::open(name, micro_batch, kind.as_deref(), &options)?;
    if options.tensor_parallel() == TensorParallel::Auto {
        return Err(Error::input("`--family` cannot be combined with `--tensor auto`")
            .with_help("set the degree, for example `--tensor 8`"));
    }
    let clusters = clusters(arguments)?;
    let bar = screen.progress(2 * clusters.len() as u64, "{bar:30} {pos}/{len} results, {elapsed}, {msg}");
    let mut results = Vec::new();
    for (devices, request) in &clusters {
        for recompute in [true, false] {
            let recompute_text = if recompute { "recomputed" } else { "not recomputed" };
            let setting = format!("{}, {recompute_text}", quantity::plural(u64::from(*devices), "device", "devices"));
            bar.set_message(setting.clone());
            let report_try = |layers: u32, fits: bool| {
                let fits = if fits { "fit" } else { "do not fit" };
                bar.set_message(format!("{setting}: {layers} layers {fits}"));
            };
            let largest_model = family.largest(request, recompute, &report_try)?;
            let largest = largest_model.found.map_or("none fits".to_string(), |(layers, parameters)| {
                format!("{layers} layers, {} parameters", quantity::count(parameters))
            });
            screen.print_beside(&bar, &format!("{setting}: {largest}"));
            results.push(largest_model);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(results)
}

fn table(points: &[Point], width: Option<usize>) -> String {
    let header = [
        "devices",
        "depth",
        "schedule",
        "micro-batch",
        "micro-batches",
        "replicas",
        "samples/s",
        "peak memory",
        "bubble",
        "sent per sample",
        "data-parallel sends",
        "",
    ];
    let row = |point: &Point| {
        let mut cells = vec![
            point.devices.to_string(),
            point.depth.map_or("auto".to_string(), |depth| depth.to_string()),
            point.schedule.name().to_string(),
            point.micro_batch.to_string(),
            point.microbatches.to_string(),
        ];
        match &point.answer {
            Ok(figures) => cells.extend([
                replicas(&figures.replicas)
                    + &if figures.degree > 1 { format!(" of {}", figures.degree) } else { String::new() },
                quantity::samples(figures.throughput_per_s),
                quantity::bytes(figures.peak_bytes),
                format!("{:.1} %", figures.bubble * 100.0),
                quantity::bytes(figures.bytes_per_sample as u64),
                quantity::bytes(figures.data_parallel_bytes_per_sample as u64),
                remarks(point, figures, points),
            ]),
            Err(why) => {
                cells.extend(["-"; 6].map(str::to_string));
                cells.push(why.clone());
            }
        }
        cells
    };
    let shrinks = [10, 9, 8, 3].map(Shrink::Omit);
    let shrinks = [&shrinks[..], &[Shrink::Cut(11, 32), Shrink::Omit(4), Shrink::Cut(11, 16)]].concat();
    fit_table(&header, &[0, 1, 3, 4, 6, 7, 8, 9, 10], points.iter().map(row).collect(), &shrinks, width)
}

/// Relative difference of throughputs below which they count as equal.
const EQUAL_TOLERANCE: f64 = 1e-3;

/// Remarks on a row: that stages recompute, and that fewer devices are as fast.
fn remarks(point: &Point, figures: &Figures, points: &[Point]) -> String {
    let settings = |point: &Point| (point.depth, point.schedule, point.micro_batch, point.microbatches);
    let fewer = points.iter().filter(|smaller| smaller.devices < point.devices && settings(smaller) == settings(point));
    let rates = fewer.filter_map(|smaller| Some((smaller.devices, smaller.answer.as_ref().ok()?.throughput_per_s)));
    let best = rates.reduce(|best, next| if next.1 > best.1 { next } else { best });
    let device_text = |devices: u32| quantity::plural(u64::from(devices), "device", "devices");
    let no_gain = best.and_then(|(devices, rate)| match figures.throughput_per_s / rate {
        ratio if ratio < 1.0 - EQUAL_TOLERANCE => Some(format!("slower than {}", device_text(devices))),
        ratio if ratio <= 1.0 + EQUAL_TOLERANCE => Some(format!("no faster than {}", device_text(devices))),
        _ => None,
    });
    let recomputed = figures.recompute.then(|| "recomputed".to_string());
    recomputed.into_iter().chain(no_gain).collect::<Vec<_>>().join(", ")
}

/// `4-2-1`; long lists are shown by their length.
fn replicas(list: &[u32]) -> String {
    match list {
        [first, ..] if list.len() > 8 && list.iter().all(|r| r == first) => format!("{} of {first}", list.len()),
        _ if list.len() > 8 => quantity::plural(list.len() as u64, "stage", "stages"),
        _ => list.iter().map(u32::to_string).collect::<Vec<_>>().join("-"),
    }
}

fn family_table(name: &str, largest: &[Largest], tensor: TensorParallel, screen: &Screen) -> String {
    let unit = match tensor {
        TensorParallel::Degree(degree) => format!("group of {degree} devices"),
        _ => "device".to_string(),
    };
    let row = |largest_model: &Largest| {
        let (layers, parameters) = match largest_model.found {
            Some((layers, parameters)) => (layers.to_string(), quantity::count(parameters)),
            None => ("-".to_string(), "none fits".to_string()),
        };
        vec![
            largest_model.devices.to_string(),
            if largest_model.recompute { "yes" } else { "no" }.to_string(),
            layers,
            parameters,
        ]
    };
    let rows = largest.iter().map(row).collect();
    let heading = screen.wrap(&format!("\nlargest {name} that fits, one stage per {unit}\n"));
    let header = ["devices", "recomputed", "layers", "parameters"];
    heading + &fit_table(&header, &[0, 2, 3], rows, &[Shrink::Omit(3)], screen.width())
}

fn point_json(point: &Point) -> serde_json::Value {
    let mut value = match &point.answer {
        Ok(figures) => json!(figures),
        Err(why) => json!({"why": why}),
    };
    value["devices"] = json!(point.devices);
    value["depth"] = json!(point.depth);
    value["schedule"] = json!(point.schedule.name());
    value["micro_batch"] = json!(point.micro_batch);
    value["microbatches"] = json!(point.microbatches);
    value["feasible"] = json!(point.answer.is_ok());
    value
}

fn largest_json(largest: &Largest) -> serde_json::Value {
    let (layers, parameters) =
        largest.found.map_or((None, None), |(layers, parameters)| (Some(layers), Some(parameters)));
    json!({"devices": largest.devices, "recompute": largest.recompute, "layers": layers, "parameters": parameters})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_fill_levels_from_the_innermost() {
        let levels_of = |devices| filled_levels("8:350GB/s,32:42GB/s,4:20GB/s", devices);
        assert_eq!(levels_of(4).as_deref(), Some("4:350GB/s"));
        assert_eq!(levels_of(8).as_deref(), Some("8:350GB/s"));
        assert_eq!(levels_of(64).as_deref(), Some("8:350GB/s,8:42GB/s"));
        assert_eq!(levels_of(512).as_deref(), Some("8:350GB/s,32:42GB/s,2:20GB/s"));
        assert_eq!(levels_of(1024).as_deref(), Some("8:350GB/s,32:42GB/s,4:20GB/s"));
        assert_eq!([levels_of(12), levels_of(300), levels_of(2048)], [None, None, None]);
    }
}
