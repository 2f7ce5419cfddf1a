//! Backward and sharding rules as formulas: an operator on an [`Expr`] emits its op.
//!
//! ```text
//! dy * (1.0 - y * y)        emits mul, constant, sub, mul
//! ```
//!
//! Operands are emitted from left to right, then, beside a number, its constant, then the op. Graphs are hashed and
//! printed, so the order of nodes matters; a `let` emits a constant earlier.

use super::unary::scalar;
use super::*;
use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Not, Sub};

/// Where the ops of a formula go; shared by its values.
pub trait Builder {
    fn emit_all(&self, op: Op, inputs: &[Value]) -> Vec<Value>;
    fn fact(&self, value: Value) -> Fact;
}

impl Builder for RefCell<&mut dyn Emit> {
    fn emit_all(&self, op: Op, inputs: &[Value]) -> Vec<Value> {
        self.borrow_mut().emit_all(op, inputs)
    }

    fn fact(&self, value: Value) -> Fact {
        self.borrow().fact(value)
    }
}

#[derive(Clone, Copy)]
pub struct Expr<'b> {
    pub value: Value,
    builder: &'b dyn Builder,
}

/// The values of an expression's inputs or outputs.
pub fn values(list: &[Expr<'_>]) -> Vec<Value> {
    list.iter().map(|x| x.value).collect()
}

/// Emits an op with at least one input.
pub fn emit<'b>(op: Op, inputs: &[Expr<'b>]) -> Expr<'b> {
    emit_all(op, inputs)[0]
}

pub fn emit_all<'b>(op: Op, inputs: &[Expr<'b>]) -> Vec<Expr<'b>> {
    let builder = inputs[0].builder;
    builder.emit_all(op, &values(inputs)).into_iter().map(|value| Expr { value, builder }).collect()
}

impl<'b> Expr<'b> {
    pub fn new(value: Value, builder: &'b dyn Builder) -> Expr<'b> {
        Expr { value, builder }
    }

    pub fn list(values: &[Value], builder: &'b dyn Builder) -> Vec<Expr<'b>> {
        values.iter().map(|value| Expr { value: *value, builder }).collect()
    }

    pub fn fact(self) -> Fact {
        self.builder.fact(self.value)
    }

    pub fn dtype(self) -> DType {
        self.fact().dtype
    }

    pub fn shape(self) -> Vec<Dim> {
        self.fact().shape
    }

    pub fn is_float(self) -> bool {
        self.dtype().is_float()
    }

    /// Emits an op without inputs beside this value.
    pub fn source(self, op: Op) -> Expr<'b> {
        Expr { value: self.builder.emit_all(op, &[])[0], ..self }
    }

    /// A scalar of this value's element type.
    pub fn number(self, value: f64) -> Expr<'b> {
        self.source(scalar(self.dtype(), value))
    }

    /// An `i64` scalar.
    pub fn integer(self, value: i64) -> Expr<'b> {
        self.source(Op::Constant(Constant { tensor: Tensor::from_i64(&[], &[value]) }))
    }

    pub fn then(self, op: Op) -> Expr<'b> {
        emit(op, &[self])
    }

    pub fn binary(self, op: Binary, other: Expr<'b>) -> Expr<'b> {
        emit(Op::Binary(op), &[self, other])
    }

    pub fn compare(self, op: Compare, other: Expr<'b>) -> Expr<'b> {
        emit(Op::Compare(op), &[self, other])
    }

    pub fn equal(self, other: Expr<'b>) -> Expr<'b> {
        self.compare(Compare::Equal, other)
    }

    pub fn less(self, other: Expr<'b>) -> Expr<'b> {
        self.compare(Compare::Less, other)
    }

    /// `a` where this condition is true, else `b`.
    pub fn select(self, a: Expr<'b>, b: Expr<'b>) -> Expr<'b> {
        emit(Op::Select(Select {}), &[self, a, b])
    }

    pub fn cast(self, to: DType) -> Expr<'b> {
        self.then(Op::Cast(Cast { to }))
    }

    /// The value in the element type of `other`; itself if it has it.
    pub fn like(self, other: Expr<'b>) -> Expr<'b> {
        let to = other.dtype();
        if self.dtype() == to { self } else { self.cast(to) }
    }

    pub fn reshape(self, shape: Vec<Dim>) -> Expr<'b> {
        self.then(Op::Reshape(Reshape { shape }))
    }

    pub fn broadcast(self, shape: Vec<Dim>) -> Expr<'b> {
        self.then(Op::Broadcast(Broadcast { shape }))
    }

    pub fn reduce(self, kind: ReduceKind, axes: Vec<usize>, keep: bool) -> Expr<'b> {
        self.then(Op::Reduce(Reduce { kind, axes, keep }))
    }

    /// The scalar sum of all elements.
    pub fn sum(self) -> Expr<'b> {
        self.reduce(ReduceKind::Sum, (0..self.fact().rank()).collect(), false)
    }

    /// The scalar mean of all elements.
    pub fn mean(self) -> Expr<'b> {
        self.reduce(ReduceKind::Mean, (0..self.fact().rank()).collect(), false)
    }

    pub fn gather(self, axis: usize, indices: Expr<'b>) -> Expr<'b> {
        emit(Op::Gather(Gather { axis }), &[self, indices])
    }

    pub fn all_reduce(self, kind: ReduceKind, devices: usize) -> Expr<'b> {
        self.then(Op::AllReduce(AllReduce { kind, devices }))
    }
}

