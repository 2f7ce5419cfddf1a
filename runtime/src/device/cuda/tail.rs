//! Elementwise ops after another op, computed in the last pass of its kernel: its first result stays in registers.

use super::chain::chain_code;
use super::draft::KernelBuilder;
use super::element::{compute_type, load, storage_type, store};
use super::launch_plan::At;
use super::rows::{Read, Written};
use crate::device::chain::{Link, Operand};
use crate::device::layout::TensorLayout;
use compiler::tensor::DType;
use std::fmt::Write as _;

/// What a pass over the elements of a first result does with each.
pub struct Tail {
    /// Operands of the ops, by input of the chain.
    reads: Vec<(usize, String, TensorLayout)>,
    /// Names and types of the results.
    written: Vec<(String, DType)>,
    /// Type of the first result, and whether it is written.
    first: (DType, bool),
    /// Number of further results of the first op.
    further_results: usize,
    lines: String,
}

impl Tail {
    /// No ops. The first op has `further_results` further results.
    pub fn none(first: DType, further_results: usize) -> Tail {
        let written = vec![("z0".to_string(), first)];
        Tail { reads: Vec::new(), written, first: (first, true), further_results, lines: "y0 = s0;\n".to_string() }
    }

    /// The links after the first, which has the first `norm_inputs` inputs. Of these, a pass has the elements of those
    /// in `passed` as `NAME_k`. `None` if the links do not suit.
    pub fn of(links: &[Link], inputs: &[TensorLayout], norm_inputs: usize, passed: &[(usize, &str)]) -> Option<Tail> {
        let (first, followers) = links.split_first()?;
        let first_operands: Vec<Operand> = (0..norm_inputs).map(Operand::Input).collect();
        if first.operands != first_operands {
            return None;
        }
        let (mut reads, mut lines) = (Vec::new(), String::new());
        let is_read = |k: usize| followers.iter().any(|link| link.operands.contains(&Operand::Input(k)));
        for (k, input) in inputs.iter().enumerate().filter(|(k, _)| is_read(*k)) {
            let dtype = input.dtype;
            let value = match passed.iter().find(|(at, _)| *at == k) {
                Some((_, name)) => format!("{name}_k"),
                None if k < norm_inputs => return None,
                None if input.len() == 1 => load(dtype, &format!("x{k}[0]")),
                // A pack of an operand has as many elements as one of the first result, and no more bytes.
                None if input.shape == first.result.shape && dtype.size() <= first.result.dtype.size() => {
                    format!("x{k}_k")
                }
                None => return None,
            };
            let _ = writeln!(lines, "{} v{k} = {value};", compute_type(dtype));
            if k >= norm_inputs {
                reads.push((k, format!("x{k}"), input.clone()));
            }
        }
        let written_dtypes = links.iter().filter(|link| link.is_written).map(|link| link.result.dtype);
        let written: Vec<_> = written_dtypes.enumerate().map(|(k, dtype)| (format!("z{k}"), dtype)).collect();
        if written.iter().any(|(_, dtype)| dtype.size() > first.result.dtype.size()) {
            return None;
        }
        lines.push_str(&chain_code(links, inputs, 1)?);
        let (first, further_results) = ((first.result.dtype, first.is_written), first.further_results.len());
        Some(Tail { reads, written, first, further_results, lines })
    }

    /// Adds the operands and the results to a kernel.
    pub fn declare(&self, builder: &mut KernelBuilder) {
        for (k, name, layout) in &self.reads {
            builder.add_input(name, layout.dtype, At::input(*k));
        }
        for (k, (name, dtype)) in self.written.iter().enumerate() {
            let before = if k == 0 && self.first.1 { 0 } else { self.further_results };
            builder.add_output(name, *dtype, At::output(k + before));
        }
    }

    /// Where a further result of the first op is.
    pub fn further_result(&self, k: usize) -> At {
        At::output(usize::from(self.first.1) + k)
    }

    /// What the pass reads, besides that of the first op.
    pub fn reads<'a>(&'a self, from: &'a str) -> impl Iterator<Item = Read<'a>> {
        let whole = self.reads.iter().filter(|(_, _, layout)| layout.len() > 1);
        whole.map(move |(_, name, layout)| Read { name, dtype: layout.dtype, from, is_kept: false })
    }

    pub fn written<'a>(&'a self, from: &'a str) -> Vec<Written<'a>> {
        self.written.iter().map(|(name, dtype)| Written { name, dtype: *dtype, from }).collect()
    }

    /// The lines of an element at this place of its tensor, whose first result is this expression.
    pub fn lines(&self, place: &str, value: &str) -> String {
        let mut lines =
            format!("at n = {place};\n{} s0 = {};\n", storage_type(self.first.0), store(self.first.0, value));
        self.written.iter().enumerate().for_each(|(k, (name, _))| _ = writeln!(lines, "auto& y{k} = {name}_k;"));
        lines + &self.lines
    }
}
