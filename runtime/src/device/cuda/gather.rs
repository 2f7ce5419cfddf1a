//! Gather and scatter.
//!
//! Slices with the same target are combined in index order without atomics. Each target stores the first index that
//! names it, and each index the next one with the same target; one thread per element follows this list.

use super::draft::{KernelBuilder, PACK_BYTES, threads_for};
use super::element::{accumulator, bits, compute_type, load, storage_type, store};
use super::launch_plan::{At, Base, Launch, LaunchPlan};
use crate::device::layout::TensorLayout;
use compiler::op::{BatchGather, BatchScatterAdd, Gather, Scatter, ScatterAdd, ScatterKind};
use compiler::tensor::DType;

/// The index space: rows of one axis, or of one axis per example of a batch, consecutively.
#[derive(Clone, Copy)]
struct Rows<'a> {
    indices: &'a TensorLayout,
    /// Axis size.
    size: usize,
    /// Number of examples with separate axes and indices.
    examples: usize,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.size * self.examples
    }

    /// Expression for the row of index `k`, below [`Rows::count`]; `~0` for an index out of range.
    fn row(&self, k: &str) -> String {
        let (dtype, size) = (self.indices.dtype, self.size);
        let element = load(dtype, &format!("indices[{k}]"));
        let first = match self.examples {
            0 | 1 => String::new(),
            examples => format!(" + {k} / (at){} * (at){size}", self.indices.len() / examples),
        };
        match dtype {
            DType::U64 => format!("({element} < (u64){size} ? (at){element}{first} : ~(at)0)"),
            _ => format!(
                "((u64)(i64){element} < (u64){size} ? (at){element}{first} : (i64){element} < 0 && (i64){element} >= -(i64){size} ? (at)((i64){element} + (i64){size}){first} : ~(at)0)"
            ),
        }
    }
}

/// One block that sets the fault cell for the first index out of range.
fn check(rows: Rows<'_>, input: usize) -> Launch {
    let Rows { indices, size, .. } = rows;
    let mut builder = KernelBuilder::new(indices.len().max(rows.count()));
    builder.add_input("indices", indices.dtype, At::input(input));
    builder.add_fault(At { base: Base::Fault, offset: 0 });
    let lines = format!(
        "u64 wrong = ~0ull;\nfor (at k = threadIdx.x; k < (at){}; k += blockDim.x) if ({} == ~(at)0 && k < wrong) wrong = k;\n\
         wrong = across(wrong, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0 && wrong != ~0ull && fault->kind == 0) {{ fault->kind = 1; fault->value = (i64){}; fault->size = {size}; }}",
        indices.len(),
        rows.row("k"),
        load(indices.dtype, "indices[wrong]"),
    );
    builder.block_each(1, indices.len(), &lines)
}

pub fn gather(op: &Gather, x: &TensorLayout, indices: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let (size, run) = (x.shape[op.axis], x.shape[op.axis + 1..].iter().product::<usize>());
    let rows = Rows { indices, size, examples: 1 };
    let index = format!("i / (at){run} % (at){}", indices.len());
    Some(gather_rows(rows, run, &index, &format!("i / (at){} * (at){size}", run * indices.len()), x, y))
}

/// Gather with separate indices for each example.
pub fn batch_gather(
    op: &BatchGather,
    x: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let (size, run) = (x.shape[op.batch], x.shape[op.batch + 1..].iter().product::<usize>());
    let rows = Rows { indices, size, examples: x.shape[..op.batch].iter().product() };
    Some(gather_rows(rows, run, &format!("i / (at){run}"), "0", x, y))
}

