//! Elman RNN and its gradient; see [`lstm`](super::lstm) for the structure.

use super::draft::KernelBuilder;
use super::element::{compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::lstm::Sizes;
use crate::device::layout::TensorLayout;
use compiler::op::lstm::order;
use compiler::op::{Activation, Rnn, RnnGrad};

fn value(activation: Activation, sum: &str) -> String {
    match activation {
        Activation::Tanh => format!("m_tanh({sum})"),
        Activation::Relu => format!("m_relu({sum})"),
        Activation::Sigmoid => format!("m_sigmoid({sum})"),
    }
}

/// Derivative of the activation in terms of its value `y`.
fn slope(activation: Activation, kind: &str) -> String {
    match activation {
        Activation::Tanh => format!("(({kind})1 - y * y)"),
        Activation::Relu => format!("({kind})(y > 0)"),
        Activation::Sigmoid => format!("y * (({kind})1 - y)"),
    }
}

/// Outputs y and the last state.
pub fn kernel(op: &Rnn, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, op.reverse);
    let kind = compute_type(s.sums);
    let (dtype, hidden) = (s.dtype, s.hidden);
    let mut launch_plan = LaunchPlan::default();
    let from_x = s.from_input(&mut launch_plan, At::input(0), At::input(1));
    let (y, last_h) = (At::output(0), At::output(1));
    for t in order(s.steps, op.reverse) {
        let mut builder = KernelBuilder::new(s.batch * hidden * hidden);
        builder.add_input("from_x", s.sums, from_x.after(t * s.sum_step(s.wide)));
        builder.add_input("w", dtype, At::input(2));
        builder.add_input("b_ih", dtype, At::input(3));
        builder.add_input("b_hh", dtype, At::input(4));
        builder.add_input("h", dtype, s.state_before(t, At::input(5), y));
        builder.add_output("y", dtype, y.after(t * s.step(hidden)));
        let lines = format!(
            "at j = i % (at){hidden}, n = i / (at){hidden};\n{kind} sum = from_x[i] + {} + {};\n\
             for (at l = 0; l < (at){hidden}; l++) sum = m_fma({}, {}, sum);\ny[i] = {};",
            load(dtype, "b_ih[j]"),
            load(dtype, "b_hh[j]"),
            load(dtype, &format!("h[n * (at){hidden} + l]")),
            load(dtype, &format!("w[j * (at){hidden} + l]")),
            store(dtype, &value(op.activation, "sum"))
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
    }
    s.last(&mut launch_plan, y, last_h);
    Some(launch_plan)
}

/// Outputs dx, dw_ih, dw_hh, db, dh0.
pub fn grad(op: &RnnGrad, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, op.reverse);
    let kind = compute_type(s.sums);
    let (dtype, hidden) = (s.dtype, s.hidden);
    let mut launch_plan = LaunchPlan::default();
    let da = launch_plan.take(s.steps * s.sum_step(hidden));
    let [dy, last_dh, x_in, w_ih, w_hh, h0, y] = [0, 1, 2, 3, 4, 5, 6].map(At::input);
    let through = format!(
        "at j = i % (at){hidden}, n = i / (at){hidden};\n{kind} dh = 0;\n\
         for (at k = 0; k < (at){hidden}; k++) dh = m_fma(after[n * (at){hidden} + k], {}, dh);\n",
        load(dtype, &format!("w[k * (at){hidden} + j]"))
    );
    let mut after: Option<usize> = None;
    for t in order(s.steps, !op.reverse) {
        let mut builder = KernelBuilder::new(s.batch * hidden * hidden);
        let dh = match after {
            None => {
                builder.add_input("last_dh", dtype, last_dh);
                format!("{kind} dh = {};\n", load(dtype, "last_dh[i]"))
            }
            Some(later) => {
                builder.add_input("after", s.sums, da.after(later * s.sum_step(hidden)));
                builder.add_input("w", dtype, w_hh);
                through.clone()
            }
        };
        builder.add_input("dy", dtype, dy.after(t * s.step(hidden)));
        builder.add_input("ys", dtype, y.after(t * s.step(hidden)));
        builder.add_output("da", s.sums, da.after(t * s.sum_step(hidden)));
        let lines = format!(
            "{dh}{kind} y = {};\nda[i] = (dh + {}) * {};",
            load(dtype, "ys[i]"),
            load(dtype, "dy[i]"),
            slope(op.activation, kind)
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
        after = Some(t);
    }
    let [dx, dw_ih, dw_hh, db, dh0] = [0, 1, 2, 3, 4].map(At::output);
    let first = order(s.steps, op.reverse).next()?;
    let mut builder = KernelBuilder::new(s.batch * hidden * hidden);
    builder.add_input("after", s.sums, da.after(first * s.sum_step(hidden)));
    builder.add_input("w", dtype, w_hh);
    builder.add_output("dh0", dtype, dh0);
    launch_plan.launches.push(builder.each(s.batch * hidden, &format!("{through}dh0[i] = {};", store(dtype, "dh"))));
    s.input_grads(&mut launch_plan, da, x_in, w_ih, [dx, dw_ih, db]);
    s.state_weight_grad(&mut launch_plan, da, h0, y, dw_hh, [0, hidden]);
    Some(launch_plan)
}
