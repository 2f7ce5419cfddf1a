//! Convolutions of `f32` with filters of 3 × 3 by Winograd's minimal filtering: fewer multiplications, where transforming data and
//! filters costs less than is won.
//!
//! ```text
//! y    u [16][out][in]  = filters        v [16][in][tile] = data        u v = [16][out][tile]   results
//! dx   the same, with filters turned around and dy as data
//! dw   d [16][out][tile] = dy            v [16][in][tile] = x           d vᵀ = [16][out][in]    filters
//! ```
//!
//! Tiles go through in runs, so that what is transformed stays in the second-level cache. Sums in `f32` are a few times as far off as those of
//! the definition: 4 additions in each transform, factors of 1 and 1/2 (the larger tiles of F(4×4, 3×3) lose two digits).

use super::FastKernel;
use super::conv::Role;
use super::implicit::Sizes;
use super::panels::matrix::Plain;
use super::panels::product::product;
use super::panels::windows::Windows;
use super::panels::winograd::{
    ELEMENTS, Results, Transformed, data_in, filters_in, filters_out, results_in, results_out,
};
use super::panels::{COLUMNS, LANES, Rows, is_at_hand};
use super::patches::Grid;
use bytemuck::{cast_slice, cast_slice_mut};
use std::ops::Range;

/// What a tile of a channel takes to be transformed there and back, in multiplications that could be done meanwhile. Measured, as is what
/// a filter takes.
const TILE: f64 = 200.0;
const FILTER: f64 = 450.0;

/// Numbers between the elements of tiles, whose addresses would else be alike and drive each other from the cache.
const APART: usize = LANES;

/// Numbers that the second-level cache holds.
const CACHE: usize = 256 * 1024;

/// A convolution of these sizes, none of them 0. Nothing where the processor does not suit, or less is won than lost.
pub fn kernel(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, ins, outs, .. } = sizes;
    let tiles_of_image = grid.tiles()?.out_len();
    let filters = ins as f64 * outs as f64;
    let [windows, tiles] = [grid.out_len(), tiles_of_image].map(|of_image| images as f64 * of_image as f64);
    let tiled = ELEMENTS as f64 * filters * tiles + FILTER * filters + TILE * (ins + outs) as f64 * tiles;
    // Half a vector of channels would be multiplied for nothing.
    let pays = ins.min(outs) >= LANES && 1.1 * tiled <= 9.0 * filters * windows;
    if pays && is_at_hand() { made(role, grid, sizes) } else { None }
}

