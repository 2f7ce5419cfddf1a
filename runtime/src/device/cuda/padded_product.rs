//! Large products of 16-bit matrices of which a size is not a multiple of 8, such as a vocabulary of 50,257. Libraries
//! have no fast kernels for them, so the product is that of copies with zeros up to the next multiple, some rows of `c`
//! after the others to bound the memory of the copies.

use super::draft::{KernelBuilder, PACK_BYTES};
use super::element::storage_type;
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

fn round_up(size: usize) -> usize {
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
    problem: Problem,
    /// Rows of a piece.
    rows: usize,
    /// The first pieces, and the last one if it is smaller.
    pieces: Vec<Piece>,
    /// The copy of `b`.
    b_copier: Option<Copier>,
    /// Where the copies of a, b and c start in the workspace, and where the product's own does.
    offsets: [usize; 4],
}

impl Copier {
    /// A copy of elements of this type, or with `adds` their addition to those of the target.
    fn new(block: Block, dtype: DType, adds: bool) -> Copier {
        let Block { size: [rows, columns], from_line, to: [to_rows, to_columns] } = block;
        let mut builder = KernelBuilder::new((rows * from_line).max(to_rows * to_columns));
        builder.add_input("from", dtype, At::input(0));
        builder.add_output("to", dtype, At::output(0));
        let (count, width) = (to_rows * to_columns, PACK_BYTES / dtype.size());
        let pack = format!("Pack<{}, {width}>", storage_type(dtype));
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
        let launch = builder.each_pack(count.next_multiple_of(width), width, &lines);
        Copier { launch, functions: PerGpu::default() }
    }

