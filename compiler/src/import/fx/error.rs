//! Errors of exported programs. Every message is safe to print.

use crate::text::name::short_name;
use thiserror::Error;

/// Shows the user how to export a file.
pub const EXPORT: &str = "a .pt2 file is exported with\n    import torch\n    program = \
    torch.export.export(model.train(), (x,))\n    torch.export.save(program, \"model.pt2\")";

#[derive(Debug, Error)]
pub enum FxError {
    #[error(
        "the file ends early, after {bytes} bytes: it begins as a zip archive, but the directory at its end is missing"
    )]
    Ends { bytes: usize },
    #[error("not a valid zip archive: {0}")]
    Zip(String),
    /// Two entries have one name; zip readers differ in which one they take.
    #[error("duplicate entry `{}` in the zip archive", short_name(entry))]
    Duplicate { entry: String },
    #[error(
        "entry `{}` of the zip archive is compressed; torch.export.save stores entries as they are",
        short_name(entry)
    )]
    Compressed { entry: String },
    #[error("entry `{}` of the zip archive declares {size} bytes, more than the file has", short_name(entry))]
    EntrySize { entry: String, size: u64 },
    #[error("a zip archive without an exported program (a torch.save checkpoint holds no graph); {EXPORT}")]
    NoProgram,
    /// The pickled table of contents of torch 2.6 or 2.7 cannot be read.
    #[error("entry `{}`: {reason}", short_name(entry))]
    Table { entry: String, reason: String },
    #[error("node `{}`: its arguments do not match the inputs of the graph that it runs", short_name(node))]
    Region { node: String },
    #[error("an AOTInductor package: it holds a compiled library and no graph, and pipec never loads code; {EXPORT}")]
    Compiled,
    #[error("the archive has {count} programs, expected one: {names}")]
    Several { count: usize, names: String },
    #[error("the weights are in byte order `{}`, expected `little`", short_name(found))]
    ByteOrder {
        /// The file's byte order, possibly truncated.
        found: String,
    },
    #[error(
        "entry `{}` is not valid JSON for this format, at `{}`: {}",
        short_name(entry),
        short_name(at),
        short_name(reason)
    )]
    Json {
        entry: String,
        /// Path within the document.
        at: String,
        reason: String,
    },
    #[error("schema version {found} of the exported program is not supported, only {known} is")]
    Schema { found: i64, known: i64 },
    #[error("weight `{}`: {reason}", short_name(name))]
    Weight {
        /// Its name in the module.
        name: String,
        reason: WeightError,
    },
    #[error("input `{}`: {}", short_name(name), short_name(reason))]
    Input { name: String, reason: String },
    #[error("`{}` has a symbolic size with an unsupported expression: {reason}", short_name(tensor))]
    Expression { tensor: String, reason: ExpressionError },
    #[error("node `{}` reads `{}`, which no node computes", short_name(node), short_name(name))]
    Unknown { node: String, name: String },
    #[error("duplicate value `{}`: node `{}` computes it a second time", short_name(name), short_name(node))]
    MadeTwice { node: String, name: String },
    #[error("`{}` is in the signature, but its type is not in the graph", short_name(name))]
    NoFacts { name: String },
}

#[derive(Debug, Error)]
pub enum WeightError {
    #[error("the archive does not list it")]
    Unlisted,
    #[error("it is stored as a pickle, and pipec never opens pickles; is it a tensor subclass?")]
    Pickle,
    #[error("element type code {0} is not supported")]
    ElementType(i64),
    #[error("layout code {0} (sparse?) is not supported")]
    Layout(i64),
    #[error("its sizes and strides must be integers of at least 0, one stride per size")]
    Geometry,
    #[error("its sizes and strides need {need} bytes, the file has {have}")]
    Bytes { need: u64, have: usize },
    /// Stride-0 expansion exceeds the copy limit.
    #[error("it expands a few bytes to a tensor of {0} bytes, which is too large")]
    Repeats(u64),
    #[error("it overlaps `{0}` in memory with another shape or other strides: they cannot be trained as one tensor")]
    Overlaps(String),
    #[error("the graph has {graph}, the list of weights has {list}")]
    Disagree { graph: String, list: String },
}

impl FxError {
    /// Tests whether the message includes [`EXPORT`].
    pub fn shows_export(&self) -> bool {
        matches!(self, FxError::NoProgram | FxError::Compiled)
    }
}

/// Text that is not a symbolic size.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ExpressionError {
    #[error("`{}` is not a sum, product or quotient of symbols and numbers", short_name(.0))]
    Syntax(String),
    #[error("it is nested more than {0} deep")]
    Depth(usize),
    /// The expression has no exact integer form.
    #[error(transparent)]
    Dim(#[from] crate::tensor::dim::DimError),
}
