//! Convolution and its gradients as products with im2col matrices.
//!
//! With `P [C/g·K, E]` the patches of an image for one group: `y = w P`, `dw += dy Pᵀ` and `P' = wᵀ dy`, which is added
//! back into `dx`. Patches are built one `Tile` at a time to stay in the cache: some rows of windows of a large image,
//! or several small images side by side, which avoids thin products.

use super::conv_role::Role;
use super::matmul::{Matrix, product};
use super::patches::{Grid, gather_patches, scatter_patches};
use super::real::{Real, for_real};
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout, depthwise};
#[cfg(target_arch = "x86_64")]
use super::{few, implicit, winograd};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::Window;
use compiler::tensor::DType;
use std::ops::Range;

/// Elements of a patch tile: about the second-level cache.
const TILE_ELEMENTS: usize = 256 * 1024;
/// Minimum columns of a tile, if the data has as many.
const MIN_COLUMNS: usize = 384;

/// Layouts are those of x, w and y, or of their gradients.
pub fn kernel(
    role: Role,
    window: &Window,
    groups: usize,
    x: &TensorLayout,
    w: &TensorLayout,
    y: &TensorLayout,
) -> Option<FastKernel> {
    // Empty tensors use the reference.
    if x.is_empty() || w.is_empty() || y.is_empty() {
        return None;
    }
    let grid = Grid::new(window, &x.shape[2..], &w.shape[2..], &y.shape[2..])?;
    let shape = Shape {
        grid,
        images: x.shape[0],
        groups,
        ins: x.shape[1] / groups,
        outs: y.shape[1] / groups,
        tile: Tile::of(&grid, x.shape[1] / groups, x.shape[0]),
    };
    #[cfg(target_arch = "x86_64")]
    if x.dtype == DType::F32 && !shape.is_depthwise() && !shape.is_direct() {
        let sizes = implicit::Sizes { images: shape.images, groups, ins: shape.ins, outs: shape.outs };
        let candidates = [few::kernel, winograd::kernel, implicit::kernel];
        if let Some(fast) = candidates.iter().find_map(|candidate| candidate(role, &grid, sizes)) {
            return Some(fast);
        }
    }
    for_real!(x.dtype, T => Some(patch_kernel::<T>(role, shape)))
}

/// The windows computed in one product.
#[derive(Clone, Copy)]
struct Tile {
    images: usize,
    /// Rows of windows; all of them if there are several images.
    rows: usize,
}

impl Tile {
    fn of(grid: &Grid, ins: usize, images: usize) -> Tile {
        let (depth, width) = ((ins * grid.taps()).max(1), grid.out[2].max(1));
        let columns = (TILE_ELEMENTS / depth).max(MIN_COLUMNS);
        if grid.out_len() * 2 > columns || images <= 1 {
            // Equal tile sizes avoid a thin last tile.
            let rows = (columns / width).clamp(1, grid.rows().max(1));
            return Tile { images: 1, rows: grid.rows().max(1).div_ceil(grid.rows().max(1).div_ceil(rows)) };
        }
        let tile_images = (columns / grid.out_len().max(1)).clamp(1, images);
        Tile { images: images.div_ceil(images.div_ceil(tile_images)), rows: grid.rows().max(1) }
    }
}

#[derive(Clone, Copy)]
struct Shape {
    grid: Grid,
    images: usize,
    groups: usize,
    /// Input channels per group.
    ins: usize,
    /// Output channels per group.
    outs: usize,
    tile: Tile,
}

impl Shape {
    fn depth(&self) -> usize {
        self.ins * self.grid.taps()
    }

    fn columns(&self) -> usize {
        self.tile.images * self.tile.rows * self.grid.out[2]
    }

    fn is_depthwise(&self) -> bool {
        self.ins == 1 && self.outs == 1 && self.groups > 1
    }

