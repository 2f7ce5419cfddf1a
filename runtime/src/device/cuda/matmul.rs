//! Tiled matrix products: a block of 256 threads computes 64×64 elements, 16 per thread, from tiles in shared memory.
//!
//! Supports every element type, stride and batch. Where cuBLASLt is found, it computes the op instead
//! ([`library_product`](super::library_product)).

use super::draft::KernelBuilder;
use super::element::{accumulator, compute_type, load, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::offsets::{Walk, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::MatMul;
use compiler::tensor::DType;

/// Rows and columns of a tile.
const TILE: usize = 64;

/// Depth per shared-memory tile.
const DEPTH: usize = 16;

/// A strided matrix, or a batch of them.
#[derive(Clone)]
pub struct Matrix {
    /// Start of the first one.
    pub at: At,
    pub dtype: DType,
    /// Row and column stride, in elements.
    pub steps: [usize; 2],
}

impl Matrix {
    /// Contiguous rows of `width` elements.
    pub fn rows(at: At, dtype: DType, width: usize) -> Matrix {
        Matrix { at, dtype, steps: [width, 1] }
    }

    pub fn transposed(self) -> Matrix {
        Matrix { steps: [self.steps[1], self.steps[0]], ..self }
    }
}

/// `c = a b`, or `c += a b`, for each index of `batch`.
pub struct Product<'a> {
    /// Rows of `a` and `c`.
    pub rows: usize,
    /// Columns of `b` and `c`.
    pub columns: usize,
    /// Columns of `a`, rows of `b`.
    pub terms: usize,
    pub matrices: [Matrix; 3],
    pub batch: &'a [usize],
    /// Offsets of each operand's matrix by batch index.
    pub walks: [Walk; 3],
    /// True to accumulate into `c`.
    pub adds: bool,
}

impl Product<'_> {
    /// A single product.
    pub fn single([rows, columns, terms]: [usize; 3], matrices: [Matrix; 3], adds: bool) -> Product<'static> {
        let walk = || Walk { base: 0, steps: Vec::new() };
        Product { rows, columns, terms, matrices, batch: &[], walks: [walk(), walk(), walk()], adds }
    }

    pub fn launch(&self) -> Launch {
        let [a, b, c] = &self.matrices;
        let sum = accumulator(c.dtype);
        let kind = compute_type(sum);
        let products: usize = self.batch.iter().product();
        let extent = |matrix: &Matrix, walk: &Walk, [rows, columns]: [usize; 2]| {
            let last: isize = walk.steps.iter().zip(self.batch).map(|(step, size)| step * (*size as isize - 1)).sum();
            last as usize + rows * matrix.steps[0] + columns * matrix.steps[1]
        };
        let max_elements = [
            extent(a, &self.walks[0], [self.rows, self.terms]),
            extent(b, &self.walks[1], [self.terms, self.columns]),
            extent(c, &self.walks[2], [self.rows, self.columns]),
        ];
        let mut builder = KernelBuilder::new(max_elements.into_iter().max().unwrap_or(0));
        builder.add_input("a", a.dtype, a.at);
        builder.add_input("b", b.dtype, b.at);
        builder.add_output("c", c.dtype, c.at);
        let (row_tiles, column_tiles) = (self.rows.div_ceil(TILE), self.columns.div_ceil(TILE));
        let (lines, expressions) = offsets("m", "i / tiles", self.batch, &self.walks);
        // Adjacent threads load adjacent elements.
        let tile = |name: &str, matrix: &Matrix, across: usize, along: usize, from: &str, first: &str, limit: usize| {
            let (outer, depth) = if matrix.steps[along] == 1 {
                (format!("l / {DEPTH}"), format!("l % {DEPTH}"))
            } else {
                (format!("l % {TILE}"), format!("l / {TILE}"))
            };
            let element = format!(
                "{name}[{from} + ({first} + o) * (at){} + (t + d) * (at){}]",
                matrix.steps[across], matrix.steps[along]
            );
            format!(
                "for (u32 l = threadIdx.x; l < {}; l += blockDim.x) {{\nu32 o = {outer}, d = {depth};\n\
                 tile_{name}[d][o] = {first} + o < (at){limit} && t + d < (at){} ? ({kind}){} : ({kind})0;\n}}\n",
                TILE * DEPTH,
                self.terms,
                load(matrix.dtype, &element)
            )
        };
        let tile_a = tile("a", a, 0, 1, "from_a", "row", self.rows);
        let tile_b = tile("b", b, 1, 0, "from_b", "column", self.columns);
        let element = format!("c[from_c + r * (at){} + s * (at){}]", c.steps[0], c.steps[1]);
        let value =
            if self.adds { format!("({kind}){} + sums[p][q]", load(c.dtype, &element)) } else { "sums[p][q]".into() };
        builder.add(&format!(
            "__shared__ {kind} tile_a[{DEPTH}][{TILE}], tile_b[{DEPTH}][{TILE}];\n\
             const at tiles = (at){};\n\
             for (at i = blockIdx.x; i < (at){}; i += gridDim.x) {{\n{lines}\
             at from_a = {}, from_b = {}, from_c = {};\n\
             at row = i % tiles / (at){column_tiles} * {TILE}, column = i % tiles % (at){column_tiles} * {TILE};\n\
             u32 down = threadIdx.x / 16 * 4, over = threadIdx.x % 16;\n\
             {kind} sums[4][4] = {{}};\n\
             for (at t = 0; t < (at){}; t += {DEPTH}) {{\n{tile_a}{tile_b}__syncthreads();\n\
             for (u32 d = 0; d < {DEPTH}; d++) {{\n\
             {kind} left[4], right[4];\n\
             for (u32 p = 0; p < 4; p++) {{ left[p] = tile_a[d][down + p]; right[p] = tile_b[d][over + 16 * p]; }}\n\
             for (u32 p = 0; p < 4; p++) for (u32 q = 0; q < 4; q++) sums[p][q] = m_fma(left[p], right[q], sums[p][q]);\n}}\n\
             __syncthreads();\n}}\n\
             for (u32 p = 0; p < 4; p++) for (u32 q = 0; q < 4; q++) {{\n\
             at r = row + down + p, s = column + over + 16 * q;\n\
             if (r < (at){} && s < (at){}) {element} = {};\n}}\n}}",
            row_tiles * column_tiles,
            row_tiles * column_tiles * products,
            expressions[0],
            expressions[1],
            expressions[2],
            self.terms,
            self.rows,
            self.columns,
            store(c.dtype, &value),
        ));
        builder.launch((row_tiles * column_tiles * products).clamp(1, 1 << 20), 256)
    }
}

