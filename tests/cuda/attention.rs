//! Attention over several tiles: with heads in chunks, ends within a tile, masks, shared keys and dropout.

use super::{KernelTest, kernel_test};
use compiler::op::sample::{ramp, run};
use compiler::op::*;
use compiler::tensor::{DType, Tensor};

/// Heads, queries, keys, columns of queries and keys, and columns of values.
type Sizes = [usize; 5];

fn forward_and_gradient(
    what: &str,
    op: Attention,
    dtype: DType,
    sizes: Sizes,
    group_size: usize,
    extras: &[Tensor],
) -> Vec<KernelTest> {
    let [heads, queries, keys, depth, width] = sizes;
    let tensor = |shape: &[usize], seed: u64| ramp(shape, seed).cast(dtype);
    let mut inputs = vec![
        tensor(&[1, heads, queries, depth], 1),
        tensor(&[1, heads / group_size, keys, depth], 2),
        tensor(&[1, heads / group_size, keys, width], 3),
    ];
    inputs.extend(extras.iter().map(|t| if t.dtype() == DType::F32 { t.cast(dtype) } else { t.clone() }));
    let saved = run(&op, &inputs);
    let mut grad_inputs = vec![tensor(&[1, heads, queries, width], 4)];
    grad_inputs.extend_from_slice(&inputs[..3]);
    grad_inputs.extend(saved);
    grad_inputs.extend_from_slice(&inputs[3..]);
    let what = format!("attention of tiles, {what} {sizes:?} ({dtype})");
    let grad = Op::AttentionGrad(AttentionGrad { forward: op });
    [kernel_test(&what, &Op::Attention(op), &inputs), kernel_test(&format!("{what}, gradient"), &grad, &grad_inputs)]
        .into_iter()
        .flatten()
        .collect()
}

/// The tests of an element type.
pub fn kernel_tests(dtype: DType) -> Vec<KernelTest> {
    let plain = Attention { scale: 0.8, causal: false, empty: EmptyRow::Zero, dropout: None, part: None };
    let causal = Attention { causal: true, ..plain };
    let bools: Vec<bool> = (0..70 * 40).map(|i| i / 40 % 30 != 7 && i * 7 % 11 > 3).collect();
    let mask = Tensor::from_bool(&[70, 40], &bools);
    let keys = Tensor::from_bool(&[1, 1, 1, 40], &bools[..40]);
    let with_dropout = Attention { dropout: Some(Dropout { ratio: 0.4, stream: 2 }), ..causal };
    // The lowest number for all keys of a query: its log-sum-exp does not contain the number of keys.
    let lowest: Vec<f32> = (0..70).map(|i| if i % 30 == 7 { f32::MIN } else { 0.5 }).collect();
    let lowest = Tensor::from_f32(&[70, 1], &lowest);
    let mut kernel_tests = Vec::new();
    for (what, op, sizes, group_size, extras) in [
        ("plain", plain, [1, 70, 90, 8, 24], 1, &[][..]),
        ("causal", causal, [2, 90, 90, 16, 16], 1, &[]),
        ("causal, fewer keys", causal, [1, 70, 40, 5, 3], 1, &[]),
        ("shared keys", causal, [2, 40, 70, 4, 6], 2, &[]),
        ("chunks", causal, [1, 20, 36, 136, 48], 1, &[]),
        ("wide values", causal, [1, 33, 20, 16, 144], 1, &[]),
        ("a mask of keys", causal, [2, 70, 40, 8, 8], 2, &[keys]),
        ("an added mask", plain, [1, 70, 40, 8, 8], 1, &[ramp(&[1, 70, 40], 5)]),
        ("lowest", plain, [1, 70, 40, 8, 8], 1, &[lowest]),
        ("dropout", with_dropout, [1, 70, 40, 8, 8], 1, &[Tensor::from_i64(&[], &[11])]),
    ] {
        // In f16 the lowest number of f32 is -∞.
        if what == "lowest" && dtype == DType::F16 {
            continue;
        }
        kernel_tests.extend(forward_and_gradient(what, op, dtype, sizes, group_size, extras));
    }
    for empty in [EmptyRow::Zero, EmptyRow::Mean, EmptyRow::Nan] {
        let op = Attention { empty, causal: empty == EmptyRow::Nan, ..plain };
        kernel_tests.extend(forward_and_gradient(
            "a mask",
            op,
            dtype,
            [1, 70, 40, 8, 8],
            1,
            std::slice::from_ref(&mask),
        ));
    }
    kernel_tests
}
