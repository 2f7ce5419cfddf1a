//! Values that a kernel has on each GPU that runs it: replicas share kernels.

use super::gpu::{Function, Gpu, GpuError};
use std::sync::{Arc, OnceLock};

/// The most GPUs of a machine.
pub const MOST_GPUS: usize = 64;

/// A value for each GPU, made on first use there.
pub struct PerGpu<T>(Vec<OnceLock<T>>);

impl<T> Default for PerGpu<T> {
    fn default() -> PerGpu<T> {
        PerGpu((0..MOST_GPUS).map(|_| OnceLock::new()).collect())
    }
}

impl<T> PerGpu<T> {
    /// The place of a GPU's value.
    pub fn of(&self, gpu: &Gpu) -> &OnceLock<T> {
        &self.0[gpu.info().ordinal]
    }
}

impl PerGpu<Function> {
    /// The loaded kernel with this source.
    pub fn load(&self, gpu: &Gpu, text: &Arc<str>) -> Result<Function, GpuError> {
        if let Some(function) = self.of(gpu).get() {
            return Ok(*function);
        }
        let function = gpu.function(text)?;
        Ok(*self.of(gpu).get_or_init(|| function))
    }
}
