//! Kernels of optimizers. They compute in `f64` and round once, as on the CPU.
//!
//! One launch updates many parameters, of which most take less time than a launch. Factors are arguments, so one kernel
//! serves all steps.

use super::element::{cast, load, storage_type, store};
use super::many::MOST;
use super::prelude::{ENTRY, PRELUDE};
use super::verbs::{
    Access::{Reads, Updates, Writes},
    Array, are_aligned, elementwise_kernel, pack, pack_width, parameter,
};
use crate::device::optimizer::UpdateRule;
use compiler::tensor::DType;
use std::fmt::Write;
use std::mem::{Discriminant, discriminant};
use std::sync::Arc;

/// Names of optimizer states.
const STATES: [&str; 2] = ["s0", "s1"];

/// Elements of a parameter that a block updates at a time: many enough that it rarely looks for their parameter.
pub const CHUNK: usize = 1 << 13;

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

/// The arrays of one parameter, in the order of its arguments, and the lines that update an element. The definitions are
/// those of [`UpdateRule`].
fn update(rule: &UpdateRule, dtype: DType, rounded: Option<DType>) -> (Vec<Array<'static>>, String) {
    let mut lines = "f64 w = old, g = (f64)gradient * scale;\n".to_string();
    lines.push_str(match *rule {
        UpdateRule::Adam { decoupled: true, .. } => "w *= decay;\n",
        _ => "g += decay * w;\n",
    });
    match *rule {
        UpdateRule::Sgd { momentum, nesterov, .. } => {
            let has_momentum = momentum != 0.0;
            lines.push_str(if has_momentum { "f64 v = momentum * (f64)s0 + g;\n" } else { "f64 v = g;\n" });
            lines.push_str(if nesterov { "w -= lr * (g + momentum * v);\n" } else { "w -= lr * v;\n" });
            lines.push_str(if has_momentum { "s0 = v;\n" } else { "" });
        }
        UpdateRule::Adam { .. } => lines.push_str(
            "f64 a = s0, b = s1;\na += (g - a) * (1.0 - beta1);\nb = beta2 * b + (1.0 - beta2) * g * g;\n\
             w -= step_size * a / (m_sqrt(b) / root_correction + epsilon);\ns0 = a;\ns1 = b;\n",
        ),
        UpdateRule::RmsProp { momentum, .. } => {
            lines.push_str(
                "f64 square = alpha * (f64)s0 + (1.0 - alpha) * g * g;\ns0 = square;\n\
                 f64 v = g / (m_sqrt(square) + epsilon);\n",
            );
            lines.push_str(if momentum != 0.0 { "v += momentum * (f64)s1;\ns1 = v;\n" } else { "" });
            lines.push_str("w -= lr * v;\n");
        }
        UpdateRule::Adagrad { .. } => {
            lines.push_str("f64 sum = (f64)s0 + g * g;\ns0 = sum;\nw -= lr * g / (m_sqrt(sum) + epsilon);\n")
        }
    }
    lines.push_str("weight = w;");
    let mut arrays = vec![("old", dtype, Reads), ("weight", dtype, Writes), ("gradient", dtype, Reads)];
    arrays.extend(STATES[..rule.states()].iter().map(|name| (*name, dtype, Updates)));
    if let Some(to) = rounded {
        arrays.push(("rounded", to, Writes));
        let _ = write!(lines, "\nrounded = {};", store(to, &cast(dtype, to, &load(dtype, "weight"))));
    }
    (arrays, lines)
}

/// One optimizer step of up to [`MOST`] parameters: the number of chunks, of each parameter its arrays, its elements and
/// the number of the chunk after its last, and the factors. A block updates chunks of [`CHUNK`] elements.
pub fn step(rule: &UpdateRule, dtype: DType, rounded: Option<DType>, factors: &Factors) -> Arc<str> {
    let (arrays, lines) = update(rule, dtype, rounded);
    let width = pack_width(&arrays);
    let (mut parameters, mut search) = ("u64 chunks".to_string(), String::new());
    for t in 0..MOST {
        let addresses: String = arrays.iter().map(|array| format!(", {}{t}", parameter(array))).collect();
        let _ = write!(parameters, "{addresses}, u64 count{t}, u64 end{t}");
        let assignments: String = arrays.iter().map(|(name, ..)| format!("all_{name} = all_{name}{t}; ")).collect();
        let start = if t == 0 { "0".to_string() } else { format!("end{}", t - 1) };
        let _ =
            writeln!(search, "if (chunk < end{t}) {{ {assignments}count = count{t}; first = chunk - {start}; }} else");
    }
    factors.iter().for_each(|(name, _)| _ = write!(parameters, ", f64 {name}"));
    let addresses: String = arrays.iter().map(|array| format!("{};\n", parameter(array))).collect();
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}({parameters}) {{\n\
         for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {{\n{addresses}u64 count, first;\n\
         {search} break;\n\
         u64 from = first * {CHUNK}, to = from + {CHUNK} < count ? from + {CHUNK} : count;\n\
         u64 end = {} ? to / {width} : from / {width};\n\
         for (u64 i = from / {width} + threadIdx.x; i < end; i += blockDim.x) {{\n{}}}\n\
         for (u64 i = end * {width} + threadIdx.x; i < to; i += blockDim.x) {{\n{}}}\n}}\n}}\n",
        are_aligned(&arrays, width),
        pack(&arrays, width, &lines),
        pack(&arrays, 1, &lines)
    )
    .into()
}

/// The factors of weights after further steps. `None` if the rule has no direction yet, so the weights stay.
pub fn predict_factors(rule: &UpdateRule, (steps, steps_done, rate): (u32, u32, f64)) -> Option<Factors> {
    let distance = f64::from(steps) * rate;
    match *rule {
        _ if steps_done == 0 => None,
        UpdateRule::Sgd { learning_rate, momentum, .. } | UpdateRule::RmsProp { learning_rate, momentum, .. } => {
            (momentum != 0.0).then(|| vec![("distance", distance * learning_rate)])
        }
        UpdateRule::Adam { learning_rate, betas, epsilon, .. } => {
            let correction = |beta: f64| 1.0 - beta.powf(f64::from(steps_done));
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
        UpdateRule::Adam { .. } => "(f64)s0 / first / (m_sqrt((f64)s1 / second) + epsilon)",
        UpdateRule::RmsProp { .. } => "(f64)s1",
        UpdateRule::Sgd { .. } | UpdateRule::Adagrad { .. } => "(f64)s0",
    };
    let mut arrays = vec![("w", dtype, Reads), ("y", dtype, Writes)];
    arrays.extend(STATES[..rule.states()].iter().map(|name| (*name, dtype, Reads)));
    let lines = format!("y = ({})((f64)w - distance * ({direction}));", storage_type(dtype));
    elementwise_kernel(&arrays, &factor_names(factors), &lines)
}

fn factor_names(factors: &Factors) -> Vec<&'static str> {
    factors.iter().map(|(name, _)| *name).collect()
}
