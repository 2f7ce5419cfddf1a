//! The elementwise functions as types, so that each gets a loop of its own with the function inlined.

use super::real::Real;

/// A function of one number.
pub trait Function1<T>: Copy + Send + Sync + 'static {
    /// Its value at `x`.
    fn at(self, x: T) -> T;
}

/// A function of two values.
pub trait Function2<T, U>: Copy + Send + Sync + 'static {
    /// Its value at `(a, b)`.
    fn at(self, a: T, b: T) -> U;
}

macro_rules! one {
    ($($(#[$doc:meta])* $name:ident($x:ident) = $value:expr;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl<T: Real> Function1<T> for $name {
            #[inline(always)]
            fn at(self, $x: T) -> T {
                $value
            }
        })*
    };
}

macro_rules! two {
    ($($(#[$doc:meta])* $name:ident($a:ident, $b:ident) = $value:expr;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl<T: Real> Function2<T, T> for $name {
            #[inline(always)]
            fn at(self, $a: T, $b: T) -> T {
                $value
            }
        })*
    };
}

one! {
    /// `-x`
    Neg(x) = -x;
    /// `|x|`
    Abs(x) = x.abs();
    /// -1, 0 or 1; NaN stays.
    Sign(x) = if x > T::ZERO { T::ONE } else if x < T::ZERO { -T::ONE } else { x };
    /// `e^x`
    Exp(x) = x.exp();
    /// Natural logarithm.
    Log(x) = x.ln();
    /// `√x`
    Sqrt(x) = x.sqrt();
    /// `1/√x`
    Rsqrt(x) = T::ONE / x.sqrt();
    /// `1/x`
    Reciprocal(x) = T::ONE / x;
    /// `sin x`, through `f64`.
    Sin(x) = T::of(x.wide().sin());
    /// `cos x`, through `f64`.
    Cos(x) = T::of(x.wide().cos());
    /// Arc sine, through `f64`.
    Asin(x) = T::of(x.wide().asin());
    /// Arc cosine, through `f64`.
    Acos(x) = T::of(x.wide().acos());
    /// Arc tangent, through `f64`.
    Atan(x) = T::of(x.wide().atan());
    /// Hyperbolic sine, through `f64`.
    Sinh(x) = T::of(x.wide().sinh());
    /// Hyperbolic cosine, through `f64`.
    Cosh(x) = T::of(x.wide().cosh());
    /// Hyperbolic tangent.
    Tanh(x) = x.tanh();
    /// Area hyperbolic sine, through `f64`.
    Asinh(x) = T::of(x.wide().asinh());
    /// Area hyperbolic cosine, through `f64`.
    Acosh(x) = T::of(x.wide().acosh());
    /// Area hyperbolic tangent, through `f64`.
    Atanh(x) = T::of(x.wide().atanh());
    /// `1/(1+e^-x)`
    Sigmoid(x) = T::ONE / (T::ONE + (-x).exp());
    /// `max(x, 0)`; NaN stays.
    Relu(x) = if x < T::ZERO { T::ZERO } else { x };
    /// Gauss error function.
    Erf(x) = x.erf();
    /// `x·Φ(x)`
    Gelu(x) = T::of(0.5) * x * (T::ONE + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf());
    /// The approximation of [`Gelu`] by `tanh`.
    GeluTanh(x) = {
        let inner = T::of(0.797_884_560_802_865_4) * (x + T::of(0.044715) * x * x * x);
        T::of(0.5) * x * (T::ONE + inner.tanh())
    };
    /// `x·sigmoid(x)`
    Silu(x) = x / (T::ONE + (-x).exp());
    /// `log(1+e^x)` as `max(x, 0) + log(1+e^-|x|)`.
    Softplus(x) = x.larger(T::ZERO) + (-x.abs()).exp().ln_1p();
    /// Largest whole number not above.
    Floor(x) = x.floor();
    /// Smallest whole number not below.
    Ceil(x) = x.ceil();
    /// Nearest whole number, halves to even.
    Round(x) = x.round();
}

two! {
    /// `a + b`
    Add(a, b) = a + b;
    /// `a - b`
    Sub(a, b) = a - b;
    /// `a · b`
    Mul(a, b) = a * b;
    /// `a / b`
    Div(a, b) = a / b;
    /// `a^b`, through `f64`.
    Pow(a, b) = {
        // The exponents of most models; a product rounds as the power does.
        if b == T::of(2.0) { a * a } else { T::of(a.wide().powf(b.wide())) }
    };
    /// The larger; NaN wins.
    Max(a, b) = a.larger(b);
    /// The smaller; NaN wins.
    Min(a, b) = a.smaller(b);
}

macro_rules! question {
    ($($(#[$doc:meta])* $name:ident($a:ident, $b:ident) = $value:expr;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl<T: PartialOrd> Function2<T, u8> for $name {
            #[inline(always)]
            fn at(self, $a: T, $b: T) -> u8 {
                ($value) as u8
            }
        })*
    };
}

question! {
    /// `a == b`
    Equal(a, b) = a == b;
    /// `a < b`
    Less(a, b) = a < b;
    /// `a <= b`
    LessEqual(a, b) = a <= b;
}

macro_rules! truth {
    ($($(#[$doc:meta])* $name:ident($a:ident, $b:ident) = $value:expr;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Function2<u8, u8> for $name {
            #[inline(always)]
            fn at(self, $a: u8, $b: u8) -> u8 {
                ($value) as u8
            }
        })*
    };
}

truth! {
    /// Logical and.
    And(a, b) = (a != 0) & (b != 0);
    /// Logical or.
    Or(a, b) = (a != 0) | (b != 0);
    /// Logical exclusive or.
    Xor(a, b) = (a != 0) ^ (b != 0);
}
