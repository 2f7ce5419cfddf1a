//! Errors in the values of a tensor, in the model file or in an external one.

use crate::import::onnx::element::{SizeError, element_name};
use crate::text::name::short_name;

/// Errors in the values of one tensor. The messages continue a sentence after the tensor's name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TensorError {
    #[error("has an unknown data type, code {0}")]
    DataType(i32),
    #[error("has an invalid shape: {0}")]
    Size(#[from] SizeError),
    #[error("has data in both {first} and {second}")]
    TwoSources { first: &'static str, second: &'static str },
    #[error("of type {} has its data in {field}, which is not valid for that type", element_name(*elem_type))]
    WrongField { elem_type: i32, field: &'static str },
    #[error("of type {} and dims {dims:?} needs {expected} bytes, but {source_name} has {found}", element_name(*elem_type))]
    Bytes { elem_type: i32, dims: Vec<i64>, expected: u64, found: u64, source_name: &'static str },
    #[error("of type {} and dims {dims:?} needs {expected} entries, but {field} has {found}", element_name(*elem_type))]
    Entries { elem_type: i32, dims: Vec<i64>, expected: u64, found: u64, field: &'static str },
    /// An entry of `int32_data` or `uint64_data` exceeds the range of its type.
    #[error("has {value} at {index}, which is out of range for {}", element_name(*elem_type))]
    Range { elem_type: i32, index: usize, value: String },
    #[error("is stored in segments, which is not supported")]
    Segment,
    #[error("has external data {0}")]
    External(#[from] ExternalError),
}

/// Errors in a reference to an external file. The messages continue a sentence after "external data".
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExternalError {
    #[error("in a file, but the model itself was not read from a file")]
    NoFolder,
    #[error("without a location")]
    NoLocation,
    #[error("at location `{}`, which {why}: it must be inside the model's folder", short_name(location))]
    Escapes { location: String, why: &'static str },
    /// The location resolves, through links, to a path outside the model's folder.
    #[error("at location `{}`, a link that leads outside the model's folder", short_name(location))]
    LinkEscapes { location: String },
    #[error("at location `{}`, which is {kind}, not a regular file", short_name(location))]
    NotRegular { location: String, kind: &'static str },
    #[error("at location `{}`, which cannot be read: {error}", short_name(location))]
    Unreadable { location: String, error: String },
    #[error("with {key} `{}`, which is not a number of bytes", short_name(value))]
    Number { key: &'static str, value: String },
    #[error("with two different values for `{key}`")]
    TwoValues { key: &'static str },
    #[error("with length {length} bytes, but its type and dims need {expected}")]
    Length { length: u64, expected: u64 },
    #[error("at offset {offset} with length {length} of `{}`, whose size is {size} bytes", short_name(location))]
    PastEnd { offset: u64, length: u64, size: u64, location: String },
}
