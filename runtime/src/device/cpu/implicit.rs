//! Implicit-GEMM convolutions in `f32`: panels are filled directly from images, without a patch matrix in memory.
//!
//! ```text
//! y  [out, window]    = w [out, in·tap]      patches of x [in·tap, window]
//! dw [out, in·tap]    = dy [out, window]     patches of x, turned [window, in·tap]
//! dx [in, window]     = w, flipped [in, out·tap]   patches of dy [out·tap, window]     where windows stand at every element
//! ```
//!
//! The windows of all images are the columns of one product, so small images share tiles.

use super::FastKernel;
use super::conv_role::Role;
use super::panels::images::{Flipped, Patches, Results, TransposedPatches};
use super::panels::matrix::Plain;
use super::panels::product::product;
use super::panels::windows::Windows;
use super::panels::{Rows, is_supported};
use super::patches::Grid;
use bytemuck::{cast_slice, cast_slice_mut};

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub images: usize,
    pub groups: usize,
    pub ins: usize,
    pub outs: usize,
}

/// Sizes are non-zero. `None` if the processor or the windows are unsuitable.
pub fn kernel(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    if !is_supported() {
        return None;
    }
    let Sizes { images, groups, ins, outs } = sizes;
    let (data, window_count) = (grid.data_len(), grid.out_len());
    let (x_image, y_image) = (groups * ins * data, groups * outs * window_count);
    let filters = outs * ins * grid.taps();
    // Start of a group in x, w and y.
    let starts = move |group: usize| [group * ins * data, group * filters, group * outs * window_count];
    let depth = ins * grid.taps();
    if role == Role::InputGrad {
        let taps = grid.taps();
        let windows = Windows::new(&grid.flipped()?, images, [y_image, x_image])?;
        return Some(FastKernel::new(move |inputs, outputs, _| {
            let (dy, w) = (cast_slice::<u8, f32>(inputs[0]), cast_slice::<u8, f32>(inputs[1]));
            let dx = cast_slice_mut::<u8, f32>(outputs[0]);
            assert!(dy.len() == images * y_image && w.len() == groups * filters && dx.len() == images * x_image);
            for group in 0..groups {
                let [x_at, w_at, y_at] = starts(group);
                let filters = Flipped { w: w[w_at..].as_ptr(), ins, taps };
                let patches = Patches { windows: &windows, x: dy[y_at..].as_ptr() };
                let result = Results { windows: &windows, y: dx[x_at..].as_mut_ptr() };
                // SAFETY: lengths are checked, the windows belong to these images, and the processor features are
                // present.
                unsafe { product([ins, windows.columns, outs * taps], &filters, &patches, &result, false) };
            }
        }));
    }
    let windows = Windows::new(grid, images, [x_image, y_image])?;
    Some(FastKernel::adding(role == Role::WeightGrad, move |inputs, outputs, _, add| {
        let (a, b) = (cast_slice::<u8, f32>(inputs[0]), cast_slice::<u8, f32>(inputs[1]));
        let c = cast_slice_mut::<u8, f32>(outputs[0]);
        for group in 0..groups {
            let [x_at, w_at, y_at] = starts(group);
            // SAFETY: lengths are checked, the windows belong to these images, and the processor features are present.
            // Nothing writes through addresses of read-only data.
            unsafe {
                if role == Role::Forward {
                    assert!(a.len() == images * x_image && b.len() == groups * filters && c.len() == images * y_image);
                    let filters = Rows { at: b[w_at..].as_ptr(), row: depth, step: 1 };
                    let patches = Patches { windows: &windows, x: a[x_at..].as_ptr() };
                    let result = Results { windows: &windows, y: c[y_at..].as_mut_ptr() };
                    product([outs, windows.columns, depth], &filters, &patches, &result, false);
                } else {
                    assert!(a.len() == images * y_image && b.len() == images * x_image && c.len() == groups * filters);
                    let dy = Results { windows: &windows, y: a[y_at..].as_ptr().cast_mut() };
                    let patches = TransposedPatches(Patches { windows: &windows, x: b[x_at..].as_ptr() });
                    let dw = Plain { at: c[w_at..].as_mut_ptr(), row: depth };
                    product([outs, depth, windows.columns], &dy, &patches, &dw, add);
                }
            }
        }
    }))
}
