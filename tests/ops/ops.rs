//! Every core op on the CPU: the fast kernel matches the reference, writes every element, and is reproducible.

use crate::support::reference::{facts_of, in_type, reference, tensors};
use compiler::op::table::{rule, samples};
use compiler::op::*;
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::device::buffer::Buffer;
use runtime::device::cpu::Kernel;
use std::collections::BTreeSet;

/// A buffer filled with a pattern that is NaN in every float type.
fn poisoned(len: usize) -> Buffer {
    Buffer::host_copy(&vec![0xff; len])
}

fn slice(buffer: &Buffer) -> &[u8] {
    buffer.region().host().unwrap()
}

fn slice_mut(buffer: &mut Buffer) -> &mut [u8] {
    buffer.region_mut().host().unwrap()
}

fn infer(op: &Op, inputs: &[Tensor]) -> Vec<Fact> {
    let facts = facts_of(inputs);
    rule(op).infer(&facts.iter().collect::<Vec<_>>()).unwrap_or_else(|e| panic!("{}: {e}", rule(op).name()))
}

fn run(kernel: &Kernel, inputs: &[Tensor], outputs: &[Fact]) -> Result<Vec<Tensor>, KernelError> {
    let input_buffers: Vec<Buffer> = inputs.iter().map(|t| Buffer::host_copy(t.bytes())).collect();
    let mut results: Vec<Buffer> = outputs.iter().map(|f| poisoned(f.bytes().unwrap() as usize)).collect();
    let mut workspace = poisoned(kernel.workspace());
    let input_slices: Vec<&[u8]> = input_buffers.iter().map(slice).collect();
    let mut slices: Vec<&mut [u8]> = results.iter_mut().map(slice_mut).collect();
    kernel.run(&input_slices, &mut slices, slice_mut(&mut workspace))?;
    Ok(tensors(outputs, &results.iter().map(slice).collect::<Vec<_>>()))
}

/// Equal up to rounding in the element type of `got`.
fn assert_close(what: &str, got: &Tensor, want: &Tensor, relative: f64, absolute: f64) {
    assert_eq!((got.dtype(), got.shape()), (want.dtype(), want.shape()), "{what}");
    if !got.dtype().is_float() {
        assert!(got.bytes() == want.bytes(), "{what}: {:?} is not {:?}", got.to_i64(), want.to_i64());
        return;
    }
    let (got, want) = (got.to_f64(), want.to_f64());
    let largest = want.iter().filter(|v| v.is_finite()).fold(0.0f64, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let is_close = (g.is_nan() && w.is_nan()) || g == w || (g - w).abs() <= relative * w.abs() + absolute * largest;
        assert!(is_close, "{what}: element {i} is {g}, the reference gives {w}");
    }
}

/// Tests one op. Returns true if it has a fast kernel.
fn check(what: &str, op: &Op, inputs: &[Tensor]) -> bool {
    let outputs = infer(op, inputs);
    let kernel = Kernel::new(op, &facts_of(inputs), &outputs);
    let (got, want) = (run(&kernel, inputs, &outputs), reference(op, inputs, &outputs));
    let (got, want) = match (got, want) {
        (Ok(got), Ok(want)) => (got, want),
        (got, want) => {
            assert_eq!(got.map(|_| ()), want.map(|_| ()), "{what}");
            return !kernel.is_reference();
        }
    };
    let has = |dtype: DType| inputs.iter().any(|t| t.dtype() == dtype);
    let (relative, absolute) = match has(DType::F64) && !has(DType::F32) {
        true => (1e-12, 1e-13),
        // A unit in the last place of the result.
        false if has(DType::Bf16) => (1.0 / 128.0, 1e-5),
        false => (1e-5, 1e-6),
    };
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_close(&format!("{what}, output {i}"), got, want, relative, absolute);
    }
    assert_eq!(run(&kernel, inputs, &outputs).unwrap(), got, "{what}: two runs differ");
    !kernel.is_reference()
}

#[test]
fn every_sample_gives_what_the_reference_gives() {
    let mut references: BTreeSet<String> = BTreeSet::new();
    let mut narrow_kernels = 0;
    for sample in samples() {
        let name = rule(&sample.op).name();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16] {
            let inputs = in_type(&sample.inputs, dtype);
            let what = format!("{name}: {} ({dtype})", sample.title);
            let facts = facts_of(&inputs);
            if rule(&sample.op).infer(&facts.iter().collect::<Vec<_>>()).is_err() {
                continue;
            }
            let fast = check(&what, &sample.op, &inputs);
            let is_narrow = dtype.size() == 2 && inputs.iter().any(|tensor| tensor.dtype() == dtype);
            narrow_kernels += usize::from(fast && is_narrow);
            let source = matches!(sample.op, Op::Input(_) | Op::Parameter(_) | Op::State(_));
            if !fast && dtype == DType::F32 && !source {
                let first = inputs.first().map_or("nothing".into(), |t| t.dtype().to_string());
                references.insert(format!("{name} of {first}"));
            }
        }
    }
    assert!(narrow_kernels > 150, "{narrow_kernels} samples");
    println!("by the reference on cpu: {}", references.into_iter().collect::<Vec<_>>().join(", "));
}

