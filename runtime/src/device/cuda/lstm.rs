//! LSTM and its gradient: input products cover all steps at once; each step is one launch with a thread per unit and
//! row.

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::matmul::{Matrix, Product};
use super::movement::copy_strided;
use super::offsets::Walk;
use super::reduce::reduce;
use crate::device::layout::TensorLayout;
use compiler::op::ReduceKind;
use compiler::op::lstm::{before, order};
use compiler::tensor::DType;

/// Sizes of a recurrent layer.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub steps: usize,
    pub batch: usize,
    pub width: usize,
    pub hidden: usize,
    /// Rows of the weights: gates times units.
    pub wide: usize,
    pub dtype: DType,
    /// Element type of intermediates between launches.
    pub sums: DType,
    /// True if steps run from last to first.
    pub reverse: bool,
}

impl Sizes {
    pub fn of(x: &TensorLayout, w_hh: &TensorLayout, reverse: bool) -> Sizes {
        Sizes {
            steps: x.shape[0],
            batch: x.shape[1],
            width: x.shape[2],
            hidden: w_hh.shape[1],
            wide: w_hh.shape[0],
            dtype: x.dtype,
            sums: accumulator(x.dtype),
            reverse,
        }
    }

    /// Bytes of one step of a tensor `[T, N, width]`.
    pub fn step(&self, width: usize) -> usize {
        self.batch * width * self.dtype.size()
    }

    /// Bytes of one step of an intermediate.
    pub fn sum_step(&self, width: usize) -> usize {
        self.batch * width * self.sums.size()
    }

    /// The state before step `t`: in `y` `[T, N, hidden]`, or `first` for the first step.
    pub fn state_before(&self, t: usize, first: At, y: At) -> At {
        before(t, self.steps, self.reverse).map_or(first, |t| y.after(t * self.step(self.hidden)))
    }

    /// `x W_ihᵀ` for all steps, `[T, N, wide]`.
    pub fn from_input(&self, launch_plan: &mut LaunchPlan, x: At, w_ih: At) -> At {
        let sums = launch_plan.take(self.steps * self.sum_step(self.wide));
        let matrices = [
            Matrix::rows(x, self.dtype, self.width),
            Matrix::rows(w_ih, self.dtype, self.width).transposed(),
            Matrix::rows(sums, self.sums, self.wide),
        ];
        launch_plan
            .launches
            .push(Product::single([self.steps * self.batch, self.wide, self.width], matrices, false).launch());
        sums
    }

    /// Copies the state of the last step from `y` to `to`.
    pub fn last(&self, launch_plan: &mut LaunchPlan, y: At, to: At) {
        let t = if self.reverse { 0 } else { self.steps - 1 };
        let layout = TensorLayout { dtype: self.dtype, shape: vec![self.batch * self.hidden] };
        let from = y.after(t * self.step(self.hidden));
        launch_plan.launches.push(copy_strided((from, layout.len()), to, &layout, &Walk { base: 0, steps: vec![1] }));
    }

    /// The gradients of x, W_ih and the bias from the pre-activation gradients `da` `[T, N, wide]`.
    pub fn input_grads(&self, launch_plan: &mut LaunchPlan, da: At, x: At, w_ih: At, [dx, dw, db]: [At; 3]) {
        let rows = self.steps * self.batch;
        let da_matrix = Matrix::rows(da, self.sums, self.wide);
        let matrices =
            [da_matrix.clone(), Matrix::rows(w_ih, self.dtype, self.width), Matrix::rows(dx, self.dtype, self.width)];
        launch_plan.launches.push(Product::single([rows, self.width, self.wide], matrices, false).launch());
        let matrices =
            [da_matrix.transposed(), Matrix::rows(x, self.dtype, self.width), Matrix::rows(dw, self.dtype, self.width)];
        launch_plan.launches.push(Product::single([self.wide, self.width, rows], matrices, false).launch());
        self.bias_grad(launch_plan, da, db);
    }

    /// The bias gradient from `da`.
    pub fn bias_grad(&self, launch_plan: &mut LaunchPlan, da: At, db: At) {
        let table = TensorLayout { dtype: self.sums, shape: vec![self.steps * self.batch, self.wide] };
        reduce(launch_plan, ReduceKind::Sum, &[0], (da, &table), (db, self.dtype));
    }

