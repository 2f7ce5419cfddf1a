//! Slicing with steps.

use super::broadcast::{copy_elements, walk};
use super::*;
use crate::tensor::dim::Bindings;
use crate::tensor::view::strides;

impl OpRule for Slice {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        for (what, got) in [("begin", self.begin.len()), ("end", self.end.len()), ("step", self.step.len())] {
            if got != x.rank() {
                return Err(FactError::Rank { what, expected: format!("{}, as the input", x.rank()), got });
            }
        }
        let axes = x.shape.iter().zip(&self.begin).zip(&self.end).zip(&self.step);
        let shape =
            axes.map(|(((size, begin), end), &step)| count(size, begin, end, step)).collect::<Result<_, _>>()?;
        Ok(vec![Fact::new(x.dtype, shape)])
    }

    // Only the selected elements are read.
    fn cost(&self, _: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: 2.0 * moved_bytes(&[], outputs) }
    }

    // dx = dy spread `step` apart from `begin` on, in zeros:
    //   high = size - (begin + (count - 1) step + 1)
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let (x, y) = (context.inputs[0].fact(), context.outputs[0].fact());
        if !x.dtype.is_float() {
            return vec![None];
        }
        let high = (0..x.rank())
            .map(|axis| {
                let spread = spread_size(&y.shape[axis], self.step[axis] - 1)?;
                x.shape[axis].sub(&self.begin[axis])?.sub(&spread)
            })
            .collect::<Result<_, _>>()
            .expect("infer has added up the same dims");
        let interior = self.step.iter().map(|step| step - 1).collect();
        let pad = Pad { low: self.begin.clone(), high, interior, value: 0.0 };
        vec![Some(context.dy().then(Op::Pad(pad)))]
    }

    // Axes that are not sliced, and whole blocks of a block-split axis.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
        let [x] = inputs else { return Vec::new() };
        let mut strategies = vec![Strategy::linear(&[true], outputs.len())];
        for axis in 0..x.rank() {
            let Some(size) = sharding::size(x, axis) else { continue };
            let (begin, end) = (self.begin[axis].known(), self.end[axis].known());
            let (Some(begin), Some(end)) = (begin.map(|at| at as usize), end.map(|at| at as usize)) else { continue };
            let is_full = begin == 0 && end == size;
            if self.step[axis] != 1 || end <= begin {
                continue;
            }
            let block_counts = group.blocks.get(&size).into_iter().flatten().copied();
            for blocks in block_counts.chain(is_full.then_some(1)) {
                let block = size / blocks;
                if block == 0
                    || size % blocks != 0
                    || begin % block != 0
                    || end % block != 0
                    || block % group.devices != 0
                {
                    continue;
                }
                let mut op = self.clone();
                op.begin[axis] = Dim::from(begin / group.devices);
                op.end[axis] = Dim::from(end / group.devices);
                let (input_split, output_split) =
                    (SplitDim { axis, blocks }, SplitDim { axis, blocks: (end - begin) / block });
                strategies.push(Strategy {
                    inputs: vec![Sharding::Split(input_split)],
                    outputs: vec![Sharding::Split(output_split)],
                    local: sharding::Local::Sized(Op::Slice(op)),
                    any_order: false,
                });
            }
        }
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let (x, y) = (&inputs[0], &mut outputs[0]);
        if y.is_empty() {
            return Ok(());
        }
        let x_strides = strides(x.shape);
        let base = origin(&self.begin, x.shape)?;
        // With a single element the step is irrelevant, and may be too large to multiply.
        let step = |axis: usize| if y.shape[axis] > 1 { self.step[axis] } else { 0 };
        let steps: Vec<isize> = (0..x_strides.len()).map(|axis| (x_strides[axis] * step(axis)) as isize).collect();
        let from = walk(base, &steps, y.shape);
        copy_elements(x, y, from);
        Ok(())
    }
}

