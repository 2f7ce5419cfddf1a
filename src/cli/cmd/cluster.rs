//! `pipec cluster`: detects the devices of this machine, measures its links, shows a cluster file.

use crate::cli::args::Devices;
use crate::cli::args::processes::{environment, seconds};
use crate::cli::screen::Screen;
use crate::cli::shell::word;
use crate::cli::stage_table;
use clap::{Args, Subcommand};
use compiler::cluster::read::check;
use compiler::cluster::write::{to_json, to_toml};
use compiler::cluster::{Cluster, Level};
use compiler::plan::links::Wire;
use compiler::text::name::short_name;
use compiler::text::quantity;
use pipec::cluster::torch_links::{self, LinkTime, TorchLinks};
use pipec::cluster::{self, ClusterRequest};
use pipec::error::Error;
use pipec::files::output;
use pipec::launch::host_links;
use pipec::launch::role::ProcessRequest;
use pipec::train::device_request::DeviceRequest;
use profiler::detect::{self, DetectError};
use profiler::host_links::HostLink;
use profiler::{links, machine};
use runtime::device::cuda::gpu;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most devices for which the bandwidth matrix is printed.
const MOST_IN_MATRIX: u32 = 16;

/// Arguments of `pipec cluster`.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Write the devices of this machine as a cluster file: its GPUs, or workers on its cores
    #[command(after_help = "Example:\n  pipec cluster detect -o cluster.toml")]
    Detect(Detect),
    /// Measure the links of this machine, or between the hosts of a cluster file, and compare them with the file
    #[command(
        after_help = "Examples:\n  pipec cluster bench cluster.toml -o measured.toml\n  pipec cluster bench hosts.toml --token-file run.token\n  torchrun --no-python --nproc-per-node 8 pipec cluster bench --engine torch -o cluster.toml"
    )]
    Bench(Bench),
    /// Show a cluster: its devices, its interconnect levels, and the bandwidth between any two devices
    #[command(
        after_help = "Examples:\n  pipec cluster show cluster.toml\n  pipec cluster show --levels 8:450GB/s,2:50GB/s"
    )]
    Show(Show),
}

/// Arguments of `pipec cluster detect`.
#[derive(Debug, Args)]
struct Detect {
    /// Number of CPU workers, if there is no GPU or `--cpu` is given [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    workers: Option<u32>,
    /// Describe the CPU even if there are GPUs
    #[arg(long)]
    cpu: bool,
    /// Output file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Bench {
    /// The cluster file [default: what `cluster detect` finds]. If it lists several hosts, start the same command on each
    file: Option<PathBuf>,
    /// Write the cluster file with the measured values
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Index of this host in the file, counted from 0 [default: the host whose address is this machine's]
    #[arg(long, value_name = "N", requires = "file")]
    host: Option<u32>,
    /// File with the run token, a secret that all hosts share [default: the variable PIPEC_RUN_TOKEN]. Required if other machines can reach the hosts
    #[arg(long, value_name = "FILE", requires = "file")]
    token_file: Option<PathBuf>,
    /// Seconds to wait for all hosts to connect
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    connect_timeout: Duration,
    /// What measures: pipec (links between workers of this machine, or between hosts), or torch (collectives of a torchrun job)
    #[arg(long, value_name = "pipec|torch", default_value = "pipec", value_parser = ["pipec", "torch"])]
    engine: String,
    /// --engine torch: auto (GPUs if there are any), cpu or cuda [default: auto]
    #[arg(long, value_name = "auto|cpu|cuda", value_parser = ["auto", "cpu", "cuda"])]
    device: Option<String>,
    /// --engine torch: the Python with torch [default: that of $VIRTUAL_ENV, else python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Show {
    /// The cluster file
    #[arg(conflicts_with_all = ["gpus", "levels", "cluster"])]
    file: Option<PathBuf>,
    #[command(flatten)]
    devices: Devices,
}

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    match arguments.action {
        Action::Detect(arguments) => write_detected(&arguments, screen),
        Action::Bench(arguments) => bench(&arguments, screen),
        Action::Show(arguments) => show(arguments, screen),
    }
}

