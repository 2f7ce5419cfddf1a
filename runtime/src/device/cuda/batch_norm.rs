//! Batch normalisation: one block per channel.

use super::draft::KernelBuilder;
use super::element::{accumulator, held, load, store};
use super::launch_plan::{At, LaunchPlan};
use crate::device::layout::TensorLayout;
use compiler::op::BatchNorm;

/// The loop over the elements of channel `i`; `p` is the index of each.
fn members(x: &TensorLayout, lines: &str) -> String {
    let (batch, channels, inner) = (x.shape[0], x.shape[1], x.shape[2..].iter().product::<usize>());
    format!(
        "for (at k = threadIdx.x; k < (at){}; k += blockDim.x) {{ at p = (k / (at){inner} * (at){channels} + i) * (at){inner} + k % (at){inner}; {lines} }}\n",
        batch * inner
    )
}

/// Outputs y, mean, variance and reciprocal standard deviation.
pub fn kernel(op: &BatchNorm, x: &TensorLayout) -> Option<LaunchPlan> {
    let (channels, count) = (x.shape[1], x.len() / x.shape[1]);
    let kind = held(accumulator(x.dtype));
    let mut draft = KernelBuilder::new(x.len());
    for (i, name) in ["x", "scale", "bias"].into_iter().enumerate() {
        draft.reads(name, x.dtype, At::input(i));
    }
    for (i, name) in ["y", "means", "variances", "rstds"].into_iter().enumerate() {
        draft.writes(name, x.dtype, At::output(i));
    }
    let [v, scale, bias] = ["x[p]", "scale[i]", "bias[i]"].map(|e| load(x.dtype, e));
    let lines = format!(
        "{kind} sum = 0;\n{}{kind} mean = sum_across(sum) / ({kind}){count};\nsum = 0;\n{}\
         {kind} variance = sum_across(sum) / ({kind}){count};\n{kind} rstd = ({kind})1 / m_sqrt(variance + ({kind}){:?});\n\
         if (threadIdx.x == 0) {{ means[i] = {}; variances[i] = {}; rstds[i] = {}; }}\n{}",
        members(x, &format!("sum += {v};")),
        members(x, &format!("{kind} d = {v} - mean; sum += d * d;")),
        op.epsilon,
        store(x.dtype, "mean"),
        store(x.dtype, "variance"),
        store(x.dtype, "rstd"),
        members(x, &format!("y[p] = {};", store(x.dtype, &format!("({v} - mean) * rstd * {scale} + {bias}"))))
    );
    Some(LaunchPlan::of(draft.block_each(channels, count, &lines)))
}

/// Outputs dx, dscale and dbias.
pub fn grad(x: &TensorLayout) -> Option<LaunchPlan> {
    let (channels, count) = (x.shape[1], x.len() / x.shape[1]);
    let kind = held(accumulator(x.dtype));
    let mut draft = KernelBuilder::new(x.len());
    for (i, name) in ["dy", "x", "scale", "means", "rstds"].into_iter().enumerate() {
        draft.reads(name, x.dtype, At::input(i));
    }
    for (i, name) in ["dx", "dscale", "dbias"].into_iter().enumerate() {
        draft.writes(name, x.dtype, At::output(i));
    }
    let [dy, v, scale, mean, rstd] = ["dy[p]", "x[p]", "scale[i]", "means[i]", "rstds[i]"].map(|e| load(x.dtype, e));
    let dx =
        format!("rstd * {scale} * ({dy} - total / ({kind}){count} - ({v} - mean) * rstd * total_x / ({kind}){count})");
    let lines = format!(
        "{kind} mean = {mean}, rstd = {rstd}, sum = 0, sum_x = 0;\n{}{kind} total = sum_across(sum), total_x = sum_across(sum_x);\n\
         if (threadIdx.x == 0) {{ dscale[i] = {}; dbias[i] = {}; }}\n{}",
        members(x, &format!("{kind} d = {dy}; sum += d; sum_x += d * ({v} - mean) * rstd;")),
        store(x.dtype, "total_x"),
        store(x.dtype, "total"),
        members(x, &format!("dx[p] = {};", store(x.dtype, &dx)))
    );
    Some(LaunchPlan::of(draft.block_each(channels, count, &lines)))
}
