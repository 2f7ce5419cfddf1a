//! Single-threaded matrix products: own panels for `f32` with AVX-512 or AVX2, else the `gemm` crate.

use super::movement::transpose_matrix;
#[cfg(target_arch = "x86_64")]
use super::panels;
use super::real::{Real, for_real};
use super::walk::{Walk, broadcast_strides, row_major};
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::MatMul;
use compiler::tensor::DType;
use gemm_common::Parallelism;

/// Minimum size at which a transposed right operand is copied first: about the first-level cache.
const TURN_ELEMENTS: usize = 16 * 1024;

/// Minimum columns for panels: fewer would leave most lanes empty.
const MIN_COLUMNS: usize = 8;

/// A matrix product with batch dimensions.
pub fn kernel(op: &MatMul, a: &TensorLayout, b: &TensorLayout, c: &TensorLayout) -> Option<FastKernel> {
    for_real!(a.dtype, T => batched::<T>(op, a, b, c))
}

fn batched<T: Real>(op: &MatMul, a: &TensorLayout, b: &TensorLayout, c: &TensorLayout) -> Option<FastKernel> {
    let batch_rank = c.shape.len() - 2;
    let (mut m, n) = (c.shape[batch_rank], c.shape[batch_rank + 1]);
    let k = a.shape[a.shape.len() - if op.transpose_a { 2 } else { 1 }];
    let shape = &c.shape[..batch_rank];
    let batch_shape = |layout: &TensorLayout| layout.shape[..layout.shape.len() - 2].to_vec();
    let (a_batch, b_batch) = (batch_shape(a), batch_shape(b));
    let shared_b = b_batch.iter().all(|&d| d == 1);
    let strides = [row_major(shape), broadcast_strides(&a_batch, shape), broadcast_strides(&b_batch, shape)];
    let walk = Walk::new(shape, [&strides[0], &strides[1], &strides[2]], [0; 3])?;
    let matrices: usize = shape.iter().product();
    // A batch with a shared right operand is one tall product.
    let is_tall = shared_b && !op.transpose_a && a_batch.iter().product::<usize>() == matrices && matrices > 1;
    if is_tall {
        m *= matrices;
    }
    let a_strides = if op.transpose_a { (1, m) } else { (k, 1) };
    let b_strides = if op.transpose_b { (1, k) } else { (n, 1) };
    // `gemm` packs a large transposed right operand slowly, so copy it first; for one row that does not pay off.
    let transposes_b = op.transpose_b && m > 1 && k * n >= TURN_ELEMENTS && !has_panels::<T>(m, n);
    let fast = FastKernel::adding(true, move |inputs, outputs, workspace, add| {
        let (a, b) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        let c: &mut [T] = cast_slice_mut(outputs[0]);
        let transposed =
            &mut cast_slice_mut::<u8, T>(&mut workspace[..if transposes_b { k * n * size_of::<T>() } else { 0 }])[..];
        let mut transposed_at = None;
        // Matrix indices are generated, not stored: the planner creates kernels for any batch size.
        for [c_at, a_at, b_at] in walk.elements().take(if is_tall { 1 } else { matrices }) {
            let a = Matrix { values: &a[a_at * m * k..(a_at + 1) * m * k], strides: a_strides };
            let b = &b[b_at * k * n..(b_at + 1) * k * n];
            if transposes_b && transposed_at != Some(b_at) {
                transpose_matrix(b, k, transposed, n, [k, n]);
                transposed_at = Some(b_at);
            }
            let b = if transposes_b {
                Matrix { values: &*transposed, strides: (n, 1) }
            } else {
                Matrix { values: b, strides: b_strides }
            };
            product([m, n, k], a, b, &mut c[c_at * m * n..(c_at + 1) * m * n], n, add);
        }
    });
    Some(fast.with_workspace(if transposes_b { k * n * size_of::<T>() } else { 0 }))
}

/// True if a product of this size uses panels, which read transposed operands equally fast.
pub fn has_panels<T: Real>(m: usize, n: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    return T::DTYPE == DType::F32
        && n >= MIN_COLUMNS
        && if panels::is_supported() { m > 1 } else { panels::avx2::is_supported() };
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

#[derive(Clone, Copy)]
pub struct Matrix<'a, T> {
    /// Elements from the first one on.
    pub values: &'a [T],
    /// Row and column stride, in elements.
    pub strides: (usize, usize),
}

/// `c = a b`, or `c += a b` with `add`. Sizes are m, n, k; `c_row` is the row stride of `c`.
pub fn product<T: Real>(
    [m, n, k]: [usize; 3],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    c: &mut [T],
    c_row: usize,
    add: bool,
) {
    if m == 0 || n == 0 {
        return;
    }
    let last_index =
        |rows: usize, columns: usize, (row, column): (usize, usize)| (rows - 1) * row + (columns - 1) * column;
    assert!(n <= c_row && last_index(m, n, (c_row, 1)) < c.len(), "the product exceeds its matrix");
    if k == 0 {
        for row in c.chunks_mut(c_row).take(m).filter(|_| !add) {
            row[..n].fill(T::ZERO);
        }
        return;
    }
    assert!(
        last_index(m, k, a.strides) < a.values.len() && last_index(k, n, b.strides) < b.values.len(),
        "a factor is too short"
    );
    #[cfg(target_arch = "x86_64")]
    if has_panels::<T>(m, n) && (panels::is_supported() || !panels::avx2::is_narrow([m, n], a.strides.0)) {
        let rows =
            |m: Matrix<'_, T>| panels::Rows { at: m.values.as_ptr().cast(), row: m.strides.0, step: m.strides.1 };
        // SAFETY: the asserts above keep every access inside its slice, `c` is borrowed exclusively, and `T` is `f32`.
        return unsafe {
            let matrices = if panels::is_supported() { panels::product::matrices } else { panels::avx2::matrices };
            matrices([m, n, k], rows(a), rows(b), (c.as_mut_ptr().cast(), c_row), add);
        };
    }
    let (alpha, c_row, multiply) = (if add { T::ONE } else { T::ZERO }, c_row as isize, T::multiply());
    let (a_rows, a_columns) = (a.strides.0 as isize, a.strides.1 as isize);
    let (b_rows, b_columns) = (b.strides.0 as isize, b.strides.1 as isize);
    let (a, b) = (a.values.as_ptr(), b.values.as_ptr());
    // The micro-kernel writes columns. For a result of rows, compute the transpose, bᵀ aᵀ.
    let (sizes, c_strides, left, right) = match c_row > 1 {
        true => ([n, m], [c_row, 1], (b, b_rows, b_columns), (a, a_rows, a_columns)),
        false => ([m, n], [1, c_row], (a, a_columns, a_rows), (b, b_columns, b_rows)),
    };
    // SAFETY: the asserts above keep every access inside its slice, and `c` is borrowed exclusively.
    unsafe {
        multiply(
            sizes[0],
            sizes[1],
            k,
            c.as_mut_ptr(),
            c_strides[0],
            c_strides[1],
            add,
            left.0,
            left.1,
            left.2,
            right.0,
            right.1,
            right.2,
            alpha,
            T::ONE,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
