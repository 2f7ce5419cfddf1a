//! Builds `torch.export` programs as JSON, packs them like `torch.export.save`, and runs them on the reference kernels.

#![allow(dead_code)]

use compiler::graph::evaluate::evaluate;
use compiler::import::import::{Model, Options, Weight, load};
use compiler::op::Op;
use compiler::tensor::Tensor;
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;

/// Element type codes of the schema.
pub const FLOAT: i64 = 7;
pub const LONG: i64 = 5;
pub const BOOL: i64 = 12;

/// A program under construction.
#[derive(Default)]
pub struct Program {
    inputs: Vec<Json>,
    specs: Vec<Json>,
    pub nodes: Vec<Json>,
    pub facts: serde_json::Map<String, Json>,
    weights: serde_json::Map<String, Json>,
    entries: Vec<(String, Vec<u8>)>,
}

pub fn meta(dtype: i64, sizes: &[usize], requires_grad: bool) -> Json {
    let strides: Vec<usize> = (0..sizes.len()).map(|at| sizes[at + 1..].iter().product()).collect();
    let list = |numbers: &[usize]| numbers.iter().map(|n| json!({"as_int": n})).collect::<Vec<_>>();
    json!({"dtype": dtype, "sizes": list(sizes), "strides": list(&strides), "storage_offset": {"as_int": 0}, "layout": 7,
           "requires_grad": requires_grad})
}

pub fn tensor(name: &str) -> Json {
    json!({"as_tensor": {"name": name}})
}

pub fn tensors(names: &[&str]) -> Json {
    json!({"as_tensors": names.iter().map(|n| json!({"name": n})).collect::<Vec<_>>()})
}

impl Program {
    pub fn input(mut self, name: &str, dtype: i64, sizes: &[usize]) -> Program {
        self.facts.insert(name.into(), meta(dtype, sizes, false));
        self.inputs.push(tensor(name));
        self.specs.push(json!({"user_input": {"arg": tensor(name)}}));
        self
    }

    /// A module parameter with placeholder `p_NAME`; trained unless `frozen`.
    pub fn parameter(mut self, name: &str, value: &Tensor, frozen: bool) -> Program {
        let placeholder = format!("p_{name}");
        let meta = meta(FLOAT, value.shape(), !frozen);
        self.facts.insert(placeholder.clone(), meta.clone());
        self.inputs.push(tensor(&placeholder));
        self.specs.push(json!({"parameter": {"arg": {"name": placeholder}, "parameter_name": name}}));
        let path = format!("weight_{}", self.entries.len());
        self.weights.insert(name.into(), json!({"path_name": path, "use_pickle": false, "tensor_meta": meta}));
        self.entries.push((format!("data/weights/{path}"), value.bytes().to_vec()));
        self
    }

    pub fn node(self, target: &str, inputs: &[(&str, Json)], outputs: &[&str]) -> Program {
        self.called("", target, inputs, outputs)
    }

    /// A node with the Python function that called it.
    pub fn called(mut self, from: &str, target: &str, inputs: &[(&str, Json)], outputs: &[&str]) -> Program {
        let inputs: Vec<Json> = inputs.iter().map(|(name, arg)| json!({"name": name, "arg": arg, "kind": 1})).collect();
        let outputs: Vec<Json> = outputs.iter().map(|name| tensor(name)).collect();
        let metadata = if from.is_empty() { json!({}) } else { json!({"torch_fn": from}) };
        let target = match (target.starts_with("torch."), target.contains('.')) {
            (true, _) => target.to_string(),
            (false, true) => format!("torch.ops.aten.{target}"),
            (false, false) => format!("torch.ops.aten.{target}.default"),
        };
        self.nodes.push(json!({"target": target, "inputs": inputs, "outputs": outputs, "metadata": metadata}));
        self
    }

