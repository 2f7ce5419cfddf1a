//! Convolution and both its gradients, straight from their definition: a thread for each element of a result, or a block for each weight.
//!
//! This serves every window, group and element type. Where the vendor's library is found, convolutions go there.

use super::draft::Draft;
use super::element::{accumulator, held, load, store};
use super::recipe::{At, Recipe};
use crate::device::layout::Layout;
use compiler::op::Window;
use std::fmt::Write;

/// Shapes of a convolution: x `[N, C, D…]`, w `[O, C/groups, K…]`, y `[N, O, E…]`.
struct Shapes<'a> {
    x: &'a [usize],
    w: &'a [usize],
    y: &'a [usize],
}

impl Shapes<'_> {
    fn rank(&self) -> usize {
        self.x.len() - 2
    }

    /// Lines that read the index of each spatial axis from `rest`, which is left over at the end.
    fn split(&self, sizes: &[usize], name: &str, rest: &str) -> String {
        let mut lines = String::new();
        for axis in (0..self.rank()).rev() {
            let _ = writeln!(lines, "at {name}{axis} = {rest} % (at){0}; {rest} /= (at){0};", sizes[axis]);
        }
        lines
    }

    /// The flat index of spatial indices.
    fn flat(&self, sizes: &[usize], name: &str) -> String {
        (0..self.rank()).fold("0".to_string(), |flat, axis| match axis {
            0 => format!("{name}0"),
            _ => format!("({flat}) * (at){} + {name}{axis}", sizes[axis]),
        })
    }

    fn volume(sizes: &[usize]) -> usize {
        sizes.iter().product()
    }

    fn reach(&self) -> usize {
        [self.x, self.w, self.y].into_iter().map(Self::volume).max().unwrap_or(0)
    }

    fn group_outs(&self) -> usize {
        self.y[1] / (self.x[1] / self.w[1]).max(1)
    }
}

/// `y = x ⋆ w`.
pub fn forward(window: &Window, x: &Layout, w: &Layout, y: &Layout) -> Option<Recipe> {
    let s = Shapes { x: &x.shape, w: &w.shape, y: &y.shape };
    let kind = held(accumulator(y.dtype));
    let mut draft = Draft::new(s.reach());
    draft.reads("x", x.dtype, At::input(0));
    draft.reads("w", w.dtype, At::input(1));
    draft.writes("y", y.dtype, At::output(0));
    let mut body = format!("at r = i;\n{}", s.split(&s.y[2..], "e", "r"));
    let _ = writeln!(body, "at o = r % (at){0}, n = r / (at){0};\n{kind} sum = 0;", s.y[1]);
    let _ = writeln!(body, "for (at c = 0; c < (at){}; c++) {{", s.w[1]);
    let _ = writeln!(
        body,
        "at channel = o / (at){} * (at){} + c;\nat from_x = (n * (at){} + channel) * (at){}, from_w = (o * (at){} + c) * (at){};",
        s.group_outs(),
        s.w[1],
        s.x[1],
        Shapes::volume(&s.x[2..]),
        s.w[1],
        Shapes::volume(&s.w[2..])
    );
    for axis in 0..s.rank() {
        let _ = writeln!(
            body,
            "for (at k{axis} = 0; k{axis} < (at){}; k{axis}++) {{\nat d{axis} = e{axis} * (at){} + k{axis} * (at){} - (at){};\n\
             if (d{axis} >= (at){}) continue;",
            s.w[2 + axis],
            window.strides[axis],
            window.dilations[axis],
            window.pads_begin[axis],
            s.x[2 + axis]
        );
    }
    let _ = writeln!(
        body,
        "sum += ({kind}){} * ({kind}){};",
        load(x.dtype, &format!("x[from_x + {}]", s.flat(&s.x[2..], "d"))),
        load(w.dtype, &format!("w[from_w + {}]", s.flat(&s.w[2..], "k")))
    );
    body.push_str(&"}\n".repeat(s.rank() + 1));
    let _ = write!(body, "y[i] = {};", store(y.dtype, "sum"));
    Some(Recipe::of(draft.each(y.len(), &body)))
}

