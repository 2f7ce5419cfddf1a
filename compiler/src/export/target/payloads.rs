//! Placement of tensor values in exported ONNX models: inline if the model is small, else in one external data file.
//!
//! External data of the source is included, so that the exported model is independent of the source folder. Protobuf is
//! limited to 2 GB. External tensors are aligned to 64 bytes. A value whose file is missing remains a reference.

use super::File;
use crate::import::onnx::model::{OnnxModel, Payload};
use crate::import::onnx::proto::tensor_proto::DataLocation;
use crate::import::onnx::proto::{ModelProto, StringStringEntryProto, TensorProto};
use bytes::Bytes;
use prost::Message;
use std::collections::HashMap;

/// Maximum size in bytes of inline tensors.
pub const INLINE: u64 = 512 << 20;

/// Tensors below this size stay inline: shapes, axes, scales.
const SMALL: usize = 1024;

const ALIGNMENT: usize = 64;

/// The values of initializers by name, unless their file is missing.
pub fn external(model: &OnnxModel) -> HashMap<&str, &Bytes> {
    let values = model.initializers.iter().filter_map(|tensor| match &tensor.payload {
        Payload::Bytes(bytes) => Some((tensor.name.as_str(), bytes)),
        Payload::Strings(_) | Payload::Missing { .. } => None,
    });
    values.collect()
}

/// Moves the values of an external tensor inline, if available.
pub fn bring(tensor: &mut TensorProto, values: &HashMap<&str, &Bytes>) {
    if tensor.data_location() != DataLocation::External {
        return;
    }
    if let Some(bytes) = values.get(tensor.name()) {
        tensor.raw_data = Some((*bytes).clone());
        tensor.external_data.clear();
        tensor.data_location = None;
    }
}

/// The model file, and an external data file if the tensors exceed `inline` bytes.
pub fn files(mut model: ModelProto, name: &str, inline: u64) -> Vec<File> {
    let mut external_bytes = Vec::new();
    let location = format!("{name}.data");
    if let Some(graph) = &mut model.graph {
        let total_bytes =
            graph.initializer.iter().map(|tensor| tensor.raw_data().len() as u64).fold(0, u64::saturating_add);
        if total_bytes > inline {
            for tensor in graph.initializer.iter_mut().filter(|tensor| tensor.raw_data().len() >= SMALL) {
                let values = tensor.raw_data.take().unwrap_or_default();
                external_bytes.resize(external_bytes.len().next_multiple_of(ALIGNMENT), 0);
                let entry =
                    |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
                tensor.external_data = vec![
                    entry("location", location.clone()),
                    entry("offset", external_bytes.len().to_string()),
                    entry("length", values.len().to_string()),
                ];
                tensor.set_data_location(DataLocation::External);
                external_bytes.extend_from_slice(&values);
            }
        }
    }
    let mut files = vec![File { name: name.to_string(), bytes: model.encode_to_vec() }];
    if !external_bytes.is_empty() {
        files.push(File { name: location, bytes: external_bytes });
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::onnx::proto::GraphProto;

    #[test]
    fn large_tensors_go_beside_the_file() {
        let tensor = |name: &str, bytes: usize| TensorProto {
            name: Some(name.into()),
            raw_data: Some(vec![7u8; bytes].into()),
            dims: vec![bytes as i64],
            data_type: Some(2),
            ..Default::default()
        };
        let graph = GraphProto {
            initializer: vec![tensor("a", 1500), tensor("b", 8), tensor("c", 2000)],
            ..Default::default()
        };
        let model = ModelProto { graph: Some(graph), ..Default::default() };
        assert_eq!(files(model.clone(), "m.onnx", 4000).len(), 1);
        let parted = files(model, "m.onnx", 3000);
        assert_eq!(parted[1].name, "m.onnx.data");
        assert_eq!(parted[1].bytes.len(), 1536 + 2000);
        let read = ModelProto::decode(Bytes::from(parted[0].bytes.clone())).unwrap();
        let tensors = read.graph.unwrap().initializer;
        assert_eq!(tensors[1].raw_data().len(), 8, "small ones stay");
        assert_eq!(tensors[2].external_data[1].value(), "1536");
    }
}
