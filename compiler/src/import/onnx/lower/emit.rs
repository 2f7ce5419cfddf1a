//! Writing core ops: what a [`Scope`] adds to the graph, one method for each op that operators share.

use super::{Dims, Reason, Scope};
use crate::graph::Origin;
use crate::op::dropout::COUNTER;
use crate::op::{
    Binary, Broadcast, Compare, Concat, Constant, Input, Op, Reduce, ReduceKind, Reshape, Select, Unary, Value,
};
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};

/// The most bytes a value may have, known or assumed: a quarter of what 48-bit addresses reach. What is larger is a
/// slip or a trap, and no machine holds it.
const LARGEST: u64 = 1 << 46;

impl Scope<'_> {
    /// Adds a core op and gives its first output.
    pub fn add(&mut self, op: Op, inputs: &[Value]) -> Result<Value, Reason> {
        Ok(self.add_all(op, inputs)?[0])
    }

    /// Adds a core op and gives all its outputs.
    pub fn add_all(&mut self, op: Op, inputs: &[Value]) -> Result<Vec<Value>, Reason> {
        let origin = Origin { source: self.node.name.clone(), module: self.node.module.clone() };
        let node = self.graph.add(op, inputs, &origin)?;
        for fact in &self.graph.node(node).facts {
            if fact.shape.iter().any(|d| d.known().is_some_and(|v| v < 0)) {
                return Err(Reason::Inputs(format!("its result would have the shape {fact}")));
            }
            let known = fact.shape.iter().all(|d| d.known().is_some());
            if known && fact.bytes().is_none_or(|bytes| bytes > LARGEST) {
                return Err(Reason::Large(fact.clone()));
            }
        }
        Ok(self.graph.values(node))
    }

    /// What is known of a value.
    pub fn fact(&self, value: Value) -> Fact {
        self.graph.fact(value).clone()
    }

    /// Adds a constant.
    pub fn constant(&mut self, tensor: Tensor) -> Result<Value, Reason> {
        self.add(Op::Constant(Constant { tensor }), &[])
    }

    /// Adds a number of rank 0.
    pub fn scalar(&mut self, dtype: DType, value: f64) -> Result<Value, Reason> {
        self.constant(Tensor::from_f64(&[], &[value]).cast(dtype))
    }

    /// The counter of dropouts: an input that the source model does not have.
    pub fn counter(&mut self) -> Result<Value, Reason> {
        // No tensor has the empty name.
        if let Some(value) = self.constants.get("") {
            return Ok(*value);
        }
        let op = Op::Input(Input { name: COUNTER.to_string(), fact: Fact::of(DType::I64, &[]) });
        let value = Value { node: self.graph.add(op, &[], &Origin::default())?, output: 0 };
        self.constants.insert(String::new(), value);
        Ok(value)
    }

    /// A size as an `i64` value of rank 0 for the few models that compute with one: the sum of that many ones.
    pub fn size(&mut self, dim: &Dim) -> Result<Value, Reason> {
        let one = self.constant(Tensor::from_i64(&[], &[1]))?;
        let ones = self.add(Op::Broadcast(Broadcast { shape: vec![dim.clone()] }), &[one])?;
        self.add(Op::Reduce(Reduce { kind: ReduceKind::Sum, axes: vec![0], keep: false }), &[ones])
    }

    /// Sizes as a value of their element type.
    pub fn sizes(&mut self, dims: &Dims) -> Result<Value, Reason> {
        let mut parts = Vec::with_capacity(dims.dims.len());
        for dim in &dims.dims {
            let size = match dim.known() {
                Some(value) => self.constant(Tensor::from_i64(&[], &[value]))?,
                None => self.size(dim)?,
            };
            parts.push(if dims.scalar { size } else { self.reshape(size, vec![Dim::Known(1)])? });
        }
        let joined = match parts.as_slice() {
            [one] => *one,
            _ => self.add(Op::Concat(Concat { axis: 0 }), &parts)?,
        };
        self.cast(joined, dims.dtype)
    }

    /// `f(x)`.
    pub fn unary(&mut self, op: Unary, x: Value) -> Result<Value, Reason> {
        self.add(Op::Unary(op), &[x])
    }

    /// `f(a, b)`.
    pub fn binary(&mut self, op: Binary, a: Value, b: Value) -> Result<Value, Reason> {
        self.add(Op::Binary(op), &[a, b])
    }

    /// `f(x, number)`.
    pub fn with_number(&mut self, op: Binary, x: Value, number: f64) -> Result<Value, Reason> {
        let number = self.scalar(self.graph.fact(x).dtype, number)?;
        self.binary(op, x, number)
    }

    /// `a ? b`.
    pub fn compare(&mut self, op: Compare, a: Value, b: Value) -> Result<Value, Reason> {
        self.add(Op::Compare(op), &[a, b])
    }

    /// `condition ? a : b`.
    pub fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Value, Reason> {
        self.add(Op::Select(Select {}), &[condition, a, b])
    }

    /// `x` as another element type; `x` itself when it has it already.
    pub fn cast(&mut self, x: Value, to: DType) -> Result<Value, Reason> {
        if self.graph.fact(x).dtype == to { Ok(x) } else { self.add(Op::Cast(crate::op::Cast { to }), &[x]) }
    }

    /// `x` under another shape; `x` itself when it has it already.
    pub fn reshape(&mut self, x: Value, shape: Vec<Dim>) -> Result<Value, Reason> {
        if self.graph.fact(x).shape == shape { Ok(x) } else { self.add(Op::Reshape(Reshape { shape }), &[x]) }
    }

    /// `x` stretched to a shape; `x` itself when it has it already.
    pub fn broadcast(&mut self, x: Value, shape: Vec<Dim>) -> Result<Value, Reason> {
        if self.graph.fact(x).shape == shape { Ok(x) } else { self.add(Op::Broadcast(Broadcast { shape }), &[x]) }
    }

    /// `x` joined along `axes`.
    pub fn reduce(&mut self, kind: ReduceKind, x: Value, axes: &[usize], keep: bool) -> Result<Value, Reason> {
        self.add(Op::Reduce(Reduce { kind, axes: axes.to_vec(), keep }), &[x])
    }
}