#[test]
fn unaligned_buffers_are_served() {
    let x = Tensor::from_f32(&[3], &[1.0, -2.0, 3.0]);
    let fact = [Fact::of(DType::F32, &[3])];
    let kernel = Kernel::new(&Op::Unary(Unary::Relu), &fact, &fact);
    let mut input = poisoned(13);
    slice_mut(&mut input)[1..].copy_from_slice(x.bytes());
    let mut output = poisoned(13);
    kernel.run(&[&slice(&input)[1..]], &mut [&mut slice_mut(&mut output)[1..]], &mut []).unwrap();
    assert_eq!(tensors(&fact, &[&slice(&output)[1..]])[0].to_f32(), [1.0, 0.0, 3.0]);
}

fn random(shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let count: usize = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f64 / (1u64 << 23) as f64 - 1.0) as f32
        })
        .collect();
    Tensor::from_f32(shape, &values)
}

fn labels(count: usize, classes: usize, seed: u64) -> Tensor {
    let values: Vec<i64> =
        random(&[count], seed).to_f64().iter().map(|v| ((v + 1.0) / 2.0 * classes as f64) as i64).collect();
    Tensor::from_i64(&[count], &values)
}

/// Tests in `f32` and `f64`, and requires a fast kernel.
fn verify(what: &str, op: Op, inputs: &[Tensor]) {
    for dtype in [DType::F32, DType::F64] {
        let what = format!("{} {what} ({dtype})", rule(&op).name());
        assert!(check(&what, &op, &in_type(inputs, dtype)), "{what} runs the reference");
    }
}

#[test]
fn products_of_many_shapes() {
    let cases: [(&[usize], &[usize]); 6] = [
        (&[1, 1], &[1, 1]),
        (&[33, 65], &[65, 17]),
        (&[5, 70, 40], &[40, 30]),
        (&[3, 1, 9, 20], &[1, 4, 20, 11]),
        (&[2, 3, 8, 8], &[3, 8, 1]),
        (&[7, 100], &[100, 1]),
    ];
    for (a, b) in cases {
        for (transpose_a, transpose_b) in [(false, false), (true, false), (false, true), (true, true)] {
            let stored = |shape: &[usize], transposed: bool| {
                let mut shape = shape.to_vec();
                let rank = shape.len();
                if transposed {
                    shape.swap(rank - 2, rank - 1);
                }
                shape
            };
            let inputs = [random(&stored(a, transpose_a), 1), random(&stored(b, transpose_b), 2)];
            let what = format!("{a:?} {b:?} {transpose_a} {transpose_b}");
            verify(&what, Op::MatMul(MatMul { transpose_a, transpose_b }), &inputs);
        }
    }
}

/// Attention and its gradient on `[heads, queries, keys, depth, width]`, with one key head for every `group_size`.
fn check_attention(what: &str, op: Attention, sizes: [usize; 5], group_size: usize, extras: &[Tensor]) {
    let [heads, queries, keys, depth, width] = sizes;
    let mut inputs = vec![
        random(&[2, heads, queries, depth], 1),
        random(&[2, heads / group_size, keys, depth], 2),
        random(&[2, heads / group_size, keys, width], 3),
    ];
    inputs.extend_from_slice(extras);
    let what = format!("{what} {sizes:?}");
    verify(&what, Op::Attention(op), &inputs);
    let saved = sample::run(&op, &inputs);
    let mut grad_inputs = vec![random(saved[0].shape(), 4)];
    grad_inputs.extend_from_slice(&inputs[..3]);
    grad_inputs.extend(saved);
    grad_inputs.extend_from_slice(extras);
    verify(&what, Op::AttentionGrad(AttentionGrad { forward: op }), &grad_inputs);
}

