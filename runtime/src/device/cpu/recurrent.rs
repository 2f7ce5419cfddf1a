//! The recurrent weight of a layer, rearranged once per run for the fastest product in every step.

use super::ALIGNMENT;
use super::matmul::{Matrix, has_panels, product};
use super::movement::transpose_matrix;
#[cfg(target_arch = "x86_64")]
use super::panels::{self, Rows, avx2, laid};
use super::real::Real;
use bytemuck::cast_slice_mut;

/// Minimum steps at which building panels pays off.
const STEPS: usize = 8;

/// Bytes of a weight block without panels: a quarter of the second-level cache.
const PART_BYTES: usize = 512 * 1024;
/// Minimum rows of a block, to keep products large.
const PART_ROWS: usize = 256;

/// Layout of the weight for products of sizes m, n, k.
#[derive(Clone, Copy)]
pub(super) struct Recurrent {
    sizes: [usize; 3],
    /// True if it is `[n, k]` in memory, false for `[k, n]`.
    is_transposed: bool,
    layout: WeightLayout,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WeightLayout {
    Panels,
    /// Transposed: without panels every step would pack a transposed weight slowly.
    Transposed,
    Unchanged,
}

impl Recurrent {
    pub fn of<T: Real>(steps: usize, sizes: [usize; 3], is_transposed: bool) -> Recurrent {
        let [m, n, k] = sizes;
        let layout = if steps >= STEPS && has_panels::<T>(m.max(2), n) && fits_panels(k) {
            WeightLayout::Panels
        } else if is_transposed && !has_panels::<T>(m, n) {
            WeightLayout::Transposed
        } else {
            WeightLayout::Unchanged
        };
        Recurrent { sizes, is_transposed, layout }
    }

    /// Workspace bytes.
    pub fn bytes<T>(&self) -> usize {
        let [_, n, k] = self.sizes;
        let elements = match self.layout {
            WeightLayout::Panels => panel_elements(n, k),
            WeightLayout::Transposed => n * k,
            WeightLayout::Unchanged => 0,
        };
        (elements * size_of::<T>()).next_multiple_of(ALIGNMENT)
    }

    /// Rearranges the weight in a workspace of [`bytes`](Recurrent::bytes).
    pub fn arrange<'a, T: Real>(&self, weight: &'a [T], buffer: &'a mut [u8]) -> ArrangedWeight<'a, T> {
        let [_, n, k] = self.sizes;
        assert!(weight.len() >= n * k && buffer.len() >= self.bytes::<T>(), "a weight or its buffer is too short");
        let buffer: &'a mut [T] = cast_slice_mut(&mut buffer[..self.bytes::<T>()]);
        let strides = if self.is_transposed { (1, k) } else { (n, 1) };
        let weight = Matrix { values: weight, strides };
        let weight = match self.layout {
            WeightLayout::Panels => {
                pack_weight(weight, [n, k], buffer);
                Matrix { values: &*buffer, strides: (0, 0) }
            }
            WeightLayout::Transposed => {
                transpose_matrix(weight.values, k, buffer, n, [k, n]);
                Matrix { values: &*buffer, strides: (n, 1) }
            }
            WeightLayout::Unchanged => weight,
        };
        ArrangedWeight { recurrent: *self, weight }
    }
}

pub(super) struct ArrangedWeight<'a, T> {
    recurrent: Recurrent,
    weight: Matrix<'a, T>,
}

