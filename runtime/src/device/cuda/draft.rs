//! A kernel's text while it is written, with the arguments that it will take.

use super::element::stored;
use super::prelude::{ENTRY, PRELUDE};
use super::recipe::{At, Launch};
use compiler::tensor::DType;

/// Threads of a block where every thread works for itself.
pub const THREADS: u32 = 256;

/// More blocks than this do not make a GPU busier: their threads take several elements each.
const MOST_BLOCKS: usize = 16384;

/// Indices beyond this are of 64 bits.
const NARROW: usize = 1 << 31;

/// A kernel's text while it is written.
#[derive(Default)]
pub struct Draft {
    parameters: Vec<String>,
    arguments: Vec<At>,
    body: String,
    is_wide: bool,
}

impl Draft {
    /// A kernel that indexes no more than `reach` elements of any operand.
    pub fn new(reach: usize) -> Draft {
        Draft { is_wide: reach >= NARROW, ..Draft::default() }
    }

    /// Takes the address of a tensor to read, under a name.
    pub fn reads(&mut self, name: &str, dtype: DType, at: At) {
        self.parameters.push(format!("const {}* __restrict__ {name}", stored(dtype)));
        self.arguments.push(at);
    }

    /// Takes the address of a tensor to write, under a name. It may be one that is read as well.
    pub fn writes(&mut self, name: &str, dtype: DType, at: At) {
        self.parameters.push(format!("{}* {name}", stored(dtype)));
        self.arguments.push(at);
    }

    /// Takes the fault cell, under the name `fault`.
    pub fn faults(&mut self, at: At) {
        self.parameters.push("Fault* fault".to_string());
        self.arguments.push(at);
    }

    /// Adds lines to the body.
    pub fn add(&mut self, lines: &str) {
        self.body.push_str(lines.trim_end());
        self.body.push('\n');
    }

    /// A launch in which `i` goes over `count` elements, in any order.
    pub fn each(mut self, count: usize, lines: &str) -> Launch {
        self.add(&format!(
            "for (at i = (at)blockIdx.x * blockDim.x + threadIdx.x; i < (at){count}; i += (at)gridDim.x * blockDim.x) {{\n{lines}\n}}"
        ));
        let blocks = count.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS);
        self.launch(blocks, THREADS)
    }

    /// A launch in which each of `count` blocks has an `i`; the threads of a block are as many as `size` elements want.
    pub fn block_each(mut self, count: usize, size: usize, lines: &str) -> Launch {
        self.add(&format!("for (at i = blockIdx.x; i < (at){count}; i += gridDim.x) {{\n{lines}\n}}"));
        self.launch(count.clamp(1, NARROW - 1), threads_for(size))
    }

    /// A launch of this geometry.
    pub fn launch(self, blocks: usize, threads: u32) -> Launch {
        let at = if self.is_wide { "unsigned long long" } else { "unsigned int" };
        let text = format!(
            "typedef {at} at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}({}) {{\n{}}}\n",
            self.parameters.join(", "),
            self.body
        );
        let blocks = u32::try_from(blocks).expect("the number of blocks was limited");
        Launch { text: text.into(), blocks, threads, arguments: self.arguments }
    }
}

/// The threads of a block that goes over `size` elements together.
pub fn threads_for(size: usize) -> u32 {
    size.next_power_of_two().clamp(32, THREADS as usize) as u32
}