macro_rules! operators {
    ($($of:ident $method:ident),*) => { $(
        impl<'b> $of for Expr<'b> {
            type Output = Expr<'b>;
            fn $method(self, other: Expr<'b>) -> Expr<'b> {
                self.binary(Binary::$of, other)
            }
        }

        impl<'b> $of<f64> for Expr<'b> {
            type Output = Expr<'b>;
            fn $method(self, other: f64) -> Expr<'b> {
                self.binary(Binary::$of, self.number(other))
            }
        }
    )* };
}

operators!(Add add, Sub sub, Mul mul, Div div);

impl<'b> Sub<Expr<'b>> for f64 {
    type Output = Expr<'b>;

    fn sub(self, other: Expr<'b>) -> Expr<'b> {
        other.number(self) - other
    }
}

impl<'b> Neg for Expr<'b> {
    type Output = Expr<'b>;

    fn neg(self) -> Expr<'b> {
        self.then(Op::Unary(Unary::Neg))
    }
}

impl<'b> Not for Expr<'b> {
    type Output = Expr<'b>;

    fn not(self) -> Expr<'b> {
        self.then(Op::Unary(Unary::Not))
    }
}

macro_rules! functions {
    ($($method:ident $op:ident),*) => {
        impl Expr<'_> { $(
            pub fn $method(self) -> Self {
                self.then(Op::Unary(Unary::$op))
            }
        )* }
    };
}

functions!(
    sign Sign, exp Exp, log Log, sqrt Sqrt, rsqrt Rsqrt, reciprocal Reciprocal, sin Sin, cos Cos, sinh Sinh, cosh Cosh, tanh Tanh,
    sigmoid Sigmoid, erf Erf, softplus Softplus, floor Floor
);

/// Emits a formula of some values.
pub fn formula<const N: usize>(
    out: &mut dyn Emit,
    values: [Value; N],
    of: impl for<'b> FnOnce([Expr<'b>; N]) -> Expr<'b>,
) -> Value {
    let builder = RefCell::new(out);
    of(values.map(|value| Expr::new(value, &builder))).value
}

/// Emits the gradients of an op's inputs by its rule.
pub fn backward(
    rule: &dyn OpRule,
    [inputs, outputs]: [&[Value]; 2],
    d_outputs: &[Option<Value>],
    wanted: &[bool],
    out: &mut dyn Emit,
) -> Vec<Option<Value>> {
    let builder = RefCell::new(out);
    let (inputs, outputs) = (Expr::list(inputs, &builder), Expr::list(outputs, &builder));
    let d_outputs: Vec<Option<Expr<'_>>> = d_outputs.iter().map(|d| d.map(|d| Expr::new(d, &builder))).collect();
    let context = BackwardContext { inputs: &inputs, outputs: &outputs, d_outputs: &d_outputs, wanted };
    rule.backward(context).into_iter().map(|gradient| gradient.map(|gradient| gradient.value)).collect()
}