/// Copies slices of `run` elements: element `i` is of that with index number `index`, after the first `before` slices.
fn gather_rows(
    rows: Rows<'_>,
    run: usize,
    index: &str,
    before: &str,
    x: &TensorLayout,
    y: &TensorLayout,
) -> LaunchPlan {
    let (dtype, width) = (bits(x.dtype), width(x.dtype, run));
    let mut builder = KernelBuilder::new(x.len().max(y.len()));
    builder.add_input("x", dtype, At::input(0));
    builder.add_input("indices", rows.indices.dtype, At::input(1));
    builder.add_output("y", dtype, At::output(0));
    let lines = format!(
        "typedef Pack<{storage_type}, {width}> Slice;\nat i = pack * {width}, k = {index}, place = {};\nSlice slice = {{}};\n\
         if (place != ~(at)0) slice = *(const Slice*)(x + (({before} + place) * (at){run} + i % (at){run}));\n\
         *(Slice*)(y + i) = slice;",
        rows.row("k"),
        storage_type = storage_type(dtype),
    );
    LaunchPlan { launches: vec![check(rows, 1), builder.each_pack(y.len(), width, &lines)], scratch: 0 }
}

/// Adjacent elements that a thread has of slices of `run` elements.
fn width(dtype: DType, run: usize) -> usize {
    [8, 4, 2].into_iter().find(|width| width * dtype.size() <= PACK_BYTES && run.is_multiple_of(*width)).unwrap_or(1)
}

/// The lists: `first` per target and `next` per index; `~0` ends a list.
fn index_lists(launch_plan: &mut LaunchPlan, rows: Rows<'_>) -> (At, At) {
    let (indices, size) = (rows.indices, rows.count());
    let (first, next) = (launch_plan.take(size * 8), launch_plan.take(indices.len() * 8));
    let mut builder = KernelBuilder::new(size);
    builder.add_output("first", DType::U64, first);
    launch_plan.launches.push(builder.each(size, "first[i] = ~0ull;"));
    let mut builder = KernelBuilder::new(indices.len().max(size));
    builder.add_input("indices", indices.dtype, At::input(1));
    builder.add_output("first", DType::U64, first);
    builder.add_output("next", DType::U64, next);
    // A block finds the nearest smaller and larger index with the same target.
    let count = indices.len();
    let lines = format!(
        "at place = {};\nu64 before = ~0ull, behind = ~0ull;\n\
         for (at k = threadIdx.x; k < (at){count}; k += blockDim.x) {{\nif (k == i || {} != place) continue;\n\
         if (k < i) before = k; else if (behind == ~0ull) behind = k;\n}}\n\
         before = across(before, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         behind = across(behind, [](u64 a, u64 b) {{ return a < b ? a : b; }});\n\
         if (threadIdx.x == 0) {{ next[i] = behind; if (before == ~0ull && place != ~(at)0) first[place] = i; }}",
        rows.row("i"),
        rows.row("k"),
    );
    launch_plan.launches.push(builder.block_each(count, threads_for(count) as usize, &lines));
    (first, next)
}

/// Adds slices of `dy` at their indices.
pub fn scatter_add(op: &ScatterAdd, dy: &TensorLayout, indices: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    add(op, dy, indices, y, None)
}

/// The launches that write these sums as the first term of a sum of this type, and add them to one. `None` for empty
/// tensors.
pub fn terms(
    op: &ScatterAdd,
    dy: &TensorLayout,
    indices: &TensorLayout,
    sum: &TensorLayout,
) -> Option<[LaunchPlan; 2]> {
    if !sum.dtype.is_float() || [dy, indices, sum].into_iter().any(TensorLayout::is_empty) {
        return None;
    }
    Some([add(op, dy, indices, sum, None)?, add(op, dy, indices, sum, Some(At::output(0)))?])
}

/// `x` as for [`combine`].
fn add(
    op: &ScatterAdd,
    dy: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
    x: Option<At>,
) -> Option<LaunchPlan> {
    let rows = Rows { indices, size: y.shape[op.axis], examples: 1 };
    combine(rows, y.shape[op.axis + 1..].iter().product(), ScatterKind::Add, x, (At::input(0), dy), y)
}

