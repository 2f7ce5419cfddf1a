//! Gathers the checkpoint snapshots of all ranks of the tensor-parallel groups.
//!
//! Snapshots of other processes come from the network. [`parts`](crate::process::parts) checks each alone; here, those of
//! a group must agree before their shards are joined.

use crate::checkpoint::merge_shards::join;
use crate::checkpoint::{StageSnapshot, StageState};
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
    /// Snapshots by tensor rank and replica. The key is stage, replica (0 if ZeRO shards must be merged), and
    /// minibatches.
    open: BTreeMap<(u32, u32, u32), Vec<BTreeMap<u32, StageSnapshot>>>,
}

impl<'a> ShardGatherer<'a> {
    /// A gatherer for a run of these stages. `degree` is the tensor-parallel degree. Where all parameters are replicated,
    /// ranks do not wait for each other, so any number of checkpoints may be incomplete.
    pub fn new(codes: &'a [StageCode], layouts: &'a Layouts, degree: usize) -> ShardGatherer<'a> {
        ShardGatherer { codes, layouts, degree, open: BTreeMap::new() }
    }

    /// Adds the snapshot of a rank. Returns the gathered snapshots that it completes. Fails if the snapshot does not
    /// fit those of the other ranks.
    pub fn take(&mut self, part: StageSnapshot) -> Result<Vec<StageSnapshot>, GatherError> {
        let refused = refusal(&part);
        let StageSnapshot { stage, minibatches, tensor_rank, .. } = part;
        let replica = if part.replicas > 1 { 0 } else { part.replica };
        let key = (stage.0, replica, minibatches);
        let ranks = self.open.entry(key).or_insert_with(|| (0..self.degree).map(|_| BTreeMap::new()).collect());
        let others = ranks.iter().flat_map(BTreeMap::values).map(|other| other.replicas);
        if others.clone().any(|replicas| replicas != part.replicas) {
            return Err(refused("it has another number of ZeRO replicas than those of other ranks"));
        }
        let replicas = part.replicas.max(1) as usize;
        let own = ranks.get_mut(tensor_rank).ok_or_else(|| refused("there is no such rank"))?;
        if own.insert(part.replica, part).is_some() {
            return Err(refused("it has come already"));
        }
        if ranks.iter().any(|own| own.len() < replicas) {
            return Ok(Vec::new());
        }
        let ranks = self.open.remove(&key).unwrap_or_default();
        check_agreement(&ranks)?;
        let joined = ranks.into_iter().map(|own| Ok(join(own.into_values().collect())?.into()));
        let mut left: Vec<VecDeque<StageSnapshot>> = joined.collect::<Result<_, DeviceError>>()?;
        let mut whole = Vec::new();
        while let Some(parts) = left.iter_mut().map(VecDeque::pop_front).collect::<Option<Vec<StageSnapshot>>>() {
            whole.push(self.joined(parts)?);
        }
        Ok(whole)
    }

    /// Joins snapshots that agree, one per rank.
    fn joined(&self, parts: Vec<StageSnapshot>) -> Result<StageSnapshot, GatherError> {
        let code = &self.codes[parts[0].stage.index()];
        check_sizes(&parts[0], code, self.layouts)?;
        let one = |p: usize, each: &[&Buffer]| -> Result<Option<Buffer>, DeviceError> {
            let named = &code.parameters[p];
            let Some(cut) = split_of(self.layouts, &named.name) else { return Ok(None) };
            let tensors = each.iter().map(|own| Ok(tensor(named, &own.download()?)));
            let tensors: Vec<Tensor> = tensors.collect::<Result<_, DeviceError>>()?;
            Ok(Some(Buffer::host_copy(whole_of(&tensors, cut).bytes())))
        };
        let weights = |each: Vec<&Weights>| -> Result<Weights, DeviceError> {
            let of = |p: usize| {
                let own: Vec<&Buffer> = each.iter().map(|weights| &*weights[p]).collect();
                Ok(one(p, &own)?.map_or_else(|| each[0][p].clone(), Arc::new))
            };
            (0..each[0].len()).map(of).collect()
        };
        let buffer = |p: usize, own: Vec<&Buffer>| -> Result<Buffer, DeviceError> {
            match one(p, &own)? {
                Some(whole) => Ok(whole),
                None => Ok(Buffer::host_copy(&own[0].download()?)),
            }
        };
        let moves = |p: usize, each: Vec<&ParameterState>| -> Result<ParameterState, DeviceError> {
            let of = |kind: fn(&ParameterState) -> Option<&Buffer>| {
                each.iter().map(|own| kind(own)).collect::<Option<Vec<_>>>().map(|own| buffer(p, own)).transpose()
            };
            let state = |at: usize| buffer(p, each.iter().map(|own| &own.state[at]).collect());
            Ok(ParameterState {
                master: of(|own| own.master.as_ref())?,
                state: (0..each[0].state.len()).map(state).collect::<Result<_, _>>()?,
                drift: of(|own| own.drift.as_ref())?,
                updates: each[0].updates,
            })
        };
        let numbered = |of: fn(&StageSnapshot) -> &BTreeMap<u32, Weights>| {
            let each = |number: &u32| parts.iter().filter_map(|part| of(part).get(number)).collect();
            of(&parts[0]).keys().map(|number| Ok((*number, weights(each(number))?))).collect::<Result<_, DeviceError>>()
        };
        let (versions, forwards) = (numbered(|part| &part.versions)?, numbered(|part| &part.forwards)?);
        let wholes: Option<Vec<&StageState>> = parts.iter().map(|part| part.whole.as_ref()).collect();
        let mut whole = None;
        if let Some(each) = wholes {
            let of_parameter = |p: usize| moves(p, each.iter().map(|of| &of.moves[p]).collect());
            let states = each[0].states.iter().map(|state| Ok(Buffer::host_copy(&state.download()?)));
            whole = Some(StageState {
                weights: weights(each.iter().map(|whole| &whole.weights).collect())?,
                moves: (0..each[0].moves.len()).map(of_parameter).collect::<Result<_, _>>()?,
                states: states.collect::<Result<_, DeviceError>>()?,
                scale: each[0].scale,
            });
        }
        let shared = parts[0].shared.clone();
        let StageSnapshot { stage, replica, minibatches, .. } = parts[0];
        // The snapshots' memory stays counted until they are gathered.
        Ok(StageSnapshot {
            stage,
            replica,
            tensor_rank: 0,
            minibatches,
            replicas: 1,
            moves: Vec::new(),
            whole,
            versions,
            forwards,
            shared,
            counted: None,
        })
    }
}

