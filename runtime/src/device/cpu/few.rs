//! `f32` convolutions with few windows and many filters, as in the last layers at a small micro-batch. They are bound
//! by reading the filters, which are therefore read once, in memory order; only the patches are transposed.
//!
//! ```text
//! y  [window, out]    = p [window, in·tap]   wᵀ [in·tap, out]      sums along two rows in memory
//! dw [out, in·tap]   += dy [out, window]     p [window, in·tap]    rows of dw one behind the other
//! t  [window, in·tap] = dyᵀ [window, out]    w [out, in·tap]       then dx sums up the terms of each element
//! ```

use super::conv_role::Role;
use super::implicit::Sizes;
use super::panels::dots::{self, dots};
use super::panels::images::{Patches, Results, Terms, TransposedPatches};
use super::panels::matrix::Plain;
use super::panels::product::{pack_all, panels_len, product, product_by_rows};
use super::panels::windows::Windows;
use super::panels::{LANES, Right, Rows, is_supported, pack};
use super::patches::Grid;
use super::{ALIGNMENT, FastKernel};
use bytemuck::{cast_slice, cast_slice_mut};

/// Maximum number of windows for which this is faster, measured.
const MOST_FOR_INPUTS: usize = 56;
const MOST_FOR_WEIGHTS: usize = 64;

/// Minimum number of filters and filter size for which this is faster.
const MANY_FILTERS: usize = 64;
const LONG_FILTER: usize = 256;

/// Sizes are non-zero. `None` if the processor is unsuitable or another algorithm is faster.
pub fn kernel(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let (windows, depth) = (sizes.images.checked_mul(grid.out_len())?, sizes.ins.checked_mul(grid.taps())?);
    let max_windows = match role {
        Role::Forward => dots::MOST_ROWS,
        Role::InputGrad => MOST_FOR_INPUTS,
        Role::WeightGrad => MOST_FOR_WEIGHTS,
    };
    if windows > max_windows || sizes.outs < MANY_FILTERS || depth < LONG_FILTER || !is_supported() {
        return None;
    }
    match role {
        Role::InputGrad => input_grad(grid, sizes),
        _ => patch_kernel(role, grid, sizes),
    }
}

/// Elements per group in x, w and y; elements per image in x and y.
fn group_and_image_sizes(grid: &Grid, Sizes { groups, ins, outs, .. }: Sizes) -> ([usize; 3], [usize; 2]) {
    let [x, w, y] = [ins * grid.data_len(), outs * ins * grid.taps(), outs * grid.out_len()];
    ([x, w, y], [groups * x, groups * y])
}

fn patch_kernel(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, groups, ins, outs } = sizes;
    let (group_sizes, [x_image, y_image]) = group_and_image_sizes(grid, sizes);
    let (depth, count) = (ins * grid.taps(), grid.out_len());
    let windows = Windows::new(grid, images, [x_image, y_image])?;
    let (window_count, pitch) = (windows.columns, depth.next_multiple_of(LANES));
    let patch_elements = panels_len(window_count, depth);
    let fast = FastKernel::adding(role == Role::WeightGrad, move |inputs, outputs, workspace, add| {
        let (a, b) = (cast_slice::<u8, f32>(inputs[0]), cast_slice::<u8, f32>(inputs[1]));
        let c = cast_slice_mut::<u8, f32>(outputs[0]);
        let workspace = cast_slice_mut::<u8, f32>(workspace);
        let (patches, scratch) = workspace.split_at_mut(patch_elements);
        for group in 0..groups {
            let [x_at, w_at, y_at] = group_sizes.map(|size| group * size);
            // SAFETY: lengths are checked, the windows belong to these images, and the processor features are present.
            // Nothing writes through addresses of read-only data.
            unsafe {
                let transposed = |x: &[f32]| TransposedPatches(Patches { windows: &windows, x: x[x_at..].as_ptr() });
                if role == Role::Forward {
                    let lengths = [images * x_image, groups * group_sizes[1], images * y_image];
                    assert_eq!([a.len(), b.len(), c.len()], lengths);
                    transposed(a).pack(0..window_count, 0..depth, patches.as_mut_ptr());
                    let rows = Rows { at: patches.as_ptr(), row: pitch, step: 1 };
                    let by_window = &mut scratch[..window_count * outs];
                    let filters = Rows { at: b[w_at..].as_ptr(), row: depth, step: 1 };
                    dots([window_count, outs, depth], rows, filters, (by_window.as_mut_ptr(), outs), false);
                    for (image, by_window) in by_window.chunks_exact(count * outs).enumerate() {
                        let y = &mut c[image * y_image + y_at..][..outs * count];
                        for (out, y) in y.chunks_exact_mut(count).enumerate() {
                            y.iter_mut().enumerate().for_each(|(window, y)| *y = by_window[window * outs + out]);
                        }
                    }
                } else {
                    let lengths = [images * y_image, images * x_image, groups * group_sizes[1]];
                    assert_eq!([a.len(), b.len(), c.len()], lengths);
                    pack_all(&transposed(b), window_count, depth, patches.as_mut_ptr());
                    let dy = Results { windows: &windows, y: a[y_at..].as_ptr().cast_mut() };
                    let dw = Plain { at: c[w_at..].as_mut_ptr(), row: depth };
                    product_by_rows([outs, depth, window_count], &dy, patches.as_ptr(), &dw, add);
                }
            }
        }
    });
    let by_window = if role == Role::Forward { window_count * outs } else { 0 };
    Some(fast.with_workspace((patch_elements + by_window) * size_of::<f32>()))
}

