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
use std::sync::Arc;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Most blocks of a launch; their threads loop.
pub const MOST_BLOCKS: usize = 4096;

/// Blocks of [`squares`], and partial sums of each tensor.
pub const PARTS: u32 = 256;

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

/// A kernel with numbers as its last arguments.
pub struct WithFactors {
    pub text: Arc<str>,
    pub factors: Vec<f64>,
}

/// One optimizer step: `(n, old weights, new weights, gradient, states…, factors…)`. The definitions are those of
/// [`UpdateRule`].
pub fn step(rule: &UpdateRule, dtype: DType, (scale, step, rate): (f64, u32, f64)) -> WithFactors {
    let mut factors = vec![("scale", scale)];
    let mut lines = "f64 w = old[i], g = (f64)gradient[i] * scale;\n".to_string();
    match *rule {
        UpdateRule::Sgd { learning_rate, momentum, nesterov, weight_decay } => {
            factors.extend([("lr", learning_rate * rate), ("momentum", momentum), ("decay", weight_decay)]);
            lines.push_str("g += decay * w;\n");
            if momentum != 0.0 {
                lines.push_str("f64 v = momentum * (f64)s0[i] + g;\n");
                lines.push_str(if nesterov { "w -= lr * (g + momentum * v);\n" } else { "w -= lr * v;\n" });
                lines.push_str("s0[i] = v;\n");
            } else {
                lines.push_str(if nesterov { "w -= lr * (g + momentum * g);\n" } else { "w -= lr * g;\n" });
            }
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, weight_decay, decoupled } => {
            let lr = learning_rate * rate;
            let correction = |beta: f64| 1.0 - beta.powf(f64::from(step));
            let (first, second) = (correction(betas.0), correction(betas.1).sqrt());
            let decay = if decoupled { 1.0 - lr * weight_decay } else { weight_decay };
            factors.extend([("size", lr / first), ("root", second), ("beta1", betas.0), ("beta2", betas.1)]);
            factors.extend([("epsilon", epsilon), ("decay", decay)]);
            lines.push_str(if decoupled { "w *= decay;\n" } else { "g += decay * w;\n" });
            lines.push_str(
                "f64 a = s0[i], b = s1[i];\na += (g - a) * (1.0 - beta1);\nb = beta2 * b + (1.0 - beta2) * g * g;\n\
                 w -= size * a / (m_sqrt(b) / root + epsilon);\ns0[i] = a;\ns1[i] = b;\n",
            );
        }
        UpdateRule::RmsProp { learning_rate, alpha, epsilon, weight_decay, momentum } => {
            factors.extend([("lr", learning_rate * rate), ("alpha", alpha), ("epsilon", epsilon)]);
            factors.extend([("decay", weight_decay), ("momentum", momentum)]);
            lines.push_str(
                "g += decay * w;\nf64 square = alpha * (f64)s0[i] + (1.0 - alpha) * g * g;\ns0[i] = square;\n\
                 f64 v = g / (m_sqrt(square) + epsilon);\n",
            );
            if momentum != 0.0 {
                lines.push_str("v += momentum * (f64)s1[i];\ns1[i] = v;\n");
            }
            lines.push_str("w -= lr * v;\n");
        }
        UpdateRule::Adagrad { learning_rate, decay, epsilon, weight_decay } => {
            let lr = learning_rate * rate / (1.0 + (f64::from(step) - 1.0) * decay);
            factors.extend([("lr", lr), ("epsilon", epsilon), ("decay", weight_decay)]);
            lines.push_str(
                "g += decay * w;\nf64 sum = (f64)s0[i] + g * g;\ns0[i] = sum;\nw -= lr * g / (m_sqrt(sum) + epsilon);\n",
            );
        }
    }
    lines.push_str("weight[i] = w;");
    let of = stored(dtype);
    let mut parameters = format!("const {of}* old, {of}* weight, const {of}* gradient");
    (0..rule.states()).for_each(|state| _ = write!(parameters, ", {of}* s{state}"));
    factors.iter().for_each(|(name, _)| _ = write!(parameters, ", f64 {name}"));
    WithFactors { text: each(&parameters, &lines), factors: factors.into_iter().map(|(_, factor)| factor).collect() }
}

/// Weights after further steps: `(n, weights, to, states…, factors…)`. `None` if the rule has no direction yet, so the
/// weights stay.
pub fn predict(rule: &UpdateRule, dtype: DType, (steps, made, rate): (u32, u32, f64)) -> Option<WithFactors> {
    let far = f64::from(steps) * rate;
    let (factors, direction) = match *rule {
        _ if made == 0 => return None,
        UpdateRule::Sgd { learning_rate, momentum, .. } if momentum != 0.0 => {
            (vec![("far", far * learning_rate)], "(f64)s0[i]")
        }
        UpdateRule::RmsProp { learning_rate, momentum, .. } if momentum != 0.0 => {
            (vec![("far", far * learning_rate)], "(f64)s1[i]")
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, .. } => {
            let correction = |beta: f64| 1.0 - beta.powf(f64::from(made));
            let corrections = [("first", correction(betas.0)), ("second", correction(betas.1))];
            let factors = [("far", far * learning_rate), ("epsilon", epsilon)].into_iter().chain(corrections).collect();
            (factors, "(f64)s0[i] / first / (m_sqrt((f64)s1[i] / second) + epsilon)")
        }
        _ => return None,
    };
    let of = stored(dtype);
    let mut parameters = format!("const {of}* w, {of}* y");
    (0..rule.states()).for_each(|state| _ = write!(parameters, ", const {of}* s{state}"));
    factors.iter().for_each(|(name, _)| _ = write!(parameters, ", f64 {name}"));
    let lines = format!("y[i] = ({of})((f64)w[i] - far * ({direction}));");
    Some(WithFactors {
        text: each(&parameters, &lines),
        factors: factors.into_iter().map(|(_, factor)| factor).collect(),
    })
}
