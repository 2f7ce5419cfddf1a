//! Joint iteration over several strided operands.
//!
//! Dimensions of size 1 are dropped, and adjacent dimensions that are contiguous for every operand are merged. Equal
//! shapes, scalars, row vectors, channel vectors and most transposes reduce to a few outer dimensions and one long
//! inner run. Each operand has a fixed step in the inner run.

use compiler::tensor::view::strides;

/// Maximum outer dimensions after merging.
const MAX_OUTER: usize = 8;

/// An iteration over `N` operands.
#[derive(Clone, Debug)]
pub struct Walk<const N: usize> {
    /// Elements of an inner run.
    pub inner: usize,
    /// Step of each operand within a run.
    pub steps: [isize; N],
    dims: Vec<usize>,
    strides: Vec<[isize; N]>,
    start: [isize; N],
    runs: usize,
}

impl<const N: usize> Walk<N> {
    /// Iterates over `shape`; operand `i` has stride `strides[i][axis]` and starts at `start[i]`. `None` if there are
    /// too many dimensions.
    pub fn new(shape: &[usize], strides: [&[isize]; N], start: [isize; N]) -> Option<Walk<N>> {
        let mut merged = merge_dims(shape, strides);
        let (inner, steps) = merged.pop().unwrap_or((1, [1; N]));
        if merged.len() > MAX_OUTER {
            return None;
        }
        let runs = if inner == 0 { 0 } else { merged.iter().map(|(dim, _)| dim).product() };
        let (dims, strides) = merged.into_iter().unzip();
        Some(Walk { inner, steps, dims, strides, start, runs })
    }

    /// Every element's index in each operand.
    pub fn elements(&self) -> impl Iterator<Item = [usize; N]> + '_ {
        self.runs().flat_map(move |at| {
            (0..self.inner as isize)
                .map(move |i| std::array::from_fn(|o| (at[o] as isize + i * self.steps[o]) as usize))
        })
    }

    /// Every run's first index in each operand.
    #[inline(always)]
    pub fn runs(&self) -> Runs<'_, N> {
        Runs { walk: self, remaining: self.runs, counters: [0; MAX_OUTER], at: self.start }
    }
}

/// Drops dimensions of size 1 and merges adjacent dimensions that are contiguous for every operand.
pub fn merge_dims<const N: usize>(shape: &[usize], strides: [&[isize]; N]) -> Vec<(usize, [isize; N])> {
    let mut merged: Vec<(usize, [isize; N])> = Vec::new();
    for (axis, &dim) in shape.iter().enumerate().filter(|&(_, &dim)| dim != 1) {
        let axis_strides: [isize; N] = std::array::from_fn(|i| strides[i][axis]);
        match merged.last_mut() {
            Some((size, outer_strides)) if (0..N).all(|i| outer_strides[i] == axis_strides[i] * dim as isize) => {
                *size *= dim;
                *outer_strides = axis_strides;
            }
            _ => merged.push((dim, axis_strides)),
        }
    }
    merged
}

/// Iterator over the runs of a [`Walk`].
pub struct Runs<'a, const N: usize> {
    walk: &'a Walk<N>,
    remaining: usize,
    counters: [usize; MAX_OUTER],
    at: [isize; N],
}

impl<const N: usize> Iterator for Runs<'_, N> {
    type Item = [usize; N];

    #[inline(always)]
    fn next(&mut self) -> Option<[usize; N]> {
        if self.remaining == 0 {
            return None;
        }
        self.remaining -= 1;
        // A loop, because a closure would not be compiled for the caller's vector width.
        let mut current = [0; N];
        for (current, at) in current.iter_mut().zip(&self.at) {
            *current = *at as usize;
        }
        for axis in (0..self.walk.dims.len()).rev() {
            let strides = &self.walk.strides[axis];
            self.counters[axis] += 1;
            if self.counters[axis] < self.walk.dims[axis] {
                for (at, stride) in self.at.iter_mut().zip(strides) {
                    *at += stride;
                }
                break;
            }
            self.counters[axis] = 0;
            for (at, stride) in self.at.iter_mut().zip(strides) {
                *at -= stride * (self.walk.dims[axis] as isize - 1);
            }
        }
        Some(current)
    }
}

/// Row-major strides of a shape, in elements.
pub fn row_major(shape: &[usize]) -> Vec<isize> {
    strides(shape).into_iter().map(|s| s as isize).collect()
}

/// Strides of `shape` broadcast to `to`: 0 on stretched axes.
pub fn broadcast_strides(shape: &[usize], to: &[usize]) -> Vec<isize> {
    let contiguous = row_major(shape);
    let leading = to.len() - shape.len();
    (0..to.len())
        .map(|axis| match axis.checked_sub(leading) {
            Some(a) if shape[a] == to[axis] => contiguous[a],
            _ => 0,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(shape: &[usize], b: &[usize]) -> Walk<2> {
        Walk::new(shape, [&row_major(shape), &broadcast_strides(b, shape)], [0; 2]).unwrap()
    }

    #[test]
    fn broadcasts_come_down_to_few_runs() {
        let same = walk(&[2, 3, 4], &[2, 3, 4]);
        assert_eq!((same.inner, same.steps, same.runs().count()), (24, [1, 1], 1));
        let scalar = walk(&[2, 3, 4], &[1, 1]);
        assert_eq!((scalar.inner, scalar.steps, scalar.runs().count()), (24, [1, 0], 1));
        let row = walk(&[2, 3, 4], &[4]);
        assert_eq!((row.inner, row.steps, row.runs().collect::<Vec<_>>().len()), (4, [1, 1], 6));
        let channel = walk(&[2, 3, 4, 5], &[3, 1, 1]);
        assert_eq!((channel.inner, channel.steps), (20, [1, 0]));
        let starts: Vec<_> = channel.runs().collect();
        assert_eq!(starts, [[0, 0], [20, 1], [40, 2], [60, 0], [80, 1], [100, 2]]);
        assert_eq!(walk(&[2, 0, 4], &[4]).runs().count(), 0);
        assert_eq!(walk(&[], &[]).runs().collect::<Vec<_>>(), [[0, 0]]);
    }
}
