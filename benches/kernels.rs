//! CPU kernel timings on one thread. The reported throughput is floating-point operations for products and convolutions
//! (`Gelem/s` means GFLOP/s), and bytes moved for the rest.

use compiler::op::table::rule;
use compiler::op::*;
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use runtime::device::cpu::{ALIGNMENT, Kernel};
use std::time::Duration;

struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    fn new(len: usize) -> Buffer {
        let bytes = vec![0; len + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Buffer { bytes, start, len }
    }

    fn numbers(fact: &Fact) -> Buffer {
        let mut buffer = Buffer::new(fact.bytes().expect("shapes are concrete") as usize);
        if fact.dtype == DType::F32 {
            for (i, bytes) in buffer.slice_mut().chunks_exact_mut(4).enumerate() {
                bytes.copy_from_slice(&((i * 7919 % 1000) as f32 / 1000.0 - 0.5).to_le_bytes());
            }
        }
        buffer
    }

    fn slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    fn slice_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

fn time(c: &mut Criterion, title: &str, op: Op, shapes: &[&[usize]], by_flops: bool) {
    let facts: Vec<Fact> = shapes.iter().map(|shape| Fact::of(DType::F32, shape)).collect();
    time_facts(c, title, op, &facts, by_flops);
}

fn time_facts(c: &mut Criterion, title: &str, op: Op, facts: &[Fact], by_flops: bool) {
    let refs: Vec<&Fact> = facts.iter().collect();
    let outputs = rule(&op).infer(&refs).expect("the inputs fit");
    let cost = rule(&op).cost(&refs, &outputs);
    let kernel = Kernel::new(&op, facts, &outputs);
    assert!(!kernel.is_reference(), "{title} has no fast kernel");
    let inputs: Vec<Buffer> = facts.iter().map(Buffer::numbers).collect();
    let inputs: Vec<&[u8]> = inputs.iter().map(Buffer::slice).collect();
    let mut written: Vec<Buffer> = outputs.iter().map(Buffer::numbers).collect();
    let mut written: Vec<&mut [u8]> = written.iter_mut().map(Buffer::slice_mut).collect();
    let mut workspace = Buffer::new(kernel.workspace());
    let mut group = c.benchmark_group(rule(&op).name());
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(600));
    group.throughput(match by_flops {
        true => Throughput::Elements(cost.flops as u64),
        false => Throughput::Bytes(cost.bytes as u64),
    });
    group.bench_function(title, |b| {
        b.iter(|| kernel.run(&inputs, &mut written, workspace.slice_mut()).expect("the kernel runs"));
    });
    group.finish();
}

fn products(c: &mut Criterion) {
    let op = |transpose_a, transpose_b| Op::MatMul(MatMul { transpose_a, transpose_b });
    time(c, "256", op(false, false), &[&[256, 256], &[256, 256]], true);
    time(c, "1024", op(false, false), &[&[1024, 1024], &[1024, 1024]], true);
    time(c, "1024 b transposed", op(false, true), &[&[1024, 1024], &[1024, 1024]], true);
    time(c, "1024 a transposed", op(true, false), &[&[1024, 1024], &[1024, 1024]], true);
    time(c, "32x1024x1024", op(false, false), &[&[32, 1024], &[1024, 1024]], true);
    time(c, "32x1024x1024 b transposed", op(false, true), &[&[32, 1024], &[1024, 1024]], true);
    time(c, "48 of 128x128x64", op(false, false), &[&[48, 128, 64], &[48, 64, 128]], true);
    time(c, "48 of 128x128x64 b transposed", op(false, true), &[&[48, 128, 64], &[48, 128, 64]], true);
    time(c, "64x3136x576", op(false, false), &[&[64, 576], &[576, 3136]], true);
}

