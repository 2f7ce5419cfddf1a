//! Gathers the checkpoint snapshots of all ranks of the tensor-parallel groups, and joins the shards of stages.
//!
//! Snapshots of other processes come from the network. [`parts`](crate::process::parts) checks each alone; here, those of
//! a group must agree before their shards are joined.

use crate::checkpoint::merge_shards::merge_shards;
use crate::checkpoint::{MergeKey, SnapshotKey, StageSnapshot};
use crate::comm::tensor_group::Layouts;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::{StageTensor, StageTensors};
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
    #[error("the result of tensor rank {tensor_rank} has no fitting shard of `{name}`")]
    Missing { name: String, tensor_rank: usize },
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
        let SnapshotKey { minibatches, tensor_rank, replica, replicas, .. } = snapshot.key;
        let key = (snapshot.key.merge_key(), minibatches);
        let ranks = self.open.entry(key).or_insert_with(|| (0..self.degree).map(|_| BTreeMap::new()).collect());
        if ranks.iter().flat_map(BTreeMap::values).any(|other| other.key.replicas != replicas) {
            return Err(error_of("it has another number of ZeRO replicas than those of other ranks"));
        }
        let replica_snapshots = ranks.get_mut(tensor_rank).ok_or_else(|| error_of("there is no such rank"))?;
        if replica_snapshots.insert(replica, snapshot).is_some() {
            return Err(error_of("it has come already"));
        }
        if ranks.iter().any(|replica_snapshots| replica_snapshots.len() < replicas.max(1) as usize) {
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
        let (first, code) = (&snapshots[0], &self.codes[snapshots[0].key.stage.index()]);
        first.check(code).map_err(snapshot_error(first))?;
        self.check_split(first, code).map_err(snapshot_error(first))?;
        let ranks: Vec<&StageTensors> = snapshots.iter().map(|snapshot| &snapshot.tensors).collect();
        let mut tensors = join_tensors(code, self.layouts, &ranks)?;
        for tensor in tensors.values_mut().filter(|tensor| !tensor.is_host()) {
            *tensor = Arc::new(Buffer::host_copy(&tensor.download()?));
        }
        let key = SnapshotKey { tensor_rank: 0, ..first.key };
        // The snapshots' memory stays counted until they are gathered.
        Ok(StageSnapshot { key, state: first.state.clone(), tensors, counted_bytes: None })
    }

    /// Checks that each version has all split weights, unless another replica saves it. Tied weights with versions of
    /// their own are not in it, and not split.
    fn check_split(&self, snapshot: &StageSnapshot, code: &StageCode) -> Result<(), &'static str> {
        let is_split = |p: &usize| split_of(self.layouts, &code.parameters[*p].name).is_some();
        let split: Vec<usize> = (0..code.parameters.len()).filter(is_split).collect();
        let has = |place: StageTensor| snapshot.tensors.contains_key(&place);
        let fault = |place: &StageTensor| match *place {
            StageTensor::Version(version, _) if !split.iter().all(|p| has(StageTensor::Version(version, *p))) => {
                Some("a version does not have all weights")
            }
            StageTensor::Forward(item, _) if !split.iter().all(|p| has(StageTensor::Forward(item, *p))) => {
                Some("a version does not have all weights")
            }
            StageTensor::Tied(p, _) if split.contains(&p) => Some("a split weight has versions of its own"),
            _ => None,
        };
        snapshot.tensors.keys().find_map(fault).map_or(Ok(()), Err)
    }
}

