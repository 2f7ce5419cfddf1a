//! Gathers the checkpoint snapshots of all ranks of the tensor-parallel groups.
//!
//! Snapshots of other processes come from the network. [`parts`](crate::process::parts) checks each alone; here, those of
//! a group must agree before their shards are joined.

use crate::checkpoint::merge_shards::merge_shards;
use crate::checkpoint::{MergeKey, StageSnapshot, StageState};
use crate::comm::tensor_group::Layouts;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::executor::Weights;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::optim::state::ParameterState;
use crate::stage::saved_weights::tensor;
use crate::train::tensor_shards::split_of;
use compiler::op::sharding::whole_of;
use compiler::tensor::Tensor;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum GatherError {
    #[error("the snapshot of stage {stage}, replica {replica}, from tensor rank {tensor_rank}: {what}")]
    Snapshot { stage: u32, replica: u32, tensor_rank: usize, what: &'static str },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Collects snapshots until those of all ranks have arrived.
pub struct ShardGatherer<'a> {
    codes: &'a [StageCode],
    layouts: &'a Layouts,
    degree: usize,
    /// Snapshots by tensor rank and replica. The key has the minibatches, too.
    open: BTreeMap<(MergeKey, u32), Vec<BTreeMap<u32, StageSnapshot>>>,
}

impl<'a> ShardGatherer<'a> {
    /// A gatherer for a run of these stages. `degree` is the tensor-parallel degree. Where all parameters are replicated,
    /// ranks do not wait for each other, so any number of checkpoints may be incomplete.
    pub fn new(codes: &'a [StageCode], layouts: &'a Layouts, degree: usize) -> ShardGatherer<'a> {
        ShardGatherer { codes, layouts, degree, open: BTreeMap::new() }
    }

    /// Adds the snapshot of a rank. Returns the gathered snapshots that it completes. Fails if the snapshot does not
    /// fit those of the other ranks.
    pub fn add(&mut self, snapshot: StageSnapshot) -> Result<Vec<StageSnapshot>, GatherError> {
        let error_of = snapshot_error(&snapshot);
        let StageSnapshot { minibatches, tensor_rank, .. } = snapshot;
        let key = (snapshot.merge_key(), minibatches);
        let ranks = self.open.entry(key).or_insert_with(|| (0..self.degree).map(|_| BTreeMap::new()).collect());
        let replica_counts = ranks.iter().flat_map(BTreeMap::values).map(|snapshot| snapshot.replicas);
        if replica_counts.clone().any(|replicas| replicas != snapshot.replicas) {
            return Err(error_of("it has another number of ZeRO replicas than those of other ranks"));
        }
        let replicas = snapshot.replicas.max(1) as usize;
        let replica_snapshots = ranks.get_mut(tensor_rank).ok_or_else(|| error_of("there is no such rank"))?;
        if replica_snapshots.insert(snapshot.replica, snapshot).is_some() {
            return Err(error_of("it has come already"));
        }
        if ranks.iter().any(|replica_snapshots| replica_snapshots.len() < replicas) {
            return Ok(Vec::new());
        }
        let ranks = self.open.remove(&key).unwrap_or_default();
        check_agreement(&ranks)?;
        let merged = ranks
            .into_iter()
            .map(|replica_snapshots| Ok(merge_shards(replica_snapshots.into_values().collect())?.into()));
        let mut queues: Vec<VecDeque<StageSnapshot>> = merged.collect::<Result<_, DeviceError>>()?;
        let mut gathered = Vec::new();
        while let Some(snapshots) = queues.iter_mut().map(VecDeque::pop_front).collect::<Option<Vec<StageSnapshot>>>() {
            gathered.push(self.join_ranks(snapshots)?);
        }
        Ok(gathered)
    }

    /// Joins snapshots that agree, one per rank.
    fn join_ranks(&self, snapshots: Vec<StageSnapshot>) -> Result<StageSnapshot, GatherError> {
        let code = &self.codes[snapshots[0].stage.index()];
        check_sizes(&snapshots[0], code, self.layouts)?;
        let join_tensor = |p: usize, each: &[&Buffer]| -> Result<Option<Buffer>, DeviceError> {
            let named = &code.parameters[p];
            let Some(split) = split_of(self.layouts, &named.name) else { return Ok(None) };
            let tensors = each.iter().map(|buffer| Ok(tensor(named, &buffer.download()?)));
            let tensors: Vec<Tensor> = tensors.collect::<Result<_, DeviceError>>()?;
            Ok(Some(Buffer::host_copy(whole_of(&tensors, split).bytes())))
        };
        let weights = |rank_weights: Vec<&Weights>| -> Result<Weights, DeviceError> {
            let join_weight = |p: usize| {
                let buffers: Vec<&Buffer> = rank_weights.iter().map(|weights| &*weights[p]).collect();
                Ok(join_tensor(p, &buffers)?.map_or_else(|| rank_weights[0][p].clone(), Arc::new))
            };
            (0..rank_weights[0].len()).map(join_weight).collect()
        };
        let buffer = |p: usize, buffers: Vec<&Buffer>| -> Result<Buffer, DeviceError> {
            match join_tensor(p, &buffers)? {
                Some(joined) => Ok(joined),
                None => Ok(Buffer::host_copy(&buffers[0].download()?)),
            }
        };
        let optimizer_state = |p: usize, each: Vec<&ParameterState>| -> Result<ParameterState, DeviceError> {
            let join_kind = |kind: fn(&ParameterState) -> Option<&Buffer>| {
                each.iter()
                    .map(|state| kind(state))
                    .collect::<Option<Vec<_>>>()
                    .map(|buffers| buffer(p, buffers))
                    .transpose()
            };
            let state = |index: usize| buffer(p, each.iter().map(|state| &state.state[index]).collect());
            Ok(ParameterState {
                master: join_kind(|state| state.master.as_ref())?,
                state: (0..each[0].state.len()).map(state).collect::<Result<_, _>>()?,
                drift: join_kind(|state| state.drift.as_ref())?,
                updates: each[0].updates,
            })
        };
        let join_versions = |versions_of: fn(&StageSnapshot) -> &BTreeMap<u32, Weights>| {
            let each =
                |number: &u32| snapshots.iter().filter_map(|snapshot| versions_of(snapshot).get(number)).collect();
            versions_of(&snapshots[0])
                .keys()
                .map(|number| Ok((*number, weights(each(number))?)))
                .collect::<Result<_, DeviceError>>()
        };
        let (versions, forwards) =
            (join_versions(|snapshot| &snapshot.versions)?, join_versions(|snapshot| &snapshot.forwards)?);
        let states: Option<Vec<&StageState>> = snapshots.iter().map(|snapshot| snapshot.state.as_ref()).collect();
        let mut state = None;
        if let Some(each) = states {
            let of_parameter =
                |p: usize| optimizer_state(p, each.iter().map(|state| &state.optimizer_states[p]).collect());
            let states = each[0].states.iter().map(|state| Ok(Buffer::host_copy(&state.download()?)));
            state = Some(StageState {
                weights: weights(each.iter().map(|state| &state.weights).collect())?,
                optimizer_states: (0..each[0].optimizer_states.len()).map(of_parameter).collect::<Result<_, _>>()?,
                states: states.collect::<Result<_, DeviceError>>()?,
                scale: each[0].scale,
            });
        }
        let shared = snapshots[0].tied_weights.clone();
        let StageSnapshot { stage, replica, minibatches, .. } = snapshots[0];
        // The snapshots' memory stays counted until they are gathered.
        Ok(StageSnapshot {
            stage,
            replica,
            tensor_rank: 0,
            minibatches,
            replicas: 1,
            optimizer_states: Vec::new(),
            state,
            versions,
            forwards,
            tied_weights: shared,
            counted_bytes: None,
        })
    }
}

