//! Kernels of the verbs of a stream that are no ops: sums, norms, and optimizer steps.
//!
//! Their sources depend on element types alone. Lengths and factors are arguments, so few kernels serve all tensors of a
//! model. Optimizer steps compute in `f64` and round once, as on the CPU.

use super::element::{accumulator, held, load, store, stored};
use super::prelude::{ENTRY, PRELUDE};
use crate::device::layout::accumulation_type;
use crate::device::optimizer::UpdateRule;
use compiler::tensor::DType;
use std::fmt::Write;
use std::mem::{Discriminant, discriminant};
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
    Accumulate(DType),
    Add(DType),
    Scale(DType),
    Squares(DType),
    AverageUpdate(DType),
    SetBack(DType),
    MovingAverage(DType),
    Step(RuleVariant, DType),
    Predict(RuleVariant, DType),
}

/// The parts of an update rule that its source depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuleVariant {
    rule: Discriminant<UpdateRule>,
    flags: [bool; 2],
}

impl RuleVariant {
    pub fn of(rule: &UpdateRule) -> RuleVariant {
        let flags = match *rule {
            UpdateRule::Sgd { momentum, nesterov, .. } => [momentum != 0.0, nesterov],
            UpdateRule::Adam { decoupled, .. } => [decoupled, false],
            UpdateRule::RmsProp { momentum, .. } => [momentum != 0.0, false],
            UpdateRule::Adagrad { .. } => [false; 2],
        };
        RuleVariant { rule: discriminant(rule), flags }
    }
}

/// A kernel over `n` elements: parameters after `u64 n`, and the lines for element `i`.
fn each(parameters: &str, lines: &str) -> Arc<str> {
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}(u64 n, {parameters}) {{\n\
         for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {{\n{lines}\n}}\n}}\n"
    )
    .into()
}

/// `to = from`, rounded to nearest.
pub fn cast(from: DType, to: DType) -> Arc<str> {
    let value = store(to, &super::element::cast(from, to, &load(from, "x[i]")));
    each(&format!("const {}* x, {}* y", stored(from), stored(to)), &format!("y[i] = {value};"))
}

/// The largest size of elements that all these lengths and addresses are multiples of, up to 8 bytes.
pub fn common_size(numbers: &[u64]) -> usize {
    [8, 4, 2].into_iter().find(|size| numbers.iter().all(|number| number % size == 0)).unwrap_or(1) as usize
}

/// Copies rows of `width` elements of `size` bytes.
pub fn copy_rows(size: usize) -> Arc<str> {
    let of = match size {
        8 => "u64",
        4 => "unsigned int",
        2 => "unsigned short",
        _ => "unsigned char",
    };
    let parameters = format!("const {of}* x, {of}* y, u64 width, u64 from_pitch, u64 to_pitch");
    each(&parameters, "y[i / width * to_pitch + i % width] = x[i / width * from_pitch + i % width];")
}

/// `sum += term`
pub fn accumulate(dtype: DType) -> Arc<str> {
    let sum = accumulation_type(dtype);
    each(&format!("const {}* x, {}* y", stored(dtype), stored(sum)), &format!("y[i] = y[i] + {};", load(dtype, "x[i]")))
}

/// `sum = first + second`
pub fn add(dtype: DType) -> Arc<str> {
    let of = stored(dtype);
    each(&format!("const {of}* a, const {of}* b, {of}* y"), "y[i] = a[i] + b[i];")
}

/// `values *= factor`
pub fn scale(dtype: DType) -> Arc<str> {
    let of = stored(dtype);
    each(&format!("{of}* y, f64 factor"), &format!("y[i] = ({of})((f64)y[i] * factor);"))
}

/// Sums of squares of [`PARTS`] parts of a tensor, in `f64`.
pub fn squares(dtype: DType) -> Arc<str> {
    let of = stored(dtype);
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}(u64 n, const {of}* x, f64* parts) {{\n\
         f64 sum = 0;\n\
         for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) sum += (f64)x[i] * (f64)x[i];\n\
         sum = sum_across(sum);\n\
         if (threadIdx.x == 0) parts[blockIdx.x] = sum;\n}}\n"
    )
    .into()
}

/// `average = keep · average + (1 − keep) · (new − old)`
pub fn average_update(dtype: DType) -> Arc<str> {
    let of = stored(dtype);
    let lines = format!("y[i] = ({of})(keep * (f64)y[i] + (1.0 - keep) * ((f64)b[i] - (f64)a[i]));");
    each(&format!("const {of}* a, const {of}* b, {of}* y, f64 keep"), &lines)
}

/// `to = weights − steps · average`
pub fn set_back(dtype: DType) -> Arc<str> {
    let of = stored(dtype);
    let parameters = format!("const {of}* w, const {of}* average, {of}* y, f64 steps");
    each(&parameters, &format!("y[i] = ({of})((f64)w[i] - steps * (f64)average[i]);"))
}

/// `state = keep · state + (1 − keep) · sample`, for an `f64` sample.
pub fn moving_average(dtype: DType) -> Arc<str> {
    let value = format!("keep * (f64)({}) + (1.0 - keep) * x[i]", load(dtype, "y[i]"));
    let rounded = if accumulator(dtype) == DType::F64 { value } else { format!("({})({value})", held(dtype)) };
    each(&format!("const f64* x, {}* y, f64 keep", stored(dtype)), &format!("y[i] = {};", store(dtype, &rounded)))
}

