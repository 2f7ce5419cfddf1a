//! Encodes stage snapshots as files of named tensors, and decodes them.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::error::CheckpointWriteError;
use crate::data::weights::{Piece, encode};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::optim::optimizer::Optimizer;
use compiler::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Tensor kind of a parameter's update count.
pub const STEP: &str = "step";
/// Tensor kind of a parameter's moving average of updates (PipeMare).
pub const DRIFT: &str = "drift";

/// In-flight state of a stage replica.
#[derive(Debug, Default)]
pub struct Flight {
    pub versions: BTreeMap<u32, BTreeMap<String, Tensor>>,
    /// Forward weights that are not a version, by micro-batch and name.
    pub forwards: BTreeMap<u32, BTreeMap<String, Tensor>>,
    /// Older versions of tied weights that have versions of their own, by name and version.
    pub shared: BTreeMap<String, BTreeMap<u32, Tensor>>,
}

/// The contents of a checkpoint file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holds {
    Weights,
    Optimizer,
    InFlight,
}

impl Holds {
    pub fn file_name(self, stage: u32, replica: u32) -> String {
        match (self, replica) {
            (Holds::Weights, _) => format!("stage-{stage}.safetensors"),
            (Holds::Optimizer, _) => format!("stage-{stage}.optimizer.safetensors"),
            (Holds::InFlight, 0) => format!("stage-{stage}.in-flight.safetensors"),
            (Holds::InFlight, _) => format!("stage-{stage}.replica-{replica}.in-flight.safetensors"),
        }
    }
}

/// The files of a snapshot. A state that nothing updates is saved as `initial`, without rounding.
pub fn files(
    snapshot: &StageSnapshot,
    code: &StageCode,
    optimizer: &Optimizer,
    initial: &BTreeMap<String, Tensor>,
) -> Result<Vec<(Holds, Vec<u8>)>, CheckpointWriteError> {
    let mut files = Vec::new();
    let path = |holds: Holds| holds.file_name(snapshot.stage.0, snapshot.replica);
    if let Some(state) = &snapshot.state {
        let mut pieces = Vec::new();
        for ((named, weight), optimizer_state) in
            code.parameters.iter().zip(&state.weights).zip(&state.optimizer_states)
        {
            pieces.push((named.name.clone(), piece(named, optimizer_state.master.as_ref().unwrap_or(weight))?));
        }
        for (index, (named, state)) in code.states.iter().zip(&state.states).enumerate() {
            let is_constant = code.state_updates.iter().all(|update| update.state != index);
            let initial = initial.get(&named.name).filter(|_| is_constant);
            pieces.push((
                named.name.clone(),
                match initial {
                    Some(initial) => Piece::of(initial),
                    None => piece(named, state)?,
                },
            ));
        }
        files.push((Holds::Weights, encode(Path::new(&path(Holds::Weights)), pieces)?));
        let counts: Vec<[u8; 8]> = state
            .optimizer_states
            .iter()
            .map(|optimizer_state| i64::from(optimizer_state.updates).to_le_bytes())
            .collect();
        let mut pieces = Vec::new();
        for ((named, optimizer_state), count) in code.parameters.iter().zip(&state.optimizer_states).zip(&counts) {
            let kinds = optimizer.names().iter().copied().zip(&optimizer_state.state);
            for (kind, state) in kinds.chain(optimizer_state.drift.iter().map(|drift| (DRIFT, drift))) {
                pieces.push((format!("{}/{kind}", named.name), piece(named, state)?));
            }
            let count = Piece { dtype: DType::I64, shape: Vec::new(), bytes: Cow::Borrowed(count) };
            pieces.push((format!("{}/{STEP}", named.name), count));
        }
        files.push((Holds::Optimizer, encode(Path::new(&path(Holds::Optimizer)), pieces)?));
    }
    let mut pieces = Vec::new();
    let versions = snapshot.versions.iter().map(|(version, weights)| (format!("v{version}"), weights));
    let forwards = snapshot.forwards.iter().map(|(item, weights)| (format!("item{item}"), weights));
    for (prefix, weights) in versions.chain(forwards) {
        // A tied weight with versions of its own is empty in the stage's versions.
        let whole_weights = code.parameters.iter().zip(weights).filter(|(named, weight)| weight.len() == named.bytes);
        for (named, weight) in whole_weights {
            pieces.push((format!("{prefix}/{}", named.name), piece(named, weight)?));
        }
    }
    for (&index, versions) in &snapshot.tied_weights {
        let named = &code.parameters[index];
        for (version, weight) in versions {
            pieces.push((format!("shared{version}/{}", named.name), piece(named, weight)?));
        }
    }
    if !pieces.is_empty() {
        files.push((Holds::InFlight, encode(Path::new(&path(Holds::InFlight)), pieces)?));
    }
    Ok(files)
}

