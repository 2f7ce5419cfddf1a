//! Matrix products by cuBLASLt, where it is installed.
//!
//! The library's matrices are column-major. A row-major matrix is the transpose of a column-major one, so it computes
//! `cᵀ = bᵀ aᵀ`. Leading dimensions become a strided batch, and rows of a batch that shares `b` are one matrix.
//!
//! Results depend only on shapes and inputs: the algorithm is the first one that the library suggests, with a limit on
//! its workspace, and without reductions in arbitrary order. It is chosen once for each shape and kind of GPU.

use super::cublaslt::{Algorithm, CublasLt, Described, ProductType, Stored};
use super::draft::PACK_BYTES;
use super::gpu::{Gpu, GpuError};
use super::offsets::{Walk, merge_dims};
use super::per_gpu::PerGpu;
use super::queue::Queue;
use crate::device::layout::TensorLayout;
use compiler::op::MatMul;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Alignment in bytes of the workspace.
pub(super) const WORKSPACE_ALIGNMENT: u64 = 256;

/// Calls into which leading dimensions that are no strided batch may be divided.
const MOST_CALLS: usize = 64;

/// Matrix products `c = a b` of row-major matrices.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    pub types: ProductType,
    /// Rows of `c`, columns of `c`, and terms of a sum.
    pub sizes: [usize; 3],
    /// Whether `a` and `b` are stored transposed.
    pub transposes: [bool; 2],
    /// Elements from one stored row to the next, of a, b and c.
    pub lines: [usize; 3],
    pub batch: usize,
    /// Elements from one matrix to the next, of a, b and c.
    strides: [usize; 3],
    /// Alignment of each operand at the start of a call.
    alignments: [u32; 3],
}

/// A product on all GPUs that share its kernel.
pub struct LibraryProduct {
    problem: Problem,
    /// Bytes at which each call starts, of a, b and c.
    calls: Vec<[usize; 3]>,
    /// Bytes of the workspace without alignment.
    workspace: usize,
    /// `None` where the library cannot compute it.
    descriptions: PerGpu<Option<Described>>,
}

/// The most workspace that an algorithm may use, as the library recommends.
fn workspace_limit(gpu: &Gpu) -> usize {
    if gpu.info().architecture.major >= 9 { 32 << 20 } else { 4 << 20 }
}

/// Bytes of memory that has an aligned workspace wherever it starts.
pub(super) fn aligned_workspace(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { bytes + WORKSPACE_ALIGNMENT as usize - 1 }
}

impl Problem {
    /// The product of an op, and where its calls start. `None` if it takes too many calls.
    fn of(op: &MatMul, a: &TensorLayout, b: &TensorLayout, c: &TensorLayout) -> Option<(Problem, Vec<[usize; 3]>)> {
        let batch_rank = c.shape.len().checked_sub(2)?;
        let (mut rows, columns) = (c.shape[batch_rank], c.shape[batch_rank + 1]);
        let terms = a.shape[a.shape.len() - if op.transpose_a { 2 } else { 1 }];
        let walk = |layout: &TensorLayout, volume: usize| {
            let mut walk = Walk::broadcast(&layout.shape[..layout.shape.len() - 2], &c.shape[..batch_rank]);
            walk.steps.iter_mut().for_each(|step| *step *= volume as isize);
            walk
        };
        let walks = [walk(a, rows * terms), walk(b, terms * columns), walk(c, rows * columns)];
        let dims = merge_dims(&c.shape[..batch_rank], &walks);
        let mut dims: Vec<(usize, [usize; 3])> =
            dims.into_iter().map(|(size, steps)| (size, [0, 1, 2].map(|at| steps[at].unsigned_abs()))).collect();
        if let Some(&(size, steps)) = dims.last().filter(|_| !op.transpose_a)
            && steps == [rows * terms, 0, rows * columns]
        {
            rows *= size;
            dims.pop();
        }
        // The largest of the leading dimensions is the batch.
        let largest = (0..dims.len()).max_by_key(|&at| dims[at].0);
        let (batch, strides) = largest.map_or((1, [0; 3]), |at| dims.remove(at));
        if dims.iter().map(|(size, _)| size).product::<usize>() > MOST_CALLS {
            return None;
        }
        let mut calls = vec![[0; 3]];
        for (size, steps) in dims {
            let step = |at: usize| steps[at] * [a, b, c][at].dtype.size();
            let from = |start: [usize; 3], i: usize| [0, 1, 2].map(|at| start[at] + i * step(at));
            calls = calls.iter().flat_map(|&start| (0..size).map(move |i| from(start, i))).collect();
        }
        let aligned = |at: usize| {
            let step = calls.iter().fold(PACK_BYTES, |step, call| step | call[at]);
            1 << step.trailing_zeros().min(PACK_BYTES.trailing_zeros())
        };
        let alignments = [0, 1, 2].map(aligned);
        let transposes = [op.transpose_a, op.transpose_b];
        let sizes = [rows, columns, terms];
        let lines = [if op.transpose_a { rows } else { terms }, if op.transpose_b { terms } else { columns }, columns];
        let types = ProductType { dtype: a.dtype, result: c.dtype, tf32: false };
        Some((Problem { types, sizes, transposes, lines, batch, strides, alignments }, calls))
    }

