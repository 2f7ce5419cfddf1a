//! Layer normalisation: one block per row. Gradients of scale and bias are sums over rows, in two passes.

use super::draft::KernelBuilder;
use super::element::{accumulator, held, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::reduce::reduce;
use crate::device::layout::TensorLayout;
use compiler::op::{LayerNorm, ReduceKind};

/// Outputs y, mean and reciprocal standard deviation.
pub fn kernel(op: &LayerNorm, x: &TensorLayout) -> Option<LaunchPlan> {
    let size: usize = x.shape[op.axis..].iter().product();
    let kind = held(accumulator(x.dtype));
    let mut draft = KernelBuilder::new(x.len());
    for (i, name) in ["x", "scale", "bias"].into_iter().enumerate() {
        draft.reads(name, x.dtype, At::input(i));
    }
    for (i, name) in ["y", "means", "rstds"].into_iter().enumerate() {
        draft.writes(name, x.dtype, At::output(i));
    }
    let [v, scale, bias] = ["x[from + k]", "scale[k]", "bias[k]"].map(|e| load(x.dtype, e));
    let lines = format!(
        "at from = i * (at){size};\n{kind} sum = 0;\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) sum += {v};\n{kind} mean = sum_across(sum) / ({kind}){size};\n\
         sum = 0;\nfor (at k = threadIdx.x; k < (at){size}; k += blockDim.x) {{ {kind} d = {v} - mean; sum += d * d; }}\n\
         {kind} rstd = ({kind})1 / m_sqrt(sum_across(sum) / ({kind}){size} + ({kind}){epsilon:?});\n\
         if (threadIdx.x == 0) {{ means[i] = {}; rstds[i] = {}; }}\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) y[from + k] = {};",
        store(x.dtype, "mean"),
        store(x.dtype, "rstd"),
        store(x.dtype, &format!("({v} - mean) * rstd * {scale} + {bias}")),
        epsilon = op.epsilon,
    );
    Some(LaunchPlan::of(draft.block_each(x.len() / size, size, &lines)))
}

/// Outputs dx, dscale and dbias.
pub fn grad(x: &TensorLayout, scale: &TensorLayout) -> Option<LaunchPlan> {
    let size = scale.len();
    let rows = x.len() / size;
    let sums = accumulator(x.dtype);
    let kind = held(sums);
    let mut launch_plan = LaunchPlan::default();
    let products = launch_plan.take(x.len() * sums.size());
    let mut draft = KernelBuilder::new(x.len());
    for (i, name) in ["dy", "x", "scale", "means", "rstds"].into_iter().enumerate() {
        draft.reads(name, x.dtype, At::input(i));
    }
    draft.writes("dx", x.dtype, At::output(0));
    draft.writes("products", sums, products);
    let [dy, v, scale, mean, rstd] =
        ["dy[from + k]", "x[from + k]", "scale[k]", "means[i]", "rstds[i]"].map(|e| load(x.dtype, e));
    let lines = format!(
        "at from = i * (at){size};\n{kind} mean = {mean}, rstd = {rstd}, sum = 0, sum_x = 0;\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) {{\n{kind} d = {dy}, x_hat = ({v} - mean) * rstd;\n\
         sum += d * {scale};\nsum_x += d * {scale} * x_hat;\nproducts[from + k] = d * x_hat;\n}}\n\
         {kind} g = sum_across(sum) / ({kind}){size}, g_x = sum_across(sum_x) / ({kind}){size};\n\
         for (at k = threadIdx.x; k < (at){size}; k += blockDim.x) dx[from + k] = {};",
        store(x.dtype, &format!("rstd * ({dy} * {scale} - g - ({v} - mean) * rstd * g_x)"))
    );
    launch_plan.launches.push(draft.block_each(rows, size, &lines));
    let table = |dtype| TensorLayout { dtype, shape: vec![rows, size] };
    reduce(&mut launch_plan, ReduceKind::Sum, &[0], (products, &table(sums)), (At::output(1), x.dtype));
    reduce(&mut launch_plan, ReduceKind::Sum, &[0], (At::input(0), &table(x.dtype)), (At::output(2), x.dtype));
    Some(launch_plan)
}
