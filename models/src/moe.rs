//! GPT with mixture-of-experts layers (Lepikhin et al., GShard, ICLR 2021; Fedus et al., Switch Transformers, JMLR
//! 2022). A router chooses k of E experts for each token. Each expert has a capacity per sequence, filled by first
//! choices first; tokens beyond it use only the residual connection.
//!
//! It uses standard operators. `TopK` routes, `CumSum` computes each token's position in its expert, and
//! `ScatterElements` writes tokens to their slots. One batched `MatMul` per layer runs all experts, and `GatherND`
//! reads the results.
//!
//! With E experts in n of l blocks it has `n·(E − 1)·(8·w² + 5·w) + n·E·w` more parameters than a GPT:
//!
//! | size    | layers | width | heads | experts | parameters     | published |
//! | ---     | ---    | ---   | ---   | ---     | ---            | ---       |
//! | moe-13b | 24     | 1,024 | 16    | 128     | 13,150,451,712 | 13 B      |
//! | moe-52b | 24     | 2,048 | 16    | 128     | 52,473,360,384 | 52 B      |
//!
//! Both are from DeepSpeed-MoE (Rajbhandari et al., ICML 2022, table 1): experts in every other block, one per token.

use crate::builder::{Axis, Builder, Init, Value, attr};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::gpt::{EPSILON, decoder};
use crate::layer::{concatenate, dropout, normalisation, product, reshape, swiglu, transpose};
use crate::prediction::Prediction;
use crate::zoo::{Entry, Size};

const fn settings(width: usize) -> [(&'static str, Setting); 10] {
    [
        ("layers", Setting::Number(24)),
        ("hidden", Setting::Number(width)),
        ("heads", Setting::Number(16)),
        ("experts", Setting::Number(128)),
        ("chosen", Setting::Number(1)),
        ("every", Setting::Number(2)),
        ("capacity", Setting::Number(100)),
        ("vocabulary", Setting::Number(51_200)),
        ("context", Setting::Number(2048)),
        ("dropout", Setting::Fraction(0.1)),
    ]
}

pub const ENTRY: Entry = Entry {
    name: "moe",
    about: "GPT with 2 of 4 experts per token; and sizes up to 52 B [Lepikhin et al. 2021, Rajbhandari et al. 2022]",
    choices: &[
        Choice::width("hidden", 32, "width of the residual stream"),
        Choice::number("layers", 2, 1, 10_000, "number of blocks"),
        Choice::number("experts", 4, 1, 100_000, "experts per block"),
        Choice::number("chosen", 2, 1, 1_000, "experts per token (top-k)"),
        Choice::number("every", 1, 1, 10_000, "every N-th block has experts, the others one layer for all tokens"),
        Choice::number("capacity", 125, 1, 100_000, "expert capacity in percent of an equal share of the tokens"),
        Choice::width("vocabulary", 97, "number of different tokens"),
        Choice::number("context", 16, 1, 65_536, "tokens in a sequence"),
        Choice::number("heads", 4, 1, 100_000, "attention heads, a divisor of `hidden`"),
        Choice::truth("tied", true, "tie the weights of head and token embedding"),
        Choice::fraction("dropout", 0.0, "dropout rate of embeddings, attention and branches"),
    ],
    sizes: &[
        Size { name: "moe-13b", about: "13 B parameters, 128 experts", settings: &settings(1024) },
        Size { name: "moe-52b", about: "52 B", settings: &settings(2048) },
    ],
    small: &[],
    build,
};

fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let mixture = Mixture::new(given)?;
    let width = mixture.width;
    let every = given.number("every");
    decoder(net, given, batch, |net, block, layer, x| {
        let path = format!("blocks.{layer}");
        if !(layer + 1).is_multiple_of(every) {
            return block.build(net, &path, x);
        }
        let x = block.attend(net, &path, x);
        let y = normalisation(net, &format!("{path}.ln2"), &x, width, EPSILON);
        let y = mixture.build(net, &format!("{path}.moe"), &y);
        let y = dropout(net, &format!("{path}.moe.drop"), &y, block.dropout);
        net.node(&path, "Add", &[&x, &y], vec![])
    })
}

