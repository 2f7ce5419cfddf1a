//! Measures links with PyTorch's collectives, in the processes of a torchrun job: NCCL on GPUs, gloo on processors.

use crate::cluster::gpu_of;
use crate::error::Error;
use crate::files::python;
use compiler::cluster::device::Kind;
use compiler::cluster::{Bytes, BytesPerSecond, Cluster, Level, Seconds};
use profiler::machine;
use serde_json::{Value, json};
use std::env;
use std::path::PathBuf;

/// The program that Python runs.
const SCRIPT: &str = include_str!("torch_links.py");

/// Sizes of the measured tensors in bytes, on GPUs and on processors.
const GPU_SIZES: [u64; 5] = [4 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20];
const CPU_SIZES: [u64; 4] = [4 << 10, 256 << 10, 4 << 20, 16 << 20];

/// How PyTorch is run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchLinks {
    /// `auto`, `cpu` or `cuda`.
    pub device: String,
    /// The Python; that of the virtual environment or `python3` if absent.
    pub python: Option<PathBuf>,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkTime {
    /// The name of the level.
    pub level: &'static str,
    pub operation: String,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Microseconds.
    pub us: f64,
    /// Bytes that each device sends per second.
    pub bytes_per_s: f64,
}

const LEVELS: [&str; 2] = ["node", "network"];

/// Measures the links. Only the process of rank 0 has a result.
pub fn measure(links: &TorchLinks) -> Result<Option<(Cluster, Vec<LinkTime>)>, Error> {
    let failed = |why: String| Error::negative("cannot measure the links with torch").because(why);
    if env::var_os("WORLD_SIZE").is_none() || env::var_os("RANK").is_none() {
        return Err(failed("this process is not part of a torchrun job".to_string())
            .with_help("torchrun --no-python --nproc-per-node 8 pipec cluster bench --engine torch -o cluster.toml"));
    }
    let is_cpu = links.device == "cpu";
    let sizes: &[u64] = if is_cpu { &CPU_SIZES } else { &GPU_SIZES };
    let request = json!({"device": links.device, "sizes": sizes, "runs": 10});
    let (mut device_info, mut levels, mut times) = (None::<Value>, Vec::new(), Vec::new());
    let number =
        |object: &Value, name: &str| object[name].as_f64().filter(|number| number.is_finite() && *number > 0.0);
    let name_of =
        |index: &Value| index.as_u64().and_then(|index| LEVELS.get(index as usize)).copied().unwrap_or(LEVELS[0]);
    let mut read_line = |line: Value| {
        if line.get("devices").is_some() {
            device_info = Some(line);
        } else if let Some(row) = line.get("row") {
            times.push(LinkTime {
                level: name_of(&row["level"]),
                operation: row["operation"].as_str().unwrap_or_default().to_string(),
                bytes: row["bytes"].as_u64().unwrap_or(0),
                us: number(row, "us").unwrap_or(0.0),
                bytes_per_s: number(row, "bytes_per_s").unwrap_or(0.0),
            });
        } else if let (Some(index), Some(latency), Some(rate)) =
            (line.get("level"), number(&line, "latency_s"), number(&line, "bytes_per_s"))
        {
            levels.push(Level {
                name: name_of(index).to_string(),
                count: line["count"].as_u64().and_then(|count| u32::try_from(count).ok()).unwrap_or(1),
                bandwidth: BytesPerSecond(rate),
                latency: Seconds(latency),
                shared: false,
            });
        }
    };
    let python = python::find(links.python.as_deref());
    python::run(&python, SCRIPT, &request, &mut read_line, &failed)?;
    let Some(device_info) = device_info else { return Ok(None) };
    let text = device_info["devices"].as_str().unwrap_or_default().to_lowercase().replace(' ', "");
    let device = match gpu_of(&text).map(Kind::device) {
        Some(mut device) => {
            device.memory = device_info["memory_bytes"].as_u64().map_or(device.memory, Bytes);
            device
        }
        None if text.is_empty() => {
            let workers = levels.iter().map(|level| level.count).product::<u32>().max(1);
            machine::cluster_of_this_cpu(workers).map_err(|error| failed(error.to_string()))?.device
        }
        None => {
            return Err(failed(format!("the device type `{text}` is unknown"))
                .with_help("describe it in a cluster file (`pipec schema cluster`)"));
        }
    };
    Ok(Some((Cluster { device, classes: Vec::new(), levels, hosts: Vec::new() }, times)))
}
