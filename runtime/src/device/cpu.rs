//! The CPU: every core op as a kernel over plain byte buffers.
//!
//! A [`Kernel`] is one op at concrete shapes. [`Kernel::new`](table) picks a fast kernel if there is one, else the op's
//! reference implementation. All shape-dependent work happens there; a fast kernel allocates nothing and takes scratch
//! memory from `workspace`. A kernel runs on the calling thread and combines numbers in an order that depends only on
//! shapes, so equal inputs give bitwise equal results.
//!
//! ```
//! use compiler::op::{Binary, Op};
//! use compiler::tensor::{DType, fact::Fact};
//! use runtime::device::cpu::Kernel;
//!
//! let fact = Fact::of(DType::F32, &[2]);
//! let add = Kernel::new(&Op::Binary(Binary::Add), &[fact.clone(), fact.clone()], &[fact]);
//! let (a, mut y) = ([1.0f32, 2.0], [0.0f32; 2]);
//! let a = bytemuck::cast_slice(&a);
//! add.run(&[a, a], &mut [bytemuck::cast_slice_mut(&mut y)], &mut []).unwrap();
//! assert_eq!(y, [2.0, 4.0]);
//! ```

pub mod arithmetic;
pub mod attention;
pub mod batch_norm;
pub mod cast;
pub mod chain;
pub mod conv;
pub mod conv_role;
pub mod cross_entropy;
pub mod depthwise;
pub mod device;
pub mod dropout;
pub mod elementwise;
#[cfg(target_arch = "x86_64")]
pub mod few;
pub mod gather;
pub mod grouped_matmul;
pub mod gru;
pub mod half;
#[cfg(target_arch = "x86_64")]
pub mod implicit;
pub mod layer_norm;
pub mod lstm;
pub mod math;
pub mod matmul;
pub mod movement;
pub mod optimizer;
#[cfg(target_arch = "x86_64")]
pub mod panels;
pub mod patches;
mod planes;
pub mod pool;
pub mod real;
mod recurrent;
pub mod reduce;
pub mod rnn;
pub mod softmax;
pub mod square;
pub mod sum;
pub mod table;
pub mod walk;
mod wide;
#[cfg(target_arch = "x86_64")]
pub mod winograd;

pub use super::layout::TensorLayout;
use super::layout::accumulation_type;
use compiler::op::table::rule;
use compiler::op::{KernelError, Op};
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;
use compiler::tensor::view::{View, ViewMut};
use std::sync::Arc;

/// Alignment of buffers and of the workspace in bytes: one cache line, which is also the widest vector.
pub const ALIGNMENT: usize = 64;

/// A fast kernel's function of inputs, outputs and workspace. Lengths and alignment have been checked.
pub type Body = Box<dyn Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8]) -> Result<(), KernelError> + Send + Sync>;

/// A function that writes the first term of a sum, or adds to it if the flag is set. The sum has the accumulation type.
pub type TermBody = Box<dyn Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8], bool) -> Result<(), KernelError> + Send + Sync>;

pub struct FastKernel {
    pub workspace: usize,
    pub body: Body,
    /// Writes the single output as a term of a sum.
    pub term: Option<TermBody>,
}

/// One op at concrete shapes.
pub struct Kernel {
    op: Op,
    inputs: Vec<TensorLayout>,
    outputs: Vec<TensorLayout>,
    fast: Option<FastKernel>,
}

/// What a body returns: nothing, if it fits all values of its inputs.
pub trait Outcome {
    fn result(self) -> Result<(), KernelError>;
}

impl Outcome for () {
    fn result(self) -> Result<(), KernelError> {
        Ok(())
    }
}

impl Outcome for Result<(), KernelError> {
    fn result(self) -> Result<(), KernelError> {
        self
    }
}

impl FastKernel {
    /// A kernel without scratch.
    pub fn new<F, R: Outcome>(body: F) -> FastKernel
    where
        F: Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8]) -> R + Send + Sync + 'static,
    {
        let body: Body = Box::new(move |inputs, outputs, workspace| body(inputs, outputs, workspace).result());
        FastKernel { workspace: 0, body, term: None }
    }

    /// A kernel whose body receives a flag to accumulate; the flag is only set if `can_add`.
    pub fn adding<F, R: Outcome>(can_add: bool, body: F) -> FastKernel
    where
        F: Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8], bool) -> R + Send + Sync + 'static,
    {
        let shared = Arc::new(body);
        let term = shared.clone();
        let term: TermBody =
            Box::new(move |inputs, outputs, workspace, adds| term(inputs, outputs, workspace, adds).result());
        FastKernel {
            term: can_add.then_some(term),
            ..FastKernel::new(move |inputs, outputs, workspace| shared(inputs, outputs, workspace, false))
        }
    }

    /// Sets the scratch bytes.
    pub fn with_workspace(self, bytes: usize) -> FastKernel {
        FastKernel { workspace: bytes.next_multiple_of(ALIGNMENT), ..self }
    }
}

