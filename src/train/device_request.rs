//! The devices of a training run: `--device`.

use crate::error::Error;
use crate::events::EventSink;
use compiler::profile::precision::Precision;
use runtime::device::api::Device;
use runtime::device::cuda::gpu;
use runtime::device::error::DeviceError;
use runtime::device::{cpu, cuda, open};
use std::sync::Arc;

/// The devices on which the workers of a run train, in turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceRequest {
    /// GPUs if each worker of the plan fits in one, else the CPU: see [`auto_device`](crate::train::auto_device).
    #[default]
    Auto,
    Cpu,
    /// All GPUs of this machine.
    AllGpus,
    /// These GPUs, by number.
    Gpus(Vec<usize>),
}

impl DeviceRequest {
    /// Reads `auto`, `cpu`, `cuda`, or a list of GPUs such as `cuda:0,1`.
    pub fn read(text: &str) -> Result<DeviceRequest, String> {
        let kinds = "write auto, cpu, cuda, or a list of GPUs such as cuda:0,1";
        let names_kind = |kind: &str| text.split(',').any(|part| part.trim().starts_with(kind));
        match (text, text.strip_prefix("cuda:")) {
            _ if names_kind("cpu") && names_kind("cuda") => {
                Err(format!("the workers of a run are all on the CPU or all on GPUs: {kinds}"))
            }
            ("auto", _) => Ok(DeviceRequest::Auto),
            ("cpu", _) => Ok(DeviceRequest::Cpu),
            ("cuda", _) => Ok(DeviceRequest::AllGpus),
            (_, Some(list)) => {
                let numbers: Option<Vec<usize>> = list.split(',').map(|number| number.trim().parse().ok()).collect();
                let numbers = numbers.ok_or(kinds)?;
                match (1..numbers.len()).find(|at| numbers[..*at].contains(&numbers[*at])) {
                    Some(at) => Err(format!("cuda:{} is listed twice; workers take the GPUs in turn", numbers[at])),
                    None => Ok(DeviceRequest::Gpus(numbers)),
                }
            }
            _ => Err(kinds.to_string()),
        }
    }

    /// Opens the devices; `None` if they depend on the plan.
    pub fn open(&self) -> Result<Option<Vec<Arc<dyn Device>>>, Error> {
        let numbers = match self {
            DeviceRequest::Auto => return Ok(None),
            DeviceRequest::Cpu => return Ok(Some(vec![cpu::device::cpu()])),
            DeviceRequest::AllGpus => (0..gpu::count().max(1)).collect(),
            DeviceRequest::Gpus(numbers) => numbers.clone(),
        };
        if numbers.is_empty() {
            return Err(Error::input("the list of GPUs is empty").with_help("`--device cuda` takes all GPUs"));
        }
        numbers.into_iter().map(open_gpu).collect::<Result<_, _>>().map(Some)
    }
}

/// The devices for a precision: under `tf32`, those that have it use it. The others compute in fp32, with a warning.
pub fn for_precision(
    devices: Vec<Arc<dyn Device>>,
    precision: Option<Precision>,
    events: &dyn EventSink,
) -> Vec<Arc<dyn Device>> {
    if precision != Some(Precision::Tf32) {
        return devices;
    }
    let tf32_devices: Vec<Option<Arc<dyn Device>>> = devices.iter().map(|device| device.with_tf32()).collect();
    if let Some(at) = tf32_devices.iter().position(Option::is_none) {
        events.warn(&match devices[at].is_asynchronous() {
            true => format!(
                "{} has no TF32, which requires compute capability 8.0 and cuBLASLt: matrix products are computed in fp32",
                devices[at].info().name
            ),
            false => "CPUs have no TF32: matrix products are computed in fp32".to_string(),
        });
    }
    tf32_devices.into_iter().zip(devices).map(|(tf32_devices, device)| tf32_devices.unwrap_or(device)).collect()
}

/// The CPU, or one GPU by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OneDevice {
    Cpu,
    Gpu(usize),
}

impl OneDevice {
    pub fn open(self) -> Result<Arc<dyn Device>, Error> {
        match self {
            OneDevice::Cpu => Ok(cpu::device::cpu()),
            OneDevice::Gpu(number) => open_gpu(number),
        }
    }
}

/// Reads `cpu`, `cuda` (the first GPU) or `cuda:1`.
pub fn one_device(text: &str) -> Result<OneDevice, String> {
    match DeviceRequest::read(text) {
        Ok(DeviceRequest::Cpu) => Ok(OneDevice::Cpu),
        Ok(DeviceRequest::AllGpus) => Ok(OneDevice::Gpu(0)),
        Ok(DeviceRequest::Gpus(numbers)) if numbers.len() == 1 => Ok(OneDevice::Gpu(numbers[0])),
        _ => Err("write cpu, or one GPU such as cuda:0".to_string()),
    }
}

pub fn open_gpu(number: usize) -> Result<Arc<dyn Device>, Error> {
    open(&format!("{}:{number}", cuda::device::NAME)).map_err(|error| {
        let why = match error {
            DeviceError::Failed { what, .. } => what,
            error => error.to_string(),
        };
        Error::input(format!("cannot open cuda:{number}"))
            .because(why)
            .with_help("`pipec doctor` lists the GPUs and what they need; `--device cpu` uses the CPU")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_is_read() {
        assert_eq!(one_device("cpu"), Ok(OneDevice::Cpu));
        assert_eq!(["cuda", "cuda:3"].map(one_device), [Ok(OneDevice::Gpu(0)), Ok(OneDevice::Gpu(3))]);
        for text in ["auto", "cuda:0,1", "tpu"] {
            assert!(one_device(text).is_err(), "{text}");
        }
    }

    #[test]
    fn devices_are_read() {
        assert_eq!(DeviceRequest::read("auto"), Ok(DeviceRequest::Auto));
        assert_eq!(DeviceRequest::read("cuda"), Ok(DeviceRequest::AllGpus));
        assert_eq!(DeviceRequest::read("cuda:1, 0"), Ok(DeviceRequest::Gpus(vec![1, 0])));
        for text in ["cpu,cuda:0", "cuda:1, cpu"] {
            assert!(DeviceRequest::read(text).is_err_and(|why| why.contains("all on GPUs")), "{text}");
        }
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:0,0", "cuda:-1", "cpu:0"] {
            assert!(DeviceRequest::read(text).is_err(), "{text}");
        }
    }
}