    /// True if the data itself is the patch matrix.
    fn is_direct(&self) -> bool {
        self.grid.is_pointwise() && self.tile.images == 1
    }

    fn tiles(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + use<> {
        let (tile, images, rows) = (self.tile, self.images, self.grid.rows());
        (0..images).step_by(tile.images).flat_map(move |image| {
            let images = image..images.min(image + tile.images);
            (0..rows).step_by(tile.rows).map(move |row| (images.clone(), row..rows.min(row + tile.rows)))
        })
    }

    /// Element range of an image's group in x.
    fn x_of(&self, image: usize, group: usize) -> Range<usize> {
        let size = self.ins * self.grid.data_len();
        let at = (image * self.groups + group) * size;
        at..at + size
    }

    /// Element range of an image's group in y.
    fn y_of(&self, image: usize, group: usize) -> Range<usize> {
        let size = self.outs * self.grid.out_len();
        let at = (image * self.groups + group) * size;
        at..at + size
    }

    fn w_of(&self, group: usize) -> Range<usize> {
        let size = self.outs * self.depth();
        group * size..(group + 1) * size
    }
}

fn patch_kernel<T: Real>(role: Role, shape: Shape) -> FastKernel {
    let depthwise = shape.is_depthwise().then(|| depthwise::kernel::<T>(role, &shape.grid, shape.groups));
    if let Some(fast) = depthwise.flatten() {
        return fast;
    }
    let patches = if shape.is_direct() { 0 } else { shape.depth() * shape.columns() };
    let scratch = if shape.tile.images > 1 { shape.outs * shape.columns() } else { 0 };
    let first = (patches * size_of::<T>()).next_multiple_of(ALIGNMENT);
    let fast = FastKernel::adding(role == Role::WeightGrad, move |inputs, outputs, workspace, add| {
        let (head, tail) = workspace.split_at_mut(first);
        let patches = &mut cast_slice_mut::<u8, T>(head)[..patches];
        let scratch = &mut cast_slice_mut::<u8, T>(&mut tail[..scratch * size_of::<T>()])[..];
        let (a, b) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        let result = cast_slice_mut::<u8, T>(outputs[0]);
        match role {
            Role::Forward => forward(&shape, a, b, result, patches, scratch),
            Role::InputGrad => input_grad(&shape, a, b, result, patches, scratch),
            Role::WeightGrad => weight_grad(&shape, [a, b], result, patches, scratch, add),
        }
    });
    fast.with_workspace(first + scratch * size_of::<T>())
}

fn forward<T: Real>(s: &Shape, x: &[T], w: &[T], y: &mut [T], patches: &mut [T], scratch: &mut [T]) {
    for (images, rows) in s.tiles() {
        for group in 0..s.groups {
            let w = Matrix { values: &w[s.w_of(group)], strides: (s.depth(), 1) };
            let n = images.len() * rows.len() * s.grid.out[2];
            let from = rows.start * s.grid.out[2];
            if s.is_direct() {
                let x = Matrix { values: &x[s.x_of(images.start, group)][from..], strides: (s.grid.out_len(), 1) };
                let y = &mut y[s.y_of(images.start, group)][from..];
                product([s.outs, n, s.depth()], w, x, y, s.grid.out_len(), false);
                continue;
            }
            collect(s, x, &images, &rows, group, patches, n);
            let p = Matrix { values: &*patches, strides: (n, 1) };
            if images.len() == 1 && scratch.is_empty() {
                let y = &mut y[s.y_of(images.start, group)][from..];
                product([s.outs, n, s.depth()], w, p, y, s.grid.out_len(), false);
            } else {
                product([s.outs, n, s.depth()], w, p, scratch, n, false);
                let size = s.grid.out_len();
                for (i, image) in images.clone().enumerate() {
                    for (o, y) in y[s.y_of(image, group)].chunks_exact_mut(size).enumerate() {
                        y.copy_from_slice(&scratch[o * n + i * size..o * n + (i + 1) * size]);
                    }
                }
            }
        }
    }
}

fn input_grad<T: Real>(s: &Shape, dy: &[T], w: &[T], dx: &mut [T], patches: &mut [T], scratch: &mut [T]) {
    if !s.is_direct() {
        dx.fill(T::ZERO);
    }
    for (images, rows) in s.tiles() {
        for group in 0..s.groups {
            let w = Matrix { values: &w[s.w_of(group)], strides: (1, s.depth()) };
            let n = images.len() * rows.len() * s.grid.out[2];
            let from = rows.start * s.grid.out[2];
            let dy = side_by_side(s, dy, &images, from, group, scratch);
            if s.is_direct() {
                let dx = &mut dx[s.x_of(images.start, group)][from..];
                product([s.depth(), n, s.outs], w, dy, dx, s.grid.out_len(), false);
                continue;
            }
            product([s.depth(), n, s.outs], w, dy, patches, n, false);
            spread(s, patches, n, &images, &rows, group, dx);
        }
    }
}

fn weight_grad<T: Real>(
    s: &Shape,
    [dy, x]: [&[T]; 2],
    dw: &mut [T],
    patches: &mut [T],
    scratch: &mut [T],
    mut add: bool,
) {
    for (images, rows) in s.tiles() {
        for group in 0..s.groups {
            let n = images.len() * rows.len() * s.grid.out[2];
            let from = rows.start * s.grid.out[2];
            let dy = side_by_side(s, dy, &images, from, group, scratch);
            let p = if s.is_direct() {
                Matrix { values: &x[s.x_of(images.start, group)][from..], strides: (1, s.grid.out_len()) }
            } else {
                collect(s, x, &images, &rows, group, patches, n);
                Matrix { values: &*patches, strides: (1, n) }
            };
            product([s.outs, s.depth(), n], dy, p, &mut dw[s.w_of(group)], s.depth(), add);
        }
        add = true;
    }
}

/// `dy` of a tile as one matrix, in place or with several images copied side by side.
fn side_by_side<'a, T: Real>(
    s: &Shape,
    dy: &'a [T],
    images: &Range<usize>,
    from: usize,
    group: usize,
    scratch: &'a mut [T],
) -> Matrix<'a, T> {
    let size = s.grid.out_len();
    if scratch.is_empty() {
        return Matrix { values: &dy[s.y_of(images.start, group)][from..], strides: (size, 1) };
    }
    let n = images.len() * size;
    for (i, image) in images.clone().enumerate() {
        for (o, dy) in dy[s.y_of(image, group)].chunks_exact(size).enumerate() {
            scratch[o * n + i * size..o * n + (i + 1) * size].copy_from_slice(dy);
        }
    }
    Matrix { values: scratch, strides: (n, 1) }
}

