//! What can be wrong with an ONNX file. What is only worth saying stands in `warning`.
//!
//! Every text here is safe to print: names from the file pass through `name::shown`, so no control character and no
//! megabyte of text reaches a terminal.

use std::fmt;
use std::path::PathBuf;

use crate::import::onnx::name::shown;
use crate::import::onnx::payload::TensorError;

/// How many faults a message lists before it only counts.
const LISTED: usize = 20;

/// Why a file is not a model that pipec reads.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The file cannot be opened or mapped.
    #[error("cannot open {}: {source}", shown(&path.to_string_lossy()))]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder, pipe, socket or device instead of a file.
    #[error("{} is {kind}, not a regular file", shown(&path.to_string_lossy()))]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What it is, with its article.
        kind: &'static str,
    },
    /// A file that is recognisably something else.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// The bytes are not the protobuf message they should be.
    #[error("not a valid ONNX protobuf message of {bytes} bytes: {reason}")]
    Protobuf {
        /// The size of the file in bytes.
        bytes: usize,
        /// What the decoder met, with a hint where there is one.
        reason: String,
    },
    /// The message decodes, and what it says cannot be.
    #[error("{0}")]
    Faults(Faults),
}

/// A file that is recognisably not an ONNX model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// No bytes.
    #[error("empty file, not an ONNX model")]
    Empty,
    /// The stand-in that git leaves when large files were not fetched.
    #[error("a git-lfs pointer, not an ONNX model: the real file was not fetched; run `git lfs pull` beside it")]
    LfsPointer,
    /// A zip archive: `torch.save` or `torch.export.save`.
    #[error(
        "a zip archive, not an ONNX model: a `.pt2` from torch.export is read when its name ends in .pt2; \
         a checkpoint from torch.save holds no graph, export the model with torch.onnx.export"
    )]
    Zip,
    /// A Python pickle.
    #[error("a Python pickle, not an ONNX model: pipec never opens pickles; export the model with torch.onnx.export")]
    Pickle,
    /// A safetensors file: weights without a graph.
    #[error(
        "a safetensors file, not an ONNX model: it holds weights and no graph; give the model first and it with --weights"
    )]
    Safetensors,
    /// HDF5: a Keras file.
    #[error("an HDF5 file, not an ONNX model: convert a Keras model with tf2onnx")]
    Hdf5,
    /// Readable text, such as a web page saved by mistake.
    #[error("a text file, not an ONNX model (a download page saved by mistake?)")]
    Text,
}

/// All that is wrong with one model, in the order it was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [fault] = self.0.as_slice() {
            return write!(f, "{fault}");
        }
        write!(f, "{} faults:", self.0.len())?;
        for fault in self.0.iter().take(LISTED) {
            write!(f, "\n  {fault}")?;
        }
        if self.0.len() > LISTED {
            write!(f, "\n  … and {} more", self.0.len() - LISTED)?;
        }
        Ok(())
    }
}

