//! What can be wrong with an exported program. Every text here is safe to print.

use crate::import::onnx::name::shown;
use thiserror::Error;

/// How to write a file that pipec reads.
pub const EXPORT: &str = "a file for pipec comes from
    import torch
    program = torch.export.export(model.train(), (x,))
    torch.export.save(program, \"model.pt2\")";

/// Why an archive is not a program that pipec reads.
#[derive(Debug, Error)]
pub enum FxError {
    /// The zip archive has no end.
    #[error(
        "the file ends early, after {bytes} bytes: it begins as a zip archive, and the directory is missing with which such a file ends"
    )]
    Ends {
        /// Bytes of the file.
        bytes: usize,
    },
    /// The zip archive is broken.
    #[error("not a valid zip archive: {0}")]
    Zip(String),
    /// Two entries of one name: readers would differ in which they take.
    #[error("duplicate entry `{}` in the zip archive", shown(entry))]
    Duplicate {
        /// Its name.
        entry: String,
    },
    /// A compressed or encrypted entry.
    #[error("entry `{}` of the zip archive is compressed; torch.export.save stores entries as they are", shown(entry))]
    Compressed {
        /// Its name.
        entry: String,
    },
    /// An entry that would reach beyond the file.
    #[error("entry `{}` of the zip archive has a declared size of {size} bytes that is not in the file", shown(entry))]
    EntrySize {
        /// Its name.
        entry: String,
        /// The declared size in bytes.
        size: u64,
    },
    /// A zip archive of another kind.
    #[error("a zip archive without an exported program (a torch.save checkpoint holds no graph); {EXPORT}")]
    NoProgram,
    /// Weights of torch 2.6 or 2.7 whose table of contents cannot be read.
    #[error("entry `{}`: {reason}", shown(entry))]
    Table {
        /// The entry.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A node that runs a graph which its arguments do not fit.
    #[error("node `{}`: its arguments do not match the inputs of the graph that it runs", shown(node))]
    Region {
        /// The node.
        node: String,
    },
    /// Machine code in place of a graph.
    #[error("an AOTInductor package: it holds a compiled library and no graph, and pipec never loads code; {EXPORT}")]
    Compiled,
    /// Several programs.
    #[error("the archive holds {count} programs, expected one: {names}")]
    Several {
        /// How many.
        count: usize,
        /// Their names.
        names: String,
    },
    /// A big-endian file.
    #[error("the weights are in byte order `{}`, expected `little`", shown(found))]
    ByteOrder {
        /// What the file says.
        found: String,
    },
    /// A document that is not what it should be.
    #[error("entry `{}` is not the JSON it should be, at `{}`: {}", shown(entry), shown(at), shown(reason))]
    Json {
        /// Which entry.
        entry: String,
        /// The path within it.
        at: String,
        /// What the reader met.
        reason: String,
    },
    /// A version of the schema that is not known.
    #[error("schema version {found} of the exported program is not supported, {known} is")]
    Schema {
        /// The file's major version.
        found: i64,
        /// The known one.
        known: i64,
    },
    /// A weight that cannot be.
    #[error("weight `{}`: {reason}", shown(name))]
    Weight {
        /// Its name in the module.
        name: String,
        /// What is wrong.
        reason: WeightError,
    },
    /// An input that cannot be.
    #[error("input `{}`: {}", shown(name), shown(reason))]
    Input {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// A size that is no arithmetic of symbols and numbers.
    #[error("`{}` has a symbolic size whose expression is not understood: {reason}", shown(tensor))]
    Expression {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: ExpressionError,
    },
    /// A node reads what nobody makes.
    #[error("node `{}` reads `{}`, which nothing makes", shown(node), shown(name))]
    Unknown {
        /// The node.
        node: String,
        /// What it reads.
        name: String,
    },
    /// A value made twice.
    #[error("duplicate value `{}`: it is made twice, the second time by node `{}`", shown(name), shown(node))]
    MadeTwice {
        /// The node.
        node: String,
        /// The value.
        name: String,
    },
    /// The signature names a tensor without facts.
    #[error("`{}` is in the signature, but the graph says nothing of its type", shown(name))]
    NoFacts {
        /// Its name.
        name: String,
    },
}

/// What is wrong with a weight.
#[derive(Debug, Error)]
pub enum WeightError {
    /// It is not listed.
    #[error("the archive does not list it")]
    Unlisted,
    /// It was pickled.
    #[error("it is stored as a pickle, and pipec never opens pickles; is it a tensor subclass?")]
    Pickle,
    /// An element type that pipec does not compute with.
    #[error("element type code {0} is not supported")]
    ElementType(i64),
    /// A layout other than strided.
    #[error("layout code {0} (sparse?) is not supported")]
    Layout(i64),
    /// Sizes, strides or offset that are no numbers.
    #[error("its sizes and strides are not plain numbers of at least 0, as many strides as sizes")]
    Geometry,
    /// More bytes than there are.
    #[error("its sizes and strides need {need} bytes, the file has {have}")]
    Bytes {
        /// Needed, saturating.
        need: u64,
        /// There.
        have: usize,
    },
    /// Larger than what may be copied.
    #[error("it repeats few bytes as a tensor of {0} bytes, which is too large")]
    Repeats(u64),
    /// It overlaps another parameter.
    #[error("it overlaps `{0}` in memory under another shape or other strides: they cannot be trained as one tensor")]
    Overlaps(String),
    /// The graph and the list of weights disagree.
    #[error("the graph says {graph}, the list of weights {list}")]
    Disagree {
        /// One.
        graph: String,
        /// Other.
        list: String,
    },
}

impl FxError {
    /// Whether the message ends in the lines that write a file that pipec reads.
    pub fn shows_export(&self) -> bool {
        matches!(self, FxError::NoProgram | FxError::Compiled)
    }
}

/// Why text is no symbolic size.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum ExpressionError {
    /// Not in the grammar.
    #[error("`{}` is not a sum, product or quotient of symbols and numbers", shown(.0))]
    Syntax(String),
    /// Nested too deep.
    #[error("it nests more than {0} deep")]
    Depth(usize),
    /// No exact answer.
    #[error(transparent)]
    Dim(#[from] crate::tensor::dim::DimError),
}
