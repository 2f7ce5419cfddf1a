//! GRU and its gradient; see [`lstm`](super::lstm) for the structure. With the reset gate before the product a step
//! takes two launches, because the candidate's product reads all units.

use super::draft::KernelBuilder;
use super::element::{compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::lstm::Sizes;
use super::matmul::{Matrix, Product};
use crate::device::layout::TensorLayout;
use compiler::op::lstm::order;
use compiler::op::{Gru, GruGrad};

/// Outputs y, the last state and the gates.
pub fn kernel(op: &Gru, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, op.reverse);
    let kind = compute_type(s.sums);
    let (dtype, hidden, gate_width) = (s.dtype, s.hidden, s.wide);
    let mut launch_plan = LaunchPlan::default();
    let from_x = s.from_input(&mut launch_plan, At::input(0), At::input(1));
    let [y, last_h, gates] = [0, 1, 2].map(At::output);
    let index_code = format!("at j = i % (at){hidden}, n = i / (at){hidden}, to = n * (at){} + j;\n", 4 * hidden);
    // The recurrent pre-activation of a gate, from the state or its replacement.
    let from_h = |gate: usize, state: &str| {
        format!(
            "{kind} h{gate} = {};\nfor (at l = 0; l < (at){hidden}; l++) h{gate} = m_fma({}, {}, h{gate});\n",
            load(dtype, &format!("b_hh[{gate} * (at){hidden} + j]")),
            load(dtype, state),
            load(dtype, &format!("w[({gate} * (at){hidden} + j) * (at){hidden} + l]"))
        )
    };
    let from_x_of = |gate: usize| {
        format!(
            "(from_x[n * (at){gate_width} + {gate} * (at){hidden} + j] + {})",
            load(dtype, &format!("b_ih[{gate} * (at){hidden} + j]"))
        )
    };
    let state = format!("h[n * (at){hidden} + l]");
    let store_gate =
        |gate: usize, value: &str| format!("gates[to + {gate} * (at){hidden}] = {};\n", store(dtype, value));
    for t in order(s.steps, op.reverse) {
        let builder = || {
            let mut builder = KernelBuilder::new(s.batch * gate_width * hidden.max(4));
            builder.add_input("from_x", s.sums, from_x.after(t * s.sum_step(gate_width)));
            builder.add_input("w", dtype, At::input(2));
            builder.add_input("b_ih", dtype, At::input(3));
            builder.add_input("b_hh", dtype, At::input(4));
            builder.add_input("h", dtype, s.state_before(t, At::input(5), y));
            builder.add_output("gates", dtype, gates.after(t * s.step(4 * hidden)));
            builder
        };
        let old = load(dtype, "h[i]");
        let gate_code = format!(
            "{index_code}{}{}{kind} reset = m_sigmoid({} + h0), update = m_sigmoid({} + h1);\n{}{}",
            from_h(0, &state),
            from_h(1, &state),
            from_x_of(0),
            from_x_of(1),
            store_gate(0, "reset"),
            store_gate(1, "update")
        );
        let state_code = format!(
            "{}y[i] = {};",
            store_gate(2, "candidate"),
            store(dtype, &format!("(({kind})1 - update) * candidate + update * {old}"))
        );
        if op.reset_after {
            let mut builder = builder();
            builder.add_output("y", dtype, y.after(t * s.step(hidden)));
            let lines = format!(
                "{gate_code}{}{}{kind} candidate = m_tanh({} + reset * h2);\n{state_code}",
                from_h(2, &state),
                store_gate(3, "h2"),
                from_x_of(2)
            );
            launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
        } else {
            launch_plan.launches.push(
                builder().each(s.batch * hidden, &format!("{gate_code}{}", store_gate(3, &format!("reset * {old}")))),
            );
            let mut builder = builder();
            builder.add_output("y", dtype, y.after(t * s.step(hidden)));
            let reset_state = format!("gates[n * (at){} + 3 * (at){hidden} + l]", 4 * hidden);
            let lines = format!(
                "{index_code}{}{kind} update = {}, candidate = m_tanh({} + h2);\n{state_code}",
                from_h(2, &reset_state),
                load(dtype, &format!("gates[to + (at){hidden}]")),
                from_x_of(2)
            );
            launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
        }
    }
    s.last(&mut launch_plan, y, last_h);
    Some(launch_plan)
}

