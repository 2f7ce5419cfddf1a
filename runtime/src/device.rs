//! Devices: memory, kernels and streams behind the traits of [`api`]. The CPU is always available.
//!
//! To add one: a folder with its implementation, its module and its row here.

pub mod api;
pub mod buffer;
pub mod chain;
pub mod context;
pub mod cpu;
pub mod cuda;
pub mod download;
pub mod error;
pub mod event;
pub mod host_memory;
pub mod layout;
pub mod memory_counter;
pub mod optimizer;
pub mod pool;
pub mod region;
pub mod sanitizer;
pub mod tensor_link;

use crate::device::api::Device;
use crate::device::error::DeviceError;
use std::sync::Arc;

/// Opens a device. The argument is the number in a name such as `cuda:0`. `None` if there is no such name.
type Open = fn(Option<usize>) -> Option<Result<Arc<dyn Device>, DeviceError>>;

/// Kinds of devices.
const KINDS: [(&str, Open); 3] = [
    (cpu::device::NAME, |number| number.is_none().then(|| Ok(cpu::device::cpu()))),
    (cuda::device::NAME, |number| number.map(cuda::device::open)),
    (sanitizer::device::NAME, |number| number.is_none().then(|| Ok(sanitizer::device::sanitizer()))),
];

/// Opens the device with this name.
pub fn open(name: &str) -> Result<Arc<dyn Device>, DeviceError> {
    let unknown = || DeviceError::Unknown { name: name.to_string() };
    let (kind, number) = match name.split_once(':') {
        Some((kind, number)) => (kind, Some(number.parse().map_err(|_| unknown())?)),
        None => (name, None),
    };
    let open = KINDS.iter().find(|(name, _)| *name == kind);
    open.and_then(|(_, open)| open(number)).unwrap_or_else(|| Err(unknown()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_open() {
        assert_eq!(open("cpu").map(|device| device.info().name.clone()), Ok("cpu".to_string()));
        for name in ["abacus:1", "cpu:1", "cpu:", ""] {
            assert_eq!(open(name).err(), Some(DeviceError::Unknown { name: name.to_string() }));
        }
    }
}