    /// The column-major matrices `bᵀ`, `aᵀ` and `cᵀ` as they are stored.
    fn stored(&self) -> [Stored; 3] {
        let ([rows, columns, terms], [a_transposed, b_transposed]) = (self.sizes, self.transposes);
        let stored = |operand: usize, size: [usize; 2]| {
            let (batch, alignment) = (self.batch, self.alignments[operand]);
            Stored { size, line: self.lines[operand], batch, stride: self.strides[operand], alignment }
        };
        let b = if b_transposed { [terms, columns] } else { [columns, terms] };
        let a = if a_transposed { [rows, terms] } else { [terms, rows] };
        [stored(1, b), stored(0, a), stored(2, [columns, rows])]
    }

    /// The product on a GPU, with the algorithm that its kind uses for the problem.
    fn describe(&self, gpu: &Gpu, library: &CublasLt, workspace: usize) -> Option<Described> {
        /// By problem, product name of the GPU and limit of the workspace.
        type AlgorithmCache = HashMap<(Problem, String, usize), Option<(Algorithm, usize)>>;
        static ALGORITHMS: Mutex<Option<AlgorithmCache>> = Mutex::new(None);
        let mut algorithms = ALGORITHMS.lock();
        let algorithms = algorithms.get_or_insert_default();
        let key = (self.clone(), gpu.info().name.clone(), workspace);
        let algorithm = match algorithms.get(&key) {
            Some(None) => return None,
            Some(algorithm) => *algorithm,
            None => None,
        };
        let ([a_transposed, b_transposed], stored) = (self.transposes, self.stored());
        gpu.bind().ok()?;
        let description =
            library.describe(self.types, [b_transposed, a_transposed], &stored, algorithm, workspace).ok();
        algorithms.insert(key, description.as_ref().map(Described::algorithm));
        description
    }
}

impl LibraryProduct {
    /// `None` if the library is not there, or cannot compute the product on this GPU. With `tf32`, inputs of f32 may be
    /// rounded to TF32.
    pub fn new(gpu: &Gpu, op: &MatMul, [a, b, c]: [&TensorLayout; 3], tf32: bool) -> Option<LibraryProduct> {
        if [a, b, c].into_iter().any(|operand| operand.is_empty()) {
            return None;
        }
        let (mut problem, calls) = Problem::of(op, a, b, c)?;
        problem.types.tf32 = tf32;
        LibraryProduct::of(gpu, problem, calls)
    }

    /// The product of such matrices.
    pub(super) fn of(gpu: &Gpu, problem: Problem, calls: Vec<[usize; 3]>) -> Option<LibraryProduct> {
        let library = gpu.cublaslt()?;
        let first = problem.describe(gpu, library, workspace_limit(gpu))?;
        let workspace = first.workspace;
        let descriptions = PerGpu::default();
        descriptions.of(gpu).get_or_init(|| Some(first));
        Some(LibraryProduct { problem, calls, workspace, descriptions })
    }

    /// The matrices, if it is one call.
    pub(super) fn single(&self) -> Option<&Problem> {
        (self.calls.len() == 1).then_some(&self.problem)
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        aligned_workspace(self.workspace)
    }

    /// The product on a GPU, which is described on first use there.
    fn on<'a>(&'a self, gpu: &'a Gpu) -> Option<(&'a CublasLt, &'a Described)> {
        let library = gpu.cublaslt()?;
        let describe = || {
            let limit = workspace_limit(gpu);
            let description = self.problem.describe(gpu, library, limit)?;
            // Another kind of GPU may want more than the memory plan has.
            if description.workspace <= self.workspace {
                return Some(description);
            }
            self.problem.describe(gpu, library, self.workspace)
        };
        Some((library, self.descriptions.of(gpu).get_or_init(describe).as_ref()?))
    }

    /// Whether the library computes the product on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        self.on(gpu).is_some()
    }

    /// Queues the product, added to `c` or not. False if the library cannot compute it on this GPU or at these
    /// addresses of a, b and c.
    ///
    /// # Safety
    ///
    /// The addresses are of this GPU and have the sizes of the product's operands and of its workspace.
    pub unsafe fn run(
        &self,
        gpu: &Gpu,
        queue: &Queue,
        addresses: [u64; 3],
        workspace: u64,
        adds: bool,
    ) -> Result<bool, GpuError> {
        let is_aligned = |(address, alignment): (u64, u32)| address.is_multiple_of(u64::from(alignment));
        let Some((library, description)) =
            self.on(gpu).filter(|_| addresses.into_iter().zip(self.problem.alignments).all(is_aligned))
        else {
            return Ok(false);
        };
        gpu.bind()?;
        let workspace = match description.workspace {
            0 => 0,
            _ => workspace.next_multiple_of(WORKSPACE_ALIGNMENT),
        };
        for call in &self.calls {
            let [a, b, c] = [0, 1, 2].map(|at| addresses[at] + call[at] as u64);
            // SAFETY: the context is bound, the caller passes the memory, and calls stay within it. Alignment was checked.
            unsafe { library.multiply(description, [b, a, c], adds, workspace, queue) }?;
        }
        Ok(true)
    }
}
