//! Elementwise ops: unary, binary, compare, select. Casts are in `cast`.

use super::function::*;
use super::real::Real;
use super::walk::{Walk, broadcast_strides, row_major};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use compiler::op::{Binary, Compare, Unary};
use compiler::tensor::DType;

pub fn unary(op: Unary, x: &TensorLayout) -> Option<FastKernel> {
    match x.dtype {
        DType::F32 => unary_real::<f32>(op),
        DType::F64 => unary_real::<f64>(op),
        DType::Bool if op == Unary::Not => Some(FastKernel::new(|inputs, outputs, _| {
            for (y, &x) in outputs[0].iter_mut().zip(inputs[0]) {
                *y = (x == 0) as u8;
            }
            Ok(())
        })),
        _ => None,
    }
}

fn unary_real<T: Real>(op: Unary) -> Option<FastKernel> {
    Some(match op {
        Unary::Neg => map::<T, _>(Neg),
        Unary::Abs => map::<T, _>(Abs),
        Unary::Sign => map::<T, _>(Sign),
        Unary::Exp => map::<T, _>(Exp),
        Unary::Log => map::<T, _>(Log),
        Unary::Sqrt => map::<T, _>(Sqrt),
        Unary::Rsqrt => map::<T, _>(Rsqrt),
        Unary::Reciprocal => map::<T, _>(Reciprocal),
        Unary::Sin => map::<T, _>(Sin),
        Unary::Cos => map::<T, _>(Cos),
        Unary::Asin => map::<T, _>(Asin),
        Unary::Acos => map::<T, _>(Acos),
        Unary::Atan => map::<T, _>(Atan),
        Unary::Sinh => map::<T, _>(Sinh),
        Unary::Cosh => map::<T, _>(Cosh),
        Unary::Tanh => map::<T, _>(Tanh),
        Unary::Asinh => map::<T, _>(Asinh),
        Unary::Acosh => map::<T, _>(Acosh),
        Unary::Atanh => map::<T, _>(Atanh),
        Unary::Sigmoid => map::<T, _>(Sigmoid),
        Unary::Relu => map::<T, _>(Relu),
        Unary::Erf => map::<T, _>(Erf),
        Unary::Gelu => map::<T, _>(Gelu),
        Unary::GeluTanh => map::<T, _>(GeluTanh),
        Unary::Silu => map::<T, _>(Silu),
        Unary::Softplus => map::<T, _>(Softplus),
        Unary::Floor => map::<T, _>(Floor),
        Unary::Ceil => map::<T, _>(Ceil),
        Unary::Round => map::<T, _>(Round),
        Unary::Not => return None,
    })
}

fn map<T: Real, F: Function1<T>>(f: F) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        map_row(cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]), f);
        Ok(())
    })
}

wide! {
    fn map_row[T: Real, F: Function1<T>](x: &[T], y: &mut [T], f: F) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = f.at(x);
        }
    }
}

pub fn binary(op: Binary, a: &TensorLayout, b: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let walk = broadcast_walk(a, b, y)?;
    match a.dtype {
        DType::F32 => binary_real::<f32>(op, walk),
        DType::F64 => binary_real::<f64>(op, walk),
        DType::Bool => Some(match op {
            Binary::And => zip::<u8, u8, _>(walk, And),
            Binary::Or => zip::<u8, u8, _>(walk, Or),
            Binary::Xor => zip::<u8, u8, _>(walk, Xor),
            _ => return None,
        }),
        _ => None,
    }
}

fn binary_real<T: Real>(op: Binary, walk: Walk<3>) -> Option<FastKernel> {
    Some(match op {
        Binary::Add => zip::<T, T, _>(walk, Add),
        Binary::Sub => zip::<T, T, _>(walk, Sub),
        Binary::Mul => zip::<T, T, _>(walk, Mul),
        Binary::Div => zip::<T, T, _>(walk, Div),
        Binary::Pow => zip::<T, T, _>(walk, Pow),
        Binary::Max => zip::<T, T, _>(walk, Max),
        Binary::Min => zip::<T, T, _>(walk, Min),
        Binary::Mod | Binary::And | Binary::Or | Binary::Xor | Binary::ShiftLeft | Binary::ShiftRight => return None,
    })
}

pub fn compare(op: Compare, a: &TensorLayout, b: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let walk = broadcast_walk(a, b, y)?;
    match a.dtype {
        DType::F32 => Some(compare_as::<f32>(op, walk)),
        DType::F64 => Some(compare_as::<f64>(op, walk)),
        DType::I64 => Some(compare_as::<i64>(op, walk)),
        DType::I32 => Some(compare_as::<i32>(op, walk)),
        _ => None,
    }
}

