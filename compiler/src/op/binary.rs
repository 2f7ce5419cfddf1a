//! Elementwise functions of two inputs.

use super::broadcast::{broadcast_indices, broadcast_shapes};
use super::*;
use crate::op::sharding::elementwise;

impl Named for Binary {
    fn name(&self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::Pow => "pow",
            Binary::Max => "max",
            Binary::Min => "min",
            Binary::Mod => "mod",
            Binary::And => "and",
            Binary::Or => "or",
            Binary::Xor => "xor",
            Binary::ShiftLeft => "shift_left",
            Binary::ShiftRight => "shift_right",
        }
    }
}

impl OpRule for Binary {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [a, b] = arity(inputs)?;
        let (is_supported, expected) = match self {
            Binary::And | Binary::Or | Binary::Xor => (!a.dtype.is_float(), "bool or an integer"),
            Binary::ShiftLeft | Binary::ShiftRight => (a.dtype.is_integer(), "an integer"),
            _ => (a.dtype != DType::Bool, "a number"),
        };
        check_dtype(is_supported, "the first input", expected, a)?;
        check_like("the second input", b, a, "the first")?;
        Ok(vec![Fact::new(a.dtype, broadcast_shapes(&a.shape, &b.shape)?)])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        // Estimated cost in a vector library, as for unary functions. A power is a logarithm and an exponential.
        let flops = match self {
            Binary::Div => 2.0,
            Binary::Mod => 4.0,
            Binary::Pow => 32.0,
            _ => 1.0,
        };
        Cost { flops: flops * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let [a, b] = *context.inputs else { unreachable!("infer checks the arity") };
        let (y, dy) = (context.outputs[0], context.dy());
        if !a.is_float() {
            return vec![None, None];
        }
        let bits = "bits are not floats, which returned above";
        // Gradients before the sums over broadcast axes.
        let da = context.wanted[0].then(|| match self {
            Binary::Add | Binary::Sub => dy,
            Binary::Mul => dy * b,
            Binary::Div => dy / b,
            // da = b ≠ 0 ? dy b a^(b-1) : 0, so that 0·0^(-1) is no NaN
            Binary::Pow => {
                let (zero, one) = (a.number(0.0), a.number(1.0));
                let slope = b * a.binary(Binary::Pow, b - one);
                dy * b.equal(zero).select(zero, slope)
            }
            Binary::Max | Binary::Min => of_chosen(*self, [a, b], dy, context.wanted[1]),
            // y = a - b ⌊a/b⌋ has slope 1 in a wherever it has a slope
            Binary::Mod => dy,
            Binary::And | Binary::Or | Binary::Xor | Binary::ShiftLeft | Binary::ShiftRight => unreachable!("{bits}"),
        });
        let db = context.wanted[1].then(|| match self {
            Binary::Add => dy,
            Binary::Sub => -dy,
            Binary::Mul => dy * a,
            Binary::Div => -(dy * y / b),
            // db = a > 0 ? dy y log(a) : 0; elsewhere the logarithm is NaN or infinite
            Binary::Pow => {
                let zero = a.number(0.0);
                let slope = y * a.log();
                dy * zero.less(a).select(slope, zero)
            }
            Binary::Max | Binary::Min => of_chosen(*self, [b, a], dy, context.wanted[0]),
            Binary::Mod => -(dy * (a / b).floor()),
            Binary::And | Binary::Or | Binary::Xor | Binary::ShiftLeft | Binary::ShiftRight => unreachable!("{bits}"),
        });
        vec![da.map(|d| d.sum_to(a)), db.map(|d| d.sum_to(b))]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = elementwise(inputs, &outputs[0]);
        let float = outputs[0].dtype.is_float();
        let terms: &[[bool; 2]] = match self {
            Binary::Add | Binary::Sub => &[[true, true]],
            Binary::Mul if float => &[[true, false], [false, true]],
            Binary::Div if float => &[[true, false]],
            _ => &[],
        };
        strategies.extend(terms.iter().map(|terms| Strategy::linear(terms, 1)));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (a, b, y) = (&inputs[0], &inputs[1], &mut outputs[0]);
        for (i, (ia, ib)) in broadcast_indices(a.shape, y.shape).zip(broadcast_indices(b.shape, y.shape)).enumerate() {
            match a.dtype {
                DType::Bool => y.set_bool(i, logic(*self, a.bool(ia), b.bool(ib))),
                DType::U64 => y.set_i64(i, apply_u64(*self, a.i64(ia) as u64, b.i64(ib) as u64) as i64),
                d if d.is_float() => y.set_f64(i, apply(*self, a.f64(ia), b.f64(ib))),
                d if matches!(self, Binary::ShiftLeft | Binary::ShiftRight) => {
                    y.set_i64(i, shift(*self, d, a.i64(ia), b.i64(ib)));
                }
                _ => y.set_i64(i, apply_i64(*self, a.i64(ia), b.i64(ib))),
            }
        }
        Ok(())
    }
}