/// Makes errors about a snapshot.
fn refusal(part: &StageSnapshot) -> impl Fn(&'static str) -> GatherError + use<> {
    let StageSnapshot { stage, replica, tensor_rank, .. } = *part;
    move |what| GatherError::Snapshot { stage: stage.0, replica, tensor_rank, what }
}

type MovesForm = (u32, Vec<usize>, [Option<usize>; 2]);

fn moves_form(of: &ParameterState) -> MovesForm {
    let lengths = of.state.iter().map(Buffer::len).collect();
    (of.updates, lengths, [&of.master, &of.drift].map(|one| one.as_ref().map(Buffer::len)))
}

fn lengths(weights: &Weights) -> Vec<usize> {
    weights.iter().map(|weight| weight.len()).collect()
}

fn sets_form(sets: &BTreeMap<u32, Weights>) -> BTreeMap<u32, Vec<usize>> {
    sets.iter().map(|(number, weights)| (*number, lengths(weights))).collect()
}

/// Checks that the snapshots of each replica have equal numbers and lengths on all ranks. Shards have equal shapes, and
/// all ranks run the same program.
fn check_agreement(ranks: &[BTreeMap<u32, StageSnapshot>]) -> Result<(), GatherError> {
    let Some((first, others)) = ranks.split_first() else { return Ok(()) };
    let moves = |part: &StageSnapshot| part.moves.iter().map(moves_form).collect::<Vec<_>>();
    let whole = |part: &StageSnapshot| {
        part.whole.as_ref().map(|of| {
            let scale = of.scale.map(|(scale, good)| (scale.to_bits(), good));
            let states: Vec<usize> = of.states.iter().map(Buffer::len).collect();
            (lengths(&of.weights), of.moves.iter().map(moves_form).collect::<Vec<_>>(), states, scale)
        })
    };
    let shared = |part: &StageSnapshot| -> BTreeMap<usize, BTreeMap<u32, usize>> {
        let older = |of: &BTreeMap<u32, Arc<Buffer>>| of.iter().map(|(version, own)| (*version, own.len())).collect();
        part.shared.iter().map(|(p, of)| (*p, older(of))).collect()
    };
    for own in others {
        for (replica, part) in own {
            let differs = |what| refusal(part)(what);
            let first = first.get(replica).ok_or_else(|| differs("tensor rank 0 has none of this replica"))?;
            if moves(first) != moves(part) {
                return Err(differs("its optimizer shards differ from those of tensor rank 0"));
            }
            if whole(first) != whole(part) {
                return Err(differs("its weights, states or optimizer state differ from those of tensor rank 0"));
            }
            if sets_form(&first.versions) != sets_form(&part.versions) {
                return Err(differs("its weight versions differ from those of tensor rank 0"));
            }
            if sets_form(&first.forwards) != sets_form(&part.forwards) {
                return Err(differs("its forward weights differ from those of tensor rank 0"));
            }
            if shared(first) != shared(part) {
                return Err(differs("its tied weights differ from those of tensor rank 0"));
            }
        }
    }
    Ok(())
}