fn write_detected(arguments: &Detect, screen: &Screen) -> Result<(), Error> {
    let cluster = this_machine(arguments.workers, arguments.cpu)?;
    write_or_print(&cluster, arguments.output.as_deref(), screen)?;
    screen.note(&cluster::in_one_line(&cluster));
    if let Some(path) = &arguments.output {
        screen.note(&format!("next: pipec cluster bench {0}\n      pipec partition MODEL --cluster {0}", word(path)));
    }
    Ok(())
}

/// Detects the devices of this machine.
fn this_machine(workers: Option<u32>, cpu: bool) -> Result<Cluster, Error> {
    let gpus: Result<Vec<_>, _> = if cpu { Ok(Vec::new()) } else { detect::gpus().into_iter().collect() };
    let gpus = gpus.map_err(|error| {
        let failure = Error::negative("cannot describe this machine: a GPU cannot be opened").because(error);
        failure.with_help("`pipec doctor` shows which; `--cpu` uses the cores instead")
    })?;
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    if let (Some(_), false) = (workers, gpus.is_empty()) {
        return Err(Error::input("`--workers` divides CPU cores, but this machine has GPUs")
            .with_help("add `--cpu` to use the cores"));
    }
    detect::cluster(&gpus, workers.unwrap_or(cores)).map_err(|error| {
        let failure = Error::negative("cannot describe this machine").because(&error);
        match error {
            DetectError::Unknown { .. } => failure.with_help(
                "`--cpu` uses the cores instead; or write a cluster file: `[device]` with kind, memory, memory_bandwidth and peak_flops (`pipec schema cluster`)",
            ),
            DetectError::Cluster(_) => failure,
        }
    })
}

/// Writes the cluster to the requested file, or prints it.
fn write_or_print(cluster: &Cluster, output: Option<&Path>, screen: &Screen) -> Result<(), Error> {
    let text = to_toml(cluster);
    match output {
        Some(path) => {
            output::write(path, text.as_bytes())?;
            screen.note(&format!("wrote {}", path.display()));
        }
        None => screen.text(text.trim_end()),
    }
    screen.json(&to_json(cluster));
    Ok(())
}

/// Measures the collectives of a torchrun job. Only the first process prints.
fn torch_bench(arguments: &Bench, screen: &Screen) -> Result<(), Error> {
    let device = arguments.device.clone().unwrap_or_else(|| "auto".to_string());
    let links = TorchLinks { device, python: arguments.python.clone() };
    let Some((cluster, times)) = torch_links::measure(&links)? else { return Ok(()) };
    let cluster = check(cluster).map_err(|error| Error::negative("cannot use the measured values").because(error))?;
    let row = |link: &LinkTime| {
        vec![
            link.level.to_string(),
            link.operation.clone(),
            quantity::bytes(link.bytes),
            quantity::time(link.us),
            quantity::rate(link.bytes_per_s),
        ]
    };
    let heads = ["level", "operation", "size", "time", "sent per device"];
    screen.text(&stage_table::table(&heads, &[2, 3, 4], times.iter().map(row).collect()));
    screen.prose(&format!("\n{}\n", cluster::in_one_line(&cluster)));
    if let Some(path) = &arguments.output {
        output::write(path, to_toml(&cluster).as_bytes())?;
        screen.note(&format!("wrote {}", path.display()));
    }
    screen.json(&json!({"measured": cluster, "file": to_json(&cluster)}));
    Ok(())
}

