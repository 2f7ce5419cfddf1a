//! Precision of training.
//!
//! Under `bf16` and `fp16`, weights, activations and messages have two bytes. Normalisations and the loss compute in
//! f32, gradients are added in f32, and the optimizer steps f32 master weights (Micikevicius et al., "Mixed precision
//! training", ICLR 2018). `tf32` changes only the matrix products.

use crate::cluster::Device;
use crate::tensor::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Double precision.
    Fp64,
    /// Single precision.
    Fp32,
    /// Single precision; matrix products round their inputs to TF32.
    Tf32,
    /// Mixed precision in bfloat16.
    Bf16,
    /// Mixed precision in half precision, with loss scaling.
    Fp16,
}

impl Precision {
    pub const ALL: [Precision; 5] =
        [Precision::Fp64, Precision::Fp32, Precision::Tf32, Precision::Bf16, Precision::Fp16];

    pub fn name(self) -> &'static str {
        match self {
            Precision::Fp64 => "fp64",
            Precision::Fp32 => "fp32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
            Precision::Fp16 => "fp16",
        }
    }

    /// Reads a precision, or the name of its element type.
    pub fn from_name(name: &str) -> Option<Precision> {
        let by_name = Precision::ALL.into_iter().find(|precision| precision.name() == name);
        by_name.or_else(|| DType::parse(name).and_then(Precision::of))
    }

    /// The precision with this element type.
    pub fn of(dtype: DType) -> Option<Precision> {
        Precision::ALL.into_iter().filter(|precision| *precision != Precision::Tf32).find(|p| p.dtype() == dtype)
    }

    /// Element type of weights, activations and messages.
    pub fn dtype(self) -> DType {
        match self {
            Precision::Fp64 => DType::F64,
            Precision::Fp32 | Precision::Tf32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::Fp16 => DType::F16,
        }
    }

    /// True for two-byte weights with f32 sums and master weights.
    pub fn is_mixed(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp16)
    }

    /// The usual precision on a device: bf16 where matrix products of that type are faster, which they are on tensor
    /// cores.
    pub fn usual(device: &Device) -> Precision {
        let peak = device.peak_flops;
        if device.multiprocessors.is_some() && peak.bf16 > peak.f32 { Precision::Bf16 } else { Precision::Fp32 }
    }

    /// The device, with its TF32 peak as the f32 peak under `tf32`.
    pub fn on(self, device: &Device) -> Device {
        let mut device = device.clone();
        if self == Precision::Tf32 {
            device.peak_flops.f32 = device.peak_flops.tf32;
        }
        device
    }

    /// The element type of each kind of tensor.
    pub fn types(self) -> ElementTypes {
        let (element, wide) =
            (self.dtype().name().to_string(), if self.is_mixed() { DType::F32 } else { self.dtype() });
        let wide = wide.name().to_string();
        ElementTypes {
            precision: self,
            weights: element.clone(),
            activations: element.clone(),
            messages: element,
            gradient_sums: wide.clone(),
            master_weights: self.is_mixed().then(|| wide.clone()),
            optimizer_state: wide.clone(),
            all_reduce: wide,
        }
    }
}

/// Element types of the tensors of a run, as they are stored and sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ElementTypes {
    /// The precision; it determines the other fields.
    pub precision: Precision,
    /// Weights that kernels read. Scales of normalisations are always in f32 under mixed precision.
    pub weights: String,
    /// Activations and their gradients.
    pub activations: String,
    /// Activations and gradients sent between stages.
    pub messages: String,
    /// Sums of parameter gradients over micro-batches.
    pub gradient_sums: String,
    /// Weights that the optimizer steps, if they are not those that kernels read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub master_weights: Option<String>,
    /// Momentum, and the moments of Adam.
    pub optimizer_state: String,
    /// Gradients sent between replicas.
    pub all_reduce: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::device::find;

    #[test]
    fn names_come_back_and_devices_choose() {
        for precision in Precision::ALL {
            assert_eq!(Precision::from_name(precision.name()), Some(precision));
        }
        assert_eq!(Precision::from_name("f32"), Some(Precision::Fp32));
        assert_eq!(Precision::from_name("i64"), None);
        let usual = |kind: &str| Precision::usual(&find(kind).unwrap().device());
        assert_eq!(
            ["v100", "cpu", "a100", "h200"].map(usual),
            [Precision::Fp32, Precision::Fp32, Precision::Bf16, Precision::Bf16]
        );
    }
}