fn input_grad(grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, groups, ins, outs } = sizes;
    let (group_sizes, [x_image, y_image]) = group_and_image_sizes(grid, sizes);
    let (plane, count) = (grid.data_len(), grid.out_len());
    let (depth, windows) = (ins * grid.taps(), images * count);
    // The terms that each element sums; the terms of all images are side by side.
    let elements = Windows::new(&grid.flipped()?, images, [count, x_image])?;
    let (out_pitch, pitch) = (outs.next_multiple_of(LANES), windows.next_multiple_of(LANES));
    let sizes = [windows * out_pitch, windows * depth, depth * pitch].map(|size| size.next_multiple_of(ALIGNMENT));
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let (dy, w) = (cast_slice::<u8, f32>(inputs[0]), cast_slice::<u8, f32>(inputs[1]));
        let dx = cast_slice_mut::<u8, f32>(outputs[0]);
        assert_eq!([dy.len(), w.len(), dx.len()], [images * y_image, groups * group_sizes[1], images * x_image]);
        let workspace = &mut cast_slice_mut::<u8, f32>(workspace)[..sizes.iter().sum()];
        let (transposed, scratch) = workspace.split_at_mut(sizes[0]);
        let (by_window, terms) = scratch.split_at_mut(sizes[1]);
        for group in 0..groups {
            let [x_at, w_at, y_at] = group_sizes.map(|size| group * size);
            // SAFETY: lengths and workspace are checked, the windows belong to these images, and the processor features
            // are present.
            unsafe {
                for image in 0..images {
                    let dy = Rows { at: dy[image * y_image + y_at..].as_ptr(), row: 1, step: count };
                    pack::right(dy, count, outs, transposed[image * count * out_pitch..].as_mut_ptr());
                }
                let dy = Rows { at: transposed.as_ptr(), row: out_pitch, step: 1 };
                let filters = Rows { at: w[w_at..].as_ptr(), row: depth, step: 1 };
                let result = Plain { at: by_window.as_mut_ptr(), row: depth };
                product([windows, depth, outs], &dy, &filters, &result, false);
                let columns = Rows { at: by_window.as_ptr(), row: 1, step: depth };
                pack::right(columns, depth, windows, terms.as_mut_ptr());
                let terms = Terms { elements: &elements, at: terms.as_ptr(), pitch };
                terms.sum(ins, (dx[x_at..].as_mut_ptr(), plane));
            }
        }
    });
    Some(fast.with_workspace(sizes.iter().sum::<usize>() * size_of::<f32>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::conv::tests::count_supported;

    #[test]
    fn all_three_are_those_of_the_definition() {
        if !is_supported() {
            return println!("skipped: no AVX-512");
        }
        let cases = [
            ([2, 1, 40, 64], [2, 2], 1),
            ([1, 1, 33, 70], [1, 7], 1),
            ([3, 2, 29, 65], [2, 1], 1),
            ([1, 1, 30, 67], [4, 4], 0),
            ([2, 2, 40, 64], [4, 4], 1),
            ([3, 1, 31, 80], [3, 3], 1),
            ([1, 1, 32, 64], [2, 2], 2),
        ];
        assert_eq!(count_supported(&cases, kernel), [4, 7, 7]);
    }
}
