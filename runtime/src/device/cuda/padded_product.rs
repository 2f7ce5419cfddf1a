//! Large products of 16-bit matrices of which a size is not a multiple of 8, such as a vocabulary of 50,257. Libraries
//! have no fast kernels for them, so the product is that of copies with zeros up to the next multiple, some rows of `c`
//! after the others to bound the memory of the copies.

use super::draft::{KernelBuilder, PACK_BYTES};
use super::gpu::{Function, Gpu, GpuError};
use super::launch_plan::{At, Launch};
use super::library_product::{LibraryProduct, Problem, WORKSPACE_ALIGNMENT, aligned_workspace};
use super::queue::Queue;
use crate::device::layout::is_half;
use compiler::tensor::DType;
use std::sync::OnceLock;

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
    functions: Vec<OnceLock<Function>>,
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

impl Block {
    fn bytes(&self) -> usize {
        self.to[0] * self.to[1] * SIZE
    }
}

impl Copier {
    fn new(gpus: usize, block: Block) -> Copier {
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
        Copier { launch, functions: (0..gpus).map(|_| OnceLock::new()).collect() }
    }

    fn function(&self, gpu: &Gpu) -> Result<Function, GpuError> {
        let place = &self.functions[gpu.info().ordinal];
        if let Some(function) = place.get() {
            return Ok(*function);
        }
        let function = gpu.function(&self.launch.text)?;
        Ok(*place.get_or_init(|| function))
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
    pub fn new(gpu: &Gpu, gpus: usize, product: &LibraryProduct, most_bytes: usize) -> Option<PaddedProduct> {
        let whole = product.single()?.clone();
        let [rows, columns, terms] = whole.sizes;
        let elements = [rows * terms, terms * columns, rows * columns];
        let copied: usize = (0..3).filter(|&at| blocks(&whole, rows)[at].is_some()).map(|at| elements[at] * SIZE).sum();
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
        let size = padded(rows.div_ceil(rows.div_ceil(limit)));
        let piece = |rows: usize| {
            let copied = blocks(&whole, rows);
            let line = |at: usize| copied[at].map_or(whole.lines[at], |block| block.to[1]);
            let mut problem = whole.clone();
            problem.sizes = [rows, columns, terms].map(padded);
            problem.lines = [line(0), line(1), padded(columns)];
            let product = LibraryProduct::of(gpu, gpus, problem, vec![[0; 3]])?;
            let copies = [copied[0], copied[2]].map(|block| block.map(|block| Copier::new(gpus, block)));
            Some(Piece { product, copies })
        };
        let sizes = if rows < size { [rows, 0] } else { [size, rows % size] };
        let pieces = sizes.into_iter().filter(|&rows| rows > 0).map(piece).collect::<Option<Vec<_>>>()?;
        let [of_a, of_b, of_c] = [0, 1, 2].map(|at| {
            let most = |rows: usize| blocks(&whole, rows)[at].map_or(0, |block| block.bytes());
            sizes.into_iter().filter(|&rows| rows > 0).map(most).max().unwrap_or(0)
        });
        // The copy of `c` has padded rows.
        let of_c = if of_c == 0 { 0 } else { padded(sizes[0]) * padded(columns) * SIZE };
        let mut offsets = [0; 4];
        for (at, bytes) in [of_a, of_b, of_c].into_iter().enumerate() {
            offsets[at + 1] = (offsets[at] + bytes).next_multiple_of(WORKSPACE_ALIGNMENT as usize);
        }
        let of_b = blocks(&whole, rows)[1].map(|block| Copier::new(gpus, block));
        Some(PaddedProduct { whole, rows: sizes[0], pieces, of_b, offsets })
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
