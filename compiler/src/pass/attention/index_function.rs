//! Values that are known functions of an element's index: one number, an affine function, or two numbers on the two
//! sides of a hyperplane. A causal mask is of the last kind, however an exporter computes it.

use crate::graph::Graph;
use crate::op::sample::try_run;
use crate::op::table::rule;
use crate::op::{Binary, Compare, NodeId, Op, Unary, Value};
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};
use std::collections::HashMap;

/// Depth of the graph that is looked at.
const DEPTH: usize = 48;

/// Elements of a constant that is compared.
const ELEMENTS: usize = 1 << 24;

/// Integers up to here are exact in `f64`.
const EXACT: f64 = (1u64 << 53) as f64;

#[derive(Clone, Debug, PartialEq)]
pub enum IndexFunction {
    Number(f64),
    /// `start + Σ steps·index`, all integers.
    Affine {
        steps: Vec<i64>,
        start: i64,
    },
    /// `low` where `Σ steps·index ≤ most`, else `high`. The first step other than 0 is negative.
    Split {
        steps: Vec<i64>,
        bound: i64,
        low: f64,
        high: f64,
    },
}

use IndexFunction::{Affine, Number, Split};

/// The functions of a graph's values, as far as they were asked for.
#[derive(Default)]
pub struct IndexFunctions {
    cache: HashMap<Value, Option<IndexFunction>>,
}

impl IndexFunctions {
    pub fn of(&mut self, graph: &Graph, value: Value) -> Option<IndexFunction> {
        self.lookup(graph, value, DEPTH)
    }

    /// The value of all elements, if it is known and equal.
    pub fn number(&mut self, graph: &Graph, value: Value) -> Option<f64> {
        match self.of(graph, value)? {
            Number(number) => Some(number),
            _ => None,
        }
    }

    fn lookup(&mut self, graph: &Graph, value: Value, depth: usize) -> Option<IndexFunction> {
        if let Some(cached) = self.cache.get(&value) {
            return cached.clone();
        }
        let function = depth.checked_sub(1).and_then(|depth| self.derive(graph, value, depth));
        let function = function.map(|f| f.normalise(graph.fact(value)));
        self.cache.insert(value, function.clone());
        function
    }

    fn derive(&mut self, graph: &Graph, value: Value, depth: usize) -> Option<IndexFunction> {
        let node = graph.node(value.node);
        let fact = graph.fact(value);
        match &node.op {
            Op::Iota(iota) => {
                let mut steps = vec![0; fact.rank()];
                steps[iota.axis] = 1;
                return Some(Affine { steps, start: 0 });
            }
            Op::Constant(constant) => return constant_function(&constant.tensor),
            _ => {}
        }
        let inputs = graph.inputs(value.node);
        let is_movement = matches!(
            node.op,
            Op::Broadcast(_) | Op::Reshape(_) | Op::Transpose(_) | Op::Slice(_) | Op::StopGradient(_) | Op::Cast(_)
        );
        let is_elementwise = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select(_));
        if !is_movement && !is_elementwise {
            return None;
        }
        let mut functions = Vec::with_capacity(inputs.len());
        for input in &inputs {
            functions.push(self.lookup(graph, *input, depth)?);
        }
        match (&node.op, functions.as_slice()) {
            (Op::StopGradient(_), [x]) => Some(x.clone()),
            (Op::Broadcast(_), [x]) => Some(x.clone().of_rank(fact.rank())),
            (Op::Reshape(_), [x]) => x.reshaped(graph.fact(inputs[0]), fact),
            (Op::Transpose(op), [x]) => Some(x.map_steps(|steps| op.perm.iter().map(|axis| steps[*axis]).collect())),
            (Op::Slice(op), [x]) => {
                let begin: Option<Vec<i64>> = op.begin.iter().map(|d| d.known()).collect();
                x.sliced(&begin?, &op.step)
            }
            (Op::Cast(_), [Affine { .. }]) => {
                let is_exact = matches!(fact.dtype, DType::I64 | DType::F64) || (is_small(fact) && is_wide(fact.dtype));
                is_exact.then(|| functions[0].clone())
            }
            _ => {
                let aligned: Vec<IndexFunction> = functions.into_iter().map(|f| f.of_rank(fact.rank())).collect();
                let facts: Vec<&Fact> = inputs.iter().map(|input| graph.fact(*input)).collect();
                affine(&node.op, &aligned).or_else(|| pointwise(graph, value.node, &aligned, &facts))
            }
        }
    }
}

