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
use super::panels::images::{Patches, PatchesTurned, Results, Terms};
use super::panels::matrix::Plain;
use super::panels::product::{pack_all, panels_len, product, product_by_rows};
use super::panels::windows::Windows;
use super::panels::{LANES, Right, Rows, is_at_hand, pack};
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
    let most = match role {
        Role::Forward => dots::MOST_ROWS,
        Role::InputGrad => MOST_FOR_INPUTS,
        Role::WeightGrad => MOST_FOR_WEIGHTS,
    };
    if windows > most || sizes.outs < MANY_FILTERS || depth < LONG_FILTER || !is_at_hand() {
        return None;
    }
    match role {
        Role::InputGrad => input_grad(grid, sizes),
        _ => of_patches(role, grid, sizes),
    }
}

/// Elements per group in x, w and y; elements per image in x and y.
fn parts(grid: &Grid, Sizes { groups, ins, outs, .. }: Sizes) -> ([usize; 3], [usize; 2]) {
    let [x, w, y] = [ins * grid.data_len(), outs * ins * grid.taps(), outs * grid.out_len()];
    ([x, w, y], [groups * x, groups * y])
}

fn of_patches(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, groups, ins, outs } = sizes;
    let (of_group, [x_image, y_image]) = parts(grid, sizes);
    let (depth, count) = (ins * grid.taps(), grid.out_len());
    let places = Windows::new(grid, images, [x_image, y_image])?;
    let (windows, pitch) = (places.columns, depth.next_multiple_of(LANES));
    let of_patches = panels_len(windows, depth);
    let fast = FastKernel::adding(role == Role::WeightGrad, move |inputs, outputs, workspace, add| {
        let (a, b) = (cast_slice::<u8, f32>(inputs[0]), cast_slice::<u8, f32>(inputs[1]));
        let c = cast_slice_mut::<u8, f32>(outputs[0]);
        let workspace = cast_slice_mut::<u8, f32>(workspace);
        let (patches, rest) = workspace.split_at_mut(of_patches);
        for group in 0..groups {
            let [x_at, w_at, y_at] = of_group.map(|size| group * size);
            // SAFETY: lengths are checked, the windows belong to these images, and the processor features are present.
            // Nothing writes through addresses of read-only data.
            unsafe {
                let turned = |x: &[f32]| PatchesTurned(Patches { windows: &places, x: x[x_at..].as_ptr() });
                if role == Role::Forward {
                    let lengths = [images * x_image, groups * of_group[1], images * y_image];
                    assert_eq!([a.len(), b.len(), c.len()], lengths);
                    turned(a).pack(0..windows, 0..depth, patches.as_mut_ptr());
                    let rows = Rows { at: patches.as_ptr(), row: pitch, step: 1 };
                    let beside = &mut rest[..windows * outs];
                    let filters = Rows { at: b[w_at..].as_ptr(), row: depth, step: 1 };
                    dots([windows, outs, depth], rows, filters, (beside.as_mut_ptr(), outs), false);
                    for (image, beside) in beside.chunks_exact(count * outs).enumerate() {
                        let y = &mut c[image * y_image + y_at..][..outs * count];
                        for (out, y) in y.chunks_exact_mut(count).enumerate() {
                            y.iter_mut().enumerate().for_each(|(window, y)| *y = beside[window * outs + out]);
                        }
                    }
                } else {
                    let lengths = [images * y_image, images * x_image, groups * of_group[1]];
                    assert_eq!([a.len(), b.len(), c.len()], lengths);
                    pack_all(&turned(b), windows, depth, patches.as_mut_ptr());
                    let dy = Results { windows: &places, y: a[y_at..].as_ptr().cast_mut() };
                    let dw = Plain { at: c[w_at..].as_mut_ptr(), row: depth };
                    product_by_rows([outs, depth, windows], &dy, patches.as_ptr(), &dw, add);
                }
            }
        }
        Ok(())
    });
    let beside = if role == Role::Forward { windows * outs } else { 0 };
    Some(fast.with_workspace((of_patches + beside) * size_of::<f32>()))
}

fn input_grad(grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, groups, ins, outs } = sizes;
    let (of_group, [x_image, y_image]) = parts(grid, sizes);
    let (plane, count) = (grid.data_len(), grid.out_len());
    let (depth, windows) = (ins * grid.taps(), images * count);
    // The terms that each element sums; the terms of all images are side by side.
    let elements = Windows::new(&grid.flipped()?, images, [count, x_image])?;
    let (across, pitch) = (outs.next_multiple_of(LANES), windows.next_multiple_of(LANES));
    let sizes = [windows * across, windows * depth, depth * pitch].map(|size| size.next_multiple_of(ALIGNMENT));
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let (dy, w) = (cast_slice::<u8, f32>(inputs[0]), cast_slice::<u8, f32>(inputs[1]));
        let dx = cast_slice_mut::<u8, f32>(outputs[0]);
        assert_eq!([dy.len(), w.len(), dx.len()], [images * y_image, groups * of_group[1], images * x_image]);
        let workspace = &mut cast_slice_mut::<u8, f32>(workspace)[..sizes.iter().sum()];
        let (turned, rest) = workspace.split_at_mut(sizes[0]);
        let (by_window, terms) = rest.split_at_mut(sizes[1]);
        for group in 0..groups {
            let [x_at, w_at, y_at] = of_group.map(|size| group * size);
            // SAFETY: lengths and workspace are checked, the windows belong to these images, and the processor features
            // are present.
            unsafe {
                for image in 0..images {
                    let dy = Rows { at: dy[image * y_image + y_at..].as_ptr(), row: 1, step: count };
                    pack::right(dy, count, outs, turned[image * count * across..].as_mut_ptr());
                }
                let dy = Rows { at: turned.as_ptr(), row: across, step: 1 };
                let filters = Rows { at: w[w_at..].as_ptr(), row: depth, step: 1 };
                let result = Plain { at: by_window.as_mut_ptr(), row: depth };
                product([windows, depth, outs], &dy, &filters, &result, false);
                let columns = Rows { at: by_window.as_ptr(), row: 1, step: depth };
                pack::right(columns, depth, windows, terms.as_mut_ptr());
                let terms = Terms { elements: &elements, at: terms.as_ptr(), pitch };
                terms.sum(ins, (dx[x_at..].as_mut_ptr(), plane));
            }
        }
        Ok(())
    });
    Some(fast.with_workspace(sizes.iter().sum::<usize>() * size_of::<f32>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::conv::tests::met;

    #[test]
    fn all_three_are_those_of_the_definition() {
        if !is_at_hand() {
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
        assert_eq!(met(&cases, kernel), [4, 7, 7]);
    }
}
