//! How much of the time in which replicas sum their gradients work hides.

use crate::schedule::{Pipeline, Schedule, StageSpec};
use crate::simulate::SimulateError;
use crate::simulate::step_time::step_us;

/// The share, from 0 to 1, of the longest sum of gradients of a step by which the step does not become longer: what it takes is compared with
/// what it takes where sums take no time. Nothing where nothing is summed, or playing would take long.
pub fn hidden(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    // Without a flush a minibatch is one item, and a stage sums for as many as it has replicas.
    let in_step = |stage: &StageSpec| match (stage.replicas, kind.is_round_robin()) {
        (0 | 1, _) => 0.0,
        (replicas, true) => stage.all_reduce / f64::from(replicas),
        (_, false) => stage.all_reduce,
    };
    let longest = pipeline.stages.iter().map(in_step).fold(0.0, f64::max);
    if longest <= 0.0 || !kind.trains() {
        return Ok(None);
    }
    let mut free = pipeline.clone();
    free.stages.iter_mut().for_each(|stage| stage.all_reduce = 0.0);
    let [with, without] = [pipeline, &free].map(|pipeline| step_us(kind, pipeline, microbatches));
    Ok(with?.zip(without?).map(|(with, without)| (1.0 - (with - without) / longest).clamp(0.0, 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Bucket;

    /// A backward of 8 that makes half of its gradients in its middle: of a sum of 4 the first half is hidden; a sum at once is not.
    #[test]
    fn half_of_a_sum_is_hidden_behind_half_of_a_backward() {
        let shape = |buckets| StageSpec { all_reduce: 4.0, buckets, ..StageSpec::new(2, 4.0, 8.0) };
        let share = |buckets| {
            let pipeline = Pipeline::chain(vec![shape(buckets)]);
            hidden(Schedule::OneFOneB, &pipeline, 2).unwrap().unwrap()
        };
        let even = |ready| Bucket { ready, share: 0.5 };
        assert_eq!((share(vec![]), share(vec![even(0.5), even(1.0)])), (0.0, 0.5));
        let alone = Pipeline::chain(vec![StageSpec::new(1, 4.0, 8.0)]);
        assert_eq!(hidden(Schedule::OneFOneB, &alone, 2), Ok(None));
    }
}
