//! Fraction of the gradient all-reduce that is hidden by compute.

use crate::plan::schedule::Schedule;
use crate::schedule::{Pipeline, StageSpec};
use crate::simulate::SimulateError;
use crate::simulate::step_time::step_us;

/// The hidden fraction (0 to 1) of the longest all-reduce of a step, from step times with and without all-reduce.
/// `None` if there is no all-reduce or the simulation would take too long.
pub fn hidden(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    // Without a flush, a minibatch is one item, and a stage all-reduces once per round of its replicas.
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

    /// A backward of 8 makes half of its gradients by its middle: with two buckets half of an all-reduce of 4 is
    /// hidden, with one none.
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
