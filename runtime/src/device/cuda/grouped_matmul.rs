//! Grouped matrix products: one thread per result element.

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use crate::device::layout::TensorLayout;
use compiler::op::GroupedMatMul;

/// Advances `end` to the end of group `g`; see [`groups`](compiler::op::grouped_matmul::groups).
const NEXT: &str = "i64 to = ends[g];\nto = to < end ? end : to;\nend = to > rows ? rows : to;\n";

pub fn kernel(
    op: &GroupedMatMul,
    x: &TensorLayout,
    w: &TensorLayout,
    ends: &TensorLayout,
    y: &TensorLayout,
) -> Option<LaunchPlan> {
    let ([rows, k], n) = ([x.shape[0], x.shape[1]], y.shape[1]);
    let [along, across] = if op.transpose { [1, k] } else { [n, 1] };
    let mut builder = KernelBuilder::new(x.len().max(w.len()).max(y.len()));
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_input("w", w.dtype, At::input(1));
    builder.add_input("ends", ends.dtype, At::input(2));
    builder.add_output("y", y.dtype, At::output(0));
    let kind = compute_type(accumulator(y.dtype));
    let body = format!(
        "at row = i / (at){n}, column = i % (at){n};\ni64 rows = {rows}, end = 0;\nint g = 0;\n\
         for (; g < {groups}; g++) {{\n{NEXT}if ((i64)row < end) break;\n}}\n{kind} sum = 0;\n\
         if (g < {groups}) for (at l = 0; l < (at){k}; l++) sum = m_fma(({kind}){}, ({kind}){}, sum);\ny[i] = {};",
        load(x.dtype, &format!("x[row * (at){k} + l]")),
        load(w.dtype, &format!("w[(at)g * (at){} + l * (at){along} + column * (at){across}]", k * n)),
        store(y.dtype, "sum"),
        groups = ends.shape[0],
    );
    Some(LaunchPlan::of(builder.each(y.len(), &body)))
}

/// Gradient with respect to the matrices.
pub fn grad(a: &TensorLayout, b: &TensorLayout, ends: &TensorLayout, c: &TensorLayout) -> Option<LaunchPlan> {
    let (rows, m, n) = (a.shape[0], a.shape[1], b.shape[1]);
    let mut builder = KernelBuilder::new(a.len().max(b.len()).max(c.len()));
    builder.add_input("a", a.dtype, At::input(0));
    builder.add_input("b", b.dtype, At::input(1));
    builder.add_input("ends", ends.dtype, At::input(2));
    builder.add_output("c", c.dtype, At::output(0));
    let kind = compute_type(accumulator(c.dtype));
    let body = format!(
        "at own = i / (at){area}, row = i % (at){area} / (at){n}, column = i % (at){n};\n\
         i64 rows = {rows}, end = 0, begin = 0;\n\
         for (int g = 0; g <= (int)own; g++) {{\nbegin = end;\n{NEXT}}}\n{kind} sum = 0;\n\
         for (at s = (at)begin; s < (at)end; s++) sum = m_fma(({kind}){}, ({kind}){}, sum);\nc[i] = {};",
        load(a.dtype, &format!("a[s * (at){m} + row]")),
        load(b.dtype, &format!("b[s * (at){n} + column]")),
        store(c.dtype, "sum"),
        area = m * n,
    );
    Some(LaunchPlan::of(builder.each(c.len(), &body)))
}
