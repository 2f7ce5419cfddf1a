//! The CPU as a device. Every method of its stream runs immediately, on the caller's thread.

use super::chain::Chain;
use super::half::{is_half, narrow, widen};
use super::optimizer::WeightBytes;
use super::{arithmetic, optimizer};
use crate::device::api::{
    AverageStep, Device, DeviceInfo, Elementwise, Kernel, OutputMode, ParameterUpdate, Stream, WeightRegions,
};
use crate::device::buffer::Buffer;
use crate::device::chain::Link;
use crate::device::error::DeviceError;
use crate::device::event::Event;
use crate::device::host_memory;
use crate::device::layout::TensorLayout;
use crate::device::optimizer::{Prediction, UpdateRule};
use crate::device::region::{Region, RegionMut};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::Op;
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;
use std::any::Any;
use std::sync::{Arc, LazyLock};

/// The name of the CPU.
pub const NAME: &str = "cpu";

/// Operands that [`CpuStream::run`] needs no allocation for.
const FEW: usize = 8;

pub struct CpuDevice {
    info: DeviceInfo,
}

static CPU: LazyLock<Arc<CpuDevice>> = LazyLock::new(|| {
    Arc::new(CpuDevice { info: DeviceInfo { name: NAME.into(), model: "CPU".into(), ..Default::default() } })
});

