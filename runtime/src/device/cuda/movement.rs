//! Data movement ops.

use super::draft::{KernelBuilder, PACK_BYTES, THREADS};
use super::element::{bits, compute_type, literal, load, storage_type, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::offsets::{Walk, merge_dims, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::slice::origin;
use compiler::op::{Concat, Dropout, DropoutPart, Flip, Iota, Pad, Slice, Transpose, Uniform};
use compiler::tensor::DType;
use compiler::tensor::view::strides;

/// The most inputs of a launch that concatenates.
const MOST_JOINED: usize = 32;

/// Smaller dimensions are transposed element by element.
const LEAST_TILED: usize = 16;

/// Copies elements of `from` at the walk's offsets to the elements of `to` in order.
pub fn copy_strided(from: (At, usize), to: At, y: &TensorLayout, walk: &Walk) -> Launch {
    let dtype = bits(y.dtype);
    let results = [(dtype, to, Walk::plain(&y.shape))];
    KernelBuilder::new(from.1.max(y.len())).each_element(
        &y.shape,
        &[(dtype, from.0, walk.clone())],
        &results,
        "y0 = x0;",
    )
}

/// Copies the input to the elements of `y` at the walk's offsets.
fn copy_to_strided(x: &TensorLayout, y: &TensorLayout, walk: Walk) -> Launch {
    let dtype = bits(y.dtype);
    let operands = [(dtype, At::input(0), Walk::plain(&x.shape))];
    KernelBuilder::new(y.len()).each_element(&x.shape, &operands, &[(dtype, At::output(0), walk)], "y0 = x0;")
}

pub fn copy(x: &TensorLayout, y: &TensorLayout) -> LaunchPlan {
    let flat = TensorLayout { dtype: y.dtype, shape: vec![y.len()] };
    LaunchPlan::of(copy_strided((At::input(0), x.len()), At::output(0), &flat, &Walk { base: 0, steps: vec![1] }))
}

fn from_walk(x: &TensorLayout, y: &TensorLayout, walk: Walk) -> Option<LaunchPlan> {
    Some(LaunchPlan::of(copy_strided((At::input(0), x.len()), At::output(0), y, &walk)))
}

pub fn transpose(op: &Transpose, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let x_strides = strides(&x.shape);
    let walk = Walk { base: 0, steps: op.perm.iter().map(|&axis| x_strides[axis] as isize).collect() };
    let dims = merge_dims(&y.shape, std::slice::from_ref(&walk));
    let contiguous = dims.iter().position(|(_, steps)| steps[0] == 1);
    match (contiguous, dims.last()) {
        (Some(contiguous), Some(last))
            if contiguous + 1 < dims.len() && dims[contiguous].0.min(last.0) >= LEAST_TILED =>
        {
            Some(LaunchPlan::of(transpose_tiles(&dims, contiguous, y)))
        }
        _ => from_walk(x, y, walk),
    }
}

/// A transpose of the last of these dimensions and `contiguous`, in which the input is contiguous. A block moves a
/// square through shared memory, so that it reads and writes adjacent elements.
fn transpose_tiles(dims: &[(usize, Vec<isize>)], contiguous: usize, y: &TensorLayout) -> Launch {
    let dtype = bits(y.dtype);
    let side = if dtype.size() > 2 { 32 } else { 64 };
    let to = strides(&dims.iter().map(|dim| dim.0).collect::<Vec<_>>());
    let (last, across) = (dims.len() - 1, dims[dims.len() - 1].1[0]);
    let (columns, rows) = (dims[last].0, dims[contiguous].0);
    let outer_axes: Vec<usize> = (0..last).filter(|k| *k != contiguous).collect();
    let shape: Vec<usize> = outer_axes.iter().map(|k| dims[*k].0).collect();
    let walk = |step: &dyn Fn(usize) -> isize| Walk { base: 0, steps: outer_axes.iter().map(|k| step(*k)).collect() };
    let (lines, expressions) = offsets("d", "square", &shape, &[walk(&|k| dims[k].1[0]), walk(&|k| to[k] as isize)]);
    let mut builder = KernelBuilder::new(y.len());
    builder.add_input("x", dtype, At::input(0));
    builder.add_output("y", dtype, At::output(0));
    let [across_rows, across_columns] = [rows, columns].map(|size| size.div_ceil(side));
    let loop_head = format!("#pragma unroll 8\nfor (u32 e = threadIdx.x; e < {side} * {side}; e += blockDim.x)");
    builder.add(&format!("__shared__ {} tile[{side}][{side} + 1];", storage_type(dtype)));
    let lines = format!(
        "at column = i % (at){across_columns} * {side}, row = i / (at){across_columns} % (at){across_rows} * {side};\n\
         at square = i / (at){};\n{lines}at from = {}, to = {};\n\
         {loop_head} {{\nat r = row + e % {side}, c = column + e / {side};\n\
         if (r < (at){rows} && c < (at){columns}) tile[e / {side}][e % {side}] = x[from + c * (at){across} + r];\n}}\n\
         __syncthreads();\n{loop_head} {{\nat r = row + e / {side}, c = column + e % {side};\n\
         if (r < (at){rows} && c < (at){columns}) y[to + r * (at){} + c] = tile[e % {side}][e / {side}];\n}}\n__syncthreads();",
        across_columns * across_rows,
        expressions[0],
        expressions[1],
        to[contiguous],
    );
    builder.block_each(shape.iter().product::<usize>() * across_rows * across_columns, THREADS as usize, &lines)
}

pub fn broadcast(x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    from_walk(x, y, Walk::broadcast(&x.shape, &y.shape))
}

/// Strided slice.
pub fn slice(op: &Slice, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let x_strides = strides(&x.shape);
    // For a single element the step is irrelevant, and may be too large to multiply.
    let step = |axis: usize| if y.shape[axis] > 1 { (x_strides[axis] * op.step[axis]) as isize } else { 0 };
    let steps = (0..x_strides.len()).map(step).collect();
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

/// Concatenation. A row of the result has one of each input, whose elements are adjacent.
pub fn concat(op: &Concat, inputs: &[TensorLayout], y: &TensorLayout) -> Option<LaunchPlan> {
    let row = |of: &TensorLayout| of.shape[op.axis..].iter().product::<usize>();
    let parts = inputs.iter().map(row).enumerate().filter(|(_, width)| *width > 0).collect::<Vec<_>>();
    let (mut launch_plan, mut first) = (LaunchPlan::default(), 0);
    for group in parts.chunks(MOST_JOINED) {
        launch_plan.launches.push(side_by_side(group, y, row(y), first));
        first += group.iter().map(|(_, width)| width).sum::<usize>();
    }
    Some(launch_plan)
}

/// Copies rows of inputs, given by number and width, to adjacent places from `first` on in rows of `y`.
fn side_by_side(parts: &[(usize, usize)], y: &TensorLayout, row: usize, first: usize) -> Launch {
    let dtype = bits(y.dtype);
    let widths = || parts.iter().map(|(_, width)| *width);
    let fits = |pack: &usize| {
        pack * dtype.size() <= PACK_BYTES && widths().chain([row, first]).all(|size| size.is_multiple_of(*pack))
    };
    let width = [16, 8, 4, 2].into_iter().find(fits).unwrap_or(1);
    let mut builder = KernelBuilder::new(y.len());
    let (mut search, mut end, total) = (String::new(), 0, widths().sum::<usize>());
    for (n, (k, part)) in parts.iter().enumerate() {
        builder.add_input(&format!("x{n}"), dtype, At::input(*k));
        let start = end;
        end += part;
        let condition = if end == total { String::new() } else { format!("if (column < (at){end}) ") };
        search.push_str(&format!("{condition}from = x{n} + (r * (at){part} + column - (at){start});\n"));
        search.push_str(if end == total { "" } else { "else " });
    }
    builder.add_output("y", dtype, At::output(0));
    let (element, packs) = (storage_type(dtype), total / width);
    let lines = format!(
        "at r = pack / (at){packs}, column = pack % (at){packs} * {width};\nconst {element}* from;\n{search}\
         *(Pack<{element}, {width}>*)(y + (r * (at){row} + (at){first} + column)) = *(const Pack<{element}, {width}>*)from;"
    );
    builder.each_pack(y.len() / row * total, width, &lines)
}

/// Edge and interior padding.
pub fn pad(op: &Pad, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let low = origin(&op.low, &y.shape).ok()?;
    let y_walk = Walk::plain(&y.shape);
    // Adjacent elements bound the step; a single element does not, and its step may be huge.
    let step = |axis: usize| match x.shape[axis] {
        0 | 1 => 0,
        _ => y_walk.steps[axis] * (op.interior[axis] as isize + 1),
    };
    let steps: Vec<isize> = (0..y_walk.steps.len()).map(step).collect();
    let value = match y.dtype.is_float() {
        true => store(y.dtype, &literal(y.dtype, op.value)),
        // Converts like the reference writes a float to an integer type.
        false if y.dtype == DType::U64 => format!("{}ull", op.value as u64),
        false => store(y.dtype, &format!("(i64){}ull", op.value as i64 as u64)),
    };
    let results = [(y.dtype, At::output(0), Walk::plain(&y.shape))];
    let fill = KernelBuilder::new(y.len()).each_element(&y.shape, &[], &results, &format!("y0 = {value};"));
    let inner = copy_to_strided(x, y, Walk { base: low, steps });
    Some(LaunchPlan { launches: vec![fill, inner], scratch: 0 })
}

pub fn iota(op: &Iota, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut builder = KernelBuilder::new(y.len());
    builder.add_output("y", y.dtype, At::output(0));
    let mut steps = vec![0; y.shape.len()];
    steps[op.axis] = 1;
    let (lines, expressions) = offsets("d", "i", &y.shape, &[Walk { base: 0, steps }]);
    let number = format!("(i64){}", expressions[0]);
    // Through f64, like the reference.
    let number = if y.dtype.is_float() { format!("(f64){number}") } else { number };
    Some(LaunchPlan::of(builder.each(y.len(), &format!("{lines}y[i] = {};", store(y.dtype, &number)))))
}

/// Uniform random numbers by element index; see the op's definition.
pub fn uniform(op: &Uniform, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut builder = KernelBuilder::new(y.len());
    builder.add_input("counter", compiler::tensor::DType::I64, At::input(0));
    builder.add(&format!("u64 key = mix(mix({}ull) ^ (u64)counter[0]);", op.stream));
    let unit = literal(compiler::tensor::DType::F64, 0.5f64.powi(op.bits() as i32));
    let number = format!("(f64)(mix(key ^ (u64)n) >> {}) * {unit}", 64 - op.bits());
    let results = [(y.dtype, At::output(0), Walk::plain(&y.shape))];
    Some(LaunchPlan::of(builder.each_element(&y.shape, &[], &results, &format!("y0 = {};", store(y.dtype, &number)))))
}

/// Dropout by element index; see the op's definition.
pub fn dropout(op: &Dropout, x: &TensorLayout) -> Option<LaunchPlan> {
    dropout_by(op, x, KernelBuilder::new(x.len()), "(u64)n")
}

/// Dropout of a tensor-parallel shard, with the mask of the whole tensor.
pub fn dropout_part(op: &DropoutPart, x: &TensorLayout) -> Option<LaunchPlan> {
    let mut builder = KernelBuilder::new(x.len());
    builder.add_input("device", DType::I64, At::input(2));
    dropout_by(&op.whole, x, builder, &shard_element("(u64)n", op.run, op.devices))
}

/// The index in the whole tensor of an element of the shard of `device`.
pub fn shard_element(index: &str, run: usize, devices: usize) -> String {
    format!("(({index} / {run}ull * {devices}ull + (u64)device[0]) * {run}ull + {index} % {run}ull)")
}

/// The expression of the dropout of element number `element` of a tensor, which has the value `x`.
pub fn dropout_expression(op: &Dropout, dtype: DType, [x, counter, element]: [&str; 3]) -> String {
    let (least, kind) = ((op.ratio * (1u64 << 53) as f64) as u64, compute_type(dtype));
    let key = format!("mix(mix({}ull) ^ (u64){counter})", op.stream);
    format!("(mix({key} ^ {element}) >> 11 >= {least}ull ? {x} * {} : ({kind})0)", literal(dtype, op.scale()))
}

/// Dropout with the mask of these elements.
fn dropout_by(op: &Dropout, x: &TensorLayout, mut builder: KernelBuilder, element: &str) -> Option<LaunchPlan> {
    builder.add_input("counter", DType::I64, At::input(1));
    let value = dropout_expression(op, x.dtype, [&load(x.dtype, "x0"), "counter[0]", element]);
    let lines = format!("{} v = {value};\ny0 = {};", compute_type(x.dtype), store(x.dtype, "v"));
    let walk = Walk::plain(&x.shape);
    let (operands, results) = ([(x.dtype, At::input(0), walk.clone())], [(x.dtype, At::output(0), walk)]);
    Some(LaunchPlan::of(builder.each_element(&x.shape, &operands, &results, &lines)))
}