/// The gradient of `own` in [`Binary::Max`] or [`Binary::Min`]: `dy` where it is chosen. On a tie both operands get half,
/// as in PyTorch's `maximum`, but none with a number, as in its `clamp`, `relu6` and `hardswish`.
fn of_chosen<'b>(op: Binary, [own, other]: [Expr<'b>; 2], dy: Expr<'b>, is_trained: bool) -> Expr<'b> {
    let [low, high] = if op == Binary::Max { [other, own] } else { [own, other] };
    let is_number = !is_trained && other.fact().rank() == 0;
    let zero = dy.number(0.0);
    let wins = low.compare(if is_number { Compare::Less } else { Compare::LessEqual }, high);
    let gradient = wins.select(dy, zero);
    if is_number {
        return gradient;
    }
    let shared = gradient * 0.5;
    own.equal(other).select(shared, gradient)
}

pub fn apply(op: Binary, a: f64, b: f64) -> f64 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Pow => a.powf(b),
        // Unlike `f64::max`, NaN must propagate, so that a diverged run is visible.
        Binary::Max if a.is_nan() || a >= b => a,
        Binary::Min if a.is_nan() || a <= b => a,
        Binary::Max | Binary::Min => b,
        Binary::Mod => match a % b {
            0.0 => 0.0f64.copysign(b),
            rest if (rest < 0.0) != (b < 0.0) => rest + b,
            rest => rest,
        },
        // Bitwise operators are undefined on floats.
        Binary::And | Binary::Or | Binary::Xor => logic(op, a != 0.0, b != 0.0) as u8 as f64,
        Binary::ShiftLeft | Binary::ShiftRight => f64::NAN,
    }
}

/// The function on integers. Overflow wraps; quotient and remainder of a division by zero are 0.
pub fn apply_i64(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div if b == 0 => 0,
        Binary::Div => a.wrapping_div(b),
        // 1/a^|b| truncates to 0 unless a is 1 or -1.
        Binary::Pow if b < 0 => match a {
            1 => 1,
            -1 => 1 - 2 * (b & 1),
            _ => 0,
        },
        Binary::Pow => power(a as u64, b as u64) as i64,
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::Mod if b == 0 => 0,
        Binary::Mod => match a.wrapping_rem(b) {
            rest if rest != 0 && (rest < 0) != (b < 0) => rest + b,
            rest => rest,
        },
        Binary::And => a & b,
        Binary::Or => a | b,
        Binary::Xor => a ^ b,
        Binary::ShiftLeft | Binary::ShiftRight => shift(op, DType::I64, a, b),
    }
}

/// Shifts `a`, a number of `dtype` extended to 64 bits, by `b` bits.
fn shift(op: Binary, dtype: DType, a: i64, b: i64) -> i64 {
    let bits = u32::try_from(b).ok().filter(|&b| (b as usize) < 8 * dtype.size());
    match (op, bits) {
        (Binary::ShiftLeft, Some(bits)) => a << bits,
        (Binary::ShiftLeft, None) => 0,
        (_, Some(bits)) if dtype == DType::U64 => (a as u64 >> bits) as i64,
        (_, Some(bits)) => a >> bits,
        (_, None) if dtype == DType::U64 => 0,
        (_, None) => a >> 63,
    }
}