    /// `Σ daᵀ h` over all steps, with h the state before each. `parts` is the row range of the weight.
    pub fn state_weight_grad(&self, launch_plan: &mut LaunchPlan, da: At, h0: At, y: At, dw: At, parts: [usize; 2]) {
        let [from, to] = parts;
        let (size, sum_bytes) = (self.dtype.size(), self.sums.size());
        let product = |steps: [usize; 2], states: At, adds: bool| {
            let da_start = da.after(steps[0] * self.sum_step(self.wide) + from * sum_bytes);
            let matrices = [
                Matrix::rows(da_start, self.sums, self.wide).transposed(),
                Matrix::rows(states, self.dtype, self.hidden),
                Matrix::rows(dw.after(from * self.hidden * size), self.dtype, self.hidden),
            ];
            Product::single([to - from, self.hidden, (steps[1] - steps[0]) * self.batch], matrices, adds).launch()
        };
        let (first, other_steps, states) = match self.reverse {
            true => (self.steps - 1, [0, self.steps - 1], y.after(self.step(self.hidden))),
            false => (0, [1, self.steps], y),
        };
        launch_plan.launches.push(product([first, first + 1], h0, false));
        if self.steps > 1 {
            launch_plan.launches.push(product(other_steps, states, true));
        }
    }
}

/// Outputs y, last state, last cell, gates and cells.
pub fn kernel(reverse: bool, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, reverse);
    let kind = compute_type(s.sums);
    let (dtype, hidden) = (s.dtype, s.hidden);
    let mut launch_plan = LaunchPlan::default();
    let from_x = s.from_input(&mut launch_plan, At::input(0), At::input(1));
    let [y, last_h, last_c, gates, cells] = [0, 1, 2, 3, 4].map(At::output);
    for t in order(s.steps, reverse) {
        let mut builder = KernelBuilder::new(s.batch * s.wide.max(s.width).max(s.wide * hidden));
        builder.add_input("from_x", s.sums, from_x.after(t * s.sum_step(s.wide)));
        builder.add_input("w", dtype, At::input(2));
        builder.add_input("b_ih", dtype, At::input(3));
        builder.add_input("b_hh", dtype, At::input(4));
        builder.add_input("h", dtype, s.state_before(t, At::input(5), y));
        builder.add_input("c", dtype, s.state_before(t, At::input(6), cells));
        builder.add_output("y", dtype, y.after(t * s.step(hidden)));
        builder.add_output("gates", dtype, gates.after(t * s.step(s.wide)));
        builder.add_output("cells", dtype, cells.after(t * s.step(hidden)));
        let lines = format!(
            "at j = i % (at){hidden}, n = i / (at){hidden};\n{kind} a[4];\nfor (at g = 0; g < 4; g++) {{\nat k = g * (at){hidden} + j;\n\
             {kind} sum = from_x[n * (at){wide} + k] + {} + {};\n\
             for (at l = 0; l < (at){hidden}; l++) sum = m_fma({}, {}, sum);\na[g] = sum;\n}}\n\
             {kind} in = m_sigmoid(a[0]), forget = m_sigmoid(a[1]), cell = m_tanh(a[2]), out = m_sigmoid(a[3]);\n\
             {kind} next = forget * {} + in * cell;\n\
             at to = n * (at){wide} + j;\ngates[to] = {}; gates[to + (at){hidden}] = {}; gates[to + 2 * (at){hidden}] = {}; gates[to + 3 * (at){hidden}] = {};\n\
             cells[i] = {};\ny[i] = {};",
            load(dtype, "b_ih[k]"),
            load(dtype, "b_hh[k]"),
            load(dtype, &format!("h[n * (at){hidden} + l]")),
            load(dtype, &format!("w[k * (at){hidden} + l]")),
            load(dtype, "c[i]"),
            store(dtype, "in"),
            store(dtype, "forget"),
            store(dtype, "cell"),
            store(dtype, "out"),
            store(dtype, "next"),
            store(dtype, "out * m_tanh(next)"),
            wide = s.wide,
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
    }
    s.last(&mut launch_plan, y, last_h);
    s.last(&mut launch_plan, cells, last_c);
    Some(launch_plan)
}