impl Kernel {
    /// Without a fast kernel it runs the op's reference implementation.
    pub fn from_parts(
        op: Op,
        inputs: Vec<TensorLayout>,
        outputs: Vec<TensorLayout>,
        fast: Option<FastKernel>,
    ) -> Kernel {
        Kernel { op, inputs, outputs, fast }
    }

    /// Scratch bytes for [`run`](Kernel::run), aligned to [`ALIGNMENT`].
    pub fn workspace(&self) -> usize {
        self.fast.as_ref().map_or(0, |f| f.workspace)
    }

    /// True if there is no fast kernel.
    pub fn is_reference(&self) -> bool {
        self.fast.is_none()
    }

    /// True if it can accumulate into its output.
    pub fn can_accumulate(&self) -> bool {
        self.fast.as_ref().is_some_and(|fast| fast.term.is_some())
    }

    /// Writes the output as the first term of a sum in its accumulation type, or with `adds` adds it to the sum. Panics if
    /// the kernel does not [accumulate](Kernel::can_accumulate), or if buffers or workspace are not aligned.
    pub fn run_term(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        workspace: &mut [u8],
        adds: bool,
    ) -> Result<(), KernelError> {
        self.check_lengths(inputs, outputs, accumulation_type);
        assert!(self.can_run_fast(inputs, outputs, workspace), "{}: buffers are not aligned", self.name());
        match self.fast.as_ref().and_then(|fast| Some((fast.workspace, fast.term.as_ref()?))) {
            Some((scratch, term)) => term(inputs, outputs, &mut workspace[..scratch], adds),
            None => panic!("{}: the kernel does not accumulate", self.name()),
        }
    }

    /// The element type of each output in memory is `output_type` of its type.
    fn check_lengths(&self, inputs: &[&[u8]], outputs: &[&mut [u8]], output_type: fn(DType) -> DType) {
        let lengths = inputs.iter().map(|b| b.len()).chain(outputs.iter().map(|b| b.len()));
        let output = |layout: &TensorLayout| layout.len() * output_type(layout.dtype).size();
        let expected = self.inputs.iter().map(TensorLayout::bytes).chain(self.outputs.iter().map(output));
        assert!(lengths.eq(expected), "{}: buffer sizes do not match their facts", self.name());
    }