/// The convolution, whatever is won or lost by it.
fn made(role: Role, grid: &Grid, sizes: Sizes) -> Option<FastKernel> {
    let Sizes { images, groups, ins, outs } = sizes;
    let filters = ins * outs;
    let (x_image, y_image) = (groups * ins * grid.data_len(), groups * outs * grid.out_len());
    let group_sizes = [ins * grid.data_len(), filters * 9, outs * grid.out_len()];
    let starts = move |group: usize| group_sizes.map(|size| group * size);
    let lengths = [images * x_image, groups * filters * 9, images * y_image];
    match role {
        Role::Forward => {
            let way = Way::new(grid, images, [x_image, y_image], [ins, outs], false)?;
            Some(way.kernel(groups, move |group, [x, w], y| {
                assert_eq!([x.len(), w.len(), y.len()], lengths);
                let [x_at, w_at, y_at] = starts(group);
                (x[x_at..].as_ptr(), w[w_at..].as_ptr(), y[y_at..].as_mut_ptr())
            }))
        }
        Role::InputGrad => {
            let way = Way::new(&grid.flipped()?, images, [y_image, x_image], [outs, ins], true)?;
            Some(way.kernel(groups, move |group, [dy, w], dx| {
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

/// Data to results.
struct Way {
    tiles: Windows,
    results: Results,
    /// Channels of the data and of the results.
    channels: [usize; 2],
    /// Elements of a plane of results.
    plane: usize,
    turned: bool,
    /// Vectors of tiles in a run.
    run: usize,
}

impl Way {
    fn new(grid: &Grid, images: usize, sizes: [usize; 2], channels: [usize; 2], turned: bool) -> Option<Way> {
        let tiles = Windows::new(&grid.tiles()?, images, sizes)?;
        // Images with depth have their planes one behind the other.
        let [depth, height, width] = grid.out;
        let results = Results::new(&tiles, [depth * height, width], sizes[1]);
        let is_flat = depth == 1;
        let run = run(&tiles, channels);
        is_flat.then_some(Way { tiles, results, channels, plane: grid.out_len(), turned, run })
    }

    /// The kernel, where `parts` gives data, filters and results of a group.
    fn kernel<P>(self, groups: usize, parts: P) -> FastKernel
    where
        P: Fn(usize, [&[f32]; 2], &mut [f32]) -> (*const f32, *const f32, *mut f32) + Send + Sync + 'static,
    {
        let ([ins, outs], pitch) = (self.channels, self.run * LANES);
        // Filters stay in the order in which they lie: their outs are rows, whichever way data go.
        let [rows_of_filters, columns] = if self.turned { [ins, outs] } else { [outs, ins] };
        let across = columns.next_multiple_of(LANES);
        let [filters, data, results] =
            [rows_of_filters * across, ins * pitch, outs * pitch].map(|count| ELEMENTS * (count + APART));
        let fast = FastKernel::new(move |inputs, outputs, workspace| {
            let [a, b] = [0, 1].map(|i| cast_slice::<u8, f32>(inputs[i]));
            let to = cast_slice_mut::<u8, f32>(outputs[0]);
            let workspace = &mut cast_slice_mut::<u8, f32>(workspace)[..filters + data + results];
            let (u, rest) = workspace.split_at_mut(filters);
            let (v, m) = rest.split_at_mut(data);
            let [u, v, m] = [(u, rows_of_filters, across), (v, ins, pitch), (m, outs, pitch)].map(laid_out);
            for group in 0..groups {
                let (x, w, y) = parts(group, [a, b], to);
                // SAFETY: lengths have been checked, tiles are those of these images, the workspace has room for a run, and the processor has
                // been asked.
                unsafe {
                    filters_in(w, [rows_of_filters, columns], self.turned, u);
                    for vectors in runs(&self.tiles, self.run) {
                        data_in(&self.tiles, x, ins, vectors.clone(), v);
                        for element in 0..ELEMENTS {
                            let (left, right) = (rows(u, element), rows(v, element));
                            let left = if self.turned { left.turned() } else { left };
                            let result = Plain { at: m.place(element, 0, 0), row: pitch };
                            product([outs, vectors.len() * LANES, ins], &left, &right, &result, false);
                        }
                        results_out((&self.tiles, &self.results), m, outs, vectors, (y, self.plane));
                    }
                }
            }
            Ok(())
        });
        fast.with_workspace((filters + data + results) * size_of::<f32>())
    }
}

fn weight_grad<P>(grid: &Grid, sizes: Sizes, [x_image, y_image]: [usize; 2], parts: P) -> Option<FastKernel>
where
    P: Fn(usize, [&[f32]; 2], &mut [f32]) -> (*const f32, *const f32, *mut f32) + Send + Sync + 'static,
{
    let Sizes { images, groups, ins, outs } = sizes;
    let tiles = Windows::new(&grid.tiles()?, images, [x_image, y_image])?;
    let pairs = Windows::new(&grid.pairs_of_results(), images, [y_image, x_image])?;
    let run = run(&tiles, [ins, outs]).max(MIN_DEPTH / LANES).min(tiles.columns.div_ceil(LANES));
    let (across, pitch) = (ins.next_multiple_of(LANES), run * LANES);
    let [sums, data, results] = [outs * across, ins * pitch, outs * pitch].map(|count| ELEMENTS * (count + APART));
    let fast = FastKernel::adding(true, move |inputs, outputs, workspace, add| {
        let [a, b] = [0, 1].map(|i| cast_slice::<u8, f32>(inputs[i]));
        let to = cast_slice_mut::<u8, f32>(outputs[0]);
        let workspace = &mut cast_slice_mut::<u8, f32>(workspace)[..sums + data + results];
        let (s, rest) = workspace.split_at_mut(sums);
        let (v, d) = rest.split_at_mut(data);
        let [s, v, d] = [(s, outs, across), (v, ins, pitch), (d, outs, pitch)].map(laid_out);
        for group in 0..groups {
            let (x, dy, dw) = parts(group, [a, b], to);
            // SAFETY: as for the kernel of a [`Way`].
            unsafe {
                for vectors in runs(&tiles, run) {
                    data_in(&tiles, x, ins, vectors.clone(), v);
                    results_in(&pairs, dy, outs, vectors.clone(), d);
                    for element in 0..ELEMENTS {
                        let (left, right) = (rows(d, element), rows(v, element).turned());
                        let result = Plain { at: s.place(element, 0, 0), row: across };
                        product([outs, ins, vectors.len() * LANES], &left, &right, &result, vectors.start > 0);
                    }
                }
                filters_out(s, dw, [outs, ins], add);
            }
        }
        Ok(())
    });
    Some(fast.with_workspace((sums + data + results) * size_of::<f32>()))
}

/// So many tiles at least go through together where they are summed up: sums are read and written for each run.
const MIN_DEPTH: usize = 192;

/// Vectors of tiles in a run: where filters are few, as many as stay in the second-level cache with all their elements; else as many as do with
/// the filters of one element.
fn run(tiles: &Windows, [ins, outs]: [usize; 2]) -> usize {
    let all = tiles.columns.div_ceil(LANES);
    let together = match ELEMENTS * ins * outs <= CACHE / 2 {
        true => CACHE / (ELEMENTS * (ins + outs)),
        false => CACHE.saturating_sub(ins * outs) / (ins + outs),
    };
    let most = (together / COLUMNS).max(1) * COLUMNS / LANES;
    all.div_ceil(all.div_ceil(most))
}

fn runs(tiles: &Windows, run: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let all = tiles.columns.div_ceil(LANES);
    (0..all).step_by(run).map(move |first| first..all.min(first + run))
}

fn laid_out((numbers, channels, channel): (&mut [f32], usize, usize)) -> Transformed {
    Transformed { at: numbers.as_mut_ptr(), element: channels * channel + APART, channel }
}

/// The matrix of one element of tiles, a row for each channel.
fn rows(of: Transformed, element: usize) -> Rows {
    Rows { at: of.place(element, 0, 0), row: of.channel, step: 1 }
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
            ([1, 1, 16, 16], [8, 8], 1),
            ([3, 1, 20, 33], [7, 5], 1),
            ([2, 2, 17, 16], [9, 40], 1),
            ([5, 1, 3, 5], [2, 2], 1),
            ([2, 1, 16, 18], [6, 6], 0),
            ([1, 1, 18, 20], [4, 3], 2),
            ([2, 1, 40, 24], [46, 46], 1),
        ];
        assert_eq!(met(&cases, made), [7; 3]);
    }
}
