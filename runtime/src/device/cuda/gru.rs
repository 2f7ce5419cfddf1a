//! GRU and its gradient; see [`lstm`](super::lstm) for the structure. With the reset gate before the product a step
//! takes two launches, because the candidate's product reads all units.

use super::draft::KernelBuilder;
use super::element::{held, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::lstm::Sizes;
use super::matmul::{Matrix, Product};
use crate::device::layout::TensorLayout;
use compiler::op::lstm::order;
use compiler::op::{Gru, GruGrad};

/// Outputs y, the last state and the gates.
pub fn kernel(op: &Gru, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, op.reverse);
    let kind = held(s.sums);
    let (dtype, hidden, wide) = (s.dtype, s.hidden, s.wide);
    let mut launch_plan = LaunchPlan::default();
    let from_x = s.from_input(&mut launch_plan, At::input(0), At::input(1));
    let [y, last_h, gates] = [0, 1, 2].map(At::output);
    let place = format!("at j = i % (at){hidden}, n = i / (at){hidden}, to = n * (at){} + j;\n", 4 * hidden);
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
            "(from_x[n * (at){wide} + {gate} * (at){hidden} + j] + {})",
            load(dtype, &format!("b_ih[{gate} * (at){hidden} + j]"))
        )
    };
    let state = format!("h[n * (at){hidden} + l]");
    let put = |gate: usize, value: &str| format!("gates[to + {gate} * (at){hidden}] = {};\n", store(dtype, value));
    for t in order(s.steps, op.reverse) {
        let draft = || {
            let mut draft = KernelBuilder::new(s.batch * wide * hidden.max(4));
            draft.reads("from_x", s.sums, from_x.after(t * s.kept(wide)));
            draft.reads("w", dtype, At::input(2));
            draft.reads("b_ih", dtype, At::input(3));
            draft.reads("b_hh", dtype, At::input(4));
            draft.reads("h", dtype, s.state_before(t, At::input(5), y));
            draft.writes("gates", dtype, gates.after(t * s.step(4 * hidden)));
            draft
        };
        let old = load(dtype, "h[i]");
        let opening = format!(
            "{place}{}{}{kind} reset = m_sigmoid({} + h0), update = m_sigmoid({} + h1);\n{}{}",
            from_h(0, &state),
            from_h(1, &state),
            from_x_of(0),
            from_x_of(1),
            put(0, "reset"),
            put(1, "update")
        );
        let closing = format!(
            "{}y[i] = {};",
            put(2, "candidate"),
            store(dtype, &format!("(({kind})1 - update) * candidate + update * {old}"))
        );
        if op.reset_after {
            let mut draft = draft();
            draft.writes("y", dtype, y.after(t * s.step(hidden)));
            let lines = format!(
                "{opening}{}{}{kind} candidate = m_tanh({} + reset * h2);\n{closing}",
                from_h(2, &state),
                put(3, "h2"),
                from_x_of(2)
            );
            launch_plan.launches.push(draft.each(s.batch * hidden, &lines));
        } else {
            launch_plan
                .launches
                .push(draft().each(s.batch * hidden, &format!("{opening}{}", put(3, &format!("reset * {old}")))));
            let mut draft = draft();
            draft.writes("y", dtype, y.after(t * s.step(hidden)));
            let met = format!("gates[n * (at){} + 3 * (at){hidden} + l]", 4 * hidden);
            let lines = format!(
                "{place}{}{kind} update = {}, candidate = m_tanh({} + h2);\n{closing}",
                from_h(2, &met),
                load(dtype, &format!("gates[to + (at){hidden}]")),
                from_x_of(2)
            );
            launch_plan.launches.push(draft.each(s.batch * hidden, &lines));
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
    let kind = held(s.sums);
    let (dtype, hidden, wide) = (s.dtype, s.hidden, s.wide);
    let mut launch_plan = LaunchPlan::default();
    let (da, e) = (launch_plan.take(s.steps * s.kept(wide)), launch_plan.take(s.steps * s.kept(wide)));
    let (dh, d) = (launch_plan.take(s.kept(hidden)), launch_plan.take(s.kept(hidden)));
    let [dy, last_dh, x_in, w_ih, w_hh, h0, y, gates] = [0, 1, 2, 3, 4, 5, 6, 7].map(At::input);
    let [dx, dw_ih, dw_hh, db_ih, db_hh, dh0] = [0, 1, 2, 3, 4, 5].map(At::output);
    let place = format!(
        "at j = i % (at){hidden}, n = i / (at){hidden}, to = n * (at){wide} + j, from = n * (at){} + j;\n",
        4 * hidden
    );
    let gate = |g: usize| load(dtype, &format!("gates[from + {g} * (at){hidden}]"));
    let max_elements = s.batch * wide * hidden.max(4);
    for (n, t) in order(s.steps, !op.reverse).enumerate() {
        // Gradients at the update gate and the candidate.
        let mut draft = KernelBuilder::new(max_elements);
        let so_far = match n {
            0 => {
                draft.reads("last_dh", dtype, last_dh);
                load(dtype, "last_dh[i]")
            }
            _ => "dh[i]".to_string(),
        };
        draft.reads("dy", dtype, dy.after(t * s.step(hidden)));
        draft.reads("gates", dtype, gates.after(t * s.step(4 * hidden)));
        draft.reads("h", dtype, s.state_before(t, h0, y));
        draft.writes("dh", s.sums, dh);
        draft.writes("da", s.sums, da.after(t * s.kept(wide)));
        draft.writes("e", s.sums, e.after(t * s.kept(wide)));
        let of_state = if op.reset_after { format!("arrived * {}", gate(0)) } else { "arrived".to_string() };
        let lines = format!(
            "{place}{kind} g = {so_far} + {};\n{kind} update = {}, candidate = {};\ndh[i] = g;\n\
             {kind} at_update = g * ({} - candidate) * update * (({kind})1 - update);\n\
             {kind} arrived = g * (({kind})1 - update) * (({kind})1 - candidate * candidate);\n\
             da[to + (at){hidden}] = at_update; e[to + (at){hidden}] = at_update;\n\
             da[to + 2 * (at){hidden}] = arrived; e[to + 2 * (at){hidden}] = {of_state};",
            load(dtype, "dy[i]"),
            gate(1),
            gate(2),
            load(dtype, "h[i]"),
        );
        launch_plan.launches.push(draft.each(s.batch * hidden, &lines));
        // Gradient at the reset gate.
        let mut draft = KernelBuilder::new(max_elements);
        draft.reads("w", dtype, w_hh);
        draft.reads("gates", dtype, gates.after(t * s.step(4 * hidden)));
        draft.reads("h", dtype, s.state_before(t, h0, y));
        draft.writes("da", s.sums, da.after(t * s.kept(wide)));
        draft.writes("e", s.sums, e.after(t * s.kept(wide)));
        draft.writes("d", s.sums, d);
        let at_reset = match op.reset_after {
            true => format!("da[to + 2 * (at){hidden}] * {}", gate(3)),
            false => format!("through * {}", load(dtype, "h[i]")),
        };
        let lines = format!(
            "{place}{kind} reset = {}, through = 0;\n\
             for (at k = 0; k < (at){hidden}; k++) through = m_fma(e[n * (at){wide} + 2 * (at){hidden} + k], {}, through);\nd[i] = through;\n\
             {kind} at_reset = {at_reset} * reset * (({kind})1 - reset);\nda[to] = at_reset; e[to] = at_reset;",
            gate(0),
            load(dtype, &format!("w[(2 * (at){hidden} + k) * (at){hidden} + j]"))
        );
        launch_plan.launches.push(draft.each(s.batch * hidden, &lines));
        // Gradient of the previous state.
        let mut draft = KernelBuilder::new(max_elements);
        draft.reads("w", dtype, w_hh);
        draft.reads("gates", dtype, gates.after(t * s.step(4 * hidden)));
        draft.reads("da", s.sums, da.after(t * s.kept(wide)));
        draft.reads("d", s.sums, d);
        draft.writes("dh", s.sums, dh);
        let through = if op.reset_after { "d[i]".to_string() } else { format!("d[i] * {}", gate(0)) };
        let lines = format!(
            "{place}{kind} sum = 0;\nfor (at k = 0; k < 2 * (at){hidden}; k++) sum = m_fma(da[n * (at){wide} + k], {}, sum);\n\
             dh[i] = dh[i] * {} + {through} + sum;",
            load(dtype, &format!("w[k * (at){hidden} + j]")),
            gate(1)
        );
        launch_plan.launches.push(draft.each(s.batch * hidden, &lines));
    }
    let mut draft = KernelBuilder::new(max_elements);
    draft.reads("dh", s.sums, dh);
    draft.writes("dh0", dtype, dh0);
    launch_plan.launches.push(draft.each(s.batch * hidden, &format!("dh0[i] = {};", store(dtype, "dh[i]"))));
    s.input_grads(&mut launch_plan, da, x_in, w_ih, [dx, dw_ih, db_ih]);
    s.bias_grad(&mut launch_plan, e, db_hh);
    if op.reset_after {
        s.state_weight_grad(&mut launch_plan, e, h0, y, dw_hh, [0, wide]);
        return Some(launch_plan);
    }
    s.state_weight_grad(&mut launch_plan, e, h0, y, dw_hh, [0, 2 * hidden]);
    // The candidate's weight multiplied the state after the reset gate.
    let (size, kept) = (dtype.size(), s.sums.size());
    let matrices = [
        Matrix::rows(e.after(2 * hidden * kept), s.sums, wide).turned(),
        Matrix::rows(gates.after(3 * hidden * size), dtype, 4 * hidden),
        Matrix::rows(dw_hh.after(2 * hidden * hidden * size), dtype, hidden),
    ];
    launch_plan.launches.push(Product::one([hidden, hidden, s.steps * s.batch], matrices, false).launch());
    Some(launch_plan)
}
