//! Large products of 16-bit matrices of which a size is not a multiple of 8, such as a vocabulary of 50,257. Libraries
//! have no fast kernels for them, so the product is that of copies with zeros up to the next multiple, some rows of `c`
//! after the others to bound the memory of the copies.

use super::draft::{KernelBuilder, PACK_BYTES};
use super::element::stored;
use super::gpu::{Function, Gpu, GpuError};
use super::launch_plan::{At, Launch};
use super::library_product::{LibraryProduct, Problem, WORKSPACE_ALIGNMENT, aligned_workspace};
use super::per_gpu::PerGpu;
use super::queue::Queue;
use crate::device::layout::is_half;
use compiler::tensor::DType;

/// Bytes of an element of `a` and `b`.
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
    /// Adds the copy of `c` to it, if it is f32.
    adder: Option<Copier>,
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
    /// A copy of elements of this type, or with `adds` their addition to those of the target.
    fn new(block: Block, dtype: DType, adds: bool) -> Copier {
        let Block { size: [rows, columns], from_line, to: [to_rows, to_columns] } = block;
        let mut draft = KernelBuilder::new((rows * from_line).max(to_rows * to_columns));
        draft.reads("from", dtype, At::input(0));
        draft.writes("to", dtype, At::output(0));
        let (count, width) = (to_rows * to_columns, PACK_BYTES / dtype.size());
        let pack = format!("Pack<{}, {width}>", stored(dtype));
        let (start, [of_pack, of_element]) = match adds {
            true => {
                (format!("if (is_whole) elements = *(const {pack}*)to_pack;\n"), ["elements.of[e] + ", "to_pack[e] + "])
            }
            false => (String::new(), [""; 2]),
        };
        let lines = format!(
            "at row = pack * {width} / {to_columns}, column = pack * {width} % {to_columns};\n\
             auto to_pack = to + pack * {width};\nbool is_whole = (pack + 1) * {width} <= (at){count};\n\
             {pack} elements;\n{start}#pragma unroll\nfor (int e = 0; e < {width}; e++) {{\n\
             auto x = row < {rows} && column < {columns} ? from[row * (at){from_line} + column] : 0;\n\
             if (is_whole) elements.of[e] = {of_pack}x;\nelse if (pack * {width} + e < (at){count}) to_pack[e] = {of_element}x;\n\
             if (++column == {to_columns}) {{ column = 0; row++; }}\n}}\n\
             if (is_whole) *({pack}*)to_pack = elements;"
        );
        let launch = draft.each_pack(count.next_multiple_of(width), width, &lines);
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
        let result = whole.types.result;
        let bytes = [SIZE, SIZE, result.size()];
        let copied: usize = (0..3).filter(|&at| of_whole[at].is_some()).map(|at| sizes[at] * bytes[at]).sum();
        let suits = is_half(whole.types.dtype) && whole.batch == 1 && gpu.info().architecture.major >= 8;
        if !suits || copied == 0 || 2 * rows * columns * terms / copied < LEAST_FLOPS {
            return None;
        }
        // Copies of whole rows, so that all pieces but the last need no other padding.
        let row_bytes = (padded(terms) * SIZE).max(padded(columns) * result.size());
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
            let of_a = of_piece[0].map(|block| Copier::new(block, DType::U16, false));
            let copied = if result.size() == SIZE { DType::U16 } else { result };
            let of_c = of_piece[2].map(|block| Copier::new(block, copied, false));
            let adder = of_piece[2].filter(|_| copied == DType::F32).map(|block| Copier::new(block, copied, true));
            pieces.push(Piece { product, copies: [of_a, of_c], adder });
            room[0] = room[0].max(elements(of_piece[0]));
            room[2] = room[2].max(of_piece[2].map_or(0, |block| padded(rows) * block.from_line));
        }
        let mut offsets = [0; 4];
        for at in 0..3 {
            offsets[at + 1] = (offsets[at] + room[at] * bytes[at]).next_multiple_of(WORKSPACE_ALIGNMENT as usize);
        }
        let of_b = of_whole[1].map(|block| Copier::new(block, DType::U16, false));
        Some(PaddedProduct { whole, rows: size, pieces, of_b, offsets })
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        let own = self.pieces.iter().map(|piece| piece.product.workspace()).max().unwrap_or(0);
        aligned_workspace(self.offsets[3] + own)
    }

    /// Whether the library computes the product on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        let of_pieces = self.pieces.iter().flat_map(|piece| piece.copies.iter().chain([&piece.adder]));
        let mut copiers = of_pieces.chain([&self.of_b]).flatten();
        self.pieces.iter().all(|piece| piece.product.works_on(gpu))
            && copiers.all(|copier| copier.function(gpu).is_ok())
    }

    /// Queues the product, added to `c` or not. False if the library cannot compute it on this GPU or at these addresses
    /// of a, b and c, or if `c` has 16 bits and is to be added to.
    ///
    /// # Safety
    ///
    /// As for [`LibraryProduct::run`].
    pub unsafe fn run(
        &self,
        gpu: &Gpu,
        queue: &Queue,
        [a, b, c]: [u64; 3],
        workspace: u64,
        adds: bool,
    ) -> Result<bool, GpuError> {
        // Pieces that were added already must not be added again.
        if adds && (self.whole.types.result != DType::F32 || !self.works_on(gpu)) {
            return Ok(false);
        }
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
            let Some(Piece { product, copies: [of_a, of_c], adder }) = piece else { return Ok(false) };
            let line_of_a = if self.whole.transposes[0] { 1 } else { self.whole.lines[0] };
            let a = a + (first * line_of_a * SIZE) as u64;
            let c = c + (first * self.whole.lines[2] * self.whole.types.result.size()) as u64;
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
            if !unsafe { product.run(gpu, queue, operands, own, adds && of_c.is_none()) }? {
                return Ok(false);
            }
            if let Some(copier) = if adds { adder } else { of_c } {
                // SAFETY: as above.
                unsafe { copier.run(gpu, queue, [to_c, c]) }?;
            }
        }
        Ok(true)
    }
}
