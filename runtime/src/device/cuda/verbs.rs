//! Kernels of the verbs of a stream that are no ops: sums, norms, and optimizer steps.
//!
//! Their sources depend on element types alone. Lengths and factors are arguments, so few kernels serve all tensors of a
//! model. Optimizer steps compute in `f64` and round once, as on the CPU.

use super::draft::PACK_BYTES;
use super::element::{load, store, stored};
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

/// Names of optimizer states.
const STATES: [&str; 2] = ["s0", "s1"];

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
    MovingAverages(DType),
    /// Of elements with this number of bytes.
    Pack(usize),
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

/// What a kernel does with the elements of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Reads,
    Writes,
    /// Reads, then writes.
    Updates,
}

use Access::{Reads, Updates, Writes};

/// A kernel over `n` elements of arrays; `lines` computes one, named like its array. The parameters are `n`, the
/// addresses of the arrays and `scalars`. Threads have packs of elements if all addresses are aligned for it.
fn each(arrays: &[(&str, DType, Access)], scalars: &[&str], lines: &str) -> Arc<str> {
    let width = arrays.iter().map(|(_, dtype, _)| PACK_BYTES / dtype.size()).min().unwrap_or(1).min(8);
    let (mut parameters, mut aligned) = ("u64 n".to_string(), "true".to_string());
    for (name, dtype, access) in arrays {
        let constant = if *access == Reads { "const " } else { "" };
        let _ = write!(parameters, ", {constant}{}* all_{name}", stored(*dtype));
        let _ = write!(aligned, " && (u64)all_{name} % {} == 0", width * dtype.size());
    }
    scalars.iter().for_each(|name| _ = write!(parameters, ", f64 {name}"));
    let body = |width: usize| {
        let (mut text, mut elements, mut behind) = (String::new(), String::new(), String::new());
        for (name, dtype, access) in arrays {
            let of = stored(*dtype);
            let pack = format!("Pack<{of}, {width}>");
            let _ = writeln!(text, "{pack} pack_{name};");
            if *access != Writes {
                let _ = writeln!(text, "pack_{name} = *(const {pack}*)(all_{name} + i * {width});");
            }
            let _ = writeln!(elements, "{of}& {name} = pack_{name}.of[e];");
            if *access != Reads {
                let _ = writeln!(behind, "*({pack}*)(all_{name} + i * {width}) = pack_{name};");
            }
        }
        format!("{text}#pragma unroll\nfor (int e = 0; e < {width}; e++) {{\n{elements}{lines}\n}}\n{behind}")
    };
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\nextern \"C\" __global__ void {ENTRY}({parameters}) {{\n\
         u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;\n\
         u64 packs = {aligned} ? n / {width} : 0;\nfor (u64 i = thread; i < packs; i += threads) {{\n{}}}\n\
         for (u64 i = packs * {width} + thread; i < n; i += threads) {{\n{}}}\n}}\n",
        body(width),
        body(1)
    )
    .into()
}

/// `to = from`, rounded to nearest.
pub fn cast(from: DType, to: DType) -> Arc<str> {
    let value = store(to, &super::element::cast(from, to, &load(from, "x")));
    each(&[("x", from, Reads), ("y", to, Writes)], &[], &format!("y = {value};"))
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
    let of = word(size);
    format!(
        "typedef unsigned long long at;\n{PRELUDE}\n\
         extern \"C\" __global__ void {ENTRY}(u64 n, const {of}* x, {of}* y, u64 width, u64 from_pitch, u64 to_pitch) {{\n\
         for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) \
         y[i / width * to_pitch + i % width] = x[i / width * from_pitch + i % width];\n}}\n"
    )
    .into()
}

/// `sum += term`
pub fn accumulate(dtype: DType) -> Arc<str> {
    let arrays = [("x", dtype, Reads), ("y", accumulation_type(dtype), Updates)];
    each(&arrays, &[], &format!("y = y + {};", load(dtype, "x")))
}

/// `sum = first + second`
pub fn add(dtype: DType) -> Arc<str> {
    each(&[("a", dtype, Reads), ("b", dtype, Reads), ("y", dtype, Writes)], &[], "y = a + b;")
}

/// `values *= factor`
pub fn scale(dtype: DType) -> Arc<str> {
    each(&[("y", dtype, Updates)], &["factor"], &format!("y = ({})((f64)y * factor);", stored(dtype)))
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
    let lines = format!("y = ({})(keep * (f64)y + (1.0 - keep) * ((f64)b - (f64)a));", stored(dtype));
    each(&[("a", dtype, Reads), ("b", dtype, Reads), ("y", dtype, Updates)], &["keep"], &lines)
}

/// `to = weights − steps · average`
pub fn set_back(dtype: DType) -> Arc<str> {
    let lines = format!("y = ({})((f64)w - steps * (f64)average);", stored(dtype));
    each(&[("w", dtype, Reads), ("average", dtype, Reads), ("y", dtype, Writes)], &["steps"], &lines)
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
    each(&arrays, &names(factors), &lines)
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
        UpdateRule::Adam { .. } => "(f64)s0 / first / (m_sqrt((f64)s1 / second) + epsilon)",
        UpdateRule::RmsProp { .. } => "(f64)s1",
        UpdateRule::Sgd { .. } | UpdateRule::Adagrad { .. } => "(f64)s0",
    };
    let mut arrays = vec![("w", dtype, Reads), ("y", dtype, Writes)];
    arrays.extend(STATES[..rule.states()].iter().map(|name| (*name, dtype, Reads)));
    let lines = format!("y = ({})((f64)w - distance * ({direction}));", stored(dtype));
    each(&arrays, &names(factors), &lines)
}

fn names(factors: &Factors) -> Vec<&'static str> {
    factors.iter().map(|(name, _)| *name).collect()
}