#[test]
fn attention_of_several_blocks() {
    let plain = Attention { scale: 1.5, causal: false, empty: EmptyRow::Zero, dropout: None, part: None };
    let causal = Attention { causal: true, ..plain };
    // Neither number of queries or keys is a multiple of a block.
    for sizes in [[2, 300, 150, 5, 3], [1, 130, 300, 16, 24], [3, 2, 200, 4, 4], [2, 70, 2, 3, 2]] {
        check_attention("plain", plain, sizes, 1, &[]);
        check_attention("causal", causal, sizes, 1, &[]);
    }
    check_attention("grouped", causal, [4, 270, 140, 4, 3], 2, &[]);
    let bools: Vec<bool> = (0..2 * 270 * 140).map(|i| i / 140 % 90 != 7 && i * 7 % 11 > 3).collect();
    let mask = Tensor::from_bool(&[2, 1, 270, 140], &bools);
    for empty in [EmptyRow::Zero, EmptyRow::Mean, EmptyRow::Nan] {
        check_attention("boolean", Attention { empty, ..plain }, [2, 270, 140, 4, 3], 1, std::slice::from_ref(&mask));
    }
    let keys = Tensor::from_bool(&[2, 1, 1, 140], &bools[..280]);
    check_attention("keys", causal, [2, 270, 140, 4, 3], 2, &[keys]);
    check_attention("added", causal, [2, 270, 140, 4, 3], 1, &[random(&[2, 270, 140], 5)]);
    check_attention("added per query", plain, [2, 270, 140, 4, 3], 1, &[random(&[270, 1], 5)]);
    // The lowest number for all keys of a query: its log-sum-exp does not contain the number of keys.
    let lowest: Vec<f32> = (0..270).map(|i| if i % 90 == 7 { f32::MIN } else { 0.5 }).collect();
    check_attention("lowest", plain, [2, 270, 140, 4, 3], 1, &[Tensor::from_f32(&[270, 1], &lowest)]);
    let with_dropout = Attention { dropout: Some(Dropout { ratio: 0.4, stream: 2 }), ..causal };
    check_attention("dropout", with_dropout, [2, 270, 140, 4, 3], 1, &[Tensor::from_i64(&[], &[11])]);
    let part = Attention { part: Some(DropoutShard { run: 2 * 270 * 140, devices: 3 }), ..with_dropout };
    let extras = [mask, Tensor::from_i64(&[], &[11]), Tensor::from_i64(&[], &[2])];
    check_attention("a part of a dropout", part, [2, 270, 140, 4, 3], 1, &extras);
}

/// In 16 bits, the log-sum-exp stays wide, and sums have the precision of `f32`.
#[test]
fn attention_in_two_bytes_sums_in_four() {
    let op = Attention { scale: 0.5, causal: true, empty: EmptyRow::Nan, dropout: None, part: None };
    let narrow = |t: Tensor| t.cast(DType::Bf16);
    let inputs = [[2, 4, 150, 8], [2, 2, 150, 8], [2, 2, 150, 8]];
    let inputs: Vec<Tensor> = (1..).zip(inputs).map(|(seed, shape)| narrow(random(&shape, seed))).collect();
    let saved = sample::run(&op, &inputs);
    assert_eq!(saved[1].dtype(), DType::F32);
    let dy = narrow(random(saved[0].shape(), 4));
    let grad_inputs = [&[dy], &inputs[..], &saved[..]].concat();
    for (op, inputs) in [(Op::Attention(op), inputs), (Op::AttentionGrad(AttentionGrad { forward: op }), grad_inputs)] {
        let outputs = infer(&op, &inputs);
        let kernel = Kernel::new(&op, &facts_of(&inputs), &outputs);
        assert!(!kernel.is_reference());
        let got = run(&kernel, &inputs, &outputs).unwrap();
        for (got, want) in got.iter().zip(reference(&op, &inputs, &outputs).unwrap()) {
            // Half a unit in the last place of the result.
            assert_close(rule(&op).name(), got, &want, 1.0 / 128.0, 1e-4);
        }
    }
}

/// The dropout of attention is that of its weights.
#[test]
fn attention_drops_what_a_dropout_of_its_weights_drops() {
    let (q, k) = (random(&[2, 3, 20, 8], 1), random(&[2, 3, 30, 8], 2));
    // With the identity as values, the output is the weights.
    let unit: Vec<f32> = (0..6 * 900).map(|i| if i / 30 % 30 == i % 30 { 1.0 } else { 0.0 }).collect();
    let v = Tensor::from_f32(&[2, 3, 30, 30], &unit);
    let counter = Tensor::from_i64(&[], &[5]);
    let plain = Attention { scale: 0.5, causal: false, empty: EmptyRow::Nan, dropout: None, part: None };
    let dropout = Dropout { ratio: 0.3, stream: 6 };
    let weights = sample::run(&plain, &[q.clone(), k.clone(), v.clone()]).remove(0);
    let want = sample::run(&dropout, &[weights, counter.clone()]).remove(0);
    let inputs = [q, k, v, counter];
    let op = Op::Attention(Attention { dropout: Some(dropout), ..plain });
    let outputs = infer(&op, &inputs);
    let got = run(&Kernel::new(&op, &facts_of(&inputs), &outputs), &inputs, &outputs).unwrap().remove(0);
    assert_close("dropout", &got, &want, 1e-5, 1e-6);
    assert!(got.to_f64().iter().filter(|v| **v == 0.0).count() > 900);
}

