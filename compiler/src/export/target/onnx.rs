//! The model with a stage per node, in the ONNX multi-device fields of IR version 11: `DeviceConfigurationProto` of the
//! model has the devices, `NodeDeviceConfigurationProto` of each node its `pipeline_stage`
//! (<https://github.com/onnx/onnx/blob/main/docs/IR.md>, multi-device configuration).
//!
//! These fields cannot express replicas, schedules and versions, so they are stored as model metadata: `pipec.stages`
//! is a list of objects with `replicas` and `devices`, `pipec.schedule` the schedule and its micro-batches.

use super::nodes::{self, assign_stages};
use super::payloads::{self, INLINE};
use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit};
use crate::import::onnx::model::OnnxModel;
use crate::import::onnx::name::unique_names;
use crate::import::onnx::proto::{
    DeviceConfigurationProto, ModelProto, NodeDeviceConfigurationProto, StringStringEntryProto,
};
use crate::import::onnx::{decode, file};
use crate::plan::{Plan, Stage};
use prost::Message;
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;

const CONFIGURATION: &str = "pipec";

/// The first IR version with the multi-device fields.
const IR_VERSION: i64 = 11;

/// Writes `model.onnx`, and `model.onnx.data` for large models.
pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    fit::is_of_a_model(plan)?;
    let imported = fit::model(input)?;
    let (mut proto, model) = read(imported.path)?;
    let staged = assign_stages(plan, &imported.model.graph, &model)?;
    let earliest_stages = earliest(&model, &staged.stages);
    let stages: HashMap<&str, u32> = model.nodes.iter().map(|node| node.name.as_str()).zip(earliest_stages).collect();
    proto.ir_version = Some(proto.ir_version().max(IR_VERSION));
    proto.configuration.retain(|known| known.name() != CONFIGURATION);
    proto.configuration.push(DeviceConfigurationProto {
        name: Some(CONFIGURATION.to_string()),
        num_devices: i32::try_from(plan.cluster.devices).ok(),
        device: Vec::new(),
    });
    let values = payloads::external(&model);
    if let Some(graph) = &mut proto.graph {
        let names = unique_names(&graph.node);
        for (node, name) in graph.node.iter_mut().zip(names) {
            node.device_configurations.retain(|known| known.configuration_id() != CONFIGURATION);
            node.device_configurations.push(NodeDeviceConfigurationProto {
                configuration_id: Some(CONFIGURATION.to_string()),
                sharding_spec: Vec::new(),
                pipeline_stage: stages.get(name.as_str()).and_then(|stage| i32::try_from(*stage).ok()),
            });
        }
        graph.initializer.iter_mut().for_each(|tensor| payloads::bring(tensor, &values));
    }
    describe(&mut proto, plan);
    let mut bundle = Bundle { files: payloads::files(proto, "model.onnx", INLINE), ..Bundle::default() };
    bundle.notes.extend(nodes::moved_note(&staged.moved));
    Ok(bundle)
}

/// The file as protobuf, and decoded.
pub fn read(path: &Path) -> Result<(ModelProto, OnnxModel), Refusal> {
    let unreadable =
        |error: &dyn std::fmt::Display| Refusal::Model { what: format!("the model is not an ONNX file: {error}") };
    let model = decode::read(path).map_err(|error| unreadable(&error))?;
    let bytes = file::map(path).map_err(|error| unreadable(&error))?;
    let proto = ModelProto::decode(bytes).map_err(|error| unreadable(&error))?;
    Ok((proto, model))
}

/// The stage of each node; constant nodes go to the stage of their first reader.
fn earliest(model: &OnnxModel, stages: &[Option<u32>]) -> Vec<u32> {
    let mut stage_of_tensor: HashMap<&str, u32> = HashMap::new();
    let mut earliest = vec![0; stages.len()];
    for (at, node) in model.nodes.iter().enumerate().rev() {
        let readers = node.outputs.iter().filter_map(|name| stage_of_tensor.get(name.as_str()).copied());
        let stage = stages[at].or(readers.min()).unwrap_or(0);
        earliest[at] = stage;
        for name in nodes::reads(node) {
            let first = stage_of_tensor.entry(name).or_insert(stage);
            *first = stage.min(*first);
        }
    }
    earliest
}

/// Adds replicas, devices and schedule as metadata.
pub fn describe(proto: &mut ModelProto, plan: &Plan) {
    let entry = |stage: &Stage| {
        let mut entry = json!({"replicas": stage.replicas, "devices": stage.devices});
        if stage.degree() > 1 {
            entry["tensor_degree"] = json!(stage.degree());
        }
        entry
    };
    let stages: Vec<_> = plan.stages.iter().map(entry).collect();
    let schedule = json!({
        "kind": plan.schedule.kind.name(),
        "micro_batch": plan.schedule.micro_batch,
        "microbatches": plan.schedule.microbatches,
    });
    for (key, value) in [("pipec.stages", json!(stages)), ("pipec.schedule", schedule)] {
        proto.metadata_props.retain(|known| known.key() != key);
        proto
            .metadata_props
            .push(StringStringEntryProto { key: Some(key.to_string()), value: Some(value.to_string()) });
    }
}
