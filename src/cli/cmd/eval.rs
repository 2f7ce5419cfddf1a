//! `pipec eval`: writes a model's outputs for given inputs.

use crate::cli::path_conflicts;
use crate::cli::screen::Screen;
use clap::Args;
use compiler::graph::Graph;
use compiler::op::Op;
use compiler::profile::precision::Precision;
use compiler::tensor::dim::{Bindings, Dim};
use compiler::tensor::{DType, Tensor};
use compiler::text::name::short_name;
use compiler::text::quantity;
use pipec::error::{Error, ErrorKind};
use pipec::files::{input, output};
use pipec::model;
use pipec::train::arrays;
use pipec::train::device_request::{OneDevice, for_precision, one_device};
use pipec::train::initial_weights::load_weights;
use runtime::device::api::Device;
use runtime::exec::evaluate::{EvaluateError, evaluate_each};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum size of a list of cases in bytes.
const MOST_BYTES: u64 = 64 << 20;

/// Arguments of `pipec eval`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  pipec eval model.onnx --inputs x.npz --weights weights.safetensors -o y.npz")]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL", required_unless_present = "batch_file")]
    file: Option<PathBuf>,
    /// Arrays named after the model's inputs: .npz, .npy or .safetensors
    #[arg(long, value_name = "FILE", required_unless_present = "batch_file")]
    inputs: Option<PathBuf>,
    /// Weights by name: .npz or .safetensors [default: the model's]
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Output file: .npz or .safetensors
    #[arg(short, long, value_name = "FILE", required_unless_present = "batch_file")]
    output: Option<PathBuf>,
    /// Device: cpu or cuda:N, a GPU by number
    #[arg(long, value_name = "cpu|cuda:N", default_value = "cpu", value_parser = one_device)]
    device: OneDevice,
    /// Precision of f32 matrix products: tf32 is for GPUs with compute capability 8.0 or higher
    #[arg(long, value_name = "fp32|tf32", default_value = "fp32", value_parser = ["fp32", "tf32"], hide_possible_values = true)]
    precision: String,
    /// List of cases, one per line: model, inputs and outputs, separated by tabs; inputs may contain NaN and infinities
    #[arg(long, value_name = "LIST.tsv", conflicts_with_all = ["file", "inputs", "output"])]
    batch_file: Option<PathBuf>,
}

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let open_device = || {
        let device = arguments.device.open()?;
        Ok::<_, Error>(for_precision(vec![device], Precision::from_name(&arguments.precision), screen).remove(0))
    };
    if let Some(list) = &arguments.batch_file {
        return evaluate_list(list, arguments.weights.as_deref(), &open_device()?, screen);
    }
    let (Some(file), Some(inputs), Some(output)) = (&arguments.file, &arguments.inputs, &arguments.output) else {
        return Err(Error::input("`pipec eval` requires MODEL, --inputs and -o"));
    };
    output::check_tensors(output)?;
    let files = Files { model: file, inputs, weights: arguments.weights.as_deref(), output };
    let evaluation = evaluate_files(&files, &open_device()?, true, screen)?;
    let mut text = String::new();
    for (name, tensor) in &evaluation.outputs {
        text += &format!("{} {}{:?}\n", short_name(name), tensor.dtype(), tensor.shape());
    }
    if let Some(accuracy) = evaluation.accuracy {
        text += &format!("accuracy {:.2} %\n", accuracy * 100.0);
    }
    screen.text(&format!("{text}wrote {}", output.display()));
    screen.json(&evaluation.json(output));
    Ok(())
}

struct Evaluation {
    outputs: BTreeMap<String, Tensor>,
    accuracy: Option<f64>,
}

impl Evaluation {
    fn json(&self, file: &Path) -> Value {
        let outputs: Vec<Value> = self
            .outputs
            .iter()
            .map(|(name, tensor)| json!({"name": name, "dtype": tensor.dtype().name(), "shape": tensor.shape()}))
            .collect();
        json!({"file": file.display().to_string(), "outputs": outputs, "accuracy": self.accuracy})
    }
}

struct Files<'a> {
    model: &'a Path,
    inputs: &'a Path,
    weights: Option<&'a Path>,
    output: &'a Path,
}

fn evaluate_files(
    files: &Files<'_>,
    device: &Arc<dyn Device>,
    warns: bool,
    screen: &Screen,
) -> Result<Evaluation, Error> {
    let &Files { model: file, inputs, weights, output } = files;
    let input_paths = [Some(file), Some(inputs), weights];
    path_conflicts::check_output(&input_paths.into_iter().flatten().collect::<Vec<_>>(), output)?;
    let arrays = arrays::read(inputs, "the inputs")?;
    let loaded = model::load_for(file, &arrays, screen)?;
    let weights = load_weights(&loaded, weights, screen)?;
    let named_arrays = arrays::match_inputs(&loaded.model.graph, arrays, screen);
    arrays::check(&loaded.model.graph, &named_arrays, inputs)?;
    if warns {
        arrays::warn_of_nan(&loaded.model.graph, &named_arrays, screen);
    }
    let graph = loaded.with_dims(&sizes(&loaded.model.graph, &named_arrays))?;
    let labels = named_arrays.get("target").or_else(|| named_arrays.get("y")).cloned();
    let mut outputs = BTreeMap::new();
    evaluate_each(device, &graph, true, [named_arrays], &weights, &mut |results| outputs = results)
        .map_err(|error| evaluation_error(file, &error))?;
    output::write_tensors(output, &cast_for_npz(output, &outputs), "outputs")?;
    let logits = loaded.model.graph.outputs.first().and_then(|first| outputs.get(&first.name));
    let accuracy = logits.zip(labels).and_then(|(logits, labels)| accuracy(logits, &labels.to_f64()));
    Ok(Evaluation { outputs, accuracy })
}

