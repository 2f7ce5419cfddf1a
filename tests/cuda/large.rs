//! Shapes beyond those of the samples: packs of elements, rows with and without room in registers, columns in parts.

use compiler::op::*;
use compiler::tensor::{DType, Tensor};

fn values(shape: &[usize], seed: usize) -> Tensor {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 17.0 - 2.9).collect();
    Tensor::from_f32(shape, &values)
}

fn labels(shape: &[usize], classes: usize) -> Tensor {
    let count = shape.iter().product::<usize>();
    Tensor::from_i64(shape, &(0..count).map(|i| (i * 7 % classes) as i64).collect::<Vec<_>>())
}

/// Ops on tensors in `f32`, which are also tested in other types.
pub fn cases() -> Vec<(Op, Vec<Tensor>)> {
    let mut cases = Vec::new();
    for shape in [[20, 768], [3, 5001], [700, 40]] {
        let row = &shape[1..];
        let (x, scale, bias) = (values(&shape, 1), values(row, 2), values(row, 3));
        cases.push((Op::LayerNorm(LayerNorm { axis: 1, epsilon: 1e-5 }), vec![x.clone(), scale.clone(), bias.clone()]));
        let [mean, rstd] = [4, 5].map(|seed| values(&[shape[0], 1], seed));
        cases.push((
            Op::LayerNormGrad(LayerNormGrad { axis: 1 }),
            vec![values(&shape, 6), x.clone(), scale, mean, rstd],
        ));
        for op in [Op::Softmax(Softmax { axis: 1 }), Op::LogSoftmax(LogSoftmax { axis: 1 })] {
            cases.push((op, vec![x.clone()]));
        }
        cases.push((Op::Binary(Binary::Add), vec![x, bias]));
    }
    let narrow = |shape: &[usize], seed| values(shape, seed).cast(DType::Bf16);
    let (x, dy, shape) = (narrow(&[20, 768], 1), narrow(&[20, 768], 2), [768]);
    let norm = Op::LayerNorm(LayerNorm { axis: 1, epsilon: 1e-5 });
    cases.push((norm, vec![x.clone(), values(&shape, 3), values(&shape, 4)]));
    let statistics = [5, 6].map(|seed| values(&[20, 1], seed));
    let grad = Op::LayerNormGrad(LayerNormGrad { axis: 1 });
    cases.push((grad, [&[dy, x, values(&shape, 3)][..], &statistics].concat()));
    let (x, dy, channel) = (narrow(&[4, 3, 10, 10], 1), narrow(&[4, 3, 10, 10], 2), |seed| values(&[3], seed));
    cases.push((Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), vec![x.clone(), channel(3), channel(4)]));
    cases.push((Op::BatchNormGrad(BatchNormGrad {}), vec![dy, x, channel(3), channel(4), channel(5)]));
    for (shape, axis) in [([8, 4099, 1], 1), ([3, 1000, 1], 1), ([2, 70, 24], 1)] {
        let [outer, classes, inner] = shape;
        let (x, target) = (values(&shape, 1), labels(&[outer, inner], classes));
        cases.push((Op::Softmax(Softmax { axis }), vec![x.clone()]));
        cases.push((Op::CrossEntropy(CrossEntropy::new(axis, Some(7))), vec![x.clone(), target.clone()]));
        let grad = Op::CrossEntropyGrad(CrossEntropyGrad::new(axis, Some(7)));
        cases.push((grad, vec![Tensor::from_f32(&[], &[0.5]), x, target, values(&[outer, inner], 2)]));
    }
    for (shape, axes) in [
        (&[3000, 40][..], &[0][..]),
        (&[3000, 41], &[0]),
        (&[2, 1500, 3, 24], &[0, 1]),
        (&[40, 17, 64], &[1]),
        (&[2, 40000], &[1]),
        (&[6, 5, 7, 64], &[1, 3]),
        (&[130, 3, 50], &[0, 2]),
    ] {
        let kinds = [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max];
        for kind in kinds.into_iter().take(if shape == [3000, 40] { 3 } else { 1 }) {
            cases.push((Op::Reduce(Reduce { kind, axes: axes.to_vec(), keep: false }), vec![values(shape, 1)]));
        }
    }
    for (shape, perm) in [
        (&[70, 130][..], &[1, 0][..]),
        (&[2, 64, 12, 64], &[0, 2, 1, 3]),
        (&[2, 33, 5, 36], &[0, 2, 3, 1]),
        (&[3, 40, 50], &[2, 0, 1]),
        (&[7, 3, 33, 40], &[3, 1, 2, 0]),
    ] {
        cases.push((Op::Transpose(Transpose { perm: perm.to_vec() }), vec![values(shape, 1)]));
    }
    for shape in [[4, 3, 40, 50], [3, 5, 7, 7], [2, 2, 130, 100]] {
        let channel = |seed| values(&shape[1..2], seed);
        let x = values(&shape, 1);
        cases.push((Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), vec![x.clone(), channel(2), channel(3)]));
        let grad = Op::BatchNormGrad(BatchNormGrad {});
        cases.push((grad, vec![values(&shape, 4), x, channel(5), channel(6), channel(7)]));
    }
    cases.push((Op::Gather(Gather { axis: 0 }), vec![values(&[50, 64], 1), labels(&[90], 50)]));
    cases.push((Op::Concat(Concat { axis: 1 }), vec![values(&[30, 8], 1), values(&[30, 16], 2)]));
    cases.push((
        Op::ScatterAdd(ScatterAdd { axis: 0, size: 50_usize.into() }),
        vec![values(&[90, 64], 1), labels(&[90], 50)],
    ));
    let integers = Tensor::from_i64(&[600, 12], &(0..7200).map(|i| i * 31 % 1009).collect::<Vec<_>>());
    cases.push((
        Op::Reduce(Reduce { kind: ReduceKind::Sum, axes: vec![0], keep: false }),
        vec![integers.cast(DType::I32)],
    ));
    cases
}
