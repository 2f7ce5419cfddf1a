//! GPT (Radford et al., 2019, table 2): token and position embeddings, pre-norm blocks of causal attention and a GELU
//! MLP. The linear head may be tied to the token embedding.
//!
//! With width w, l layers, vocabulary v and context c, the tied model has `(v + c + 2)·w + l·(12·w² + 13·w)`
//! parameters:
//!
//! | size          | layers | width  | heads | parameters        | published |
//! | ---           | ---    | ---    | ---   | ---               | ---       |
//! | gpt2          | 12     | 768    | 12    | 124,439,808       | 124 M     |
//! | gpt2-medium   | 24     | 1,024  | 16    | 354,823,168       | 355 M     |
//! | gpt2-large    | 36     | 1,280  | 20    | 774,030,080       | 774 M     |
//! | gpt2-xl       | 48     | 1,600  | 25    | 1,557,611,200     | 1.5 B     |
//! | gpt3          | 96     | 12,288 | 96    | 174,604,259,328   | 175 B     |
//! | gpt-100b      | 56     | 12,288 | 96    | 102,131,884,032   |           |
//! | megatron-145b | 80     | 12,288 | 96    | 145,622,261,760   | 145.6 B   |
//! | megatron-1t   | 128    | 25,600 | 160   | 1,008,038,758,400 | 1,008 B   |
//!
//! GPT-3 is from Brown et al. (2020, table 2.1), Megatron's two from Narayanan et al. (SC 2021, table 1). `gpt-100b` is
//! not published; it uses the width of its neighbours. The default is small enough to train in a test.

use crate::attention::{Attention, causal_mask};
use crate::builder::{Axis, Builder, Init, Value, attr};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::layer::{dropout, embedding, linear, normalisation, product};
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

pub const EPSILON: f32 = 1e-5;

const fn settings(layers: usize, [width, heads]: [usize; 2], vocabulary: usize, context: usize) -> Settings {
    [
        ("layers", Setting::Number(layers)),
        ("hidden", Setting::Number(width)),
        ("heads", Setting::Number(heads)),
        ("vocabulary", Setting::Number(vocabulary)),
        ("context", Setting::Number(context)),
        ("dropout", Setting::Fraction(0.1)),
    ]
}

