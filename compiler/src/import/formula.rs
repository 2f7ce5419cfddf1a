//! Formulas over graph values, written as formulas: `x.greater(0.0).select(x, x * slope)`.
//!
//! Each operation adds its core op at once, from left to right. After the first error nothing is added, and the formula
//! fails with that error. A number becomes a constant where it is read, in the element type of the value it meets.

use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::{Binary, Compare, Op, ReduceKind, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use std::cell::RefCell;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Rem, Sub};

/// The value of a formula in `values`.
pub fn formula<const N: usize>(
    build: &mut impl Build,
    values: [Value; N],
    body: impl for<'f> FnOnce([Expr<'f>; N]) -> Expr<'f>,
) -> Result<Value, LowerReason> {
    let [result] = formulas(build, values, |values| [body(values)])?;
    Ok(result)
}

/// The values of several formulas in `values`.
pub fn formulas<const N: usize, const M: usize>(
    build: &mut impl Build,
    values: [Value; N],
    body: impl for<'f> FnOnce([Expr<'f>; N]) -> [Expr<'f>; M],
) -> Result<[Value; M], LowerReason> {
    let scratch = Scratch { build: RefCell::new(build), error: RefCell::new(None) };
    let results = body(values.map(|value| Expr { scratch: &scratch, value })).map(|result| result.value);
    scratch.error.take().map_or(Ok(results), Err)
}

/// Where the ops of a formula go, and its first error.
struct Scratch<'f> {
    build: RefCell<&'f mut dyn Build>,
    error: RefCell<Option<LowerReason>>,
}

/// A value of a formula.
#[derive(Clone, Copy)]
pub struct Expr<'f> {
    scratch: &'f Scratch<'f>,
    value: Value,
}

