//! Attention over several heads: softmax(q·kᵀ / √d + mask)·v.

use crate::builder::{Builder, Value, attr};
use crate::layer::{dropout, reshaped, turned};

/// What a masked score becomes: softmax gives exactly 0 for it in f32, and no infinity ever meets an infinity.
const MASKED: f32 = -1e9;

/// The shape of an attention.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Tokens in a sequence.
    pub context: usize,
    /// Width of queries, keys and values together over all heads.
    pub width: usize,
    /// Heads; a divisor of the width.
    pub heads: usize,
    /// Added to the scores; see [`causal_mask`].
    pub mask: Option<Value>,
    /// How much of the attention is dropped.
    pub dropout: f64,
}

impl Attention {
    /// `[batch, context, width]` from queries, keys and values of that shape.
    pub fn build(&self, net: &mut Builder, path: &str, [q, k, v]: [&Value; 3]) -> Value {
        let (context, heads, size) = (self.context as i64, self.heads as i64, self.width / self.heads);
        // 0 copies the batch from the input.
        let shape = net.constant_i64(path, &[0, context, heads, size as i64]);
        let mut by_head = |value: &Value, perm: &[i64]| {
            let value = net.node(path, "Reshape", &[value, &shape], vec![attr::int("allowzero", 0)]);
            turned(net, path, &value, perm)
        };
        let (q, k, v) = (by_head(q, &[0, 2, 1, 3]), by_head(k, &[0, 2, 3, 1]), by_head(v, &[0, 2, 1, 3]));
        let scores = net.node(path, "MatMul", &[&q, &k], vec![]);
        let scale = net.constant_f32(path, &[], &[1.0 / (size as f32).sqrt()]);
        let mut scores = net.node(path, "Mul", &[&scores, &scale], vec![]);
        if let Some(mask) = &self.mask {
            scores = net.node(path, "Add", &[&scores, mask], vec![]);
        }
        let weights = net.node(path, "Softmax", &[&scores], vec![attr::int("axis", -1)]);
        let weights = dropout(net, path, &weights, self.dropout);
        let y = net.node(path, "MatMul", &[&weights, &v], vec![]);
        let y = turned(net, path, &y, &[0, 2, 1, 3]);
        reshaped(net, path, &y, &[0, context, self.width as i64])
    }
}

/// One table for all layers that hides from every token what comes after it.
///
/// It is worked out from its size instead of stored: for 2,048 tokens it would be 16 MB in the file.
pub fn causal_mask(net: &mut Builder, context: usize) -> Value {
    let shape = net.constant_i64("", &[1, 1, context as i64, context as i64]);
    let hidden = net.filled("", &shape, MASKED);
    let above = net.scalar_i64("", 1);
    net.node("", "Trilu", &[&hidden, &above], vec![attr::int("upper", 1)])
}