/// The number of elements `begin, begin+step, … < end` of an axis, after a range check.
fn count(size: &Dim, begin: &Dim, end: &Dim, step: usize) -> Result<Dim, FactError> {
    let span = end.sub(begin)?;
    let negative = |d: &Dim| d.known().is_some_and(|v| v < 0);
    if negative(begin) || negative(&span) || negative(&size.sub(end)?) {
        return Err(FactError::Attribute(format!("elements {begin}..{end} do not exist in an axis of size {size}")));
    }
    let step = i64::try_from(step).ok().filter(|step| *step >= 1);
    let step = step.ok_or_else(|| FactError::Attribute("the step of a slice must be at least 1".into()))?;
    // Rounds up to a multiple of the step. If the quotient is exact, the amount depends only on the constant term,
    // which is the span with all symbols zero.
    let zeros: Bindings = span.symbols().into_iter().map(|symbol| (symbol, 0)).collect();
    let remainder = span.bind(&zeros)?.rem_euclid(step);
    let missing = if remainder == 0 { 0 } else { step - remainder };
    Ok(span.add(&Dim::Known(missing))?.div_exact(&Dim::Known(step))?)
}

/// The extent of `count` elements with `interior` others between neighbours: `count + (count - 1) interior`, or 0 for
/// none. A symbolic count is assumed to be at least 1.
pub fn spread_size(count: &Dim, interior: usize) -> Result<Dim, DimError> {
    if count.is(0) || interior == 0 {
        return Ok(count.clone());
    }
    let interior = Dim::Known(i64::try_from(interior).map_err(|_| DimError::Overflow {
        left: count.to_string(),
        operator: '*',
        right: interior.to_string(),
    })?);
    count.add(&count.sub(&Dim::Known(1))?.mul(&interior)?)
}

/// The flat index of these index attributes in a row-major tensor. Attributes may still be symbolic where the shape is
/// already concrete, as in `seq..seq+1` of a table.
pub fn origin(index: &[Dim], shape: &[usize]) -> Result<usize, KernelError> {
    strides(shape).iter().zip(index).zip(shape).try_fold(0, |sum, ((stride, dim), &size)| {
        let index = dim.bind(&Bindings::new())?;
        let at = usize::try_from(index).ok().filter(|at| *at < size).ok_or(KernelError::Index { index, size })?;
        Ok(sum + at * stride)
    })
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, begin: &[i64], end: &[i64], step: &[usize]| {
        Sample::new(
            title,
            Op::Slice(Slice {
                begin: begin.iter().map(|&d| Dim::from(d)).collect(),
                end: end.iter().map(|&d| Dim::from(d)).collect(),
                step: step.to_vec(),
            }),
            vec![x],
        )
    };
    let seven = || Tensor::from_f32(&[7], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    let table = || Tensor::from_f32(&[3, 4], &[1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.]);
    vec![
        sample("a run", seven(), &[2], &[5], &[1]),
        sample("every second", seven(), &[0], &[7], &[2]),
        sample("every second, last one left", seven(), &[0], &[6], &[2]),
        sample("every third from one", seven(), &[1], &[7], &[3]),
        sample("a step beyond the end", seven(), &[3], &[7], &[usize::MAX / 2]),
        sample("a box", table(), &[1, 1], &[3, 3], &[1, 1]),
        sample("steps on both axes", table(), &[0, 1], &[3, 4], &[2, 2]),
        sample("all of it", table(), &[0, 0], &[3, 4], &[1, 1]),
        sample("none of it", table(), &[1, 2], &[3, 2], &[1, 2]),
        sample("a scalar", Tensor::from_f32(&[], &[1.0]), &[], &[], &[]),
        sample("integers", Tensor::from_i64(&[4], &[1, 2, i64::MIN, 4]), &[1], &[4], &[1]),
        sample("bytes", seven().cast(DType::U8), &[1], &[7], &[2]),
        sample("booleans", Tensor::from_bool(&[3], &[true, false, true]), &[1], &[3], &[1]),
    ]
}
