//! Llama 3 (Grattafiori et al., 2024, table 3): RMS normalisation before attention and MLP, rotary positions, grouped-query
//! attention, a SwiGLU MLP, no biases. Names and counts are those of Hugging Face's `LlamaForCausalLM`.
//!
//! With width w, l layers, h heads of size d = w/h, g key heads, MLP width f and vocabulary v it has
//! `2·v·w + w + l·(2·w² + 2·w·g·d + 3·w·f + 2·w)` parameters:
//!
//! | size        | layers | width  | heads | key heads | MLP    | parameters      | published |
//! | ---         | ---    | ---    | ---   | ---       | ---    | ---             | ---       |
//! | llama3-8b   | 32     | 4,096  | 32    | 8         | 14,336 | 8,030,261,248   | 8.03 B    |
//! | llama3-70b  | 80     | 8,192  | 64    | 8         | 28,672 | 70,553,706,496  | 70.6 B    |
//! | llama3-405b | 126    | 16,384 | 128   | 8         | 53,248 | 405,853,388,800 | 405.9 B   |
//!
//! The default is small enough to train in a test.

use crate::attention::{Attention, causal_mask};
use crate::builder::{Axis, Builder, Init, Value};
use crate::choice::{Choice, ChoiceError, Given, Setting};
use crate::layer::{embedding, linear, product, projection, rms_normalisation, swiglu};
use crate::prediction::{Prediction, Target};
use crate::rotary::Rotary;
use crate::zoo::{Entry, Size};

pub const EPSILON: f32 = 1e-5;

/// Base of the rotary positions.
const THETA: f64 = 500_000.0;

const fn settings(layers: usize, width: usize, heads: usize, ffn: usize) -> [(&'static str, Setting); 7] {
    [
        ("layers", Setting::Number(layers)),
        ("hidden", Setting::Number(width)),
        ("heads", Setting::Number(heads)),
        ("kv-heads", Setting::Number(8)),
        ("ffn", Setting::Number(ffn)),
        ("vocabulary", Setting::Number(128_256)),
        ("context", Setting::Number(8192)),
    ]
}

pub const ENTRY: Entry = Entry {
    name: "llama",
    about: "small Llama 3: 2 layers, 64 wide, 16 tokens, grouped heads; and sizes up to 405 B [Grattafiori et al. 2024]",
    choices: &[
        Choice::width("hidden", 64, "width of the residual stream"),
        Choice::number("layers", 2, 1, 10_000, "number of blocks"),
        Choice::width("ffn", 160, "width of the SwiGLU MLP"),
        Choice::width("vocabulary", 97, "number of different tokens"),
        Choice::number("context", 16, 1, 65_536, "tokens in a sequence"),
        Choice::number("heads", 4, 1, 100_000, "query heads, a divisor of `hidden`"),
        Choice::number("kv-heads", 2, 1, 100_000, "key and value heads, a divisor of `heads`"),
        Choice::truth("tied", false, "tie the weights of head and token embedding"),
    ],
    sizes: &[
        Size { name: "llama3-8b", about: "8.03 B parameters", settings: &settings(32, 4096, 32, 14_336) },
        Size { name: "llama3-70b", about: "70.6 B", settings: &settings(80, 8192, 64, 28_672) },
        Size { name: "llama3-405b", about: "406 B", settings: &settings(126, 16_384, 128, 53_248) },
    ],
    small: &[],
    build,
};

fn build(net: &mut Builder, given: &Given, batch: Axis) -> Result<Prediction, ChoiceError> {
    given.divides("heads", "hidden")?;
    let (width, ffn) = (given.number("hidden"), given.number("ffn"));
    let size = width / given.number("heads");
    if !size.is_multiple_of(2) {
        return Err(given.refuse("heads", "rotary positions need heads of even size"));
    }
    let config = Heads { size, theta: THETA, biases: false };
    decoder(net, given, batch, &config, |net, path, x| {
        let at = |name: &str| format!("{path}.{name}");
        let gate = projection(net, &at("gate_proj"), x, width, ffn);
        let up = projection(net, &at("up_proj"), x, width, ffn);
        let y = swiglu(net, path, &gate, &up);
        projection(net, &at("down_proj"), &y, ffn, width)
    })
}

/// The attention heads of a decoder.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Features of a head, an even number.
    pub size: usize,
    /// Base of the rotary positions.
    pub theta: f64,
    /// Whether the projections of attention have biases.
    pub biases: bool,
}

/// A language model of pre-norm blocks with grouped-query attention: input `tokens` (i64, batch × context), logits batch ×
/// context × vocabulary. `mlp` builds the MLP of a block from its module path and its normalised input.
pub fn decoder(
    net: &mut Builder,
    given: &Given,
    batch: Axis,
    config: &Heads,
    mlp: impl Fn(&mut Builder, &str, &Value) -> Value,
) -> Result<Prediction, ChoiceError> {
    given.divides("kv-heads", "heads")?;
    let (vocabulary, context, width) = (given.number("vocabulary"), given.number("context"), given.number("hidden"));
    let (heads, key_heads) = (given.number("heads"), given.number("kv-heads"));
    let tokens = net.input_i64("tokens", &[batch, Axis::Size(context)]);
    let [table, mut x] = embedding(net, "model.embed_tokens", &tokens, vocabulary, width);
    let rotary = Rotary::new(net, "model.rotary_emb", context, config.size, config.theta);
    let mask = Some(causal_mask(net, context));
    let attention = Attention { context, width: heads * config.size, heads, mask, dropout: 0.0 };
    let layer = if config.biases { linear } else { projection };
    for block in 0..given.number("layers") {
        let path = format!("model.layers.{block}");
        let at = |name: &str| format!("{path}.{name}");
        let y = rms_normalisation(net, &at("input_layernorm"), &x, width, EPSILON);
        let q = layer(net, &at("self_attn.q_proj"), &y, width, heads * config.size);
        let k = layer(net, &at("self_attn.k_proj"), &y, width, key_heads * config.size);
        let v = layer(net, &at("self_attn.v_proj"), &y, width, key_heads * config.size);
        let y = attention.grouped(net, &at("self_attn"), [&q, &k, &v], key_heads, &rotary);
        let y = layer(net, &at("self_attn.o_proj"), &y, heads * config.size, width);
        x = net.node(&path, "Add", &[&x, &y], vec![]);
        let y = rms_normalisation(net, &at("post_attention_layernorm"), &x, width, EPSILON);
        let y = mlp(net, &at("mlp"), &y);
        x = net.node(&path, "Add", &[&x, &y], vec![]);
    }
    let x = rms_normalisation(net, "model.norm", &x, width, EPSILON);
    let head = match given.truth("tied") {
        true => table,
        false => net.parameter("lm_head.weight", &[vocabulary, width], Init::Deviation(0.02)),
    };
    let logits = product(net, "lm_head", &x, &head);
    Ok(Prediction { logits, shape: vec![batch, Axis::Size(context), Axis::Size(vocabulary)], target: Target::Token })
}