/// Adds slices of `dy`, with separate indices for each example.
pub fn batch_scatter_add(
    op: &BatchScatterAdd,
    dy: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let rows = Rows { indices, size: y.shape[op.batch], examples: y.shape[..op.batch].iter().product() };
    combine(rows, y.shape[op.batch + 1..].iter().product(), ScatterKind::Add, None, (At::input(0), dy), y)
}

/// Combines slices of the third input with the first input.
pub fn scatter(op: &Scatter, indices: &TensorLayout, updates: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let rows = Rows { indices, size: y.shape[op.axis], examples: 1 };
    combine(rows, y.shape[op.axis + 1..].iter().product(), op.kind, Some(At::input(0)), (At::input(2), updates), y)
}

/// `x` are the first operands of every result, else they are 0. If they are the results themselves, those without updates
/// stay.
fn combine(
    rows: Rows<'_>,
    run: usize,
    kind: ScatterKind,
    x: Option<At>,
    updates: (At, &TensorLayout),
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let (indices, size) = (rows.indices, rows.count());
    let mut launch_plan = LaunchPlan::default();
    launch_plan.launches.push(check(rows, 1));
    let (first, next) = index_lists(&mut launch_plan, rows);
    let value = match y.dtype {
        d if d.is_float() => compute_type(accumulator(d)),
        DType::Bool if kind != ScatterKind::Replace => "i64",
        d => compute_type(d),
    };
    let mut builder = KernelBuilder::new(updates.1.len().max(y.len()));
    let is_in_place = x == Some(At::output(0));
    if let Some(x) = x.filter(|_| !is_in_place) {
        builder.add_input("x", y.dtype, x);
    }
    let update_dtype = updates.1.dtype;
    builder.add_input("updates", update_dtype, updates.0);
    builder.add_input("first", DType::U64, first);
    builder.add_input("next", DType::U64, next);
    builder.add_output("y", y.dtype, At::output(0));
    let width = width(if update_dtype.size() > y.dtype.size() { update_dtype } else { y.dtype }, run);
    let start = match (x, is_in_place) {
        (None, _) => "0".to_string(),
        (_, true) => load(y.dtype, "y[i + e]"),
        (_, false) => load(y.dtype, "x[i + e]"),
    };
    let skip = if is_in_place { "if (first[place] == ~0ull) continue;\n" } else { "" };
    let combination = match kind {
        ScatterKind::Replace => "b",
        ScatterKind::Add => "a + b",
        ScatterKind::Mul => "a * b",
        ScatterKind::Max => "m_max(a, b)",
        ScatterKind::Min => "m_min(a, b)",
    };
    let lines = format!(
        "typedef Pack<{}, {width}> Slice;\ntypedef Pack<{}, {width}> Result;\nat i = pack * {width};\n\
         at within = i % (at){run}, place = i / (at){run} % (at){size}, block = i / (at){};\n{skip}{value} sums[{width}];\n\
         #pragma unroll\nfor (int e = 0; e < {width}; e++) sums[e] = ({value}){start};\n\
         for (u64 k = first[place]; k != ~0ull; k = next[k]) {{\n\
         Slice slice = *(const Slice*)(updates + ((block * (at){} + (at)k) * (at){run} + within));\n\
         #pragma unroll\nfor (int e = 0; e < {width}; e++) {{\n{value} a = sums[e], b = ({value}){};\nsums[e] = {combination};\n}}\n}}\n\
         Result result;\n#pragma unroll\nfor (int e = 0; e < {width}; e++) result.of[e] = {};\n*(Result*)(y + i) = result;",
        storage_type(update_dtype),
        storage_type(y.dtype),
        run * size,
        indices.len(),
        load(update_dtype, "slice.of[e]"),
        store(y.dtype, "sums[e]"),
    );
    launch_plan.launches.push(builder.each_pack(y.len(), width, &lines));
    Some(launch_plan)
}