/// True for element types whose integers up to 2²⁴ are exact.
fn is_wide(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::I32 | DType::U32 | DType::U64)
}

/// True if every size is known, so that affine functions with small steps stay below 2²⁴.
fn is_small(fact: &Fact) -> bool {
    fact.shape.iter().all(|d| d.known().is_some_and(|size| size < 1 << 20))
}

impl IndexFunction {
    /// Steps of axes of size 1 are 0, so that the function stays the same if they are broadcast.
    fn normalise(self, fact: &Fact) -> IndexFunction {
        let clear_unit_axes = |mut steps: Vec<i64>| {
            steps.iter_mut().zip(&fact.shape).filter(|(_, dim)| dim.is(1)).for_each(|(step, _)| *step = 0);
            steps
        };
        match self {
            Number(number) => Number(number),
            Affine { steps, start } => {
                let steps = clear_unit_axes(steps);
                if steps.iter().all(|s| *s == 0) { Number(start as f64) } else { Affine { steps, start } }
            }
            Split { steps, bound, low, high } => {
                let steps = clear_unit_axes(steps);
                let Some(first) = steps.iter().find(|s| **s != 0) else {
                    return Number(if 0 <= bound { low } else { high });
                };
                if low == high {
                    Number(low)
                } else if *first < 0 {
                    Split { steps, bound, low, high }
                } else {
                    // Σ s·i ≤ m is not Σ (-s)·i ≤ -m - 1.
                    let steps = steps.into_iter().map(|s| -s).collect();
                    Split { steps, bound: bound.saturating_neg().saturating_sub(1), low: high, high: low }
                }
            }
        }
    }

    fn map_steps(&self, steps: impl Fn(&[i64]) -> Vec<i64>) -> IndexFunction {
        let mut moved = self.clone();
        if let Affine { steps: own_steps, .. } | Split { steps: own_steps, .. } = &mut moved {
            *own_steps = steps(own_steps);
        }
        moved
    }

    /// With leading axes, as for broadcasting.
    fn of_rank(self, rank: usize) -> IndexFunction {
        self.map_steps(|steps| [&vec![0; rank.saturating_sub(steps.len())][..], steps].concat())
    }

    /// Through a reshape that only adds or removes axes of size 1.
    fn reshaped(&self, from: &Fact, to: &Fact) -> Option<IndexFunction> {
        if let Number(_) = self {
            return Some(self.clone());
        }
        let axes = |fact: &Fact| (0..fact.rank()).filter(|axis| !fact.shape[*axis].is(1)).collect::<Vec<_>>();
        let (from_axes, to_axes) = (axes(from), axes(to));
        let is_same = from_axes.len() == to_axes.len()
            && from_axes.iter().zip(&to_axes).all(|(o, n)| from.shape[*o] == to.shape[*n]);
        is_same.then(|| {
            self.map_steps(|steps| {
                let mut moved = vec![0; to.rank()];
                from_axes.iter().zip(&to_axes).for_each(|(o, n)| moved[*n] = steps[*o]);
                moved
            })
        })
    }