/// Outputs dx, dw_ih, dw_hh, db, dh0, dc0.
pub fn grad(reverse: bool, x: &TensorLayout, w_hh: &TensorLayout) -> Option<LaunchPlan> {
    let s = Sizes::of(x, w_hh, reverse);
    let kind = compute_type(s.sums);
    let (dtype, hidden, wide) = (s.dtype, s.hidden, s.wide);
    let mut launch_plan = LaunchPlan::default();
    let da = launch_plan.take(s.steps * s.sum_step(wide));
    let dc = launch_plan.take(s.sum_step(hidden));
    let [dy, last_dh, last_dc, x_in, w_ih, w_hh, h0, c0, y, gates, cells] =
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(At::input);
    let through = format!(
        "{kind} dh = 0;\nfor (at k = 0; k < (at){wide}; k++) dh = m_fma(after[n * (at){wide} + k], {}, dh);\n",
        load(dtype, &format!("w[k * (at){hidden} + j]"))
    );
    let index_code = format!("at j = i % (at){hidden}, n = i / (at){hidden};\n");
    let mut after: Option<usize> = None;
    for t in order(s.steps, !reverse) {
        let mut builder = KernelBuilder::new(s.batch * wide * hidden.max(s.width));
        let (dh, dc_from) = match after {
            None => {
                builder.add_input("last_dh", dtype, last_dh);
                builder.add_input("last_dc", dtype, last_dc);
                (format!("{kind} dh = {};\n", load(dtype, "last_dh[i]")), load(dtype, "last_dc[i]"))
            }
            Some(later) => {
                builder.add_input("after", s.sums, da.after(later * s.sum_step(wide)));
                builder.add_input("w", dtype, w_hh);
                (through.clone(), "dc[i]".to_string())
            }
        };
        builder.add_input("dy", dtype, dy.after(t * s.step(hidden)));
        builder.add_input("gates", dtype, gates.after(t * s.step(wide)));
        builder.add_input("cells", dtype, cells.after(t * s.step(hidden)));
        builder.add_input("c", dtype, s.state_before(t, c0, cells));
        builder.add_output("da", s.sums, da.after(t * s.sum_step(wide)));
        builder.add_output("dc", s.sums, dc);
        let gate = |g: usize| load(dtype, &format!("gates[to + {g} * (at){hidden}]"));
        let lines = format!(
            "{index_code}at to = n * (at){wide} + j;\n{dh}dh += {};\n\
             {kind} in = {}, forget = {}, cell = {}, out = {};\n{kind} th = m_tanh({});\n\
             {kind} d = {dc_from} + dh * out * (({kind})1 - th * th);\n\
             da[to] = d * cell * in * (({kind})1 - in);\n\
             da[to + (at){hidden}] = d * {} * forget * (({kind})1 - forget);\n\
             da[to + 2 * (at){hidden}] = d * in * (({kind})1 - cell * cell);\n\
             da[to + 3 * (at){hidden}] = dh * th * out * (({kind})1 - out);\ndc[i] = d * forget;",
            load(dtype, "dy[i]"),
            gate(0),
            gate(1),
            gate(2),
            gate(3),
            load(dtype, "cells[i]"),
            load(dtype, "c[i]"),
        );
        launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
        after = Some(t);
    }
    let [dx, dw_ih, dw_hh, db, dh0, dc0] = [0, 1, 2, 3, 4, 5].map(At::output);
    let first = order(s.steps, reverse).next()?;
    let mut builder = KernelBuilder::new(s.batch * wide * hidden);
    builder.add_input("after", s.sums, da.after(first * s.sum_step(wide)));
    builder.add_input("w", dtype, w_hh);
    builder.add_input("dc", s.sums, dc);
    builder.add_output("dh0", dtype, dh0);
    builder.add_output("dc0", dtype, dc0);
    let lines = format!("{index_code}{through}dh0[i] = {};\ndc0[i] = {};", store(dtype, "dh"), store(dtype, "dc[i]"));
    launch_plan.launches.push(builder.each(s.batch * hidden, &lines));
    s.input_grads(&mut launch_plan, da, x_in, w_ih, [dx, dw_ih, db]);
    s.state_weight_grad(&mut launch_plan, da, h0, y, dw_hh, [0, wide]);
    Some(launch_plan)
}
