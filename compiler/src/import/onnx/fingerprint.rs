//! The fingerprint of a model: a hash of the graph, independent of its weight values.
//!
//! It is the SHA-256 of the re-encoded `ModelProto`, with fields in the order of their numbers. The values of the main
//! graph's initializers are cleared (`raw_data` and every `…_data` value field). Names, types, dims, `external_data`
//! and `data_location` of the initializers are included, as are tensors in attributes. Unknown protobuf fields are not.
//!
//! Training therefore does not change the fingerprint, and a plan can identify its model.

use prost::Message;
use sha2::{Digest, Sha256};

use crate::import::onnx::proto::{ModelProto, TensorProto};

/// Computes the fingerprint of `model`, which is left unchanged.
pub fn fingerprint(model: &mut ModelProto) -> [u8; 32] {
    let full = model.graph.as_mut().map(|graph| {
        let initializers = graph.initializer.iter().map(without_values).collect();
        std::mem::replace(&mut graph.initializer, initializers)
    });
    let digest = Sha256::digest(model.encode_to_vec());
    if let (Some(graph), Some(full)) = (model.graph.as_mut(), full) {
        graph.initializer = full;
    }
    digest.into()
}

fn without_values(tensor: &TensorProto) -> TensorProto {
    TensorProto {
        dims: tensor.dims.clone(),
        data_type: tensor.data_type,
        segment: tensor.segment,
        name: tensor.name.clone(),
        doc_string: tensor.doc_string.clone(),
        external_data: tensor.external_data.clone(),
        data_location: tensor.data_location,
        metadata_props: tensor.metadata_props.clone(),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::onnx::proto::GraphProto;

    fn model(value: f32, dim: i64) -> ModelProto {
        let w = TensorProto { dims: vec![dim], data_type: Some(1), float_data: vec![value], ..Default::default() };
        let graph = GraphProto { initializer: vec![w], ..Default::default() };
        ModelProto { graph: Some(graph), ..Default::default() }
    }

    #[test]
    fn values_do_not_count_and_shapes_do() {
        let mut one = model(1.0, 1);
        let first = fingerprint(&mut one);
        assert_eq!(one, model(1.0, 1));
        assert_eq!(first, fingerprint(&mut model(2.0, 1)));
        assert_ne!(first, fingerprint(&mut model(1.0, 2)));
    }
}
