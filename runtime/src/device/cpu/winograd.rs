//! `f32` 3×3 convolutions by Winograd's minimal filtering F(2×2, 3×3), if the saved multiplications outweigh the
//! transforms.
//!
//! ```text
//! y    u [16][out][in]  = filters        v [16][in][tile] = data        u v = [16][out][tile]   results
//! dx   the same, with filters turned around and dy as data
//! dw   d [16][out][tile] = dy            v [16][in][tile] = x           d vᵀ = [16][out][in]    filters
//! ```
//! Tiles are processed in runs that stay in the second-level cache. `f32` errors are a few times those of the direct
//! algorithm: each transform has 4 additions with factors 1 and 1/2. The larger tiles of F(4×4, 3×3) would lose two
//! digits.

use super::FastKernel;
use super::conv_role::Role;
use super::implicit::Sizes;
use super::panels::matrix::Plain;
use super::panels::product::product;
use super::panels::windows::Windows;
use super::panels::winograd::{
    ELEMENTS, Results, Transformed, data_in, filters_in, filters_out, results_in, results_out,
};
use super::panels::{COLUMNS, LANES, Rows, is_supported};
use super::patches::Grid;
use bytemuck::{cast_slice, cast_slice_mut};
use std::ops::Range;

/// Cost of transforming a tile of a channel forward and back, and of a filter, in multiplications. Measured.
const TILE: f64 = 200.0;
const FILTER: f64 = 450.0;

/// Padding between transform elements, to avoid cache conflicts between equal low address bits.
const APART: usize = LANES;

/// Numbers that fit into the second-level cache.
const CACHE: usize = 256 * 1024;

/// Sizes are non-zero. `None` if the processor is unsuitable or another algorithm is faster.
pub fn kernel(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, ins, outs, .. } = sizes;
    let tiles_of_image = grid.tiles()?.out_len();
    let filters = ins as f64 * outs as f64;
    let [windows, tiles] = [grid.out_len(), tiles_of_image].map(|per_image| images as f64 * per_image as f64);
    let cost = ELEMENTS as f64 * filters * tiles + FILTER * filters + TILE * (ins + outs) as f64 * tiles;
    // With fewer channels than lanes, part of each vector would be wasted.
    let is_faster = ins.min(outs) >= LANES && 1.1 * cost <= 9.0 * filters * windows;
    if is_faster && is_supported() { build(role, grid, sizes) } else { None }
}

/// The convolution, without the check that it pays off.
fn build(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, groups, ins, outs } = sizes;
    let filters = ins * outs;
    let (x_image, y_image) = (groups * ins * grid.data_len(), groups * outs * grid.out_len());
    let group_sizes = [ins * grid.data_len(), filters * 9, outs * grid.out_len()];
    let starts = move |group: usize| group_sizes.map(|size| group * size);
    let lengths = [images * x_image, groups * filters * 9, images * y_image];
    match role {
        Role::Forward => {
            let convolution = Convolution::new(grid, images, [x_image, y_image], [ins, outs], false)?;
            Some(convolution.kernel(groups, move |group, [x, w], y| {
                assert_eq!([x.len(), w.len(), y.len()], lengths);
                let [x_at, w_at, y_at] = starts(group);
                (x[x_at..].as_ptr(), w[w_at..].as_ptr(), y[y_at..].as_mut_ptr())
            }))
        }
        Role::InputGrad => {
            let convolution = Convolution::new(&grid.flipped()?, images, [y_image, x_image], [outs, ins], true)?;
            Some(convolution.kernel(groups, move |group, [dy, w], dx| {
                assert_eq!([dx.len(), w.len(), dy.len()], lengths);
                let [x_at, w_at, y_at] = starts(group);
                (dy[y_at..].as_ptr(), w[w_at..].as_ptr(), dx[x_at..].as_mut_ptr())
            }))
        }
        Role::WeightGrad => weight_grad(grid, sizes, [x_image, y_image], move |group, [dy, x], dw| {
            assert_eq!([x.len(), dw.len(), dy.len()], lengths);
            let [x_at, w_at, y_at] = starts(group);
            (x[x_at..].as_ptr(), dy[y_at..].as_ptr(), dw[w_at..].as_mut_ptr())
        }),
    }
}

