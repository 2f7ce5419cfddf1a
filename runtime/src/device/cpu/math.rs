//! Branch-free `f32` functions, so that loops over them vectorise.
//!
//! Errors are within about 2 units in the last place (3 for `tanh` and `erf`). NaN propagates, and overflow, underflow
//! and subnormal results are correct. Polynomials other than series are minimax fits in `f64`.

const LN_2_HIGH: f32 = 0.693_359_4; // 355/512: products with exponents are exact
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// `2^n` for integers `n` in [-126, 127].
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `e^x` as `2^n · e^r` with `|r| ≤ ln 2 / 2`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Clamps to the range of finite non-zero results; the comparisons let NaN pass.
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // Adding 1.5·2²³ rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    // Two factors, since 2^128 and 2^-150 exceed the `f32` range. For NaN they are arbitrary and the product is NaN.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// Natural logarithm: `x = 2^k (1+f)` with `1+f` in [√½, √2). `log(1+f)` is the series of the inverse hyperbolic
/// tangent of `s = f/(2+f)`. It is arranged as `f - s(f - R)`, so that the leading term is exact.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    const ROOT_HALF: u32 = 0x3f35_04f3;
    let shifted = bits.wrapping_sub(ROOT_HALF);
    let k = ((shifted as i32) >> 23) as f32 - if subnormal { 23.0 } else { 0.0 };
    let f = f32::from_bits((shifted & 0x007f_ffff).wrapping_add(ROOT_HALF)) - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let mut series = 2.0 / 9.0;
    series = series * z + 2.0 / 7.0;
    series = series * z + 2.0 / 5.0;
    series = series * z + 2.0 / 3.0;
    let y = k * LN_2_HIGH + (f - (s * (f - z * series) - k * LN_2_LOW));
    let y = if x == f32::INFINITY || x.is_nan() { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 { f32::NAN } else { y }
}

/// `log(1+x)` for `x` in [0, 1]; the last factor corrects the rounding of `1+x`.
#[inline(always)]
pub fn ln_1p(x: f32) -> f32 {
    let u = 1.0 + x;
    let d = u - 1.0;
    let y = ln(u) * (x / if d == 0.0 { 1.0 } else { d });
    if d == 0.0 { x } else { y }
}

/// Hyperbolic tangent: a polynomial below 0.625, `1 - 2/(e^{2x}+1)` beyond.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let mut p = -5.555_784e-3;
    p = p * z + 2.049_854e-2;
    p = p * z - 5.369_283e-2;
    p = p * z + 1.333_078_3e-1;
    p = p * z - 3.333_324_6e-1;
    let near = x + x * (p * z);
    let far = (1.0 - 2.0 / (exp(a + a) + 1.0)).copysign(x);
    if a < 0.625 { near } else { far }
}

/// Gauss error function: a polynomial below 0.93, `1 - e^{p(x)}` with `p` fitted to the logarithm of `erfc` beyond.
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let mut p = -5.892_7e-4;
    p = p * z + 4.974_32e-3;
    p = p * z - 2.675_417e-2;
    p = p * z + 1.128_149e-1;
    p = p * z - 3.761_246_5e-1;
    p = p * z + 1.283_791_5e-1;
    let near = x + x * p;
    // For x ≥ 4, erf rounds to 1.
    let t = if a > 4.0 { 4.0 } else { a };
    let mut q = -2.090_956e-5;
    q = q * t + 4.323_030_4e-4;
    q = q * t - 4.160_527e-3;
    q = q * t + 2.509_149_7e-2;
    q = q * t - 1.082_366_2e-1;
    q = q * t - 0.633_386_7;
    q = q * t - 1.129_495_2;
    q = q * t + 1.705_520_8e-4;
    let far = (1.0 - exp(q)).copysign(x);
    if a < 0.93 { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maximum error of `f` against `reference`, in units in the last place.
    fn max_error(f: fn(f32) -> f32, reference: fn(f64) -> f64, from: f32, to: f32) -> f64 {
        let count = 200_000;
        (0..=count)
            .map(|i| {
                let x = from + (to - from) * (i as f32 / count as f32);
                let (got, want) = (f(x) as f64, reference(x as f64));
                let unit = (want as f32).abs().max(f32::MIN_POSITIVE);
                let unit = (f32::from_bits(unit.to_bits() + 1) - unit) as f64;
                (got - want).abs() / unit
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn every_function_is_within_a_few_last_places() {
        let cases: [(&str, f64, f64); 8] = [
            ("exp", 2.0, max_error(exp, f64::exp, -87.0, 88.7)),
            ("exp near zero", 2.0, max_error(exp, f64::exp, -1.0, 1.0)),
            ("ln", 2.0, max_error(ln, f64::ln, 1e-3, 100.0)),
            ("ln near one", 2.0, max_error(ln, f64::ln, 0.9, 1.1)),
            ("ln_1p", 3.0, max_error(ln_1p, f64::ln_1p, 0.0, 1.0)),
            ("tanh", 3.0, max_error(tanh, f64::tanh, -10.0, 10.0)),
            ("erf", 3.0, max_error(erf, compiler::op::unary::erf, -5.0, 5.0)),
            ("erf near zero", 3.0, max_error(erf, compiler::op::unary::erf, -0.1, 0.1)),
        ];
        for (name, bound, error) in cases {
            assert!(error <= bound, "{name}: {error} last places");
        }
    }

    #[test]
    fn the_edges_are_right() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!((exp(-100.0) as f64 / (-100.0f64).exp() - 1.0).abs() < 0.02, "subnormal {}", exp(-100.0));
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert!((ln(1e-40) as f64 - (1e-40f32 as f64).ln()).abs() < 1e-5);
        assert!(ln(-1.0).is_nan());
        assert_eq!((tanh(30.0), tanh(-30.0), erf(7.0), erf(-7.0)), (1.0, -1.0, 1.0, -1.0));
        for f in [exp, ln, ln_1p, tanh, erf] {
            assert!(f(f32::NAN).is_nan());
        }
    }
}
