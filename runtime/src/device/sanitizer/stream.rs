//! Streams whose methods check that their accesses are ordered, and then run on the CPU.

use super::clock::Clock;
use super::device::{CheckedRange, Shared, sanitizer};
use crate::device::api::{AverageStep, Elementwise, Kernel, OutputMode, ParameterUpdate, Stream, WeightRegions};
use crate::device::buffer::Buffer;
use crate::device::cpu::device::CpuStream;
use crate::device::error::DeviceError;
use crate::device::event::{DeviceEvent, Event};
use crate::device::optimizer::{Prediction, UpdateRule};
use crate::device::region::{Region, RegionMut};
use compiler::tensor::DType;
use parking_lot::Mutex;
use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

pub struct SanitizerStream {
    number: u64,
    shared: Arc<Mutex<Shared>>,
    clock: RefCell<Clock>,
}

/// One call of a stream method.
struct StreamCall<'a> {
    stream: &'a SanitizerStream,
    count: u64,
}

impl SanitizerStream {
    pub fn new(number: u64, shared: Arc<Mutex<Shared>>) -> SanitizerStream {
        SanitizerStream { number, shared, clock: RefCell::default() }
    }

    fn begin_call(&self) -> StreamCall<'_> {
        StreamCall { stream: self, count: self.clock.borrow_mut().tick(self.number) }
    }
}

