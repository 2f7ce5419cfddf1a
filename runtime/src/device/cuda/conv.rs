//! Direct convolution and its gradients: one thread per result element, or one block per weight.
//!
//! Supports every window, group count and element type. They are for GPUs without cuDNN, and what it does not
//! compute: see [`library_convolution`](super::library_convolution).

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::windows::{close, element, element_loops, flat, split, window_loops};
use crate::device::layout::TensorLayout;
use compiler::op::Window;
use std::fmt::Write;

/// Shapes: x `[N, C, D…]`, w `[O, C/groups, K…]`, y `[N, O, E…]`.
struct Shapes<'a> {
    x: &'a [usize],
    w: &'a [usize],
    y: &'a [usize],
}

impl Shapes<'_> {
    fn rank(&self) -> usize {
        self.x.len() - 2
    }

    fn reach(&self) -> usize {
        [self.x, self.w, self.y].into_iter().map(volume).max().unwrap_or(0)
    }

    fn group_outs(&self) -> usize {
        self.y[1] / (self.x[1] / self.w[1]).max(1)
    }
}

fn volume(sizes: &[usize]) -> usize {
    sizes.iter().product()
}

/// `y = x ⋆ w`.
pub fn forward(window: &Window, x: &TensorLayout, w: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { x: &x.shape, w: &w.shape, y: &y.shape };
    let kind = compute_type(accumulator(y.dtype));
    let mut builder = KernelBuilder::new(s.reach());
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_input("w", w.dtype, At::input(1));
    builder.add_output("y", y.dtype, At::output(0));
    let mut body = format!("at r = i;\n{}", split(&s.y[2..], "e", "r"));
    let _ = writeln!(body, "at o = r % (at){0}, n = r / (at){0};\n{kind} sum = 0;", s.y[1]);
    let _ = writeln!(body, "for (at c = 0; c < (at){}; c++) {{", s.w[1]);
    let _ = writeln!(
        body,
        "at channel = o / (at){} * (at){} + c;\nat from_x = (n * (at){} + channel) * (at){}, from_w = (o * (at){} + c) * (at){};",
        s.group_outs(),
        s.w[1],
        s.x[1],
        volume(&s.x[2..]),
        s.w[1],
        volume(&s.w[2..])
    );
    body.push_str(&element_loops(window, &s.w[2..], &s.x[2..]));
    let _ = writeln!(
        body,
        "sum = m_fma(({kind}){}, ({kind}){}, sum);",
        load(x.dtype, &format!("x[from_x + {}]", flat(&s.x[2..], "d", "0"))),
        load(w.dtype, &format!("w[from_w + {}]", flat(&s.w[2..], "k", "0")))
    );
    body.push_str(&close(s.rank() + 1));
    let _ = write!(body, "y[i] = {};", store(y.dtype, "sum"));
    Some(LaunchPlan::of(builder.each(y.len(), &body)))
}

/// The gradient of x: each element gathers from the windows that read it.
pub fn input_grad(window: &Window, dy: &TensorLayout, w: &TensorLayout, dx: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { x: &dx.shape, w: &w.shape, y: &dy.shape };
    let kind = compute_type(accumulator(dx.dtype));
    let mut builder = KernelBuilder::new(s.reach());
    builder.add_input("dy", dy.dtype, At::input(0));
    builder.add_input("w", w.dtype, At::input(1));
    builder.add_output("dx", dx.dtype, At::output(0));
    let mut body = format!("at r = i;\n{}", split(&s.x[2..], "d", "r"));
    let _ = writeln!(body, "at channel = r % (at){0}, n = r / (at){0};\n{kind} sum = 0;", s.x[1]);
    let _ = writeln!(body, "for (at q = 0; q < (at){}; q++) {{", s.group_outs());
    let _ = writeln!(
        body,
        "at o = channel / (at){0} * (at){1} + q, c = channel % (at){0};\n\
         at from_y = (n * (at){2} + o) * (at){3}, from_w = (o * (at){0} + c) * (at){4};",
        s.w[1],
        s.group_outs(),
        s.y[1],
        volume(&s.y[2..]),
        volume(&s.w[2..])
    );
    body.push_str(&window_loops(window, &s.w[2..], &s.y[2..], "d", "k"));
    let _ = writeln!(
        body,
        "sum = m_fma(({kind}){}, ({kind}){}, sum);",
        load(dy.dtype, &format!("dy[from_y + {}]", flat(&s.y[2..], "e", "0"))),
        load(w.dtype, &format!("w[from_w + {}]", flat(&s.w[2..], "k", "0")))
    );
    body.push_str(&close(s.rank() + 1));
    let _ = write!(body, "dx[i] = {};", store(dx.dtype, "sum"));
    Some(LaunchPlan::of(builder.each(dx.len(), &body)))
}

/// The gradient of w: one block per weight reduces over all windows.
pub fn weight_grad(window: &Window, dy: &TensorLayout, x: &TensorLayout, dw: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { x: &x.shape, w: &dw.shape, y: &dy.shape };
    let kind = compute_type(accumulator(dw.dtype));
    let mut builder = KernelBuilder::new(s.reach());
    builder.add_input("dy", dy.dtype, At::input(0));
    builder.add_input("x", x.dtype, At::input(1));
    builder.add_output("dw", dw.dtype, At::output(0));
    let windows = volume(&s.y[2..]);
    let mut body = format!("at r = i;\n{}", split(&s.w[2..], "k", "r"));
    let _ = writeln!(
        body,
        "at c = r % (at){0}, o = r / (at){0};\nat channel = o / (at){1} * (at){0} + c;\n{kind} sum = 0;",
        s.w[1],
        s.group_outs()
    );
    let count = s.y[0] * windows;
    let _ = writeln!(body, "for (at p = threadIdx.x; p < (at){count}; p += blockDim.x) {{\nat v = p;");
    body.push_str(&split(&s.y[2..], "e", "v"));
    (0..s.rank()).for_each(|axis| body.push_str(&element(window, axis, s.x[2 + axis])));
    let _ = writeln!(
        body,
        "sum = m_fma(({kind}){}, ({kind}){}, sum);\n}}\nsum = sum_across(sum);\nif (threadIdx.x == 0) dw[i] = {};",
        load(dy.dtype, &format!("dy[(v * (at){} + o) * (at){windows} + {}]", s.y[1], flat(&s.y[2..], "e", "0"))),
        load(
            x.dtype,
            &format!("x[(v * (at){} + channel) * (at){} + {}]", s.x[1], volume(&s.x[2..]), flat(&s.x[2..], "d", "0"))
        ),
        store(dw.dtype, "sum")
    );
    Some(LaunchPlan::of(builder.block_each(dw.len(), count, &body)))
}
