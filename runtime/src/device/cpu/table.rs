//! Which core op has which fast kernel.

use super::*;

impl Kernel {
    /// The kernel of an op at these concrete facts: a fast one where there is one, else the op's reference rule.
    pub fn new(op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Kernel {
        let inputs: Vec<Layout> = inputs.iter().map(Layout::of).collect();
        let outputs: Vec<Layout> = outputs.iter().map(Layout::of).collect();
        let fast = fast(op, &inputs, &outputs);
        Kernel::from_parts(op.clone(), inputs, outputs, fast)
    }
}

fn fast(op: &Op, inputs: &[Layout], outputs: &[Layout]) -> Option<Fast> {
    match (op, inputs, outputs) {
        (Op::Unary(op), [x], _) => elementwise::unary(*op, x),
        (Op::Binary(op), [a, b], [y]) => elementwise::binary(*op, a, b, y),
        (Op::Compare(op), [a, b], [y]) => elementwise::compare(*op, a, b, y),
        (Op::Select(_), [condition, a, b], [y]) => elementwise::select(condition, a, b, y),
        (Op::Cast(_), [x], [y]) => cast::kernel(x, y),
        (Op::MatMul(op), [a, b], [c]) => matmul::kernel(op, a, b, c),
        (Op::Reshape(_), _, _) => Some(movement::copy()),
        _ => None,
    }
}