/// Title, input shape, weight shape, stride, padding, groups.
type Convolution = (&'static str, [usize; 4], [usize; 4], usize, usize, usize);

fn convolutions(c: &mut Criterion) {
    let cases: [Convolution; 7] = [
        ("64@56", [8, 64, 56, 56], [64, 64, 3, 3], 1, 1, 1),
        ("128@28", [8, 128, 28, 28], [128, 128, 3, 3], 1, 1, 1),
        ("256@14", [8, 256, 14, 14], [256, 256, 3, 3], 1, 1, 1),
        ("512@7", [8, 512, 7, 7], [512, 512, 3, 3], 1, 1, 1),
        ("stem 7x7", [8, 3, 224, 224], [64, 3, 7, 7], 2, 3, 1),
        ("1x1 64 to 256@56", [8, 64, 56, 56], [256, 64, 1, 1], 1, 0, 1),
        ("depthwise 128@28", [8, 128, 28, 28], [128, 1, 3, 3], 1, 1, 128),
    ];
    for (title, x, w, stride, pad, groups) in cases {
        let window = Window {
            strides: vec![stride; 2],
            pads_begin: vec![pad; 2],
            pads_end: vec![pad; 2],
            dilations: vec![1; 2],
        };
        let forward = Op::Conv(Conv { window: window.clone(), groups });
        let facts = [Fact::of(DType::F32, &x), Fact::of(DType::F32, &w)];
        let y = rule(&forward).infer(&[&facts[0], &facts[1]]).expect("the shapes fit").remove(0);
        time_facts(c, title, forward, &facts, true);
        let spatial = x[2..].iter().map(|&d| d.into()).collect();
        let input_grad = Op::ConvInputGrad(ConvInputGrad { window: window.clone(), groups, spatial });
        time_facts(c, title, input_grad, &[y.clone(), facts[1].clone()], true);
        let weight_grad = Op::ConvWeightGrad(ConvWeightGrad { window, groups, kernel: w[2..].to_vec() });
        time_facts(c, title, weight_grad, &[y, facts[0].clone()], true);
    }
}

fn others(c: &mut Criterion) {
    let plane: &[usize] = &[8, 64, 56, 56];
    time(c, "small", Op::Binary(Binary::Add), &[&[64, 1024], &[64, 1024]], false);
    time(c, "plane", Op::Binary(Binary::Add), &[plane, plane], false);
    time(c, "channel", Op::Binary(Binary::Mul), &[plane, &[64, 1, 1]], false);
    for op in [Unary::Relu, Unary::Exp, Unary::Tanh, Unary::Gelu, Unary::Log] {
        time(c, "64x1024", Op::Unary(op), &[&[64, 1024]], false);
    }
    time(c, "4096x128", Op::Softmax(Softmax { axis: 1 }), &[&[4096, 128]], false);
    let attention = Attention { scale: 0.125, causal: true, empty: EmptyRow::Nan, dropout: None, part: None };
    for (title, shape) in [("48 of 128x64", [4, 12, 128, 64]), ("4 of 2048x64", [1, 4, 2048, 64])] {
        let heads: &[usize] = &shape;
        time(c, title, Op::Attention(attention), &[heads; 3], true);
        let grad = Op::AttentionGrad(AttentionGrad { forward: attention });
        time(c, title, grad, &[heads, heads, heads, heads, heads, &shape[..3]], true);
    }
    time(c, "1024x768", Op::LayerNorm(LayerNorm { axis: 1, epsilon: 1e-5 }), &[&[1024, 768], &[768], &[768]], false);
    let grad: [&[usize]; 5] = [&[1024, 768], &[1024, 768], &[768], &[1024, 1], &[1024, 1]];
    time(c, "1024x768", Op::LayerNormGrad(LayerNormGrad { axis: 1 }), &grad, false);
    time(c, "plane", Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[plane, &[64], &[64]], false);
    time(c, "plane", Op::BatchNormGrad(BatchNormGrad {}), &[plane, plane, &[64], &[64], &[64]], false);
    let sum = |axes: &[usize]| Op::Reduce(Reduce { kind: ReduceKind::Sum, axes: axes.to_vec(), keep: false });
    time(c, "trailing", sum(&[1]), &[&[1024, 1024]], false);
    time(c, "leading", sum(&[0]), &[&[1024, 1024]], false);
    time(c, "1024x1024", Op::Transpose(Transpose { perm: vec![1, 0] }), &[&[1024, 1024]], false);
    time(c, "heads", Op::Transpose(Transpose { perm: vec![0, 2, 1, 3] }), &[&[8, 128, 12, 64]], false);
    let window = Window { strides: vec![2; 2], pads_begin: vec![1; 2], pads_end: vec![1; 2], dilations: vec![1; 2] };
    let pool = MaxPool { kernel: vec![3; 2], window, ceil: false };
    time(c, "3x3 stride 2", Op::MaxPool(pool.clone()), &[&[8, 64, 112, 112]], false);
    let grad = Op::MaxPoolGrad(MaxPoolGrad { forward: pool });
    time(c, "3x3 stride 2", grad, &[&[8, 64, 112, 112], plane], false);
}

criterion_group!(benches, products, convolutions, others);
criterion_main!(benches);
