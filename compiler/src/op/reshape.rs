//! Reshape.

use super::broadcast::{check_sizes, shape_text};
use super::*;
use crate::tensor::element_count;

impl OpRule for Reshape {
    fn infer(&self, inputs: &[&Fact]) -> Result<Vec<Fact>, FactError> {
        let [x] = arity(inputs)?;
        check_sizes("reshape", &self.shape)?;
        let y = Fact::new(x.dtype, self.shape.clone());
        let (from, to) = (x.volume()?, y.volume()?);
        if from != to {
            return Err(FactError::mismatch(
                "the input shape",
                format!("{} ({from} elements)", shape_text(&x.shape)),
                "the target shape",
                format!("{} ({to} elements)", shape_text(&y.shape)),
            ));
        }
        Ok(vec![y])
    }

    fn cost(&self, _: &[&Fact], _: &[Fact]) -> Cost {
        Cost::default()
    }

    // dx = dy in the shape of x
    fn backward<'b>(&self, context: BackwardContext<'b>) -> Vec<Option<Expr<'b>>> {
        let x = context.inputs[0];
        vec![x.is_float().then(|| context.dy().reshape(x.shape()))]
    }

    // Write the row-major element number as digits (outer, device, inner). A shard is the set of elements with one
    // device digit. The result has the same shards if one of its axes is split at the same digit.
    fn strategies(&self, inputs: &[&Fact], outputs: &[Fact], group: &Group) -> Vec<Strategy> {
        let ([x], [y]) = (inputs, outputs) else { return Vec::new() };
        let (Some(from), Some(to)) = (x.concrete(), y.concrete()) else { return Vec::new() };
        let mut strategies = vec![Strategy::linear(&[true], 1)];
        for (axis, &size) in from.iter().enumerate().filter(|(_, size)| **size > 1) {
            let Some(before) = element_count(&from[..axis]) else { continue };
            for blocks in [1].into_iter().chain(group.blocks.get(&size).into_iter().flatten().copied()) {
                let Some(output_split) =
                    before.checked_mul(blocks).and_then(|outer| find_split(&to, outer, group.devices))
                else {
                    continue;
                };
                let mut shape = self.shape.clone();
                shape[output_split.axis] = Dim::from(to[output_split.axis] / group.devices);
                let (input_split, output_split) =
                    (Sharding::Split(SplitDim { axis, blocks }), Sharding::Split(output_split));
                let base = Strategy::along(&[None], &[None]).sized(Op::Reshape(Reshape { shape }));
                strategies.push(Strategy {
                    inputs: vec![input_split],
                    outputs: vec![output_split],
                    any_order: false,
                    ..base
                });
            }
        }
        strategies
    }

    fn reference(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) -> Result<(), KernelError> {
        outputs[0].bytes_mut().copy_from_slice(inputs[0].bytes());
        Ok(())
    }

    fn is_view(&self) -> bool {
        true
    }
}

/// The split dim of a tensor whose shards alternate every `1/(outer · devices)` of its elements.
fn find_split(shape: &[usize], outer: usize, devices: usize) -> Option<SplitDim> {
    let mut before = 1usize;
    for (axis, &size) in shape.iter().enumerate() {
        let fits = |blocks: &usize| blocks.checked_mul(devices).is_some_and(|parts| parts > 0 && size % parts == 0);
        let blocks = Some(outer).filter(|outer| outer % before == 0).map(|outer| outer / before).filter(fits);
        if let (Some(blocks), true) = (blocks, size > 1) {
            return Some(SplitDim { axis, blocks });
        }
        before = before.checked_mul(size).filter(|before| *before > 0)?;
    }
    None
}

pub fn samples() -> Vec<Sample> {
    let sample = |title, x: Tensor, shape: &[i64]| {
        Sample::new(title, Op::Reshape(Reshape { shape: shape.iter().map(|&d| Dim::from(d)).collect() }), vec![x])
    };
    let six = || Tensor::from_f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    vec![
        sample("flattened", six(), &[6]),
        sample("turned", six(), &[3, 2]),
        sample("more dims", six(), &[1, 2, 1, 3]),
        sample("to a scalar", Tensor::from_f32(&[1, 1], &[7.0]), &[]),
        sample("from a scalar", Tensor::from_f32(&[], &[7.0]), &[1]),
        sample("nothing", Tensor::zeros(DType::F32, &[0, 3]), &[5, 0]),
        sample("integers", Tensor::from_i64(&[4], &[1, 2, i64::MIN, i64::MAX]), &[2, 2]),
        sample("booleans", Tensor::from_bool(&[2], &[true, false]), &[2, 1]),
    ]
}
