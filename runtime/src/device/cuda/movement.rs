//! Data movement ops.

use super::draft::{KernelBuilder, THREADS};
use super::element::{bits, held, literal, load, store, stored};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::offsets::{Walk, joined, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::slice::origin;
use compiler::op::{Concat, Dropout, DropoutPart, Flip, Iota, Pad, Slice, Transpose, Uniform};
use compiler::tensor::view::strides;

/// Smaller dimensions are transposed element by element.
const LEAST_TILED: usize = 16;

/// Copies elements of `from` at the walk's offsets to the elements of `to` in order.
pub fn moved(from: (At, usize), to: At, y: &TensorLayout, walk: &Walk) -> Launch {
    let dtype = bits(y.dtype);
    let results = [(dtype, to, Walk::plain(&y.shape))];
    KernelBuilder::new(from.1.max(y.len())).each_element(
        &y.shape,
        &[(dtype, from.0, walk.clone())],
        &results,
        "y0 = x0;",
    )
}

/// Copies input `k`, `x`, to the elements of `y` at the walk's offsets.
fn placed(k: usize, x: &TensorLayout, y: &TensorLayout, walk: Walk) -> Launch {
    let dtype = bits(y.dtype);
    let operands = [(dtype, At::input(k), Walk::plain(&x.shape))];
    KernelBuilder::new(y.len()).each_element(&x.shape, &operands, &[(dtype, At::output(0), walk)], "y0 = x0;")
}

pub fn copy(x: &TensorLayout, y: &TensorLayout) -> LaunchPlan {
    let flat = TensorLayout { dtype: y.dtype, shape: vec![y.len()] };
    LaunchPlan::of(moved((At::input(0), x.len()), At::output(0), &flat, &Walk { base: 0, steps: vec![1] }))
}

fn from_walk(x: &TensorLayout, y: &TensorLayout, walk: Walk) -> Option<LaunchPlan> {
    Some(LaunchPlan::of(moved((At::input(0), x.len()), At::output(0), y, &walk)))
}

pub fn transpose(op: &Transpose, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let own = strides(&x.shape);
    let walk = Walk { base: 0, steps: op.perm.iter().map(|&axis| own[axis] as isize).collect() };
    let dims = joined(&y.shape, std::slice::from_ref(&walk));
    let read = dims.iter().position(|(_, steps)| steps[0] == 1);
    match (read, dims.last()) {
        (Some(read), Some(last)) if read + 1 < dims.len() && dims[read].0.min(last.0) >= LEAST_TILED => {
            Some(LaunchPlan::of(tiled(&dims, read, y)))
        }
        _ => from_walk(x, y, walk),
    }
}

/// A transpose of the last of these dimensions and `read`, in which the input is contiguous. A block moves a square
/// through shared memory, so that it reads and writes adjacent elements.
fn tiled(dims: &[(usize, Vec<isize>)], read: usize, y: &TensorLayout) -> Launch {
    let dtype = bits(y.dtype);
    let side = if dtype.size() > 2 { 32 } else { 64 };
    let to = strides(&dims.iter().map(|dim| dim.0).collect::<Vec<_>>());
    let (last, across) = (dims.len() - 1, dims[dims.len() - 1].1[0]);
    let (columns, rows) = (dims[last].0, dims[read].0);
    let rest: Vec<usize> = (0..last).filter(|k| *k != read).collect();
    let shape: Vec<usize> = rest.iter().map(|k| dims[*k].0).collect();
    let walk = |step: &dyn Fn(usize) -> isize| Walk { base: 0, steps: rest.iter().map(|k| step(*k)).collect() };
    let (lines, places) = offsets("d", "square", &shape, &[walk(&|k| dims[k].1[0]), walk(&|k| to[k] as isize)]);
    let mut draft = KernelBuilder::new(y.len());
    draft.reads("x", dtype, At::input(0));
    draft.writes("y", dtype, At::output(0));
    let [across_rows, across_columns] = [rows, columns].map(|size| size.div_ceil(side));
    let each = format!("#pragma unroll 8\nfor (u32 e = threadIdx.x; e < {side} * {side}; e += blockDim.x)");
    draft.add(&format!("__shared__ {} tile[{side}][{side} + 1];", stored(dtype)));
    let lines = format!(
        "at column = i % (at){across_columns} * {side}, row = i / (at){across_columns} % (at){across_rows} * {side};\n\
         at square = i / (at){};\n{lines}at from = {}, to = {};\n\
         {each} {{\nat r = row + e % {side}, c = column + e / {side};\n\
         if (r < (at){rows} && c < (at){columns}) tile[e / {side}][e % {side}] = x[from + c * (at){across} + r];\n}}\n\
         __syncthreads();\n{each} {{\nat r = row + e / {side}, c = column + e % {side};\n\
         if (r < (at){rows} && c < (at){columns}) y[to + r * (at){} + c] = tile[e % {side}][e / {side}];\n}}\n__syncthreads();",
        across_columns * across_rows,
        places[0],
        places[1],
        to[read],
    );
    draft.block_each(shape.iter().product::<usize>() * across_rows * across_columns, THREADS as usize, &lines)
}

pub fn broadcast(x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    from_walk(x, y, Walk::stretched(&x.shape, &y.shape))
}

/// Strided slice.
pub fn slice(op: &Slice, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let own = strides(&x.shape);
    // For a single element the step is irrelevant, and may be too large to multiply.
    let step = |axis: usize| if y.shape[axis] > 1 { (own[axis] * op.step[axis]) as isize } else { 0 };
    let steps = (0..own.len()).map(step).collect();
    from_walk(x, y, Walk { base: origin(&op.begin, &x.shape).ok()?, steps })
}

pub fn flip(op: &Flip, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut walk = Walk::plain(&x.shape);
    for &axis in &op.axes {
        walk.base += (x.shape[axis] - 1) * walk.steps[axis] as usize;
        walk.steps[axis] = -walk.steps[axis];
    }
    from_walk(x, y, walk)
}

/// Concatenation: one launch per input.
pub fn concat(op: &Concat, inputs: &[TensorLayout], y: &TensorLayout) -> Option<LaunchPlan> {
    let mut launch_plan = LaunchPlan::default();
    let own = Walk::plain(&y.shape);
    let mut first = 0;
    for (k, x) in inputs.iter().enumerate() {
        let base = first * own.steps[op.axis] as usize;
        first += x.shape[op.axis];
        if x.is_empty() {
            continue;
        }
        launch_plan.launches.push(placed(k, x, y, Walk { base, steps: own.steps.clone() }));
    }
    Some(launch_plan)
}

/// Edge and interior padding.
pub fn pad(op: &Pad, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let low = origin(&op.low, &y.shape).ok()?;
    let own = Walk::plain(&y.shape);
    // Adjacent elements bound the step; a single element does not, and its step may be huge.
    let step = |axis: usize| match x.shape[axis] {
        0 | 1 => 0,
        _ => own.steps[axis] * (op.interior[axis] as isize + 1),
    };
    let steps: Vec<isize> = (0..own.steps.len()).map(step).collect();
    let value = match y.dtype.is_float() {
        true => store(y.dtype, &literal(y.dtype, op.value)),
        // Converts like the reference writes a float to an integer type.
        false if y.dtype == compiler::tensor::DType::U64 => format!("{}ull", op.value as u64),
        false => store(y.dtype, &format!("(i64){}ull", op.value as i64 as u64)),
    };
    let results = [(y.dtype, At::output(0), Walk::plain(&y.shape))];
    let fill = KernelBuilder::new(y.len()).each_element(&y.shape, &[], &results, &format!("y0 = {value};"));
    let inner = placed(0, x, y, Walk { base: low, steps });
    Some(LaunchPlan { launches: vec![fill, inner], scratch: 0 })
}

pub fn iota(op: &Iota, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut draft = KernelBuilder::new(y.len());
    draft.writes("y", y.dtype, At::output(0));
    let mut steps = vec![0; y.shape.len()];
    steps[op.axis] = 1;
    let (lines, places) = offsets("d", "i", &y.shape, &[Walk { base: 0, steps }]);
    let number = format!("(i64){}", places[0]);
    // Through f64, like the reference.
    let number = if y.dtype.is_float() { format!("(f64){number}") } else { number };
    Some(LaunchPlan::of(draft.each(y.len(), &format!("{lines}y[i] = {};", store(y.dtype, &number)))))
}

/// Uniform random numbers by element index; see the op's definition.
pub fn uniform(op: &Uniform, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut draft = KernelBuilder::new(y.len());
    draft.reads("counter", compiler::tensor::DType::I64, At::input(0));
    draft.add(&format!("u64 key = mix(mix({}ull) ^ (u64)counter[0]);", op.stream));
    let unit = literal(compiler::tensor::DType::F64, 0.5f64.powi(op.bits() as i32));
    let number = format!("(f64)(mix(key ^ (u64)n) >> {}) * {unit}", 64 - op.bits());
    let results = [(y.dtype, At::output(0), Walk::plain(&y.shape))];
    Some(LaunchPlan::of(draft.each_element(&y.shape, &[], &results, &format!("y0 = {};", store(y.dtype, &number)))))
}

/// Dropout by element index; see the op's definition.
pub fn dropout(op: &Dropout, x: &TensorLayout) -> Option<LaunchPlan> {
    dropout_by(op, x, KernelBuilder::new(x.len()), "(u64)n")
}

/// Dropout of a tensor-parallel shard, with the mask of the whole tensor.
pub fn dropout_part(op: &DropoutPart, x: &TensorLayout) -> Option<LaunchPlan> {
    let mut draft = KernelBuilder::new(x.len());
    draft.reads("device", compiler::tensor::DType::I64, At::input(2));
    dropout_by(&op.whole, x, draft, &shard_element("(u64)n", op.run, op.devices))
}

/// The index in the whole tensor of an element of the shard of `device`.
pub fn shard_element(own: &str, run: usize, devices: usize) -> String {
    format!("(({own} / {run}ull * {devices}ull + (u64)device[0]) * {run}ull + {own} % {run}ull)")
}

/// Dropout with the mask of these elements.
fn dropout_by(op: &Dropout, x: &TensorLayout, mut draft: KernelBuilder, element: &str) -> Option<LaunchPlan> {
    draft.reads("counter", compiler::tensor::DType::I64, At::input(1));
    let least = (op.ratio * (1u64 << 53) as f64) as u64;
    let kind = held(x.dtype);
    draft.add(&format!("u64 key = mix(mix({}ull) ^ (u64)counter[0]);", op.stream));
    let kept = format!("{} * {}", load(x.dtype, "x0"), literal(x.dtype, op.scale()));
    let lines = format!(
        "{kind} v = mix(key ^ {element}) >> 11 >= {least}ull ? {kept} : ({kind})0;\ny0 = {};",
        store(x.dtype, "v")
    );
    let walk = Walk::plain(&x.shape);
    let (operands, results) = ([(x.dtype, At::input(0), walk.clone())], [(x.dtype, At::output(0), walk)]);
    Some(LaunchPlan::of(draft.each_element(&x.shape, &operands, &results, &lines)))
}
