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
    way: Way,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Panels,
    /// Transposed: without panels every step would pack a transposed weight slowly.
    Turned,
    /// Unchanged.
    AsItLies,
}

impl Recurrent {
    pub fn of<T: Real>(steps: usize, sizes: [usize; 3], is_transposed: bool) -> Recurrent {
        let [m, n, k] = sizes;
        let way = if steps >= STEPS && has_panels::<T>(m.max(2), n) && fits_panels(k) {
            Way::Panels
        } else if is_transposed && !has_panels::<T>(m, n) {
            Way::Turned
        } else {
            Way::AsItLies
        };
        Recurrent { sizes, is_transposed, way }
    }

    /// Workspace bytes.
    pub fn bytes<T>(&self) -> usize {
        let [_, n, k] = self.sizes;
        let elements = match self.way {
            Way::Panels => panel_elements(n, k),
            Way::Turned => n * k,
            Way::AsItLies => 0,
        };
        (elements * size_of::<T>()).next_multiple_of(ALIGNMENT)
    }

    /// Rearranges the weight in a workspace of [`bytes`](Recurrent::bytes).
    pub fn laid<'a, T: Real>(&self, weight: &'a [T], room: &'a mut [u8]) -> Laid<'a, T> {
        let [_, n, k] = self.sizes;
        assert!(weight.len() >= n * k && room.len() >= self.bytes::<T>(), "a weight or its buffer is too short");
        let room: &'a mut [T] = cast_slice_mut(&mut room[..self.bytes::<T>()]);
        let strides = if self.is_transposed { (1, k) } else { (n, 1) };
        let weight = Matrix { values: weight, strides };
        let weight = match self.way {
            Way::Panels => {
                lay(weight, [n, k], room);
                Matrix { values: &*room, strides: (0, 0) }
            }
            Way::Turned => {
                transpose_matrix(weight.values, k, room, n, [k, n]);
                Matrix { values: &*room, strides: (n, 1) }
            }
            Way::AsItLies => weight,
        };
        Laid { how: *self, weight }
    }
}

pub(super) struct Laid<'a, T> {
    how: Recurrent,
    weight: Matrix<'a, T>,
}

impl<T: Real> Laid<'_, T> {
    /// `c = a w`, or `c += a w` with `add`, in step `t`; `c_row` is the row stride of `c`.
    ///
    /// Odd steps traverse the weight backwards. A weight larger than the second-level cache would otherwise be evicted
    /// in every step.
    pub fn multiply(&self, t: usize, a: Matrix<'_, T>, c: &mut [T], c_row: usize, add: bool) {
        let [m, n, k] = self.how.sizes;
        let backwards = !t.is_multiple_of(2);
        if self.how.way == Way::Panels {
            return by_panels(self.how.sizes, a, self.weight.values, (c, c_row), add, backwards);
        }
        let by_columns = self.weight.strides.0 == 1;
        let (rows, row) = if by_columns { (n, k) } else { (k, n) };
        let count = (rows * row * size_of::<T>()).div_ceil(PART_BYTES).clamp(1, rows.max(1));
        let part = rows.div_ceil(count).next_multiple_of(PART_ROWS).max(1);
        let parts = rows.div_ceil(part);
        for at in 0..parts {
            let first = if backwards { parts - 1 - at } else { at } * part;
            let own = part.min(rows - first);
            let weight = Matrix { values: &self.weight.values[first * row..], ..self.weight };
            if by_columns {
                product([m, own, k], a, weight, &mut c[first..], c_row, add);
            } else {
                let a = Matrix { values: a.values.get(first * a.strides.1..).unwrap_or_default(), ..a };
                product([m, n, own], a, weight, c, c_row, add || at > 0);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn fits_panels(depth: usize) -> bool {
    if panels::is_at_hand() { laid::is_for(depth) } else { avx2::is_for(depth) }
}

#[cfg(target_arch = "x86_64")]
fn panel_elements(columns: usize, depth: usize) -> usize {
    if panels::is_at_hand() { laid::elements(columns, depth) } else { avx2::elements(columns, depth) }
}

#[cfg(target_arch = "x86_64")]
fn rows<T>(of: Matrix<'_, T>) -> Rows {
    Rows { at: of.values.as_ptr().cast(), row: of.strides.0, step: of.strides.1 }
}

/// Writes the panels of an `[k, n]` weight.
#[cfg(target_arch = "x86_64")]
fn lay<T: Real>(weight: Matrix<'_, T>, [n, k]: [usize; 2], room: &mut [T]) {
    // SAFETY: panels require `f32` and these instructions, and the caller has checked the lengths.
    unsafe {
        match panels::is_at_hand() {
            true => laid::lay(&rows(weight), [n, k], room.as_mut_ptr().cast()),
            false => avx2::lay(rows(weight), [n, k], room.as_mut_ptr().cast()),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn by_panels<T: Real>(
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
    let last = |rows: usize, columns: usize, (row, column): (usize, usize)| (rows - 1) * row + (columns - 1) * column;
    assert!(n <= c_row && last(m, n, (c_row, 1)) < c.len(), "the product exceeds its matrix");
    assert!(last(m, k, a.strides) < a.values.len(), "the left factor is too short");
    // SAFETY: the asserts keep every access inside its slice, the panels have these sizes, `c` is borrowed exclusively,
    // and `T` is `f32`.
    unsafe {
        let product = if panels::is_at_hand() { laid::product } else { avx2::product_laid };
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

    pub fn lay<T: Real>(_: Matrix<'_, T>, _: [usize; 2], _: &mut [T]) {
        unreachable!("this processor has no panels")
    }

    pub fn by_panels<T: Real>(_: [usize; 3], _: Matrix<'_, T>, _: &[T], _: (&mut [T], usize), _: bool, _: bool) {
        unreachable!("this processor has no panels")
    }
}

#[cfg(not(target_arch = "x86_64"))]
use without::{by_panels, fits_panels, lay, panel_elements};