/// Makes errors about a snapshot.
fn snapshot_error(snapshot: &StageSnapshot) -> impl Fn(&'static str) -> GatherError + use<> {
    let StageSnapshot { stage, replica, tensor_rank, .. } = *snapshot;
    move |what| GatherError::Snapshot { stage: stage.0, replica, tensor_rank, what }
}

type OptimizerForm = (u32, Vec<usize>, [Option<usize>; 2]);

fn optimizer_form(state: &ParameterState) -> OptimizerForm {
    let lengths = state.state.iter().map(Buffer::len).collect();
    (state.updates, lengths, [&state.master, &state.drift].map(|buffer| buffer.as_ref().map(Buffer::len)))
}

fn lengths(weights: &Weights) -> Vec<usize> {
    weights.iter().map(|weight| weight.len()).collect()
}

fn version_lengths(versions: &BTreeMap<u32, Weights>) -> BTreeMap<u32, Vec<usize>> {
    versions.iter().map(|(version, weights)| (*version, lengths(weights))).collect()
}

/// Checks that the snapshots of each replica have equal numbers and lengths on all ranks. Shards have equal shapes, and
/// all ranks run the same program.
fn check_agreement(ranks: &[BTreeMap<u32, StageSnapshot>]) -> Result<(), GatherError> {
    let Some((first, others)) = ranks.split_first() else { return Ok(()) };
    let optimizer_forms =
        |snapshot: &StageSnapshot| snapshot.optimizer_states.iter().map(optimizer_form).collect::<Vec<_>>();
    let state_form = |snapshot: &StageSnapshot| {
        snapshot.state.as_ref().map(|state| {
            let scale = state.scale.map(|(scale, good)| (scale.to_bits(), good));
            let states: Vec<usize> = state.states.iter().map(Buffer::len).collect();
            (
                lengths(&state.weights),
                state.optimizer_states.iter().map(optimizer_form).collect::<Vec<_>>(),
                states,
                scale,
            )
        })
    };
    let tied_lengths = |snapshot: &StageSnapshot| -> BTreeMap<usize, BTreeMap<u32, usize>> {
        let older = |versions: &BTreeMap<u32, Arc<Buffer>>| {
            versions.iter().map(|(version, weight)| (*version, weight.len())).collect()
        };
        snapshot.tied_weights.iter().map(|(p, versions)| (*p, older(versions))).collect()
    };
    for replica_snapshots in others {
        for (replica, snapshot) in replica_snapshots {
            let error_of = |what| snapshot_error(snapshot)(what);
            let first = first.get(replica).ok_or_else(|| error_of("tensor rank 0 has none of this replica"))?;
            if optimizer_forms(first) != optimizer_forms(snapshot) {
                return Err(error_of("its optimizer shards differ from those of tensor rank 0"));
            }
            if state_form(first) != state_form(snapshot) {
                return Err(error_of("its weights, states or optimizer state differ from those of tensor rank 0"));
            }
            if version_lengths(&first.versions) != version_lengths(&snapshot.versions) {
                return Err(error_of("its weight versions differ from those of tensor rank 0"));
            }
            if version_lengths(&first.forwards) != version_lengths(&snapshot.forwards) {
                return Err(error_of("its forward weights differ from those of tensor rank 0"));
            }
            if tied_lengths(first) != tied_lengths(snapshot) {
                return Err(error_of("its tied weights differ from those of tensor rank 0"));
            }
        }
    }
    Ok(())
}