/// Outputs dx, dw_ih, dw_hh, db_ih, db_hh, dh0.
///
/// `da` are gradients at the input pre-activations. `e` are those at the recurrent pre-activations, which differ only
/// for the candidate. `dh` is the accumulated gradient of the state, and `d = e_n U_n`.
pub fn grad(op: &GruGrad, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, op.reverse);
    let kind = compute_type(s.sums);
    let (dtype, hidden, wide) = (s.dtype, s.hidden, s.wide);
    let mut launch_plan = LaunchPlan::default();
    let (da, e) = (launch_plan.take(s.steps * s.sum_step(wide)), launch_plan.take(s.steps * s.sum_step(wide)));
    let (dh, d) = (launch_plan.take(s.sum_step(hidden)), launch_plan.take(s.sum_step(hidden)));
    let [dy, last_dh, x_in, w_ih, w_hh, h0, y, gates] = [0, 1, 2, 3, 4, 5, 6, 7].map(At::input);
    let [dx, dw_ih, dw_hh, db_ih, db_hh, dh0] = [0, 1, 2, 3, 4, 5].map(At::output);
    let index_code = format!(
        "at j = i % (at){hidden}, n = i / (at){hidden}, to = n * (at){wide} + j, from = n * (at){} + j;\n",
        4 * hidden
    );
    let gate = |g: usize| load(dtype, &format!("gates[from + {g} * (at){hidden}]"));
    let max_elements = s.batch * wide * hidden.max(4);
    for (n, t) in order(s.steps, !op.reverse).enumerate() {
        // Gradients at the update gate and the candidate.
        let mut builder = KernelBuilder::new(max_elements);
        let state_grad = match n {
            0 => {
                builder.add_input("last_dh", dtype, last_dh);
                load(dtype, "last_dh[i]")
            }
            _ => "dh[i]".to_string(),
        };
        builder.add_input("dy", dtype, dy.after(t * s.step(hidden)));
        builder.add_input("gates", dtype, gates.after(t * s.step(4 * hidden)));
        builder.add_input("h", dtype, s.state_before(t, h0, y));
        builder.add_output("dh", s.sums, dh);
        builder.add_output("da", s.sums, da.after(t * s.sum_step(wide)));
        builder.add_output("e", s.sums, e.after(t * s.sum_step(wide)));
        let candidate_grad = if op.reset_after { format!("arrived * {}", gate(0)) } else { "arrived".to_string() };
        let lines = format!(
            "{index_code}{kind} g = {state_grad} + {};\n{kind} update = {}, candidate = {};\ndh[i] = g;\n\
             {kind} at_update = g * ({} - candidate) * update * (({kind})1 - update);\n\
             {kind} arrived = g * (({kind})1 - update) * (({kind})1 - candidate * candidate);\n\
             da[to + (at){hidden}] = at_update; e[to + (at){hidden}] = at_update;\n\
             da[to + 2 * (at){hidden}] = arrived; e[to + 2 * (at){hidden}] = {candidate_grad};",
            load(dtype, "dy[i]"),
            gate(1),
            gate(2),
            load(dtype, "h[i]"),
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
        // Gradient at the reset gate.
        let mut builder = KernelBuilder::new(max_elements);
        builder.add_input("w", dtype, w_hh);
        builder.add_input("gates", dtype, gates.after(t * s.step(4 * hidden)));
        builder.add_input("h", dtype, s.state_before(t, h0, y));
        builder.add_output("da", s.sums, da.after(t * s.sum_step(wide)));
        builder.add_output("e", s.sums, e.after(t * s.sum_step(wide)));
        builder.add_output("d", s.sums, d);
        let at_reset = match op.reset_after {
            true => format!("da[to + 2 * (at){hidden}] * {}", gate(3)),
            false => format!("through * {}", load(dtype, "h[i]")),
        };
        let lines = format!(
            "{index_code}{kind} reset = {}, through = 0;\n\
             for (at k = 0; k < (at){hidden}; k++) through = m_fma(e[n * (at){wide} + 2 * (at){hidden} + k], {}, through);\nd[i] = through;\n\
             {kind} at_reset = {at_reset} * reset * (({kind})1 - reset);\nda[to] = at_reset; e[to] = at_reset;",
            gate(0),
            load(dtype, &format!("w[(2 * (at){hidden} + k) * (at){hidden} + j]"))
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
        // Gradient of the previous state.
        let mut builder = KernelBuilder::new(max_elements);
        builder.add_input("w", dtype, w_hh);
        builder.add_input("gates", dtype, gates.after(t * s.step(4 * hidden)));
        builder.add_input("da", s.sums, da.after(t * s.sum_step(wide)));
        builder.add_input("d", s.sums, d);
        builder.add_output("dh", s.sums, dh);
        let through = if op.reset_after { "d[i]".to_string() } else { format!("d[i] * {}", gate(0)) };
        let lines = format!(
            "{index_code}{kind} sum = 0;\nfor (at k = 0; k < 2 * (at){hidden}; k++) sum = m_fma(da[n * (at){wide} + k], {}, sum);\n\
             dh[i] = dh[i] * {} + {through} + sum;",
            load(dtype, &format!("w[k * (at){hidden} + j]")),
            gate(1)
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
    }
    let mut builder = KernelBuilder::new(max_elements);
    builder.add_input("dh", s.sums, dh);
    builder.add_output("dh0", dtype, dh0);
    launch_plan.launches.push(builder.each(s.batch * hidden, &format!("dh0[i] = {};", store(dtype, "dh[i]"))));
    s.input_grads(&mut launch_plan, da, x_in, w_ih, [dx, dw_ih, db_ih]);
    s.bias_grad(&mut launch_plan, e, db_hh);
    if op.reset_after {
        s.state_weight_grad(&mut launch_plan, e, h0, y, dw_hh, [0, wide]);
        return Some(launch_plan);
    }
    s.state_weight_grad(&mut launch_plan, e, h0, y, dw_hh, [0, 2 * hidden]);
    // The candidate's weight multiplied the state after the reset gate.
    let (size, sum_bytes) = (dtype.size(), s.sums.size());
    let matrices = [
        Matrix::rows(e.after(2 * hidden * sum_bytes), s.sums, wide).transposed(),
        Matrix::rows(gates.after(3 * hidden * size), dtype, 4 * hidden),
        Matrix::rows(dw_hh.after(2 * hidden * hidden * size), dtype, hidden),
    ];
    launch_plan.launches.push(Product::single([hidden, hidden, s.steps * s.batch], matrices, false).launch());
    Some(launch_plan)
}