/// Checks the lengths of a snapshot, whose ZeRO shards are merged.
fn check_sizes(part: &StageSnapshot, code: &StageCode, layouts: &Layouts) -> Result<(), GatherError> {
    let refused = refusal(part);
    let is_whole = |named: &NamedTensor, buffer: &Buffer| [named.bytes, named.gradient().1].contains(&buffer.len());
    if let Some(whole) = &part.whole {
        let parameters = code.parameters.len();
        if [whole.weights.len(), whole.moves.len()] != [parameters; 2] || whole.states.len() != code.states.len() {
            return Err(refused("it does not have all weights and states"));
        }
        for (named, (weight, moves)) in code.parameters.iter().zip(whole.weights.iter().zip(&whole.moves)) {
            let mut own = moves.state.iter().chain(&moves.master).chain(&moves.drift);
            if !is_whole(named, weight) || !own.all(|buffer| is_whole(named, buffer)) {
                return Err(refused("a weight or its optimizer state does not have the size of its shard"));
            }
        }
        if code.states.iter().zip(&whole.states).any(|(named, state)| state.len() != named.bytes) {
            return Err(refused("a state does not have its size"));
        }
    }
    for weights in part.versions.values().chain(part.forwards.values()) {
        // A version saved by another replica is empty here.
        if !weights.is_empty() && weights.len() != code.parameters.len() {
            return Err(refused("a version does not have all weights"));
        }
        for (named, weight) in code.parameters.iter().zip(weights) {
            // A tied weight with versions of its own is empty in the stage's versions. It is not sharded.
            let may_be_empty = split_of(layouts, &named.name).is_none();
            if !(is_whole(named, weight) || may_be_empty && weight.is_empty()) {
                return Err(refused("a weight of a version does not have the size of its shard"));
            }
        }
    }
    for (p, older) in &part.shared {
        // These are not sharded either.
        let named = code.parameters.get(*p).filter(|named| split_of(layouts, &named.name).is_none());
        if !named.is_some_and(|named| older.values().all(|weight| is_whole(named, weight))) {
            return Err(refused("a tied weight has no versions of its own or not its size"));
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

    fn moves(rank: usize) -> Vec<ParameterState> {
        let of = |weight: &Arc<Buffer>| ParameterState {
            master: Some(Buffer::host_copy(&weight.download().unwrap())),
            state: vec![Buffer::host(weight.len())],
            drift: None,
            updates: 4,
        };
        weights(rank).iter().map(of).collect()
    }

    fn snapshot(tensor_rank: usize, minibatches: u32) -> StageSnapshot {
        let whole = StageState {
            weights: weights(tensor_rank),
            moves: moves(tensor_rank),
            states: vec![floats(&[0.5])],
            scale: Some((8.0, 1)),
        };
        StageSnapshot {
            stage: StageId(0),
            replica: 0,
            tensor_rank,
            minibatches,
            replicas: 1,
            moves: Vec::new(),
            whole: Some(whole),
            versions: BTreeMap::from([(3, weights(tensor_rank))]),
            forwards: BTreeMap::from([(5, weights(tensor_rank))]),
            shared: BTreeMap::from([(1, BTreeMap::from([(2, Arc::new(floats(&[6.0; 3])))]))]),
            counted: None,
        }
    }

    fn bytes(buffer: &Buffer) -> Vec<u8> {
        buffer.download().unwrap().to_vec()
    }

    #[test]
    fn shards_of_all_ranks_are_joined() {
        let (codes, layouts) = (codes(), layouts());
        let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
        assert!(gatherer.take(snapshot(1, 4)).unwrap().is_empty());
        let whole = gatherer.take(snapshot(0, 4)).unwrap();
        assert_eq!((whole.len(), whole[0].minibatches), (1, 4));
        let expected = bytes(&floats(&[0.0, 1.0, 2.0, 3.0]));
        let state = whole[0].whole.as_ref().unwrap();
        assert_eq!(bytes(&state.weights[0]), expected);
        assert_eq!(bytes(&state.weights[1]), bytes(&floats(&[7.0; 3])));
        assert_eq!(bytes(state.moves[0].master.as_ref().unwrap()), expected);
        assert_eq!(bytes(&whole[0].versions[&3][0]), expected);
        assert_eq!(bytes(&whole[0].forwards[&5][0]), expected);
    }

    type Change = fn(&mut StageSnapshot);

    /// What a rank of another process may get wrong, and what the error says.
    const WRONG: [(Change, &str); 22] = [
        (|of| drop(state_of(of).moves[0].state.pop()), "optimizer state differ"),
        (|of| state_of(of).moves[1].state.push(Buffer::host(12)), "optimizer state differ"),
        (|of| state_of(of).moves[0].master = None, "optimizer state differ"),
        (|of| state_of(of).moves[0].drift = Some(Buffer::host(8)), "optimizer state differ"),
        (|of| state_of(of).moves[0].updates = 5, "optimizer state differ"),
        (|of| state_of(of).moves[0].state[0] = Buffer::host(4), "optimizer state differ"),
        (|of| drop(state_of(of).moves.pop()), "optimizer state differ"),
        (|of| state_of(of).weights[0] = Arc::new(Buffer::empty()), "optimizer state differ"),
        (|of| state_of(of).weights[0] = Arc::new(Buffer::host(4)), "optimizer state differ"),
        (|of| state_of(of).weights[0] = Arc::new(Buffer::host(16)), "optimizer state differ"),
        (|of| drop(state_of(of).weights.pop()), "optimizer state differ"),
        (|of| drop(state_of(of).states.pop()), "optimizer state differ"),
        (|of| state_of(of).scale = None, "optimizer state differ"),
        (|of| of.whole = None, "optimizer state differ"),
        (|of| of.moves = moves(1), "optimizer shards differ"),
        (|of| of.versions.clear(), "weight versions differ"),
        (|of| drop(of.versions.insert(9, weights(1))), "weight versions differ"),
        (|of| drop(of.versions.insert(3, Weights::new())), "weight versions differ"),
        (|of| of.versions.get_mut(&3).unwrap()[0] = Arc::new(Buffer::empty()), "weight versions differ"),
        (|of| drop(of.forwards.remove(&5)), "forward weights differ"),
        (|of| of.forwards.get_mut(&5).unwrap()[1] = Arc::new(Buffer::host(6)), "forward weights differ"),
        (|of| of.shared.clear(), "tied weights differ"),
    ];

    fn state_of(of: &mut StageSnapshot) -> &mut StageState {
        of.whole.as_mut().unwrap()
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
                assert!(gatherer.take(first).unwrap().is_empty());
                let said = refused(gatherer.take(second));
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
            (|of| state_of(of).weights[0] = Arc::new(Buffer::empty()), "the size of its shard"),
            (|of| state_of(of).weights[1] = Arc::new(Buffer::host(8)), "the size of its shard"),
            (|of| state_of(of).moves[0].state[0] = Buffer::host(4), "the size of its shard"),
            (|of| state_of(of).moves[0].drift = Some(Buffer::host(0)), "the size of its shard"),
            (|of| drop(state_of(of).moves.pop()), "all weights and states"),
            (|of| state_of(of).states[0] = Buffer::host(0), "a state does not have its size"),
            (|of| of.versions.get_mut(&3).unwrap()[0] = Arc::new(Buffer::empty()), "the size of its shard"),
            (|of| drop(of.versions.get_mut(&3).unwrap().pop()), "all weights"),
            (|of| of.forwards.get_mut(&5).unwrap()[0] = Arc::new(Buffer::host(4)), "the size of its shard"),
            (|of| drop(of.shared.insert(0, BTreeMap::from([(2, Arc::new(Buffer::host(8)))]))), "a tied weight"),
            (|of| drop(of.shared.insert(1, BTreeMap::from([(2, Arc::new(Buffer::host(8)))]))), "a tied weight"),
            (|of| drop(of.shared.insert(2, BTreeMap::new())), "a tied weight"),
        ];
        for (at, (change, why)) in wrong.into_iter().enumerate() {
            let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
            let [first, second] = [0, 1].map(|rank| {
                let mut own = snapshot(rank, 4);
                change(&mut own);
                own
            });
            assert!(gatherer.take(first).unwrap().is_empty());
            let said = refused(gatherer.take(second));
            assert!(said.contains(why), "{at}: {said}");
        }
        // A version that another replica saves, and a tied weight with versions of its own.
        let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
        for (rank, whole) in [(0, 0), (1, 1)] {
            let mut own = snapshot(rank, 4);
            own.versions.insert(2, Weights::new());
            own.versions.get_mut(&3).unwrap()[1] = Arc::new(Buffer::empty());
            assert_eq!(gatherer.take(own).unwrap().len(), whole);
        }
    }

    #[test]
    fn each_rank_and_replica_comes_once() {
        let (codes, layouts) = (codes(), layouts());
        let of_two = |rank: usize, replica: u32| {
            let own = snapshot(rank, 4);
            let whole = own.whole.filter(|_| replica == 0);
            let moves = if replica == 0 { Vec::new() } else { (0..2).map(|_| ParameterState::default()).collect() };
            StageSnapshot { replica, replicas: 2, whole, moves, ..snapshot(rank, 4) }
        };
        let taken = |parts: Vec<StageSnapshot>| {
            let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
            parts.into_iter().map(|part| gatherer.take(part).map(|whole| whole.len())).last().unwrap()
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
