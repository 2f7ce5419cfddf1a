//! Kernels of the verbs of a stream that are no ops: casts, sums and norms. Those of optimizers are in
//! [`optimizer`](super::optimizer).
//!
//! Their sources depend on element types alone. Lengths and factors are arguments, so few kernels serve all tensors of a
//! model.

use super::draft::PACK_BYTES;
use super::element::{load, storage_type, store};
use super::optimizer::RuleVariant;
use super::prelude::{ENTRY, PRELUDE};
use crate::device::api::Elementwise;
use crate::device::layout::accumulation_type;
use compiler::tensor::DType;
use std::fmt::Write;
use std::mem::Discriminant;
use std::sync::Arc;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Most blocks of a launch; their threads loop.
pub const MOST_BLOCKS: usize = 4096;

/// Blocks of [`squares`], and partial sums of each tensor.
pub const PARTS: u32 = 256;

/// A kernel of this file, by what its source depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    Cast {
        from: DType,
        to: DType,
    },
    /// Of elements with this number of bytes.
    CopyRows(usize),
    Elementwise(Discriminant<Elementwise>, DType),
    Squares(DType),
    MovingAverages(DType),
    /// Of elements with this number of bytes.
    Pack(usize),
    /// With the type of the rounded weights.
    Step(RuleVariant, DType, Option<DType>),
    Predict(RuleVariant, DType),
}

/// What a kernel does with the elements of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Reads,
    Writes,
    /// Reads, then writes.
    Updates,
}

use Access::{Reads, Updates, Writes};

/// An array, whose address is `all_` and its name.
pub type Array<'a> = (&'a str, DType, Access);

/// Elements of a pack of each array.
pub fn pack_width(arrays: &[Array<'_>]) -> usize {
    arrays.iter().map(|(_, dtype, _)| PACK_BYTES / dtype.size()).min().unwrap_or(1).min(8)
}

/// The condition that all addresses are aligned for packs of this width.
pub fn are_aligned(arrays: &[Array<'_>], width: usize) -> String {
    let aligned = arrays.iter().map(|(name, dtype, _)| format!(" && (u64)all_{name} % {} == 0", width * dtype.size()));
    format!("true{}", aligned.collect::<String>())
}

/// The parameter of an array.
pub fn parameter((name, dtype, access): &Array<'_>) -> String {
    format!("{}{}* all_{name}", if *access == Reads { "const " } else { "" }, storage_type(*dtype))
}

/// Computes pack `i` of `width` elements of arrays; `lines` computes one, named like its array.
pub fn pack(arrays: &[Array<'_>], width: usize, lines: &str) -> String {
    let (mut text, mut elements, mut stores) = (String::new(), String::new(), String::new());
    for (name, dtype, access) in arrays {
        let element = storage_type(*dtype);
        let pack = format!("Pack<{element}, {width}>");
        let _ = writeln!(text, "{pack} pack_{name};");
        if *access != Writes {
            let _ = writeln!(text, "pack_{name} = *(const {pack}*)(all_{name} + i * {width});");
        }
        let _ = writeln!(elements, "{element}& {name} = pack_{name}.of[e];");
        if *access != Reads {
            let _ = writeln!(stores, "*({pack}*)(all_{name} + i * {width}) = pack_{name};");
        }
    }
    format!("{text}#pragma unroll\nfor (int e = 0; e < {width}; e++) {{\n{elements}{lines}\n}}\n{stores}")
}

/// A kernel over `n` elements of arrays; `lines` computes one, named like its array. The parameters are `n`, the
/// addresses of the arrays and `scalars`. Threads have packs of elements if all addresses are aligned for it.
pub fn elementwise_kernel(arrays: &[Array<'_>], scalars: &[&str], lines: &str) -> Arc<str> {
    let width = pack_width(arrays);
    let mut parameters = "u64 n".to_string();
    arrays.iter().for_each(|array| _ = write!(parameters, ", {}", parameter(array)));
    scalars.iter().for_each(|name| _ = write!(parameters, ", f64 {name}"));
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}({parameters}) {{\n\
         u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;\n\
         u64 packs = {} ? n / {width} : 0;\nfor (u64 i = thread; i < packs; i += threads) {{\n{}}}\n\
         for (u64 i = packs * {width} + thread; i < n; i += threads) {{\n{}}}\n}}\n",
        are_aligned(arrays, width),
        pack(arrays, width, lines),
        pack(arrays, 1, lines)
    )
    .into()
}

/// `to = from`, rounded to nearest.
pub fn cast(from: DType, to: DType) -> Arc<str> {
    let value = store(to, &super::element::cast(from, to, &load(from, "x")));
    elementwise_kernel(&[("x", from, Reads), ("y", to, Writes)], &[], &format!("y = {value};"))
}

/// The largest size of elements that all these lengths and addresses are multiples of, up to 8 bytes.
pub fn common_size(numbers: &[u64]) -> usize {
    [8, 4, 2].into_iter().find(|size| numbers.iter().all(|number| number % size == 0)).unwrap_or(1) as usize
}

/// The type of elements of `size` bytes.
pub fn word(size: usize) -> &'static str {
    match size {
        8 => "u64",
        4 => "unsigned int",
        2 => "unsigned short",
        _ => "unsigned char",
    }
}

/// Copies rows of `width` elements of `size` bytes.
pub fn copy_rows(size: usize) -> Arc<str> {
    let element = word(size);
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\n\
         extern \"C\" __global__ void {ENTRY}(u64 n, const {element}* x, {element}* y, u64 width, u64 from_pitch, u64 to_pitch) {{\n\
         for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) \
         y[i / width * to_pitch + i % width] = x[i / width * from_pitch + i % width];\n}}\n"
    )
    .into()
}

/// The verb on operands of this type; its factor is an argument.
pub fn elementwise(verb: Elementwise, dtype: DType) -> Arc<str> {
    let kind = storage_type(dtype);
    let read = |name| (name, dtype, Reads);
    match verb {
        Elementwise::Accumulate => {
            let arrays = [read("x"), ("y", accumulation_type(dtype), Updates)];
            elementwise_kernel(&arrays, &[], &format!("y = y + {};", load(dtype, "x")))
        }
        Elementwise::Add => elementwise_kernel(&[read("a"), read("b"), ("y", dtype, Writes)], &[], "y = a + b;"),
        Elementwise::Scale(_) => {
            elementwise_kernel(&[("y", dtype, Updates)], &["factor"], &format!("y = ({kind})((f64)y * factor);"))
        }
        Elementwise::AverageUpdate { .. } => {
            let lines = format!("y = ({kind})(keep * (f64)y + (1.0 - keep) * ((f64)b - (f64)a));");
            elementwise_kernel(&[read("a"), read("b"), ("y", dtype, Updates)], &["keep"], &lines)
        }
        Elementwise::SetBack { .. } => {
            let lines = format!("y = ({kind})((f64)w - steps * (f64)average);");
            elementwise_kernel(&[read("w"), read("average"), ("y", dtype, Writes)], &["steps"], &lines)
        }
    }
}

/// Sums of squares of [`PARTS`] parts of a tensor, in `f64`.
pub fn squares(dtype: DType) -> Arc<str> {
    let element = storage_type(dtype);
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}(u64 n, const {element}* x, f64* parts) {{\n\
         f64 sum = 0;\n\
         for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) sum += (f64)x[i] * (f64)x[i];\n\
         sum = sum_across(sum);\n\
         if (threadIdx.x == 0) parts[blockIdx.x] = sum;\n}}\n"
    )
    .into()
}
