//! Softmax and log-softmax: one block per row.

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, literal, store};
use super::launch_plan::{At, LaunchPlan};
use super::rows::{Read, Rows, Written};
use crate::device::layout::TensorLayout;
use compiler::tensor::DType;

/// The rows of `x` along an axis, and the index `from` of the first element of row `i`.
pub fn rows_of(x: &TensorLayout, axis: usize) -> (Rows, String) {
    let (size, inner) = (x.shape[axis], x.shape[axis + 1..].iter().product::<usize>());
    match inner {
        1 => (Rows::adjacent(size, x.len(), x.dtype.size()), format!("at from = i * (at){size};\n")),
        _ => (
            Rows::new(size, inner, x.dtype.size()),
            format!("at from = i / (at){inner} * (at){} + i % (at){inner};\n", size * inner),
        ),
    }
}

/// The tensor `x` as an operand of passes.
pub fn operand<'a>(dtype: DType) -> Read<'a> {
    Read { name: "x", dtype, from: "from", is_kept: true }
}

/// Code that computes the maximum `most` of a row of `x` and the sum `total` of its exponentials, with one pass over
/// memory.
pub fn most_and_total(dtype: DType, rows: &Rows) -> String {
    let kind = compute_type(accumulator(dtype));
    let least = literal(accumulator(dtype), f64::NEG_INFINITY);
    if rows.fit() {
        return format!(
            "{kind} most = {least}, total = 0;\n{}most = across(most, []({kind} a, {kind} b) {{ return a > b ? a : b; }});\n{}\
             total = sum_across(total);\n",
            rows.pass(true, &[operand(dtype)], &[], "most = x_k > most ? x_k : most;"),
            rows.pass(false, &[operand(dtype)], &[], "total += m_exp(x_k - most);")
        );
    }
    // A sum of exponentials is relative to the maximum so far. An infinite maximum gives NaN.
    format!(
        "struct Sum {{ {kind} most, total; }};\nSum sum;\nsum.most = {least};\nsum.total = 0;\n{}\
         sum = across(sum, [](Sum a, Sum b) {{\n{kind} most = a.most > b.most ? a.most : b.most;\n\
         a.total = a.total * (a.most == most ? ({kind})1 : m_exp(a.most - most)) + b.total * (b.most == most ? ({kind})1 : m_exp(b.most - most));\n\
         a.most = most;\nreturn a;\n}});\n{kind} most = sum.most, total = sum.total + (most - most);\n",
        rows.pass(
            true,
            &[operand(dtype)],
            &[],
            "if (x_k > sum.most) { sum.total *= m_exp(sum.most - x_k); sum.most = x_k; }\nsum.total += m_exp(x_k - sum.most);"
        )
    )
}

pub fn kernel(axis: usize, logarithm: bool, x: &TensorLayout) -> Option<LaunchPlan> {
    let (rows, from) = rows_of(x, axis);
    let mut builder = KernelBuilder::new(x.len());
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("y", x.dtype, At::output(0));
    let (of_row, value) = match logarithm {
        true => ("m_log(total)", "x_k - most - of_row"),
        false => ("1 / total", "m_exp(x_k - most) * of_row"),
    };
    let lines = format!(
        "{from}{}auto of_row = {of_row};\n{}",
        most_and_total(x.dtype, &rows),
        rows.pass(
            false,
            &[operand(x.dtype)],
            &[Written { name: "y", dtype: x.dtype, from: "from" }],
            &format!("y_k = {};", store(x.dtype, value))
        )
    );
    Some(LaunchPlan::of(builder.rows_each(x.len() / x.shape[axis], &rows, &lines)))
}
