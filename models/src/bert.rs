//! BERT with its masked-language-model head (Devlin et al., NAACL 2019): post-norm blocks, and a head tied to the word
//! embedding. Module names and parameter counts are those of Hugging Face's `BertForMaskedLM`.
//!
//! | size       | layers | width | heads | parameters  | published |
//! | ---        | ---    | ---   | ---   | ---         | ---       |
//! | bert-base  | 12     | 768   | 12    | 109,514,298 | 110 M     |
//! | bert-large | 24     | 1,024 | 16    | 335,174,458 | 340 M     |
//!
//! Sequences have full length, without a padding mask. Labels of unmasked tokens are -100.

use crate::attention::Attention;
use crate::builder::{Axis, Builder, Init, Value, attr};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::layer::{dropout, embedding, linear, normalisation, product};
use crate::prediction::{Prediction, Target};
use crate::zoo::{Entry, Size};

const EPSILON: f32 = 1e-12;

pub const ENTRY: Entry = Entry {
    name: "bert",
    about: "BERT-base with its masked-language-model head, 110 M parameters [Devlin et al. 2019]",
    choices: &[
        Choice::number("layers", 12, 1, 10_000, "number of blocks"),
        Choice::width("hidden", 768, "width of the residual stream; blocks are four times as wide inside"),
        Choice::number("heads", 12, 1, 100_000, "attention heads, a divisor of `hidden`"),
        Choice::width("vocabulary", 30_522, "number of different tokens"),
        Choice::number("context", 512, 1, 65_536, "tokens in a sequence"),
        Choice::fraction("dropout", 0.1, "dropout rate of embeddings, attention and branches"),
    ],
    sizes: &[
        Size { name: "bert-base", about: "110 M parameters", settings: &[] },
        Size {
            name: "bert-large",
            about: "335 M",
            settings: &[
                ("layers", Setting::Number(24)),
                ("hidden", Setting::Number(1024)),
                ("heads", Setting::Number(16)),
            ],
        },
    ],
    small: &[
        ("layers", Setting::Number(2)),
        ("hidden", Setting::Number(16)),
        ("heads", Setting::Number(2)),
        ("vocabulary", Setting::Number(11)),
        ("context", Setting::Number(6)),
    ],
    build,
};

/// Inputs `tokens` and `segments` (i64, batch × context), logits batch × context × vocabulary.
fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    given.divides("heads", "hidden")?;
    let (vocabulary, context, width) = (given.number("vocabulary"), given.number("context"), given.number("hidden"));
    let ratio = given.fraction("dropout");
    let tokens = net.input_i64("tokens", &[batch, Axis::Size(context)]);
    let segments = net.input_i64("segments", &[batch, Axis::Size(context)]);
    let at = |name: &str| format!("bert.embeddings.{name}");
    let [table, words] = embedding(net, &at("word_embeddings"), &tokens, vocabulary, width);
    let [_, kinds] = embedding(net, &at("token_type_embeddings"), &segments, 2, width);
    let positions = net.constant_i64(&at("position_embeddings"), &(0..context as i64).collect::<Vec<_>>());
    let [_, position_rows] = embedding(net, &at("position_embeddings"), &positions, context, width);
    let x = net.node("bert.embeddings", "Add", &[&words, &kinds], vec![]);
    let x = net.node("bert.embeddings", "Add", &[&x, &position_rows], vec![]);
    let x = normalisation(net, &at("LayerNorm"), &x, width, EPSILON);
    let mut x = dropout(net, &at("dropout"), &x, ratio);
    let attention = Attention { context, width, heads: given.number("heads"), mask: None, dropout: ratio };
    for layer in 0..given.number("layers") {
        x = block(net, &format!("bert.encoder.layer.{layer}"), &x, &attention, ratio);
    }
    let head = "cls.predictions.transform";
    let y = linear(net, &format!("{head}.dense"), &x, width, width);
    let y = gelu(net, &format!("{head}.transform_act_fn"), &y);
    let y = normalisation(net, &format!("{head}.LayerNorm"), &y, width, EPSILON);
    let bias = net.parameter("cls.predictions.bias", &[vocabulary], Init::Zeros);
    let logits = product(net, "cls.predictions.decoder", &y, &table);
    let logits = net.node("cls.predictions.decoder", "Add", &[&logits, &bias], vec![]);
    Ok(Prediction { logits, shape: vec![batch, Axis::Size(context), Axis::Size(vocabulary)], target: Target::Token })
}

fn block(net: &mut Builder, path: &str, x: &Value, attention: &Attention, ratio: f64) -> Value {
    let at = |name: &str| format!("{path}.{name}");
    let width = attention.width;
    let [q, k, v] =
        ["query", "key", "value"].map(|name| linear(net, &at(&format!("attention.self.{name}")), x, width, width));
    let y = attention.build(net, &at("attention.self"), [&q, &k, &v]);
    let x = branch(net, &at("attention.output"), x, &y, [width, width], ratio);
    let y = linear(net, &at("intermediate.dense"), &x, width, 4 * width);
    let y = gelu(net, &at("intermediate.intermediate_act_fn"), &y);
    branch(net, &at("output"), &x, &y, [4 * width, width], ratio)
}

/// End of a residual branch: linear, dropout, residual sum, normalisation.
fn branch(net: &mut Builder, path: &str, x: &Value, y: &Value, [from, to]: [usize; 2], ratio: f64) -> Value {
    let y = linear(net, &format!("{path}.dense"), y, from, to);
    let y = dropout(net, &format!("{path}.dropout"), &y, ratio);
    let sum = net.node(path, "Add", &[&y, x], vec![]);
    normalisation(net, &format!("{path}.LayerNorm"), &sum, to, EPSILON)
}

fn gelu(net: &mut Builder, path: &str, x: &Value) -> Value {
    net.node(path, "Gelu", &[x], vec![attr::string("approximate", "none")])
}
