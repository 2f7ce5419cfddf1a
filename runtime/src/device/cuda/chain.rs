//! Chains of elementwise ops as one kernel: each operand is read once, and results inside the chain stay in registers.

use super::draft::KernelBuilder;
use super::element::{held, load, store};
use super::elementwise::{expression, loads, sources};
use super::launch_plan::{At, LaunchPlan};
use super::movement::dropped;
use super::offsets::Walk;
use crate::device::chain::{Link, Operand};
use crate::device::layout::TensorLayout;
use compiler::op::Op;
use compiler::tensor::DType;

/// `None` if an op is not elementwise, or a tensor is empty.
pub fn kernel(links: &[Link], inputs: &[TensorLayout]) -> Option<LaunchPlan> {
    let result = &links.last()?.result;
    if result.is_empty() || inputs.iter().any(TensorLayout::is_empty) {
        return None;
    }
    let builder = KernelBuilder::new(inputs.iter().map(TensorLayout::len).chain([result.len()]).max()?);
    let mut body = loads(&inputs.iter().map(|x| x.dtype).collect::<Vec<_>>());
    let mut results = Vec::new();
    for (at, link) in links.iter().enumerate() {
        let dtype_of = |operand: &Operand| match *operand {
            Operand::Input(k) => inputs[k].dtype,
            Operand::Result(k) => links[k].result.dtype,
        };
        let name_of = |operand: &Operand| match *operand {
            Operand::Input(k) => format!("v{k}"),
            Operand::Result(k) => format!("r{k}"),
        };
        let dtypes: Vec<DType> = link.operands.iter().map(dtype_of).collect();
        let operands: Vec<String> = link.operands.iter().map(name_of).collect();
        let value = match (&link.op, &operands[..]) {
            (Op::Dropout(op), [x, counter]) => dropped(op, dtypes[0], [x, counter, "(u64)n"]),
            _ => expression(&link.op, &dtypes, &operands)?,
        };
        let dtype = link.result.dtype;
        // Rounds as a stored tensor would, so that a chain gives the bits of its ops one by one.
        body.push_str(&format!("{} s{at} = {};\n", super::element::stored(dtype), store(dtype, &value)));
        body.push_str(&format!("{} r{at} = {};\n", held(dtype), load(dtype, &format!("s{at}"))));
        if link.is_written {
            body.push_str(&format!("y{} = s{at};\n", results.len()));
            results.push((dtype, At::output(results.len()), Walk::plain(&result.shape)));
        }
    }
    Some(LaunchPlan::of(builder.each_element(&result.shape, &sources(inputs, &result.shape), &results, &body)))
}
