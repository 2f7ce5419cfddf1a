//! Windows over spatial dims, as lines of a kernel: which elements a window sees, and which windows see an element.
//!
//! An index along each axis has a name and the axis: `e0`, `e1` is a window's place, `d0`, `d1` an element's, `k0`, `k1` a tap's.

use compiler::op::Window;
use std::fmt::Write;

/// Lines that read the index along each axis from `rest`, which keeps what is left over.
pub fn split(sizes: &[usize], name: &str, rest: &str) -> String {
    let mut lines = String::new();
    for (axis, size) in sizes.iter().enumerate().rev() {
        let _ = writeln!(lines, "at {name}{axis} = {rest} % (at){size}; {rest} /= (at){size};");
    }
    lines
}

/// The flat index of an element of plane `plane`.
pub fn flat(sizes: &[usize], name: &str, plane: &str) -> String {
    let step = |flat: String, (axis, size): (usize, &usize)| format!("({flat}) * (at){size} + {name}{axis}");
    sizes.iter().enumerate().fold(plane.to_string(), step)
}

/// The element `d` that window `e` sees at tap `k` of an axis; nothing in the padding, where the loop goes on.
pub fn element(window: &Window, axis: usize, size: usize) -> String {
    format!(
        "at d{axis} = e{axis} * (at){} + k{axis} * (at){} - (at){};\nif (d{axis} >= (at){size}) continue;\n",
        window.strides[axis], window.dilations[axis], window.pads_begin[axis]
    )
}

/// Loops over the elements `d` that window `e` sees, each at its tap `k`; [`close`] ends them.
pub fn seen(window: &Window, kernel: &[usize], sizes: &[usize]) -> String {
    let mut lines = String::new();
    for (axis, (taps, &size)) in kernel.iter().zip(sizes).enumerate() {
        let _ = writeln!(lines, "for (at k{axis} = 0; k{axis} < (at){taps}; k{axis}++) {{");
        lines.push_str(&element(window, axis, size));
    }
    lines
}

/// Loops over the windows `e` that see an element, each at its tap, in the names of the element's index and of the tap's; [`close`]
/// ends them.
pub fn seeing(window: &Window, kernel: &[usize], windows: &[usize], element: &str, tap: &str) -> String {
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

/// The end of the loops over so many axes.
pub fn close(rank: usize) -> String {
    "}\n".repeat(rank)
}
