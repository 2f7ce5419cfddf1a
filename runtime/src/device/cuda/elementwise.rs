//! Elementwise ops. Each is an expression over its operands, so that chains run as one kernel.

use super::draft::KernelBuilder;
use super::element::{cast, compute_type, load, store};
use super::launch_plan::{At, LaunchPlan};
use super::offsets::Walk;
use crate::device::layout::TensorLayout;
use compiler::op::{Binary, Compare, Op, Unary};
use compiler::tensor::DType;

/// The expression of an elementwise op over operands in compute type; `None` for other ops.
pub fn expression(op: &Op, dtypes: &[DType], operands: &[String]) -> Option<String> {
    Some(match (op, operands) {
        (Op::Unary(op), [x]) => unary(*op, dtypes[0], x),
        (Op::Binary(op), [a, b]) => binary(*op, dtypes[0], a, b),
        (Op::Compare(Compare::Equal), [a, b]) => format!("({a} == {b})"),
        (Op::Compare(Compare::Less), [a, b]) => format!("({a} < {b})"),
        (Op::Compare(Compare::LessEqual), [a, b]) => format!("({a} <= {b})"),
        (Op::Select(_), [condition, a, b]) => format!("({condition} ? {a} : {b})"),
        (Op::Cast(op), [x]) => cast(dtypes[0], op.to, x),
        (Op::StopGradient(_) | Op::Broadcast(_) | Op::Reshape(_), [x]) => x.clone(),
        _ => return None,
    })
}

fn unary(op: Unary, dtype: DType, x: &str) -> String {
    if !dtype.is_float() {
        return match op {
            Unary::Not if dtype == DType::Bool => format!("!{x}"),
            Unary::Not => format!("~{x}"),
            Unary::Neg => format!("({})(0ull - (u64){x})", compute_type(dtype)),
            Unary::Abs => format!("((i64){x} < 0 ? (i64)(0ull - (u64){x}) : (i64){x})"),
            Unary::Sign => format!("((i64){x} > 0 ? 1 : (i64){x} < 0 ? -1 : 0)"),
            // Relu, the only function left that is defined on integers.
            _ => format!("((i64){x} < 0 ? 0 : (i64){x})"),
        };
    }
    let one = format!("({})1", compute_type(dtype));
    match op {
        Unary::Neg => format!("(-{x})"),
        Unary::Reciprocal => format!("({one} / {x})"),
        Unary::Rsqrt => format!("({one} / m_sqrt({x}))"),
        Unary::Round => format!("m_rint({x})"),
        Unary::Abs => format!("m_fabs({x})"),
        Unary::Not => format!("({x} == 0)"),
        _ => {
            let name = compiler::op::table::rule(&Op::Unary(op)).name();
            format!("m_{name}({x})")
        }
    }
}

fn binary(op: Binary, dtype: DType, a: &str, b: &str) -> String {
    let whole = !dtype.is_float();
    let width = 8 * dtype.size();
    match op {
        Binary::Add => format!("({a} + {b})"),
        Binary::Sub => format!("({a} - {b})"),
        Binary::Mul => format!("({a} * {b})"),
        Binary::Div if whole => format!("i_div({a}, {b})"),
        Binary::Div => format!("({a} / {b})"),
        Binary::Pow if whole => format!("i_pow({a}, {b})"),
        Binary::Pow => format!("m_pow({a}, {b})"),
        Binary::Mod if whole => format!("i_mod({a}, {b})"),
        Binary::Mod => format!("m_mod({a}, {b})"),
        Binary::Max => format!("m_max({a}, {b})"),
        Binary::Min => format!("m_min({a}, {b})"),
        Binary::And if dtype == DType::Bool => format!("({a} && {b})"),
        Binary::Or if dtype == DType::Bool => format!("({a} || {b})"),
        Binary::Xor if dtype == DType::Bool => format!("({a} != {b})"),
        Binary::And => format!("({a} & {b})"),
        Binary::Or => format!("({a} | {b})"),
        Binary::Xor => format!("({a} ^ {b})"),
        Binary::ShiftLeft => format!("i_left({a}, {b}, {width})"),
        Binary::ShiftRight => format!("i_right({a}, {b}, {width})"),
    }
}

/// An elementwise op with its operands broadcast to the output.
pub fn kernel(op: &Op, inputs: &[TensorLayout], y: &TensorLayout) -> Option<LaunchPlan> {
    let builder = KernelBuilder::new(inputs.iter().map(TensorLayout::len).chain([y.len()]).max().unwrap_or(0));
    let dtypes: Vec<DType> = inputs.iter().map(|x| x.dtype).collect();
    let operands: Vec<String> = (0..inputs.len()).map(|k| format!("v{k}")).collect();
    let value = expression(op, &dtypes, &operands)?;
    let lines = format!("{}y0 = {};", loads(&dtypes), store(y.dtype, &value));
    let results = [(y.dtype, At::output(0), Walk::plain(&y.shape))];
    Some(LaunchPlan::of(builder.each_element(&y.shape, &sources(inputs, &y.shape), &results, &lines)))
}

/// The inputs of a kernel, broadcast to a shape.
pub fn sources(inputs: &[TensorLayout], shape: &[usize]) -> Vec<(DType, At, Walk)> {
    let source = |(k, x): (usize, &TensorLayout)| (x.dtype, At::input(k), Walk::broadcast(&x.shape, shape));
    inputs.iter().enumerate().map(source).collect()
}

/// Code that gives operands `x0`… in their compute types as `v0`….
pub fn loads(dtypes: &[DType]) -> String {
    let line =
        |(k, &dtype): (usize, &DType)| format!("{} v{k} = {};\n", compute_type(dtype), load(dtype, &format!("x{k}")));
    dtypes.iter().enumerate().map(line).collect()
}
