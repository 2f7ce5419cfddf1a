//! The LSTM layer, with PyTorch's parameters.
//!
//! PyTorch orders gates i, f, g, o and has one matrix per direction. ONNX orders them i, o, f, g and stacks all
//! directions. As in PyTorch's exporter, the graph splits and concatenates the parameters, which keep their names and
//! shapes. Importers fold these nodes away.

use crate::builder::{Builder, Init, Value, attr};
use crate::layer::{concatenate, dropout, reshape, transpose};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lstm {
    pub from: usize,
    pub to: usize,
    /// Adds a layer that reads the sequence in reverse; the output is then twice as wide.
    pub bidirectional: bool,
    /// Dropout ratio of the recurrent weights (DropConnect; Merity et al., 2018).
    pub weight_drop: f64,
}

impl Lstm {
    /// Unidirectional, without weight dropout.
    pub fn plain(from: usize, to: usize) -> Self {
        Self { from, to, bidirectional: false, weight_drop: 0.0 }
    }

    /// The states at all steps. Sequences are time-major, `[time, batch, width]`; the initial state is zero.
    pub fn build(&self, net: &mut Builder, path: &str, x: &Value) -> Value {
        let directions: &[&str] = if self.bidirectional { &["", "_reverse"] } else { &[""] };
        let bound = Init::Within(1.0 / (self.to as f64).sqrt());
        let (gate_width, mut weights) = (4 * self.to, [vec![], vec![], vec![]]);
        for end in directions {
            let mut parameter =
                |name: &str, dims: &[usize]| net.parameter(&format!("{path}.{name}_l0{end}"), dims, bound);
            let input = parameter("weight_ih", &[gate_width, self.from]);
            let state = parameter("weight_hh", &[gate_width, self.to]);
            let biases = [parameter("bias_ih", &[gate_width]), parameter("bias_hh", &[gate_width])];
            let state = dropout(net, path, &state, self.weight_drop);
            weights[0].push(gates(net, path, &input));
            weights[1].push(gates(net, path, &state));
            let biases = biases.map(|bias| gates(net, path, &bias));
            weights[2].push(concatenate(net, path, &[&biases[0], &biases[1]], 0));
        }
        let [input, state, bias] = weights.map(|each| {
            let first = net.constant_i64(path, &[0]);
            let each: Vec<Value> = each.iter().map(|one| net.node(path, "Unsqueeze", &[one, &first], vec![])).collect();
            match each.as_slice() {
                [one] => one.clone(),
                parts => concatenate(net, path, &parts.iter().collect::<Vec<_>>(), 0),
            }
        });
        let direction = if self.bidirectional { "bidirectional" } else { "forward" };
        let attributes = vec![attr::string("direction", direction), attr::int("hidden_size", self.to as i64)];
        let [y, _state, _cell] = net.node_of(path, "LSTM", &[x, &input, &state, &bias], attributes);
        if self.bidirectional {
            let y = transpose(net, path, &y, &[0, 2, 1, 3]);
            return reshape(net, path, &y, &[0, 0, 2 * self.to as i64]);
        }
        let axis = net.constant_i64(path, &[1]);
        net.node(path, "Squeeze", &[&y, &axis], vec![])
    }
}

/// Reorders gates from i, f, g, o to i, o, f, g.
fn gates(net: &mut Builder, path: &str, weight: &Value) -> Value {
    let split = vec![attr::int("axis", 0), attr::int("num_outputs", 4)];
    let [i, f, g, o] = net.node_of(path, "Split", &[weight], split);
    concatenate(net, path, &[&i, &o, &f, &g], 0)
}
