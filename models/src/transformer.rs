//! Transformer-L of GPipe (Huang et al., NeurIPS 2019, table 1): a language model of L blocks. The width is 2,048, the
//! feed-forward width 8,192, with 32 heads and 1,024 tokens.
//!
//! The paper states neither the vocabulary nor the tied weights. A block with biases has `4·w² + 2·w·f + 9·w + f` =
//! 50,358,272 parameters, and the published counts leave 131.1 M. That is exactly an untied embedding and head with
//! bias over 32,000 tokens, plus a final normalisation. (A tied table over 64,000 tokens fits too: `--vocabulary 64000
//! --tied true`.) Positions are sinusoidal, without parameters.
//!
//! | L   | parameters    | published |
//! | --- | ---           | ---       |
//! | 3   | 282,182,912   | 282.2 M   |
//! | 13  | 785,765,632   | 785.8 M   |
//! | 39  | 2,095,080,704 | 2.1 B     |
//! | 103 | 5,318,010,112 | 5.3 B     |

use crate::attention::{Attention, causal_mask};
use crate::builder::{Axis, Builder, Init, Value, attr};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::gpt::Block;
use crate::layer::{concatenate, dropout, embedding, normalisation, product};
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

pub const ENTRY: Entry = Entry {
    name: "transformer",
    about: "Transformer-3, 2048 wide, 282.2 M parameters [Huang et al. 2019]",
    choices: &[
        Choice::number("layers", 3, 1, 10_000, "number of blocks"),
        Choice::width("hidden", 2048, "width of the residual stream, an even number"),
        Choice::width("feed-forward", 8192, "width between the two linear layers of a block"),
        Choice::number("heads", 32, 1, 100_000, "attention heads, a divisor of `hidden`"),
        Choice::width("vocabulary", 32_000, "number of different tokens"),
        Choice::number("context", 1024, 1, 65_536, "tokens in a sequence"),
        Choice::truth("tied", false, "tie the weights of head and embedding"),
        Choice::fraction("dropout", 0.1, "dropout rate of embeddings, attention and branches"),
    ],
    sizes: &[
        Size { name: "transformer-3", about: "282 M parameters", settings: &[("layers", Setting::Number(3))] },
        Size { name: "transformer-13", about: "786 M", settings: &[("layers", Setting::Number(13))] },
        Size { name: "transformer-39", about: "2.1 B", settings: &[("layers", Setting::Number(39))] },
        Size { name: "transformer-103", about: "5.3 B", settings: &[("layers", Setting::Number(103))] },
    ],
    small: &[
        ("layers", Setting::Number(2)),
        ("hidden", Setting::Number(16)),
        ("feed-forward", Setting::Number(32)),
        ("heads", Setting::Number(2)),
        ("vocabulary", Setting::Number(11)),
        ("context", Setting::Number(6)),
    ],
    build,
};

/// Input `tokens` (i64, batch × context), logits batch × context × vocabulary.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    given.divides("heads", "hidden")?;
    let (vocabulary, context, width) = (given.number("vocabulary"), given.number("context"), given.number("hidden"));
    if !width.is_multiple_of(2) {
        return Err(given.refuse("hidden", "half of the positions' features are sines, half cosines"));
    }
    let ratio = given.fraction("dropout");
    let tokens = net.input_i64("tokens", &[batch, Axis::Size(context)]);
    let [table, words] = embedding(net, "embedding", &tokens, vocabulary, width);
    let positions = sines(net, "positions", context, width);
    let x = net.node("", "Add", &[&words, &positions], vec![]);
    let mut x = dropout(net, "drop", &x, ratio);
    let mask = Some(causal_mask(net, context));
    let block = Block {
        attention: Attention { context, width, heads: given.number("heads"), mask, dropout: ratio },
        inner: given.number("feed-forward"),
        relu: true,
        dropout: ratio,
    };
    for layer in 0..given.number("layers") {
        x = block.build(net, &format!("blocks.{layer}"), &x);
    }
    let x = normalisation(net, "ln_f", &x, width, 1e-5);
    let head = match given.truth("tied") {
        true => table,
        false => net.parameter("head.weight", &[vocabulary, width], Init::Deviation(0.02)),
    };
    let bias = net.parameter("head.bias", &[vocabulary], Init::Zeros);
    let logits = product(net, "head", &x, &head);
    let logits = net.node("head", "Add", &[&logits, &bias], vec![]);
    Ok(Prediction { logits, shape: vec![batch, Axis::Size(context), Axis::Size(vocabulary)], target: Target::Token })
}

/// Sinusoidal positions: sin(p·r) and cos(p·r) for positions p and rates r from 1 down to 1/10,000 (Vaswani et al.,
/// 2017, section 3.5). Sines are in the first half, as in tensor2tensor. The graph computes them from the rates.
fn sines(net: &mut Builder, path: &str, context: usize, width: usize) -> Value {
    let half = width / 2;
    let rate = |at: usize| (-(10_000_f64.ln()) * at as f64 / half as f64).exp() as f32;
    let rates = net.constant_f32(path, &[1, half], &(0..half).map(rate).collect::<Vec<_>>());
    let [begin, end, step] = [0, context as i64, 1].map(|number| net.scalar_i64(path, number));
    let positions = net.node(path, "Range", &[&begin, &end, &step], vec![]);
    let positions = net.node(path, "Cast", &[&positions], vec![attr::int("to", 1)]);
    let axis = net.constant_i64(path, &[1]);
    let positions = net.node(path, "Unsqueeze", &[&positions, &axis], vec![]);
    let angles = net.node(path, "Mul", &[&positions, &rates], vec![]);
    let (sine, cosine) = (net.node(path, "Sin", &[&angles], vec![]), net.node(path, "Cos", &[&angles], vec![]));
    concatenate(net, path, &[&sine, &cosine], 1)
}