/// The last arguments of a kernel: names and values.
pub type Factors = Vec<(&'static str, f64)>;

/// The factors of one optimizer step.
pub fn step_factors(rule: &UpdateRule, (scale, step, rate): (f64, u32, f64)) -> Factors {
    let mut factors = vec![("scale", scale)];
    match *rule {
        UpdateRule::Sgd { learning_rate, momentum, weight_decay, .. } => {
            factors.extend([("lr", learning_rate * rate), ("momentum", momentum), ("decay", weight_decay)]);
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, weight_decay, decoupled } => {
            let lr = learning_rate * rate;
            let correction = |beta: f64| 1.0 - beta.powf(f64::from(step));
            let decay = if decoupled { 1.0 - lr * weight_decay } else { weight_decay };
            factors.extend([("step_size", lr / correction(betas.0)), ("root_correction", correction(betas.1).sqrt())]);
            factors.extend([("beta1", betas.0), ("beta2", betas.1), ("epsilon", epsilon), ("decay", decay)]);
        }
        UpdateRule::RmsProp { learning_rate, alpha, epsilon, weight_decay, momentum } => {
            factors.extend([("lr", learning_rate * rate), ("alpha", alpha), ("epsilon", epsilon)]);
            factors.extend([("decay", weight_decay), ("momentum", momentum)]);
        }
        UpdateRule::Adagrad { learning_rate, decay, epsilon, weight_decay } => {
            let lr = learning_rate * rate / (1.0 + (f64::from(step) - 1.0) * decay);
            factors.extend([("lr", lr), ("epsilon", epsilon), ("decay", weight_decay)]);
        }
    }
    factors
}

/// One optimizer step: `(n, old weights, new weights, gradient, states…, factors…)`. The definitions are those of
/// [`UpdateRule`].
pub fn step(rule: &UpdateRule, dtype: DType, factors: &Factors) -> Arc<str> {
    let mut lines = "f64 w = old[i], g = (f64)gradient[i] * scale;\n".to_string();
    lines.push_str(match *rule {
        UpdateRule::Adam { decoupled: true, .. } => "w *= decay;\n",
        _ => "g += decay * w;\n",
    });
    match *rule {
        UpdateRule::Sgd { momentum, nesterov, .. } => {
            let has_momentum = momentum != 0.0;
            lines.push_str(if has_momentum { "f64 v = momentum * (f64)s0[i] + g;\n" } else { "f64 v = g;\n" });
            lines.push_str(if nesterov { "w -= lr * (g + momentum * v);\n" } else { "w -= lr * v;\n" });
            lines.push_str(if has_momentum { "s0[i] = v;\n" } else { "" });
        }
        UpdateRule::Adam { .. } => lines.push_str(
            "f64 a = s0[i], b = s1[i];\na += (g - a) * (1.0 - beta1);\nb = beta2 * b + (1.0 - beta2) * g * g;\n\
             w -= step_size * a / (m_sqrt(b) / root_correction + epsilon);\ns0[i] = a;\ns1[i] = b;\n",
        ),
        UpdateRule::RmsProp { momentum, .. } => {
            lines.push_str(
                "f64 square = alpha * (f64)s0[i] + (1.0 - alpha) * g * g;\ns0[i] = square;\n\
                 f64 v = g / (m_sqrt(square) + epsilon);\n",
            );
            lines.push_str(if momentum != 0.0 { "v += momentum * (f64)s1[i];\ns1[i] = v;\n" } else { "" });
            lines.push_str("w -= lr * v;\n");
        }
        UpdateRule::Adagrad { .. } => {
            lines.push_str("f64 sum = (f64)s0[i] + g * g;\ns0[i] = sum;\nw -= lr * g / (m_sqrt(sum) + epsilon);\n")
        }
    }
    lines.push_str("weight[i] = w;");
    let of = stored(dtype);
    let mut parameters = format!("const {of}* old, {of}* weight, const {of}* gradient");
    (0..rule.states()).for_each(|state| _ = write!(parameters, ", {of}* s{state}"));
    each(&with_factors(parameters, factors), &lines)
}

/// The factors of weights after further steps. `None` if the rule has no direction yet, so the weights stay.
pub fn predict_factors(rule: &UpdateRule, (steps, made, rate): (u32, u32, f64)) -> Option<Factors> {
    let distance = f64::from(steps) * rate;
    match *rule {
        _ if made == 0 => None,
        UpdateRule::Sgd { learning_rate, momentum, .. } | UpdateRule::RmsProp { learning_rate, momentum, .. } => {
            (momentum != 0.0).then(|| vec![("distance", distance * learning_rate)])
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, .. } => {
            let correction = |beta: f64| 1.0 - beta.powf(f64::from(made));
            let corrections = [("first", correction(betas.0)), ("second", correction(betas.1))];
            Some(
                [("distance", distance * learning_rate), ("epsilon", epsilon)].into_iter().chain(corrections).collect(),
            )
        }
        UpdateRule::Adagrad { .. } => None,
    }
}

/// Weights after further steps: `(n, weights, to, states…, factors…)`.
pub fn predict(rule: &UpdateRule, dtype: DType, factors: &Factors) -> Arc<str> {
    let direction = match rule {
        UpdateRule::Adam { .. } => "(f64)s0[i] / first / (m_sqrt((f64)s1[i] / second) + epsilon)",
        UpdateRule::RmsProp { .. } => "(f64)s1[i]",
        UpdateRule::Sgd { .. } | UpdateRule::Adagrad { .. } => "(f64)s0[i]",
    };
    let of = stored(dtype);
    let mut parameters = format!("const {of}* w, {of}* y");
    (0..rule.states()).for_each(|state| _ = write!(parameters, ", const {of}* s{state}"));
    each(&with_factors(parameters, factors), &format!("y[i] = ({of})((f64)w[i] - distance * ({direction}));"))
}

fn with_factors(mut parameters: String, factors: &Factors) -> String {
    factors.iter().for_each(|(name, _)| _ = write!(parameters, ", f64 {name}"));
    parameters
}
