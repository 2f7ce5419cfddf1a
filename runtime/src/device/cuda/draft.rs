//! A builder of kernel source and its argument list.

use super::element::storage_type;
use super::launch_plan::{At, Base, Launch};
use super::offsets::{Packed, Walk, offsets};
use super::prelude::{ENTRY, PRELUDE};
use super::rows::Rows;
use compiler::tensor::DType;

/// Threads per block for elementwise kernels.
pub const THREADS: u32 = 256;

/// Maximum blocks of an elementwise launch; more do not increase occupancy, so threads loop.
const MOST_BLOCKS: usize = 16384;

/// From this many elements on, indices have 64 bits.
const NARROW: usize = 1 << 31;

/// Bytes that one instruction loads or stores. Tensors of executors start at multiples of
/// [`ALIGNMENT`](compiler::pass::memory::ALIGNMENT), and allocations at multiples of 256.
pub const PACK_BYTES: usize = 16;

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
    pub fn add_input(&mut self, name: &str, dtype: DType, at: At) {
        self.parameters.push(format!("const {}* __restrict__ {name}", storage_type(dtype)));
        self.arguments.push(at);
    }

    /// Adds a pointer parameter to write. It may alias one that is read.
    pub fn add_output(&mut self, name: &str, dtype: DType, at: At) {
        self.parameters.push(format!("{}* {name}", storage_type(dtype)));
        self.arguments.push(at);
    }

    /// Adds the fault cell as parameter `fault`.
    pub fn add_fault(&mut self, at: At) {
        self.parameters.push("Fault* fault".to_string());
        self.arguments.push(at);
    }

    /// Adds the counters of blocks as parameter `counters`.
    pub fn add_counters(&mut self) {
        self.parameters.push("u32* counters".to_string());
        self.arguments.push(At { base: Base::Counters, offset: 0 });
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
    pub fn each(self, count: usize, lines: &str) -> Launch {
        self.each_number("i", count, lines)
    }

    /// A launch in which `pack` covers `count` elements of so many at a time.
    pub fn each_pack(self, count: usize, width: usize, lines: &str) -> Launch {
        self.each_number("pack", count / width, lines)
    }

    fn each_number(mut self, name: &str, count: usize, lines: &str) -> Launch {
        self.add(&format!(
            "for (at {name} = (at)blockIdx.x * blockDim.x + threadIdx.x; {name} < (at){count}; {name} += (at)gridDim.x * blockDim.x) {{\n{lines}\n}}"
        ));
        let blocks = count.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS);
        self.launch(blocks, THREADS)
    }

    /// A launch over the elements of a shape. `lines` computes element `n` of the results, `y0`…, from those of the
    /// operands, `x0`…. A thread has several adjacent elements where the layouts allow it.
    pub fn each_element(
        mut self,
        shape: &[usize],
        operands: &[(DType, At, Walk)],
        results: &[(DType, At, Walk)],
        lines: &str,
    ) -> Launch {
        // A scalar has no packs.
        let packed = operands.iter().filter(|(.., walk)| walk.steps.iter().any(|step| *step != 0)).chain(results);
        let packed: Vec<(usize, usize)> = packed.map(|(dtype, at, _)| (dtype.size(), at.offset)).collect();
        let fits = |width: &usize| {
            packed.iter().all(|(size, offset)| width * size <= PACK_BYTES && offset.is_multiple_of(width * size))
        };
        let max_width = [8, 4, 2].into_iter().find(fits).unwrap_or(1);
        let walks: Vec<Walk> = operands.iter().chain(results).map(|(.., walk)| walk.clone()).collect();
        let packed = Packed::new(shape, &walks, max_width);
        let (mut body, expressions) = offsets("d", "i", &packed.shape, &packed.walks);
        let (width, mut loads, mut stores) = (packed.width, String::new(), String::new());
        for (k, &(dtype, at, _)) in operands.iter().enumerate() {
            self.add_input(&format!("from{k}"), dtype, at);
            let (count, element) = if packed.is_same[k] { (1, "0") } else { (width, "e") };
            let pack = format!("Pack<{}, {count}>", storage_type(dtype));
            body.push_str(&format!("{pack} p{k} = *(const {pack}*)(from{k} + {});\n", expressions[k]));
            loads.push_str(&format!("{} x{k} = p{k}.of[{element}];\n", storage_type(dtype)));
        }
        for (k, &(dtype, at, _)) in results.iter().enumerate() {
            self.add_output(&format!("to{k}"), dtype, at);
            let pack = format!("Pack<{}, {width}>", storage_type(dtype));
            body.push_str(&format!("{pack} q{k};\n"));
            loads.push_str(&format!("{}& y{k} = q{k}.of[e];\n", storage_type(dtype)));
            stores.push_str(&format!("*({pack}*)(to{k} + {}) = q{k};\n", expressions[operands.len() + k]));
        }
        body.push_str(&format!(
            "#pragma unroll\nfor (at e = 0; e < {width}; e++) {{\nat n = i * {width} + e;\n{loads}{lines}\n}}\n{stores}"
        ));
        self.each(shape.iter().product::<usize>() / width, &body)
    }

    /// A launch with one block per `i` in `0..count`, with enough threads for `size` elements.
    pub fn block_each(mut self, count: usize, size: usize, lines: &str) -> Launch {
        self.add(&format!("for (at i = blockIdx.x; i < (at){count}; i += gridDim.x) {{\n{lines}\n}}"));
        self.launch(count.clamp(1, NARROW - 1), threads_for(size))
    }

    /// A launch with one block per row `i` in `0..count`.
    pub fn rows_each(mut self, count: usize, rows: &Rows, lines: &str) -> Launch {
        self.add(&format!("for (at i = blockIdx.x; i < (at){count}; i += gridDim.x) {{\n{lines}\n}}"));
        self.launch(count.clamp(1, NARROW - 1), rows.threads)
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