/// One thing that is wrong, and where.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    /// The message has no graph.
    #[error("the model has no graph: is this an ONNX model?")]
    NoGraph,
    /// The graph has no nodes.
    #[error("the graph has no nodes: there is nothing to do")]
    NoNodes,
    /// No operator set is imported, so no operator has a meaning.
    #[error("opset_import is missing: the model does not say which version of the operators it means")]
    NoOpset,
    /// A domain is used whose operator set is not imported.
    #[error("node `{}`: opset_import does not name the standard operators, whose {} it uses", shown(node), shown(op))]
    OpsetOfStandard {
        /// The first such node.
        node: String,
        /// Its operator.
        op: String,
    },
    /// One domain in two versions.
    #[error("opset_import names the domain `{}` twice, with versions {first} and {second}", shown(domain))]
    OpsetTwice {
        /// The domain.
        domain: String,
        /// One version.
        first: i64,
        /// The other.
        second: i64,
    },
    /// A graph input without a tensor type.
    #[error("graph input `{}` has no tensor type{}", shown(name), if *other_kind { ": sequences, maps and optionals are not supported" } else { "" })]
    InputType {
        /// The input.
        name: String,
        /// It has a type, but not of a tensor.
        other_kind: bool,
    },
    /// An element type that the standard does not know.
    #[error("`{}` has an unknown element type, code {code}", shown(name))]
    ElementType {
        /// The tensor.
        name: String,
        /// The code.
        code: i32,
    },
    /// A declared dimension below zero.
    #[error("`{}`: dimension {axis} is negative: {dim}", shown(name))]
    NegativeDim {
        /// The tensor.
        name: String,
        /// Which dimension.
        axis: usize,
        /// Its value.
        dim: i64,
    },
    /// A node without an operator.
    #[error("node `{}` has no operator type", shown(node))]
    NoOperator {
        /// The node.
        node: String,
    },
    /// One name for two graph inputs.
    #[error("duplicate graph input `{}`", shown(name))]
    DuplicateInput {
        /// The name.
        name: String,
    },
    /// One name for two initializers.
    #[error("duplicate initializer `{}`", shown(name))]
    DuplicateInitializer {
        /// The name.
        name: String,
    },
    /// A tensor written twice: not single assignment.
    #[error(
        "duplicate output: tensor `{}` is written twice, by {} and by node `{}`",
        shown(tensor),
        shown(first),
        shown(node)
    )]
    DuplicateOutput {
        /// The tensor.
        tensor: String,
        /// Who wrote it first, with its kind.
        first: String,
        /// The node that writes it again.
        node: String,
    },
    /// A node reads what nobody makes.
    #[error("node `{}` ({}) reads tensor `{}`, which nothing makes", shown(node), shown(op), shown(tensor))]
    UnknownTensor {
        /// The node.
        node: String,
        /// Its operator.
        op: String,
        /// The tensor.
        tensor: String,
    },
    /// A graph output that nobody makes.
    #[error("graph output `{}` is made by no node", shown(tensor))]
    UnknownOutput {
        /// The tensor.
        tensor: String,
    },
    /// Nodes that wait for each other.
    #[error("cycle: {}", arrows(nodes))]
    Cycle {
        /// The nodes in order; the last feeds the first.
        nodes: Vec<String>,
    },
    /// A node gives one attribute twice.
    #[error("node `{}` has the attribute `{}` twice", shown(node), shown(attribute))]
    DuplicateAttribute {
        /// The node.
        node: String,
        /// The attribute.
        attribute: String,
    },
    /// Subgraphs within subgraphs, too deep.
    #[error("node `{}`: control flow (If, Loop, Scan) nests more than {limit} deep", shown(node))]
    Nesting {
        /// The node of the main graph, or of a function, that holds them.
        node: String,
        /// The limit.
        limit: usize,
    },
    /// Two functions of one name.
    #[error("duplicate function `{}`", shown(name))]
    DuplicateFunction {
        /// Its name.
        name: String,
    },
    /// A function that calls itself.
    #[error("recursive function: {}", arrows(functions))]
    RecursiveFunction {
        /// The functions in order; the last calls the first.
        functions: Vec<String>,
    },
    /// Functions that grow without measure when written out.
    #[error("written out, the functions of the model are more than {limit} nodes")]
    Expansion {
        /// The limit in nodes.
        limit: u64,
    },
    /// Sparse tensors.
    #[error("sparse initializer `{}`: sparse tensors are not supported", shown(name))]
    Sparse {
        /// The tensor, or the node that holds it.
        name: String,
    },
    /// A tensor with values that cannot be.
    #[error("{} {error}", place(place_of, name))]
    Tensor {
        /// `None` for an initializer, else the node that holds the tensor in an attribute.
        place_of: Option<String>,
        /// The tensor's name, or the attribute's.
        name: String,
        /// What is wrong.
        error: TensorError,
    },
}

fn place(place_of: &Option<String>, name: &str) -> String {
    match place_of {
        None => format!("initializer `{}`", shown(name)),
        Some(node) => format!("node `{}`: tensor in attribute `{}`", shown(node), shown(name)),
    }
}

/// `a -> b -> a`, with the middle left out where it is long.
fn arrows(names: &[String]) -> String {
    const SHOW: usize = 8;
    let mut text = String::new();
    for (index, name) in names.iter().enumerate() {
        if names.len() > SHOW && index == SHOW {
            text += &format!("… {} more -> ", names.len() - SHOW);
            break;
        }
        text += &format!("`{}` -> ", shown(name));
    }
    text + &names.first().map(|name| format!("`{}`", shown(name))).unwrap_or_default()
}