impl<T: Real> ArrangedWeight<'_, T> {
    /// `c = a w`, or `c += a w` with `add`, in step `t`; `c_row` is the row stride of `c`.
    ///
    /// Odd steps traverse the weight backwards. A weight larger than the second-level cache would otherwise be evicted
    /// in every step.
    pub fn multiply(&self, t: usize, a: Matrix<'_, T>, c: &mut [T], c_row: usize, add: bool) {
        let [m, n, k] = self.recurrent.sizes;
        let backwards = !t.is_multiple_of(2);
        if self.recurrent.layout == WeightLayout::Panels {
            return multiply_panels(self.recurrent.sizes, a, self.weight.values, (c, c_row), add, backwards);
        }
        let by_columns = self.weight.strides.0 == 1;
        let (rows, row) = if by_columns { (n, k) } else { (k, n) };
        let count = (rows * row * size_of::<T>()).div_ceil(PART_BYTES).clamp(1, rows.max(1));
        let part = rows.div_ceil(count).next_multiple_of(PART_ROWS).max(1);
        let parts = rows.div_ceil(part);
        for at in 0..parts {
            let first = if backwards { parts - 1 - at } else { at } * part;
            let size = part.min(rows - first);
            let weight = Matrix { values: &self.weight.values[first * row..], ..self.weight };
            if by_columns {
                product([m, size, k], a, weight, &mut c[first..], c_row, add);
            } else {
                let a = Matrix { values: a.values.get(first * a.strides.1..).unwrap_or_default(), ..a };
                product([m, n, size], a, weight, c, c_row, add || at > 0);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn fits_panels(depth: usize) -> bool {
    if panels::is_supported() { laid::fits_cache(depth) } else { avx2::fits_cache(depth) }
}

#[cfg(target_arch = "x86_64")]
fn panel_elements(columns: usize, depth: usize) -> usize {
    if panels::is_supported() { laid::packed_len(columns, depth) } else { avx2::packed_len(columns, depth) }
}

#[cfg(target_arch = "x86_64")]
fn rows<T>(matrix: Matrix<'_, T>) -> Rows {
    Rows { at: matrix.values.as_ptr().cast(), row: matrix.strides.0, step: matrix.strides.1 }
}

/// Writes the panels of an `[k, n]` weight.
#[cfg(target_arch = "x86_64")]
fn pack_weight<T: Real>(weight: Matrix<'_, T>, [n, k]: [usize; 2], buffer: &mut [T]) {
    // SAFETY: panels require `f32` and these instructions, and the caller has checked the lengths.
    unsafe {
        match panels::is_supported() {
            true => laid::pack_all(&rows(weight), [n, k], buffer.as_mut_ptr().cast()),
            false => avx2::pack_all(rows(weight), [n, k], buffer.as_mut_ptr().cast()),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn multiply_panels<T: Real>(
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    panels: &[T],
    (c, c_row): (&mut [T], usize),
    add: bool,
    backwards: bool,
) {
    if k == 0 {
        return product([m, n, k], a, a, c, c_row, add);
    }
    let last_index =
        |rows: usize, columns: usize, (row, column): (usize, usize)| (rows - 1) * row + (columns - 1) * column;
    assert!(n <= c_row && last_index(m, n, (c_row, 1)) < c.len(), "the product exceeds its matrix");
    assert!(last_index(m, k, a.strides) < a.values.len(), "the left factor is too short");
    // SAFETY: the asserts keep every access inside its slice, the panels have these sizes, `c` is borrowed exclusively,
    // and `T` is `f32`.
    unsafe {
        let product = if panels::is_supported() { laid::product } else { avx2::packed_product };
        product([m, n, k], rows(a), panels.as_ptr().cast(), (c.as_mut_ptr().cast(), c_row), add, backwards);
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod without {
    use super::{Matrix, Real};

    pub fn fits_panels(_: usize) -> bool {
        false
    }

    pub fn panel_elements(_: usize, _: usize) -> usize {
        0
    }

    pub fn pack_weight<T: Real>(_: Matrix<'_, T>, _: [usize; 2], _: &mut [T]) {
        unreachable!("this processor has no panels")
    }

    pub fn multiply_panels<T: Real>(_: [usize; 3], _: Matrix<'_, T>, _: &[T], _: (&mut [T], usize), _: bool, _: bool) {
        unreachable!("this processor has no panels")
    }
}

#[cfg(not(target_arch = "x86_64"))]
use without::{fits_panels, multiply_panels, pack_weight, panel_elements};
