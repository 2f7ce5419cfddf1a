//! Large products of 16-bit matrices of which a size is not a multiple of 8, such as a vocabulary of 50,257. Libraries
//! have no fast kernels for them, so the product is that of copies with zeros up to the next multiple, some rows of `c`
//! after the others to bound the memory of the copies.

use super::draft::{KernelBuilder, PACK_BYTES};
use super::gpu::{Function, Gpu, GpuError};
use super::launch_plan::{At, Launch};
use super::library_product::{LibraryProduct, Problem, WORKSPACE_ALIGNMENT, aligned_workspace};
use super::per_gpu::PerGpu;
use super::queue::Queue;
use crate::device::layout::is_half;
use compiler::tensor::DType;

/// Bytes of an element.
const SIZE: usize = 2;

/// Elements of which each size is a multiple in the copies.
const ALIGNED: usize = PACK_BYTES / SIZE;

/// Bytes that the copies of `a` or `c` may take.
pub const MOST_BYTES: usize = 64 << 20;

/// Operations for each copied byte from which on copies cost less than they save.
const LEAST_FLOPS: usize = 100;

fn padded(size: usize) -> usize {
    size.next_multiple_of(ALIGNED)
}

/// A block of a matrix, copied to memory with rows of another length.
#[derive(Clone, Copy)]
struct Block {
    /// Rows and columns.
    size: [usize; 2],
    /// Elements from one row to the next.
    from_line: usize,
    /// Rows and columns that are written; what is beyond the block is 0.
    to: [usize; 2],
}

/// The copy of a block, with its kernel by GPU.
struct Copier {
    launch: Launch,
    functions: PerGpu<Function>,
}

/// Rows of `c` that are computed together.
struct Piece {
    product: LibraryProduct,
    /// The copies of its part of `a`, and to `c`.
    copies: [Option<Copier>; 2],
}

/// A product in pieces of equal size, but for the last.
pub struct PaddedProduct {
    whole: Problem,
    /// Rows of a piece.
    rows: usize,
    /// The first pieces, and the last one if it is smaller.
    pieces: Vec<Piece>,
    /// The copy of `b`.
    of_b: Option<Copier>,
    /// Where the copies of a, b and c start in the workspace, and where the product's own does.
    offsets: [usize; 4],
}

impl Copier {
    fn new(block: Block) -> Copier {
        let Block { size: [rows, columns], from_line, to: [to_rows, to_columns] } = block;
        let mut draft = KernelBuilder::new((rows * from_line).max(to_rows * to_columns));
        draft.reads("from", DType::U16, At::input(0));
        draft.writes("to", DType::U16, At::output(0));
        let count = to_rows * to_columns;
        let lines = format!(
            "at row = pack * {ALIGNED} / {to_columns}, column = pack * {ALIGNED} % {to_columns};\n\
             Pack<u16, {ALIGNED}> elements;\n#pragma unroll\nfor (int e = 0; e < {ALIGNED}; e++) {{\n\
             elements.of[e] = row < {rows} && column < {columns} ? from[row * (at){from_line} + column] : 0;\n\
             if (++column == {to_columns}) {{ column = 0; row++; }}\n}}\n\
             if ((pack + 1) * {ALIGNED} <= (at){count}) *(Pack<u16, {ALIGNED}>*)(to + pack * {ALIGNED}) = elements;\n\
             else for (int e = 0; e < (int)({count} - pack * {ALIGNED}); e++) to[pack * {ALIGNED} + e] = elements.of[e];"
        );
        let launch = draft.each_pack(padded(count), ALIGNED, &lines);
        Copier { launch, functions: PerGpu::default() }
    }

    fn function(&self, gpu: &Gpu) -> Result<Function, GpuError> {
        self.functions.loaded(gpu, &self.launch.text)
    }

    /// # Safety
    ///
    /// The addresses are of this GPU, whose context is bound, and have the sizes of the copy.
    unsafe fn run(&self, gpu: &Gpu, queue: &Queue, mut addresses: [u64; 2]) -> Result<(), GpuError> {
        let function = self.function(gpu)?;
        // SAFETY: the kernel takes two addresses; the sizes are the caller's promise.
        Ok(unsafe { queue.launch(function, (self.launch.blocks, self.launch.threads), &mut addresses) }?)
    }
}

/// The blocks of `a`, `b` and `c` for this number of rows; `None` for those that need no copy.
fn blocks(whole: &Problem, rows: usize) -> [Option<Block>; 3] {
    let ([_, columns, terms], [a_transposed, b_transposed]) = (whole.sizes, whole.transposes);
    let block = |size: [usize; 2], from_line: usize| Block { size, from_line, to: size.map(padded) };
    let a = block(if a_transposed { [terms, rows] } else { [rows, terms] }, whole.lines[0]);
    let b = block(if b_transposed { [columns, terms] } else { [terms, columns] }, whole.lines[1]);
    // From the copy to `c`.
    let c = Block { size: [rows, columns], from_line: padded(columns), to: [rows, columns] };
    let differs = |size: [usize; 2], line: usize| size != size.map(padded) || line != padded(line);
    [
        differs(a.size, a.from_line).then_some(a),
        differs(b.size, b.from_line).then_some(b),
        differs(c.size, columns).then_some(c),
    ]
}

