//! Generates kernel code for sliding windows: the elements that a window reads, and the windows that read an element.
//!
//! Index variables are named by role and axis: `e0`, `e1` for a window, `d0`, `d1` for an element, `k0`, `k1` for a
//! tap.

use compiler::op::Window;
use std::fmt::Write;

/// Code that splits `rest` into an index per axis, leaving the quotient in `rest`.
pub fn split(sizes: &[usize], name: &str, rest: &str) -> String {
    let mut lines = String::new();
    for (axis, size) in sizes.iter().enumerate().rev() {
        let _ = writeln!(lines, "at {name}{axis} = {rest} % (at){size}; {rest} /= (at){size};");
    }
    lines
}

/// Flat index of an element in plane `plane`.
pub fn flat(sizes: &[usize], name: &str, plane: &str) -> String {
    let step = |flat: String, (axis, size): (usize, &usize)| format!("({flat}) * (at){size} + {name}{axis}");
    sizes.iter().enumerate().fold(plane.to_string(), step)
}

/// Code for the element `d` that window `e` reads at tap `k` of an axis; skips the padding.
pub fn element(window: &Window, axis: usize, size: usize) -> String {
    format!(
        "at d{axis} = e{axis} * (at){} + k{axis} * (at){} - (at){};\nif (d{axis} >= (at){size}) continue;\n",
        window.strides[axis], window.dilations[axis], window.pads_begin[axis]
    )
}

/// Loops over the elements `d` that window `e` reads, with taps `k`. [`close`] ends them.
pub fn element_loops(window: &Window, kernel: &[usize], sizes: &[usize]) -> String {
    let mut lines = String::new();
    for (axis, (taps, &size)) in kernel.iter().zip(sizes).enumerate() {
        let _ = writeln!(lines, "for (at k{axis} = 0; k{axis} < (at){taps}; k{axis}++) {{");
        lines.push_str(&element(window, axis, size));
    }
    lines
}

/// Loops over the windows `e` that read an element; `element` and `tap` are the index names. [`close`] ends them.
pub fn window_loops(window: &Window, kernel: &[usize], windows: &[usize], element: &str, tap: &str) -> String {
    let mut lines = String::new();
    for (axis, (taps, count)) in kernel.iter().zip(windows).enumerate() {
        let (pad, dilation, stride) = (window.pads_begin[axis], window.dilations[axis], window.strides[axis]);
        let (at, tap) = (format!("{element}{axis}"), format!("{tap}{axis}"));
        let _ = writeln!(
            lines,
            "for (at {tap} = 0; {tap} < (at){taps}; {tap}++) {{\n\
             if ({at} + (at){pad} < {tap} * (at){dilation}) continue;\n\
             at g{axis} = {at} + (at){pad} - {tap} * (at){dilation};\nat e{axis} = g{axis} / (at){stride};\n\
             if (g{axis} % (at){stride} != 0 || e{axis} >= (at){count}) continue;"
        );
    }
    lines
}

/// Ends the loops over `rank` axes.
pub fn close(rank: usize) -> String {
    "}\n".repeat(rank)
}