    /// Imports the program with these values as results.
    pub fn load(self, results: &[(&str, Json)]) -> Result<Model, String> {
        let outputs: Vec<Json> = results.iter().map(|(name, _)| tensor(name)).collect();
        let specs: Vec<Json> = results.iter().map(|(_, spec)| spec.clone()).collect();
        let document = json!({
            "graph_module": {
                "graph": {"inputs": self.inputs, "outputs": outputs, "nodes": self.nodes, "tensor_values": self.facts},
                "signature": {"input_specs": self.specs, "output_specs": specs},
            },
            "schema_version": {"major": 8, "minor": 20},
            "torch_version": "2.15.0",
        });
        let mut entries = vec![
            ("archive_format".to_string(), b"pt2".to_vec()),
            ("models/model.json".to_string(), document.to_string().into_bytes()),
            ("data/weights/model_weights_config.json".to_string(), json!({"config": self.weights}).to_string().into()),
        ];
        entries.extend(self.entries);
        let file = tempfile::Builder::new().suffix(".pt2").tempfile().unwrap();
        std::fs::write(file.path(), packed(&entries)).unwrap();
        load(file.path(), &Options::default()).map_err(|error| error.to_string())
    }

    pub fn model(self, results: &[&str]) -> Result<Model, String> {
        let results: Vec<(&str, Json)> =
            results.iter().map(|name| (*name, json!({"user_output": {"arg": tensor(name)}}))).collect();
        self.load(&results)
    }

    /// The results for these inputs.
    pub fn run(self, given: &[(&str, Tensor)], results: &[&str]) -> Vec<Tensor> {
        let model = self.model(results).unwrap();
        values(&model, given)
    }
}

pub fn values(model: &Model, given: &[(&str, Tensor)]) -> Vec<Tensor> {
    let mut inputs_and_weights: BTreeMap<String, Tensor> =
        given.iter().map(|(n, t)| (n.to_string(), t.clone())).collect();
    for (name, weight) in &model.weights {
        let Weight::Given(tensor) = weight else { panic!("{name} has no values") };
        inputs_and_weights.insert(name.clone(), tensor.clone());
    }
    let sizes = compiler::graph::bind::symbols(&model.graph);
    let rows = given.first().map_or(1, |(_, t)| t.shape().first().copied().unwrap_or(1));
    let bindings = sizes.into_iter().map(|s| (s, rows as i64)).collect();
    let graph = compiler::graph::bind::bind(&model.graph, &bindings).unwrap();
    let values = evaluate(&graph, &inputs_and_weights).unwrap();
    graph.outputs.iter().map(|output| values[&output.value].clone()).collect()
}

/// A zip archive with stored entries.
pub fn packed(entries: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in entries {
        let name = format!("model/{name}");
        let (at, size) = (file.len() as u32, content.len() as u32);
        let mut common: Vec<u8> = vec![0; 8];
        for number in [checksum(content), size, size] {
            common.extend(number.to_le_bytes());
        }
        common.extend((name.len() as u16).to_le_bytes());
        common.extend(0u16.to_le_bytes());
        file.extend(*b"PK\x03\x04\x14\x00");
        file.extend(&common);
        file.extend(name.as_bytes());
        file.extend(content);
        directory.extend(*b"PK\x01\x02\x14\x00\x14\x00");
        directory.extend(&common);
        directory.extend([0; 10]);
        directory.extend(at.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (at, size, count) = (file.len() as u32, directory.len() as u32, entries.len() as u16);
    file.extend(&directory);
    file.extend(*b"PK\x05\x06\0\0\0\0");
    file.extend(count.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend(size.to_le_bytes());
    file.extend(at.to_le_bytes());
    file.extend([0; 2]);
    file
}

/// The CRC-32 of zip.
pub fn checksum(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

pub fn close(got: &Tensor, expected: &[f64]) {
    let values = got.to_f64();
    let is_close = values.len() == expected.len() && values.iter().zip(expected).all(|(g, w)| (g - w).abs() < 1e-5);
    assert!(is_close, "got {values:?}, expected {expected:?}");
}

pub fn count(model: &Model, is_counted: fn(&Op) -> bool) -> usize {
    model.graph.ids().filter(|id| is_counted(&model.graph.node(*id).op)).count()
}

pub fn int(value: i64) -> Json {
    json!({"as_int": value})
}

pub fn ints(values: &[i64]) -> Json {
    json!({"as_ints": values})
}

pub fn float(value: f64) -> Json {
    json!({"as_float": value})
}
