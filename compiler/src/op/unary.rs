//! Elementwise functions of one input.

use super::*;
use crate::op::sharding::elementwise;

impl Named for Unary {
    fn name(&self) -> &'static str {
        match self {
            Unary::Neg => "neg",
            Unary::Abs => "abs",
            Unary::Sign => "sign",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Rsqrt => "rsqrt",
            Unary::Reciprocal => "reciprocal",
            Unary::Sin => "sin",
            Unary::Cos => "cos",
            Unary::Asin => "asin",
            Unary::Acos => "acos",
            Unary::Atan => "atan",
            Unary::Sinh => "sinh",
            Unary::Cosh => "cosh",
            Unary::Tanh => "tanh",
            Unary::Asinh => "asinh",
            Unary::Acosh => "acosh",
            Unary::Atanh => "atanh",
            Unary::Sigmoid => "sigmoid",
            Unary::Relu => "relu",
            Unary::Erf => "erf",
            Unary::Gelu => "gelu",
            Unary::GeluTanh => "gelu_tanh",
            Unary::Silu => "silu",
            Unary::Softplus => "softplus",
            Unary::Floor => "floor",
            Unary::Ceil => "ceil",
            Unary::Round => "round",
            Unary::Not => "not",
        }
    }
}

impl OpRule for Unary {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        let (is_supported, expected) = match self {
            Unary::Not => (!x.dtype.is_float(), "bool or an integer"),
            Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu => (x.dtype != DType::Bool, "a number"),
            _ => (x.dtype.is_float(), "a float"),
        };
        check_dtype(is_supported, "the input", expected, x)?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        // Transcendental functions count as the multiply-adds that a vector library needs.
        let flops = match self {
            Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu | Unary::Not => 1.0,
            Unary::Floor | Unary::Ceil | Unary::Round | Unary::Sqrt | Unary::Rsqrt | Unary::Reciprocal => 2.0,
            _ => 16.0,
        };
        Cost { flops: flops * elements(&outputs[0]), bytes: moved_bytes(inputs, outputs) }
    }

    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (x, y, dy) = (context.inputs[0], context.outputs[0], context.dy());
        vec![Some(match self {
            Unary::Neg => -dy,
            Unary::Abs => dy * x.sign(),
            Unary::Exp => dy * y,
            Unary::Log => dy / x,
            Unary::Sqrt => dy / (y * 2.0),
            Unary::Rsqrt => {
                let (y2, minus_half) = (y * y, y.number(-0.5));
                dy * (y2 * y * minus_half)
            }
            Unary::Reciprocal => dy * -(y * y),
            Unary::Sin => dy * x.cos(),
            Unary::Cos => dy * -x.sin(),
            Unary::Asin => dy / (1.0 - x * x).sqrt(),
            Unary::Acos => -(dy / (1.0 - x * x).sqrt()),
            Unary::Atan => dy / (x * x + 1.0),
            Unary::Sinh => dy * x.cosh(),
            Unary::Cosh => dy * x.sinh(),
            Unary::Asinh => dy / (x * x + 1.0).sqrt(),
            Unary::Acosh => dy / (x * x - 1.0).sqrt(),
            Unary::Atanh => dy / (1.0 - x * x),
            Unary::Tanh => dy * (1.0 - y * y),
            Unary::Sigmoid => dy * (y * (1.0 - y)),
            // Of y, so that x need not be saved.
            Unary::Relu => {
                let zero = y.number(0.0);
                zero.less(y).select(dy, zero)
            }
            // The slope is 2/√π e^(-x²).
            Unary::Erf => dy * ((-(x * x)).exp() * std::f64::consts::FRAC_2_SQRT_PI),
            // The slope is Φ(x) + x φ(x), with Φ(x) = ½(1 + erf(x/√2)) and φ(x) = e^(-x²/2)/√(2π).
            Unary::Gelu => {
                let (half, one) = (x.number(0.5), x.number(1.0));
                let u = x * std::f64::consts::FRAC_1_SQRT_2;
                let cdf = (u.erf() + one) * half;
                let pdf = (-(u * u)).exp() * (1.0 / (2.0 * std::f64::consts::PI).sqrt());
                dy * (cdf + x * pdf)
            }
            // With t = tanh(k x (1 + c x²)), the slope is ½(1+t) + ½x(1-t²)k(1+3cx²).
            Unary::GeluTanh => {
                let (half, one, k, c) = (x.number(0.5), x.number(1.0), x.number(GELU_K), x.number(GELU_C));
                let x2 = x * x;
                let inner = x2 * c + one;
                let kx = x * k;
                let t = (kx * inner).tanh();
                let left = (t + one) * half;
                let sech2 = one - t * t;
                let inner_slope = x2 * (3.0 * GELU_C) + one;
                dy * (left + kx * half * sech2 * inner_slope)
            }
            // With s = sigmoid(x), the slope is s (1 + x (1 - s)).
            Unary::Silu => {
                let (one, s) = (x.number(1.0), x.sigmoid());
                dy * (s * (x * (one - s) + one))
            }
            Unary::Softplus => dy * x.sigmoid(),
            Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Not => return vec![None],
        })]
    }

    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], _: &Group) -> Vec<Strategy> {
        let mut strategies = elementwise(inputs, &outputs[0]);
        if *self == Unary::Neg {
            strategies.push(Strategy::linear(&[true], 1));
        }
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        for i in 0..x.len() {
            match (self, x.dtype.is_float()) {
                (Unary::Not, _) if x.dtype == DType::Bool => y.set_bool(i, !x.bool(i)),
                (Unary::Not, false) => y.set_i64(i, !x.i64(i)),
                (Unary::Neg, false) => y.set_i64(i, x.i64(i).wrapping_neg()),
                (Unary::Abs, false) => y.set_i64(i, x.i64(i).wrapping_abs()),
                (Unary::Sign, false) => y.set_i64(i, x.i64(i).signum()),
                (Unary::Relu, false) => y.set_i64(i, x.i64(i).max(0)),
                _ => y.set_f64(i, apply(*self, x.f64(i))),
            }
        }
        Ok(())
    }
}

