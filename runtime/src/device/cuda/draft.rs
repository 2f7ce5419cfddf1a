//! A builder of kernel source and its argument list.

use super::element::stored;
use super::launch_plan::{At, Launch};
use super::prelude::{ENTRY, PRELUDE};
use compiler::tensor::DType;

/// Threads per block for elementwise kernels.
pub const THREADS: u32 = 256;

/// Maximum blocks of an elementwise launch; more do not increase occupancy, so threads loop.
const MOST_BLOCKS: usize = 16384;

/// From this many elements on, indices have 64 bits.
const NARROW: usize = 1 << 31;

#[derive(Default)]
pub struct KernelBuilder {
    parameters: Vec<String>,
    arguments: Vec<At>,
    definitions: String,
    body: String,
    is_wide: bool,
}

impl KernelBuilder {
    /// `max_elements` is the largest element count indexed in any operand.
    pub fn new(max_elements: usize) -> KernelBuilder {
        KernelBuilder { is_wide: max_elements >= NARROW, ..KernelBuilder::default() }
    }

    /// Adds a pointer parameter to read.
    pub fn reads(&mut self, name: &str, dtype: DType, at: At) {
        self.parameters.push(format!("const {}* __restrict__ {name}", stored(dtype)));
        self.arguments.push(at);
    }

    /// Adds a pointer parameter to write. It may alias one that is read.
    pub fn writes(&mut self, name: &str, dtype: DType, at: At) {
        self.parameters.push(format!("{}* {name}", stored(dtype)));
        self.arguments.push(at);
    }

    /// Adds the fault cell as parameter `fault`.
    pub fn faults(&mut self, at: At) {
        self.parameters.push("Fault* fault".to_string());
        self.arguments.push(at);
    }

    /// Appends definitions that come before the kernel.
    pub fn define(&mut self, text: &str) {
        self.definitions.push_str(text);
    }

    /// Appends lines to the body.
    pub fn add(&mut self, lines: &str) {
        self.body.push_str(lines.trim_end());
        self.body.push('\n');
    }

    /// A launch in which `i` covers `count` elements, in any order.
    pub fn each(mut self, count: usize, lines: &str) -> Launch {
        self.add(&format!(
            "for (at i = (at)blockIdx.x * blockDim.x + threadIdx.x; i < (at){count}; i += (at)gridDim.x * blockDim.x) {{\n{lines}\n}}"
        ));
        let blocks = count.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS);
        self.launch(blocks, THREADS)
    }

    /// A launch with one block per `i` in `0..count`, with enough threads for `size` elements.
    pub fn block_each(mut self, count: usize, size: usize, lines: &str) -> Launch {
        self.add(&format!("for (at i = blockIdx.x; i < (at){count}; i += gridDim.x) {{\n{lines}\n}}"));
        self.launch(count.clamp(1, NARROW - 1), threads_for(size))
    }

    pub fn launch(self, blocks: usize, threads: u32) -> Launch {
        let at = if self.is_wide { "unsigned long long" } else { "unsigned int" };
        let text = format!(
            "typedef {at} at;\n{PRELUDE}\n{}extern \"C\" __global__ void {ENTRY}({}) {{\n{}}}\n",
            self.definitions,
            self.parameters.join(", "),
            self.body
        );
        let blocks = u32::try_from(blocks).expect("the number of blocks was limited");
        Launch { text: text.into(), blocks, threads, arguments: self.arguments }
    }
}

/// Threads of a block that processes `size` elements together.
pub fn threads_for(size: usize) -> u32 {
    size.next_power_of_two().clamp(32, THREADS as usize) as u32
}