/// Joins the tensors of a stage on all ranks. Of one that is not split, the first rank has the whole. Fails if a rank
/// lacks a shard, or has one of another size.
pub fn join_tensors(code: &StageCode, layouts: &Layouts, ranks: &[&StageTensors]) -> Result<StageTensors, GatherError> {
    let mut joined = StageTensors::new();
    for place in ranks.iter().flat_map(|tensors| tensors.keys()) {
        if joined.contains_key(place) {
            continue;
        }
        let named = place.parameter().and_then(|p| code.parameters.get(p));
        let split = named.and_then(|named| Some((named, split_of(layouts, &named.name)?)));
        let Some((named, cut)) = split else {
            let name = || place.named(code).map(|named| named.name.clone()).unwrap_or_default();
            let missing = || GatherError::Missing { name: name(), tensor_rank: 0 };
            let whole = ranks.first().and_then(|tensors| tensors.get(place)).ok_or_else(missing)?;
            joined.insert(*place, whole.clone());
            continue;
        };
        let mut shards: Vec<Tensor> = Vec::new();
        for (tensor_rank, tensors) in ranks.iter().enumerate() {
            let is_like = |shard: &&Arc<Buffer>| {
                let is_whole = place.has_size(shard.len(), code, (0, 1));
                is_whole && shards.first().is_none_or(|first| first.bytes().len() == shard.len())
            };
            let missing = || GatherError::Missing { name: named.name.clone(), tensor_rank };
            let shard = tensors.get(place).filter(is_like).ok_or_else(missing)?;
            shards.push(tensor(named, &shard.download()?));
        }
        joined.insert(*place, Arc::new(Buffer::host_copy(whole_of(&shards, cut).bytes())));
    }
    Ok(joined)
}

/// Makes errors about a snapshot.
fn snapshot_error(snapshot: &StageSnapshot) -> impl Fn(&'static str) -> GatherError + use<> {
    let SnapshotKey { stage, replica, tensor_rank, .. } = snapshot.key;
    move |what| GatherError::Snapshot { stage: stage.0, replica, tensor_rank, what }
}

