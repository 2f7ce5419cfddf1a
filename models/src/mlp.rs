//! Multilayer perceptrons: linear layers with ReLU between them.

use compiler::import::onnx::proto::ModelProto;

use crate::builder::{Axis, Builder, Init, attr};

/// The shape of a perceptron.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mlp {
    /// The dimensions of one sample; more than one are flattened first.
    pub sample: Vec<usize>,
    /// The width of each hidden layer; none makes a linear model.
    pub hidden: Vec<usize>,
    /// The width of the result.
    pub classes: usize,
}

impl Mlp {
    /// The one for 8×8 digits: 64-128-64-10, 17,226 parameters.
    pub fn digits() -> Self {
        Self { sample: vec![1, 8, 8], hidden: vec![128, 64], classes: 10 }
    }

    /// The model: input `x`, output `logits`, layers `fc1`, `fc2`, … with Kaiming weights and zero biases.
    pub fn build(&self, batch: Axis, seed: u64) -> ModelProto {
        let mut net = Builder::new("mlp", seed);
        let sample = self.sample.iter().map(|size| Axis::Size(*size));
        let mut y = net.input_f32("x", &[batch].into_iter().chain(sample).collect::<Vec<_>>());
        if self.sample.len() != 1 {
            y = net.node("flatten", "Flatten", &[&y], vec![attr::int("axis", 1)]);
        }
        let mut width: usize = self.sample.iter().product();
        for (layer, next) in self.hidden.iter().chain([&self.classes]).enumerate() {
            let path = format!("fc{}", layer + 1);
            let weight = net.parameter(&format!("{path}.weight"), &[*next, width], Init::Kaiming);
            let bias = net.parameter(&format!("{path}.bias"), &[*next], Init::Zeros);
            let gemm = vec![attr::float("alpha", 1.0), attr::float("beta", 1.0), attr::int("transB", 1)];
            y = net.node(&path, "Gemm", &[&y, &weight, &bias], gemm);
            if layer < self.hidden.len() {
                y = net.node(&format!("relu{}", layer + 1), "Relu", &[&y], vec![]);
            }
            width = *next;
        }
        net.output_f32("logits", &y, &[batch, Axis::Size(self.classes)]);
        net.finish()
    }
}