impl StreamCall<'_> {
    fn access(&self, region: Region<'_>, is_write: bool) -> Result<CheckedRange, DeviceError> {
        let clock = self.stream.clock.borrow();
        let caller = (self.stream.number, self.count, &*clock);
        self.stream.shared.lock().access((region.address(), region.len()), caller, is_write)
    }

    fn read(&self, region: Region<'_>) -> Result<CheckedRange, DeviceError> {
        self.access(region, false)
    }

    fn write(&self, region: &RegionMut<'_>) -> Result<CheckedRange, DeviceError> {
        self.access(region.as_region(), true)
    }

    fn read_all(&self, regions: &[Region<'_>]) -> Result<Vec<CheckedRange>, DeviceError> {
        regions.iter().map(|region| self.read(*region)).collect()
    }

    fn write_all(&self, regions: &[RegionMut<'_>]) -> Result<Vec<CheckedRange>, DeviceError> {
        regions.iter().map(|region| self.write(region)).collect()
    }
}

// In all methods, SAFETY of `region_mut`: the caller passed the region as a `RegionMut`.
impl Stream for SanitizerStream {
    fn run(
        &self,
        kernel: &dyn Kernel,
        inputs: &[Region<'_>],
        outputs: &mut [RegionMut<'_>],
        workspace: RegionMut<'_>,
        mode: OutputMode,
    ) -> Result<(), DeviceError> {
        let call = self.begin_call();
        let (inputs, workspace) = (call.read_all(inputs)?, call.write(&workspace)?);
        let outputs = call.write_all(outputs)?;
        let inputs: Vec<Region<'_>> = inputs.iter().map(CheckedRange::region).collect();
        // SAFETY: see above.
        let mut outputs: Vec<RegionMut<'_>> = outputs.iter().map(|range| unsafe { range.region_mut() }).collect();
        CpuStream.run(kernel, &inputs, &mut outputs, unsafe { workspace.region_mut() }, mode)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        sanitizer().allocate(bytes)
    }

    fn upload_with(&self, to: RegionMut<'_>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        let to = self.begin_call().write(&to)?;
        // SAFETY: see above.
        CpuStream.upload_with(unsafe { to.region_mut() }, fill)
    }

    fn download_with(&self, from: Region<'_>, read: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        let from = self.begin_call().read(from)?;
        CpuStream.download_with(from.region(), read)?;
        self.finish()
    }

    fn copy(&self, from: Region<'_>, to: RegionMut<'_>) -> Result<(), DeviceError> {
        let call = self.begin_call();
        let (from, to) = (call.read(from)?, call.write(&to)?);
        // SAFETY: see above.
        CpuStream.copy(from.region(), unsafe { to.region_mut() })
    }

    fn cast(&self, from: (DType, Region<'_>), to: (DType, RegionMut<'_>)) -> Result<(), DeviceError> {
        let call = self.begin_call();
        let (source, target) = (call.read(from.1)?, call.write(&to.1)?);
        // SAFETY: see above.
        CpuStream.cast((from.0, source.region()), (to.0, unsafe { target.region_mut() }))
    }

    fn elementwise(
        &self,
        verb: Elementwise,
        dtype: DType,
        operands: &[Region<'_>],
        result: RegionMut<'_>,
    ) -> Result<(), DeviceError> {
        let call = self.begin_call();
        let (operands, result) = (call.read_all(operands)?, call.write(&result)?);
        let operands: Vec<Region<'_>> = operands.iter().map(CheckedRange::region).collect();
        // SAFETY: see above.
        CpuStream.elementwise(verb, dtype, &operands, unsafe { result.region_mut() })
    }

    fn squared_norms(&self, tensors: &[(DType, Region<'_>)]) -> Result<Vec<f64>, DeviceError> {
        let call = self.begin_call();
        let ranges = tensors.iter().map(|(_, region)| call.read(*region)).collect::<Result<Vec<_>, _>>()?;
        let tensors: Vec<_> = tensors.iter().zip(&ranges).map(|((dtype, _), range)| (*dtype, range.region())).collect();
        let norms = CpuStream.squared_norms(&tensors)?;
        self.finish()?;
        Ok(norms)
    }

    fn optimizer_step(&self, rule: &UpdateRule, updates: Vec<ParameterUpdate<'_>>) -> Result<(), DeviceError> {
        for ParameterUpdate { args, weights, gradient, state, rounded } in updates {
            let call = self.begin_call();
            let (gradient, state) = (call.read(gradient)?, call.write_all(&state)?);
            let (old, new) = match &weights {
                WeightRegions::InPlace(weights) => (None, call.write(weights)?),
                WeightRegions::OutOfPlace { old, new } => (Some(call.read(*old)?), call.write(new)?),
            };
            let rounded = rounded.map(|(dtype, to)| Ok::<_, DeviceError>((dtype, call.write(&to)?))).transpose()?;
            // SAFETY: see above, as for all that follow.
            let new = unsafe { new.region_mut() };
            let update = ParameterUpdate {
                args,
                weights: match &old {
                    None => WeightRegions::InPlace(new),
                    Some(old) => WeightRegions::OutOfPlace { old: old.region(), new },
                },
                gradient: gradient.region(),
                // SAFETY: see above.
                state: state.iter().map(|range| unsafe { range.region_mut() }).collect(),
                // SAFETY: see above.
                rounded: rounded.as_ref().map(|(dtype, range)| (*dtype, unsafe { range.region_mut() })),
            };
            CpuStream.optimizer_step(rule, vec![update])?;
        }
        Ok(())
    }

    fn predict_weights(
        &self,
        rule: &UpdateRule,
        prediction: &Prediction,
        weights: Region<'_>,
        state: &[Region<'_>],
        to: RegionMut<'_>,
    ) -> Result<(), DeviceError> {
        let call = self.begin_call();
        let (weights, state, to) = (call.read(weights)?, call.read_all(state)?, call.write(&to)?);
        let state: Vec<Region<'_>> = state.iter().map(CheckedRange::region).collect();
        // SAFETY: see above.
        CpuStream.predict_weights(rule, prediction, weights.region(), &state, unsafe { to.region_mut() })
    }

    fn moving_averages(&self, steps: Vec<AverageStep<'_>>) -> Result<(), DeviceError> {
        steps.into_iter().try_for_each(|step| {
            let state = self.begin_call().write(&step.state)?;
            // SAFETY: see above.
            CpuStream.moving_averages(vec![AverageStep { state: unsafe { state.region_mut() }, ..step }])
        })
    }

    fn record(&self) -> Result<Event, DeviceError> {
        let clock = self.clock.borrow().clone();
        Ok(Event::new(Arc::new(SanitizerEvent { stream: self.number, clock, shared: self.shared.clone() })))
    }

    fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        let Some(event) = event.device_event() else { return Ok(()) };
        let event = (event as &dyn Any).downcast_ref::<SanitizerEvent>();
        self.clock.borrow_mut().merge(&event.ok_or(DeviceError::Foreign { what: "event" })?.clock);
        Ok(())
    }

    fn finish(&self) -> Result<(), DeviceError> {
        self.shared.lock().finish(&self.clock.borrow());
        Ok(())
    }
}

struct SanitizerEvent {
    stream: u64,
    clock: Clock,
    shared: Arc<Mutex<Shared>>,
}

impl DeviceEvent for SanitizerEvent {
    fn stream(&self) -> u64 {
        self.stream
    }

    fn has_occurred(&self) -> bool {
        self.shared.lock().is_done(&self.clock)
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        self.shared.lock().finish(&self.clock);
        Ok(())
    }
}
