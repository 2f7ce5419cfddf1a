//! Errors in ONNX files. Non-fatal findings are in `warning`.
//!
//! All messages are safe to print: names from the file pass through `text::name::short_name`, which removes control characters and
//! limits the length.

use std::fmt;
use std::path::PathBuf;

use crate::import::onnx::tensor_error::TensorError;
use crate::text::name::short_name;

/// Maximum number of faults listed in one message; the rest is only counted.
const LISTED: usize = 20;

#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("cannot open {}: {source}", short_name(&path.to_string_lossy()))]
    Open { path: PathBuf, source: std::io::Error },
    #[error("{} is {kind}, not a regular file", short_name(&path.to_string_lossy()))]
    NotRegular {
        path: PathBuf,
        /// With its article, such as `a directory`.
        kind: &'static str,
    },
    #[error("{0}")]
    Format(#[from] FormatError),
    #[error("not a valid ONNX protobuf message of {bytes} bytes: {reason}")]
    Protobuf {
        bytes: usize,
        /// The error of the protobuf decoder, with a hint on its cause where there is one.
        reason: String,
    },
    /// The message decodes, but its content is invalid.
    #[error("{0}")]
    Faults(Faults),
}

/// File formats that are recognised and are not ONNX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    #[error("empty file, not an ONNX model")]
    Empty,
    #[error("a git-lfs pointer, not an ONNX model: run `git lfs pull` in its folder to get the file")]
    LfsPointer,
    /// Written by `torch.save` or `torch.export.save`.
    #[error(
        "a zip archive, not an ONNX model: pipec reads a `.pt2` of torch.export if its name ends in .pt2; a \
         torch.save checkpoint holds no graph, export the model with torch.onnx.export"
    )]
    Zip,
    #[error("a Python pickle, not an ONNX model: pipec never opens pickles; export the model with torch.onnx.export")]
    Pickle,
    #[error(
        "a safetensors file, not an ONNX model: it holds weights but no graph; give the model first and this file \
        with --weights"
    )]
    Safetensors,
    #[error("an HDF5 file, not an ONNX model: convert a Keras model with tf2onnx")]
    Hdf5,
    #[error("a text file, not an ONNX model (a download page saved by mistake?)")]
    Text,
}

/// All faults of one model, in the order they were found.
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

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Fault {
    #[error("the model has no graph; it may not be an ONNX model")]
    NoGraph,
    #[error("the IR version is {found}; the first is 1")]
    IrVersion { found: i64 },
    #[error("the graph has no nodes: there is nothing to run")]
    NoNodes,
    #[error("opset_import is missing: the operator version is unknown")]
    NoOpset,
    /// A standard operator is used, but the standard domain is not imported.
    #[error(
        "node `{}`: opset_import does not name the standard domain, which its operator {} needs",
        short_name(node),
        short_name(op)
    )]
    OpsetOfStandard {
        /// The first such node.
        node: String,
        op: String,
    },
    #[error("opset_import names the domain `{}` twice, with versions {first} and {second}", short_name(domain))]
    OpsetTwice { domain: String, first: i64, second: i64 },
    #[error("graph input `{}` has no tensor type{}", short_name(name), if *other_kind { ": sequences, maps and optionals are not supported" } else { "" })]
    InputType {
        name: String,
        /// It has a type, but not a tensor type.
        other_kind: bool,
    },
    #[error("`{}` has an unknown element type, code {code}", short_name(name))]
    ElementType { name: String, code: i32 },
    #[error("`{}`: dimension {axis} is negative: {dim}", short_name(name))]
    NegativeDim { name: String, axis: usize, dim: i64 },
    #[error("node `{}` has no operator type", short_name(node))]
    NoOperator { node: String },
    #[error("duplicate graph input `{}`", short_name(name))]
    DuplicateInput { name: String },
    #[error("duplicate initializer `{}`", short_name(name))]
    DuplicateInitializer { name: String },
    /// Violation of single static assignment.
    #[error(
        "duplicate output: tensor `{}` is computed by {} and by node `{}`",
        short_name(tensor),
        short_name(first),
        short_name(node)
    )]
    DuplicateOutput {
        tensor: String,
        /// The first writer, with its type: `the graph input` or `node ...`.
        first: String,
        node: String,
    },
    #[error(
        "node `{}` ({}) reads tensor `{}`, which no node computes",
        short_name(node),
        short_name(op),
        short_name(tensor)
    )]
    UnknownTensor { node: String, op: String, tensor: String },
    #[error("no node computes graph output `{}`", short_name(tensor))]
    UnknownOutput { tensor: String },
    #[error("cycle: {}", arrows(nodes))]
    Cycle {
        /// In data-flow order; the last node feeds the first.
        nodes: Vec<String>,
    },
    #[error("node `{}` has the attribute `{}` twice", short_name(node), short_name(attribute))]
    DuplicateAttribute { node: String, attribute: String },
    #[error("node `{}`: control flow (If, Loop, Scan) is nested more than {limit} deep", short_name(node))]
    Nesting {
        /// The node of the main graph or of a function that contains the subgraphs.
        node: String,
        limit: usize,
    },
    #[error("duplicate function `{}`", short_name(name))]
    DuplicateFunction { name: String },
    #[error("recursive function: {}", arrows(functions))]
    RecursiveFunction {
        /// In call order; the last function calls the first.
        functions: Vec<String>,
    },
    #[error("the inlined functions of the model have more than {limit} nodes")]
    Expansion { limit: u64 },
    #[error("sparse initializer `{}`: sparse tensors are not supported", short_name(name))]
    Sparse {
        /// The tensor, or the node whose attribute it is.
        name: String,
    },
    #[error("{} {error}", place(place_of, name))]
    Tensor {
        /// `None` for an initializer, else the node that has the tensor as an attribute.
        place_of: Option<String>,
        name: String,
        error: TensorError,
    },
}

fn place(place_of: &Option<String>, name: &str) -> String {
    match place_of {
        None => format!("initializer `{}`", short_name(name)),
        Some(node) => format!("node `{}`: tensor in attribute `{}`", short_name(node), short_name(name)),
    }
}

/// Formats a cycle as `a -> b -> a`; long cycles are abbreviated.
fn arrows(names: &[String]) -> String {
    const SHOW: usize = 8;
    let mut text = String::new();
    for (index, name) in names.iter().enumerate() {
        if names.len() > SHOW && index == SHOW {
            text += &format!("… {} more -> ", names.len() - SHOW);
            break;
        }
        text += &format!("`{}` -> ", short_name(name));
    }
    text + &names.first().map(|name| format!("`{}`", short_name(name))).unwrap_or_default()
}