fn evaluation_error(file: &Path, error: &EvaluateError) -> Error {
    let failure = Error::input(format!("cannot evaluate {}", file.display())).because(error);
    match error {
        EvaluateError::Fact { kind: "input", .. } => failure.with_help(
            "pass arrays of the shapes that `pipec inspect` shows; only a named axis takes any size: export the model with dynamic axes",
        ),
        EvaluateError::Fact { .. } => failure.with_help("the weights belong to another model"),
        _ => failure,
    }
}

/// Casts bf16 outputs to f32 for npz, which has no bf16; the cast is exact.
fn cast_for_npz(file: &Path, outputs: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let npz = file.extension().is_some_and(|extension| extension == "npz");
    let wide = |tensor: &Tensor| match tensor.dtype() {
        DType::Bf16 if npz => tensor.cast(DType::F32),
        _ => tensor.clone(),
    };
    outputs.iter().map(|(name, tensor)| (name.clone(), wide(tensor))).collect()
}

/// Evaluates every case; fails with exit code 1 if one fails.
fn evaluate_list(list: &Path, weights: Option<&Path>, device: &Arc<dyn Device>, screen: &Screen) -> Result<(), Error> {
    let text = input::text(list, MOST_BYTES)?;
    let mut cases = Vec::new();
    let (mut failed, mut bugs) = (0u64, 0u64);
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split('\t').collect();
        let &[model, inputs, output] = &fields[..] else {
            let why = format!("line {}: {} fields, expected model, inputs and outputs", at + 1, fields.len());
            return Err(Error::file("read", list, why));
        };
        // A panic fails its case only; the others still run.
        let [model_path, inputs, output_path] = [model, inputs, output].map(Path::new);
        let files = Files { model: model_path, inputs, weights, output: output_path };
        let case = || evaluate_files(&files, device, false, screen);
        let evaluation = panic::catch_unwind(AssertUnwindSafe(case))
            .unwrap_or_else(|_| Err(Error::bug("a panic while the case was evaluated")));
        match evaluation {
            Ok(evaluation) => {
                screen.text(&format!("ok      {model}"));
                cases.push(evaluation.json(Path::new(output)));
            }
            Err(failure) => {
                failed += 1;
                let bug = failure.kind() == ErrorKind::Bug;
                bugs += u64::from(bug);
                let message = failure.to_string().lines().map(str::trim).collect::<Vec<_>>().join("; ");
                screen.text(&format!("failed  {model}: {message}"));
                cases.push(json!({"file": output, "failed": message, "bug": bug}));
            }
        }
    }
    screen.json(&json!({"cases": cases, "failed": failed}));
    match (failed, bugs) {
        (0, _) => Ok(()),
        (_, 0) => Err(Error::negative(format!("{} of the cases failed", quantity::count(failed)))),
        (_, bugs) => Err(Error::bug(&format!("a panic in {} of the cases", quantity::count(bugs)))),
    }
}

/// Sizes of symbols that are an input axis, taken from the arrays. Mismatches are reported when the model runs.
pub fn sizes(graph: &Graph, arrays: &BTreeMap<String, Tensor>) -> Bindings {
    let mut sizes = Bindings::new();
    for id in graph.ids() {
        let Op::Input(input) = &graph.node(id).op else { continue };
        let Some(array) = arrays.get(&input.name) else { continue };
        for (dim, &size) in input.fact.shape.iter().zip(array.shape()) {
            if let Some(symbol) = dim.symbols().first().filter(|symbol| *dim == Dim::symbol(symbol)) {
                sizes.entry(symbol.clone()).or_insert(size as i64);
            }
        }
    }
    sizes
}

/// The fraction of rows whose largest logit is at the label; `None` if the shapes are not those of a classification.
pub fn accuracy(logits: &Tensor, labels: &[f64]) -> Option<f64> {
    let &[rows, classes] = logits.shape() else { return None };
    if rows == 0 || classes == 0 || labels.len() != rows {
        return None;
    }
    let values = logits.to_f64();
    let largest = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
    let correct =
        values.chunks(classes).zip(labels).filter(|(row, label)| largest(row).map(|at| at as f64) == Some(**label));
    Some(correct.count() as f64 / rows as f64)
}
