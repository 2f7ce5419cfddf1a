//! What an op comes to on a GPU: launches in order.

use std::sync::Arc;

/// Where an argument lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// In an input of the op.
    Input(usize),
    /// In an output of the op.
    Output(usize),
    /// In the recipe's scratch.
    Scratch,
    /// The op's [`Fault`] cell.
    Fault,
}

/// The address of an argument: so many bytes behind the begin of its base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Where it lies.
    pub base: Base,
    /// Bytes behind its begin.
    pub offset: usize,
}

impl At {
    /// The begin of an input.
    pub fn input(i: usize) -> At {
        At { base: Base::Input(i), offset: 0 }
    }

    /// The begin of an output.
    pub fn output(i: usize) -> At {
        At { base: Base::Output(i), offset: 0 }
    }

    /// A place in the scratch.
    pub fn scratch(offset: usize) -> At {
        At { base: Base::Scratch, offset }
    }

    /// So many bytes further on.
    pub fn after(self, bytes: usize) -> At {
        At { offset: self.offset + bytes, ..self }
    }
}

/// One run of a kernel. All launches of an op run in their order, each after the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The text of the kernel, whose entry is [`ENTRY`](super::prelude::ENTRY).
    pub text: Arc<str>,
    /// Blocks of the grid, which has one dimension.
    pub blocks: u32,
    /// Threads of a block, a power of two.
    pub threads: u32,
    /// The addresses it takes, in order.
    pub arguments: Vec<At>,
}

/// What an op comes to at fixed shapes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchPlan {
    /// What runs, in order.
    pub launches: Vec<Launch>,
    /// Bytes of scratch that the launches share.
    pub scratch: usize,
}

impl LaunchPlan {
    /// One launch without scratch.
    pub fn of(launch: Launch) -> LaunchPlan {
        LaunchPlan { launches: vec![launch], scratch: 0 }
    }

    /// Takes so many bytes of scratch, aligned for any element.
    pub fn take(&mut self, bytes: usize) -> At {
        let at = At::scratch(self.scratch);
        self.scratch += bytes.next_multiple_of(256);
        at
    }
}

/// What a kernel writes when it refuses its values; all zero where it does not. It lies on the device as it lies here.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// 0: none; 1: an index outside its axis; 2: a label outside the classes.
    pub kind: u64,
    /// The index or the label.
    pub value: i64,
    /// The size of the axis, or the number of classes.
    pub size: u64,
}