/// Checks the lengths of a snapshot, whose ZeRO shards are merged.
fn check_sizes(snapshot: &StageSnapshot, code: &StageCode, layouts: &Layouts) -> Result<(), GatherError> {
    let error_of = snapshot_error(snapshot);
    let has_size = |named: &NamedTensor, buffer: &Buffer| [named.bytes, named.gradient().1].contains(&buffer.len());
    if let Some(state) = &snapshot.state {
        let parameters = code.parameters.len();
        if [state.weights.len(), state.optimizer_states.len()] != [parameters; 2]
            || state.states.len() != code.states.len()
        {
            return Err(error_of("it does not have all weights and states"));
        }
        for (named, (weight, optimizer_state)) in
            code.parameters.iter().zip(state.weights.iter().zip(&state.optimizer_states))
        {
            let mut buffers = optimizer_state.state.iter().chain(&optimizer_state.master).chain(&optimizer_state.drift);
            if !has_size(named, weight) || !buffers.all(|buffer| has_size(named, buffer)) {
                return Err(error_of("a weight or its optimizer state does not have the size of its shard"));
            }
        }
        if code.states.iter().zip(&state.states).any(|(named, state)| state.len() != named.bytes) {
            return Err(error_of("a state does not have its size"));
        }
    }
    for weights in snapshot.versions.values().chain(snapshot.forwards.values()) {
        // A version saved by another replica is empty here.
        if !weights.is_empty() && weights.len() != code.parameters.len() {
            return Err(error_of("a version does not have all weights"));
        }
        for (named, weight) in code.parameters.iter().zip(weights) {
            // A tied weight with versions of its own is empty in the stage's versions. It is not sharded.
            let may_be_empty = split_of(layouts, &named.name).is_none();
            if !(has_size(named, weight) || may_be_empty && weight.is_empty()) {
                return Err(error_of("a weight of a version does not have the size of its shard"));
            }
        }
    }
    for (p, older) in &snapshot.tied_weights {
        // These are not sharded either.
        let named = code.parameters.get(*p).filter(|named| split_of(layouts, &named.name).is_none());
        if !named.is_some_and(|named| older.values().all(|weight| has_size(named, weight))) {
            return Err(error_of("a tied weight has no versions of its own or not its size"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::op::Sharding;
    use compiler::plan::StageId;
    use compiler::tensor::DType;
    use compiler::tensor::dim::Dim;
    use compiler::tensor::fact::Fact;

    fn named(name: &str, elements: usize) -> NamedTensor {
        let fact = Fact::new(DType::F32, vec![Dim::from(elements)]);
        NamedTensor { name: name.to_string(), fact, bytes: elements * 4 }
    }

    /// A stage with a split parameter, another one and a state.
    fn codes() -> [StageCode; 1] {
        let parameters = vec![named("split", 2), named("both", 3)];
        [StageCode { parameters, states: vec![named("mean", 1)], ..StageCode::default() }]
    }

    fn layouts() -> Layouts {
        Layouts::from([("split".to_string(), Sharding::split(0))])
    }

    fn floats(values: &[f32]) -> Buffer {
        Buffer::host_copy(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    fn weights(rank: usize) -> Weights {
        let first = rank as f32 * 2.0;
        vec![Arc::new(floats(&[first, first + 1.0])), Arc::new(floats(&[7.0; 3]))]
    }

    fn optimizer_states(rank: usize) -> Vec<ParameterState> {
        let state = |weight: &Arc<Buffer>| ParameterState {
            master: Some(Buffer::host_copy(&weight.download().unwrap())),
            state: vec![Buffer::host(weight.len())],
            drift: None,
            updates: 4,
        };
        weights(rank).iter().map(state).collect()
    }

    fn snapshot(tensor_rank: usize, minibatches: u32) -> StageSnapshot {
        let state = StageState {
            weights: weights(tensor_rank),
            optimizer_states: optimizer_states(tensor_rank),
            states: vec![floats(&[0.5])],
            scale: Some((8.0, 1)),
        };
        StageSnapshot {
            stage: StageId(0),
            replica: 0,
            tensor_rank,
            minibatches,
            replicas: 1,
            optimizer_states: Vec::new(),
            state: Some(state),
            versions: BTreeMap::from([(3, weights(tensor_rank))]),
            forwards: BTreeMap::from([(5, weights(tensor_rank))]),
            tied_weights: BTreeMap::from([(1, BTreeMap::from([(2, Arc::new(floats(&[6.0; 3])))]))]),
            counted_bytes: None,
        }
    }

    fn bytes(buffer: &Buffer) -> Vec<u8> {
        buffer.download().unwrap().to_vec()
    }

    #[test]
    fn shards_of_all_ranks_are_joined() {
        let (codes, layouts) = (codes(), layouts());
        let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
        assert!(gatherer.add(snapshot(1, 4)).unwrap().is_empty());
        let gathered = gatherer.add(snapshot(0, 4)).unwrap();
        assert_eq!((gathered.len(), gathered[0].minibatches), (1, 4));
        let expected = bytes(&floats(&[0.0, 1.0, 2.0, 3.0]));
        let state = gathered[0].state.as_ref().unwrap();
        assert_eq!(bytes(&state.weights[0]), expected);
        assert_eq!(bytes(&state.weights[1]), bytes(&floats(&[7.0; 3])));
        assert_eq!(bytes(state.optimizer_states[0].master.as_ref().unwrap()), expected);
        assert_eq!(bytes(&gathered[0].versions[&3][0]), expected);
        assert_eq!(bytes(&gathered[0].forwards[&5][0]), expected);
    }

    type Change = fn(&mut StageSnapshot);

    /// What a rank of another process may get wrong, and what the error says.
    const WRONG: [(Change, &str); 22] = [
        (|snapshot| drop(state_of(snapshot).optimizer_states[0].state.pop()), "optimizer state differ"),
        (|snapshot| state_of(snapshot).optimizer_states[1].state.push(Buffer::host(12)), "optimizer state differ"),
        (|snapshot| state_of(snapshot).optimizer_states[0].master = None, "optimizer state differ"),
        (|snapshot| state_of(snapshot).optimizer_states[0].drift = Some(Buffer::host(8)), "optimizer state differ"),
        (|snapshot| state_of(snapshot).optimizer_states[0].updates = 5, "optimizer state differ"),
        (|snapshot| state_of(snapshot).optimizer_states[0].state[0] = Buffer::host(4), "optimizer state differ"),
        (|snapshot| drop(state_of(snapshot).optimizer_states.pop()), "optimizer state differ"),
        (|snapshot| state_of(snapshot).weights[0] = Arc::new(Buffer::empty()), "optimizer state differ"),
        (|snapshot| state_of(snapshot).weights[0] = Arc::new(Buffer::host(4)), "optimizer state differ"),
        (|snapshot| state_of(snapshot).weights[0] = Arc::new(Buffer::host(16)), "optimizer state differ"),
        (|snapshot| drop(state_of(snapshot).weights.pop()), "optimizer state differ"),
        (|snapshot| drop(state_of(snapshot).states.pop()), "optimizer state differ"),
        (|snapshot| state_of(snapshot).scale = None, "optimizer state differ"),
        (|snapshot| snapshot.state = None, "optimizer state differ"),
        (|snapshot| snapshot.optimizer_states = optimizer_states(1), "optimizer shards differ"),
        (|snapshot| snapshot.versions.clear(), "weight versions differ"),
        (|snapshot| drop(snapshot.versions.insert(9, weights(1))), "weight versions differ"),
        (|snapshot| drop(snapshot.versions.insert(3, Weights::new())), "weight versions differ"),
        (|snapshot| snapshot.versions.get_mut(&3).unwrap()[0] = Arc::new(Buffer::empty()), "weight versions differ"),
        (|snapshot| drop(snapshot.forwards.remove(&5)), "forward weights differ"),
        (|snapshot| snapshot.forwards.get_mut(&5).unwrap()[1] = Arc::new(Buffer::host(6)), "forward weights differ"),
        (|snapshot| snapshot.tied_weights.clear(), "tied weights differ"),
    ];

    fn state_of(of: &mut StageSnapshot) -> &mut StageState {
        of.state.as_mut().unwrap()
    }

    fn refused(result: Result<Vec<StageSnapshot>, GatherError>) -> String {
        match result {
            Ok(_) => panic!("it was taken"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn ranks_whose_snapshots_differ_are_refused_by_name() {
        let (codes, layouts) = (codes(), layouts());
        for (at, (change, why)) in WRONG.into_iter().enumerate() {
            for is_first in [true, false] {
                let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
                let mut wrong = snapshot(1, 4);
                change(&mut wrong);
                let parts = if is_first { [wrong, snapshot(0, 4)] } else { [snapshot(0, 4), wrong] };
                let [first, second] = parts;
                assert!(gatherer.add(first).unwrap().is_empty());
                let said = refused(gatherer.add(second));
                assert!(said.contains(why), "{at}: {said}");
                assert!(said.starts_with("the snapshot of stage 0, replica 0, from tensor rank 1: "), "{at}: {said}");
            }
        }
    }

    /// All ranks agree, but not with the stage.
    #[test]
    fn snapshots_that_do_not_fit_the_stage_are_refused() {
        let (codes, layouts) = (codes(), layouts());
        let wrong: [(Change, &str); 12] = [
            (|snapshot| state_of(snapshot).weights[0] = Arc::new(Buffer::empty()), "the size of its shard"),
            (|snapshot| state_of(snapshot).weights[1] = Arc::new(Buffer::host(8)), "the size of its shard"),
            (|snapshot| state_of(snapshot).optimizer_states[0].state[0] = Buffer::host(4), "the size of its shard"),
            (|snapshot| state_of(snapshot).optimizer_states[0].drift = Some(Buffer::host(0)), "the size of its shard"),
            (|snapshot| drop(state_of(snapshot).optimizer_states.pop()), "all weights and states"),
            (|snapshot| state_of(snapshot).states[0] = Buffer::host(0), "a state does not have its size"),
            (|snapshot| snapshot.versions.get_mut(&3).unwrap()[0] = Arc::new(Buffer::empty()), "the size of its shard"),
            (|snapshot| drop(snapshot.versions.get_mut(&3).unwrap().pop()), "all weights"),
            (|snapshot| snapshot.forwards.get_mut(&5).unwrap()[0] = Arc::new(Buffer::host(4)), "the size of its shard"),
            (
                |snapshot| drop(snapshot.tied_weights.insert(0, BTreeMap::from([(2, Arc::new(Buffer::host(8)))]))),
                "a tied weight",
            ),
            (
                |snapshot| drop(snapshot.tied_weights.insert(1, BTreeMap::from([(2, Arc::new(Buffer::host(8)))]))),
                "a tied weight",
            ),
            (|snapshot| drop(snapshot.tied_weights.insert(2, BTreeMap::new())), "a tied weight"),
        ];
        for (at, (change, why)) in wrong.into_iter().enumerate() {
            let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
            let [first, second] = [0, 1].map(|rank| {
                let mut own = snapshot(rank, 4);
                change(&mut own);
                own
            });
            assert!(gatherer.add(first).unwrap().is_empty());
            let said = refused(gatherer.add(second));
            assert!(said.contains(why), "{at}: {said}");
        }
        // A version that another replica saves, and a tied weight with versions of its own.
        let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
        for (rank, whole) in [(0, 0), (1, 1)] {
            let mut own = snapshot(rank, 4);
            own.versions.insert(2, Weights::new());
            own.versions.get_mut(&3).unwrap()[1] = Arc::new(Buffer::empty());
            assert_eq!(gatherer.add(own).unwrap().len(), whole);
        }
    }

    #[test]
    fn each_rank_and_replica_comes_once() {
        let (codes, layouts) = (codes(), layouts());
        let of_two = |rank: usize, replica: u32| {
            let rank_snapshot = snapshot(rank, 4);
            let state = rank_snapshot.state.filter(|_| replica == 0);
            let optimizer_states =
                if replica == 0 { Vec::new() } else { (0..2).map(|_| ParameterState::default()).collect() };
            StageSnapshot { replica, replicas: 2, state, optimizer_states, ..snapshot(rank, 4) }
        };
        let taken = |parts: Vec<StageSnapshot>| {
            let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
            parts.into_iter().map(|part| gatherer.add(part).map(|gathered| gathered.len())).last().unwrap()
        };
        assert_eq!(taken(vec![of_two(0, 0), of_two(0, 1), of_two(1, 1), of_two(1, 0)]), Ok(2));
        let said = |parts: Vec<StageSnapshot>| taken(parts).unwrap_err().to_string();
        let twice = said(vec![of_two(1, 0), of_two(1, 0)]);
        assert!(twice.contains("from tensor rank 1: it has come already"), "{twice}");
        let twice = said(vec![of_two(0, 0), of_two(0, 1), of_two(1, 1), of_two(1, 1)]);
        assert!(twice.contains("replica 1, from tensor rank 1: it has come already"), "{twice}");
        let other = said(vec![of_two(0, 0), StageSnapshot { replicas: 1, ..of_two(1, 0) }]);
        assert!(other.contains("tensor rank 1: it has another number of ZeRO replicas"), "{other}");
        let foreign = said(vec![StageSnapshot { tensor_rank: 2, ..of_two(0, 0) }]);
        assert!(foreign.contains("there is no such rank"), "{foreign}");
    }
}
