//! Matrix products by cuBLASLt, and by pipec's kernels where it is missing, on a GPU if there is one. On other machines
//! the simulated library and driver run the same tests.

use super::{distance, on_simulated_gpu};
use crate::support::reference::reference;
use compiler::op::table::rule;
use compiler::op::{MatMul, Op};
use compiler::tensor::fact::Fact;
use compiler::tensor::{DType, Tensor};
use runtime::device::api::{Device, OutputMode};
use runtime::device::cuda::gpu::{self, Gpu};
use runtime::device::cuda::library_product::LibraryProduct;
use runtime::device::cuda::padded_product::PaddedProduct;
use runtime::device::cuda::queue::{Queue, RawEvent};
use runtime::device::layout::{TensorLayout, accumulation_type};
use runtime::device::open;
use std::sync::Arc;

/// Leading dimensions of both operands. The last ones are too many for calls of the library.
const BATCHES: [(&[usize], &[usize]); 9] = [
    (&[], &[]),
    (&[3], &[]),
    (&[], &[3]),
    (&[3], &[3]),
    (&[2, 1], &[1, 3]),
    (&[2, 3], &[3]),
    (&[2, 3], &[2, 1]),
    (&[2, 1, 4], &[3, 1]),
    (&[65, 1], &[1, 66]),
];

/// Rows and columns of the product, and terms of its sums.
const SIZES: [[usize; 3]; 5] = [[1, 1, 1], [3, 5, 7], [1, 8, 16], [17, 33, 65], [64, 8, 32]];

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];

/// Values between -1 and 1.
pub fn values(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_f32(shape, &values).cast(dtype)
}

pub fn device() -> Option<Arc<dyn Device>> {
    if gpu::count() == 0 {
        println!("skipped: no GPU");
        return None;
    }
    Some(open("cuda:0").unwrap())
}

