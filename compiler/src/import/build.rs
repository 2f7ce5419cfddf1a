//! Graph builder used by all importers: one method per core op that several source operators need.

use crate::graph::{Graph, Origin};
use crate::import::lower_error::LowerReason;
use crate::import::symbolic_batch;
use crate::import::symbolic_batch::Opened;
use crate::op::dropout::COUNTER;
use crate::op::{
    Binary, Broadcast, Compare, Concat, Constant, Input, Iota, Op, Reduce, ReduceKind, Reshape, Select, StopGradient,
    Unary, Value,
};
use crate::tensor::dim::{Bindings, Dim};
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};

/// Maximum size in bytes of a value: a quarter of a 48-bit address space. A larger size is an error in the file or an
/// attack.
const LARGEST: u64 = 1 << 46;

/// Adds the core ops of one source node to a graph.
pub trait Build {
    fn graph(&self) -> &Graph;

    fn graph_mut(&mut self) -> &mut Graph;

    /// The origin recorded for new ops.
    fn origin(&self) -> Origin;

    /// The static value of the batch symbol, if a static export is being converted to a symbolic batch.
    fn frozen(&self) -> Option<&Bindings> {
        None
    }

    /// Values rebuilt with a symbolic batch.
    fn opened(&mut self) -> Option<&mut Opened> {
        None
    }

    /// Adds a core op and returns its first output.
    fn add(&mut self, op: Op, inputs: &[Value]) -> Result<Value, LowerReason> {
        Ok(self.add_all(op, inputs)?[0])
    }

    /// Adds a core op and returns all its outputs.
    fn add_all(&mut self, op: Op, inputs: &[Value]) -> Result<Vec<Value>, LowerReason> {
        let origin = self.origin();
        let inputs = symbolic_batch::agree(self, &op, inputs)?;
        let node = self.graph_mut().add(op, &inputs, &origin)?;
        for fact in &self.graph().node(node).facts {
            if fact.shape.iter().any(|d| d.known().is_some_and(|v| v < 0)) {
                return Err(LowerReason::Inputs(format!("its result would have the shape {fact}")));
            }
            let is_static = fact.shape.iter().all(|d| d.known().is_some());
            if (is_static && fact.bytes().is_none_or(|bytes| bytes > LARGEST)) || fact.is_hollow() {
                return Err(LowerReason::Large(fact.clone()));
            }
        }
        Ok(self.graph().values(node))
    }

    fn fact(&self, value: Value) -> Fact {
        self.graph().fact(value).clone()
    }

    fn constant(&mut self, tensor: Tensor) -> Result<Value, LowerReason> {
        self.add(Op::Constant(Constant { tensor }), &[])
    }

    fn scalar(&mut self, dtype: DType, value: f64) -> Result<Value, LowerReason> {
        self.constant(Tensor::from_f64(&[], &[value]).cast(dtype))
    }

    /// The dropout counter: an extra graph input, shared by all random ops.
    fn counter(&mut self) -> Result<Value, LowerReason> {
        let existing =
            self.graph().ids().find(|id| matches!(&self.graph().node(*id).op, Op::Input(i) if i.name == COUNTER));
        match existing {
            Some(node) => Ok(Value { node, output: 0 }),
            None => {
                let op = Op::Input(Input { name: COUNTER.to_string(), fact: Fact::of(DType::I64, &[]) });
                Ok(Value { node: self.graph_mut().add(op, &[], &Origin::default())?, output: 0 })
            }
        }
    }

    /// A size as a scalar `i64` value, computed as the sum of that many ones.
    fn size(&mut self, dim: &Dim) -> Result<Value, LowerReason> {
        let one = self.constant(Tensor::from_i64(&[], &[1]))?;
        let ones = self.add(Op::Broadcast(Broadcast { shape: vec![dim.clone()] }), &[one])?;
        self.add(Op::Reduce(Reduce { kind: ReduceKind::Sum, axes: vec![0], keep: false }), &[ones])
    }

    fn unary(&mut self, op: Unary, x: Value) -> Result<Value, LowerReason> {
        self.add(Op::Unary(op), &[x])
    }

    fn binary(&mut self, op: Binary, a: Value, b: Value) -> Result<Value, LowerReason> {
        self.add(Op::Binary(op), &[a, b])
    }

    /// The maximum or minimum of tensors. One of rank 0 gets an axis if the other has one: with a number, a tie would
    /// pass no gradient.
    fn extreme(&mut self, op: Binary, a: Value, b: Value) -> Result<Value, LowerReason> {
        let [rank_a, rank_b] = [a, b].map(|value| self.graph().fact(value).rank());
        let a = if rank_a == 0 && rank_b > 0 { self.reshape(a, vec![Dim::Known(1)])? } else { a };
        let b = if rank_b == 0 && rank_a > 0 { self.reshape(b, vec![Dim::Known(1)])? } else { b };
        self.binary(op, a, b)
    }

    fn with_number(&mut self, op: Binary, x: Value, number: f64) -> Result<Value, LowerReason> {
        let dtype = self.graph().fact(x).dtype;
        let number = self.scalar(dtype, number)?;
        self.binary(op, x, number)
    }

    fn compare(&mut self, op: Compare, a: Value, b: Value) -> Result<Value, LowerReason> {
        self.add(Op::Compare(op), &[a, b])
    }

    fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Value, LowerReason> {
        self.add(Op::Select(Select {}), &[condition, a, b])
    }

    /// `x` cast to an element type; `x` itself if it already has it.
    fn cast(&mut self, x: Value, to: DType) -> Result<Value, LowerReason> {
        if self.graph().fact(x).dtype == to { Ok(x) } else { self.add(Op::Cast(crate::op::Cast { to }), &[x]) }
    }

    /// Stops the gradient of a value; integers have none.
    fn stop_gradient(&mut self, x: Value) -> Result<Value, LowerReason> {
        if self.graph().fact(x).dtype.is_float() { self.add(Op::StopGradient(StopGradient {}), &[x]) } else { Ok(x) }
    }

    /// `x` reshaped; `x` itself if it already has the shape.
    fn reshape(&mut self, x: Value, shape: Vec<Dim>) -> Result<Value, LowerReason> {
        if self.graph().fact(x).shape == shape { Ok(x) } else { self.add(Op::Reshape(Reshape { shape }), &[x]) }
    }

    /// `x` broadcast to a shape; `x` itself if it already has it.
    fn broadcast(&mut self, x: Value, shape: Vec<Dim>) -> Result<Value, LowerReason> {
        if self.graph().fact(x).shape == shape { Ok(x) } else { self.add(Op::Broadcast(Broadcast { shape }), &[x]) }
    }

    /// `log Σ e^x`, computed as `m + log Σ e^(x - m)` with the maximum `m` to avoid overflow.
    fn log_sum_exp(&mut self, x: Value, axes: &[usize], keep: bool) -> Result<Value, LowerReason> {
        let largest = self.reduce(ReduceKind::Max, x, axes, true)?;
        let dtype = self.graph().fact(largest).dtype;
        let size = self.unary(Unary::Abs, largest)?;
        let (infinity, zero) = (self.scalar(dtype, f64::INFINITY)?, self.scalar(dtype, 0.0)?);
        let endless = self.compare(Compare::Equal, size, infinity)?;
        // ∞ - ∞ is NaN.
        let offset = self.select(endless, zero, largest)?;
        let shifted = self.binary(Binary::Sub, x, offset)?;
        let exp = self.unary(Unary::Exp, shifted)?;
        let sum = self.reduce(ReduceKind::Sum, exp, axes, keep)?;
        let log = self.unary(Unary::Log, sum)?;
        let shape = self.graph().fact(log).shape.clone();
        let offset = self.reshape(offset, shape)?;
        self.binary(Binary::Add, log, offset)
    }

    /// The `p`-th root of a sum of powers, with gradient 0 at 0. There the root has an infinite gradient, and its
    /// product with the zero gradient of the power would be NaN.
    fn root(&mut self, sum: Value, p: f64) -> Result<Value, LowerReason> {
        let dtype = self.graph().fact(sum).dtype;
        let (zero, one) = (self.scalar(dtype, 0.0)?, self.scalar(dtype, 1.0)?);
        let is_zero = self.compare(Compare::Equal, sum, zero)?;
        let safe_sum = self.select(is_zero, one, sum)?;
        let root = match p {
            2.0 => self.unary(Unary::Sqrt, safe_sum)?,
            p => self.with_number(Binary::Pow, safe_sum, 1.0 / p)?,
        };
        self.select(is_zero, zero, root)
    }

    /// `x` with an axis of size 1 inserted.
    fn unsqueeze(&mut self, x: Value, axis: usize) -> Result<Value, LowerReason> {
        let mut shape = self.graph().fact(x).shape.clone();
        shape.insert(axis, Dim::Known(1));
        self.reshape(x, shape)
    }

    /// `x` with a last axis of size 1.
    fn column(&mut self, x: Value) -> Result<Value, LowerReason> {
        self.unsqueeze(x, self.graph().fact(x).rank())
    }

    /// `x` without the given axis, which has size 1.
    fn squeeze(&mut self, x: Value, axis: usize) -> Result<Value, LowerReason> {
        let mut shape = self.graph().fact(x).shape.clone();
        shape.remove(axis);
        self.reshape(x, shape)
    }

    /// The parts one after another along an axis; a single part itself.
    fn concat(&mut self, parts: &[Value], axis: usize) -> Result<Value, LowerReason> {
        if let [part] = parts { Ok(*part) } else { self.add(Op::Concat(Concat { axis }), parts) }
    }

    /// The parts along a new axis.
    fn stack(&mut self, parts: &[Value], axis: usize) -> Result<Value, LowerReason> {
        let parts = parts.iter().map(|part| self.unsqueeze(*part, axis)).collect::<Result<Vec<_>, _>>()?;
        self.concat(&parts, axis)
    }

    /// `0, 1, …` along `axis`, with size 1 on the other axes of a shape of `rank`.
    fn count(&mut self, rank: usize, axis: usize, size: &Dim) -> Result<Value, LowerReason> {
        let mut shape = vec![Dim::Known(1); rank];
        shape[axis] = size.clone();
        self.add(Op::Iota(Iota { fact: Fact::new(DType::I64, shape), axis }), &[])
    }

    fn reduce(&mut self, kind: ReduceKind, x: Value, axes: &[usize], keep: bool) -> Result<Value, LowerReason> {
        self.add(Op::Reduce(Reduce { kind, axes: axes.to_vec(), keep }), &[x])
    }
}
