//! Concatenation.

use super::broadcast::shape_text;
use super::*;

impl OpRule for Concat {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let Some((first, others)) = inputs.split_first() else { return Err(FactError::Arity { expected: 1, got: 0 }) };
        check_axis(self.axis, first.rank())?;
        let mut y = (*first).clone();
        for x in others {
            check_like("an input", x, first, "the first")?;
            let agrees = |axis: usize| axis == self.axis || x.shape[axis] == first.shape[axis];
            if x.rank() != first.rank() || !(0..x.rank()).all(agrees) {
                let other = format!("{}, which does not fit along axis {}", shape_text(&x.shape), self.axis);
                let first = shape_text(&first.shape);
                return Err(FactError::mismatch("the first input's shape", first, "another's", other));
            }
            y.shape[self.axis] = y.shape[self.axis].add(&x.shape[self.axis])?;
        }
        Ok(vec![y])
    }

    fn cost(&self, inputs: &[&Fact], outputs: &[Fact]) -> Cost {
        Cost { flops: 0.0, bytes: moved_bytes(inputs, outputs) }
    }

    // dx_i = its slice of dy
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let dy = context.dy();
        if !dy.is_float() {
            return vec![None; context.inputs.len()];
        }
        let mut offset = Dim::Known(0);
        let mut gradients = Vec::new();
        for (&input, wanted) in context.inputs.iter().zip(context.wanted) {
            let x = input.fact();
            let next = offset.add(&x.shape[self.axis]).expect("infer has added up the same dims");
            gradients.push(wanted.then(|| {
                let mut begin = vec![Dim::Known(0); x.rank()];
                begin[self.axis] = offset.clone();
                let mut end = x.shape.clone();
                end[self.axis] = next.clone();
                dy.then(Op::Slice(Slice { begin, end, step: vec![1; x.rank()] }))
            }));
            offset = next;
        }
        gradients
    }

    // Any other axis; along the concatenated axis, inputs of equal size, each of which becomes a block.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
        let count = inputs.len();
        let mut strategies: Vec<Strategy> = (0..outputs[0].rank())
            .filter(|axis| *axis != self.axis)
            .map(|axis| Strategy::along(&vec![Some(axis); count], &[Some(axis)]))
            .collect();
        let part_size = inputs[0].shape[self.axis].clone();
        if let (Some(size), true) = (part_size.known(), inputs.iter().all(|x| x.shape[self.axis] == part_size)) {
            let block_counts = group.blocks.get(&(size as usize)).into_iter().flatten().copied();
            strategies.extend(block_counts.chain([1]).map(|blocks| Strategy {
                inputs: vec![Sharding::Split(SplitDim { axis: self.axis, blocks }); count],
                outputs: vec![Sharding::Split(SplitDim { axis: self.axis, blocks: blocks * count })],
                local: sharding::Local::Same,
                any_order: false,
            }));
        }
        strategies.push(Strategy::linear(&vec![true; count], 1));
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        let y = &mut outputs[0];
        let outer: usize = y.shape[..self.axis].iter().product();
        let y = y.bytes_mut();
        let mut at = 0;
        for row in 0..outer {
            for x in inputs {
                // For a fixed outer index, the elements of one input are contiguous.
                let run = x.bytes().len() / outer;
                y[at..at + run].copy_from_slice(&x.bytes()[row * run..(row + 1) * run]);
                at += run;
            }
        }
        Ok(())
    }
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, axis, inputs: Vec<Tensor>| Sample::new(title, Op::Concat(Concat { axis }), inputs);
    let a = || Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let row = || Tensor::from_f32(&[1, 3], &[7.0, 8.0, 9.0]);
    let pair = || Tensor::from_f32(&[2, 2], &[-1.0, -2.0, -3.0, -4.0]);
    let deep = |size: usize| Tensor::from_f32(&[2, size, 2], &(0..4 * size).map(|i| i as f32).collect::<Vec<_>>());
    vec![
        sample("rows", 0, vec![a(), row()]),
        sample("columns", 1, vec![a(), pair()]),
        sample("three in the middle", 1, vec![deep(1), deep(2), deep(3)]),
        sample("one alone", 1, vec![a()]),
        sample("nothing among them", 1, vec![a(), Tensor::zeros(DType::F32, &[2, 0]), pair()]),
        sample("nothing at all", 1, vec![Tensor::zeros(DType::F32, &[0, 2]), Tensor::zeros(DType::F32, &[0, 1])]),
        sample("integers", 0, vec![Tensor::from_i64(&[1], &[i64::MAX]), Tensor::from_i64(&[2], &[2, 3])]),
        sample("bytes", 0, vec![row().cast(DType::U8), a().cast(DType::U8)]),
        sample("booleans", 0, vec![Tensor::from_bool(&[1], &[true]), Tensor::from_bool(&[1], &[false])]),
    ]
}
