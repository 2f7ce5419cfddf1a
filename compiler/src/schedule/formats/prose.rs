//! Instructions in words, for messages. Steps, micro-batches of a step, and rounds count from 1.

use crate::schedule::{EdgeId, Instruction, MicrobatchId, Payload, Program, StageId, Token, WorkerProgram};

impl Program {
    /// The instruction at this position of a worker as a noun phrase: `the forward pass of step 3 in stage 0`. `None` after
    /// its last one.
    pub fn describe(&self, worker: &WorkerProgram, at: usize) -> Option<String> {
        let instruction = worker.instructions.get(at)?;
        let Instruction::Wait { token } = instruction else { return Some(self.phrase(instruction)) };
        let starts = |it: &&Instruction| token_of(it) == Some(*token);
        let awaited = worker.instructions[..at].iter().rev().find(starts);
        Some(match awaited {
            Some(&Instruction::Recv { edge, item, kind, peer, .. }) => {
                format!("the wait for {} from worker {}", self.message(edge, item, kind), self.worker_name(peer))
            }
            Some(awaited) => format!("the wait for {}", self.phrase(awaited)),
            None => "a wait".to_string(),
        })
    }

    fn microbatch(&self, item: MicrobatchId) -> String {
        let microbatches = self.microbatches.max(1);
        let step = item.0 / microbatches + 1;
        match microbatches {
            1 => format!("step {step}"),
            _ => format!("micro-batch {} of step {step}", item.0 % microbatches + 1),
        }
    }

    /// What a message over an edge carries.
    fn message(&self, edge: EdgeId, item: MicrobatchId, kind: Payload) -> String {
        let (from, to) = self.ends(edge);
        let what = match kind {
            Payload::Activation => format!("activations of stage {}", from.0),
            Payload::Gradient => format!("activation gradients of stage {}", to.0),
        };
        format!("{what} ({})", self.microbatch(item))
    }

    fn phrase(&self, instruction: &Instruction) -> String {
        let of = |what: &str, item: MicrobatchId, stage: StageId| {
            format!("the {what} of {} in stage {}", self.microbatch(item), stage.0)
        };
        match *instruction {
            Instruction::Load { stage, item } => of("load", item, stage),
            Instruction::Forward { stage, item, .. } => of("forward pass", item, stage),
            Instruction::Backward { stage, item, .. } => of("backward pass", item, stage),
            Instruction::BackwardInput { stage, item, .. } => of("input gradients", item, stage),
            Instruction::BackwardWeight { stage, item, .. } => of("weight gradients", item, stage),
            Instruction::Recompute { stage, item, .. } => of("recomputation", item, stage),
            Instruction::Send { edge, item, kind, peer, .. } => {
                format!("the send of {} to worker {}", self.message(edge, item, kind), self.worker_name(peer))
            }
            Instruction::Recv { edge, item, kind, peer, .. } => {
                format!("the receive of {} from worker {}", self.message(edge, item, kind), self.worker_name(peer))
            }
            Instruction::Wait { .. } => "a wait".to_string(),
            Instruction::AllReduce { stage, round, bucket, .. } => {
                format!(
                    "the all-reduce of weight gradients of stage {}, round {}{}",
                    stage.0,
                    round + 1,
                    in_bucket(bucket)
                )
            }
            Instruction::ReduceScatter { stage, round, bucket, .. } => {
                format!(
                    "the reduce-scatter of weight gradients of stage {}, round {}{}",
                    stage.0,
                    round + 1,
                    in_bucket(bucket)
                )
            }
            Instruction::AllGather { stage, version, bucket, .. } => {
                format!("the all-gather of weights of stage {}, version {}{}", stage.0, version.0, in_bucket(bucket))
            }
            Instruction::Step { stage, round, .. } => {
                format!("the optimizer step of stage {}, round {}", stage.0, round + 1)
            }
            Instruction::Drop { stage, version } => {
                format!("the release of weights of stage {}, version {}", stage.0, version.0)
            }
            Instruction::Checkpoint { stage, version } => {
                format!("the checkpoint of stage {}, version {}", stage.0, version.0)
            }
        }
    }
}

/// The bucket of a collective; bucket 0 is omitted.
fn in_bucket(bucket: u32) -> String {
    if bucket == 0 { String::new() } else { format!(", bucket {bucket}") }
}

/// The token of an instruction that starts an operation.
fn token_of(instruction: &Instruction) -> Option<Token> {
    match *instruction {
        Instruction::Send { token, .. }
        | Instruction::Recv { token, .. }
        | Instruction::AllReduce { token, .. }
        | Instruction::ReduceScatter { token, .. }
        | Instruction::AllGather { token, .. } => Some(token),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_in_words() {
        let text = "program 1f1b {\n  items 4\n  microbatches 2\n  stage 0 replicas=1 cap=1\n  stage 1 replicas=1 cap=1\n  \
             edge 0 > 1\n  worker 0.0 {\n    load 0F3\n    0F3\n    send 0F3 > 1.0 #7\n    wait #7\n    step 0 round 1 v0 => v1 mean 2\n  \
             }\n  worker 1.0 {\n    recv 0F3 < 0.0 #7\n    wait #7\n    1F3\n    1B3\n    wait #9\n  }\n}\n";
        let program: Program = text.parse().unwrap();
        let described = |worker: usize| -> Vec<String> {
            let worker = &program.workers[worker];
            (0..=worker.instructions.len()).map_while(|at| program.describe(worker, at)).collect()
        };
        assert_eq!(
            described(0),
            [
                "the load of micro-batch 2 of step 2 in stage 0",
                "the forward pass of micro-batch 2 of step 2 in stage 0",
                "the send of activations of stage 0 (micro-batch 2 of step 2) to worker 1.0",
                "the wait for the send of activations of stage 0 (micro-batch 2 of step 2) to worker 1.0",
                "the optimizer step of stage 0, round 2",
            ]
        );
        assert_eq!(
            described(1),
            [
                "the receive of activations of stage 0 (micro-batch 2 of step 2) from worker 0.0",
                "the wait for activations of stage 0 (micro-batch 2 of step 2) from worker 0.0",
                "the forward pass of micro-batch 2 of step 2 in stage 1",
                "the backward pass of micro-batch 2 of step 2 in stage 1",
                "a wait",
            ]
        );
    }
}