/// Computes a product on a GPU, also added to other values, and compares both with the reference. The operands start
/// `offset` elements behind the start of their memory.
fn check(device: &dyn Device, op: &MatMul, dtype: DType, shapes: [&[usize]; 2], offset: usize) {
    let op = Op::MatMul(*op);
    let inputs = [values(dtype, shapes[0], 1), values(dtype, shapes[1], 2)];
    let facts = inputs.each_ref().map(|input| Fact::of(dtype, input.shape()));
    let results = rule(&op).infer(&[&facts[0], &facts[1]]).unwrap();
    let want = &reference(&op, &inputs, &results).unwrap()[0];
    let what = format!("{op:?}, {dtype}, {shapes:?}, offset {offset}");
    let kernel = device.kernel(&op, &facts, &results).unwrap();
    assert!(kernel.can_accumulate(), "{what}");
    let sum_dtype = accumulation_type(dtype);
    let (stream, skipped) = (device.stream().unwrap(), offset * dtype.size());
    let upload = |bytes: &[u8]| device.upload(&[&vec![0xff; skipped][..], bytes].concat()).unwrap();
    let on_gpu = inputs.each_ref().map(|input| upload(input.bytes()));
    let regions = on_gpu.each_ref().map(|buffer| buffer.region_of(skipped..buffer.len()));
    let before = values(sum_dtype, want.shape(), 3);
    let limit = match dtype {
        DType::F64 => 1e-14,
        DType::F32 if device.info().tf32 => 2e-3,
        DType::F32 => 1e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    // A term of a sum is not rounded to 16 bits.
    let is_half = dtype != sum_dtype;
    let wide = inputs.each_ref().map(|input| input.cast(sum_dtype));
    let wide_facts = wide.each_ref().map(|input| Fact::of(sum_dtype, input.shape()));
    let wide_results = rule(&op).infer(&[&wide_facts[0], &wide_facts[1]]).unwrap();
    let term = &reference(&op, &wide, &wide_results).unwrap()[0];
    for mode in [OutputMode::Overwrite, OutputMode::BeginSum, OutputMode::Accumulate] {
        let (dtype, want) = if mode == OutputMode::Overwrite { (dtype, want) } else { (sum_dtype, term) };
        let limit = if is_half && mode != OutputMode::Overwrite { 1e-6 } else { limit };
        let skipped = offset * dtype.size();
        let upload = |bytes: &[u8]| device.upload(&[&vec![0xff; skipped][..], bytes].concat()).unwrap();
        let (initial, want) = match mode {
            // A product that is not added reads nothing of its output.
            OutputMode::Overwrite | OutputMode::BeginSum => {
                (vec![0xff; want.shape().iter().product::<usize>() * dtype.size()], want.to_f64())
            }
            OutputMode::Accumulate => {
                let sums = want.to_f64().into_iter().zip(before.to_f64());
                (before.bytes().to_vec(), sums.map(|(product, before)| product + before).collect())
            }
        };
        let want: Vec<u8> = want.into_iter().flat_map(f64::to_le_bytes).collect();
        let (mut output, mut workspace) = (upload(&initial), device.upload(&vec![0xff; kernel.workspace()]).unwrap());
        let end = output.len();
        let to = output.region_mut().slice(skipped..end);
        stream.run(&*kernel, &regions, &mut [to], workspace.region_mut(), mode).unwrap();
        stream.finish().unwrap();
        let bytes = output.download().unwrap()[skipped..].to_vec();
        let shape = results[0].concrete().unwrap();
        let tensor = |dtype, bytes: Vec<u8>| Tensor::new(dtype, shape.clone(), bytes.into()).unwrap();
        let error = distance(&tensor(dtype, bytes), &tensor(DType::F64, want));
        assert!(error <= limit, "{what}, {mode:?}: {error:e} away");
    }
}

fn shapes(op: &MatMul, [rows, columns, terms]: [usize; 3], batches: (&[usize], &[usize])) -> [Vec<usize>; 2] {
    let a = if op.transpose_a { [terms, rows] } else { [rows, terms] };
    let b = if op.transpose_b { [columns, terms] } else { [terms, columns] };
    [[batches.0, &a].concat(), [batches.1, &b].concat()]
}

fn transposes() -> [MatMul; 4] {
    [(false, false), (false, true), (true, false), (true, true)]
        .map(|(transpose_a, transpose_b)| MatMul { transpose_a, transpose_b })
}

#[test]
fn products_of_all_shapes() {
    let Some(device) = device() else { return };
    for op in transposes() {
        for batches in &BATCHES[..BATCHES.len() - 1] {
            for (sizes, dtype) in SIZES.into_iter().flat_map(|sizes| DTYPES.map(|dtype| (sizes, dtype))) {
                let [a, b] = shapes(&op, sizes, *batches);
                check(&*device, &op, dtype, [&a, &b], 0);
            }
        }
    }
}

#[test]
fn some_products() {
    let Some(device) = device() else { return };
    for op in transposes() {
        let [a, b] = shapes(&op, SIZES[3], BATCHES[4]);
        check(&*device, &op, DType::F32, [&a, &b], 0);
    }
    let op = transposes()[1];
    for dtype in DTYPES {
        let [a, b] = shapes(&op, SIZES[1], BATCHES[1]);
        check(&*device, &op, dtype, [&a, &b], 0);
    }
}

/// Products of which a size is no multiple of 8, in pieces of few bytes.
#[test]
fn padded_products_in_pieces() {
    let Some(device) = device() else { return };
    let (gpu, stream) = (Gpu::open(0).unwrap(), device.stream().unwrap());
    let kinds = [DType::F16, DType::Bf16].into_iter().flat_map(|dtype| [false, true].map(|is_sum| (dtype, is_sum)));
    let kinds: Vec<(DType, bool)> = kinds.collect();
    for (op, (dtype, is_sum)) in transposes().into_iter().flat_map(|op| kinds.iter().map(move |kind| (op, *kind))) {
        // Rows, columns or terms, then all.
        for (sizes, most_bytes) in [
            ([403, 208, 264], 60_000),
            ([400, 203, 144], 60_000),
            ([400, 208, 135], 60_000),
            ([803, 403, 403], 340_000),
        ] {
            // A wider result takes more to copy, which only pays off with more to compute.
            let sizes = [sizes[0], sizes[1], sizes[2] * if is_sum { 2 } else { 1 }];
            let [a, b] = shapes(&op, sizes, (&[], &[]));
            let inputs = [values(dtype, &a, 1), values(dtype, &b, 2)];
            let facts = inputs.each_ref().map(|input| Fact::of(dtype, input.shape()));
            let op = Op::MatMul(op);
            let results = rule(&op).infer(&[&facts[0], &facts[1]]).unwrap();
            let want = &reference(&op, &inputs, &results).unwrap()[0];
            let mut layouts = [&facts[0], &facts[1], &results[0]].map(TensorLayout::of);
            let result = if is_sum { DType::F32 } else { dtype };
            layouts[2].dtype = result;
            let Op::MatMul(product) = &op else { unreachable!() };
            let what = format!("{product:?}, {dtype} to {result}, {sizes:?}");
            let product = LibraryProduct::new(&gpu, product, layouts.each_ref(), false).unwrap();
            let padded = PaddedProduct::new(&gpu, &product, most_bytes).expect(&what);
            let on_gpu = inputs.each_ref().map(|input| device.upload(input.bytes()).unwrap());
            let mut output = device.upload(&vec![0xff; layouts[2].bytes()]).unwrap();
            let mut workspace = device.upload(&vec![0xff; padded.workspace()]).unwrap();
            let queue = Queue::new().unwrap();
            let addresses = [on_gpu[0].region().address(), on_gpu[1].region().address(), output.region_mut().address()];
            stream.finish().unwrap();
            let scratch_address = workspace.region_mut().address();
            // SAFETY: the buffers have the sizes of the product's operands and of its workspace.
            let run = |adds| unsafe { padded.run(&gpu, &queue, addresses, scratch_address, adds) }.unwrap();
            assert!(run(false), "{what}");
            assert_eq!(run(true), is_sum, "{what}");
            RawEvent::record(&queue).unwrap().synchronize().unwrap();
            let want: Vec<u8> = want
                .to_f64()
                .iter()
                .flat_map(|product| (product * f64::from(1 + u8::from(is_sum))).to_le_bytes())
                .collect();
            let tensor = |dtype, bytes: Vec<u8>| Tensor::new(dtype, layouts[2].shape.clone(), bytes.into()).unwrap();
            let error = distance(&tensor(result, output.download().unwrap().into_owned()), &tensor(DType::F64, want));
            assert!(error <= if dtype == DType::F16 { 1e-3 } else { 8e-3 }, "{what}: {error:e} away");
        }
    }
}

#[test]
fn products_in_tf32() {
    let Some(device) = device().and_then(|device| device.with_tf32()) else { return };
    for op in transposes() {
        for (sizes, dtype) in SIZES.into_iter().flat_map(|sizes| DTYPES.map(|dtype| (sizes, dtype))) {
            let [a, b] = shapes(&op, sizes, BATCHES[1]);
            check(&*device, &op, dtype, [&a, &b], 0);
        }
    }
    // 1 + 2⁻¹² becomes 1.
    let op = Op::MatMul(transposes()[0]);
    let (fact, inputs) = (Fact::of(DType::F32, &[1, 1]), [1.0 + 2f32.powi(-12), 1.0].map(|value| value.to_ne_bytes()));
    let kernel = device.kernel(&op, &[fact.clone(), fact.clone()], &[fact]).unwrap();
    let [a, b, mut c] = [&inputs[0], &inputs[1], &[0; 4]].map(|bytes| device.upload(bytes).unwrap());
    let (stream, mut workspace) = (device.stream().unwrap(), device.allocate(kernel.workspace()).unwrap());
    let (operands, mode) = ([a.region(), b.region()], OutputMode::Overwrite);
    stream.run(&*kernel, &operands, &mut [c.region_mut()], workspace.region_mut(), mode).unwrap();
    stream.finish().unwrap();
    assert_eq!(c.download().unwrap(), &1f32.to_ne_bytes()[..]);
}

#[test]
fn products_that_the_library_does_not_compute() {
    let Some(device) = device() else { return };
    let op = transposes()[1];
    let [a, b] = shapes(&op, [2, 3, 2], BATCHES[BATCHES.len() - 1]);
    check(&*device, &op, DType::F32, [&a, &b], 0);
    // Operands that are not aligned.
    let [a, b] = shapes(&op, SIZES[1], BATCHES[1]);
    check(&*device, &op, DType::F32, [&a, &b], 1);
}

#[test]
fn the_library_computes_products() {
    for variables in [&[][..], &[("PIPEC_SIM_SEED", "3")], &[("PIPEC_SIM_ARCH", "80")]] {
        let Some((products, launches)) = on_simulated_gpu("products::products_of_all_shapes", variables) else {
            return;
        };
        // Each is written, and begins a sum, and is added.
        let least = 4 * (BATCHES.len() - 1) * SIZES.len() * DTYPES.len() * 3;
        assert!(products >= least as u64 && launches == 0, "{products} products, {launches} launches");
    }
    let (products, launches) = on_simulated_gpu("products::padded_products_in_pieces", &[]).unwrap();
    assert!(products > 40 && launches > 40, "{products} products, {launches} launches");
    for (architecture, has_any) in [("75", false), ("80", true)] {
        let (products, _) =
            on_simulated_gpu("products::products_in_tf32", &[("PIPEC_SIM_ARCH", architecture)]).unwrap();
        assert_eq!(products > 0, has_any, "{architecture}");
    }
    assert_eq!(on_simulated_gpu("products::products_that_the_library_does_not_compute", &[]), Some((0, 2 * 3)));
}

#[test]
fn without_the_library_own_kernels_compute_products() {
    let Some(counts) = on_simulated_gpu("products::some_products", &[("PIPEC_SIM_CUBLASLT", "0")]) else { return };
    // Each is written, and begins a sum, and is added.
    assert_eq!(counts, (0, 3 * (4 + 4)));
}