macro_rules! functions {
    ($($name:ident $op:ident)*) => {
        $(pub fn $name(self) -> Expr<'f> { self.unary(Unary::$op) })*
    };
}

#[allow(missing_docs)]
impl<'f> Expr<'f> {
    functions! {
        abs Abs  sign Sign  exp Exp  log Log  sqrt Sqrt  rsqrt Rsqrt  sin Sin  cos Cos  sinh Sinh  tanh Tanh  atan Atan
        atanh Atanh  sigmoid Sigmoid  erf Erf  softplus Softplus  floor Floor  ceil Ceil  round Round
    }

    /// The result of `action`; the value itself after an error.
    pub fn then(self, action: impl FnOnce(&mut dyn Build, Value) -> Result<Value, LowerReason>) -> Expr<'f> {
        if self.scratch.error.borrow().is_some() {
            return self;
        }
        let result = action(&mut **self.scratch.build.borrow_mut(), self.value);
        match result {
            Ok(value) => Expr { value, ..self },
            Err(error) => {
                *self.scratch.error.borrow_mut() = Some(error);
                self
            }
        }
    }

    pub fn dtype(self) -> DType {
        self.scratch.build.borrow().graph().fact(self.value).dtype
    }

    pub fn shape(self) -> Vec<Dim> {
        self.scratch.build.borrow().graph().fact(self.value).shape.clone()
    }

    /// A constant of the element type of `self`.
    pub fn number(self, number: f64) -> Expr<'f> {
        self.then(|build, x| build.scalar(build.graph().fact(x).dtype, number))
    }

    pub fn unary(self, op: Unary) -> Expr<'f> {
        self.then(|build, x| build.unary(op, x))
    }

    pub fn binary(self, op: Binary, other: impl Operand<'f>) -> Expr<'f> {
        let other = other.expr(self).value;
        self.then(|build, x| build.binary(op, x, other))
    }

    pub fn squared(self) -> Expr<'f> {
        self * self
    }

    pub fn max(self, other: impl Operand<'f>) -> Expr<'f> {
        self.binary(Binary::Max, other)
    }

    pub fn min(self, other: impl Operand<'f>) -> Expr<'f> {
        self.binary(Binary::Min, other)
    }

    pub fn pow(self, other: impl Operand<'f>) -> Expr<'f> {
        self.binary(Binary::Pow, other)
    }

    /// `self·factor`; `self` if the factor is 1.
    pub fn times(self, factor: f64) -> Expr<'f> {
        if factor == 1.0 { self } else { self * factor }
    }

    /// `self + offset`; `self` if the offset is 0.
    pub fn plus(self, offset: f64) -> Expr<'f> {
        if offset == 0.0 { self } else { self + offset }
    }

    pub fn clamp(self, low: f64, high: f64) -> Expr<'f> {
        self.max(low).min(high)
    }

    pub fn compare(self, op: Compare, other: impl Operand<'f>) -> Expr<'f> {
        let other = other.expr(self).value;
        self.then(|build, x| build.compare(op, x, other))
    }

    pub fn equals(self, other: impl Operand<'f>) -> Expr<'f> {
        self.compare(Compare::Equal, other)
    }

    pub fn less(self, other: impl Operand<'f>) -> Expr<'f> {
        self.compare(Compare::Less, other)
    }

    pub fn at_most(self, other: impl Operand<'f>) -> Expr<'f> {
        self.compare(Compare::LessEqual, other)
    }

    pub fn greater(self, other: impl Operand<'f>) -> Expr<'f> {
        other.expr(self).less(self)
    }

    pub fn at_least(self, other: impl Operand<'f>) -> Expr<'f> {
        other.expr(self).at_most(self)
    }

    pub fn is_nan(self) -> Expr<'f> {
        !self.equals(self)
    }

    /// `self ? yes : no`; at most one of the two is a number.
    pub fn select(self, yes: impl Operand<'f>, no: impl Operand<'f>) -> Expr<'f> {
        let like = yes.given().or(no.given()).unwrap_or(self);
        let (yes, no) = (yes.expr(like).value, no.expr(like).value);
        self.then(|build, condition| build.select(condition, yes, no))
    }

    pub fn cast(self, to: DType) -> Expr<'f> {
        self.then(|build, x| build.cast(x, to))
    }

    pub fn reshape(self, shape: Vec<Dim>) -> Expr<'f> {
        self.then(|build, x| build.reshape(x, shape))
    }

    pub fn broadcast(self, shape: Vec<Dim>) -> Expr<'f> {
        self.then(|build, x| build.broadcast(x, shape))
    }

    pub fn reduce(self, kind: ReduceKind, axes: &[usize], keep: bool) -> Expr<'f> {
        self.then(|build, x| build.reduce(kind, x, axes, keep))
    }

    pub fn sum(self, axes: &[usize], keep: bool) -> Expr<'f> {
        self.reduce(ReduceKind::Sum, axes, keep)
    }

    pub fn mean(self, axes: &[usize], keep: bool) -> Expr<'f> {
        self.reduce(ReduceKind::Mean, axes, keep)
    }

    /// See [`Build::root`].
    pub fn root(self, p: f64) -> Expr<'f> {
        self.then(|build, x| build.root(x, p))
    }

    pub fn op(self, op: Op, others: &[Expr<'f>]) -> Expr<'f> {
        let others = others.iter().map(|other| other.value);
        self.then(|build, x| build.add(op, &[x].into_iter().chain(others).collect::<Vec<_>>()))
    }
}

/// What meets a value in a formula: another value, or a number.
pub trait Operand<'f>: Copy {
    fn given(self) -> Option<Expr<'f>>;

    fn expr(self, like: Expr<'f>) -> Expr<'f>;
}

impl<'f> Operand<'f> for Expr<'f> {
    fn given(self) -> Option<Expr<'f>> {
        Some(self)
    }

    fn expr(self, _: Expr<'f>) -> Expr<'f> {
        self
    }
}

impl<'f> Operand<'f> for f64 {
    fn given(self) -> Option<Expr<'f>> {
        None
    }

    fn expr(self, like: Expr<'f>) -> Expr<'f> {
        like.number(self)
    }
}

macro_rules! operators {
    ($($name:ident $method:ident $op:ident)*) => {
        $(
            impl<'f, O: Operand<'f>> $name<O> for Expr<'f> {
                type Output = Expr<'f>;

                fn $method(self, other: O) -> Expr<'f> {
                    self.binary(Binary::$op, other)
                }
            }
        )*
    };
}

operators! { Add add Add  Sub sub Sub  Mul mul Mul  Div div Div  Rem rem Mod  BitAnd bitand And  BitOr bitor Or }

impl<'f> Sub<Expr<'f>> for f64 {
    type Output = Expr<'f>;

    fn sub(self, other: Expr<'f>) -> Expr<'f> {
        other.number(self) - other
    }
}

impl<'f> Neg for Expr<'f> {
    type Output = Expr<'f>;

    fn neg(self) -> Expr<'f> {
        self.unary(Unary::Neg)
    }
}

impl<'f> Not for Expr<'f> {
    type Output = Expr<'f>;

    fn not(self) -> Expr<'f> {
        self.unary(Unary::Not)
    }
}