fn bench(arguments: &Bench, screen: &Screen) -> Result<(), Error> {
    if arguments.engine == "torch" {
        if arguments.file.is_some() {
            return Err(Error::input("`--engine torch` measures the devices of its job, not those of a cluster file")
                .with_help("omit the file"));
        }
        return torch_bench(arguments, screen);
    }
    if arguments.device.is_some() || arguments.python.is_some() {
        return Err(Error::input("`--device` and `--python` are for `--engine torch`").with_help("omit them"));
    }
    let cluster = match &arguments.file {
        Some(path) => read(path)?,
        None => this_machine(None, false)?,
    };
    if cluster.hosts.len() < 2 && (arguments.host.is_some() || arguments.token_file.is_some()) {
        return Err(Error::input("`--host` and `--token-file` require a cluster file with several hosts")
            .with_help("omit them, or add a table `[[host]]` for each host"));
    }
    let (mut measured, mut levels) = (cluster.clone(), BTreeSet::new());
    let mut links = Vec::new();
    if let (2.., Some(path)) = (cluster.hosts.len(), &arguments.file) {
        let request = ProcessRequest {
            hosts: Some(path.clone()),
            host: arguments.host,
            token_file: arguments.token_file.clone(),
            connect_timeout: Some(arguments.connect_timeout),
            environment: environment(),
            ..ProcessRequest::default()
        };
        let Some(measurement) = host_links::between_hosts(&request, &cluster, screen)? else {
            screen.note(&format!("the results are on the first host, {}", short_name(&cluster.hosts[0].address)));
            return Ok(());
        };
        (measured, levels, links) = (measurement.cluster, measurement.levels, measurement.links);
    }
    if host_links::is_inside_hosts(&cluster, 0) {
        // The innermost level is within this machine.
        measured.levels[0] = inside_this_machine(&cluster)?;
        levels.insert(0);
    }
    let measured = check(measured).map_err(|error| Error::negative("cannot use the measured values").because(error))?;
    let row = |(at, (stated, measured)): (usize, (&Level, &Level))| {
        let if_measured = |text: String| if levels.contains(&at) { text } else { "not measured".to_string() };
        vec![
            short_name(&stated.name),
            stated.count.to_string(),
            quantity::rate(stated.bandwidth.0),
            if_measured(quantity::rate(measured.bandwidth.0)),
            quantity::time(stated.latency.0 * 1e6),
            if_measured(quantity::time(measured.latency.0 * 1e6)),
        ]
    };
    let rows: Vec<Vec<String>> = cluster.levels.iter().zip(&measured.levels).enumerate().map(row).collect();
    let heads = ["level", "count", "bandwidth", "measured", "latency", "measured"];
    let mut table = stage_table::table(&heads, &[1, 2, 3, 4, 5], rows);
    if !links.is_empty() {
        let host = |at: usize| short_name(&cluster.hosts[at].address);
        let row = |link: &HostLink| {
            let (rate, time) = (quantity::rate(link.bytes_per_s), quantity::time(link.seconds * 1e6));
            vec![host(link.from), host(link.to), rate, time]
        };
        let heads = ["from", "to", "bandwidth", "latency"];
        table += &format!("\n{}", stage_table::table(&heads, &[2, 3], links.iter().map(row).collect()));
    }
    if let Some(path) = &arguments.output {
        output::write(path, to_toml(&measured).as_bytes())?;
        screen.note(&format!("wrote {}", path.display()));
    }
    screen.text(&table);
    let link = |link: &HostLink| json!({"from": link.from, "to": link.to, "bytes_per_s": link.bytes_per_s, "latency_s": link.seconds});
    screen.json(&json!({
        "stated": cluster,
        "measured": measured,
        "levels_measured": levels.len(),
        "host_links": links.iter().map(link).collect::<Vec<_>>(),
        "file": to_json(&measured),
    }));
    Ok(())
}

/// Measures the innermost level of a cluster on this machine.
fn inside_this_machine(cluster: &Cluster) -> Result<Level, Error> {
    let mut measured = cluster.clone();
    let gpus = if cluster.device.kind == "cpu" || gpu::count() < 2 {
        Vec::new()
    } else {
        DeviceRequest::AllGpus.open()?.unwrap_or_default()
    };
    if cluster.device.kind == "cpu" {
        machine::measure_links(&mut measured);
    } else if let (2.., Some(level)) = (gpus.len(), measured.levels.first_mut()) {
        // Neighbours are on the innermost level.
        links::measure(&gpus[..gpus.len().min(level.count as usize)], level)
            .map_err(|error| Error::negative("cannot measure the links between the GPUs").because(error))?;
    } else {
        return Err(Error::negative(format!("cannot measure the links of {}", short_name(&cluster.device.kind)))
            .because("this machine has fewer than two GPUs that pipec can use")
            .with_help("under torchrun, `pipec cluster bench --engine torch` measures them with NCCL; or write the values of nvbandwidth into the cluster file"));
    }
    Ok(measured.levels.swap_remove(0))
}

