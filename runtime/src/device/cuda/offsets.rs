//! Generates kernel code that maps an element's flat index to its offset in each operand.
//!
//! Dimensions of size 1 are dropped and adjacent dimensions that are contiguous for every operand are merged, so most
//! ops need no division.

use compiler::tensor::view::strides;
use std::fmt::Write;

/// An operand's strides over a shape, and its start.
#[derive(Clone, Debug)]
pub struct Walk {
    /// Offset of the first element.
    pub base: usize,
    /// Stride of each axis, in elements.
    pub steps: Vec<isize>,
}

impl Walk {
    /// A contiguous tensor.
    pub fn plain(shape: &[usize]) -> Walk {
        Walk { base: 0, steps: strides(shape).into_iter().map(|s| s as isize).collect() }
    }

    /// An operand broadcast to `out`.
    pub fn stretched(shape: &[usize], out: &[usize]) -> Walk {
        let added = out.len() - shape.len();
        let own = strides(shape);
        let step = |axis: usize| match axis.checked_sub(added) {
            Some(own_axis) if shape[own_axis] != 1 => own[own_axis] as isize,
            _ => 0,
        };
        Walk { base: 0, steps: (0..out.len()).map(step).collect() }
    }
}

/// Code that computes the coordinates of flat `index` over `shape`, and an offset expression for each walk. `prefix`
/// starts the variable names.
pub fn offsets(prefix: &str, index: &str, shape: &[usize], walks: &[Walk]) -> (String, Vec<String>) {
    let dims = joined(shape, walks);
    let mut lines = String::new();
    let mut terms: Vec<Vec<String>> = vec![Vec::new(); walks.len()];
    let used = |k: usize| dims[k].1.iter().any(|&step| step != 0);
    let _ = writeln!(lines, "at {prefix}_rest = {index};");
    for k in (0..dims.len()).rev() {
        let (size, steps) = &dims[k];
        let name = format!("{prefix}_{k}");
        let rest = if k == 0 { format!("{prefix}_rest") } else { format!("{prefix}_rest % (at){size}") };
        if used(k) {
            let _ = writeln!(lines, "at {name} = {rest};");
        }
        if k > 0 {
            let _ = writeln!(lines, "{prefix}_rest /= (at){size};");
        }
        for (terms, &step) in terms.iter_mut().zip(steps) {
            match step {
                0 => {}
                1 => terms.push(name.clone()),
                step => terms.push(format!("{name} * (at)({step})")),
            }
        }
    }
    let expressions = walks.iter().zip(terms).map(|(walk, mut terms)| {
        if walk.base != 0 || terms.is_empty() {
            terms.push(format!("(at){}", walk.base));
        }
        // Strides may be negative: unsigned arithmetic wraps to the right offset.
        format!("({})", terms.join(" + "))
    });
    let expressions = expressions.collect();
    (lines, expressions)
}

/// The dimensions of a shape, with their strides, after those of size 1 are dropped and contiguous ones are merged.
pub fn joined(shape: &[usize], walks: &[Walk]) -> Vec<(usize, Vec<isize>)> {
    let mut dims: Vec<(usize, Vec<isize>)> = Vec::new();
    for (axis, &size) in shape.iter().enumerate().filter(|&(_, &size)| size != 1) {
        let here: Vec<isize> = walks.iter().map(|walk| walk.steps[axis]).collect();
        match dims.last_mut() {
            Some((above, steps)) if steps.iter().zip(&here).all(|(s, h)| *s == h * size as isize) => {
                *above *= size;
                *steps = here;
            }
            _ => dims.push((size, here)),
        }
    }
    dims
}
