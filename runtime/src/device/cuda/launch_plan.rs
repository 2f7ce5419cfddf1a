//! The launch plan of an op on a GPU.

use compiler::op::KernelError;
use std::sync::Arc;

/// The memory that contains an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Input(usize),
    Output(usize),
    Scratch,
    Fault,
    /// [`COUNTERS`] words of the stream, which are zero between launches.
    Counters,
}

/// Words in which blocks count themselves, so that the last one can finish what all began.
pub const COUNTERS: usize = 1 << 11;

/// The address of an argument, relative to its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    pub base: Base,
    /// Offset in bytes.
    pub offset: usize,
}

impl At {
    pub fn input(i: usize) -> At {
        At { base: Base::Input(i), offset: 0 }
    }

    pub fn output(i: usize) -> At {
        At { base: Base::Output(i), offset: 0 }
    }

    pub fn scratch(offset: usize) -> At {
        At { base: Base::Scratch, offset }
    }

    /// Advances the offset by `bytes`.
    pub fn after(self, bytes: usize) -> At {
        At { offset: self.offset + bytes, ..self }
    }
}

/// One kernel launch. The launches of an op run in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Kernel source, with entry point [`ENTRY`](super::prelude::ENTRY).
    pub text: Arc<str>,
    /// Blocks of the one-dimensional grid.
    pub blocks: u32,
    /// Threads per block, a power of two.
    pub threads: u32,
    pub arguments: Vec<At>,
}

/// An op at concrete shapes, as launches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchPlan {
    pub launches: Vec<Launch>,
    /// Scratch bytes shared by the launches.
    pub scratch: usize,
}

impl LaunchPlan {
    pub fn of(launch: Launch) -> LaunchPlan {
        LaunchPlan { launches: vec![launch], scratch: 0 }
    }

    /// Allocates scratch, aligned for any element type.
    pub fn take(&mut self, bytes: usize) -> At {
        let at = At::scratch(self.scratch);
        self.scratch += bytes.next_multiple_of(256);
        at
    }
}

/// Written by a kernel that rejects its input values; all zero otherwise. The layout is equal on host and device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// 0: none; 1: index out of range; 2: label out of range.
    pub kind: u64,
    pub value: i64,
    /// The axis size or number of classes.
    pub size: u64,
}

impl Fault {
    /// Decodes a cell copied from the GPU.
    pub fn of(cell: &[u8; size_of::<Fault>()]) -> Fault {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| cell[8 * at + byte]));
        Fault { kind: word(0), value: word(1) as i64, size: word(2) }
    }

    /// The error of an op whose kernel wrote the cell.
    pub fn error(self) -> Option<KernelError> {
        match self.kind {
            0 => None,
            1 => Some(KernelError::Index { index: self.value, size: self.size as usize }),
            _ => Some(KernelError::Label { label: self.value, classes: self.size as usize }),
        }
    }
}
