//! Elementwise ops: unary, binary, compare, select. Casts are in `cast`.

use super::real::Real;
use super::walk::{Walk, broadcast_strides, row_major};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use compiler::op::{Binary, Compare, Unary};
use compiler::tensor::DType;

/// An elementwise function as a type, so that each gets its own loop with the function inlined.
trait Function1<T>: Copy + Send + Sync + 'static {
    fn at(self, x: T) -> T;
}

trait Function2<T, U>: Copy + Send + Sync + 'static {
    fn at(self, a: T, b: T) -> U;
}

trait Ordered: Pod + PartialOrd {}

impl<T: Pod + PartialOrd> Ordered for T {}

/// Defines functions whose operands have one type, and `$kernel`, which makes the kernel of an op with `$make`.
macro_rules! functions {
    (
        $kernel:ident<T: $bound:ident>($op:ident, $shape:ty) = $make:expr;
        $function:path, $operand:ty => $result:ty;
        $($(#[$doc:meta])* $name:ident($($x:ident),*) = $value:expr;)*
    ) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        struct $name;

        impl<T: $bound> $function for $name {
            #[inline(always)]
            fn at(self, $($x: $operand),*) -> $result {
                $value
            }
        })*

        fn $kernel<T: $bound>(op: $op, shape: $shape) -> Option<FastKernel> {
            match op {
                $($op::$name => Some($make(shape, $name)),)*
                #[allow(unreachable_patterns)]
                _ => None,
            }
        }
    };
}

functions! {
    unary_real<T: Real>(Unary, ()) = map::<T, _>;
    Function1<T>, T => T;
    Neg(x) = -x;
    Abs(x) = x.abs();
    /// -1, 0 or 1; keeps NaN.
    Sign(x) = if x > T::ZERO { T::ONE } else if x < T::ZERO { -T::ONE } else { x };
    Exp(x) = x.exp();
    Log(x) = x.ln();
    Sqrt(x) = x.sqrt();
    Rsqrt(x) = T::ONE / x.sqrt();
    Reciprocal(x) = T::ONE / x;
    Sin(x) = T::of(x.wide().sin());
    Cos(x) = T::of(x.wide().cos());
    Asin(x) = T::of(x.wide().asin());
    Acos(x) = T::of(x.wide().acos());
    Atan(x) = T::of(x.wide().atan());
    Sinh(x) = T::of(x.wide().sinh());
    Cosh(x) = T::of(x.wide().cosh());
    Tanh(x) = x.tanh();
    Asinh(x) = T::of(x.wide().asinh());
    Acosh(x) = T::of(x.wide().acosh());
    Atanh(x) = T::of(x.wide().atanh());
    Sigmoid(x) = T::ONE / (T::ONE + (-x).exp());
    /// `max(x, 0)`; keeps NaN.
    Relu(x) = if x < T::ZERO { T::ZERO } else { x };
    Erf(x) = x.erf();
    Gelu(x) = T::of(0.5) * x * (T::ONE + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf());
    /// Tanh approximation of [`Gelu`].
    GeluTanh(x) = {
        let inner = T::of(0.797_884_560_802_865_4) * (x + T::of(0.044715) * x * x * x);
        T::of(0.5) * x * (T::ONE + inner.tanh())
    };
    Silu(x) = x / (T::ONE + (-x).exp());
    /// `log(1+e^x)` as `max(x, 0) + log(1+e^-|x|)`.
    Softplus(x) = x.larger(T::ZERO) + (-x.abs()).exp().ln_1p();
    Floor(x) = x.floor();
    Ceil(x) = x.ceil();
    /// Rounds half to even.
    Round(x) = x.round();
}

functions! {
    binary_real<T: Real>(Binary, Walk<3>) = zip::<T, T, _>;
    Function2<T, T>, T => T;
    Add(a, b) = a + b;
    Sub(a, b) = a - b;
    Mul(a, b) = a * b;
    Div(a, b) = a / b;
    /// `a^b`, computed in `f64`.
    Pow(a, b) = {
        // The exponent of most models; a product rounds like the power.
        if b == T::of(2.0) { a * a } else { T::of(a.wide().powf(b.wide())) }
    };
    /// Propagates NaN.
    Max(a, b) = a.larger(b);
    /// Propagates NaN.
    Min(a, b) = a.smaller(b);
}

functions! {
    compare_as<T: Ordered>(Compare, Walk<3>) = zip::<T, u8, _>;
    Function2<T, u8>, T => u8;
    Equal(a, b) = (a == b) as u8;
    Less(a, b) = (a < b) as u8;
    LessEqual(a, b) = (a <= b) as u8;
}

functions! {
    logical<T: Ordered>(Binary, Walk<3>) = zip::<T, u8, _>;
    Function2<T, u8>, T => u8;
    And(a, b) = ((a != T::zeroed()) & (b != T::zeroed())) as u8;
    Or(a, b) = ((a != T::zeroed()) | (b != T::zeroed())) as u8;
    Xor(a, b) = ((a != T::zeroed()) ^ (b != T::zeroed())) as u8;
}

pub fn unary(op: Unary, x: &TensorLayout) -> Option<FastKernel> {
    match x.dtype {
        DType::F32 => unary_real::<f32>(op, ()),
        DType::F64 => unary_real::<f64>(op, ()),
        DType::Bool if op == Unary::Not => Some(FastKernel::new(|inputs, outputs, _| {
            for (y, &x) in outputs[0].iter_mut().zip(inputs[0]) {
                *y = (x == 0) as u8;
            }
        })),
        _ => None,
    }
}

fn map<T: Real, F: Function1<T>>((): (), f: F) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| map_row(cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]), f))
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
        DType::Bool => logical::<u8>(op, walk),
        _ => None,
    }
}

pub fn compare(op: Compare, a: &TensorLayout, b: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let walk = broadcast_walk(a, b, y)?;
    match a.dtype {
        DType::F32 => compare_as::<f32>(op, walk),
        DType::F64 => compare_as::<f64>(op, walk),
        DType::I64 => compare_as::<i64>(op, walk),
        DType::I32 => compare_as::<i32>(op, walk),
        _ => None,
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