    fn sliced(&self, begin: &[i64], step: &[usize]) -> Option<IndexFunction> {
        let mut sliced = self.clone();
        if let Affine { steps, .. } | Split { steps, .. } = &mut sliced {
            let mut offset = 0i64;
            for ((own_step, begin), step) in steps.iter_mut().zip(begin).zip(step) {
                offset = offset.checked_add(own_step.checked_mul(*begin)?)?;
                *own_step = own_step.checked_mul(i64::try_from(*step).ok()?)?;
            }
            match &mut sliced {
                Affine { start, .. } => *start = start.checked_add(offset)?,
                Split { bound, .. } => *bound = bound.checked_sub(offset)?,
                Number(_) => {}
            }
        }
        Some(sliced)
    }

    /// As an affine function, if it is one of integers.
    fn as_affine(&self, rank: usize) -> Option<(Vec<i64>, i64)> {
        match self {
            Affine { steps, start } => Some((steps.clone(), *start)),
            Number(n) if n.fract() == 0.0 && n.abs() < EXACT => Some((vec![0; rank], *n as i64)),
            _ => None,
        }
    }

    /// The values on and below the diagonal of the last two axes, and above it, if these are all that differ.
    pub fn causal(&self) -> Option<(f64, f64)> {
        let Split { steps, bound, low, high } = self else { return None };
        let [lead @ .., row, column] = steps.as_slice() else { return None };
        let is_diagonal = lead.iter().all(|s| *s == 0) && (*row, *column) == (-1, 1) && *bound == 0;
        is_diagonal.then_some((*low, *high))
    }
}

/// Sums and comparisons of affine functions.
fn affine(op: &Op, inputs: &[IndexFunction]) -> Option<IndexFunction> {
    let rank = inputs.iter().find_map(|f| if let Affine { steps, .. } = f { Some(steps.len()) } else { None })?;
    let sum = |(a, start): (Vec<i64>, i64), (b, b_start): (Vec<i64>, i64), sign: i64| {
        let steps: Option<Vec<i64>> = a.iter().zip(&b).map(|(a, b)| a.checked_add(b.checked_mul(sign)?)).collect();
        Some((steps?, start.checked_add(b_start.checked_mul(sign)?)?))
    };
    let to_affine = |(steps, start): (Vec<i64>, i64)| Affine { steps, start };
    match (op, inputs) {
        (Op::Unary(Unary::Neg), [x]) => sum((vec![0; rank], 0), x.as_affine(rank)?, -1).map(to_affine),
        (Op::Binary(Binary::Add), [a, b]) => sum(a.as_affine(rank)?, b.as_affine(rank)?, 1).map(to_affine),
        (Op::Binary(Binary::Sub), [a, b]) => sum(a.as_affine(rank)?, b.as_affine(rank)?, -1).map(to_affine),
        (Op::Compare(compare), [a, b]) => {
            let (steps, start) = sum(a.as_affine(rank)?, b.as_affine(rank)?, -1)?;
            let bound = match compare {
                Compare::LessEqual => start.checked_neg()?,
                Compare::Less => start.checked_neg()?.checked_sub(1)?,
                Compare::Equal => return None,
            };
            Some(Split { steps, bound, low: 1.0, high: 0.0 })
        }
        _ => None,
    }
}

/// An elementwise op of numbers, and of functions with one hyperplane.
fn pointwise(graph: &Graph, id: NodeId, inputs: &[IndexFunction], facts: &[&Fact]) -> Option<IndexFunction> {
    let mut plane: Option<(&Vec<i64>, i64)> = None;
    for input in inputs {
        match input {
            Affine { .. } => return None,
            Number(_) => {}
            Split { steps, bound, .. } => match plane {
                Some(plane_of_input) if plane_of_input != (steps, *bound) => return None,
                _ => plane = Some((steps, *bound)),
            },
        }
    }
    let evaluate_side = |is_low: bool| {
        let scalar = |(input, fact): (&IndexFunction, &&Fact)| {
            let number = match input {
                Number(number) => *number,
                Split { low, high, .. } => {
                    if is_low {
                        *low
                    } else {
                        *high
                    }
                }
                Affine { .. } => return None,
            };
            let is_exact = fact.dtype.is_float() || number.abs() < EXACT;
            is_exact.then(|| Tensor::from_f64(&[], &[number]).cast(fact.dtype))
        };
        let scalars: Option<Vec<Tensor>> = inputs.iter().zip(facts).map(scalar).collect();
        let outputs = try_run(rule(&graph.node(id).op), &scalars?).ok()?;
        outputs.first().map(|t| t.to_f64()[0])
    };
    Some(match plane {
        None => Number(evaluate_side(true)?),
        Some((steps, bound)) => {
            Split { steps: steps.clone(), bound, low: evaluate_side(true)?, high: evaluate_side(false)? }
        }
    })
}