const GELU_K: f64 = 0.797_884_560_802_865_4; // √(2/π)
const GELU_C: f64 = 0.044715;

pub fn apply(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sign if x == 0.0 || x.is_nan() => x,
        Unary::Sign => x.signum(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Asin => x.asin(),
        Unary::Acos => x.acos(),
        Unary::Atan => x.atan(),
        Unary::Sinh => x.sinh(),
        Unary::Cosh => x.cosh(),
        Unary::Tanh => x.tanh(),
        Unary::Asinh => x.asinh(),
        Unary::Acosh => x.acosh(),
        Unary::Atanh => x.atanh(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        // Unlike `max`, NaN must propagate, so that a diverged run is visible.
        Unary::Relu if x < 0.0 => 0.0,
        Unary::Relu => x,
        Unary::Erf => erf(x),
        Unary::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Unary::GeluTanh => 0.5 * x * (1.0 + (GELU_K * (x + GELU_C * x * x * x)).tanh()),
        Unary::Silu => x / (1.0 + (-x).exp()),
        // For large x, log(1+e^x) equals x to the last bit, and e^x would overflow.
        Unary::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round_ties_even(),
        Unary::Not => (x == 0.0) as u8 as f64,
    }
}

/// The error function to double precision: Taylor series near zero, continued fraction of `erfc` beyond (Abramowitz and
/// Stegun, 7.1.5 and 7.1.14).
pub fn erf(x: f64) -> f64 {
    let a = x.abs();
    if x.is_nan() || a > 6.0 {
        return if x.is_nan() { x } else { x.signum() };
    }
    if a < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..120 {
            term *= -x * x / n as f64;
            let add = term / (2 * n + 1) as f64;
            sum += add;
            if add.abs() < 1e-18 * sum.abs() {
                break;
            }
        }
        return sum * std::f64::consts::FRAC_2_SQRT_PI;
    }
    let mut fraction = 0.0;
    for k in (1..=80).rev() {
        fraction = k as f64 / 2.0 / (a + fraction);
    }
    let erfc = (-a * a).exp() / (std::f64::consts::PI.sqrt() * (a + fraction));
    x.signum() * (1.0 - erfc)
}

pub fn scalar(dtype: DType, value: f64) -> Op {
    Op::Constant(Constant { tensor: Tensor::from_f64(&[], &[value]).cast(dtype) })
}

pub fn samples() -> Vec<Sample> {
    use Unary::*;
    let smooth =
        [Neg, Exp, Sin, Cos, Atan, Sinh, Cosh, Tanh, Asinh, Sigmoid, Erf, Gelu, GeluTanh, Silu, Softplus, Abs, Relu];
    let positive = [Log, Sqrt, Rsqrt, Reciprocal];
    let steps = [Sign, Floor, Ceil, Round];
    let mixed = Tensor::from_f32(&[2, 5], &[-3.1, -1.5, -0.7, -0.2, 0.4, 0.5, 0.9, 1.7, 2.5, 4.2]);
    let above = Tensor::from_f32(&[2, 3], &[0.1, 0.5, 1.0, 2.0, 3.5, 10.0]);
    let within_one = Tensor::from_f32(&[5], &[-0.9, -0.4, 0.1, 0.3, 0.8]);
    let above_one = Tensor::from_f32(&[3], &[1.2, 2.0, 30.0]);
    let sample = |op, x: &Tensor, smooth: bool| Sample {
        title: "a few numbers",
        op: Op::Unary(op),
        inputs: vec![x.clone()],
        differentiate: if smooth { vec![0] } else { vec![] },
    };
    let mut list: Vec<Sample> = smooth.iter().map(|&op| sample(op, &mixed, true)).collect();
    list.extend(positive.iter().map(|&op| sample(op, &above, true)));
    list.extend([Asin, Acos, Atanh].iter().map(|&op| sample(op, &within_one, true)));
    list.push(sample(Acosh, &above_one, true));
    list.extend(steps.iter().map(|&op| sample(op, &mixed, false)));
    list.push(sample(Not, &Tensor::from_bool(&[3], &[true, false, true]), false));
    for op in [Neg, Not] {
        list.push(sample(op, &Tensor::from_i64(&[2], &[3, -4]), false));
    }
    list.push(sample(Not, &Tensor::from_i64(&[2], &[3, 200]).cast(DType::U8), false));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn erf_is_right_on_both_branches() {
        // Abramowitz and Stegun, table 7.1, and Wolfram Alpha beyond it.
        for (x, y) in [(0.0, 0.0), (0.5, 0.5204998778130465), (2.0, 0.9953222650189527), (3.0, 0.9999779095030014)] {
            assert!((erf(x) - y).abs() < 1e-15, "erf({x}) = {}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
        assert!((erf(2.5 - 1e-12) - erf(2.5 + 1e-12)).abs() < 1e-14);
    }
}
