//! gpt-oss (OpenAI, model card of gpt-oss-120b and gpt-oss-20b, 2025): a Llama with experts in every block, four per token,
//! heads of 64 features, and biases in attention and experts. The routing and the capacity of an expert are those of
//! [`crate::moe`].
//!
//! Left out: attention sinks, the sliding window of every other layer, the bias of the router, and the limits of the
//! experts' activation. Attention is therefore full in all layers.
//!
//! | size         | layers | experts | parameters      | published |
//! | ---          | ---    | ---     | ---             | ---       |
//! | gpt-oss-20b  | 24     | 32      | 20,914,754,880  | 20.91 B   |
//! | gpt-oss-120b | 36     | 128     | 116,829,149,760 | 116.83 B  |

use crate::builder::{Axis, Builder};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::llama::{Heads, decoder};
use crate::moe::{Activation, Mixture};
use crate::prediction::Prediction;
use crate::zoo::{Entry, Size};

/// Base of the rotary positions.
const THETA: f64 = 150_000.0;

const fn settings(layers: usize, experts: usize) -> [(&'static str, Setting); 11] {
    [
        ("layers", Setting::Number(layers)),
        ("hidden", Setting::Number(2880)),
        ("heads", Setting::Number(64)),
        ("kv-heads", Setting::Number(8)),
        ("head-size", Setting::Number(64)),
        ("ffn", Setting::Number(2880)),
        ("experts", Setting::Number(experts)),
        ("chosen", Setting::Number(4)),
        ("capacity", Setting::Number(100)),
        ("vocabulary", Setting::Number(201_088)),
        ("context", Setting::Number(4096)),
    ]
}

pub const ENTRY: Entry = Entry {
    name: "gpt-oss",
    about: "Llama with 2 of 4 experts per token; and sizes up to 117 B, without sinks and sliding windows [OpenAI 2025]",
    choices: &[
        Choice::width("hidden", 32, "width of the residual stream"),
        Choice::number("layers", 2, 1, 10_000, "number of blocks"),
        Choice::width("ffn", 48, "width of an expert"),
        Choice::number("experts", 4, 1, 100_000, "experts per block"),
        Choice::number("chosen", 2, 1, 1_000, "experts per token (top-k)"),
        Choice::number("capacity", 125, 1, 100_000, "expert capacity in percent of an equal share of the tokens"),
        Choice::width("vocabulary", 97, "number of different tokens"),
        Choice::number("context", 16, 1, 65_536, "tokens in a sequence"),
        Choice::number("heads", 4, 1, 100_000, "query heads"),
        Choice::number("kv-heads", 2, 1, 100_000, "key and value heads, a divisor of `heads`"),
        Choice::width("head-size", 16, "features of a head, an even number"),
        Choice::truth("tied", false, "tie the weights of head and token embedding"),
    ],
    sizes: &[
        Size { name: "gpt-oss-20b", about: "20.9 B parameters, 32 experts", settings: &settings(24, 32) },
        Size { name: "gpt-oss-120b", about: "117 B, 128 experts", settings: &settings(36, 128) },
    ],
    small: &[],
    build,
};

fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    let size = given.number("head-size");
    if !size.is_multiple_of(2) {
        return Err(given.refuse("head-size", "rotary positions need heads of even size"));
    }
    let mixture = Mixture { inner: given.number("ffn"), activation: Activation::SwiGlu, ..Mixture::new(given)? };
    let config = Heads { size, theta: THETA, biases: true };
    decoder(net, given, batch, &config, |net, path, x| mixture.build(net, path, x))
}
