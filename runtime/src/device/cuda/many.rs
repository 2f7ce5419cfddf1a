//! Kernels over many small tensors in one launch, such as the running statistics of a model, of which each alone takes
//! less time than its launch.
//!
//! The elements of the tensors are numbered one after another. A thread finds the tensor of its element by comparing
//! the number with the end of each.

use super::element::{accumulator, compute_type, load, storage_type, store};
use super::prelude::{ENTRY, PRELUDE};
use super::verbs::word;
use compiler::tensor::DType;
use std::fmt::Write;
use std::sync::Arc;

/// The most tensors of a launch.
pub const MOST: usize = 32;

/// A kernel over the elements of tensors of `element`: number `i` of all is number `own` of the tensor `x`. The
/// parameters are the number of all, then for each tensor its address, its end and its `scalars`, then `last`.
fn kernel_text(element: &str, scalars: &[&str], last: &str, lines: &str) -> Arc<str> {
    let (mut parameters, mut search) = ("u64 n".to_string(), String::new());
    for t in 0..MOST {
        let _ = write!(parameters, ", {element}* x{t}, u64 end{t}");
        scalars.iter().for_each(|name| _ = write!(parameters, ", f64 {name}{t}"));
        let assignments: String = scalars.iter().map(|name| format!(" {name} = {name}{t};")).collect();
        let _ = match t {
            0 => writeln!(search, "x = x0; start = 0;{assignments}"),
            _ => writeln!(search, "if (i >= end{}) {{ x = x{t}; start = end{};{assignments} }}", t - 1, t - 1),
        };
    }
    let scalars: String = scalars.iter().map(|name| format!("f64 {name};\n")).collect();
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}({parameters}, {last}) {{\n\
         for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {{\n\
         {element}* x;\nu64 start;\n{scalars}{search}u64 own = i - start;\n{lines}\n}}\n}}\n"
    )
    .into()
}

/// The arguments of a launch after the number of elements: of each tensor its address, its number of elements, and its
/// scalars. There are at most [`MOST`].
pub fn arguments<const N: usize>(tensors: impl Iterator<Item = (u64, usize, [f64; N])>) -> Vec<u64> {
    let (mut words, mut end) = (Vec::new(), 0);
    for (address, count, scalars) in tensors {
        end += count as u64;
        words.extend([address, end]);
        words.extend(scalars.map(f64::to_bits));
    }
    while words.len() < MOST * (2 + N) {
        words.extend([0, end]);
        words.extend([0; N]);
    }
    words
}

/// Copies tensors, as elements of `size` bytes, one after another to the last argument.
pub fn pack(size: usize) -> Arc<str> {
    let element = word(size);
    kernel_text(&format!("const {element}"), &[], &format!("{element}* to"), "to[i] = x[own];")
}

/// `state = keep · state + (1 − keep) · sample` of each state. The samples, in `f64`, follow each other.
pub fn moving_averages(dtype: DType) -> Arc<str> {
    let value = format!("keep * (f64)({}) + (1.0 - keep) * samples[i]", load(dtype, "x[own]"));
    let rounded = if accumulator(dtype) == DType::F64 { value } else { format!("({})({value})", compute_type(dtype)) };
    kernel_text(storage_type(dtype), &["keep"], "const f64* samples", &format!("x[own] = {};", store(dtype, &rounded)))
}