/// The CPU.
pub fn cpu() -> Arc<dyn Device> {
    CPU.clone()
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn available_memory(&self) -> Option<u64> {
        host_memory::available()
    }

    fn arithmetic(&self) -> String {
        #[cfg(target_arch = "x86_64")]
        let vectors = match (super::panels::is_supported(), super::panels::avx2::is_supported()) {
            (true, _) => " with AVX-512",
            (_, true) => " with AVX2",
            _ => "",
        };
        #[cfg(not(target_arch = "x86_64"))]
        let vectors = "";
        format!("{}{vectors}", std::env::consts::ARCH)
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        Ok(Buffer::host(bytes))
    }

    fn can_access(&self, buffer: &Buffer) -> bool {
        buffer.is_host()
    }

    fn kernel(&self, op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Result<Arc<dyn Kernel>, DeviceError> {
        Ok(Arc::new(super::Kernel::new(op, inputs, outputs)))
    }

    fn chain(&self, links: &[Link], inputs: &[TensorLayout]) -> Option<Arc<dyn Kernel>> {
        Some(Arc::new(Chain::new(links, inputs)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        Ok(Box::new(CpuStream))
    }
}

impl Kernel for super::Kernel {
    fn name(&self) -> &'static str {
        self.name()
    }

    fn workspace(&self) -> usize {
        self.workspace()
    }

    fn can_accumulate(&self) -> bool {
        self.can_accumulate()
    }

    fn ops(&self) -> usize {
        1
    }

    fn is_reference(&self) -> bool {
        self.is_reference()
    }
}

impl Kernel for Chain {
    fn name(&self) -> &'static str {
        "chain"
    }

    fn workspace(&self) -> usize {
        self.workspace()
    }

    fn can_accumulate(&self) -> bool {
        false
    }

    fn ops(&self) -> usize {
        self.ops()
    }

    fn is_reference(&self) -> bool {
        false
    }
}

/// A stream of the CPU. It has no state, since no work is ever queued.
pub struct CpuStream;

impl Stream for CpuStream {
    fn run(
        &self,
        kernel: &dyn Kernel,
        inputs: &[Region<'_>],
        outputs: &mut [RegionMut<'_>],
        workspace: RegionMut<'_>,
        mode: OutputMode,
    ) -> Result<(), DeviceError> {
        let (mut few_inputs, mut many_inputs) = ([&[][..]; FEW], Vec::new());
        let inputs: &[&[u8]] = match few_inputs.get_mut(..inputs.len()) {
            Some(slots) => {
                for (bytes, region) in slots.iter_mut().zip(inputs) {
                    *bytes = region.host()?;
                }
                slots
            }
            None => {
                for region in inputs {
                    many_inputs.push(region.host()?);
                }
                &many_inputs
            }
        };
        let (mut few_outputs, mut many_outputs) = (<[&mut [u8]; FEW]>::default(), Vec::new());
        let outputs: &mut [&mut [u8]] = match few_outputs.get_mut(..outputs.len()) {
            Some(slots) => {
                for (bytes, region) in slots.iter_mut().zip(outputs) {
                    *bytes = region.reborrow().host()?;
                }
                slots
            }
            None => {
                for region in outputs {
                    many_outputs.push(region.reborrow().host()?);
                }
                &mut many_outputs
            }
        };
        let (workspace, any) = (workspace.host()?, kernel as &dyn Any);
        if let Some(kernel) = any.downcast_ref::<super::Kernel>() {
            match mode {
                OutputMode::Overwrite => kernel.run(inputs, outputs, workspace)?,
                OutputMode::BeginSum => kernel.run_term(inputs, outputs, workspace, false)?,
                OutputMode::Accumulate => kernel.run_term(inputs, outputs, workspace, true)?,
            }
        } else if let (Some(chain), OutputMode::Overwrite) = (any.downcast_ref::<Chain>(), mode) {
            chain.run(inputs, outputs, workspace)?;
        } else {
            return Err(DeviceError::Foreign { what: "kernel" });
        }
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        Ok(Buffer::host(bytes))
    }

    fn upload_with(&self, to: RegionMut<'_>, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        fill(to.host()?);
        Ok(())
    }

    fn download_with(&self, from: Region<'_>, read: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError> {
        read(from.host()?);
        Ok(())
    }

    fn copy(&self, from: Region<'_>, to: RegionMut<'_>) -> Result<(), DeviceError> {
        to.host()?.copy_from_slice(from.host()?);
        Ok(())
    }

    fn cast(
        &self,
        (from_dtype, from): (DType, Region<'_>),
        (to_dtype, to): (DType, RegionMut<'_>),
    ) -> Result<(), DeviceError> {
        let (from, to) = (from.host()?, to.host()?);
        match (from_dtype, to_dtype) {
            (a, b) if a == b => to.copy_from_slice(from),
            (half, DType::F32) if is_half(half) => widen(half, from, cast_slice_mut(to)),
            (DType::F32, half) if is_half(half) => narrow(half, cast_slice(from), to),
            (from, to) => return Err(DeviceError::Cast { device: NAME.to_string(), from, to }),
        }
        Ok(())
    }

    fn elementwise(
        &self,
        verb: Elementwise,
        dtype: DType,
        operands: &[Region<'_>],
        result: RegionMut<'_>,
    ) -> Result<(), DeviceError> {
        let result = result.host()?;
        let operand = |index: usize| operands[index].host();
        match (verb, dtype) {
            (Elementwise::Accumulate, _) => arithmetic::accumulate(dtype, operand(0)?, result),
            (Elementwise::Add, _) => arithmetic::add(dtype, operand(0)?, operand(1)?, result),
            (Elementwise::Scale(factor), _) => arithmetic::scale(dtype, result, factor),
            (Elementwise::AverageUpdate { keep }, DType::F64) => {
                optimizer::average_update::<f64>(operand(0)?, operand(1)?, keep, result)
            }
            (Elementwise::AverageUpdate { keep }, _) => {
                optimizer::average_update::<f32>(operand(0)?, operand(1)?, keep, result)
            }
            (Elementwise::SetBack { steps }, DType::F64) => {
                optimizer::set_back::<f64>(operand(0)?, steps, operand(1)?, result)
            }
            (Elementwise::SetBack { steps }, _) => optimizer::set_back::<f32>(operand(0)?, steps, operand(1)?, result),
        }
        Ok(())
    }

    fn squared_norms(&self, tensors: &[(DType, Region<'_>)]) -> Result<Vec<f64>, DeviceError> {
        tensors.iter().map(|(dtype, values)| Ok(arithmetic::squared_norm(*dtype, values.host()?))).collect()
    }

    fn optimizer_step(&self, rule: &UpdateRule, updates: Vec<ParameterUpdate<'_>>) -> Result<(), DeviceError> {
        for ParameterUpdate { args, weights, gradient, state, rounded } in updates {
            let (mut states, gradient): ([&mut [u8]; 2], _) = (Default::default(), gradient.host()?);
            for (bytes, region) in states.iter_mut().zip(state) {
                *bytes = region.host()?;
            }
            let step = if args.dtype == DType::F64 { optimizer::step::<f64> } else { optimizer::step::<f32> };
            let new: &[u8] = match weights {
                WeightRegions::InPlace(weights) => {
                    let weights = weights.host()?;
                    step(rule, &args, WeightBytes::InPlace(weights), gradient, states);
                    weights
                }
                WeightRegions::OutOfPlace { old, new } => {
                    let new = new.host()?;
                    step(rule, &args, WeightBytes::OutOfPlace { old: old.host()?, new }, gradient, states);
                    new
                }
            };
            if let Some((dtype, rounded)) = rounded {
                narrow(dtype, cast_slice(new), rounded.host()?);
            }
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
        let mut states: [&[u8]; 2] = Default::default();
        for (bytes, region) in states.iter_mut().zip(state) {
            *bytes = region.host()?;
        }
        match prediction.dtype {
            DType::F64 => optimizer::predict::<f64>(rule, prediction, weights.host()?, states, to.host()?),
            _ => optimizer::predict::<f32>(rule, prediction, weights.host()?, states, to.host()?),
        }
        Ok(())
    }

    fn moving_averages(&self, steps: Vec<AverageStep<'_>>) -> Result<(), DeviceError> {
        for AverageStep { dtype, sample, keep, state } in steps {
            arithmetic::moving_average(dtype, sample, keep, state.host()?);
        }
        Ok(())
    }

    fn record(&self) -> Result<Event, DeviceError> {
        Ok(Event::OCCURRED)
    }

    fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        event.synchronize()
    }

    fn finish(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