type Settings = [(&'static str, Setting); 6];

pub const ENTRY: Entry = Entry {
    name: "gpt",
    about: "small GPT: 2 layers, 64 wide, 16 tokens, tied embedding; and all sizes up to 1 T [Radford et al. 2019]",
    choices: &[
        Choice::width("hidden", 64, "width of the residual stream"),
        Choice::number("layers", 2, 1, 10_000, "number of blocks"),
        Choice::width("vocabulary", 97, "number of different tokens"),
        Choice::number("context", 16, 1, 65_536, "tokens in a sequence"),
        Choice::number("heads", 4, 1, 100_000, "attention heads, a divisor of `hidden`"),
        Choice::truth("tied", true, "tie the weights of head and token embedding"),
        Choice::fraction("dropout", 0.0, "dropout rate of embeddings, attention and branches"),
    ],
    sizes: &[
        Size { name: "gpt2", about: "124 M parameters", settings: &settings(12, [768, 12], 50_257, 1024) },
        Size { name: "gpt2-medium", about: "355 M", settings: &settings(24, [1024, 16], 50_257, 1024) },
        Size { name: "gpt2-large", about: "774 M", settings: &settings(36, [1280, 20], 50_257, 1024) },
        Size { name: "gpt2-xl", about: "1.56 B", settings: &settings(48, [1600, 25], 50_257, 1024) },
        Size { name: "gpt3", about: "175 B", settings: &settings(96, [12_288, 96], 50_257, 2048) },
        Size { name: "gpt-100b", about: "102 B", settings: &settings(56, [12_288, 96], 51_200, 2048) },
        Size { name: "megatron-145b", about: "146 B", settings: &settings(80, [12_288, 96], 51_200, 2048) },
        Size { name: "megatron-1t", about: "1 T", settings: &settings(128, [25_600, 160], 51_200, 2048) },
    ],
    small: &[],
    build,
};

fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    decoder(net, given, batch, |net, block, layer, x| block.build(net, &format!("blocks.{layer}"), x))
}

/// A GPT language model: input `tokens` (i64, batch × context), logits batch × context × vocabulary. `build` builds
/// each layer from the GPT block, the layer index and its input.
pub fn decoder(
    net: &mut Builder,
    given: &Given,
    batch: Axis,
    build: impl Fn(&mut Builder, &Block, usize, &Value) -> Value,
) -> Result<Prediction, ChoiceError> {
    given.divides("heads", "hidden")?;
    let (vocabulary, context, width) = (given.number("vocabulary"), given.number("context"), given.number("hidden"));
    let ratio = given.fraction("dropout");
    let tokens = net.input_i64("tokens", &[batch, Axis::Size(context)]);
    let [table, words] = embedding(net, "wte", &tokens, vocabulary, width);
    let positions = net.constant_i64("", &(0..context as i64).collect::<Vec<_>>());
    let [_, position_rows] = embedding(net, "wpe", &positions, context, width);
    let x = net.node("", "Add", &[&words, &position_rows], vec![]);
    let mut x = dropout(net, "drop", &x, ratio);
    let mask = Some(causal_mask(net, context));
    let block = Block {
        attention: Attention { context, width, heads: given.number("heads"), mask, dropout: ratio },
        inner: 4 * width,
        relu: false,
        dropout: ratio,
    };
    for layer in 0..given.number("layers") {
        x = build(net, &block, layer, &x);
    }
    let x = normalisation(net, "ln_f", &x, width, EPSILON);
    let head = match given.truth("tied") {
        true => table,
        false => net.parameter("head.weight", &[vocabulary, width], Init::Deviation(0.02)),
    };
    let logits = product(net, "head", &x, &head);
    Ok(Prediction { logits, shape: vec![batch, Axis::Size(context), Axis::Size(vocabulary)], target: Target::Token })
}

#[derive(Debug, Clone)]
pub struct Block {
    pub attention: Attention,
    /// Hidden width of the MLP.
    pub inner: usize,
    pub relu: bool,
    /// Dropout ratio of both branches.
    pub dropout: f64,
}

impl Block {
    pub fn build(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let at = |name: &str| format!("{path}.{name}");
        let width = self.attention.width;
        let x = self.attend(net, path, x);
        let y = normalisation(net, &at("ln2"), &x, width, EPSILON);
        let y = linear(net, &at("mlp.fc"), &y, width, self.inner);
        let y = match self.relu {
            true => net.node(&at("mlp.act"), "Relu", &[&y], vec![]),
            false => net.node(&at("mlp.act"), "Gelu", &[&y], vec![attr::string("approximate", "none")]),
        };
        let y = linear(net, &at("mlp.proj"), &y, self.inner, width);
        let y = dropout(net, &at("mlp.drop"), &y, self.dropout);
        net.node(path, "Add", &[&x, &y], vec![])
    }

    /// The attention half of the block: `x` plus its attention branch.
    pub fn attend(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let at = |name: &str| format!("{path}.{name}");
        let width = self.attention.width;
        let y = normalisation(net, &at("ln1"), x, width, EPSILON);
        let qkv = linear(net, &at("attn.qkv"), &y, width, 3 * width);
        let split = vec![attr::int("axis", 2), attr::int("num_outputs", 3)];
        let [q, k, v] = net.node_of(&at("attn"), "Split", &[&qkv], split);
        let y = self.attention.build(net, &at("attn"), [&q, &k, &v]);
        let y = linear(net, &at("attn.proj"), &y, width, width);
        let y = dropout(net, &at("attn.drop"), &y, self.dropout);
        net.node(path, "Add", &[x, &y], vec![])
    }
}