/// Inputs of a recurrent layer: x, both weights, both biases, initial states.
fn layer(gates: usize, states: usize, [steps, batch, width, hidden]: [usize; 4]) -> Vec<Tensor> {
    let weight = |columns: usize, seed| {
        let shape = [gates * hidden, columns];
        let values = random(&shape, seed).to_f64();
        let scaled: Vec<f32> = values.iter().map(|v| (v / (columns as f64).sqrt()) as f32).collect();
        Tensor::from_f32(&shape, &scaled)
    };
    let bias = |seed| random(&[gates * hidden], seed);
    let mut inputs = vec![random(&[steps, batch, width], 1), weight(width, 2), weight(hidden, 3), bias(4), bias(5)];
    inputs.extend((0..states).map(|state| random(&[batch, hidden], 6 + state as u64)));
    inputs
}

#[test]
fn recurrent_layers_of_many_shapes() {
    // From 8 steps on the recurrent weight is packed; the last one exceeds one block.
    for sizes in [[2, 3, 4, 5], [9, 1, 3, 8], [8, 2, 5, 3], [11, 5, 6, 17], [9, 16, 8, 50], [8, 20, 3, 200]] {
        let [steps, batch, _, hidden] = sizes;
        let dys = [random(&[steps, batch, hidden], 10), random(&[batch, hidden], 11), random(&[batch, hidden], 12)];
        let pair = |forward: Op, grad: Op, inputs: Vec<Tensor>, states: usize, saved_count: usize| {
            let what = format!("{sizes:?} {forward:?}");
            let results = reference(&forward, &inputs, &infer(&forward, &inputs)).unwrap();
            // Output gradients, x and the weights, initial states, y, and saved values of the forward.
            let operands = dys[..1 + states].iter().chain(&inputs[..3]).chain(&inputs[5..]).chain(&results[..1]);
            let operands: Vec<Tensor> = operands.chain(&results[results.len() - saved_count..]).cloned().collect();
            verify(&what, forward, &inputs);
            verify(&what, grad, &operands);
        };
        for reverse in [false, true] {
            pair(Op::Lstm(Lstm { reverse }), Op::LstmGrad(LstmGrad { reverse }), layer(4, 2, sizes), 2, 2);
            for reset_after in [false, true] {
                let (forward, grad) = (Gru { reverse, reset_after }, GruGrad { reverse, reset_after });
                pair(Op::Gru(forward), Op::GruGrad(grad), layer(3, 1, sizes), 1, 1);
            }
            let activation = if reverse { Activation::Tanh } else { Activation::Sigmoid };
            let (forward, grad) = (Rnn { reverse, activation }, RnnGrad { reverse, activation });
            pair(Op::Rnn(forward), Op::RnnGrad(grad), layer(1, 1, sizes), 1, 0);
        }
    }
}

fn window(strides: &[usize], begin: &[usize], end: &[usize], dilations: &[usize]) -> Window {
    Window {
        strides: strides.to_vec(),
        pads_begin: begin.to_vec(),
        pads_end: end.to_vec(),
        dilations: dilations.to_vec(),
    }
}

