//! Reductions. Where the elements of a result are adjacent, a block has one result. Where adjacent results are, a block
//! has the columns of a few and its threads the rows. Else a thread has one result. With too few results to fill a GPU,
//! parts are reduced first. The last block of a result joins its parts, always in the same order. If each thread has a
//! result, a second launch does.

use super::draft::{KernelBuilder, PACK_BYTES, THREADS, threads_for};
use super::element::{accumulator, compute_type, load, storage_type, store};
use super::launch_plan::{At, COUNTERS, Launch, LaunchPlan};
use super::offsets::{Packed, Walk, merge_dims, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::{Reduce, ReduceKind};
use compiler::tensor::DType;
use compiler::tensor::view::strides;

/// Threads that fill a GPU.
const ENOUGH: usize = 1 << 17;

// A result in parts has at least 2 blocks of 32 threads.
const _: () = assert!(ENOUGH / 64 <= COUNTERS);

/// Fewest elements of a part that one thread has.
const LEAST_EACH: usize = 4;

/// Bytes of adjacent results of a block with columns.
const COLUMN_BYTES: usize = 128;

/// A reduction operation in kernel source.
struct Join {
    /// Compute type.
    compute_type: &'static str,
    /// Identity element.
    start: String,
    /// Combination of `a` and `b`.
    of: String,
}

impl Join {
    fn new(kind: ReduceKind, dtype: DType) -> Join {
        let compute_type = compute_type(dtype);
        // Booleans are combined as integers.
        let compute_type = if compute_type == "bool" { "i64" } else { compute_type };
        let float = dtype.is_float();
        let start = match kind {
            ReduceKind::Sum | ReduceKind::Mean => format!("({compute_type})0"),
            ReduceKind::Prod => format!("({compute_type})1"),
            ReduceKind::Max if float => format!("({compute_type})__uint_as_float(0xff800000u)"),
            ReduceKind::Min if float => format!("({compute_type})__uint_as_float(0x7f800000u)"),
            ReduceKind::Max => limits(dtype).0.to_string(),
            ReduceKind::Min => limits(dtype).1.to_string(),
        };
        let of = match kind {
            ReduceKind::Sum | ReduceKind::Mean => "(a + b)",
            ReduceKind::Prod => "(a * b)",
            ReduceKind::Max => "m_max(a, b)",
            ReduceKind::Min => "m_min(a, b)",
        };
        Join { compute_type, start, of: of.to_string() }
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

/// The launches that write the reduction as the first term of a sum of this type, and add it to one. `None` for
/// reductions other than sums of floats.
pub fn terms(op: &Reduce, x: &TensorLayout, sum: DType) -> Option<[LaunchPlan; 2]> {
    let suits = op.kind == ReduceKind::Sum && x.dtype.is_float() && !x.is_empty();
    suits.then(|| {
        [false, true].map(|adds| {
            let (mut launch_plan, y) = (LaunchPlan::default(), Target { at: At::output(0), dtype: sum, adds });
            reduce_and_divide(&mut launch_plan, op.kind, &op.axes, (At::input(0), x), y, 1);
            launch_plan
        })
    })
}

/// Where a reduction is written, or added.
#[derive(Clone, Copy)]
struct Target {
    at: At,
    dtype: DType,
    adds: bool,
}

/// Appends a reduction of `x` over `axes` to a plan.
pub fn reduce(launch_plan: &mut LaunchPlan, kind: ReduceKind, axes: &[usize], x: (At, &TensorLayout), y: (At, DType)) {
    let terms: usize = axes.iter().map(|&axis| x.1.shape[axis]).product();
    let divisor = if kind == ReduceKind::Mean && x.1.dtype.is_float() { terms } else { 1 };
    reduce_and_divide(launch_plan, kind, axes, x, Target { at: y.0, dtype: y.1, adds: false }, divisor);
}

fn reduce_and_divide(
    launch_plan: &mut LaunchPlan,
    kind: ReduceKind,
    axes: &[usize],
    (from, layout): (At, &TensorLayout),
    y: Target,
    divisor: usize,
) {
    let contiguous = strides(&layout.shape);
    let select = |reduced: bool| -> (Vec<usize>, Walk) {
        let axes = (0..contiguous.len()).filter(|axis| axes.contains(axis) == reduced);
        let (shape, steps) = axes.map(|axis| (layout.shape[axis], contiguous[axis] as isize)).unzip();
        (shape, Walk { base: 0, steps })
    };
    let (outer, inner) = (select(false), select(true));
    let task = Task::new(kind, (from, layout.dtype), outer, inner);
    if task.parts == 1 {
        launch_plan.launches.push(task.launch(y, divisor, None));
        return;
    }
    // Partial results keep the width of the compute type.
    let partial_dtype = if layout.dtype.is_float() { accumulator(layout.dtype) } else { wide(layout.dtype) };
    let partials = launch_plan.take(task.results * task.parts * partial_dtype.size());
    let partial = Target { at: partials, dtype: partial_dtype, adds: false };
    if let Mapping::Thread = task.mapping {
        launch_plan.launches.push(task.launch(partial, 1, None));
        let layout = TensorLayout { dtype: partial_dtype, shape: vec![task.results, task.parts] };
        reduce_and_divide(launch_plan, kind, &[1], (partials, &layout), y, divisor);
    } else {
        launch_plan.launches.push(task.launch(partial, 1, Some((y, divisor))));
    }
}

fn wide(dtype: DType) -> DType {
    if dtype == DType::U64 { DType::U64 } else { DType::I64 }
}

#[derive(Clone, Copy)]
enum Mapping {
    /// One block per result.
    Block,
    /// A block has the results of so many threads, and its other threads further elements of these.
    Columns { lanes: usize },
    /// One thread per result.
    Thread,
}

/// The first launch of a reduction.
struct Task {
    kind: ReduceKind,
    x: (At, DType),
    /// Packs of results, and where they start.
    outer: Packed,
    /// Packs of the elements of a result, and where they are from its start.
    inner: Packed,
    results: usize,
    /// Packs of elements of each result.
    each: usize,
    mapping: Mapping,
    /// Number of parts per result, and packs per part.
    parts: usize,
    part: usize,
}

impl Task {
    fn new(kind: ReduceKind, x: (At, DType), outer: (Vec<usize>, Walk), inner: (Vec<usize>, Walk)) -> Task {
        let pack =
            |(shape, walk): &(Vec<usize>, Walk), width: usize| Packed::new(shape, std::slice::from_ref(walk), width);
        let is_adjacent = |(shape, walk): &(Vec<usize>, Walk), least: usize| {
            merge_dims(shape, std::slice::from_ref(walk))
                .last()
                .is_some_and(|(size, steps)| steps[0] == 1 && *size >= least)
        };
        let (results, elements) = (outer.0.iter().product::<usize>(), inner.0.iter().product::<usize>());
        // The most elements of a pack such that those of every row of packs start at multiples of it.
        let max_width = |walk: &Walk| {
            let fits = |width: &usize| walk.steps.iter().all(|step| step % *width as isize == 0);
            [8, 4, 2].into_iter().filter(|width| width * x.1.size() <= PACK_BYTES).find(fits).unwrap_or(1)
        };
        let (mapping, outer, inner) = if is_adjacent(&inner, 1) && elements >= 32 {
            (Mapping::Block, pack(&outer, 1), pack(&inner, max_width(&outer.1)))
        } else if is_adjacent(&outer, 8) && elements >= 8 {
            let outer = pack(&outer, max_width(&inner.1));
            let lanes = (COLUMN_BYTES / x.1.size() / outer.width).clamp(1, 64);
            (Mapping::Columns { lanes }, outer, pack(&inner, 1))
        } else {
            (Mapping::Thread, pack(&outer, 1), pack(&inner, 1))
        };
        let each = elements / inner.width;
        // Threads that share a result, and all threads.
        let (rows, threads) = match mapping {
            Mapping::Block => (threads_for(each) as usize, results * threads_for(each) as usize),
            Mapping::Columns { lanes } => {
                let tiles = (results / outer.width).div_ceil(lanes);
                (THREADS as usize / lanes, tiles * THREADS as usize)
            }
            Mapping::Thread => (128, results),
        };
        let parts = (ENOUGH / threads).min(each / (rows * LEAST_EACH)).max(1);
        let part = each.div_ceil(parts);
        let parts = each.div_ceil(part);
        Task { kind, x, outer, inner, results, each, mapping, parts, part }
    }

    /// Writes every part of every result, divided by `divisor`. If `final_target` is given, the last block of a result
    /// joins its parts, and writes them there, divided by that divisor.
    fn launch(&self, y: Target, divisor: usize, final_target: Option<(Target, usize)>) -> Launch {
        let Task { results, each, parts, part, .. } = *self;
        let Join { compute_type, start, of } = Join::new(self.kind, self.x.1);
        let mut builder = KernelBuilder::new(results * each * self.inner.width);
        builder.add_input("x", self.x.1, self.x.0);
        builder.add_output("y", y.dtype, y.at);
        if let Some((final_target, _)) = final_target {
            builder.add_output("all", final_target.dtype, final_target.at);
            builder.add_counters();
        }
        let (width, packs) = (self.outer.width, results / self.outer.width);
        let (outer_lines, outer) = offsets("o", "result", &self.outer.shape, &self.outer.walks);
        let (inner_lines, inner) = offsets("r", "k", &self.inner.shape, &self.inner.walks);
        // A pack has elements of adjacent results, or of one.
        let read = width.max(self.inner.width);
        let (element, total) = (load(self.x.1, "p.of[e]"), if width > 1 { "total.of[e]" } else { "total.of[0]" });
        let (first, step) = match self.mapping {
            Mapping::Block => ("threadIdx.x".to_string(), "blockDim.x".to_string()),
            Mapping::Columns { lanes } => (format!("threadIdx.x / {lanes}"), format!("{}", THREADS as usize / lanes)),
            Mapping::Thread => ("0".to_string(), "1".to_string()),
        };
        let join = format!(
            "[](Total l, Total r) {{ for (int e = 0; e < {width}; e++) {{ {compute_type} a = l.of[e], b = r.of[e]; l.of[e] = {of}; }} return l; }}"
        );
        let empty = format!("#pragma unroll\nfor (int e = 0; e < {width}; e++) total.of[e] = {start};\n");
        let body = format!(
            "typedef Pack<{compute_type}, {width}> Total;\ntypedef Pack<{storage_type}, {read}> Elements;\n\
             {outer_lines}at from = {outer}, end = (piece + 1) * (at){part} < (at){each} ? (piece + 1) * (at){part} : (at){each};\n\
             Total total;\n{empty}\
             #pragma unroll 4\nfor (at k = piece * (at){part} + {first}; k < end; k += {step}) {{\n{inner_lines}\
             Elements p = *(const Elements*)(x + (from + {inner}));\n#pragma unroll\nfor (int e = 0; e < {read}; e++) {{\n\
             {compute_type} a = {total}, b = ({compute_type}){element};\n{total} = {of};\n}}\n}}\n",
            storage_type = storage_type(self.x.1),
            outer = outer[0],
            inner = inner[0],
        );
        let write = |name: &str, y: Target, divisor: usize, to: &str| {
            let value = match divisor {
                1 => "total.of[e]".to_string(),
                _ => format!("total.of[e] / ({compute_type}){divisor}"),
            };
            let result = format!("Pack<{}, {width}>", storage_type(y.dtype));
            let (before, value) = match y.adds {
                true => {
                    (format!(" = *(const {result}*)({name} + {to})"), format!("{} + {value}", load(y.dtype, "q.of[e]")))
                }
                false => (String::new(), value),
            };
            format!(
                "{result} q{before};\n#pragma unroll\nfor (int e = 0; e < {width}; e++) q.of[e] = {};\n*({result}*)({name} + {to}) = q;",
                store(y.dtype, &value)
            )
        };
        // Joins the parts, which start at `place` with stride `apart`.
        let finish = |counter: &str, (place, apart): (&str, usize), across: &str, writes: &str, to: &str| {
            let Some((final_target, divisor)) = final_target else { return String::new() };
            format!(
                "\nif (is_last_block(counters + {counter}, {parts})) {{\n{empty}\
                 for (at k = {first}; k < (at){parts}; k += {step}) {{\n\
                 typedef Pack<{kept}, {width}> Part;\nPart p = *(const Part*)(y + ({place} + k * (at){apart}));\n\
                 #pragma unroll\nfor (int e = 0; e < {width}; e++) {{\n\
                 {compute_type} a = total.of[e], b = p.of[e];\ntotal.of[e] = {of};\n}}\n}}\n\
                 total = {across};\nif ({writes}) {{\n{}\n}}\n}}",
                write("all", final_target, divisor, to),
                kept = storage_type(y.dtype),
            )
        };
        match self.mapping {
            Mapping::Block => {
                let (across, writes) = ("across(total, join)", "threadIdx.x == 0");
                let lines = format!(
                    "at result = i / (at){parts}, piece = i % (at){parts};\n{body}auto join = {join};\ntotal = {across};\n\
                     if ({writes}) {{\n{}\n}}{}",
                    write("y", y, divisor, "i"),
                    finish("result", (&format!("result * (at){parts}"), 1), across, writes, "result")
                );
                builder.block_each(results * parts, part, &lines)
            }
            Mapping::Columns { lanes } => {
                let tiles = packs.div_ceil(lanes);
                let across = format!("across_rows(total, {lanes}, join)");
                let writes = format!("is_within && threadIdx.x < {lanes}");
                let result_index = format!("result * {width}");
                let lines = format!(
                    "at piece = i / (at){tiles}, tile = i % (at){tiles}, result = tile * {lanes} + threadIdx.x % {lanes};\n\
                     bool is_within = result < (at){packs};\nif (!is_within) result = 0;\n{body}\
                     auto join = {join};\ntotal = {across};\nif ({writes}) {{\n{}\n}}{}",
                    write("y", y, divisor, &format!("(piece * (at){packs} + result) * {width}")),
                    finish("tile", (&result_index, results), &across, &writes, &result_index)
                );
                builder.block_each(tiles * parts, THREADS as usize, &lines)
            }
            Mapping::Thread => {
                // The result varies fastest, so that adjacent threads read adjacent results.
                let lines = format!(
                    "at result = i % (at){results}, piece = i / (at){results};\n{body}{}",
                    write("y", y, divisor, &format!("result * (at){parts} + piece"))
                );
                builder.each(results * parts, &lines)
            }
        }
    }
}