/// [`apply_i64`] for `u64`.
pub fn apply_u64(op: Binary, a: u64, b: u64) -> u64 {
    match op {
        Binary::Div => a.checked_div(b).unwrap_or(0),
        Binary::Mod => a.checked_rem(b).unwrap_or(0),
        Binary::Pow => power(a, b),
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::ShiftLeft | Binary::ShiftRight => shift(op, DType::U64, a as i64, b as i64) as u64,
        // These operators do not depend on the sign.
        _ => apply_i64(op, a as i64, b as i64) as u64,
    }
}

fn logic(op: Binary, a: bool, b: bool) -> bool {
    match op {
        Binary::And => a && b,
        Binary::Or => a || b,
        _ => a != b,
    }
}

/// `base^exponent` modulo 2⁶⁴, also valid for two's complement.
fn power(mut base: u64, mut exponent: u64) -> u64 {
    let mut product = 1u64;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product = product.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        exponent >>= 1;
    }
    product
}

pub fn samples() -> Vec<Sample> {
    use Binary::*;
    let sample = |title, op, a: &Tensor, b: &Tensor| Sample::new(title, Op::Binary(op), vec![a.clone(), b.clone()]);
    let a = Tensor::from_f32(&[2, 3], &[1.5, -2.3, 0.7, 3.1, -0.4, 2.2]);
    let b = Tensor::from_f32(&[2, 3], &[-0.9, 1.1, 2.6, 0.8, -1.7, 3.4]);
    let row = Tensor::from_f32(&[3], &[0.6, -1.2, 2.9]);
    let column = Tensor::from_f32(&[2, 1], &[1.9, -0.75]);
    let number = Tensor::from_f32(&[], &[1.3]);
    let bases = Tensor::from_f32(&[2, 3], &[0.5, 1.2, 2.0, 3.5, 0.1, 1.0]);
    let dividends = Tensor::from_i64(&[6], &[7, -7, 7, -7, 6, i64::MIN]);
    let divisors = Tensor::from_i64(&[6], &[2, 2, -2, -2, 0, -1]);
    let large = Tensor::from_i64(&[2], &[-1, 5]).cast(DType::U64);
    let small = Tensor::from_i64(&[2], &[2, 7]).cast(DType::U64);
    let (bytes, wide_bytes) =
        (Tensor::from_i64(&[3], &[250, 3, 9]).cast(DType::U8), Tensor::from_i64(&[3], &[10, 7, 0]));
    let wide_bytes = wide_bytes.cast(DType::U8);
    let (p, q) = ([true, true, false, false], [true, false, true, false]);
    let (p, q) = (Tensor::from_bool(&[2, 2], &p), Tensor::from_bool(&[2, 2], &q));

    let mut list = Vec::new();
    for op in [Add, Sub, Mul, Div, Max, Min, Mod] {
        list.push(sample("equal shapes", op, &a, &b));
        list.push(sample("a row on the right", op, &a, &row));
        list.push(sample("a column on the left", op, &column, &a));
        list.push(sample("both stretched", op, &column, &row));
        list.push(sample("integers", op, &dividends, &divisors));
        list.push(sample("unsigned", op, &large, &small));
        list.push(sample("bytes", op, &bytes, &wide_bytes));
    }
    list.push(sample("two scalars", Mul, &number, &number));
    list.push(sample("a scalar", Add, &a, &number));
    list.push(sample("nothing", Add, &Tensor::zeros(DType::F32, &[0, 3]), &row));
    list.push(sample("half precision", Mul, &a.cast(DType::F16), &b.cast(DType::F16)));
    list.push(sample("brain floats", Add, &a.cast(DType::Bf16), &row.cast(DType::Bf16)));
    list.push(sample("double precision", Div, &a.cast(DType::F64), &b.cast(DType::F64)));
    list.push(sample("positive bases", Pow, &bases, &b));
    list.push(sample("a base of its own", Pow, &number, &b));
    // An integer exponent, so that a negative base has a power; only the base is differentiable then.
    let square = Sample { differentiate: vec![0], ..sample("a square", Pow, &a, &Tensor::from_f32(&[], &[2.0])) };
    list.push(square);
    list.push(sample(
        "integers",
        Pow,
        &Tensor::from_i64(&[4], &[3, -2, -1, 0]),
        &Tensor::from_i64(&[4], &[4, 3, -3, 0]),
    ));
    for op in [ShiftLeft, ShiftRight] {
        list.push(sample("bits of integers", op, &dividends, &divisors));
        list.push(sample("bits of unsigned", op, &large, &small));
        list.push(sample("bits of bytes", op, &bytes, &wide_bytes));
        list.push(sample("one number of places", op, &dividends, &Tensor::from_i64(&[], &[3])));
    }
    for op in [And, Or, Xor] {
        list.push(sample("bits of integers", op, &dividends, &divisors));
        list.push(sample("bits of unsigned", op, &large, &small));
        list.push(sample("boolean table", op, &p, &q));
        list.push(sample("broadcast booleans", op, &p, &Tensor::from_bool(&[], &[true])));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_has_the_sign_of_the_divisor() {
        // Results of Python's `a % b`.
        for (a, b, remainder) in [(7, 3, 1), (-7, 3, 2), (7, -3, -2), (-7, -3, -1), (6, -3, 0)] {
            assert_eq!(apply_i64(Binary::Mod, a, b), remainder);
            assert_eq!(apply(Binary::Mod, a as f64, b as f64), remainder as f64);
        }
        assert_eq!(apply(Binary::Mod, -1.0, f64::INFINITY), f64::INFINITY);
        assert!(apply(Binary::Mod, 1.0, 0.0).is_nan());
        assert!(apply(Binary::Mod, 6.0, -3.0).is_sign_negative());
    }

    #[test]
    fn integers_never_trap() {
        assert_eq!(apply_i64(Binary::Div, i64::MIN, -1), i64::MIN);
        assert_eq!(apply_i64(Binary::Mod, i64::MIN, -1), 0);
        assert_eq!(apply_i64(Binary::Div, -7, 2), -3);
        assert_eq!((apply_i64(Binary::Div, 5, 0), apply_i64(Binary::Mod, 5, 0)), (0, 0));
        assert_eq!((apply_u64(Binary::Div, 5, 0), apply_u64(Binary::Mod, 5, 0)), (0, 0));
        assert_eq!(apply_u64(Binary::Div, u64::MAX, 2), u64::MAX / 2);
        assert_eq!(apply_u64(Binary::Max, u64::MAX, 2), u64::MAX);
        assert_eq!((apply_i64(Binary::Pow, -1, -3), apply_i64(Binary::Pow, -1, -4)), (-1, 1));
        assert_eq!((apply_i64(Binary::Pow, 2, -1), apply_i64(Binary::Pow, -2, 3)), (0, -8));
        assert_eq!(
            apply_i64(Binary::Pow, 3, i64::MAX),
            3i64.wrapping_pow(u32::MAX).wrapping_mul(power(3, i64::MAX as u64 - u32::MAX as u64) as i64)
        );
    }

    #[test]
    fn bits_are_moved_within_their_type() {
        use Binary::{ShiftLeft, ShiftRight};
        for (op, dtype, a, b, expected) in [
            (ShiftLeft, DType::U8, 16, 1, 32),
            (ShiftLeft, DType::I8, 64, 8, 0),
            (ShiftLeft, DType::I32, 5, -1, 0),
            (ShiftRight, DType::I8, -8, 1, -4),
            (ShiftRight, DType::I8, -8, 8, -1),
            (ShiftRight, DType::I32, 7, -2, 0),
            (ShiftRight, DType::U64, -1, 63, 1),
            (ShiftRight, DType::U64, -1, 64, 0),
        ] {
            assert_eq!(shift(op, dtype, a, b), expected, "{op:?} {dtype} {a} {b}");
        }
        assert_eq!(apply_i64(Binary::Xor, 6, -1), -7);
    }

    #[test]
    fn nan_wins() {
        for op in [Binary::Max, Binary::Min] {
            assert!(apply(op, f64::NAN, 1.0).is_nan() && apply(op, 1.0, f64::NAN).is_nan());
        }
    }
}