wide! {
    fn collect[T: Real](
        s: &Shape,
        x: &[T],
        images: &Range<usize>,
        rows: &Range<usize>,
        group: usize,
        patches: &mut [T],
        pitch: usize,
    ) {
        let size = rows.len() * s.grid.out[2];
        for (i, image) in images.clone().enumerate() {
            gather_patches(&s.grid, &x[s.x_of(image, group)], rows.clone(), &mut patches[i * size..], pitch);
        }
    }
}

wide! {
    fn spread[T: Real](
        s: &Shape,
        patches: &[T],
        pitch: usize,
        images: &Range<usize>,
        rows: &Range<usize>,
        group: usize,
        dx: &mut [T],
    ) {
        let size = rows.len() * s.grid.out[2];
        for (i, image) in images.clone().enumerate() {
            scatter_patches(&s.grid, &patches[i * size..], pitch, rows.clone(), &mut dx[s.x_of(image, group)]);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
pub(super) mod tests {
    use super::super::implicit::Sizes;
    use super::*;
    use crate::device::buffer::Buffer;
    use crate::device::cpu::Kernel;
    use crate::device::cpu::tests::numbers;
    use compiler::op::table::rule;
    use compiler::op::{Conv, ConvInputGrad, ConvWeightGrad, Op};
    use compiler::tensor::fact::Fact;

    /// Images, groups, input and output channels per group; height and width; padding on all sides.
    pub type Case = ([usize; 4], [usize; 2], usize);

    /// Compares an `f32` 3×3 convolution algorithm with the `f64` reference. Returns the number of supported cases by
    /// role.
    pub fn count_supported(cases: &[Case], algorithm: impl Fn(Role, &Grid, Sizes) -> Option<FastKernel>) -> [usize; 3] {
        let mut supported = [0; 3];
        for &([images, groups, ins, outs], [height, width], pad) in cases {
            let [strides, dilations] = [(); 2].map(|()| vec![1, 1]);
            let window = Window { strides, pads_begin: vec![pad; 2], pads_end: vec![pad; 2], dilations };
            let [out_height, out_width] = [height, width].map(|size| size + 2 * pad - 2);
            let fact = |shape: [usize; 4]| Fact::of(DType::F32, &shape);
            let x = fact([images, groups * ins, height, width]);
            let w = fact([groups * outs, ins, 3, 3]);
            let y = fact([images, groups * outs, out_height, out_width]);
            let grid = Grid::new(&window, &[height, width], &[3, 3], &[out_height, out_width]).unwrap();
            let spatial = vec![(height as i64).into(), (width as i64).into()];
            let input_grad = Op::ConvInputGrad(ConvInputGrad { window: window.clone(), groups, spatial });
            let weight_grad = Op::ConvWeightGrad(ConvWeightGrad { window: window.clone(), groups, kernel: vec![3, 3] });
            let ops = [
                (Role::Forward, Op::Conv(Conv { window, groups }), [&x, &w]),
                (Role::InputGrad, input_grad, [&y, &w]),
                (Role::WeightGrad, weight_grad, [&y, &x]),
            ];
            for (i, (role, op, facts)) in ops.into_iter().enumerate() {
                let Some(fast) = algorithm(role, &grid, Sizes { images, groups, ins, outs }) else { continue };
                supported[i] += 1;
                let error = distance(&op, &fast, facts);
                assert!(error < 1e-6, "{op:?} {facts:?}: {error:e}");
            }
        }
        supported
    }

    /// Relative error norm against the `f64` reference.
    fn distance(op: &Op, fast: &FastKernel, facts: [&Fact; 2]) -> f64 {
        let out = rule(op).infer(&facts).unwrap().remove(0);
        let random = |fact: &Fact, seed| numbers(fact.bytes().unwrap() as usize / 4, seed);
        let (factors, mut result) = ([random(facts[0], 1), random(facts[1], 2)], random(&out, 3));
        let mut workspace = Buffer::host(fast.workspace);
        let inputs = [0, 1].map(|i| cast_slice::<f32, u8>(&factors[i]));
        (fast.body)(&inputs, &mut [cast_slice_mut(&mut result)], workspace.bytes_mut()).unwrap();
        let double = |fact: &Fact| TensorLayout::of(&Fact { dtype: DType::F64, ..fact.clone() });
        let reference = Kernel::from_parts(op.clone(), facts.map(double).to_vec(), vec![double(&out)], None);
        let factors = factors.map(|factor| factor.into_iter().map(f64::from).collect::<Vec<_>>());
        let mut exact = vec![0.0f64; result.len()];
        let inputs = [0, 1].map(|i| cast_slice::<f64, u8>(&factors[i]));
        reference.run(&inputs, &mut [cast_slice_mut(&mut exact)], &mut []).unwrap();
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
        norm(&mut result.iter().zip(&exact).map(|(a, b)| f64::from(*a) - b)) / norm(&mut exact.iter().copied())
    }
}