/// The gradient for x: each element asks which windows saw it.
pub fn input_grad(window: &Window, dy: &Layout, w: &Layout, dx: &Layout) -> Option<Recipe> {
    let s = Shapes { x: &dx.shape, w: &w.shape, y: &dy.shape };
    let kind = held(accumulator(dx.dtype));
    let mut draft = Draft::new(s.reach());
    draft.reads("dy", dy.dtype, At::input(0));
    draft.reads("w", w.dtype, At::input(1));
    draft.writes("dx", dx.dtype, At::output(0));
    let mut body = format!("at r = i;\n{}", s.split(&s.x[2..], "d", "r"));
    let _ = writeln!(body, "at channel = r % (at){0}, n = r / (at){0};\n{kind} sum = 0;", s.x[1]);
    let _ = writeln!(body, "for (at q = 0; q < (at){}; q++) {{", s.group_outs());
    let _ = writeln!(
        body,
        "at o = channel / (at){0} * (at){1} + q, c = channel % (at){0};\n\
         at from_y = (n * (at){2} + o) * (at){3}, from_w = (o * (at){0} + c) * (at){4};",
        s.w[1],
        s.group_outs(),
        s.y[1],
        Shapes::volume(&s.y[2..]),
        Shapes::volume(&s.w[2..])
    );
    for axis in 0..s.rank() {
        let _ = writeln!(
            body,
            "for (at k{axis} = 0; k{axis} < (at){}; k{axis}++) {{\nat g{axis} = d{axis} + (at){} - k{axis} * (at){};\n\
             at e{axis} = g{axis} / (at){3};\nif (d{axis} + (at){1} < k{axis} * (at){2} || g{axis} % (at){3} != 0 || e{axis} >= (at){4}) continue;",
            s.w[2 + axis],
            window.pads_begin[axis],
            window.dilations[axis],
            window.strides[axis],
            s.y[2 + axis]
        );
    }
    let _ = writeln!(
        body,
        "sum += ({kind}){} * ({kind}){};",
        load(dy.dtype, &format!("dy[from_y + {}]", s.flat(&s.y[2..], "e"))),
        load(w.dtype, &format!("w[from_w + {}]", s.flat(&s.w[2..], "k")))
    );
    body.push_str(&"}\n".repeat(s.rank() + 1));
    let _ = write!(body, "dx[i] = {};", store(dx.dtype, "sum"));
    Some(Recipe::of(draft.each(dx.len(), &body)))
}

/// The gradient for w: a block for each weight goes over all windows.
pub fn weight_grad(window: &Window, dy: &Layout, x: &Layout, dw: &Layout) -> Option<Recipe> {
    let s = Shapes { x: &x.shape, w: &dw.shape, y: &dy.shape };
    let kind = held(accumulator(dw.dtype));
    let mut draft = Draft::new(s.reach());
    draft.reads("dy", dy.dtype, At::input(0));
    draft.reads("x", x.dtype, At::input(1));
    draft.writes("dw", dw.dtype, At::output(0));
    let places = Shapes::volume(&s.y[2..]);
    let mut body = format!("at r = i;\n{}", s.split(&s.w[2..], "k", "r"));
    let _ = writeln!(
        body,
        "at c = r % (at){0}, o = r / (at){0};\nat channel = o / (at){1} * (at){0} + c;\n{kind} sum = 0;",
        s.w[1],
        s.group_outs()
    );
    let count = s.y[0] * places;
    let _ = writeln!(body, "for (at p = threadIdx.x; p < (at){count}; p += blockDim.x) {{\nat v = p;");
    body.push_str(&s.split(&s.y[2..], "e", "v"));
    for axis in 0..s.rank() {
        let _ = writeln!(
            body,
            "at d{axis} = e{axis} * (at){} + k{axis} * (at){} - (at){};\nif (d{axis} >= (at){}) continue;",
            window.strides[axis],
            window.dilations[axis],
            window.pads_begin[axis],
            s.x[2 + axis]
        );
    }
    let _ = writeln!(
        body,
        "sum += ({kind}){} * ({kind}){};\n}}\nsum = sum_across(sum);\nif (threadIdx.x == 0) dw[i] = {};",
        load(dy.dtype, &format!("dy[(v * (at){} + o) * (at){places} + {}]", s.y[1], s.flat(&s.y[2..], "e"))),
        load(
            x.dtype,
            &format!(
                "x[(v * (at){} + channel) * (at){} + {}]",
                s.x[1],
                Shapes::volume(&s.x[2..]),
                s.flat(&s.x[2..], "d")
            )
        ),
        store(dw.dtype, "sum")
    );
    Some(Recipe::of(draft.block_each(dw.len(), count, &body)))
}
