//! Multi-head attention: softmax(q·kᵀ / √d + mask)·v.

use crate::builder::{Builder, Value, attr};
use crate::layer::{dropout, reshaped, turned};

/// Value of a masked score: finite, so that infinities never cancel to NaN, and softmax still gives exactly 0 in f32.
const MASKED: f32 = -1e9;

#[derive(Debug, Clone)]
pub struct Attention {
    pub context: usize,
    /// Width of q, k and v over all heads.
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
        let (context, heads, size) = (self.context as i64, self.heads as i64, self.width / self.heads);
        // A 0 copies the batch size from the input.
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

/// An additive causal mask, shared by all layers.
///
/// The graph computes it, because for 2,048 tokens it would take 16 MB in the file.
pub fn causal_mask(net: &mut Builder, context: usize) -> Value {
    let shape = net.constant_i64("", &[1, 1, context as i64, context as i64]);
    let hidden = net.filled("", &shape, MASKED);
    let above = net.scalar_i64("", 1);
    net.node("", "Trilu", &[&hidden, &above], vec![attr::int("upper", 1)])
}
