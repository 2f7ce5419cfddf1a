//! Elementwise functions as types, so that each gets its own loop with the function inlined.

use super::real::Real;

pub trait Function1<T>: Copy + Send + Sync + 'static {
    fn at(self, x: T) -> T;
}

pub trait Function2<T, U>: Copy + Send + Sync + 'static {
    fn at(self, a: T, b: T) -> U;
}

macro_rules! unary {
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

macro_rules! binary {
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

unary! {
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

binary! {
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

macro_rules! comparison {
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

comparison! {
    Equal(a, b) = a == b;
    Less(a, b) = a < b;
    LessEqual(a, b) = a <= b;
}

macro_rules! logical {
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

logical! {
    And(a, b) = (a != 0) & (b != 0);
    Or(a, b) = (a != 0) | (b != 0);
    Xor(a, b) = (a != 0) ^ (b != 0);
}