#[derive(Debug, Clone)]
pub struct Mixture {
    pub experts: usize,
    pub chosen: usize,
    /// Tokens per expert and sequence.
    pub capacity: usize,
    pub context: usize,
    pub width: usize,
    /// Hidden width of an expert.
    pub inner: usize,
    pub activation: Activation,
}

/// What an expert computes between its linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Gelu,
    /// Of two linear layers, one of which is the gate.
    SwiGlu,
}

impl Mixture {
    /// The experts of the options `experts`, `chosen` and `capacity`, four times as wide inside as `hidden`.
    pub fn new(given: &Given) -> Result<Self, ChoiceError> {
        let (experts, chosen) = (given.number("experts"), given.number("chosen"));
        if chosen > experts {
            return Err(given.refuse("chosen", "it exceeds the number of experts"));
        }
        let (context, width) = (given.number("context"), given.number("hidden"));
        let capacity = (chosen * context * given.number("capacity")).div_ceil(100 * experts);
        Ok(Self { experts, chosen, capacity, context, width, inner: 4 * width, activation: Activation::Gelu })
    }

    /// Maps `[batch, context, width]` to the same shape.
    pub fn build(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let [experts, chosen, capacity, context, width] =
            [self.experts, self.chosen, self.capacity, self.context, self.width].map(|size| size as i64);
        let Route { slots, in_capacity, gates } = self.route(net, &format!("{path}.router"), x);
        // One token per choice, added to its slot; tokens beyond the capacity are zeroed.
        let tokens = concatenate(net, path, &vec![x; self.chosen], 1);
        let tokens = net.node(path, "Mul", &[&tokens, &in_capacity], vec![]);
        let shape = net.node(path, "Shape", &[x], vec![attr::int("start", 0), attr::int("end", 1)]);
        let tail = net.constant_i64(path, &[experts * capacity, width]);
        let shape = concatenate(net, path, &[&shape, &tail], 0);
        let empty = net.fill(path, &shape, 0.0);
        let shape = net.node(path, "Shape", &[&tokens], vec![]);
        let index = net.node(path, "Expand", &[&slots, &shape], vec![]);
        let scatter = vec![attr::int("axis", 1), attr::string("reduction", "add")];
        let y = net.node(path, "ScatterElements", &[&empty, &index, &tokens], scatter);
        // Gathers each expert's slots of all sequences: batch × experts × capacity to experts × (batch × capacity).
        let y = reshape(net, path, &y, &[0, experts, capacity, width]);
        let y = transpose(net, path, &y, &[1, 0, 2, 3]);
        let y = reshape(net, path, &y, &[experts, -1, width]);
        let y = match self.activation {
            Activation::Gelu => {
                let y = self.layer(net, &format!("{path}.fc"), &y, [self.width, self.inner]);
                net.node(&format!("{path}.act"), "Gelu", &[&y], vec![attr::string("approximate", "none")])
            }
            Activation::SwiGlu => {
                let [gate, up] =
                    ["gate", "up"].map(|name| self.layer(net, &format!("{path}.{name}"), &y, [self.width, self.inner]));
                swiglu(net, &format!("{path}.act"), &gate, &up)
            }
        };
        let y = self.layer(net, &format!("{path}.proj"), &y, [self.inner, self.width]);
        let y = reshape(net, path, &y, &[experts, -1, capacity, width]);
        let y = transpose(net, path, &y, &[1, 0, 2, 3]);
        let y = reshape(net, path, &y, &[0, experts * capacity, width]);
        let y = net.node(path, "GatherND", &[&y, &slots], vec![attr::int("batch_dims", 1)]);
        let y = net.node(path, "Mul", &[&y, &gates], vec![]);
        let y = reshape(net, path, &y, &[0, chosen, context, width]);
        let axis = net.constant_i64(path, &[1]);
        net.node(path, "ReduceSum", &[&y, &axis], vec![attr::int("keepdims", 0)])
    }

