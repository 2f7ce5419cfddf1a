//! Ops that compare or accumulate along an axis: argmax, top-k, and cumulative sums.

use super::draft::KernelBuilder;
use super::element::{compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use crate::device::layout::TensorLayout;
use compiler::op::{ArgReduce, Cumulative, CumulativeKind, TopK};
use compiler::tensor::DType;

/// C++ condition that `a` at `p` precedes `b` at `q`. NaN comes first if the largest is sought or with `nan_first`,
/// else last.
fn precedes(largest: bool, is_float: bool, nan_first: bool) -> String {
    let order = if largest { ">" } else { "<" };
    if !is_float {
        return format!("(a != b ? a {order} b : p < q)");
    }
    let nan = if largest || nan_first { "a != a" } else { "b != b" };
    format!("((a != a) != (b != b) ? {nan} : a != b && a == a ? a {order} b : p < q)")
}

fn axis_sizes(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product())
}

/// Argmax or argmin.
pub fn arg(op: &ArgReduce, x: &TensorLayout) -> Option<LaunchPlan> {
    let (outer, size, inner) = axis_sizes(&x.shape, op.axis);
    let kind = compute_type(x.dtype);
    let mut builder = KernelBuilder::new(x.len());
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("y", DType::I64, At::output(0));
    let precedes = precedes(op.largest, x.dtype.is_float(), true);
    let element = load(x.dtype, &format!("x[from + k * (at){inner}]"));
    builder.add(&format!(
        "struct Best {{ {kind} value; u64 place; }};\n\
         auto better = [](Best l, Best r) {{ {kind} a = l.value, b = r.value; u64 p = l.place, q = r.place; \
         return q == ~0ull || (p != ~0ull && {precedes}) ? l : r; }};"
    ));
    let lines = format!(
        "at from = i / (at){inner} * (at){size} * (at){inner} + i % (at){inner};\n\
         Best best; best.value = 0; best.place = ~0ull;\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) {{ Best next; next.value = {element}; next.place = k; best = better(best, next); }}\n\
         best = across(best, better);\nif (threadIdx.x == 0) y[i] = (i64)best.place;"
    );
    Some(LaunchPlan::of(builder.block_each(outer * inner, size, &lines)))
}

/// Top-k in order: each is the best of those after the previous one.
pub fn top_k(op: &TopK, x: &TensorLayout, values: &TensorLayout) -> Option<LaunchPlan> {
    let (outer, size, inner) = axis_sizes(&x.shape, op.axis);
    let count = values.shape[op.axis];
    let kind = compute_type(x.dtype);
    let mut builder = KernelBuilder::new(x.len());
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("y", x.dtype, At::output(0));
    builder.add_output("places", DType::I64, At::output(1));
    let precedes = precedes(op.largest, x.dtype.is_float(), false);
    let element = load(x.dtype, &format!("x[from + k * (at){inner}]"));
    builder.add(&format!(
        "struct Best {{ {kind} value; u64 place; }};\n\
         auto before = []({kind} a, u64 p, {kind} b, u64 q) {{ return {precedes}; }};\n\
         auto better = [before](Best l, Best r) {{ \
         return r.place == ~0ull || (l.place != ~0ull && before(l.value, l.place, r.value, r.place)) ? l : r; }};"
    ));
    let lines = format!(
        "at from = i / (at){inner} * (at){size} * (at){inner} + i % (at){inner};\n\
         at to = i / (at){inner} * (at){count} * (at){inner} + i % (at){inner};\n\
         Best last; last.value = 0; last.place = ~0ull;\n\
         for (at rank = 0; rank < (at){count}; rank++) {{\n\
         Best best; best.value = 0; best.place = ~0ull;\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) {{\n\
         Best next; next.value = {element}; next.place = k;\n\
         if (rank == 0 || before(last.value, last.place, next.value, next.place)) best = better(best, next);\n}}\n\
         last = across(best, better);\n\
         if (threadIdx.x == 0) {{ y[to + rank * (at){inner}] = x[from + (at)last.place * (at){inner}]; places[to + rank * (at){inner}] = (i64)last.place; }}\n}}"
    );
    Some(LaunchPlan::of(builder.block_each(outer * inner, size, &lines)))
}

/// Cumulative sum or product: one thread per row.
pub fn cumulative(op: &Cumulative, x: &TensorLayout) -> Option<LaunchPlan> {
    let (outer, size, inner) = axis_sizes(&x.shape, op.axis);
    let kind = compute_type(x.dtype);
    let kind = if kind == "bool" { "i64" } else { kind };
    let mut builder = KernelBuilder::new(x.len());
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("y", x.dtype, At::output(0));
    let (start, sign) = match op.kind {
        CumulativeKind::Sum => (0, "+"),
        CumulativeKind::Prod => (1, "*"),
    };
    let place = if op.reverse { format!("((at){size} - 1 - k)") } else { "k".to_string() };
    let result_name = if op.exclusive { "so_far" } else { "joined" };
    let lines = format!(
        "at from = i / (at){inner} * (at){size} * (at){inner} + i % (at){inner};\n{kind} so_far = {start};\n\
         for (at k = 0; k < (at){size}; k++) {{\nat p = from + {place} * (at){inner};\n\
         {kind} joined = so_far {sign} ({kind}){};\ny[p] = {};\nso_far = joined;\n}}",
        load(x.dtype, "x[p]"),
        store(x.dtype, result_name)
    );
    Some(LaunchPlan::of(builder.each(outer * inner, &lines)))
}