    pub fn name(&self) -> &'static str {
        rule(&self.op).name()
    }

    /// Runs on little-endian, row-major buffers and writes every element of every output.
    ///
    /// Falls back to the reference if a buffer is not aligned for its element type, or the workspace is too small.
    /// Panics if a buffer length does not match its fact.
    pub fn run(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]], workspace: &mut [u8]) -> Result<(), KernelError> {
        self.check_lengths(inputs, outputs, |dtype| dtype);
        match &self.fast {
            Some(fast) if self.can_run_fast(inputs, outputs, workspace) => {
                (fast.body)(inputs, outputs, &mut workspace[..fast.workspace])
            }
            _ => self.reference(inputs, outputs),
        }
    }

    fn can_run_fast(&self, inputs: &[&[u8]], outputs: &[&mut [u8]], workspace: &[u8]) -> bool {
        let aligned = |layout: &TensorLayout, at: *const u8| (at as usize).is_multiple_of(layout.dtype.size());
        let scratch = self.workspace();
        self.inputs.iter().zip(inputs).all(|(l, b)| aligned(l, b.as_ptr()))
            && self.outputs.iter().zip(outputs).all(|(l, b)| aligned(l, b.as_ptr()))
            && (scratch == 0 || workspace.len() >= scratch && (workspace.as_ptr() as usize).is_multiple_of(ALIGNMENT))
    }

    fn reference(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), KernelError> {
        let views: Vec<View<'_>> =
            self.inputs.iter().zip(inputs).map(|(l, bytes)| View::new(l.dtype, &l.shape, bytes)).collect();
        let mut output_views: Vec<ViewMut<'_>> =
            self.outputs.iter().zip(outputs).map(|(l, bytes)| ViewMut::new(l.dtype, &l.shape, bytes)).collect();
        rule(&self.op).reference(&views, &mut output_views)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::arithmetic::accumulate;
    use super::*;
    use crate::device::buffer::Buffer;
    use bytemuck::{cast_slice, cast_slice_mut};
    use compiler::op::{ConvWeightGrad, MatMul, ScatterAdd, Window};
    use compiler::tensor::Tensor;

    /// Pseudo-random numbers in [-1, 1).
    pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let draw =
            |i: usize| (compiler::op::dropout::mix(seed ^ ((i as u64) << 20)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (0..count).map(draw).collect()
    }

    /// The results of a kernel or chain, which has this function and needs `workspace` bytes.
    pub(crate) fn results(
        kernel: impl Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8]) -> Result<(), KernelError>,
        workspace: usize,
        inputs: &[&Tensor],
        layouts: &[TensorLayout],
    ) -> Vec<Tensor> {
        let inputs: Vec<Buffer> = inputs.iter().map(|tensor| Buffer::host_copy(tensor.bytes())).collect();
        let inputs: Vec<_> = inputs.iter().map(|buffer| buffer.download().unwrap()).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(|bytes| &bytes[..]).collect();
        let mut outputs: Vec<Buffer> = layouts.iter().map(|layout| Buffer::host(layout.bytes())).collect();
        let mut bytes: Vec<&mut [u8]> = outputs.iter_mut().map(Buffer::bytes_mut).collect();
        kernel(&inputs, &mut bytes, Buffer::host(workspace).bytes_mut()).unwrap();
        let tensor = |(layout, bytes): (&TensorLayout, Vec<u8>)| {
            Tensor::new(layout.dtype, layout.shape.clone(), bytes.into()).unwrap()
        };
        layouts.iter().zip(bytes.into_iter().map(|bytes| bytes.to_vec())).map(tensor).collect()
    }

    /// Checks that a kernel accumulates, with the result of a separate write and addition.
    fn assert_accumulates(op: Op, inputs: &[&[u8]], facts: &[Fact]) {
        let outputs = rule(&op).infer(&facts.iter().collect::<Vec<_>>()).unwrap();
        let kernel = Kernel::new(&op, facts, &outputs);
        assert!(kernel.can_accumulate(), "{op:?} {facts:?}");
        let count = outputs[0].bytes().unwrap() as usize / 4;
        let before = numbers(count, 7);
        let (mut separate, mut overwritten, mut accumulated) = (before.clone(), numbers(count, 8), before);
        let mut workspace = Buffer::host(kernel.workspace());
        kernel.run(inputs, &mut [cast_slice_mut(&mut overwritten)], workspace.bytes_mut()).unwrap();
        accumulate(DType::F32, cast_slice(&overwritten), cast_slice_mut(&mut separate));
        kernel.run_term(inputs, &mut [cast_slice_mut(&mut accumulated)], workspace.bytes_mut(), true).unwrap();
        let max = separate.iter().fold(0.0f32, |max, value| max.max(value.abs()));
        let is_near = |(accumulated, separate): (&f32, &f32)| (accumulated - separate).abs() <= 1e-6 * max;
        assert!(accumulated.iter().zip(&separate).all(is_near), "{op:?} {facts:?}");
    }

    #[test]
    fn products_and_scatters_add() {
        for [m, n, k] in
            [[20, 30, 5], [300, 500, 64], [1024, 256, 128], [64, 512, 32], [64, 512, 33], [40, 60, 400], [6, 64, 700]]
        {
            for (transpose_a, transpose_b) in [(false, false), (true, false), (false, true), (true, true)] {
                let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
                let fact = |is_transposed: bool, rows: usize, columns: usize| {
                    Fact::of(DType::F32, &if is_transposed { [columns, rows] } else { [rows, columns] })
                };
                let facts = [fact(transpose_a, m, k), fact(transpose_b, k, n)];
                let op = Op::MatMul(MatMul { transpose_a, transpose_b });
                assert_accumulates(op, &[cast_slice(&a), cast_slice(&b)], &facts);
            }
        }
        // The last two are depthwise, and dilated grouped, which no fast kernel of the others supports.
        for (side, outs, ins, groups, dilation) in [
            (2, 24, 20, 1, 1),
            (2, 70, 40, 1, 1),
            (8, 24, 20, 1, 1),
            (40, 24, 20, 1, 1),
            (9, 12, 12, 12, 1),
            (9, 12, 8, 4, 2),
        ] {
            let (dy, x) = (numbers(2 * outs * side * side, 3), numbers(2 * ins * side * side, 4));
            let facts = [outs, ins].map(|channels| Fact::of(DType::F32, &[2, channels, side, side]));
            let (strides, dilations, pads) = (vec![1, 1], vec![dilation; 2], vec![dilation; 2]);
            let window = Window { strides, pads_begin: pads.clone(), pads_end: pads, dilations };
            let op = ConvWeightGrad { window, groups, kernel: vec![3, 3] };
            assert_accumulates(Op::ConvWeightGrad(op), &[cast_slice(&dy), cast_slice(&x)], &facts);
        }
        let (dy, rows) = (numbers(6 * 10, 5), [3i64, 0, 3, -1, 3, 0]);
        let facts = [Fact::of(DType::F32, &[6, 10]), Fact::of(DType::I64, &[6])];
        let op = Op::ScatterAdd(ScatterAdd { axis: 0, size: 5i64.into() });
        assert_accumulates(op, &[cast_slice(&dy), cast_slice(&rows)], &facts);
    }
}