    fn function(&self, gpu: &Gpu) -> Result<Function, GpuError> {
        self.functions.load(gpu, &self.launch.text)
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
fn blocks(problem: &Problem, rows: usize) -> [Option<Block>; 3] {
    let ([_, columns, terms], [a_transposed, b_transposed]) = (problem.sizes, problem.transposes);
    let block = |size: [usize; 2], from_line: usize| Block { size, from_line, to: size.map(round_up) };
    let a = block(if a_transposed { [terms, rows] } else { [rows, terms] }, problem.lines[0]);
    let b = block(if b_transposed { [columns, terms] } else { [terms, columns] }, problem.lines[1]);
    // From the copy to `c`.
    let c = Block { size: [rows, columns], from_line: round_up(columns), to: [rows, columns] };
    let differs = |size: [usize; 2], line: usize| size != size.map(round_up) || line != round_up(line);
    [
        differs(a.size, a.from_line).then_some(a),
        differs(b.size, b.from_line).then_some(b),
        differs(c.size, columns).then_some(c),
    ]
}

impl PaddedProduct {
    /// `None` if the product is as fast without copies. The copies of `a` and of `c` take at most so many bytes each.
    pub fn new(gpu: &Gpu, product: &LibraryProduct, most_bytes: usize) -> Option<PaddedProduct> {
        let problem = product.single()?.clone();
        let [rows, columns, terms] = problem.sizes;
        let problem_blocks = blocks(&problem, rows);
        let sizes = [rows * terms, terms * columns, rows * columns];
        let result = problem.types.result;
        let bytes = [SIZE, SIZE, result.size()];
        let copied_bytes: usize =
            (0..3).filter(|&at| problem_blocks[at].is_some()).map(|at| sizes[at] * bytes[at]).sum();
        let is_suitable = is_half(problem.types.dtype) && problem.batch == 1 && gpu.info().architecture.major >= 8;
        if !is_suitable || copied_bytes == 0 || 2 * rows * columns * terms / copied_bytes < LEAST_FLOPS {
            return None;
        }
        // Copies of whole rows, so that all pieces but the last need no other padding.
        let row_bytes = (round_up(terms) * SIZE).max(round_up(columns) * result.size());
        let limit = most_bytes / row_bytes / ALIGNED * ALIGNED;
        if limit == 0 {
            return None;
        }
        let size = round_up(rows.div_ceil(rows.div_ceil(limit))).min(rows);
        let elements = |block: Option<Block>| block.map_or(0, |block| block.to[0] * block.to[1]);
        // Elements of the copies of a, b and c.
        let (mut pieces, mut copy_elements) = (Vec::new(), [0, elements(problem_blocks[1]), 0]);
        for rows in [size, rows % size].into_iter().filter(|&rows| rows > 0) {
            let piece_blocks = blocks(&problem, rows);
            let line = |at: usize| piece_blocks[at].map_or(problem.lines[at], |block| block.to[1]);
            let mut piece_problem = problem.clone();
            piece_problem.sizes = [rows, columns, terms].map(round_up);
            piece_problem.lines = [line(0), line(1), round_up(columns)];
            let product = LibraryProduct::of(gpu, piece_problem, vec![[0; 3]])?;
            let a_copier = piece_blocks[0].map(|block| Copier::new(block, DType::U16, false));
            let copied_type = if result.size() == SIZE { DType::U16 } else { result };
            let c_copier = piece_blocks[2].map(|block| Copier::new(block, copied_type, false));
            let adder = piece_blocks[2]
                .filter(|_| copied_type == DType::F32)
                .map(|block| Copier::new(block, copied_type, true));
            pieces.push(Piece { product, copies: [a_copier, c_copier], adder });
            copy_elements[0] = copy_elements[0].max(elements(piece_blocks[0]));
            copy_elements[2] =
                copy_elements[2].max(piece_blocks[2].map_or(0, |block| round_up(rows) * block.from_line));
        }
        let mut offsets = [0; 4];
        for at in 0..3 {
            offsets[at + 1] =
                (offsets[at] + copy_elements[at] * bytes[at]).next_multiple_of(WORKSPACE_ALIGNMENT as usize);
        }
        let b_copier = problem_blocks[1].map(|block| Copier::new(block, DType::U16, false));
        Some(PaddedProduct { problem, rows: size, pieces, b_copier, offsets })
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        let product_bytes = self.pieces.iter().map(|piece| piece.product.workspace()).max().unwrap_or(0);
        aligned_workspace(self.offsets[3] + product_bytes)
    }

    /// Whether the library computes the product on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        let piece_copiers = self.pieces.iter().flat_map(|piece| piece.copies.iter().chain([&piece.adder]));
        let mut copiers = piece_copiers.chain([&self.b_copier]).flatten();
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
        if adds && (self.problem.types.result != DType::F32 || !self.works_on(gpu)) {
            return Ok(false);
        }
        if [a, b, c].into_iter().any(|address| !address.is_multiple_of(PACK_BYTES as u64)) {
            return Ok(false);
        }
        gpu.bind()?;
        let workspace = workspace.next_multiple_of(WORKSPACE_ALIGNMENT);
        let [to_a, to_b, to_c, product_workspace] = self.offsets.map(|offset| workspace + offset as u64);
        if let Some(copier) = &self.b_copier {
            // SAFETY: the caller's promise, as for all that follows; the workspace has room for all copies.
            unsafe { copier.run(gpu, queue, [b, to_b]) }?;
        }
        for first in (0..self.problem.sizes[0]).step_by(self.rows) {
            let is_smaller = first + self.rows > self.problem.sizes[0];
            let piece = if is_smaller { self.pieces.last() } else { self.pieces.first() };
            let Some(Piece { product, copies: [a_copier, c_copier], adder }) = piece else { return Ok(false) };
            let a_row = if self.problem.transposes[0] { 1 } else { self.problem.lines[0] };
            let a = a + (first * a_row * SIZE) as u64;
            let c = c + (first * self.problem.lines[2] * self.problem.types.result.size()) as u64;
            if let Some(copier) = a_copier {
                // SAFETY: as above.
                unsafe { copier.run(gpu, queue, [a, to_a]) }?;
            }
            let operands = [
                if a_copier.is_some() { to_a } else { a },
                if self.b_copier.is_some() { to_b } else { b },
                if c_copier.is_some() { to_c } else { c },
            ];
            // SAFETY: as above.
            if !unsafe { product.run(gpu, queue, operands, product_workspace, adds && c_copier.is_none()) }? {
                return Ok(false);
            }
            if let Some(copier) = if adds { adder } else { c_copier } {
                // SAFETY: as above.
                unsafe { copier.run(gpu, queue, [to_c, c]) }?;
            }
        }
        Ok(true)
    }
}
