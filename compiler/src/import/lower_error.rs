//! Why a source node cannot be lowered, for every importer.

use crate::graph::AddError;
use crate::graph::evaluate::EvaluateError;
use crate::import::onnx::name::shown;
use crate::tensor::dim::DimError;
use crate::tensor::fact::Fact;
use thiserror::Error;

/// Why a node cannot be lowered. Whoever walks the nodes adds which one it is.
#[derive(Debug, Error)]
pub enum LowerReason {
    /// A required input is left out.
    #[error("input {slot} is missing")]
    Missing {
        /// Which input, from 0.
        slot: usize,
    },
    /// An attribute without meaning.
    #[error("attribute `{name}` is {found}, expected {expected}")]
    Attribute {
        /// Its name.
        name: &'static str,
        /// Its value.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// An input that must be known before the model runs.
    #[error("{what} must be a constant: it cannot be computed while the model runs")]
    NotConstant {
        /// Which input.
        what: &'static str,
    },
    /// An input that must be known before the model runs, and follows from values that the model is given.
    #[error("{what} must be a constant, but follows from the graph inputs {}", told(inputs))]
    Follows {
        /// Which input.
        what: &'static str,
        /// The graph inputs.
        inputs: Vec<String>,
    },
    /// Shapes or values of inputs that do not fit the operator.
    #[error("{0}")]
    Inputs(String),
    /// Something legal that pipec does not do.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A core op refuses its inputs.
    #[error(transparent)]
    Add(#[from] AddError),
    /// Shape arithmetic without exact answer.
    #[error(transparent)]
    Dim(#[from] DimError),
    /// A constant cannot be computed.
    #[error(transparent)]
    Fold(#[from] EvaluateError),
    /// Another input of the model has the batch as well.
    #[error("input `{}` has the batch along axis {axis} as well", shown(input))]
    Batch {
        /// The input.
        input: String,
        /// The axis.
        axis: usize,
    },
    /// What was taken for the batch is time.
    #[error("the batch would be the time axis of a recurrent layer")]
    Time,
    /// A size that is the batch, and cannot be open.
    #[error("axis {axis} of `{}` must be the batch, but has the size in the file: {why}", shown(at))]
    Fixed {
        /// Where the size comes from.
        at: String,
        /// The axis.
        axis: usize,
        /// Why it cannot.
        why: &'static str,
    },
    /// A size of an input that the file's numbers do not tell from the batch.
    #[error(
        "it only works if axis {axis} of input `{}` is the batch, too: that is {size} in the file, a multiple of the batch {batch}, and a reshape \
         before it can be read either way; an export with a batch that divides no other size, as 7 or 11, tells them apart",
        shown(input)
    )]
    Alike {
        /// The input.
        input: String,
        /// The axis.
        axis: usize,
        /// Its size in the file.
        size: i64,
        /// The batch in the file.
        batch: i64,
    },
    /// A value that no machine holds.
    #[error("its result {0} is too large")]
    Large(Fact),
}

/// How many names a message lists before it only counts.
const LISTED: usize = 8;

fn told(names: &[String]) -> String {
    let listed: Vec<String> = names.iter().take(LISTED).map(|name| format!("`{}`", shown(name))).collect();
    let more = names.len().saturating_sub(LISTED);
    if more == 0 { listed.join(", ") } else { format!("{} and {more} more", listed.join(", ")) }
}