/// The product over the last two dimensions, with leading dimensions broadcast.
pub fn kernel(op: &MatMul, a: &TensorLayout, b: &TensorLayout, c: &TensorLayout) -> Option<LaunchPlan> {
    c.dtype.is_float().then(|| LaunchPlan::of(launch(op, [a, b, c], false)))
}

/// The launches that write the product as the first term of a sum, and add it to one. The last operand is the sum. `None`
/// for empty tensors.
pub fn terms(op: &MatMul, operands: [&TensorLayout; 3]) -> Option<[LaunchPlan; 2]> {
    let is_empty = operands.into_iter().any(TensorLayout::is_empty);
    (operands[2].dtype.is_float() && !is_empty)
        .then(|| [false, true].map(|adds| LaunchPlan::of(launch(op, operands, adds))))
}

fn launch(op: &MatMul, [a, b, c]: [&TensorLayout; 3], adds: bool) -> Launch {
    let batch_rank = c.shape.len() - 2;
    let (rows, columns) = (c.shape[batch_rank], c.shape[batch_rank + 1]);
    let terms = a.shape[a.shape.len() - if op.transpose_a { 2 } else { 1 }];
    let matrix = |at, layout: &TensorLayout, is_transposed: bool, width: usize| {
        let matrix = Matrix::rows(at, layout.dtype, width);
        if is_transposed { matrix.transposed() } else { matrix }
    };
    let matrices = [
        matrix(At::input(0), a, op.transpose_a, if op.transpose_a { rows } else { terms }),
        matrix(At::input(1), b, op.transpose_b, if op.transpose_b { terms } else { columns }),
        matrix(At::output(0), c, false, columns),
    ];
    let batch = &c.shape[..batch_rank];
    let walk = |layout: &TensorLayout, volume: usize| {
        let mut walk = Walk::broadcast(&layout.shape[..layout.shape.len() - 2], batch);
        walk.steps.iter_mut().for_each(|step| *step *= volume as isize);
        walk
    };
    let walks = [walk(a, rows * terms), walk(b, terms * columns), walk(c, rows * columns)];
    Product { rows, columns, terms, matrices, batch, walks, adds }.launch()
}
