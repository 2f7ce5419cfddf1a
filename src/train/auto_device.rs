//! The choice of `--device auto`: GPUs if each of the plan's workers has one with enough free memory, else the CPU.

use crate::events::EventSink;
use crate::train::device_request::open_gpu;
use crate::train::metrics::device_bytes;
use crate::train::tensor_parallel::degree;
use compiler::plan::Plan;
use compiler::text::quantity;
use runtime::device::api::Device;
use runtime::device::cpu::device::cpu;
use runtime::device::cuda::gpu;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Plans do not know the workspace of kernels on GPUs, so these bytes and this fraction (1 / `SPARE_DIVISOR`) of planned memory
/// must be free beside it.
const SPARE_BYTES: u64 = 512 << 20;
const SPARE_DIVISOR: u64 = 10;

/// The devices for a plan with this tensor-parallel degree. A note says which and why, or a detail if there is no GPU.
pub fn choose(plan: &Plan, tensor: usize, has_processes: bool, events: &dyn EventSink) -> Vec<Arc<dyn Device>> {
    let report = |line: String| if gpu::count() > 0 { events.note(&line) } else { events.detail(&line) };
    match gpus(plan, tensor, has_processes) {
        Ok((gpus, why)) => {
            let numbers: Vec<&str> = gpus.iter().filter_map(|gpu| gpu.info().name.strip_prefix("cuda:")).collect();
            report(format!("--device auto takes cuda:{}: {why}", numbers.join(",")));
            gpus
        }
        Err(why) => {
            report(format!("--device auto takes the CPU: {why}"));
            vec![cpu()]
        }
    }
}

/// The first GPUs that can hold a worker, one for each, or why there are not enough.
fn gpus(plan: &Plan, tensor: usize, has_processes: bool) -> Result<(Vec<Arc<dyn Device>>, String), String> {
    let count = match gpu::devices() {
        Ok(0) => return Err("no NVIDIA GPU was found".to_string()),
        Ok(count) => count,
        Err(error) => return Err(error.to_string()),
    };
    if has_processes {
        return Err("in runs of several processes, only `--device cuda` trains on GPUs".to_string());
    }
    let devices: BTreeSet<u32> = plan.stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
    let workers = devices.len() / degree(plan).max(1) * tensor.max(1);
    if count < workers {
        let gpus = if count == 1 { "one GPU" } else { &format!("{count} GPUs") };
        return Err(format!("{workers} workers need a GPU each, and this machine has {gpus}"));
    }
    let planned: Vec<u64> = plan.stages.iter().map(|stage| stage.memory.total).collect();
    let worker_bytes = (0..planned.len()).map(|at| device_bytes(plan, at, &planned)).max().unwrap_or(0);
    let (mut suitable, mut reason) = (Vec::new(), None);
    for number in 0..count {
        match open_gpu(number).map(|gpu| (gpu.available_memory(), gpu)) {
            Ok((Some(free), _))
                if free < worker_bytes.saturating_add(worker_bytes / SPARE_DIVISOR).saturating_add(SPARE_BYTES) =>
            {
                let [worker_bytes, free] = [worker_bytes, free].map(quantity::bytes);
                reason.get_or_insert(format!(
                    "a worker needs {worker_bytes} and some to spare, and cuda:{number} has {free} free"
                ));
            }
            Ok((_, gpu)) => suitable.push(gpu),
            Err(error) => _ = reason.get_or_insert(error.line()),
        }
        if suitable.len() == workers {
            let bytes = quantity::bytes(worker_bytes);
            return Ok((
                suitable,
                if workers == 1 {
                    format!("it can hold the worker, which needs {bytes}")
                } else {
                    format!("each can hold one of the {workers} workers, which need up to {bytes}")
                },
            ));
        }
    }
    Err(reason.unwrap_or_else(|| format!("{workers} workers need a GPU each")))
}
