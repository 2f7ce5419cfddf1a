//! Arrays of the user, by the names of a model's inputs.

use crate::error::Error;
use crate::events::EventSink;
use crate::files::{detect, missing};
use compiler::graph::Graph;
use compiler::op::dropout::COUNTER;
use compiler::op::{Op, Value};
use compiler::pass::loss::TARGET;
use compiler::tensor::Tensor;
use compiler::text::name::short_name;
use runtime::data::weights::FileError;
use runtime::data::{DataError, weights};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// The alternative name of labels.
pub const LABELS: &str = "y";

/// The arrays of a file.
pub fn read(path: &Path, subject: &str) -> Result<BTreeMap<String, Tensor>, Error> {
    weights::read(path).map_err(|error| {
        if let (false, Some((why, help))) =
            (matches!(error, FileError::Early { .. }), detect::describe_non_arrays(path))
        {
            return Error::input(format!("cannot read {subject}"))
                .because(format!("{}: {why}", path.display()))
                .with_help(help);
        }
        let help = match &error {
            FileError::Read { fault, .. } if fault.kind() == ErrorKind::NotFound => missing::help(path),
            FileError::Read { fault, .. } if fault.kind() == ErrorKind::PermissionDenied => {
                "check its permissions".to_string()
            }
            FileError::Extension { .. } => "write arrays with `numpy.savez(\"train.npz\", x=…, y=…)`".to_string(),
            FileError::Early { .. } => "the file is incomplete: write or copy it again".to_string(),
            _ => "check it with `numpy.load(FILE)` in Python; pipec never reads arrays of objects".to_string(),
        };
        Error::input(format!("cannot read {subject}")).because(error).with_help(help)
    })
}

/// The name of the array with the labels.
pub fn labels(arrays: &BTreeMap<String, Tensor>) -> &'static str {
    if arrays.contains_key(TARGET) || !arrays.contains_key(LABELS) { TARGET } else { LABELS }
}

/// Renames labels in an error to their name in the file, which may be `y`.
pub fn rename_labels(mut error: DataError, labels: &str) -> DataError {
    let rename = |name: &mut String| {
        if name == TARGET {
            *name = labels.to_string();
        }
    };
    match &mut error {
        DataError::Missing { name, .. } if name == TARGET => *name = format!("{TARGET}` or `{LABELS}"),
        DataError::Missing { .. } | DataError::Few { .. } => {}
        DataError::Rows { name, other, .. } => {
            rename(name);
            rename(other);
        }
        DataError::Empty { name }
        | DataError::Shape { name, .. }
        | DataError::Label { name, .. }
        | DataError::Ignored { name, .. }
        | DataError::Index { name, .. }
        | DataError::Fraction { name, .. }
        | DataError::NotFinite { name, .. } => rename(name),
    }
    error
}

/// The arrays of a file for the inputs of a graph.
pub fn arrays(
    graph: &Graph,
    path: &Path,
    subject: &str,
    events: &dyn EventSink,
) -> Result<BTreeMap<String, Tensor>, Error> {
    Ok(match_inputs(graph, read(path, subject)?, events))
}

/// The arrays under the names of the graph's inputs. If the model has one input and the file one array besides labels, that array
/// is the input, whatever its name.
pub fn match_inputs(
    graph: &Graph,
    mut arrays: BTreeMap<String, Tensor>,
    events: &dyn EventSink,
) -> BTreeMap<String, Tensor> {
    let inputs = inputs(graph);
    if let [input] = &inputs[..]
        && !arrays.contains_key(input)
    {
        let names: Vec<String> = arrays.keys().filter(|name| *name != TARGET && *name != LABELS).cloned().collect();
        if let [only] = &names[..]
            && let Some(array) = arrays.remove(only)
        {
            events.note(&format!(
                "array `{}` is used as the model's only input `{}`",
                short_name(only),
                short_name(input)
            ));
            arrays.insert(input.clone(), array);
        }
    }
    arrays
}

/// Refuses arrays without one of the model's inputs.
pub fn check(graph: &Graph, arrays: &BTreeMap<String, Tensor>, path: &Path) -> Result<(), Error> {
    match inputs(graph).iter().find(|name| !arrays.contains_key(*name)) {
        None => Ok(()),
        Some(missing) => {
            let names = arrays.keys().map(|name| format!("`{}`", short_name(name))).collect::<Vec<_>>().join(", ");
            let names = if names.is_empty() { "nothing".to_string() } else { names };
            let why = format!("the model needs `{}`, but the file has {names}", short_name(missing));
            Err(Error::file("use", path, why).with_help("name arrays after the model's inputs, see `pipec inspect`"))
        }
    }
}

/// Reports inputs that contain NaN. An infinity may be a mask, which one stage of a model sends to the next.
pub fn warn_of_nan(graph: &Graph, arrays: &BTreeMap<String, Tensor>, events: &dyn EventSink) {
    let floats = inputs(graph).into_iter().filter_map(|name| arrays.get(&name).map(|array| (name, array)));
    for (name, array) in floats.filter(|(_, array)| array.dtype().is_float()) {
        let view = array.view();
        if let Some(at) = (0..view.len()).find(|at| view.f64(*at).is_nan()) {
            let per_row = array.len() / array.shape().first().copied().unwrap_or(1).max(1);
            events.warn(&format!("array `{}` contains NaN in row {}", short_name(&name), at / per_row.max(1)));
        }
    }
}

/// The names of the inputs that the model reads and the user must provide; the runtime provides the dropout counter.
fn inputs(graph: &Graph) -> Vec<String> {
    let is_read =
        |value: Value| !graph.consumers(value).is_empty() || graph.outputs.iter().any(|output| output.value == value);
    let name = |id| match &graph.node(id).op {
        Op::Input(input) if input.name != COUNTER && is_read(Value { node: id, output: 0 }) => Some(input.name.clone()),
        _ => None,
    };
    graph.ids().filter_map(name).collect()
}
