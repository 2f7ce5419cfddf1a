//! Measures the links between GPUs of this machine.

use compiler::cluster::{BytesPerSecond, Level, Seconds};
use runtime::device::api::{Device, Stream};
use runtime::device::buffer::Buffer;
use runtime::device::error::DeviceError;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a copy that measures bandwidth.
const LARGE: usize = 64 << 20;

/// Bytes of a copy that measures latency.
const SMALL: usize = 256;

/// Copies in one measurement; the fastest of three counts.
const LARGE_COPIES: u32 = 4;
const SMALL_COPIES: u32 = 64;

/// Bandwidth and latency of the slowest link between two of these GPUs, in each direction. Fewer than two change
/// nothing.
pub fn measure(gpus: &[Arc<dyn Device>], level: &mut Level) -> Result<(), DeviceError> {
    let (mut bandwidth, mut latency) = (f64::INFINITY, 0.0f64);
    for from in gpus {
        for to in gpus.iter().filter(|to| !Arc::ptr_eq(to, from)) {
            let (large, small) = (copy_time(from, to, LARGE, LARGE_COPIES)?, copy_time(from, to, SMALL, SMALL_COPIES)?);
            bandwidth = bandwidth.min(LARGE as f64 / large.as_secs_f64().max(1e-12));
            latency = latency.max(small.as_secs_f64());
        }
    }
    if bandwidth.is_finite() {
        (level.bandwidth, level.latency) = (BytesPerSecond(bandwidth), Seconds(latency));
    }
    Ok(())
}

/// The time of one copy on the receiver's stream, through the host if GPUs cannot copy.
fn copy_time(from: &Arc<dyn Device>, to: &Arc<dyn Device>, bytes: usize, copies: u32) -> Result<Duration, DeviceError> {
    let (source, mut target) = (from.upload(&vec![1; bytes])?, to.allocate(bytes)?);
    let stream = to.stream()?;
    let mut best = Duration::MAX;
    for _ in 0..3 {
        best = best.min(time_copies(&*stream, &source, &mut target, copies)?);
    }
    Ok(best / copies)
}

fn time_copies(
    stream: &dyn Stream,
    source: &Buffer,
    target: &mut Buffer,
    copies: u32,
) -> Result<Duration, DeviceError> {
    let start = stream.timestamp()?;
    for _ in 0..copies {
        stream.copy(source.region(), target.region_mut())?;
    }
    stream.timestamp()?.since(&start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use runtime::device::cpu::device::cpu;

    #[test]
    fn one_device_has_no_link() {
        let level = Level {
            name: "pcie".to_string(),
            count: 1,
            bandwidth: BytesPerSecond(1.0),
            latency: Seconds(2.0),
            shared: false,
        };
        let mut measured = level.clone();
        measure(&[cpu()], &mut measured).unwrap();
        assert_eq!(measured, level);
        let time = copy_time(&cpu(), &cpu(), LARGE, 1).unwrap();
        assert!(time > Duration::from_micros(100) && time < Duration::from_secs(10), "{time:?}");
    }
}
