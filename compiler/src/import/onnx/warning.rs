//! What a user should hear about though it stops nothing. The texts are safe to print, as those of `error`.

use crate::import::onnx::name::shown;

/// What a user should hear about though it stops nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Warning {
    /// The nodes were not in topological order, and were put into it.
    #[error("the nodes were not in topological order (node `{}` came too early) and were sorted", shown(node))]
    Sorted {
        /// The first node that came before one it reads from.
        node: String,
    },
    /// Newer than what this decoder knows.
    #[error("the file's IR version {found} is newer than {known}, the newest known: parts of it may go unread")]
    IrVersion {
        /// The file's.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// A dimension of -1, which some tools write for "not known".
    #[error("`{}` has a dimension of -1, read as not known", shown(name))]
    MinusOne {
        /// The tensor.
        name: String,
    },
    /// IR 4 and later let a caller override such an input; pipec does not.
    #[error("{count} graph inputs have initializers and count as parameters, `{}` among them", shown(example))]
    DefaultInputs {
        /// How many.
        count: usize,
        /// The first.
        example: String,
    },
    /// A key of external data that means nothing here.
    #[error("`{}`: the key `{}` of its external data is ignored", shown(tensor), shown(key))]
    ExternalKey {
        /// The tensor.
        tensor: String,
        /// The key.
        key: String,
    },
    /// Values that are not there.
    #[error(
        "external data file `{}` does not exist: {tensors} tensor{} without values, which is enough to plan but not to train",
        shown(path),
        if *tensors == 1 { "" } else { "s" }
    )]
    MissingFile {
        /// The location, relative to the model's folder.
        path: String,
        /// How many tensors need it.
        tensors: usize,
    },
}
