//! Softmax and log-softmax: one block per row.

use super::draft::KernelBuilder;
use super::element::{accumulator, held, literal, load, store};
use super::launch_plan::{At, LaunchPlan};
use crate::device::layout::TensorLayout;
use compiler::tensor::DType;

/// Code that computes the maximum `most` of a row and the sum `total` of its exponentials. Elements are `x[from +
/// k·inner]`.
pub fn most_and_total(dtype: DType, size: usize, inner: usize) -> String {
    let kind = held(accumulator(dtype));
    let element = load(dtype, &format!("x[from + k * (at){inner}]"));
    format!(
        "{kind} most = {};\nfor (at k = threadIdx.x; k < (at){size}; k += blockDim.x) {{ {kind} v = {element}; most = v > most ? v : most; }}\n\
         most = across(most, []({kind} a, {kind} b) {{ return a > b ? a : b; }});\n{kind} total = 0;\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) total += m_exp({element} - most);\ntotal = sum_across(total);\n",
        literal(accumulator(dtype), f64::NEG_INFINITY)
    )
}

pub fn kernel(axis: usize, logarithm: bool, x: &TensorLayout) -> Option<LaunchPlan> {
    let (size, inner) = (x.shape[axis], x.shape[axis + 1..].iter().product::<usize>());
    let kind = held(accumulator(x.dtype));
    let mut draft = KernelBuilder::new(x.len());
    draft.reads("x", x.dtype, At::input(0));
    draft.writes("y", x.dtype, At::output(0));
    let value = if logarithm { "v - most - m_log(total)" } else { "m_exp(v - most) / total" };
    let lines = format!(
        "at from = i / (at){inner} * (at){} + i % (at){inner};\n{}\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) {{ {kind} v = {}; y[from + k * (at){inner}] = {}; }}",
        size * inner,
        most_and_total(x.dtype, size, inner),
        load(x.dtype, &format!("x[from + k * (at){inner}]")),
        store(x.dtype, value)
    );
    Some(LaunchPlan::of(draft.block_each(x.len() / size, size, &lines)))
}