/// Forward or input-gradient convolution.
struct Convolution {
    tiles: Windows,
    results: Results,
    /// Channels of the data and of the results.
    channels: [usize; 2],
    plane: usize,
    is_transposed: bool,
    /// Vectors of tiles per run.
    run: usize,
}

impl Convolution {
    fn new(
        grid: &Grid,
        images: usize,
        sizes: [usize; 2],
        channels: [usize; 2],
        is_transposed: bool,
    ) -> Option<Convolution> {
        let tiles = Windows::new(&grid.tiles()?, images, sizes)?;
        // Volumetric images are not supported: their planes are consecutive.
        let [depth, height, width] = grid.out;
        let results = Results::new(&tiles, [depth * height, width], sizes[1]);
        let is_flat = depth == 1;
        let run = run(&tiles, channels);
        is_flat.then_some(Convolution { tiles, results, channels, plane: grid.out_len(), is_transposed, run })
    }

    /// Builds the kernel; `addresses` returns the addresses of a group's data, filters and results.
    fn kernel<P>(self, groups: usize, addresses: P) -> FastKernel
    where
        P: Fn(usize, [&[f32]; 2], &mut [f32]) -> (*const f32, *const f32, *mut f32) + Send + Sync + 'static,
    {
        let ([ins, outs], pitch) = (self.channels, self.run * LANES);
        // Filters keep their memory order in both passes: output channels are rows.
        let [rows_of_filters, columns] = if self.is_transposed { [ins, outs] } else { [outs, ins] };
        let column_pitch = columns.next_multiple_of(LANES);
        let [filters, data, results] =
            [rows_of_filters * column_pitch, ins * pitch, outs * pitch].map(|count| ELEMENTS * (count + APART));
        let fast = FastKernel::new(move |inputs, outputs, workspace| {
            let [a, b] = [0, 1].map(|i| cast_slice::<u8, f32>(inputs[i]));
            let to = cast_slice_mut::<u8, f32>(outputs[0]);
            let workspace = &mut cast_slice_mut::<u8, f32>(workspace)[..filters + data + results];
            let (u, scratch) = workspace.split_at_mut(filters);
            let (v, m) = scratch.split_at_mut(data);
            let [u, v, m] = [(u, rows_of_filters, column_pitch), (v, ins, pitch), (m, outs, pitch)].map(transformed);
            for group in 0..groups {
                let (x, w, y) = addresses(group, [a, b], to);
                // SAFETY: lengths are checked, the tiles belong to these images, the workspace fits a run, and the
                // processor features are present.
                unsafe {
                    filters_in(w, [rows_of_filters, columns], self.is_transposed, u);
                    for vectors in runs(&self.tiles, self.run) {
                        data_in(&self.tiles, x, ins, vectors.clone(), v);
                        for element in 0..ELEMENTS {
                            let (left, right) = (element_rows(u, element), element_rows(v, element));
                            let left = if self.is_transposed { left.transposed() } else { left };
                            let result = Plain { at: m.address(element, 0, 0), row: pitch };
                            product([outs, vectors.len() * LANES, ins], &left, &right, &result, false);
                        }
                        results_out((&self.tiles, &self.results), m, outs, vectors, (y, self.plane));
                    }
                }
            }
        });
        fast.with_workspace((filters + data + results) * size_of::<f32>())
    }
}