fn compare_as<T: Pod + PartialOrd>(op: Compare, walk: Walk<3>) -> FastKernel {
    match op {
        Compare::Equal => zip::<T, u8, _>(walk, Equal),
        Compare::Less => zip::<T, u8, _>(walk, Less),
        Compare::LessEqual => zip::<T, u8, _>(walk, LessEqual),
    }
}

fn broadcast_walk(a: &TensorLayout, b: &TensorLayout, y: &TensorLayout) -> Option<Walk<3>> {
    let (a, b) = (broadcast_strides(&a.shape, &y.shape), broadcast_strides(&b.shape, &y.shape));
    Walk::new(&y.shape, [&row_major(&y.shape), &a, &b], [0; 3])
}

fn zip<T: Pod, U: Pod, F: Function2<T, U>>(walk: Walk<3>, f: F) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let (a, b) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        zip_runs(&walk, a, b, cast_slice_mut::<u8, U>(outputs[0]), f);
        Ok(())
    })
}

wide! {
    fn zip_runs[T: Copy, U: Copy, F: Function2<T, U>](walk: &Walk<3>, a: &[T], b: &[T], y: &mut [U], f: F) {
        let n = walk.inner;
        match (walk.steps[1], walk.steps[2]) {
            (1, 1) => {
                for [y_at, a_at, b_at] in walk.runs() {
                    let (a, b) = (&a[a_at..a_at + n], &b[b_at..b_at + n]);
                    for ((y, &a), &b) in y[y_at..y_at + n].iter_mut().zip(a).zip(b) {
                        *y = f.at(a, b);
                    }
                }
            }
            (1, _) => {
                for [y_at, a_at, b_at] in walk.runs() {
                    let (a, b) = (&a[a_at..a_at + n], b[b_at]);
                    for (y, &a) in y[y_at..y_at + n].iter_mut().zip(a) {
                        *y = f.at(a, b);
                    }
                }
            }
            (_, 1) => {
                for [y_at, a_at, b_at] in walk.runs() {
                    let (a, b) = (a[a_at], &b[b_at..b_at + n]);
                    for (y, &b) in y[y_at..y_at + n].iter_mut().zip(b) {
                        *y = f.at(a, b);
                    }
                }
            }
            // Both operands are constant; broadcasting never stretches an axis of every operand.
            _ => {
                for [y_at, a_at, b_at] in walk.runs() {
                    y[y_at..y_at + n].fill(f.at(a[a_at], b[b_at]));
                }
            }
        }
    }
}

/// Select, for any element type.
pub fn select(condition: &TensorLayout, a: &TensorLayout, b: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let strides = [condition, a, b].map(|l| broadcast_strides(&l.shape, &y.shape));
    let walk = Walk::new(&y.shape, [&row_major(&y.shape), &strides[0], &strides[1], &strides[2]], [0; 4])?;
    Some(match y.dtype.size() {
        1 => choose::<u8>(walk),
        2 => choose::<u16>(walk),
        4 => choose::<u32>(walk),
        _ => choose::<u64>(walk),
    })
}

fn choose<T: Pod>(walk: Walk<4>) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let (a, b) = (cast_slice::<u8, T>(inputs[1]), cast_slice::<u8, T>(inputs[2]));
        choose_runs(&walk, inputs[0], a, b, cast_slice_mut::<u8, T>(outputs[0]));
        Ok(())
    })
}

wide! {
    fn choose_runs[T: Copy](walk: &Walk<4>, c: &[u8], a: &[T], b: &[T], y: &mut [T]) {
        let n = walk.inner;
        let [_, c_step, a_step, b_step] = walk.steps.map(|s| s as usize);
        for [y_at, c_at, a_at, b_at] in walk.runs() {
            let y = &mut y[y_at..y_at + n];
            match (c_step, a_step, b_step) {
                (1, 1, 1) => {
                    let (c, a, b) = (&c[c_at..c_at + n], &a[a_at..a_at + n], &b[b_at..b_at + n]);
                    for i in 0..n {
                        y[i] = if c[i] != 0 { a[i] } else { b[i] };
                    }
                }
                (1, 1, 0) => {
                    let (c, a, b) = (&c[c_at..c_at + n], &a[a_at..a_at + n], b[b_at]);
                    for i in 0..n {
                        y[i] = if c[i] != 0 { a[i] } else { b };
                    }
                }
                (1, 0, 1) => {
                    let (c, a, b) = (&c[c_at..c_at + n], a[a_at], &b[b_at..b_at + n]);
                    for i in 0..n {
                        y[i] = if c[i] != 0 { a } else { b[i] };
                    }
                }
                _ => {
                    for i in 0..n {
                        let (a, b) = (a[a_at + i * a_step], b[b_at + i * b_step]);
                        y[i] = if c[c_at + i * c_step] != 0 { a } else { b };
                    }
                }
            }
        }
    }
}
