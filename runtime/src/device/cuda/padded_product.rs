//! Large products of 16-bit matrices whose rows are not aligned to 16 bytes, such as those of a vocabulary of 50,257.
//! Tensor cores read such rows several times slower, so they work on copies with longer rows, a block of `c`'s rows
//! after the other, to bound the memory of the copies.

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

/// Elements of which the length of each row is a multiple.
const ALIGNED: usize = PACK_BYTES / SIZE;

/// Bytes that the copies of an operand may take.
pub const MOST_BYTES: usize = 64 << 20;

/// Operations for each copied byte from which on copies cost less than they save.
const LEAST_FLOPS: usize = 100;

/// A block of `rows` rows of `width` elements.
#[derive(Clone, Copy)]
struct Block {
    rows: usize,
    width: usize,
    /// Elements from one row to the next, before and after.
    lines: [usize; 2],
}

/// The copy of a block, with its kernel by GPU.
struct Copier {
    launch: Launch,
    functions: Vec<OnceLock<Function>>,
}

/// Rows of `c` that are computed together.
struct Piece {
    product: LibraryProduct,
    /// The copies of its part of a, and to c.
    copies: [Option<Copier>; 2],
}

/// A product in pieces of equal size, but for the last.
pub struct PaddedProduct {
    whole: Problem,
    /// Rows of a piece.
    rows: usize,
    pieces: Vec<Piece>,
    /// The copy of b.
    of_b: Option<Copier>,
    /// Where the copies of a, b and c start in the workspace, and where the product's own does.
    offsets: [usize; 4],
}

impl Copier {
    /// What the copy does not write of a longer row is 0.
    fn new(gpus: usize, block: Block) -> Copier {
        let Block { rows, width, lines: [from, to] } = block;
        let mut draft = KernelBuilder::new(rows * from.max(to));
        draft.reads("from", DType::U16, At::input(0));
        draft.writes("to", DType::U16, At::output(0));
        let count = rows * to;
        let lines = format!(
            "at row = pack * {ALIGNED} / {to}, column = pack * {ALIGNED} % {to};\nPack<u16, {ALIGNED}> elements;\n\
             #pragma unroll\nfor (int e = 0; e < {ALIGNED}; e++) {{\n\
             elements.of[e] = row < {rows} && column < {width} ? from[row * (at){from} + column] : 0;\n\
             if (++column == {to}) {{ column = 0; row++; }}\n}}\n\
             if ((pack + 1) * {ALIGNED} <= (at){count}) *(Pack<u16, {ALIGNED}>*)(to + pack * {ALIGNED}) = elements;\n\
             else for (int e = 0; e < (int)({count} - pack * {ALIGNED}); e++) to[pack * {ALIGNED} + e] = elements.of[e];"
        );
        let launch = draft.each_pack(count.next_multiple_of(ALIGNED), ALIGNED, &lines);
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

impl PaddedProduct {
    /// `None` if the product is as fast without copies. The copies of an operand take at most so many bytes.
    pub fn new(gpu: &Gpu, gpus: usize, product: &LibraryProduct, most_bytes: usize) -> Option<PaddedProduct> {
        let whole = product.single()?.clone();
        let ([rows, columns, terms], [a_turned, b_turned]) = (whole.sizes, whole.transposes);
        let is_padded = whole.lines.map(|line| !line.is_multiple_of(ALIGNED));
        let elements = [rows * terms, terms * columns, rows * columns];
        let copied: usize = (0..3).filter(|&at| is_padded[at]).map(|at| elements[at] * SIZE).sum();
        let suits = is_half(whole.types.dtype) && whole.batch == 1 && gpu.info().architecture.major >= 8;
        if !suits || copied == 0 || 2 * rows * columns * terms / copied < LEAST_FLOPS {
            return None;
        }
        let padded = |size: usize| size.next_multiple_of(ALIGNED);
        let b_lines = if b_turned { columns } else { terms };
        let b_bytes = if is_padded[1] { b_lines * padded(whole.lines[1]) * SIZE } else { 0 };
        // Bytes of the copies of a and c for each row of c.
        let each = [(is_padded[0], padded(terms)), (is_padded[2], padded(columns))];
        let most = each.into_iter().filter(|(is_padded, _)| *is_padded).map(|(_, line)| line * SIZE).max();
        let limit = most.map_or(rows, |bytes| most_bytes / bytes / ALIGNED * ALIGNED).min(rows);
        if limit == 0 || b_bytes > most_bytes {
            return None;
        }
        let size = rows.div_ceil(rows.div_ceil(limit)).next_multiple_of(ALIGNED).min(limit);
        let block_b = Block { rows: b_lines, width: whole.lines[1], lines: [whole.lines[1], padded(whole.lines[1])] };
        let piece = |rows: usize| {
            let mut problem = whole.clone();
            problem.sizes[0] = rows;
            if is_padded[1] {
                problem.lines[1] = padded(whole.lines[1]);
            }
            let (a_rows, a_width) = if a_turned { (terms, rows) } else { (rows, terms) };
            let block_a = Block { rows: a_rows, width: a_width, lines: [whole.lines[0], padded(a_width)] };
            let block_c = Block { rows, width: columns, lines: [padded(columns), columns] };
            if is_padded[0] {
                problem.lines[0] = block_a.lines[1];
            }
            if is_padded[2] {
                problem.lines[2] = block_c.lines[0];
            }
            let product = LibraryProduct::of(gpu, gpus, problem, vec![[0; 3]])?;
            let copier = |is_padded: bool, block: Block| is_padded.then(|| Copier::new(gpus, block));
            Some(Piece { product, copies: [copier(is_padded[0], block_a), copier(is_padded[2], block_c)] })
        };
        let rest = rows % size;
        let pieces = [size, rest].into_iter().filter(|&rows| rows > 0).map(piece).collect::<Option<Vec<_>>>()?;
        let of_b = is_padded[1].then(|| Copier::new(gpus, block_b));
        let a_bytes = match (is_padded[0], a_turned) {
            (false, _) => 0,
            (true, true) => terms * padded(size) * SIZE,
            (true, false) => size * padded(terms) * SIZE,
        };
        let c_bytes = if is_padded[2] { size * padded(columns) * SIZE } else { 0 };
        let mut offsets = [0; 4];
        for (at, bytes) in [a_bytes, b_bytes, c_bytes].into_iter().enumerate() {
            offsets[at + 1] = (offsets[at] + bytes).next_multiple_of(WORKSPACE_ALIGNMENT as usize);
        }
        Some(PaddedProduct { whole, rows: size, pieces, of_b, offsets })
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        let own = self.pieces.iter().map(|piece| piece.product.workspace()).max().unwrap_or(0);
        aligned_workspace(self.offsets[3] + own)
    }

    /// Whether the library computes the product on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        let copiers = self.pieces.iter().flat_map(|piece| &piece.copies).chain([&self.of_b]).flatten();
        self.pieces.iter().all(|piece| piece.product.works_on(gpu))
            && copiers.into_iter().all(|copier| copier.function(gpu).is_ok())
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
            let is_rest = first + self.rows > self.whole.sizes[0];
            let Some(Piece { product, copies: [of_a, of_c] }) =
                (if is_rest { self.pieces.last() } else { self.pieces.first() })
            else {
                return Ok(false);
            };
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
