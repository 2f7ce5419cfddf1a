//! A small GPT (Radford et al., 2019): token and position embeddings, blocks of causal attention and a GELU layer with
//! normalisation before each, and a linear head that may share the token embedding's weights.

use compiler::import::onnx::proto::ModelProto;

use crate::builder::{Axis, Builder, Init, Value, attr};

/// What a masked score becomes: softmax gives exactly 0 for it in f32, and no infinity ever meets an infinity.
const MASKED: f32 = -1e9;

/// The shape of a GPT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpt {
    /// Number of different tokens.
    pub vocabulary: usize,
    /// Tokens in a sequence.
    pub context: usize,
    /// Width of the residual stream; a multiple of `heads`.
    pub width: usize,
    /// Attention heads.
    pub heads: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Whether the head uses the token embedding's weights.
    pub tied: bool,
}

impl Gpt {
    /// A GPT small enough to train in a test.
    pub fn small() -> Self {
        Self { vocabulary: 97, context: 16, width: 64, heads: 4, layers: 2, tied: true }
    }

    /// The model: input `tokens` (i64, batch × context), output `logits` (batch × context × vocabulary).
    pub fn build(&self, batch: Axis, seed: u64) -> ModelProto {
        let mut net = Builder::new("gpt", seed);
        let tokens = net.input_i64("tokens", &[batch, Axis::Size(self.context)]);
        let embedding = net.parameter("wte.weight", &[self.vocabulary, self.width], Init::Deviation(0.02));
        let words = net.node("wte", "Gather", &[&embedding, &tokens], vec![]);
        let table = net.parameter("wpe.weight", &[self.context, self.width], Init::Deviation(0.02));
        let positions = net.constant_i64("", &(0..self.context as i64).collect::<Vec<_>>());
        let places = net.node("wpe", "Gather", &[&table, &positions], vec![]);
        let mut x = net.node("", "Add", &[&words, &places], vec![]);
        for layer in 0..self.layers {
            x = self.block(&mut net, &format!("blocks.{layer}"), &x);
        }
        let x = self.normalisation(&mut net, "ln_f", &x);
        let head = match self.tied {
            true => embedding,
            false => net.parameter("head.weight", &[self.vocabulary, self.width], Init::Deviation(0.02)),
        };
        let head = net.node("head", "Transpose", &[&head], vec![attr::ints("perm", &[1, 0])]);
        let logits = net.node("head", "MatMul", &[&x, &head], vec![]);
        net.output_f32("logits", &logits, &[batch, Axis::Size(self.context), Axis::Size(self.vocabulary)]);
        net.finish()
    }

    fn block(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let at = |name: &str| format!("{path}.{name}");
        let y = self.normalisation(net, &at("ln1"), x);
        let y = self.attention(net, &at("attn"), &y);
        let x = net.node(path, "Add", &[x, &y], vec![]);
        let y = self.normalisation(net, &at("ln2"), &x);
        let y = self.linear(net, &at("mlp.fc"), &y, self.width, 4 * self.width);
        let y = net.node(&at("mlp.act"), "Gelu", &[&y], vec![attr::string("approximate", "none")]);
        let y = self.linear(net, &at("mlp.proj"), &y, 4 * self.width, self.width);
        net.node(path, "Add", &[&x, &y], vec![])
    }

    /// softmax(q·kᵀ / √d + mask)·v over the heads.
    fn attention(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let (context, heads, size) = (self.context, self.heads, self.width / self.heads);
        let qkv = self.linear(net, &format!("{path}.qkv"), x, self.width, 3 * self.width);
        let split = vec![attr::int("axis", 2), attr::int("num_outputs", 3)];
        let [q, k, v] = net.node_of(path, "Split", &[&qkv], split);
        // 0 copies the batch from the input.
        let shape = net.constant_i64(path, &[0, context as i64, heads as i64, size as i64]);
        let mut by_head = |value: &Value, perm: &[i64]| {
            let value = net.node(path, "Reshape", &[value, &shape], vec![attr::int("allowzero", 0)]);
            net.node(path, "Transpose", &[&value], vec![attr::ints("perm", perm)])
        };
        let (q, k, v) = (by_head(&q, &[0, 2, 1, 3]), by_head(&k, &[0, 2, 3, 1]), by_head(&v, &[0, 2, 1, 3]));
        let scores = net.node(path, "MatMul", &[&q, &k], vec![]);
        let scale = net.constant_f32(path, &[], &[1.0 / (size as f32).sqrt()]);
        let scores = net.node(path, "Mul", &[&scores, &scale], vec![]);
        let causal: Vec<f32> =
            (0..context * context).map(|at| if at % context > at / context { MASKED } else { 0.0 }).collect();
        let mask = net.constant_f32(path, &[1, 1, context, context], &causal);
        let scores = net.node(path, "Add", &[&scores, &mask], vec![]);
        let weights = net.node(path, "Softmax", &[&scores], vec![attr::int("axis", -1)]);
        let y = net.node(path, "MatMul", &[&weights, &v], vec![]);
        let y = net.node(path, "Transpose", &[&y], vec![attr::ints("perm", &[0, 2, 1, 3])]);
        let shape = net.constant_i64(path, &[0, context as i64, self.width as i64]);
        let y = net.node(path, "Reshape", &[&y, &shape], vec![attr::int("allowzero", 0)]);
        self.linear(net, &format!("{path}.proj"), &y, self.width, self.width)
    }

    fn linear(&self, net: &mut Builder, path: &str, x: &Value, from: usize, to: usize) -> Value {
        let weight = net.parameter(&format!("{path}.weight"), &[to, from], Init::Xavier);
        let bias = net.parameter(&format!("{path}.bias"), &[to], Init::Zeros);
        let weight = net.node(path, "Transpose", &[&weight], vec![attr::ints("perm", &[1, 0])]);
        let y = net.node(path, "MatMul", &[x, &weight], vec![]);
        net.node(path, "Add", &[&bias, &y], vec![])
    }

    fn normalisation(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let scale = net.parameter(&format!("{path}.weight"), &[self.width], Init::Ones);
        let bias = net.parameter(&format!("{path}.bias"), &[self.width], Init::Zeros);
        let attributes = vec![attr::int("axis", -1), attr::float("epsilon", 1e-5)];
        net.node(path, "LayerNormalization", &[x, &scale, &bias], attributes)
    }
}