fn weight_grad<P>(grid: &Grid, sizes: Sizes, [x_image, y_image]: [usize; 2], addresses: P) -> Option<FastKernel>
where
    P: Fn(usize, [&[f32]; 2], &mut [f32]) -> (*const f32, *const f32, *mut f32) + Send + Sync + 'static,
{
    let Sizes { images, groups, ins, outs } = sizes;
    let tiles = Windows::new(&grid.tiles()?, images, [x_image, y_image])?;
    let pairs = Windows::new(&grid.pairs_of_results(), images, [y_image, x_image])?;
    let run = run(&tiles, [ins, outs]).max(MIN_DEPTH / LANES).min(tiles.columns.div_ceil(LANES));
    let (column_pitch, pitch) = (ins.next_multiple_of(LANES), run * LANES);
    let [sums, data, results] =
        [outs * column_pitch, ins * pitch, outs * pitch].map(|count| ELEMENTS * (count + APART));
    let fast = FastKernel::adding(true, move |inputs, outputs, workspace, add| {
        let [a, b] = [0, 1].map(|i| cast_slice::<u8, f32>(inputs[i]));
        let to = cast_slice_mut::<u8, f32>(outputs[0]);
        let workspace = &mut cast_slice_mut::<u8, f32>(workspace)[..sums + data + results];
        let (s, scratch) = workspace.split_at_mut(sums);
        let (v, d) = scratch.split_at_mut(data);
        let [s, v, d] = [(s, outs, column_pitch), (v, ins, pitch), (d, outs, pitch)].map(transformed);
        for group in 0..groups {
            let (x, dy, dw) = addresses(group, [a, b], to);
            // SAFETY: as for the kernel of a [`Convolution`].
            unsafe {
                for vectors in runs(&tiles, run) {
                    data_in(&tiles, x, ins, vectors.clone(), v);
                    results_in(&pairs, dy, outs, vectors.clone(), d);
                    for element in 0..ELEMENTS {
                        let (left, right) = (element_rows(d, element), element_rows(v, element).transposed());
                        let result = Plain { at: s.address(element, 0, 0), row: column_pitch };
                        product([outs, ins, vectors.len() * LANES], &left, &right, &result, vectors.start > 0);
                    }
                }
                filters_out(s, dw, [outs, ins], add);
            }
        }
    });
    Some(fast.with_workspace((sums + data + results) * size_of::<f32>()))
}

/// Minimum tiles per run if they are summed: the sums are read and written for each run.
const MIN_DEPTH: usize = 192;

/// Vectors of tiles per run. With few filters, all elements of the tiles must fit into the second-level cache;
/// otherwise the tiles and filters of one element.
fn run(tiles: &Windows, [ins, outs]: [usize; 2]) -> usize {
    let vectors = tiles.columns.div_ceil(LANES);
    let run_tiles = match ELEMENTS * ins * outs <= CACHE / 2 {
        true => CACHE / (ELEMENTS * (ins + outs)),
        false => CACHE.saturating_sub(ins * outs) / (ins + outs),
    };
    let max_vectors = (run_tiles / COLUMNS).max(1) * COLUMNS / LANES;
    vectors.div_ceil(vectors.div_ceil(max_vectors))
}

fn runs(tiles: &Windows, run: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let vectors = tiles.columns.div_ceil(LANES);
    (0..vectors).step_by(run).map(move |first| first..vectors.min(first + run))
}

fn transformed((numbers, channels, channel): (&mut [f32], usize, usize)) -> Transformed {
    Transformed { at: numbers.as_mut_ptr(), element: channels * channel + APART, channel }
}

/// The matrix of one transform element, with a row per channel.
fn element_rows(numbers: Transformed, element: usize) -> Rows {
    Rows { at: numbers.address(element, 0, 0), row: numbers.channel, step: 1 }
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
            ([1, 1, 16, 16], [8, 8], 1),
            ([3, 1, 20, 33], [7, 5], 1),
            ([2, 2, 17, 16], [9, 40], 1),
            ([5, 1, 3, 5], [2, 2], 1),
            ([2, 1, 16, 18], [6, 6], 0),
            ([1, 1, 18, 20], [4, 3], 2),
            ([2, 1, 40, 24], [46, 46], 1),
        ];
        assert_eq!(count_supported(&cases, build), [7; 3]);
    }
}