impl PaddedProduct {
    /// `None` if the product is as fast without copies. The copies of `a` and of `c` take at most so many bytes each.
    pub fn new(gpu: &Gpu, product: &LibraryProduct, most_bytes: usize) -> Option<PaddedProduct> {
        let whole = product.single()?.clone();
        let [rows, columns, terms] = whole.sizes;
        let of_whole = blocks(&whole, rows);
        let sizes = [rows * terms, terms * columns, rows * columns];
        let copied: usize = (0..3).filter(|&at| of_whole[at].is_some()).map(|at| sizes[at] * SIZE).sum();
        let suits = is_half(whole.types.dtype) && whole.batch == 1 && gpu.info().architecture.major >= 8;
        if !suits || copied == 0 || 2 * rows * columns * terms / copied < LEAST_FLOPS {
            return None;
        }
        // Copies of whole rows, so that all pieces but the last need no other padding.
        let row_bytes = padded(terms).max(padded(columns)) * SIZE;
        let limit = most_bytes / row_bytes / ALIGNED * ALIGNED;
        if limit == 0 {
            return None;
        }
        let size = padded(rows.div_ceil(rows.div_ceil(limit))).min(rows);
        let elements = |block: Option<Block>| block.map_or(0, |block| block.to[0] * block.to[1]);
        // Elements of the copies of a, b and c.
        let (mut pieces, mut room) = (Vec::new(), [0, elements(of_whole[1]), 0]);
        for rows in [size, rows % size].into_iter().filter(|&rows| rows > 0) {
            let of_piece = blocks(&whole, rows);
            let line = |at: usize| of_piece[at].map_or(whole.lines[at], |block| block.to[1]);
            let mut problem = whole.clone();
            problem.sizes = [rows, columns, terms].map(padded);
            problem.lines = [line(0), line(1), padded(columns)];
            let product = LibraryProduct::of(gpu, problem, vec![[0; 3]])?;
            let copies = [of_piece[0], of_piece[2]].map(|block| block.map(Copier::new));
            pieces.push(Piece { product, copies });
            room[0] = room[0].max(elements(of_piece[0]));
            room[2] = room[2].max(of_piece[2].map_or(0, |block| padded(rows) * block.from_line));
        }
        let mut offsets = [0; 4];
        for at in 0..3 {
            offsets[at + 1] = (offsets[at] + room[at] * SIZE).next_multiple_of(WORKSPACE_ALIGNMENT as usize);
        }
        Some(PaddedProduct { whole, rows: size, pieces, of_b: of_whole[1].map(Copier::new), offsets })
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        let own = self.pieces.iter().map(|piece| piece.product.workspace()).max().unwrap_or(0);
        aligned_workspace(self.offsets[3] + own)
    }

    /// Whether the library computes the product on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        let mut copiers = self.pieces.iter().flat_map(|piece| &piece.copies).chain([&self.of_b]).flatten();
        self.pieces.iter().all(|piece| piece.product.works_on(gpu))
            && copiers.all(|copier| copier.function(gpu).is_ok())
    }

    /// Queues the product. False if the library cannot compute it on this GPU or at these addresses of a, b and c.
    ///
    /// # Safety
    ///
    /// As for [`LibraryProduct::run`].
    pub unsafe fn run(&self, gpu: &Gpu, queue: &Queue, [a, b, c]: [u64; 3], workspace: u64) -> Result<bool, GpuError> {
        if [a, b, c].into_iter().any(|address| !address.is_multiple_of(PACK_BYTES as u64)) {
            return Ok(false);
        }
        gpu.bind()?;
        let workspace = workspace.next_multiple_of(WORKSPACE_ALIGNMENT);
        let [to_a, to_b, to_c, own] = self.offsets.map(|offset| workspace + offset as u64);
        if let Some(copier) = &self.of_b {
            // SAFETY: the caller's promise, as for all that follows; the workspace has room for all copies.
            unsafe { copier.run(gpu, queue, [b, to_b]) }?;
        }
        for first in (0..self.whole.sizes[0]).step_by(self.rows) {
            let is_smaller = first + self.rows > self.whole.sizes[0];
            let piece = if is_smaller { self.pieces.last() } else { self.pieces.first() };
            let Some(Piece { product, copies: [of_a, of_c] }) = piece else { return Ok(false) };
            let line_of_a = if self.whole.transposes[0] { 1 } else { self.whole.lines[0] };
            let a = a + (first * line_of_a * SIZE) as u64;
            let c = c + (first * self.whole.lines[2] * SIZE) as u64;
            if let Some(copier) = of_a {
                // SAFETY: as above.
                unsafe { copier.run(gpu, queue, [a, to_a]) }?;
            }
            let operands = [
                if of_a.is_some() { to_a } else { a },
                if self.of_b.is_some() { to_b } else { b },
                if of_c.is_some() { to_c } else { c },
            ];
            // SAFETY: as above.
            if !unsafe { product.run(gpu, queue, operands, own, false) }? {
                return Ok(false);
            }
            if let Some(copier) = of_c {
                // SAFETY: as above.
                unsafe { copier.run(gpu, queue, [to_c, c]) }?;
            }
        }
        Ok(true)
    }
}
