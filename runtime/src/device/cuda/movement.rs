//! Data movement ops: one thread per output element.

use super::draft::KernelBuilder;
use super::element::{bits, held, literal, load, store};
use super::launch_plan::{At, Launch, LaunchPlan};
use super::offsets::{Walk, offsets};
use crate::device::layout::TensorLayout;
use compiler::op::slice::origin;
use compiler::op::{Concat, Dropout, DropoutPart, Flip, Iota, Pad, Slice, Transpose, Uniform};
use compiler::tensor::view::strides;

/// Copies elements of `from` at the walk's offsets to the elements of `to` in order.
pub fn moved(from: (At, usize), to: At, y: &TensorLayout, walk: &Walk) -> Launch {
    let dtype = bits(y.dtype);
    let mut draft = KernelBuilder::new(from.1.max(y.len()));
    draft.reads("x", dtype, from.0);
    draft.writes("y", dtype, to);
    let (lines, places) = offsets("d", "i", &y.shape, std::slice::from_ref(walk));
    draft.each(y.len(), &format!("{lines}y[i] = x[{}];", places[0]))
}

pub fn copy(x: &TensorLayout, y: &TensorLayout) -> LaunchPlan {
    let flat = TensorLayout { dtype: y.dtype, shape: vec![y.len()] };
    LaunchPlan::of(moved((At::input(0), x.len()), At::output(0), &flat, &Walk { base: 0, steps: vec![1] }))
}

fn from_walk(x: &TensorLayout, y: &TensorLayout, walk: Walk) -> Option<LaunchPlan> {
    Some(LaunchPlan::of(moved((At::input(0), x.len()), At::output(0), y, &walk)))
}

pub fn transpose(op: &Transpose, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let own = strides(&x.shape);
    from_walk(x, y, Walk { base: 0, steps: op.perm.iter().map(|&axis| own[axis] as isize).collect() })
}

pub fn broadcast(x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    from_walk(x, y, Walk::stretched(&x.shape, &y.shape))
}

/// Strided slice.
pub fn slice(op: &Slice, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let own = strides(&x.shape);
    // For a single element the step is irrelevant, and may be too large to multiply.
    let step = |axis: usize| if y.shape[axis] > 1 { (own[axis] * op.step[axis]) as isize } else { 0 };
    let steps = (0..own.len()).map(step).collect();
    from_walk(x, y, Walk { base: origin(&op.begin, &x.shape).ok()?, steps })
}

pub fn flip(op: &Flip, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut walk = Walk::plain(&x.shape);
    for &axis in &op.axes {
        walk.base += (x.shape[axis] - 1) * walk.steps[axis] as usize;
        walk.steps[axis] = -walk.steps[axis];
    }
    from_walk(x, y, walk)
}

/// Concatenation: one launch per input.
pub fn concat(op: &Concat, inputs: &[TensorLayout], y: &TensorLayout) -> Option<LaunchPlan> {
    let mut launch_plan = LaunchPlan::default();
    let own = Walk::plain(&y.shape);
    let mut first = 0;
    for (k, x) in inputs.iter().enumerate() {
        let base = first * own.steps[op.axis] as usize;
        first += x.shape[op.axis];
        if x.is_empty() {
            continue;
        }
        let dtype = bits(y.dtype);
        let mut draft = KernelBuilder::new(y.len());
        draft.reads("x", dtype, At::input(k));
        draft.writes("y", dtype, At::output(0));
        let (lines, places) = offsets("d", "i", &x.shape, &[Walk { base, steps: own.steps.clone() }]);
        launch_plan.launches.push(draft.each(x.len(), &format!("{lines}y[{}] = x[i];", places[0])));
    }
    Some(launch_plan)
}