/// A constant of equal numbers, of a range of integers along one axis, or of two numbers on the sides of a diagonal.
fn constant_function(tensor: &Tensor) -> Option<IndexFunction> {
    if tensor.is_empty() || tensor.len() > ELEMENTS {
        return None;
    }
    let (values, shape) = (tensor.to_f64(), tensor.shape());
    if values.iter().all(|v| *v == values[0]) {
        return Some(Number(values[0]));
    }
    let axes: Vec<usize> = (0..shape.len()).filter(|axis| shape[*axis] > 1).collect();
    match axes[..] {
        [axis] => {
            let step = values[1] - values[0];
            let exact = |v: f64| v.fract() == 0.0 && v.abs() < EXACT;
            let is_range = values.windows(2).all(|w| w[1] - w[0] == step) && exact(values[0]) && exact(step);
            let mut steps = vec![0; shape.len()];
            steps[axis] = step as i64;
            is_range.then_some(Affine { steps, start: values[0] as i64 })
        }
        [row, column] => {
            let (m, n) = (shape[row], shape[column]);
            let (low, high) = (values[(m - 1) * n], values[n - 1]);
            // The diagonal is where the first row changes, or the first row that begins with the lower number.
            let bound = match values[..n].iter().take_while(|v| **v == low).count() {
                0 => -i64::try_from(values.chunks(n).take_while(|row| row[0] == high).count()).ok()?,
                count => i64::try_from(count).ok()? - 1,
            };
            let value = |i: usize, j: usize| if j as i64 - i as i64 <= bound { low } else { high };
            let is_split = low != high && values.iter().enumerate().all(|(at, v)| *v == value(at / n, at % n));
            let mut steps = vec![0; shape.len()];
            (steps[row], steps[column]) = (-1, 1);
            is_split.then_some(Split { steps, bound, low, high })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Origin, Writer};
    use crate::op::{Broadcast, Cast, Constant, Emit, Iota, Reshape, Select, Slice};
    use crate::tensor::dim::Dim;

    fn function(build: impl FnOnce(&mut Writer<'_>) -> Value) -> Option<IndexFunction> {
        let mut graph = Graph::new("index");
        let value = build(&mut Writer { graph: &mut graph, origin: Origin::default() });
        IndexFunctions::default().of(&graph, value)
    }

    fn range(out: &mut Writer<'_>, shape: [i64; 2], axis: usize) -> Value {
        let fact = Fact::new(DType::I64, shape.map(Dim::Known).to_vec());
        out.emit(Op::Iota(Iota { fact, axis }), &[])
    }

    fn scalar(out: &mut Writer<'_>, value: i64) -> Value {
        out.emit(Op::Constant(Constant { tensor: Tensor::from_i64(&[], &[value]) }), &[])
    }

    #[test]
    fn comparisons_of_ranges_are_causal_only_on_the_main_diagonal() {
        let compared = |op: Compare, rows_first: bool, offset: i64| {
            function(|out| {
                let (i, j) = (range(out, [6, 1], 0), range(out, [1, 8], 1));
                let offset = scalar(out, offset);
                let i = out.emit(Op::Binary(Binary::Add), &[i, offset]);
                out.emit(Op::Compare(op), &if rows_first { [i, j] } else { [j, i] })
            })
            .unwrap()
            .causal()
        };
        assert_eq!(compared(Compare::LessEqual, false, 0), Some((1.0, 0.0)));
        assert_eq!(compared(Compare::Less, true, 0), Some((0.0, 1.0)));
        assert_eq!(compared(Compare::Less, false, 1), Some((1.0, 0.0)));
        assert_eq!(compared(Compare::LessEqual, true, 1), Some((0.0, 1.0)));
        assert_eq!(compared(Compare::LessEqual, true, 0), None);
        assert_eq!(compared(Compare::Less, false, 0), None);
        assert_eq!(compared(Compare::LessEqual, false, 2), None);
    }

    #[test]
    fn an_additive_mask_is_followed_through_its_arithmetic() {
        // -1e9 · float(j > i), with j from a vector, broadcast to [1, 1, 4, 4].
        let mask = function(|out| {
            let i = range(out, [4, 1], 0);
            let fact = Fact::of(DType::I64, &[8]);
            let j = out.emit(Op::Iota(Iota { fact, axis: 0 }), &[]);
            let (begin, end) = (vec![Dim::Known(0)], vec![Dim::Known(4)]);
            let j = out.emit(Op::Slice(Slice { begin, end, step: vec![1] }), &[j]);
            let shape = [1, 4].map(Dim::Known).to_vec();
            let j = out.emit(Op::Reshape(Reshape { shape }), &[j]);
            let hidden = out.emit(Op::Compare(Compare::Less), &[i, j]);
            let hidden = out.emit(Op::Cast(Cast { to: DType::F32 }), &[hidden]);
            let low = out.emit(crate::op::unary::scalar(DType::F32, -1e9), &[]);
            let mask = out.emit(Op::Binary(Binary::Mul), &[hidden, low]);
            out.emit(Op::Broadcast(Broadcast { shape: [1, 1, 4, 4].map(Dim::Known).to_vec() }), &[mask])
        });
        assert_eq!(mask.unwrap().causal(), Some((0.0, -1e9)));
    }

    #[test]
    fn constants_are_compared_with_every_element() {
        let function_of = |shape: &[usize], values: &[f64]| {
            let tensor = Tensor::from_f64(shape, values);
            function(|out| out.emit(Op::Constant(Constant { tensor }), &[]))
        };
        let causal = function_of(&[1, 3, 3], &[0., -9., -9., 0., 0., -9., 0., 0., 0.]);
        assert_eq!(causal.unwrap().causal(), Some((0.0, -9.0)));
        assert_eq!(function_of(&[3, 3], &[0., -9., -9., 0., 0., -9., 0., -9., 0.]), None);
        let shifted = function_of(&[2, 3], &[1., 1., 0., 1., 1., 1.]).unwrap();
        assert_eq!(shifted, Split { steps: vec![-1, 1], bound: 1, low: 1.0, high: 0.0 });
        let lower = function_of(&[3, 2], &[0., 0., 1., 0., 1., 1.]).unwrap();
        assert_eq!(lower, Split { steps: vec![-1, 1], bound: -1, low: 1.0, high: 0.0 });
        assert_eq!(function_of(&[3], &[2., 4., 6.]), Some(Affine { steps: vec![2], start: 2 }));
        assert_eq!(function_of(&[2, 2], &[7.0; 4]), Some(Number(7.0)));
    }

    #[test]
    fn what_depends_on_data_is_no_function_of_the_index() {
        let mask = function(|out| {
            let fact = Fact::of(DType::I64, &[4, 4]);
            let x = out.emit(Op::Input(crate::op::Input { name: "x".into(), fact }), &[]);
            let i = range(out, [4, 1], 0);
            out.emit(Op::Compare(Compare::LessEqual), &[x, i])
        });
        assert_eq!(mask, None);
        let square = function(|out| {
            let i = range(out, [4, 1], 0);
            let visible = out.emit(Op::Compare(Compare::Equal), &[i, i]);
            out.emit(Op::Select(Select {}), &[visible, i, i])
        });
        assert_eq!(square, None);
    }
}