#[test]
fn convolutions_of_many_shapes() {
    let cases: [(&[usize], &[usize], usize, Window); 20] = [
        (&[2, 8, 14, 14], &[6, 8, 3, 3], 1, window(&[1, 1], &[1, 1], &[1, 1], &[1, 1])),
        (&[2, 3, 23, 21], &[8, 3, 7, 7], 1, window(&[2, 2], &[3, 3], &[3, 3], &[1, 1])),
        (&[3, 8, 30, 30], &[4, 8, 1, 1], 1, window(&[1, 1], &[0, 0], &[0, 0], &[1, 1])),
        (&[5, 8, 7, 7], &[4, 8, 1, 1], 1, window(&[1, 1], &[0, 0], &[0, 0], &[1, 1])),
        (&[2, 8, 9, 9], &[4, 8, 1, 1], 1, window(&[2, 2], &[0, 0], &[0, 0], &[1, 1])),
        (&[2, 8, 10, 9], &[12, 2, 3, 3], 4, window(&[1, 2], &[2, 0], &[1, 2], &[2, 1])),
        (&[2, 6, 40, 40], &[6, 1, 3, 3], 6, window(&[1, 1], &[1, 1], &[1, 1], &[1, 1])),
        (&[3, 6, 15, 15], &[12, 1, 5, 5], 6, window(&[2, 2], &[2, 2], &[2, 2], &[1, 1])),
        (&[4, 5, 50], &[7, 5, 4], 1, window(&[3], &[2], &[1], &[1])),
        (&[9, 20, 2, 2], &[17, 20, 3, 3], 1, window(&[1, 1], &[1, 1], &[1, 1], &[1, 1])),
        (&[5, 10, 4, 4], &[24, 10, 3, 3], 1, window(&[1, 1], &[1, 1], &[1, 1], &[1, 1])),
        (&[5, 18, 7, 7], &[9, 18, 5, 5], 1, window(&[1, 1], &[2, 2], &[2, 2], &[1, 1])),
        (&[3, 4, 24, 25], &[10, 4, 3, 3], 1, window(&[1, 1], &[1, 0], &[0, 2], &[1, 1])),
        (&[4, 16, 8, 8], &[8, 8, 3, 3], 2, window(&[1, 1], &[2, 2], &[2, 2], &[2, 2])),
        (&[2, 3, 50, 51], &[16, 3, 5, 5], 1, window(&[2, 2], &[2, 1], &[1, 2], &[1, 1])),
        (&[3, 8, 16, 16], &[16, 8, 1, 1], 1, window(&[2, 2], &[0, 0], &[0, 0], &[1, 1])),
        (&[2, 2, 9, 3], &[3, 2, 2, 3], 1, window(&[1, 1], &[3, 4], &[4, 3], &[1, 1])),
        (&[2, 3, 6, 7, 8], &[4, 3, 2, 3, 2], 1, window(&[1, 2, 1], &[1, 1, 0], &[0, 1, 1], &[1, 1, 2])),
        (&[3, 4, 12, 12], &[4, 1, 12, 12], 4, window(&[1, 1], &[0, 0], &[0, 0], &[1, 1])),
        (&[2, 3, 4, 4, 4], &[3, 1, 3, 3, 3], 3, window(&[1, 1, 1], &[12, 12, 12], &[12, 12, 12], &[12, 12, 12])),
    ];
    for (x_shape, w_shape, groups, window) in cases {
        let what = format!("{x_shape:?} {w_shape:?}");
        let (x, w) = (random(x_shape, 1), random(w_shape, 2));
        let forward = Op::Conv(Conv { window: window.clone(), groups });
        let inputs = [x.clone(), w.clone()];
        let dy = random(&infer(&forward, &inputs)[0].concrete().unwrap(), 3);
        verify(&what, forward, &inputs);
        let spatial = x_shape[2..].iter().map(|&d| d.into()).collect();
        let input_grad = ConvInputGrad { window: window.clone(), groups, spatial };
        verify(&what, Op::ConvInputGrad(input_grad), &[dy.clone(), w]);
        let weight_grad = ConvWeightGrad { window, groups, kernel: w_shape[2..].to_vec() };
        verify(&what, Op::ConvWeightGrad(weight_grad), &[dy, x]);
    }
}

#[test]
fn convolutions_of_random_windows() {
    let mut state = 7u64;
    let mut below = |limit: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % limit) as usize
    };
    let mut checked = 0;
    while checked < 120 {
        let dims = 1 + below(3);
        let mut pick =
            |from: u64, limit: u64| -> Vec<usize> { (0..dims).map(|_| from as usize + below(limit)).collect() };
        let (data, kernel, strides) = (pick(1, if dims == 3 { 7 } else { 20 }), pick(1, 4), pick(1, 3));
        let (begin, end, dilations) = (pick(0, 4), pick(0, 4), pick(1, 2));
        let strides = if checked % 2 == 0 || checked % 8 == 7 { vec![1; dims] } else { strides };
        let fits = (0..dims).all(|a| data[a] + begin[a] + end[a] > dilations[a] * (kernel[a] - 1));
        let (groups, images) = (1 + below(2), 1 + below(6));
        let (ins, outs) = (1 + below(9), 1 + below(20));
        // Every fourth one is depthwise.
        let (groups, ins, outs) = if checked % 4 >= 3 { (2 + outs % 7, 1, 1) } else { (groups, ins, outs) };
        if !fits {
            continue;
        }
        checked += 1;
        let window = window(&strides, &begin, &end, &dilations);
        let what = format!("{images} images {data:?}, {groups} groups, {ins} to {outs}, {kernel:?} {window:?}");
        let x = random(&[&[images, groups * ins], data.as_slice()].concat(), 1);
        let w = random(&[&[groups * outs, ins], kernel.as_slice()].concat(), 2);
        let forward = Op::Conv(Conv { window: window.clone(), groups });
        let inputs = [x.clone(), w.clone()];
        let dy = random(&infer(&forward, &inputs)[0].concrete().unwrap(), 3);
        verify(&what, forward, &inputs);
        let spatial = data.iter().map(|&d| d.into()).collect();
        verify(&what, Op::ConvInputGrad(ConvInputGrad { window: window.clone(), groups, spatial }), &[dy.clone(), w]);
        verify(&what, Op::ConvWeightGrad(ConvWeightGrad { window, groups, kernel }), &[dy, x]);
    }
}

