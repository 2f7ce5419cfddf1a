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
    pub fn broadcast(shape: &[usize], out: &[usize]) -> Walk {
        let leading = out.len() - shape.len();
        let contiguous = strides(shape);
        let step = |axis: usize| match axis.checked_sub(leading) {
            Some(axis) if shape[axis] != 1 => contiguous[axis] as isize,
            _ => 0,
        };
        Walk { base: 0, steps: (0..out.len()).map(step).collect() }
    }
}

/// Code that computes the coordinates of flat `index` over `shape`, and an offset expression for each walk. `prefix`
/// starts the variable names.
pub fn offsets(prefix: &str, index: &str, shape: &[usize], walks: &[Walk]) -> (String, Vec<String>) {
    let dims = merge_dims(shape, walks);
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

/// A shape whose elements are packs of adjacent elements of another, and what every operand has of a pack.
pub struct Packed {
    /// Elements of a pack.
    pub width: usize,
    pub shape: Vec<usize>,
    /// Offsets of packs in elements.
    pub walks: Vec<Walk>,
    /// Whether a pack of this operand is one element, the same for all.
    pub is_same: Vec<bool>,
}

impl Packed {
    /// Packs of the most elements, up to `max_width`, that start at multiples of their size in every operand.
    pub fn new(shape: &[usize], walks: &[Walk], max_width: usize) -> Packed {
        let dims = merge_dims(shape, walks);
        let inner = dims.last().map_or((1, vec![0; walks.len()]), Clone::clone);
        let steps_of = |walk: usize| dims[..dims.len().saturating_sub(1)].iter().map(move |(_, steps)| steps[walk]);
        let fits = |walk: usize, width: usize| match inner.1[walk] {
            0 => true,
            1 => walks[walk].base.is_multiple_of(width) && steps_of(walk).all(|step| step % width as isize == 0),
            _ => width == 1,
        };
        let divides = |width: &usize| inner.0.is_multiple_of(*width) && (0..walks.len()).all(|walk| fits(walk, *width));
        let width = [8, 4, 2].into_iter().filter(|width| *width <= max_width).find(divides).unwrap_or(1);
        let packed = |walk: usize| Walk {
            base: walks[walk].base,
            steps: steps_of(walk).chain(dims.last().map(|_| inner.1[walk] * width as isize)).collect(),
        };
        let mut shape: Vec<usize> = dims.iter().map(|dim| dim.0).collect();
        shape.iter_mut().last().into_iter().for_each(|size| *size /= width);
        Packed {
            width,
            shape,
            walks: (0..walks.len()).map(packed).collect(),
            is_same: inner.1.iter().map(|step| *step == 0).collect(),
        }
    }
}

/// The dimensions of a shape, with their strides, after those of size 1 are dropped and contiguous ones are merged.
pub fn merge_dims(shape: &[usize], walks: &[Walk]) -> Vec<(usize, Vec<isize>)> {
    let mut dims: Vec<(usize, Vec<isize>)> = Vec::new();
    for (axis, &size) in shape.iter().enumerate().filter(|&(_, &size)| size != 1) {
        let axis_steps: Vec<isize> = walks.iter().map(|walk| walk.steps[axis]).collect();
        match dims.last_mut() {
            Some((outer_size, steps)) if steps.iter().zip(&axis_steps).all(|(s, h)| *s == h * size as isize) => {
                *outer_size *= size;
                *steps = axis_steps;
            }
            _ => dims.push((size, axis_steps)),
        }
    }
    dims
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_fit_all_operands() {
        let packed = |shape: &[usize], walks: &[Walk]| {
            let Packed { width, shape, is_same, .. } = Packed::new(shape, walks, 8);
            (width, shape, is_same)
        };
        let (whole, row) = (Walk::plain(&[64, 24]), Walk::broadcast(&[24], &[64, 24]));
        assert_eq!(packed(&[64, 24], &[whole.clone(), row]), (8, vec![64, 3], vec![false, false]));
        let column = Walk::broadcast(&[64, 1], &[64, 24]);
        assert_eq!(packed(&[64, 24], &[whole.clone(), column]), (8, vec![64, 3], vec![false, true]));
        // Rows of other tensors start at other multiples, and slices within them.
        let part = |base, row| Walk { base, steps: vec![row, 1] };
        assert_eq!(packed(&[64, 24], &[whole.clone(), part(4, 48)]), (4, vec![64, 6], vec![false, false]));
        assert_eq!(packed(&[64, 24], &[whole.clone(), part(0, 50)]), (2, vec![64, 12], vec![false, false]));
        let transposed = Walk { base: 0, steps: vec![1, 64] };
        assert_eq!(packed(&[64, 24], &[whole.clone(), transposed]), (1, vec![64, 24], vec![false, false]));
        assert_eq!(packed(&[64, 24], &[whole]), (8, vec![192], vec![false]));
        assert_eq!(packed(&[1, 1], &[Walk::plain(&[1, 1])]), (1, vec![], vec![true]));
    }
}