    /// Routes every choice, first choices of all tokens first: `[batch, chosen × context, 1]`.
    fn route(&self, net: &mut Builder, path: &str, x: &Value) -> Route {
        let choices = (self.chosen * self.context) as i64;
        let weight = net.parameter(&format!("{path}.weight"), &[self.experts, self.width], Init::Deviation(0.02));
        let logits = product(net, path, x, &weight);
        let shares = net.node(path, "Softmax", &[&logits], vec![attr::int("axis", -1)]);
        let count = net.constant_i64(path, &[self.chosen as i64]);
        let [gates, expert] = net.node_of(path, "TopK", &[&shares, &count], vec![attr::int("axis", -1)]);
        let last = net.constant_i64(path, &[-1]);
        let gates = match self.chosen {
            // With one choice, the unnormalised gate keeps the router trainable.
            1 => gates,
            _ => {
                let sum = net.node(path, "ReduceSum", &[&gates, &last], vec![attr::int("keepdims", 1)]);
                net.node(path, "Div", &[&gates, &sum], vec![])
            }
        };
        let mut in_order = |value: &Value| {
            let value = transpose(net, path, value, &[0, 2, 1]);
            reshape(net, path, &value, &[0, choices, 1])
        };
        let (gates, expert) = (in_order(&gates), in_order(&expert));
        // For each choice, the number of choices of the same expert up to and including it.
        let expert_ids = net.constant_i64(path, &(0..self.experts as i64).collect::<Vec<_>>());
        let one_hot = net.node(path, "Equal", &[&expert, &expert_ids], vec![]);
        let one_hot = net.node(path, "Cast", &[&one_hot], vec![attr::int("to", INT64)]);
        let axis = net.scalar_i64(path, 1);
        let count = net.node(path, "CumSum", &[&one_hot, &axis], vec![]);
        let count = net.node(path, "Mul", &[&count, &one_hot], vec![]);
        let count = net.node(path, "ReduceSum", &[&count, &last], vec![attr::int("keepdims", 1)]);
        let [capacity, one, zero] = [self.capacity as i64, 1, 0].map(|number| net.scalar_i64(path, number));
        let in_capacity = net.node(path, "LessOrEqual", &[&count, &capacity], vec![]);
        let base = net.node(path, "Mul", &[&expert, &capacity], vec![]);
        let slot = net.node(path, "Sub", &[&count, &one], vec![]);
        let slot = net.node(path, "Add", &[&base, &slot], vec![]);
        let slots = net.node(path, "Where", &[&in_capacity, &slot, &zero], vec![]);
        let in_capacity = net.node(path, "Cast", &[&in_capacity], vec![attr::int("to", FLOAT)]);
        let gates = net.node(path, "Mul", &[&gates, &in_capacity], vec![]);
        Route { slots, in_capacity, gates }
    }

    fn layer(&self, net: &mut Builder, path: &str, x: &Value, [from, to]: [usize; 2]) -> Value {
        let bound = (6.0 / (from + to) as f64).sqrt();
        let weight = net.parameter(&format!("{path}.weight"), &[self.experts, from, to], Init::Within(bound));
        let bias = net.parameter(&format!("{path}.bias"), &[self.experts, 1, to], Init::Zeros);
        let y = net.node(path, "MatMul", &[x, &weight], vec![]);
        net.node(path, "Add", &[&y, &bias], vec![])
    }
}

const FLOAT: i64 = 1;
const INT64: i64 = 7;

/// Routing of all choices.
struct Route {
    /// Slot; 0 beyond the capacity.
    slots: Value,
    /// 1 within the capacity, else 0.
    in_capacity: Value,
    /// Weight of the expert's output; 0 beyond the capacity.
    gates: Value,
}
