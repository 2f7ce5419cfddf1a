//! Casts between common element types.

use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use compiler::tensor::DType;
use half::{bf16, f16};

trait CastTo<U>: Pod {
    fn cast(self) -> U;
}

macro_rules! casts {
    ($($from:ty => $to:ty: |$x:ident| $value:expr;)*) => {
        $(impl CastTo<$to> for $from {
            #[inline(always)]
            fn cast(self) -> $to {
                let $x = self;
                $value
            }
        })*
    };
}

casts! {
    f32 => f64: |x| x as f64;
    f32 => i64: |x| x as i64;
    f32 => i32: |x| x as i64 as i32;
    f32 => u8: |x| (x != 0.0) as u8;
    f32 => f16: |x| f16::from_f32(x);
    f32 => bf16: |x| bf16::from_f32(x);
    f64 => f32: |x| x as f32;
    f64 => i64: |x| x as i64;
    f64 => u8: |x| (x != 0.0) as u8;
    i64 => f32: |x| x as f64 as f32;
    i64 => f64: |x| x as f64;
    i64 => i32: |x| x as i32;
    i64 => u8: |x| (x != 0) as u8;
    i32 => f32: |x| x as f32;
    i32 => f64: |x| x as f64;
    i32 => i64: |x| x as i64;
    u8 => f32: |x| (x != 0) as u8 as f32;
    u8 => f64: |x| (x != 0) as u8 as f64;
    u8 => i64: |x| (x != 0) as i64;
    f16 => f32: |x| x.to_f32();
    bf16 => f32: |x| x.to_f32();
}

/// Casts to the element type of `y`. `u8` stands for `bool` here.
pub fn kernel(x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    use DType::*;
    Some(match (x.dtype, y.dtype) {
        (from, to) if from == to => super::movement::copy(),
        (F32, F64) => convert::<f32, f64>(),
        (F32, I64) => convert::<f32, i64>(),
        (F32, I32) => convert::<f32, i32>(),
        (F32, Bool) => convert::<f32, u8>(),
        (F32, F16) => convert::<f32, f16>(),
        (F32, Bf16) => convert::<f32, bf16>(),
        (F64, F32) => convert::<f64, f32>(),
        (F64, I64) => convert::<f64, i64>(),
        (F64, Bool) => convert::<f64, u8>(),
        (I64, F32) => convert::<i64, f32>(),
        (I64, F64) => convert::<i64, f64>(),
        (I64, I32) => convert::<i64, i32>(),
        (I64, Bool) => convert::<i64, u8>(),
        (I32, F32) => convert::<i32, f32>(),
        (I32, F64) => convert::<i32, f64>(),
        (I32, I64) => convert::<i32, i64>(),
        (Bool, F32) => convert::<u8, f32>(),
        (Bool, F64) => convert::<u8, f64>(),
        (Bool, I64) => convert::<u8, i64>(),
        (F16, F32) => convert::<f16, f32>(),
        (Bf16, F32) => convert::<bf16, f32>(),
        _ => return None,
    })
}

fn convert<T: CastTo<U> + 'static, U: Pod>() -> FastKernel {
    FastKernel::new(|inputs, outputs, _| {
        cast_row(cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, U>(outputs[0]));
        Ok(())
    })
}

wide! {
    fn cast_row[T: CastTo<U>, U: Copy](x: &[T], y: &mut [U]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = x.cast();
        }
    }
}
