//! Reductions: one block per result if its elements are contiguous, else one thread per result. With too few results to
//! fill a GPU, a first launch reduces parts.

use super::draft::{KernelBuilder, THREADS};
use super::element::{accumulator, held, load, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::offsets::{Walk, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::{Reduce, ReduceKind};
use compiler::tensor::DType;
use compiler::tensor::view::strides;

/// Threads that fill a GPU.
const ENOUGH: usize = 1 << 16;

/// Minimum elements per part.
const LEAST_PART: usize = 512;

/// A reduction operation in kernel source.
struct Join {
    /// Compute type.
    held: &'static str,
    /// Identity element.
    start: String,
    /// Combination of `a` and `b`.
    of: String,
}

impl Join {
    fn new(kind: ReduceKind, dtype: DType) -> Join {
        let held = held(dtype);
        // Booleans are combined as integers.
        let held = if held == "bool" { "i64" } else { held };
        let float = dtype.is_float();
        let start = match kind {
            ReduceKind::Sum | ReduceKind::Mean => format!("({held})0"),
            ReduceKind::Prod => format!("({held})1"),
            ReduceKind::Max if float => format!("({held})__uint_as_float(0xff800000u)"),
            ReduceKind::Min if float => format!("({held})__uint_as_float(0x7f800000u)"),
            ReduceKind::Max => limits(dtype).0.to_string(),
            ReduceKind::Min => limits(dtype).1.to_string(),
        };
        let of = match kind {
            ReduceKind::Sum | ReduceKind::Mean => "(a + b)",
            ReduceKind::Prod => "(a * b)",
            ReduceKind::Max => "m_max(a, b)",
            ReduceKind::Min => "m_min(a, b)",
        };
        Join { held, start, of: of.to_string() }
    }
}

/// Minimum and maximum of an integer type.
fn limits(dtype: DType) -> (&'static str, &'static str) {
    match dtype {
        DType::I64 => ("(-0x7fffffffffffffffll - 1)", "0x7fffffffffffffffll"),
        DType::I32 => ("(i64)(-0x7fffffff - 1)", "(i64)0x7fffffff"),
        DType::I16 => ("(i64)-0x8000", "(i64)0x7fff"),
        DType::I8 => ("(i64)-0x80", "(i64)0x7f"),
        DType::U32 => ("(i64)0", "(i64)0xffffffffll"),
        DType::U16 => ("(i64)0", "(i64)0xffff"),
        DType::U8 => ("(i64)0", "(i64)0xff"),
        DType::Bool => ("(i64)0", "(i64)1"),
        _ => ("0ull", "0xffffffffffffffffull"),
    }
}

pub fn kernel(op: &Reduce, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut launch_plan = LaunchPlan::default();
    reduce(&mut launch_plan, op.kind, &op.axes, (At::input(0), x), (At::output(0), y.dtype));
    Some(launch_plan)
}

/// Appends a reduction of `x` over `axes` to a plan.
pub fn reduce(launch_plan: &mut LaunchPlan, kind: ReduceKind, axes: &[usize], x: (At, &TensorLayout), y: (At, DType)) {
    let (from, layout) = x;
    let own = strides(&layout.shape);
    let along = |reduced: bool| -> (Vec<usize>, Vec<isize>) {
        let axes = (0..own.len()).filter(|axis| axes.contains(axis) == reduced);
        axes.map(|axis| (layout.shape[axis], own[axis] as isize)).unzip()
    };
    let (outer, outer_steps) = along(false);
    let (inner, inner_steps) = along(true);
    let (results, each) = (outer.iter().product::<usize>(), inner.iter().product::<usize>());
    // Either the elements of a result or adjacent results are contiguous.
    let by_block = inner_steps.last() == Some(&1) && each >= 32;
    let workers = if by_block { results * super::draft::threads_for(each) as usize } else { results };
    let parts = (ENOUGH / workers.max(1)).min(each / LEAST_PART).max(1);
    let part = each.div_ceil(parts);
    let parts = each.div_ceil(part.max(1)).max(1);

    let divisor = if kind == ReduceKind::Mean && layout.dtype.is_float() { each } else { 1 };
    let outer = (outer.as_slice(), Walk { base: 0, steps: outer_steps });
    let inner = (inner.as_slice(), Walk { base: 0, steps: inner_steps });
    let shape = Shape { outer, inner, results, each, parts, part, by_block, max_elements: layout.len() };
    if parts == 1 {
        launch_plan.launches.push(join_parts(kind, (from, layout.dtype), y, &shape, divisor));
        return;
    }
    // Partial results keep the width of the compute type.
    let kept = if layout.dtype.is_float() { accumulator(layout.dtype) } else { wide(layout.dtype) };
    let partials = launch_plan.take(results * parts * kept.size());
    launch_plan.launches.push(join_parts(kind, (from, layout.dtype), (partials, kept), &shape, 1));
    let joined = Shape {
        outer: (&[results], Walk { base: 0, steps: vec![parts as isize] }),
        inner: (&[parts], Walk { base: 0, steps: vec![1] }),
        results,
        each: parts,
        parts: 1,
        part: parts,
        by_block: parts >= 32,
        max_elements: results * parts,
    };
    launch_plan.launches.push(join_parts(kind, (partials, kept), y, &joined, divisor));
}

fn wide(dtype: DType) -> DType {
    if dtype == DType::U64 { DType::U64 } else { DType::I64 }
}

struct Shape<'a> {
    /// Shape of the results, and their start offsets.
    outer: (&'a [usize], Walk),
    /// Shape of a result's elements, and their offsets from its start.
    inner: (&'a [usize], Walk),
    results: usize,
    each: usize,
    /// Number of parts per result, and elements per part.
    parts: usize,
    part: usize,
    by_block: bool,
    max_elements: usize,
}

/// Writes every part of every result; the parts of a result are adjacent.
fn join_parts(kind: ReduceKind, x: (At, DType), y: (At, DType), shape: &Shape<'_>, divisor: usize) -> Launch {
    let Join { held, start, of } = Join::new(kind, x.1);
    let mut draft = KernelBuilder::new(shape.max_elements.max(shape.results * shape.parts));
    draft.reads("x", x.1, x.0);
    draft.writes("y", y.1, y.0);
    // The result index varies fastest, so that adjacent threads read adjacent results.
    let (result, part, count) = (shape.results, shape.part, shape.results * shape.parts);
    let place = format!(
        "at result = i % (at){result}, piece = i / (at){result};\nat to = result * (at){} + piece;\n",
        shape.parts
    );
    let (outer_lines, outer) = offsets("o", "result", shape.outer.0, std::slice::from_ref(&shape.outer.1));
    let (inner_lines, inner) = offsets("r", "k", shape.inner.0, std::slice::from_ref(&shape.inner.1));
    let element = load(x.1, &format!("x[from + {}]", inner[0]));
    let (first, step) = if shape.by_block { ("threadIdx.x", "blockDim.x") } else { ("0", "1") };
    let mut lines = format!(
        "{place}{outer_lines}at from = {};\nat end = (piece + 1) * (at){part} < (at){each} ? (piece + 1) * (at){part} : (at){each};\n\
         {held} total = {start};\nfor (at k = piece * (at){part} + {first}; k < end; k += {step}) {{\n{inner_lines}\
         {held} a = total, b = ({held}){element};\ntotal = {of};\n}}\n",
        outer[0],
        each = shape.each,
    );
    if shape.by_block {
        lines.push_str(&format!(
            "total = across(total, []({held} a, {held} b) {{ return {of}; }});\nif (threadIdx.x == 0) "
        ));
    }
    let value = if divisor == 1 { "total".to_string() } else { format!("total / ({held}){divisor}") };
    lines.push_str(&format!("y[to] = {};", store(y.1, &value)));
    if shape.by_block {
        draft.block_each(count, shape.part.min(THREADS as usize), &lines)
    } else {
        draft.each(count, &lines)
    }
}
