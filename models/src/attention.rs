//! Multi-head attention: softmax(q·kᵀ / √d + mask)·v. Heads may be grouped, and positions may rotate queries and keys.

use crate::builder::{Builder, Value, attr};
use crate::layer::{dropout, reshape, transpose};
use crate::rotary::Rotary;

/// Value of a masked score: finite, so that infinities never cancel to NaN, and softmax still gives exactly 0 in f32.
const MASKED: f32 = -1e9;

#[derive(Debug, Clone)]
pub struct Attention {
    pub context: usize,
    /// Width of q over all heads.
    pub width: usize,
    /// Number of heads; must divide the width.
    pub heads: usize,
    /// Added to the scores; see [`causal_mask`].
    pub mask: Option<Value>,
    /// Dropout ratio of the attention weights.
    pub dropout: f64,
}

impl Attention {
    /// Maps q, k and v of `[batch, context, width]` to the same shape.
    pub fn build(&self, net: &mut Builder, path: &str, [q, k, v]: [&Value; 3]) -> Value {
        let shape = self.shape(net, path, self.heads);
        let mut by_head = |x: &Value, perm: &[i64]| by_head(net, path, x, &shape, perm);
        let (q, k, v) = (by_head(q, &[0, 2, 1, 3]), by_head(k, &[0, 2, 3, 1]), by_head(v, &[0, 2, 1, 3]));
        self.attend(net, path, [&q, &k, &v])
    }

    /// The same with rotary positions, and k and v of `key_heads` heads, each shared by consecutive query heads
    /// (Ainslie et al., GQA, EMNLP 2023).
    pub fn grouped(
        &self,
        net: &mut Builder,
        path: &str,
        [q, k, v]: [&Value; 3],
        key_heads: usize,
        rotary: &Rotary,
    ) -> Value {
        let (shape, key_shape) = (self.shape(net, path, self.heads), self.shape(net, path, key_heads));
        let [q, k, v] = [(q, &shape), (k, &key_shape), (v, &key_shape)]
            .map(|(x, shape)| by_head(net, path, x, shape, &[0, 2, 1, 3]));
        let (q, k) = (rotary.turn(net, path, &q), rotary.turn(net, path, &k));
        let (k, v) = (self.repeated(net, path, &k, key_heads), self.repeated(net, path, &v, key_heads));
        let k = transpose(net, path, &k, &[0, 1, 3, 2]);
        self.attend(net, path, [&q, &k, &v])
    }

    /// The shape `[batch, context, heads, size]`. A 0 copies the batch size from the input.
    fn shape(&self, net: &mut Builder, path: &str, heads: usize) -> Value {
        net.constant_i64(path, &[0, self.context as i64, heads as i64, self.size() as i64])
    }

    /// Repeats each of `key_heads` heads for the query heads that share it.
    fn repeated(&self, net: &mut Builder, path: &str, x: &Value, key_heads: usize) -> Value {
        let repeats = self.heads / key_heads;
        if repeats == 1 {
            return x.clone();
        }
        let (context, size) = (self.context as i64, self.size() as i64);
        let x = reshape(net, path, x, &[0, key_heads as i64, 1, context, size]);
        let shape = net.constant_i64(path, &[1, 1, repeats as i64, 1, 1]);
        let x = net.node(path, "Expand", &[&x, &shape], vec![]);
        reshape(net, path, &x, &[0, self.heads as i64, context, size])
    }

    /// Maps q and v of `[batch, heads, context, size]` and k of `[batch, heads, size, context]` to
    /// `[batch, context, width]`.
    fn attend(&self, net: &mut Builder, path: &str, [q, k, v]: [&Value; 3]) -> Value {
        let scores = net.node(path, "MatMul", &[q, k], vec![]);
        let scale = net.constant_f32(path, &[], &[1.0 / (self.size() as f32).sqrt()]);
        let mut scores = net.node(path, "Mul", &[&scores, &scale], vec![]);
        if let Some(mask) = &self.mask {
            scores = net.node(path, "Add", &[&scores, mask], vec![]);
        }
        let weights = net.node(path, "Softmax", &[&scores], vec![attr::int("axis", -1)]);
        let weights = dropout(net, path, &weights, self.dropout);
        let y = net.node(path, "MatMul", &[&weights, v], vec![]);
        let y = transpose(net, path, &y, &[0, 2, 1, 3]);
        reshape(net, path, &y, &[0, self.context as i64, self.width as i64])
    }

    /// Width of a head.
    fn size(&self) -> usize {
        self.width / self.heads
    }
}

fn by_head(net: &mut Builder, path: &str, x: &Value, shape: &Value, perm: &[i64]) -> Value {
    let x = net.node(path, "Reshape", &[x, shape], vec![attr::int("allowzero", 0)]);
    transpose(net, path, &x, perm)
}

/// An additive causal mask, shared by all layers.
///
/// The graph computes it, because for 2,048 tokens it would take 16 MB in the file.
pub fn causal_mask(net: &mut Builder, context: usize) -> Value {
    let shape = net.constant_i64("", &[1, 1, context as i64, context as i64]);
    let hidden = net.fill("", &shape, MASKED);
    let above = net.scalar_i64("", 1);
    net.node("", "Trilu", &[&hidden, &above], vec![attr::int("upper", 1)])
}
