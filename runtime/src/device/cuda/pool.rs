//! Pooling and its gradients: one thread per result element. A gradient gathers from the windows that read its element,
//! so no atomics are needed.

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, literal, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::windows::{close, element_loops, flat, split, window_loops};
use crate::device::layout::TensorLayout;
use compiler::op::{AvgPool, MaxPool, Window};
use compiler::tensor::DType;
use std::fmt::Write;

/// Shapes: x `[N, C, D…]`, y `[N, C, E…]`.
struct Shapes<'a> {
    window: &'a Window,
    kernel: &'a [usize],
    x: &'a [usize],
    y: &'a [usize],
}

impl Shapes<'_> {
    /// Code that splits `i` into spatial indices and `plane`.
    fn split(&self, sizes: &[usize], name: &str) -> String {
        format!("at plane = i;\n{}", split(&sizes[2..], name, "plane"))
    }

    fn flat(&self, sizes: &[usize], name: &str) -> String {
        flat(&sizes[2..], name, "plane")
    }

    /// Loops over the elements that window `e…` reads, with indices `d…`. [`Shapes::close`] ends them.
    fn element_loops(&self) -> String {
        element_loops(self.window, self.kernel, &self.x[2..])
    }

    /// Loops over the windows `e…` that read element `x…`, with taps `t…`.
    fn window_loops(&self) -> String {
        window_loops(self.window, self.kernel, &self.y[2..], "x", "t")
    }

    fn close(&self) -> String {
        close(self.kernel.len())
    }

    /// Code that computes `divisor`, the element count of window `e…`.
    fn divisor(&self, count_padding: bool) -> String {
        if !count_padding {
            return format!("at divisor = 0;\n{}divisor++;\n{}", self.element_loops(), self.close());
        }
        let mut lines = "at divisor = 1;\n".to_string();
        for axis in 0..self.kernel.len() {
            let window = self.window;
            let padded = window.pads_begin[axis] + self.x[2 + axis] + window.pads_end[axis];
            let _ = writeln!(
                lines,
                "{{\nat inside = 0;\nfor (at t = 0; t < (at){}; t++) inside += e{axis} * (at){} + t * (at){} < (at){padded};\ndivisor *= inside;\n}}",
                self.kernel[axis], window.strides[axis], window.dilations[axis]
            );
        }
        lines
    }

    /// Code that computes `best`, the index of the first maximum of window `e…` (NaN wins), and its value `most`.
    fn find_maximum(&self, x: &TensorLayout) -> String {
        let kind = compute_type(x.dtype);
        format!(
            "at best = 0;\n{kind} most = {};\nbool any = false;\n{}at p = {};\n{kind} v = {};\n\
             if (!any || v > most || (v != v && most == most)) {{ best = p; most = v; any = true; }}\n{}",
            literal(x.dtype, f64::NEG_INFINITY),
            self.element_loops(),
            self.flat(self.x, "d"),
            load(x.dtype, "x[p]"),
            self.close()
        )
    }
}

pub fn max(op: &MaxPool, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { window: &op.window, kernel: &op.kernel, x: &x.shape, y: &y.shape };
    let mut builder = KernelBuilder::new(x.len().max(y.len()));
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("y", y.dtype, At::output(0));
    let body = format!("{}{}y[i] = {};", s.split(s.y, "e"), s.find_maximum(x), store(y.dtype, "most"));
    Some(LaunchPlan::of(builder.each(y.len(), &body)))
}

/// Routes each gradient to the first maximum of its window. A first launch finds these.
pub fn max_grad(op: &MaxPool, x: &TensorLayout, dy: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { window: &op.window, kernel: &op.kernel, x: &x.shape, y: &dy.shape };
    let kind = compute_type(accumulator(x.dtype));
    let index = if x.len() < u32::MAX as usize { DType::U32 } else { DType::U64 };
    let mut launch_plan = LaunchPlan::default();
    let maxima = launch_plan.take(dy.len() * index.size());
    let mut builder = KernelBuilder::new(x.len().max(dy.len()));
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("winners", index, maxima);
    let body = format!("{}{}winners[i] = any ? best : ~({})0;", s.split(s.y, "e"), s.find_maximum(x), index.name());
    launch_plan.launches.push(builder.each(dy.len(), &body));
    let mut builder = KernelBuilder::new(x.len().max(dy.len()));
    builder.add_input("dy", dy.dtype, At::input(1));
    builder.add_input("winners", index, maxima);
    builder.add_output("dx", x.dtype, At::output(0));
    let body = format!(
        "{}{kind} sum = 0;\n{}at w = {};\nif (winners[w] == i) sum += ({kind}){};\n{}dx[i] = {};",
        s.split(s.x, "x"),
        s.window_loops(),
        s.flat(s.y, "e"),
        load(dy.dtype, "dy[w]"),
        s.close(),
        store(x.dtype, "sum")
    );
    launch_plan.launches.push(builder.each(x.len(), &body));
    Some(launch_plan)
}

pub fn avg(op: &AvgPool, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { window: &op.window, kernel: &op.kernel, x: &x.shape, y: &y.shape };
    let kind = compute_type(accumulator(x.dtype));
    let mut builder = KernelBuilder::new(x.len().max(y.len()));
    builder.add_input("x", x.dtype, At::input(0));
    builder.add_output("y", y.dtype, At::output(0));
    let body = format!(
        "{}{kind} sum = 0;\nbool any = false;\n{}sum += ({kind}){};\nany = true;\n{}{}{kind} mean = any ? sum / ({kind})divisor : ({kind})0;\ny[i] = {};",
        s.split(s.y, "e"),
        s.element_loops(),
        load(x.dtype, &format!("x[{}]", s.flat(s.x, "d"))),
        s.close(),
        s.divisor(op.count_padding),
        store(y.dtype, "mean")
    );
    Some(LaunchPlan::of(builder.each(y.len(), &body)))
}

/// Distributes each gradient over the elements of its window.
pub fn avg_grad(op: &AvgPool, dy: &TensorLayout, dx: &TensorLayout) -> Option<LaunchPlan> {
    let s = Shapes { window: &op.window, kernel: &op.kernel, x: &dx.shape, y: &dy.shape };
    let kind = compute_type(accumulator(dx.dtype));
    let mut builder = KernelBuilder::new(dx.len().max(dy.len()));
    builder.add_input("dy", dy.dtype, At::input(0));
    builder.add_output("dx", dx.dtype, At::output(0));
    let body = format!(
        "{}{kind} sum = 0;\n{}{}sum += ({kind}){} / ({kind})divisor;\n{}dx[i] = {};",
        s.split(s.x, "x"),
        s.window_loops(),
        s.divisor(op.count_padding),
        load(dy.dtype, &format!("dy[{}]", s.flat(s.y, "e"))),
        s.close(),
        store(dx.dtype, "sum")
    );
    Some(LaunchPlan::of(builder.each(dx.len(), &body)))
}