#[test]
fn pools_of_many_shapes() {
    let cases: [(&[usize], &[usize], Window, bool); 6] = [
        (&[2, 3, 33, 31], &[3, 3], window(&[2, 2], &[1, 1], &[1, 1], &[1, 1]), false),
        (&[2, 3, 32, 32], &[2, 2], window(&[2, 2], &[0, 0], &[0, 0], &[1, 1]), false),
        (&[2, 3, 20, 20], &[3, 3], window(&[1, 1], &[1, 1], &[1, 1], &[1, 1]), true),
        (&[2, 5, 9, 7], &[9, 7], window(&[1, 1], &[0, 0], &[0, 0], &[1, 1]), false),
        (&[2, 3, 31], &[5], window(&[3], &[2], &[1], &[2]), true),
        (&[1, 2, 6, 7, 8], &[2, 3, 2], window(&[2, 1, 2], &[0, 1, 1], &[1, 0, 1], &[1, 1, 1]), true),
    ];
    for (shape, kernel, window, ceil) in cases {
        let what = format!("{shape:?} {kernel:?}");
        let x = random(shape, 4);
        let max = MaxPool { kernel: kernel.to_vec(), window: window.clone(), ceil };
        let dy = random(&infer(&Op::MaxPool(max.clone()), std::slice::from_ref(&x))[0].concrete().unwrap(), 5);
        verify(&what, Op::MaxPool(max.clone()), std::slice::from_ref(&x));
        verify(&what, Op::MaxPoolGrad(MaxPoolGrad { forward: max }), &[x.clone(), dy.clone()]);
        for count_padding in [false, true] {
            let avg = AvgPool { kernel: kernel.to_vec(), window: window.clone(), ceil, count_padding };
            verify(&what, Op::AvgPool(avg.clone()), std::slice::from_ref(&x));
            let spatial = shape[2..].iter().map(|&d| d.into()).collect();
            verify(&what, Op::AvgPoolGrad(AvgPoolGrad { forward: avg, spatial }), std::slice::from_ref(&dy));
        }
    }
}

#[test]
fn of_equal_elements_the_first_gets_the_gradient() {
    for (shape, kernel, stride) in [(&[2, 3, 14, 22], 2, 2), (&[3, 2, 2, 2], 2, 2), (&[2, 2, 9, 8], 3, 2)] {
        // Few distinct values, so that most windows have ties.
        let values: Vec<f32> = random(shape, 6).to_f64().iter().map(|v| (v * 1.5).round() as f32).collect();
        let x = Tensor::from_f32(shape, &values);
        let max =
            MaxPool { kernel: vec![kernel; 2], window: window(&[stride; 2], &[0; 2], &[0; 2], &[1; 2]), ceil: false };
        let dy = random(&infer(&Op::MaxPool(max.clone()), std::slice::from_ref(&x))[0].concrete().unwrap(), 7);
        verify(&format!("{shape:?}"), Op::MaxPool(max.clone()), std::slice::from_ref(&x));
        verify(&format!("{shape:?}"), Op::MaxPoolGrad(MaxPoolGrad { forward: max }), &[x, dy]);
    }
}

#[test]
fn rows_and_columns_of_many_shapes() {
    for shape in [[37, 101, 1], [4, 33, 50], [1, 1, 1], [300, 3, 2]] {
        let x = random(&shape, 6);
        let only_x = std::slice::from_ref(&x);
        for axis in 0..3 {
            verify("", Op::Softmax(Softmax { axis }), only_x);
            verify("", Op::LogSoftmax(LogSoftmax { axis }), only_x);
            for largest in [false, true] {
                verify("", Op::ArgReduce(ArgReduce { largest, axis, keep: false }), only_x);
            }
            let scale = random(&shape[axis..], 7);
            let norm = Op::LayerNorm(LayerNorm { axis, epsilon: 1e-5 });
            let inputs = [x.clone(), scale.clone(), random(&shape[axis..], 8)];
            verify("", norm.clone(), &inputs);
            let statistics = reference(&norm, &inputs, &infer(&norm, &inputs)).unwrap();
            let inputs = [random(&shape, 9), x.clone(), scale, statistics[1].clone(), statistics[2].clone()];
            verify("", Op::LayerNormGrad(LayerNormGrad { axis }), &inputs);
        }
        for axes in [vec![], vec![0], vec![1], vec![2], vec![0, 2], vec![1, 2], vec![0, 1, 2]] {
            use ReduceKind::*;
            for kind in [Sum, Mean, Max, Min, Prod] {
                verify("", Op::Reduce(Reduce { kind, axes: axes.clone(), keep: false }), only_x);
            }
        }
    }
    for shape in [vec![40, 33], vec![8, 20, 49], vec![3, 7, 20, 9]] {
        let channels = [shape[1]];
        let (x, scale) = (random(&shape, 10), random(&channels, 11));
        let norm = Op::BatchNorm(BatchNorm { epsilon: 1e-5 });
        let inputs = [x.clone(), scale.clone(), random(&channels, 12)];
        verify("", norm.clone(), &inputs);
        let statistics = reference(&norm, &inputs, &infer(&norm, &inputs)).unwrap();
        let inputs = [random(&shape, 13), x, scale, statistics[1].clone(), statistics[3].clone()];
        verify("", Op::BatchNormGrad(BatchNormGrad {}), &inputs);
    }
}

