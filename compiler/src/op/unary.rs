//! Elementwise functions of one input.

use super::*;
use crate::op::sharding::elementwise;

impl OpRule for Unary {
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

    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = inputs else { return Err(FactError::Arity { expected: 1, got: inputs.len() }) };
        let (is_supported, expected) = match self {
            Unary::Not => (!x.dtype.is_float(), "bool or an integer"),
            Unary::Neg | Unary::Abs | Unary::Sign | Unary::Relu => (x.dtype != DType::Bool, "a number"),
            _ => (x.dtype.is_float(), "a float"),
        };
        if !is_supported {
            return Err(FactError::DType { what: "the input", expected: expected.into(), got: x.dtype });
        }
        Ok(vec![(*x).clone()])
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

    fn backward(&self, context: BackwardContext<'_>, out: &mut dyn Emit) -> Vec<Option<Value>> {
        let (x, y, dy) = (context.inputs[0], context.outputs[0], context.dy());
        let dtype = out.fact(x).dtype;
        let scalar = |out: &mut dyn Emit, v: f64| out.emit(scalar(dtype, v), &[]);
        let mul = |out: &mut dyn Emit, a, b| out.emit(Op::Binary(Binary::Mul), &[a, b]);
        let dx = match self {
            Unary::Neg => out.emit(Op::Unary(Unary::Neg), &[dy]),
            // dx = dy · sign(x)
            Unary::Abs => {
                let sign = out.emit(Op::Unary(Unary::Sign), &[x]);
                mul(out, dy, sign)
            }
            // dx = dy · y
            Unary::Exp => mul(out, dy, y),
            // dx = dy / x
            Unary::Log => out.emit(Op::Binary(Binary::Div), &[dy, x]),
            // dx = dy / (2y)
            Unary::Sqrt => {
                let two = scalar(out, 2.0);
                let twice = mul(out, y, two);
                out.emit(Op::Binary(Binary::Div), &[dy, twice])
            }
            // dx = -½ dy y³
            Unary::Rsqrt => {
                let (y2, half) = (mul(out, y, y), scalar(out, -0.5));
                let y3 = mul(out, y2, y);
                let slope = mul(out, y3, half);
                mul(out, dy, slope)
            }
            // dx = -dy y²
            Unary::Reciprocal => {
                let y2 = mul(out, y, y);
                let slope = out.emit(Op::Unary(Unary::Neg), &[y2]);
                mul(out, dy, slope)
            }
            Unary::Sin => {
                let cos = out.emit(Op::Unary(Unary::Cos), &[x]);
                mul(out, dy, cos)
            }
            Unary::Cos => {
                let sin = out.emit(Op::Unary(Unary::Sin), &[x]);
                let slope = out.emit(Op::Unary(Unary::Neg), &[sin]);
                mul(out, dy, slope)
            }
            // dx = dy / √(1 - x²), negated for arccos
            Unary::Asin | Unary::Acos => {
                let (x2, one) = (mul(out, x, x), scalar(out, 1.0));
                let complement = out.emit(Op::Binary(Binary::Sub), &[one, x2]);
                let root = out.emit(Op::Unary(Unary::Sqrt), &[complement]);
                let slope = out.emit(Op::Binary(Binary::Div), &[dy, root]);
                if *self == Unary::Asin { slope } else { out.emit(Op::Unary(Unary::Neg), &[slope]) }
            }
            // dx = dy / (1 + x²)
            Unary::Atan => {
                let (x2, one) = (mul(out, x, x), scalar(out, 1.0));
                let denominator = out.emit(Op::Binary(Binary::Add), &[x2, one]);
                out.emit(Op::Binary(Binary::Div), &[dy, denominator])
            }
            Unary::Sinh => {
                let cosh = out.emit(Op::Unary(Unary::Cosh), &[x]);
                mul(out, dy, cosh)
            }
            Unary::Cosh => {
                let sinh = out.emit(Op::Unary(Unary::Sinh), &[x]);
                mul(out, dy, sinh)
            }
            // dx = dy / √(x² + 1); dy / √(x² - 1) for arcosh
            Unary::Asinh | Unary::Acosh => {
                let (x2, one) = (mul(out, x, x), scalar(out, 1.0));
                let op = if *self == Unary::Asinh { Binary::Add } else { Binary::Sub };
                let radicand = out.emit(Op::Binary(op), &[x2, one]);
                let root = out.emit(Op::Unary(Unary::Sqrt), &[radicand]);
                out.emit(Op::Binary(Binary::Div), &[dy, root])
            }
            // dx = dy / (1 - x²)
            Unary::Atanh => {
                let (x2, one) = (mul(out, x, x), scalar(out, 1.0));
                let complement = out.emit(Op::Binary(Binary::Sub), &[one, x2]);
                out.emit(Op::Binary(Binary::Div), &[dy, complement])
            }
            // dx = dy (1 - y²)
            Unary::Tanh => {
                let (y2, one) = (mul(out, y, y), scalar(out, 1.0));
                let slope = out.emit(Op::Binary(Binary::Sub), &[one, y2]);
                mul(out, dy, slope)
            }
            // dx = dy y (1 - y)
            Unary::Sigmoid => {
                let one = scalar(out, 1.0);
                let complement = out.emit(Op::Binary(Binary::Sub), &[one, y]);
                let slope = mul(out, y, complement);
                mul(out, dy, slope)
            }
            // dx = y > 0 ? dy : 0; using y means that x need not be saved
            Unary::Relu => {
                let zero = scalar(out, 0.0);
                let on = out.emit(Op::Compare(Compare::Less), &[zero, y]);
                out.emit(Op::Select(Select {}), &[on, dy, zero])
            }
            // dx = dy 2/√π e^(-x²)
            Unary::Erf => {
                let x2 = mul(out, x, x);
                let minus = out.emit(Op::Unary(Unary::Neg), &[x2]);
                let bell = out.emit(Op::Unary(Unary::Exp), &[minus]);
                let factor = scalar(out, std::f64::consts::FRAC_2_SQRT_PI);
                let slope = mul(out, bell, factor);
                mul(out, dy, slope)
            }
            // dx = dy (Φ(x) + x φ(x)), Φ(x) = ½(1 + erf(x/√2)), φ(x) = e^(-x²/2)/√(2π)
            Unary::Gelu => {
                let (half, one) = (scalar(out, 0.5), scalar(out, 1.0));
                let root = scalar(out, std::f64::consts::FRAC_1_SQRT_2);
                let u = mul(out, x, root);
                let erf = out.emit(Op::Unary(Unary::Erf), &[u]);
                let denominator = out.emit(Op::Binary(Binary::Add), &[erf, one]);
                let cdf = mul(out, denominator, half);
                let u2 = mul(out, u, u);
                let minus = out.emit(Op::Unary(Unary::Neg), &[u2]);
                let bell = out.emit(Op::Unary(Unary::Exp), &[minus]);
                let norm = scalar(out, 1.0 / (2.0 * std::f64::consts::PI).sqrt());
                let pdf = mul(out, bell, norm);
                let x_pdf = mul(out, x, pdf);
                let slope = out.emit(Op::Binary(Binary::Add), &[cdf, x_pdf]);
                mul(out, dy, slope)
            }
            // With t = tanh(k(x + cx³)): dx = dy (½(1+t) + ½x(1-t²)k(1+3cx²))
            Unary::GeluTanh => {
                let (half, one) = (scalar(out, 0.5), scalar(out, 1.0));
                let (k, c) = (scalar(out, GELU_K), scalar(out, GELU_C));
                let x2 = mul(out, x, x);
                let cx2 = mul(out, x2, c);
                let denominator = out.emit(Op::Binary(Binary::Add), &[cx2, one]);
                let kx = mul(out, x, k);
                let inner = mul(out, kx, denominator);
                let t = out.emit(Op::Unary(Unary::Tanh), &[inner]);
                let t1 = out.emit(Op::Binary(Binary::Add), &[t, one]);
                let left = mul(out, t1, half);
                let t2 = mul(out, t, t);
                let sech2 = out.emit(Op::Binary(Binary::Sub), &[one, t2]);
                let three_c = scalar(out, 3.0 * GELU_C);
                let cx2x3 = mul(out, x2, three_c);
                let inner_slope = out.emit(Op::Binary(Binary::Add), &[cx2x3, one]);
                let half_kx = mul(out, kx, half);
                let a = mul(out, half_kx, sech2);
                let right = mul(out, a, inner_slope);
                let slope = out.emit(Op::Binary(Binary::Add), &[left, right]);
                mul(out, dy, slope)
            }
            // With s = sigmoid(x): dx = dy s (1 + x (1 - s))
            Unary::Silu => {
                let one = scalar(out, 1.0);
                let s = out.emit(Op::Unary(Unary::Sigmoid), &[x]);
                let complement = out.emit(Op::Binary(Binary::Sub), &[one, s]);
                let x_rest = mul(out, x, complement);
                let denominator = out.emit(Op::Binary(Binary::Add), &[x_rest, one]);
                let slope = mul(out, s, denominator);
                mul(out, dy, slope)
            }
            Unary::Softplus => {
                let s = out.emit(Op::Unary(Unary::Sigmoid), &[x]);
                mul(out, dy, s)
            }
            Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Not => return vec![None],
        };
        vec![Some(dx)]
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
