//! Encodes stage snapshots as files of named tensors, and decodes them.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::error::CheckpointWriteError;
use crate::data::weights::{Piece, encode};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::exec::stage_tensor::{OptimizerTensor, StageTensor};
use crate::optim::optimizer::Optimizer;
use compiler::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

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
    let counts = snapshot.state.iter().flat_map(|state| &state.updates);
    let counts: Vec<[u8; 8]> = counts.map(|updates| i64::from(*updates).to_le_bytes()).collect();
    let (mut weights, mut optimizer_state, mut in_flight) = (Vec::new(), Vec::new(), Vec::new());
    for (place, tensor) in &snapshot.tensors {
        let Some(named) = place.named(code) else { continue };
        let name = &named.name;
        match *place {
            StageTensor::Weight(p) => {
                weights.push((name.clone(), piece(named, master(snapshot, p).unwrap_or(tensor))?))
            }
            StageTensor::State(index) => {
                let is_constant = code.state_updates.iter().all(|update| update.state != index);
                let initial = initial.get(name).filter(|_| is_constant);
                weights.push((
                    name.clone(),
                    initial.map_or_else(|| piece(named, tensor), |initial| Ok(Piece::of(initial)))?,
                ));
            }
            StageTensor::Optimizer(_, OptimizerTensor::Named(index)) => {
                let kind = optimizer.names().get(index).map(|kind| format!("{name}/{kind}"));
                optimizer_state
                    .extend(kind.map(|kind| Ok::<_, DeviceError>((kind, piece(named, tensor)?))).transpose()?);
            }
            StageTensor::Optimizer(_, OptimizerTensor::Drift) => {
                optimizer_state.push((format!("{name}/{DRIFT}"), piece(named, tensor)?));
            }
            StageTensor::Version(version, _) => in_flight.push((format!("v{version}/{name}"), piece(named, tensor)?)),
            StageTensor::Forward(item, _) => in_flight.push((format!("item{item}/{name}"), piece(named, tensor)?)),
            StageTensor::Tied(_, version) => in_flight.push((format!("shared{version}/{name}"), piece(named, tensor)?)),
            StageTensor::Optimizer(_, OptimizerTensor::Master) | StageTensor::Gradient(_) => {}
        }
    }
    for (named, count) in code.parameters.iter().zip(&counts) {
        let count = Piece { dtype: DType::I64, shape: Vec::new(), bytes: Cow::Borrowed(count) };
        optimizer_state.push((format!("{}/{STEP}", named.name), count));
    }
    let (has_state, is_in_flight) = (snapshot.state.is_some(), !in_flight.is_empty());
    let pieces = [
        (Holds::Weights, weights, has_state),
        (Holds::Optimizer, optimizer_state, has_state),
        (Holds::InFlight, in_flight, is_in_flight),
    ];
    let file = |(holds, pieces, _): (Holds, Vec<_>, bool)| {
        let name = holds.file_name(snapshot.key.stage.0, snapshot.key.replica);
        Ok((holds, encode(Path::new(&name), pieces)?))
    };
    pieces.into_iter().filter(|(_, _, is_written)| *is_written).map(file).collect()
}

/// The `f32` master weights of a parameter, if it has any.
fn master(snapshot: &StageSnapshot, p: usize) -> Option<&Arc<Buffer>> {
    snapshot.tensors.get(&StageTensor::Optimizer(p, OptimizerTensor::Master))
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
    let is_finite = |named: &NamedTensor, buffer: &Buffer| -> Result<bool, DeviceError> {
        let piece = piece(named, buffer)?;
        Ok(match piece.dtype {
            DType::F32 => piece.bytes.as_chunks().0.iter().all(|bytes| f32::from_le_bytes(*bytes).is_finite()),
            DType::F64 => piece.bytes.as_chunks().0.iter().all(|bytes| f64::from_le_bytes(*bytes).is_finite()),
            _ => true,
        })
    };
    let is_updated = |index: usize| code.state_updates.iter().any(|update| update.state == index);
    for (place, tensor) in &snapshot.tensors {
        let tensor = match *place {
            StageTensor::Weight(p) => master(snapshot, p).unwrap_or(tensor),
            StageTensor::State(index) if is_updated(index) => tensor,
            _ => continue,
        };
        if let Some(named) = place.named(code)
            && !is_finite(named, tensor)?
        {
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