#[test]
fn losses_of_many_shapes() {
    for (n, classes, inner) in [(64, 10, 1), (7, 1000, 1), (3, 5, 12)] {
        let shape: Vec<usize> = if inner == 1 { vec![n, classes] } else { vec![n, classes, inner] };
        let target_shape: Vec<usize> = if inner == 1 { vec![n] } else { vec![n, inner] };
        let logits = random(&shape, 14);
        let target = labels(n * inner, classes, 15).reshaped(target_shape).unwrap();
        for ignore in [None, Some(2)] {
            let loss = Op::CrossEntropy(CrossEntropy::new(1, ignore));
            let inputs = [logits.clone(), target.clone()];
            verify("", loss.clone(), &inputs);
            let lse = reference(&loss, &inputs, &infer(&loss, &inputs)).unwrap()[1].clone();
            let inputs = [Tensor::from_f32(&[], &[0.7]), logits.clone(), target.clone(), lse];
            verify("", Op::CrossEntropyGrad(CrossEntropyGrad::new(1, ignore)), &inputs);
        }
    }
    let loss = Op::CrossEntropy(CrossEntropy::new(1, None));
    check("label outside", &loss, &[random(&[2, 3], 1), Tensor::from_i64(&[2], &[0, 3])]);
}

/// Wide losses of 16-bit logits are those of the logits in `f32`, bit for bit, and their gradient is rounded once.
#[test]
fn wide_losses_are_those_of_wider_logits() {
    for dtype in [DType::F16, DType::Bf16] {
        for (n, classes) in [(64, 10), (7, 1000)] {
            let (logits, target) = (random(&[n, classes], 16).cast(dtype), labels(n, classes, 17));
            let compute = |op: &Op, inputs: &[Tensor]| {
                let outputs = infer(op, inputs);
                run(&Kernel::new(op, &facts_of(inputs), &outputs), inputs, &outputs).unwrap()
            };
            let loss = CrossEntropy::new(1, Some(2));
            let wider = logits.cast(DType::F32);
            let want = compute(&Op::CrossEntropy(loss), &[wider.clone(), target.clone()]);
            let wide = Op::CrossEntropy(CrossEntropy { wide: true, ..loss });
            let got = compute(&wide, &[logits.clone(), target.clone()]);
            let bytes = |tensors: &[Tensor]| tensors.iter().map(|t| t.bytes().to_vec()).collect::<Vec<_>>();
            assert_eq!((got[0].dtype(), bytes(&got)), (DType::F32, bytes(&want)), "{dtype}");
            let (dloss, lse) = (Tensor::from_f32(&[], &[0.7]), want[1].clone());
            let grad = CrossEntropyGrad::new(1, Some(2));
            let inputs = [dloss.clone(), wider, target.clone(), lse.clone()];
            let want = compute(&Op::CrossEntropyGrad(grad), &inputs)[0].cast(dtype);
            let wide = Op::CrossEntropyGrad(CrossEntropyGrad { wide: true, ..grad });
            assert_eq!(compute(&wide, &[dloss, logits, target, lse])[0].bytes(), want.bytes(), "{dtype}");
        }
    }
}

#[test]
fn elementwise_broadcasts_of_many_shapes() {
    let shapes: [[&[usize]; 2]; 7] = [
        [&[3, 40, 17], &[3, 40, 17]],
        [&[3, 40, 17], &[17]],
        [&[3, 40, 17], &[]],
        [&[1], &[30, 5]],
        [&[2, 8, 7, 7], &[8, 1, 1]],
        [&[6, 1, 5], &[1, 4, 5]],
        [&[6, 1], &[1, 70]],
    ];
    for [a, b] in shapes {
        let inputs = [random(a, 16), random(b, 17)];
        let what = format!("{a:?} {b:?}");
        for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Min] {
            verify(&what, Op::Binary(op), &inputs);
        }
        for op in [Compare::Less, Compare::LessEqual, Compare::Equal] {
            verify(&what, Op::Compare(op), &inputs);
        }
        let condition = Tensor::from_bool(b, &random(b, 18).to_f32().iter().map(|v| *v > 0.0).collect::<Vec<_>>());
        verify(&what, Op::Select(Select {}), &[condition.clone(), inputs[0].clone(), inputs[1].clone()]);
        verify(&what, Op::Select(Select {}), &[condition, inputs[1].clone(), inputs[0].clone()]);
    }
    let x = random(&[1000], 19);
    use Unary::*;
    let wide: Vec<f32> = x.to_f32().iter().map(|v| v * 12.0).collect();
    let wide = [Tensor::from_f32(&[1000], &wide)];
    for op in
        [Neg, Abs, Sign, Exp, Sin, Cos, Tanh, Sigmoid, Relu, Erf, Gelu, GeluTanh, Silu, Softplus, Floor, Ceil, Round]
    {
        verify("wide", Op::Unary(op), &wide);
    }
    let positive = [Tensor::from_f32(&[1000], &x.to_f32().iter().map(|v| v.abs() * 5.0 + 1e-3).collect::<Vec<_>>())];
    for op in [Log, Sqrt, Rsqrt, Reciprocal] {
        verify("positive", Op::Unary(op), &positive);
    }
}

