//! Rotary position embedding (Su et al., RoFormer, 2021): the pair of features i and i + d/2 of a head is rotated by the
//! angle p·θ^(-2i/d) at position p.
//!
//! Written as exports of Hugging Face's models have it: `x·cos + (-x₂, x₁)·sin`, with one table each of cosines and sines
//! for all layers. The graph computes the tables from the rates, because for 8,192 tokens they would take 8 MB in the
//! file.

use crate::builder::{Builder, Value, attr};
use crate::layer::{concatenate, part};

/// Tables `[context, size]` of cosines and sines.
#[derive(Debug, Clone)]
pub struct Rotary {
    size: usize,
    cosines: Value,
    sines: Value,
}

impl Rotary {
    /// Tables for heads of an even `size` and the base `theta`.
    pub fn new(net: &mut Builder, path: &str, context: usize, size: usize, theta: f64) -> Self {
        let half = size / 2;
        let rate = |at: usize| theta.powf(-(at as f64) / half as f64) as f32;
        let rates = net.constant_f32(path, &[1, half], &(0..half).map(rate).collect::<Vec<_>>());
        let [begin, end, step] = [0, context as i64, 1].map(|number| net.scalar_i64(path, number));
        let positions = net.node(path, "Range", &[&begin, &end, &step], vec![]);
        let positions = net.node(path, "Cast", &[&positions], vec![attr::int("to", 1)]);
        let axis = net.constant_i64(path, &[1]);
        let positions = net.node(path, "Unsqueeze", &[&positions, &axis], vec![]);
        let angles = net.node(path, "Mul", &[&positions, &rates], vec![]);
        let angles = concatenate(net, path, &[&angles, &angles], 1);
        let cosines = net.node(path, "Cos", &[&angles], vec![]);
        let sines = net.node(path, "Sin", &[&angles], vec![]);
        Self { size, cosines, sines }
    }

    /// Rotates `[batch, heads, context, size]`.
    pub fn turn(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let half = (self.size / 2) as i64;
        let first = part(net, path, x, 3, 0, half);
        let second = part(net, path, x, 3, half, 2 * half);
        let negated = net.node(path, "Neg", &[&second], vec![]);
        let rotated = concatenate(net, path, &[&negated, &first], -1);
        let scaled = net.node(path, "Mul", &[x, &self.cosines], vec![]);
        let rotated = net.node(path, "Mul", &[&rotated, &self.sines], vec![]);
        net.node(path, "Add", &[&scaled, &rotated], vec![])
    }
}
