//! Non-fatal findings in ONNX files. The messages are safe to print, like those of `error`.

use crate::text::name::short_name;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Warning {
    #[error("the nodes were not in topological order (node `{}` came too early); pipec sorted them", short_name(node))]
    Sorted {
        /// The first node that precedes one of its sources.
        node: String,
    },
    #[error("the file's IR version {found} is newer than {known}, the latest supported: parts of it may be ignored")]
    IrVersion { found: i64, known: i64 },
    #[error("the file's opset {found} is newer than {known}, the latest supported: operators may have changed since")]
    Opset { found: i64, known: i64 },
    #[error("`{}` has a dimension of -1, treated as unknown", short_name(name))]
    MinusOne { name: String },
    /// IR 4 and later let a caller override such an input; pipec does not.
    #[error("{count} graph inputs have initializers and are treated as parameters, such as `{}`", short_name(example))]
    DefaultInputs { count: usize, example: String },
    #[error("`{}`: the key `{}` of its external data is ignored", short_name(tensor), short_name(key))]
    ExternalKey { tensor: String, key: String },
    #[error(
        "external data file `{}` does not exist: {tensors} tensor{} without values; the model can be planned but not \
        trained",
        short_name(path),
        if *tensors == 1 { "" } else { "s" }
    )]
    MissingFile {
        /// Relative to the model's folder.
        path: String,
        tensors: usize,
    },
}
