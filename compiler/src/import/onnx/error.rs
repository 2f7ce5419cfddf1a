//! What can be wrong with an ONNX file, and what is only worth saying.
//!
//! Every text here is safe to print: names from the file pass through `name::shown`, so no control character and no
//! megabyte of text reaches a terminal.

use std::fmt;
use std::path::PathBuf;

use crate::import::onnx::element::{SizeError, element_name};
use crate::import::onnx::name::shown;

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

/// What is wrong with the values of one tensor. The texts follow the tensor's name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TensorError {
    /// A type code that the standard does not know.
    #[error("has an unknown data type, code {0}")]
    DataType(i32),
    /// Dims that are no shape.
    #[error("has no possible shape: {0}")]
    Size(#[from] SizeError),
    /// More than one place holds values.
    #[error("has data in both {first} and {second}")]
    TwoSources {
        /// One field.
        first: &'static str,
        /// Another.
        second: &'static str,
    },
    /// A typed field that its type does not use.
    #[error("of type {} has its data in {field}, where that type cannot be", element_name(*elem_type))]
    WrongField {
        /// The type.
        elem_type: i32,
        /// The field.
        field: &'static str,
    },
    /// Not the bytes that type and dims say.
    #[error("of type {} and dims {dims:?} takes {expected} bytes, but {source_name} has {found}", element_name(*elem_type))]
    Bytes {
        /// The type.
        elem_type: i32,
        /// The dims.
        dims: Vec<i64>,
        /// What type and dims say.
        expected: u64,
        /// What is there.
        found: u64,
        /// Where.
        source_name: &'static str,
    },
    /// Not the entries that type and dims say.
    #[error("of type {} and dims {dims:?} takes {expected} entries, but {field} has {found}", element_name(*elem_type))]
    Entries {
        /// The type.
        elem_type: i32,
        /// The dims.
        dims: Vec<i64>,
        /// What type and dims say.
        expected: u64,
        /// What is there.
        found: u64,
        /// Where.
        field: &'static str,
    },
    /// An entry of `int32_data` or `uint64_data` too large for its type.
    #[error("has {value} at {index}, which {} cannot hold", element_name(*elem_type))]
    Range {
        /// The type.
        elem_type: i32,
        /// Which entry.
        index: usize,
        /// Its value.
        value: String,
    },
    /// A tensor stored in segments.
    #[error("is stored in segments, which is not supported")]
    Segment,
    /// Trouble with external data.
    #[error("has external data {0}")]
    External(#[from] ExternalError),
}

/// What is wrong with a reference to an external file. The texts follow "external data".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExternalError {
    /// There is no folder to look in: the model did not come from a file.
    #[error("in a file, but the model was not read from one")]
    NoFolder,
    /// No location.
    #[error("without a location")]
    NoLocation,
    /// A location that could lead outside the model's folder.
    #[error("at location `{}`, which {why}: it must stay inside the model's folder", shown(location))]
    Escapes {
        /// The location.
        location: String,
        /// Why it is refused.
        why: &'static str,
    },
    /// The location resolves, by links, to a place outside the model's folder.
    #[error("at location `{}`, a link that leads outside the model's folder", shown(location))]
    LinkEscapes {
        /// The location.
        location: String,
    },
    /// Not a regular file.
    #[error("at location `{}`, which is {kind}, not a regular file", shown(location))]
    NotRegular {
        /// The location.
        location: String,
        /// What it is, with its article.
        kind: &'static str,
    },
    /// It exists and cannot be read.
    #[error("at location `{}`, which cannot be read: {error}", shown(location))]
    Unreadable {
        /// The location.
        location: String,
        /// What the system said.
        error: String,
    },
    /// `offset` or `length` is not a number.
    #[error("whose {key} `{}` is not a number of bytes", shown(value))]
    Number {
        /// Which key.
        key: &'static str,
        /// Its text.
        value: String,
    },
    /// One key with two values.
    #[error("with two different values for `{key}`")]
    TwoValues {
        /// Which key.
        key: &'static str,
    },
    /// The stated length is not what type and dims say.
    #[error("whose length is {length} bytes, but its type and dims take {expected}")]
    Length {
        /// As stated.
        length: u64,
        /// What type and dims say.
        expected: u64,
    },
    /// The range ends after the file's end.
    #[error("at offset {offset} with length {length} of `{}`, whose size is {size} bytes", shown(location))]
    PastEnd {
        /// Where it begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// The file's size in bytes.
        size: u64,
        /// The location.
        location: String,
    },
}

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
