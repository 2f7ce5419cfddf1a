//! External data for comparisons, if available, and model results for it.
#![allow(dead_code)] // Each test file uses a part.

use compiler::graph::bind::{bind, symbols};
use compiler::graph::evaluate::evaluate;
use compiler::graph::verify::verify;
use compiler::import::import::{Model, Weight};
use compiler::tensor::Tensor;
use compiler::tensor::dim::Bindings;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file or folder of the shared data; prints a note and returns `None` if it does not exist.
pub fn data(relative: &str) -> Option<PathBuf> {
    let default_folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data");
    let path = std::env::var_os("PIPEC_DATA").map_or(default_folder, PathBuf::from).join(relative);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: no shared data");
    None
}

/// All arrays of an `.npz` file.
pub fn arrays(path: &Path) -> BTreeMap<String, Tensor> {
    runtime::data::weights::read(path).unwrap()
}

/// The first step of an array `[steps, …]`.
pub fn first_step(t: &Tensor) -> Tensor {
    let shape = t.shape()[1..].to_vec();
    let bytes = shape.iter().product::<usize>() * t.dtype().size();
    Tensor::new(t.dtype(), shape, t.bytes().slice(..bytes)).unwrap()
}

/// All results of a model by the reference kernels, with batch size `size`.
pub fn results(model: &Model, size: i64, given: &BTreeMap<String, Tensor>) -> Vec<Tensor> {
    let bindings: Bindings = symbols(&model.graph).into_iter().map(|s| (s, size)).collect();
    let graph = bind(&model.graph, &bindings).unwrap();
    verify(&graph).unwrap();
    let mut values = given.clone();
    for (name, weight) in &model.weights {
        match weight {
            Weight::Given(tensor) => values.insert(name.clone(), tensor.clone()),
            Weight::Missing { path } => panic!("{path}"),
        };
    }
    let values = evaluate(&graph, &values).unwrap();
    graph.outputs.iter().map(|o| values[&o.value].clone()).collect()
}

/// Mean cross-entropy over the last axis.
pub fn cross_entropy(logits: &Tensor, target: &Tensor) -> f64 {
    let classes = *logits.shape().last().unwrap();
    let (logits, target) = (logits.to_f64(), target.to_i64());
    let loss = |(row, label): (&[f64], &i64)| {
        let top = row.iter().copied().fold(f64::MIN, f64::max);
        row.iter().map(|v| (v - top).exp()).sum::<f64>().ln() + top - row[*label as usize]
    };
    logits.chunks_exact(classes).zip(&target).map(loss).sum::<f64>() / target.len() as f64
}
