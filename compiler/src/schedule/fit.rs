//! Maps a program from a file onto a pipeline. Only edge ids change: the program numbers edges by its own list.
//!
//! The program states its number of minibatches. The checker validates it afterwards.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::StageId;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::{EdgeId, Instruction, Pipeline, Program, RankId, ScheduleError};

const SHOWN: usize = 32;

/// The program with the pipeline's edge ids. Fails if stages or edges differ, or if the run is too long.
pub fn fit(program: &Program, pipeline: &Pipeline) -> Result<Program, ScheduleError> {
    let wrong = |what: String| Err(ScheduleError::Foreign { what });
    let Program { schedule, items, microbatches, .. } = *program;
    if microbatches == 0 || !items.is_multiple_of(microbatches) {
        return wrong(format!("{items} micro-batches are not a multiple of {microbatches} per minibatch"));
    }
    Rule::new(schedule, pipeline, StepCount { minibatches: items / microbatches, microbatches })?;
    let own: Vec<(RankId, u32)> = program.stages.iter().map(|stage| (stage.rank, stage.replicas)).collect();
    let other: Vec<(RankId, u32)> =
        pipeline.ranks.iter().zip(&pipeline.stages).map(|(rank, stage)| (*rank, stage.replicas)).collect();
    if own != other {
        return wrong(format!(
            "its stages have replicas {}, those of the pipeline {}",
            describe_replicas(&own),
            describe_replicas(&other)
        ));
    }
    let there: BTreeMap<(StageId, StageId), EdgeId> =
        (0..).map(EdgeId).zip(&pipeline.edges).map(|(id, edge)| ((edge.from, edge.to), id)).collect();
    let mut places = Vec::with_capacity(program.edges.len());
    for ends @ (from, to) in &program.edges {
        match there.get(ends) {
            Some(place) => places.push(*place),
            None => return wrong(format!("it sends from stage {} to {}, the pipeline does not", from.0, to.0)),
        }
    }
    let own: BTreeSet<&(StageId, StageId)> = program.edges.iter().collect();
    if let Some((from, to)) = there.keys().find(|ends| !own.contains(ends)) {
        return wrong(format!("it does not send from stage {} to {}, the pipeline does", from.0, to.0));
    }
    if own.len() != places.len() {
        return wrong("it lists an edge twice".to_string());
    }
    let mut fitted = program.clone();
    fitted.edges = pipeline.edges.iter().map(|edge| (edge.from, edge.to)).collect();
    for instruction in fitted.workers.iter_mut().flat_map(|worker| &mut worker.instructions) {
        if let Instruction::Send { edge, .. } | Instruction::Recv { edge, .. } = instruction {
            match places.get(edge.index()) {
                Some(place) => *edge = *place,
                None => return wrong(format!("it uses edge {}, but has {} edges", edge.0, places.len())),
            }
        }
    }
    Ok(fitted)
}

/// `2, 1, 1`: replicas of each stage, with the rank if it differs from the stage index.
fn describe_replicas(list: &[(RankId, u32)]) -> String {
    let is_straight = list.iter().enumerate().all(|(at, (rank, _))| rank.index() == at);
    let one = |(rank, replicas): &(RankId, u32)| match is_straight {
        true => replicas.to_string(),
        false => format!("{replicas} on rank {}", rank.0),
    };
    let shown: Vec<String> = list.iter().take(SHOWN).map(one).collect();
    let more = if list.len() > SHOWN { ", …" } else { "" };
    shown.join(", ") + more
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::Schedule;
    use crate::schedule::Edge;
    use crate::schedule::check::verify::check;
    use crate::schedule::generators::schedule;

    fn skipping() -> Pipeline {
        let mut pipeline = Pipeline::balanced(&[2, 1, 1], 2.0);
        pipeline.edges.push(Edge::new(0, 2));
        pipeline
    }

    #[test]
    fn edges_go_by_their_ends() {
        let pipeline = skipping();
        let made = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(5)).unwrap();
        assert_eq!(fit(&made, &pipeline).unwrap(), made);
        let mut turned = pipeline.clone();
        turned.edges.reverse();
        let fitted = fit(&made, &turned).unwrap();
        assert_ne!(fitted, made);
        check(&fitted).unwrap();
        assert_eq!(fit(&fitted, &pipeline).unwrap(), made);
    }

    #[test]
    fn what_is_for_another_pipeline_is_refused() {
        let pipeline = skipping();
        let count = StepCount { minibatches: 2, microbatches: 2 };
        let made = schedule(Schedule::OneFOneB, &pipeline, count).unwrap();
        let refused = |program: &Program, pipeline: &Pipeline| fit(program, pipeline).unwrap_err().to_string();
        let straight = Pipeline::balanced(&[2, 1, 1], 2.0);
        assert_eq!(refused(&made, &straight), "program: it sends from stage 0 to 2, the pipeline does not");
        let other = schedule(Schedule::OneFOneB, &straight, count).unwrap();
        assert_eq!(refused(&other, &pipeline), "program: it does not send from stage 0 to 2, the pipeline does");
        assert_eq!(
            refused(&made, &Pipeline::balanced(&[1, 1], 2.0)),
            "program: its stages have replicas 2, 1, 1, those of the pipeline 1, 1"
        );
        assert!(
            refused(&Program { items: 3, ..made.clone() }, &pipeline).contains("not a multiple of 2 per minibatch")
        );
        assert!(refused(&Program { items: 0, ..made.clone() }, &pipeline).contains("at least one"));
        let endless = Program { items: u32::MAX - 1, ..made.clone() };
        assert!(refused(&endless, &pipeline).contains("too long"), "bounded before it is played");
        let mut wild = made;
        wild.workers[0].instructions.iter_mut().for_each(|instruction| {
            if let Instruction::Send { edge, .. } = instruction {
                *edge = EdgeId(9);
            }
        });
        assert_eq!(refused(&wild, &pipeline), "program: it uses edge 9, but has 3 edges");
    }
}
