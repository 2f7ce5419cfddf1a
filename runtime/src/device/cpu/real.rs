//! The element types of the fast kernels: `f32` and `f64`.

use super::math;
use bytemuck::Pod;
use compiler::op::unary::erf;
use compiler::tensor::DType;
use gemm_common::Parallelism;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A product of the `gemm` crates, `c = alpha·c + beta·a·b`. Arguments: m, n, k; then for `c` its address, column
/// stride, row stride and whether it is read; address and strides of `a` and `b`; alpha and beta; three conjugation
/// flags; threads.
pub type Multiply<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// `f32` or `f64`. Every function is inlined into the calling loop to be compiled for that loop's vector width.
pub trait Real:
    Pod
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Send
    + Sync
{
    const DTYPE: DType;
    /// The fastest matrix product for this processor.
    fn multiply() -> Multiply<Self>;
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;
    /// Rounds to nearest.
    fn of(value: f64) -> Self;
    fn wide(self) -> f64;
    fn abs(self) -> Self;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    /// `log(1+x)` for `x` in [0, 1].
    fn ln_1p(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    /// Rounds half to even.
    fn round(self) -> Self;

    /// Maximum; propagates NaN.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn larger(self, other: Self) -> Self {
        if self >= other || self != self { self } else { other }
    }

    /// Minimum; propagates NaN.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn smaller(self, other: Self) -> Self {
        if self <= other || self != self { self } else { other }
    }
}

/// An optional kernel for `f32` or `f64`, of which `$real` is the one that `$dtype` says; `None` for other element types.
macro_rules! for_real {
    ($dtype:expr, $real:ident => $kernel:expr) => {
        match $dtype {
            compiler::tensor::DType::F32 => {
                type $real = f32;
                $kernel
            }
            compiler::tensor::DType::F64 => {
                type $real = f64;
                $kernel
            }
            _ => None,
        }
    };
}

pub(super) use for_real;

macro_rules! delegate {
    ($($name:ident => $function:path),*) => {
        $(#[inline(always)]
        fn $name(self) -> Self {
            $function(self)
        })*
    };
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
    fn multiply() -> Multiply<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const LOWEST: f32 = f32::NEG_INFINITY;

    delegate!(abs => f32::abs, sqrt => f32::sqrt, floor => f32::floor, ceil => f32::ceil, round => f32::round_ties_even);
    delegate!(exp => math::exp, ln => math::ln, ln_1p => math::ln_1p, tanh => math::tanh, erf => math::erf);

    #[inline(always)]
    fn of(value: f64) -> f32 {
        value as f32
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self as f64
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;
    fn multiply() -> Multiply<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const LOWEST: f64 = f64::NEG_INFINITY;

    delegate!(abs => f64::abs, sqrt => f64::sqrt, floor => f64::floor, ceil => f64::ceil, round => f64::round_ties_even);
    delegate!(exp => f64::exp, ln => f64::ln, ln_1p => f64::ln_1p, tanh => f64::tanh, erf => erf);

    #[inline(always)]
    fn of(value: f64) -> f64 {
        value
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
}
