//! Casts between common element types.

use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use compiler::tensor::DType;
use half::{bf16, f16};

trait CastTo<U>: Pod {
    fn cast(self) -> U;
}

/// Defines the casts, and the kernel of each.
macro_rules! casts {
    ($($from_type:ident $from:ty => $to_type:ident $to:ty: |$x:ident| $value:expr;)*) => {
        $(impl CastTo<$to> for $from {
            #[inline(always)]
            fn cast(self) -> $to {
                let $x = self;
                $value
            }
        })*

        /// Casts to the element type of `y`. `u8` stands for `bool` here.
        pub fn kernel(x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
            match (x.dtype, y.dtype) {
                (from, to) if from == to => Some(super::movement::copy()),
                $((DType::$from_type, DType::$to_type) => Some(convert::<$from, $to>()),)*
                _ => None,
            }
        }
    };
}

casts! {
    F32 f32 => F64 f64: |x| x as f64;
    F32 f32 => I64 i64: |x| x as i64;
    F32 f32 => I32 i32: |x| x as i64 as i32;
    F32 f32 => Bool u8: |x| (x != 0.0) as u8;
    F32 f32 => F16 f16: |x| f16::from_f32(x);
    F32 f32 => Bf16 bf16: |x| bf16::from_f32(x);
    F64 f64 => F32 f32: |x| x as f32;
    F64 f64 => I64 i64: |x| x as i64;
    F64 f64 => Bool u8: |x| (x != 0.0) as u8;
    I64 i64 => F32 f32: |x| x as f64 as f32;
    I64 i64 => F64 f64: |x| x as f64;
    I64 i64 => I32 i32: |x| x as i32;
    I64 i64 => Bool u8: |x| (x != 0) as u8;
    I32 i32 => F32 f32: |x| x as f32;
    I32 i32 => F64 f64: |x| x as f64;
    I32 i32 => I64 i64: |x| x as i64;
    Bool u8 => F32 f32: |x| (x != 0) as u8 as f32;
    Bool u8 => F64 f64: |x| (x != 0) as u8 as f64;
    Bool u8 => I64 i64: |x| (x != 0) as i64;
    F16 f16 => F32 f32: |x| x.to_f32();
    Bf16 bf16 => F32 f32: |x| x.to_f32();
}

fn convert<T: CastTo<U> + 'static, U: Pod>() -> FastKernel {
    FastKernel::new(|inputs, outputs, _| cast_row(cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, U>(outputs[0])))
}

wide! {
    fn cast_row[T: CastTo<U>, U: Copy](x: &[T], y: &mut [U]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x.cast();
        }
    }
}