/// In-flight state from the tensors of its file. An unexpected name is the error.
pub fn decode_flight(tensors: BTreeMap<String, Tensor>) -> Result<Flight, String> {
    let mut flight = Flight::default();
    for (name, tensor) in tensors {
        let (section, parameter) = name.split_once('/').ok_or_else(|| name.clone())?;
        let number = |prefix: &str| section.strip_prefix(prefix).and_then(|number| number.parse::<u32>().ok());
        let parameter = parameter.to_string();
        if let Some(version) = number("v") {
            flight.versions.entry(version).or_default().insert(parameter, tensor);
        } else if let Some(item) = number("item") {
            flight.forwards.entry(item).or_default().insert(parameter, tensor);
        } else if let Some(version) = number("shared") {
            flight.shared.entry(parameter).or_default().insert(version, tensor);
        } else {
            return Err(name);
        }
    }
    Ok(flight)
}

/// The name of a parameter or updated state with a non-finite value, if there is one. Constant states may have any
/// values.
pub fn find_non_finite<'a>(snapshot: &StageSnapshot, code: &'a StageCode) -> Result<Option<&'a str>, DeviceError> {
    let Some(state) = snapshot.state.as_ref() else { return Ok(None) };
    let master_weights = state
        .weights
        .iter()
        .zip(&state.optimizer_states)
        .map(|(weight, optimizer_state)| optimizer_state.master.as_ref().unwrap_or(weight));
    let is_finite = |named: &NamedTensor, buffer: &Buffer| -> Result<bool, DeviceError> {
        let piece = piece(named, buffer)?;
        Ok(match piece.dtype {
            DType::F32 => piece.bytes.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite()),
            DType::F64 => piece.bytes.as_chunks().0.iter().all(|bytes| f64::from_le_bytes(*bytes).is_finite()),
            _ => true,
        })
    };
    let is_updated = |index: &usize| code.state_updates.iter().any(|update| update.state == *index);
    let states = (0..code.states.len()).filter(is_updated).map(|index| (&code.states[index], &state.states[index]));
    for (named, buffer) in code.parameters.iter().zip(master_weights).chain(states) {
        if !is_finite(named, buffer)? {
            return Ok(Some(&*named.name));
        }
    }
    Ok(None)
}

fn piece<'a>(named: &NamedTensor, buffer: &'a Buffer) -> Result<Piece<'a>, DeviceError> {
    let shape = named.fact.concrete().expect("sizes were checked when the graph was compiled");
    let dtype = if buffer.len() == named.bytes { named.fact.dtype } else { accumulation_type(named.fact.dtype) };
    Ok(Piece { dtype, shape, bytes: buffer.download()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_flight_versions_are_found_by_name() {
        let tensor = || Tensor::from_f32(&[1], &[1.0]);
        let decode = |names: &[&str]| decode_flight(names.iter().map(|name| (name.to_string(), tensor())).collect());
        let decoded = decode(&["v5/a/b.weight", "v5/c", "item7/c", "shared3/c", "shared4/c"]).unwrap();
        assert_eq!(decoded.versions[&5].keys().collect::<Vec<_>>(), ["a/b.weight", "c"]);
        assert_eq!(decoded.forwards[&7].keys().collect::<Vec<_>>(), ["c"]);
        assert_eq!(decoded.shared["c"].keys().collect::<Vec<_>>(), [&3, &4]);
        for wrong in ["c", "v/c", "v-1/c", "v99999999999/c", "w5/c", "/c", ""] {
            assert_eq!(decode(&["v5/c", wrong]).unwrap_err(), wrong);
        }
    }
}
