//! Errors in lowering a source node, shared by all importers.

use crate::graph::AddError;
use crate::graph::evaluate::EvaluateError;
use crate::tensor::dim::{Dim, DimError};
use crate::tensor::fact::Fact;
use crate::text::name::short_name;
use thiserror::Error;

/// The reason why a node cannot be lowered. The caller adds the name of the node.
#[derive(Debug, Error)]
pub enum LowerReason {
    #[error("input {slot} is missing")]
    Missing {
        /// Input index from 0.
        slot: usize,
    },
    #[error("attribute `{name}` is {found}, expected {expected}")]
    Attribute { name: &'static str, found: String, expected: &'static str },
    #[error("{what} must be a constant: it cannot be computed at run time")]
    NotConstant { what: &'static str },
    /// An input must be constant, but depends on graph inputs.
    #[error("{what} must be a constant, but depends on the graph inputs {}", name_list(inputs))]
    Follows { what: &'static str, inputs: Vec<String> },
    /// Shapes or values of inputs do not fit the operator.
    #[error("{0}")]
    Inputs(String),
    /// A comparison of sizes that depends on a symbol.
    #[error("whether {what} depends on the size of `{symbol}`: if it is not the batch, set it with `--dim {symbol}=N`")]
    Undecided { what: String, symbol: String },
    /// Valid ONNX or ATen that pipec does not support.
    #[error("{0} is not supported")]
    Unsupported(String),
    #[error(transparent)]
    Add(#[from] AddError),
    #[error(transparent)]
    Dim(#[from] DimError),
    #[error(transparent)]
    Fold(#[from] EvaluateError),
    /// Another model input also has the batch axis. The importer then restarts.
    #[error("input `{}` also has the batch along axis {axis}", short_name(input))]
    Batch { input: String, axis: usize },
    /// Two symbols are one size. The importer then restarts.
    #[error("dimensions `{one}` and `{other}` must be equal")]
    Equal { one: String, other: String },
    /// The assumed batch axis is the time axis of a recurrent layer.
    #[error("the batch would be the time axis of a recurrent layer")]
    Time,
    /// An axis must be the batch but cannot be made symbolic.
    #[error("axis {axis} of `{}` must be the batch, but has a fixed size in the file: {why}", short_name(at))]
    Fixed { at: String, axis: usize, why: &'static str },
    /// An input size may or may not be a multiple of the batch.
    #[error(
        "axis {axis} of input `{}` must also be the batch: it has size {size} in the file, a multiple of the batch \
         {batch}, and an earlier reshape is ambiguous; export with a batch size that divides no other size, such as 7 \
         or 11",
        short_name(input)
    )]
    Alike {
        input: String,
        axis: usize,
        /// Size in the file.
        size: i64,
        batch: i64,
    },
    #[error("its result {0} is too large")]
    Large(Fact),
}

impl LowerReason {
    pub fn attribute(name: &'static str, found: impl ToString, expected: &'static str) -> LowerReason {
        LowerReason::Attribute { name, found: found.to_string(), expected }
    }

    /// The outcome of a comparison of these sizes is not known.
    pub fn undecided(what: String, sizes: [&Dim; 2]) -> LowerReason {
        let symbol = sizes.iter().flat_map(|size| size.symbols()).next().unwrap_or_default();
        LowerReason::Undecided { what, symbol }
    }
}

/// An attribute that is at least 1.
pub fn at_least_one(name: &'static str, value: i64) -> Result<i64, LowerReason> {
    if value < 1 { Err(LowerReason::attribute(name, value, "an integer of at least 1")) } else { Ok(value) }
}

/// The number of groups of a convolution.
pub fn groups(name: &'static str, value: i64) -> Result<usize, LowerReason> {
    let groups = u32::try_from(value).ok().filter(|groups| *groups > 0).map(|groups| groups as usize);
    groups.ok_or_else(|| LowerReason::attribute(name, value, "an integer of at least 1"))
}

/// Maximum number of names listed in a message; the rest is only counted.
const LISTED: usize = 8;

fn name_list(names: &[String]) -> String {
    let listed: Vec<String> = names.iter().take(LISTED).map(|name| format!("`{}`", short_name(name))).collect();
    let more = names.len().saturating_sub(LISTED);
    if more == 0 { listed.join(", ") } else { format!("{} and {more} more", listed.join(", ")) }
}