#[test]
fn movements_of_many_shapes() {
    let x = random(&[5, 37, 4, 50], 20);
    let only_x = std::slice::from_ref(&x);
    for perm in [[0, 2, 1, 3], [0, 1, 3, 2], [3, 2, 1, 0], [0, 3, 1, 2], [1, 0, 2, 3], [2, 3, 0, 1]] {
        verify("", Op::Transpose(Transpose { perm: perm.to_vec() }), only_x);
    }
    for axes in [vec![0], vec![3], vec![1, 3], vec![0, 1, 2, 3]] {
        verify("", Op::Flip(Flip { axes }), only_x);
    }
    let dims = |list: [i64; 4]| list.iter().map(|&d| compiler::tensor::dim::Dim::from(d)).collect::<Vec<_>>();
    let slice = Slice { begin: dims([1, 0, 3, 7]), end: dims([5, 37, 4, 49]), step: vec![2, 3, 1, 5] };
    verify("", Op::Slice(slice), only_x);
    let pad = Pad { low: dims([1, 0, 0, 2]), high: dims([0, 2, 0, 3]), interior: vec![0, 1, 0, 2], value: 1.5 };
    verify("", Op::Pad(pad), only_x);
    let shape = [3usize, 5, 37, 4, 50].iter().map(|&d| d.into()).collect();
    verify("", Op::Broadcast(Broadcast { shape }), only_x);
    for axis in 0..4 {
        verify("", Op::Concat(Concat { axis }), &[x.clone(), random(&[5, 37, 4, 50], 21)]);
    }
    let table = random(&[100, 33], 22);
    let indices = labels(60, 100, 23).reshaped(vec![4, 15]).unwrap();
    verify("", Op::Gather(Gather { axis: 0 }), &[table, indices.clone()]);
    let scatter = ScatterAdd { axis: 0, size: 100usize.into() };
    verify("", Op::ScatterAdd(scatter), &[random(&[4, 15, 33], 24), indices.clone()]);
    verify("", Op::BatchGather(BatchGather { batch: 1 }), &[random(&[4, 100, 33], 25), indices.clone()]);
    let scatter = BatchScatterAdd { batch: 1, size: 100usize.into() };
    verify("", Op::BatchScatterAdd(scatter), &[random(&[4, 15, 33], 26), indices]);
}

#[test]
fn nothing_is_answered_like_the_reference() {
    let x = random(&[2, 0, 3], 1);
    let only_x = std::slice::from_ref(&x);
    for axis in 0..3 {
        check("empty", &Op::Softmax(Softmax { axis }), only_x);
        for kind in [ReduceKind::Sum, ReduceKind::Mean, ReduceKind::Max] {
            check("empty", &Op::Reduce(Reduce { kind, axes: vec![axis], keep: true }), only_x);
        }
        let inputs = [x.clone(), random(x.shape()[axis..].as_ref(), 2), random(x.shape()[axis..].as_ref(), 3)];
        check("empty", &Op::LayerNorm(LayerNorm { axis, epsilon: 1e-5 }), &inputs);
    }
    check("empty", &Op::Transpose(Transpose { perm: vec![2, 0, 1] }), only_x);
    check("empty", &Op::Flip(Flip { axes: vec![1] }), only_x);
    check("empty", &Op::Binary(Binary::Add), &[x.clone(), random(&[3], 4)]);
    let only_padding = Conv { window: window(&[1], &[2], &[2], &[1]), groups: 1 };
    check("only padding", &Op::Conv(only_padding), &[random(&[1, 2, 0], 5), random(&[3, 2, 2], 6)]);
    let no_images = Conv { window: window(&[1], &[0], &[0], &[1]), groups: 1 };
    check("no images", &Op::Conv(no_images), &[random(&[0, 2, 4], 5), random(&[3, 2, 2], 6)]);
    let no_spatial = [random(&[3, 2, 0], 7), random(&[2], 8), random(&[2], 9)];
    check("no spatial", &Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &no_spatial);
    let pool = MaxPool { kernel: vec![2], window: window(&[1], &[2], &[2], &[1]), ceil: false };
    check("only padding", &Op::MaxPool(pool), &[random(&[1, 2, 0], 5)]);
}
