//! The CPU: every core op as a kernel over plain byte buffers.
//!
//! A [`Kernel`] is one op at fixed shapes. [`Kernel::new`](table) picks a fast kernel where there is one, else the op's
//! reference rule. Everything that depends on shapes is worked out there; a fast kernel then allocates nothing of its
//! own and takes its scratch from `workspace`. A kernel runs on the thread that calls it and joins numbers in an order that
//! depends on shapes alone, so the same inputs give the same bits.
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

pub mod batch_norm;
pub mod cast;
pub mod chain;
pub mod conv;
pub mod cross_entropy;
pub mod depthwise;
pub mod dropout;
pub mod elementwise;
pub mod function;
pub mod gather;
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
pub mod pool;
pub mod real;
pub mod reduce;
pub mod rnn;
pub mod softmax;
pub mod square;
pub mod sum;
pub mod table;
pub mod walk;
mod wide;

pub use super::layout::Layout;
use compiler::op::table::rule;
use compiler::op::{KernelError, Op};
use compiler::tensor::fact::Fact;
use compiler::tensor::view::{View, ViewMut};

/// Alignment of buffers and of the workspace in bytes; one cache line, and the widest vector.
pub const ALIGNMENT: usize = 64;

/// The work of a fast kernel: inputs, outputs, workspace. Lengths and alignment have been checked.
pub type Body = Box<dyn Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8]) -> Result<(), KernelError> + Send + Sync>;

/// A fast kernel.
pub struct Fast {
    /// Bytes of scratch that `body` gets.
    pub workspace: usize,
    /// What it does.
    pub body: Body,
}

/// One op at fixed shapes, ready to run.
pub struct Kernel {
    op: Op,
    inputs: Vec<Layout>,
    outputs: Vec<Layout>,
    fast: Option<Fast>,
}

impl Fast {
    /// A kernel that needs no scratch.
    pub fn new<F>(body: F) -> Fast
    where
        F: Fn(&[&[u8]], &mut [&mut [u8]], &mut [u8]) -> Result<(), KernelError> + Send + Sync + 'static,
    {
        Fast { workspace: 0, body: Box::new(body) }
    }

    /// The same kernel with `bytes` of scratch.
    pub fn with_workspace(self, bytes: usize) -> Fast {
        Fast { workspace: bytes.next_multiple_of(ALIGNMENT), ..self }
    }
}

impl Kernel {
    /// A kernel of these parts; without a fast one it runs the op's reference rule.
    pub fn from_parts(op: Op, inputs: Vec<Layout>, outputs: Vec<Layout>, fast: Option<Fast>) -> Kernel {
        Kernel { op, inputs, outputs, fast }
    }

    /// Bytes of scratch for [`run`](Kernel::run), to be aligned to [`ALIGNMENT`].
    pub fn workspace(&self) -> usize {
        self.fast.as_ref().map_or(0, |f| f.workspace)
    }

    /// Whether this is the op's reference rule, for want of a fast kernel.
    pub fn is_reference(&self) -> bool {
        self.fast.is_none()
    }

    /// The name of the op.
    pub fn name(&self) -> &'static str {
        rule(&self.op).name()
    }

    /// Runs on little-endian, row-major buffers and writes every element of every output.
    ///
    /// Buffers that are not aligned for their element type, or too little workspace, are served by the reference rule.
    /// Panics when a buffer has not the bytes of its fact: a bug of the caller.
    pub fn run(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]], workspace: &mut [u8]) -> Result<(), KernelError> {
        let given = inputs.iter().map(|b| b.len()).chain(outputs.iter().map(|b| b.len()));
        let expected = self.inputs.iter().chain(&self.outputs).map(Layout::bytes);
        assert!(given.eq(expected), "{}: buffers have not the bytes of their facts", self.name());
        match &self.fast {
            Some(fast) if self.fits(inputs, outputs, workspace) => {
                (fast.body)(inputs, outputs, &mut workspace[..fast.workspace])
            }
            _ => self.reference(inputs, outputs),
        }
    }

    fn fits(&self, inputs: &[&[u8]], outputs: &[&mut [u8]], workspace: &[u8]) -> bool {
        let aligned = |layout: &Layout, at: *const u8| (at as usize).is_multiple_of(layout.dtype.size());
        let scratch = self.workspace();
        self.inputs.iter().zip(inputs).all(|(l, b)| aligned(l, b.as_ptr()))
            && self.outputs.iter().zip(outputs).all(|(l, b)| aligned(l, b.as_ptr()))
            && (scratch == 0 || workspace.len() >= scratch && (workspace.as_ptr() as usize).is_multiple_of(ALIGNMENT))
    }

    fn reference(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]]) -> Result<(), KernelError> {
        let views: Vec<View<'_>> =
            self.inputs.iter().zip(inputs).map(|(l, bytes)| View::new(l.dtype, &l.shape, bytes)).collect();
        let mut written: Vec<ViewMut<'_>> =
            self.outputs.iter().zip(outputs).map(|(l, bytes)| ViewMut::new(l.dtype, &l.shape, bytes)).collect();
        rule(&self.op).reference(&views, &mut written)
    }
}