fn show(arguments: Show, screen: &Screen) -> Result<(), Error> {
    let cluster = match &arguments.file {
        Some(path) => read(path)?,
        None => cluster::cluster(&arguments.devices.request()?, None)?,
    };
    screen.json(&cluster_json(&cluster));
    screen.prose(&cluster::in_one_line(&cluster));
    let device = &cluster.device;
    let device_row = |device: &compiler::cluster::Device, count: u32, speed: Option<f64>| {
        vec![
            count.to_string(),
            short_name(&device.kind),
            quantity::bytes(device.memory.0),
            quantity::rate(device.memory_bandwidth.0),
            format!("{}/s", quantity::flops(device.peak_flops.f32)),
            format!("{}/s", quantity::flops(device.peak_flops.bf16)),
            speed.map_or_else(String::new, |speed| format!("{} times", quantity::short(speed))),
        ]
    };
    let rows = match cluster.classes.is_empty() {
        true => vec![device_row(device, cluster.devices(), None)],
        false => cluster.classes.iter().map(|class| device_row(&class.device, class.count, class.speed)).collect(),
    };
    let heads = ["devices", "type", "memory each", "memory bandwidth", "f32 peak", "bf16 peak", ""];
    screen.text(&format!("\n{}", stage_table::table(&heads, &[0, 2, 3, 4, 5, 6], rows)));
    let mut group_size = 1u32;
    let level = |level: &Level| {
        group_size = group_size.saturating_mul(level.count);
        vec![
            short_name(&level.name),
            level.count.to_string(),
            group_size.to_string(),
            quantity::rate(level.bandwidth.0),
            quantity::time(level.latency.0 * 1e6),
            if level.shared { "by its devices" } else { "" }.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = cluster.levels.iter().map(level).collect();
    let heads = ["level", "count", "devices per group", "bandwidth", "latency", "shared"];
    screen.text(&format!("\n{}", stage_table::table(&heads, &[1, 2, 3, 4], rows)));
    if (2..=MOST_IN_MATRIX).contains(&cluster.devices()) {
        screen.text(&format!("\nbandwidth between two devices, GB/s\n{}", matrix(&cluster)));
    }
    if !cluster.hosts.is_empty() {
        let rows = cluster.hosts.iter().map(|host| vec![short_name(&host.address), host.devices.to_string()]);
        screen.text(&format!("\n{}", stage_table::table(&["host", "devices"], &[1], rows.collect())));
    }
    Ok(())
}

/// Bandwidth between two devices: that of the slowest level on the path.
fn bandwidth_between(cluster: &Cluster, from: u32, to: u32) -> f64 {
    let wire = Wire::between(&cluster.levels, [from, to].into_iter());
    let levels = wire.map_or(&cluster.levels[..], |wire| &cluster.levels[..=wire.level]);
    levels.iter().map(|level| level.bandwidth.0).fold(f64::INFINITY, f64::min)
}

fn matrix(cluster: &Cluster) -> String {
    let devices = cluster.devices();
    let names: Vec<String> = (0..devices).map(|device| device.to_string()).collect();
    let heads: Vec<&str> = std::iter::once("").chain(names.iter().map(String::as_str)).collect();
    let cell = |from: u32, to: u32| match from == to {
        true => "·".to_string(),
        false => quantity::short(bandwidth_between(cluster, from, to) / 1e9),
    };
    let row = |from: u32| std::iter::once(from.to_string()).chain((0..devices).map(|to| cell(from, to))).collect();
    let right: Vec<usize> = (0..=devices as usize).collect();
    stage_table::table(&heads, &right, (0..devices).map(row).collect())
}

fn cluster_json(cluster: &Cluster) -> Value {
    let mut value = json!(cluster);
    value["devices"] = json!(cluster.devices());
    value["file"] = to_json(cluster);
    if cluster.devices() <= MOST_IN_MATRIX {
        let devices = 0..cluster.devices();
        let row = |from: u32| -> Vec<Value> {
            let cell = |to| if from == to { Value::Null } else { json!(bandwidth_between(cluster, from, to)) };
            devices.clone().map(cell).collect()
        };
        value["bandwidth_between"] = devices.clone().map(row).collect();
    }
    value
}

fn read(path: &Path) -> Result<Cluster, Error> {
    cluster::cluster(&ClusterRequest { file: Some(path.to_path_buf()), ..ClusterRequest::default() }, None)
}