/// Checks that the snapshots of each replica have equal numbers and lengths on all ranks. Shards have equal shapes, and
/// all ranks run the same program.
fn check_agreement(ranks: &[BTreeMap<u32, StageSnapshot>]) -> Result<(), GatherError> {
    let Some((first, others)) = ranks.split_first() else { return Ok(()) };
    for snapshot in others.iter().flat_map(BTreeMap::values) {
        let error_of = snapshot_error(snapshot);
        let first = first.get(&snapshot.key.replica);
        let first = first.ok_or_else(|| error_of("tensor rank 0 has none of this replica"))?;
        let length = |of: &StageSnapshot, place: &StageTensor| of.tensors.get(place).map(|tensor| tensor.len());
        let mut places = first.tensors.keys().chain(snapshot.tensors.keys());
        let differing = places.find(|place| length(first, place) != length(snapshot, place));
        if first.state != snapshot.state || differing.is_some() {
            return Err(error_of(match differing {
                Some(StageTensor::Version(..)) => "its weight versions differ from those of tensor rank 0",
                Some(StageTensor::Forward(..)) => "its forward weights differ from those of tensor rank 0",
                Some(StageTensor::Tied(..)) => "its tied weights differ from those of tensor rank 0",
                _ => "its weights, states or optimizer state differ from those of tensor rank 0",
            }));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::StageState;
    use crate::exec::stage_code::NamedTensor;
    use crate::exec::stage_tensor::OptimizerTensor;
    use crate::exec::stage_tensor::StageTensor::{Forward, Optimizer, State, Tied, Version, Weight};
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

    fn floats(values: &[f32]) -> Arc<Buffer> {
        Arc::new(Buffer::host_copy(bytemuck::cast_slice(values)))
    }

    fn zeros(bytes: usize) -> Arc<Buffer> {
        Arc::new(Buffer::host(bytes))
    }

    const MASTER: OptimizerTensor = OptimizerTensor::Master;
    const FIRST: OptimizerTensor = OptimizerTensor::Named(0);

    fn snapshot(tensor_rank: usize, minibatches: u32) -> StageSnapshot {
        let first = tensor_rank as f32 * 2.0;
        let [split, both] = [floats(&[first, first + 1.0]), floats(&[7.0; 3])];
        let mut tensors = StageTensors::from([(State(0), floats(&[0.5])), (Tied(1, 2), floats(&[6.0; 3]))]);
        for (p, weight) in [(0, split), (1, both)] {
            tensors.extend(
                [Weight(p), Optimizer(p, MASTER), Version(3, p), Forward(5, p)].map(|place| (place, weight.clone())),
            );
            tensors.insert(Optimizer(p, FIRST), zeros(weight.len()));
        }
        let state = Some(StageState { updates: vec![4; 2], scale: Some((8.0, 1)) });
        let key = SnapshotKey { stage: StageId(0), replica: 0, tensor_rank, minibatches, replicas: 1 };
        StageSnapshot { key, state, tensors, counted_bytes: None }
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
        assert_eq!((gathered.len(), gathered[0].key.minibatches), (1, 4));
        let joined = |place: StageTensor| bytes(&gathered[0].tensors[&place]);
        for place in [Weight(0), Optimizer(0, MASTER), Version(3, 0), Forward(5, 0)] {
            assert_eq!(joined(place), bytes(&floats(&[0.0, 1.0, 2.0, 3.0])), "{place:?}");
        }
        assert_eq!(joined(Weight(1)), bytes(&floats(&[7.0; 3])));
    }

    /// Sets a tensor to zeros, or removes it.
    type Change = (StageTensor, Option<usize>);

    fn change(snapshot: &mut StageSnapshot, (place, bytes): Change) {
        match bytes {
            Some(bytes) => _ = snapshot.tensors.insert(place, zeros(bytes)),
            None => _ = snapshot.tensors.remove(&place),
        }
    }

    /// What a rank of another process may get wrong, and what the error says.
    const WRONG: [(Change, &str); 11] = [
        ((Optimizer(0, FIRST), None), "optimizer state differ"),
        ((Optimizer(1, OptimizerTensor::Named(1)), Some(12)), "optimizer state differ"),
        ((Optimizer(0, OptimizerTensor::Drift), Some(8)), "optimizer state differ"),
        ((Optimizer(0, FIRST), Some(4)), "optimizer state differ"),
        ((Weight(0), None), "optimizer state differ"),
        ((Weight(0), Some(16)), "optimizer state differ"),
        ((State(0), None), "optimizer state differ"),
        ((Version(9, 0), Some(8)), "weight versions differ"),
        ((Version(3, 0), Some(0)), "weight versions differ"),
        ((Forward(5, 1), Some(6)), "forward weights differ"),
        ((Tied(1, 2), None), "tied weights differ"),
    ];

    fn refused(result: Result<Vec<StageSnapshot>, GatherError>) -> String {
        match result {
            Ok(_) => panic!("it was taken"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn ranks_whose_snapshots_differ_are_refused_by_name() {
        let (codes, layouts) = (codes(), layouts());
        let mut wrong: Vec<(StageSnapshot, &str)> = Vec::new();
        for (wrong_tensor, why) in WRONG {
            wrong.push((snapshot(1, 4), why));
            change(&mut wrong.last_mut().unwrap().0, wrong_tensor);
        }
        for state in [None, Some(StageState { updates: vec![4, 5], scale: Some((8.0, 1)) })] {
            wrong.push((StageSnapshot { state, ..snapshot(1, 4) }, "optimizer state differ"));
        }
        for (at, (wrong, why)) in wrong.into_iter().enumerate() {
            // Either may come last.
            let parts = if at % 2 == 0 { [wrong, snapshot(0, 4)] } else { [snapshot(0, 4), wrong] };
            let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
            let [first, second] = parts;
            assert!(gatherer.add(first).unwrap().is_empty());
            let said = refused(gatherer.add(second));
            assert!(said.contains(why), "{at}: {said}");
            assert!(said.starts_with("the snapshot of stage 0, replica 0, from tensor rank 1: "), "{at}: {said}");
        }
    }

    /// All ranks agree, but not with the stage.
    #[test]
    fn snapshots_that_do_not_fit_the_stage_are_refused() {
        let (codes, layouts) = (codes(), layouts());
        let gather = |changes: &[Change]| {
            let mut gatherer = ShardGatherer::new(&codes, &layouts, 2);
            let [first, second] = [0, 1].map(|rank| {
                let mut snapshot = snapshot(rank, 4);
                changes.iter().for_each(|wrong| change(&mut snapshot, *wrong));
                snapshot
            });
            assert!(gatherer.add(first).unwrap().is_empty());
            gatherer.add(second)
        };
        let wrong: [(Change, &str); 11] = [
            ((Weight(0), Some(0)), "the size of its shard"),
            ((Weight(1), Some(8)), "the size of its shard"),
            ((Optimizer(0, FIRST), Some(4)), "the size of its shard"),
            ((Weight(1), None), "all weights and states"),
            ((State(0), Some(0)), "a state does not have its size"),
            ((State(1), Some(4)), "a state does not have its size"),
            ((Version(3, 0), None), "all weights"),
            ((Forward(5, 0), Some(4)), "the size of its shard"),
            ((Tied(0, 2), Some(8)), "a split weight"),
            ((Tied(1, 2), Some(8)), "a tied weight"),
            ((Tied(2, 2), Some(0)), "a tied weight"),
        ];
        for (wrong, why) in wrong {
            let said = refused(gather(&[wrong]));
            assert!(said.contains(why), "{wrong:?}: {said}");
        }
        // A version that another replica saves, and a tied weight with versions of its own.
        let others = [(Version(3, 1), None), (Forward(5, 0), None), (Forward(5, 1), None)];
        assert_eq!(gather(&others).unwrap().len(), 1);
    }

    #[test]
    fn each_rank_and_replica_comes_once() {
        let (codes, layouts) = (codes(), layouts());
        let of_two = |rank: usize, replica: u32| {
            let mut snapshot = snapshot(rank, 4);
            (snapshot.key.replica, snapshot.key.replicas) = (replica, 2);
            if replica > 0 {
                (snapshot.state, snapshot.tensors) = (None, StageTensors::new());
            }
            snapshot
        };
        let change_key = |mut snapshot: StageSnapshot, change: fn(&mut SnapshotKey)| {
            change(&mut snapshot.key);
            snapshot
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
        let other = said(vec![of_two(0, 0), change_key(of_two(1, 0), |key| key.replicas = 1)]);
        assert!(other.contains("tensor rank 1: it has another number of ZeRO replicas"), "{other}");
        let foreign = said(vec![change_key(of_two(0, 0), |key| key.tensor_rank = 2)]);
        assert!(foreign.contains("there is no such rank"), "{foreign}");
    }

    #[test]
    fn results_without_a_shard_are_refused() {
        let rank = |split: &[f32]| StageTensors::from([(Weight(0), floats(split)), (Weight(1), floats(&[5.0; 3]))]);
        let (first, second) = (rank(&[1.0, 2.0]), rank(&[3.0, 4.0]));
        let join = |ranks: &[&StageTensors]| join_tensors(&codes()[0], &layouts(), ranks);
        let joined = join(&[&first, &second]).unwrap();
        assert_eq!([0, 1].map(|p| bytes(&joined[&Weight(p)]).len()), [16, 12]);
        let missing = |ranks: &[&StageTensors], tensor_rank: usize| {
            assert_eq!(join(ranks).err(), Some(GatherError::Missing { name: "split".to_string(), tensor_rank }));
        };
        let without = StageTensors::from([(Weight(1), floats(&[5.0; 3]))]);
        let mut wide = second.clone();
        wide.insert(Weight(0), zeros(16));
        missing(&[&first, &without], 1);
        missing(&[&without, &second], 0);
        // An `f64` would fit no tensor of the stage.
        missing(&[&first, &wide], 1);
    }
}