/// Edge and interior padding.
pub fn pad(op: &Pad, x: &TensorLayout, y: &TensorLayout) -> Option<LaunchPlan> {
    let low = origin(&op.low, &y.shape).ok()?;
    let own = Walk::plain(&y.shape);
    // Adjacent elements bound the step; a single element does not, and its step may be huge.
    let step = |axis: usize| match x.shape[axis] {
        0 | 1 => 0,
        _ => own.steps[axis] * (op.interior[axis] as isize + 1),
    };
    let steps: Vec<isize> = (0..own.steps.len()).map(step).collect();
    let mut fill = KernelBuilder::new(y.len());
    fill.writes("y", y.dtype, At::output(0));
    let value = match y.dtype.is_float() {
        true => store(y.dtype, &literal(y.dtype, op.value)),
        // Converts like the reference writes a float to an integer type.
        false if y.dtype == compiler::tensor::DType::U64 => format!("{}ull", op.value as u64),
        false => store(y.dtype, &format!("(i64){}ull", op.value as i64 as u64)),
    };
    let fill = fill.each(y.len(), &format!("y[i] = {value};"));
    let dtype = bits(y.dtype);
    let mut draft = KernelBuilder::new(y.len());
    draft.reads("x", dtype, At::input(0));
    draft.writes("y", dtype, At::output(0));
    let (lines, places) = offsets("d", "i", &x.shape, &[Walk { base: low, steps }]);
    let inner = draft.each(x.len(), &format!("{lines}y[{}] = x[i];", places[0]));
    Some(LaunchPlan { launches: vec![fill, inner], scratch: 0 })
}

pub fn iota(op: &Iota, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut draft = KernelBuilder::new(y.len());
    draft.writes("y", y.dtype, At::output(0));
    let mut steps = vec![0; y.shape.len()];
    steps[op.axis] = 1;
    let (lines, places) = offsets("d", "i", &y.shape, &[Walk { base: 0, steps }]);
    let number = format!("(i64){}", places[0]);
    // Through f64, like the reference.
    let number = if y.dtype.is_float() { format!("(f64){number}") } else { number };
    Some(LaunchPlan::of(draft.each(y.len(), &format!("{lines}y[i] = {};", store(y.dtype, &number)))))
}

/// Uniform random numbers by element index; see the op's definition.
pub fn uniform(op: &Uniform, y: &TensorLayout) -> Option<LaunchPlan> {
    let mut draft = KernelBuilder::new(y.len());
    draft.reads("counter", compiler::tensor::DType::I64, At::input(0));
    draft.writes("y", y.dtype, At::output(0));
    draft.add(&format!("u64 key = mix(mix({}ull) ^ (u64)counter[0]);", op.stream));
    let unit = literal(compiler::tensor::DType::F64, 0.5f64.powi(op.bits() as i32));
    let number = format!("(f64)(mix(key ^ (u64)i) >> {}) * {unit}", 64 - op.bits());
    Some(LaunchPlan::of(draft.each(y.len(), &format!("y[i] = {};", store(y.dtype, &number)))))
}

/// Dropout by element index; see the op's definition.
pub fn dropout(op: &Dropout, x: &TensorLayout) -> Option<LaunchPlan> {
    dropout_by(op, x, KernelBuilder::new(x.len()), "(u64)i")
}

/// Dropout of a tensor-parallel shard, with the mask of the whole tensor.
pub fn dropout_part(op: &DropoutPart, x: &TensorLayout) -> Option<LaunchPlan> {
    let mut draft = KernelBuilder::new(x.len());
    draft.reads("device", compiler::tensor::DType::I64, At::input(2));
    dropout_by(&op.whole, x, draft, &shard_element("(u64)i", op.run, op.devices))
}

/// The index in the whole tensor of an element of the shard of `device`.
pub fn shard_element(own: &str, run: usize, devices: usize) -> String {
    format!("(({own} / {run}ull * {devices}ull + (u64)device[0]) * {run}ull + {own} % {run}ull)")
}

/// Dropout with the mask of these elements.
fn dropout_by(op: &Dropout, x: &TensorLayout, mut draft: KernelBuilder, element: &str) -> Option<LaunchPlan> {
    draft.reads("x", x.dtype, At::input(0));
    draft.reads("counter", compiler::tensor::DType::I64, At::input(1));
    draft.writes("y", x.dtype, At::output(0));
    let least = (op.ratio * (1u64 << 53) as f64) as u64;
    let kind = held(x.dtype);
    draft.add(&format!("u64 key = mix(mix({}ull) ^ (u64)counter[0]);", op.stream));
    let kept = format!("{} * {}", load(x.dtype, "x[i]"), literal(x.dtype, op.scale()));
    let body = format!(
        "{kind} v = mix(key ^ {element}) >> 11 >= {least}ull ? {kept} : ({kind})0;\ny[i] = {};",
        store(x.dtype, "v")
    );
    Some(LaunchPlan::of(draft.each(x.len(), &body)))
}
