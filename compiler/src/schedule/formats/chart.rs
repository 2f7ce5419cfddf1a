//! Draws a program as a chart: one row per worker, one column per time unit.
//!
//! ```text
//! 0.0 | F0 F1  . B0 F2 B1  . B2
//! 1.0 |  . F0 B0 F1 B1 F2 B2  .
//! ```
//!
//! Every forward, backward (or pass of a split one) and recomputation (`R2`) takes one unit, everything else none.
//! Cells omit the stage if the rank has only one.

use std::collections::{BTreeMap, VecDeque};

use crate::schedule::collective::CollectiveId;
use crate::schedule::{EdgeId, Instruction, Payload, Program, ScheduleError, Token, WorkerId};

/// Draws the chart, one line per worker. Fails on a deadlock.
pub fn chart(program: &Program) -> Result<String, ScheduleError> {
    let rows = Drawing::new(program).run()?;
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = rows.iter().flatten().flatten().map(String::len).max().unwrap_or(1);
    let names: Vec<String> = (0..rows.len() as u32).map(|worker| program.worker_name(WorkerId(worker))).collect();
    let margin = names.iter().map(String::len).max().unwrap_or(0);
    let mut text = String::new();
    for (name, row) in names.iter().zip(&rows) {
        text += &format!("{name:>margin$} |");
        for column in 0..columns {
            let cell = row.get(column).and_then(Option::as_deref).unwrap_or(".");
            text += &format!(" {cell:>width$}");
        }
        text.push('\n');
    }
    Ok(text)
}

/// (edge, direction, sender, receiver)
type Channel = (EdgeId, Payload, WorkerId, WorkerId);

struct Drawing<'a> {
    program: &'a Program,
    rows: Vec<Vec<Option<String>>>,
    at: Vec<usize>,
    /// The operation of each pending token, by worker.
    posted: Vec<BTreeMap<Token, Posted>>,
    /// Times of the Sends and Recvs of each channel, in order.
    sends: BTreeMap<Channel, Vec<usize>>,
    recvs: BTreeMap<Channel, Vec<usize>>,
    joined: BTreeMap<CollectiveId, Vec<usize>>,
}

#[derive(Clone, Copy)]
enum Posted {
    Send(Channel, usize),
    Recv(Channel, usize),
    CollectiveId(CollectiveId),
}

impl<'a> Drawing<'a> {
    fn new(program: &'a Program) -> Self {
        let workers = program.workers.len();
        Self {
            program,
            rows: vec![Vec::new(); workers],
            at: vec![0; workers],
            posted: vec![BTreeMap::new(); workers],
            sends: BTreeMap::new(),
            recvs: BTreeMap::new(),
            joined: BTreeMap::new(),
        }
    }

    fn run(mut self) -> Result<Vec<Vec<Option<String>>>, ScheduleError> {
        // A post may unblock another worker, so workers are retried until none makes progress.
        let mut asked: VecDeque<u32> = (0..self.rows.len() as u32).collect();
        let mut still = 0;
        while let Some(worker) = asked.pop_front() {
            let before = self.at[worker as usize];
            while self.advance(WorkerId(worker)) {}
            still = if self.at[worker as usize] == before { still + 1 } else { 0 };
            if self.at[worker as usize] < self.program.workers[worker as usize].instructions.len() {
                if still > asked.len() {
                    let stuck = WorkerId(worker);
                    let at =
                        self.program.show(&self.program.workers[stuck.index()].instructions[self.at[stuck.index()]]);
                    return Err(ScheduleError::Stuck { worker: self.program.worker_name(stuck), at });
                }
                asked.push_back(worker);
            }
        }
        Ok(self.rows)
    }

    /// Executes the worker's next instruction; false if it must wait or there is none.
    fn advance(&mut self, worker: WorkerId) -> bool {
        let index = worker.index();
        let Some(&instruction) = self.program.workers[index].instructions.get(self.at[index]) else { return false };
        let now = self.rows[index].len();
        match instruction {
            Instruction::Forward { .. }
            | Instruction::Backward { .. }
            | Instruction::BackwardInput { .. }
            | Instruction::BackwardWeight { .. } => {
                let Some((work, ..)) = instruction.work() else { return false };
                let rank = self.program.workers[index].rank;
                let several = self.program.stages_of(rank).nth(1).is_some();
                let cell = format!("{}{}", work.part.letter(), work.item.0);
                self.rows[index].push(Some(if several { work.to_string() } else { cell }));
            }
            Instruction::Send { edge, kind, peer, token, .. } => {
                let channel = (edge, kind, worker, peer);
                let sends = self.sends.entry(channel).or_default();
                self.posted[index].insert(token, Posted::Send(channel, sends.len()));
                sends.push(now);
            }
            Instruction::Recv { edge, kind, peer, token, .. } => {
                let channel = (edge, kind, peer, worker);
                let recvs = self.recvs.entry(channel).or_default();
                self.posted[index].insert(token, Posted::Recv(channel, recvs.len()));
                recvs.push(now);
            }
            Instruction::AllReduce { .. } | Instruction::ReduceScatter { .. } | Instruction::AllGather { .. } => {
                let Some((meeting, token)) = instruction.meeting() else { return false };
                self.posted[index].insert(token, Posted::CollectiveId(meeting));
                self.joined.entry(meeting).or_default().push(now);
            }
            Instruction::Recompute { stage, item, .. } => {
                let several = self.program.stages_of(self.program.workers[index].rank).nth(1).is_some();
                let stage = if several { stage.0.to_string() } else { String::new() };
                self.rows[index].push(Some(format!("{stage}R{}", item.0)));
            }
            Instruction::Wait { token } => match self.ends(index, token) {
                Some(time) => {
                    self.posted[index].remove(&token);
                    let row = &mut self.rows[index];
                    row.resize(row.len().max(time), None);
                }
                None => return false,
            },
            Instruction::Load { .. }
            | Instruction::Step { .. }
            | Instruction::Drop { .. }
            | Instruction::Checkpoint { .. } => {}
        }
        self.at[index] += 1;
        true
    }

    /// Completion time of the token's operation; `None` if incomplete.
    fn ends(&self, worker: usize, token: Token) -> Option<usize> {
        match *self.posted[worker].get(&token)? {
            Posted::Send(channel, place) => self.recvs.get(&channel)?.get(place).copied(),
            Posted::Recv(channel, place) => self.sends.get(&channel)?.get(place).copied(),
            Posted::CollectiveId(meeting) => {
                let members = self.program.stages.get(meeting.stage.index())?.replicas as usize;
                let joined = self.joined.get(&meeting)?;
                joined.iter().max().copied().filter(|_| joined.len() == members)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::Schedule;
    use crate::schedule::Pipeline;
    use crate::schedule::generators::schedule;
    use crate::schedule::semantics::StepCount;

    fn trimmed(text: &str) -> String {
        text.trim().lines().map(str::trim).collect::<Vec<_>>().join("\n")
    }

    fn assert_same(program: &Program, expected: &str) {
        let drawn = chart(program).unwrap();
        assert_eq!(trimmed(&drawn), trimmed(expected), "drawn:\n{drawn}");
    }

    /// 1F1B-RR with published caps; every forward and backward takes one unit.
    fn assert_chart(replicas: &[u32], minibatches: u32, expected: &str) {
        assert_caps_chart(replicas, &crate::schedule::published_caps(replicas), minibatches, expected);
    }

    fn assert_caps_chart(replicas: &[u32], caps: &[u32], minibatches: u32, expected: &str) {
        let mut pipeline = Pipeline::balanced(replicas, 1.0).with_caps(caps);
        for stage in &mut pipeline.stages {
            (stage.forward, stage.backward) = (1.0, 1.0);
        }
        let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(minibatches)).unwrap();
        assert_same(&program, expected);
    }

    #[test]
    #[rustfmt::skip]
    fn four_stages() {
        assert_chart(&[1, 1, 1, 1], 6, "
            0.0 | F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
            1.0 |  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
            2.0 |  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
            3.0 |  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .");
    }

    #[test]
    #[rustfmt::skip]
    fn two_replicas_and_one() {
        assert_chart(&[2, 1], 5, "
            0.0 | F0 F2  . B0  .  . F4 B2  .  .  . B4
            0.1 | F1 F3  .  .  . B1  .  .  . B3  .  .
            1.0 |  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4  .");
    }

    #[test]
    #[rustfmt::skip]
    fn one_three_one() {
        assert_chart(&[1, 3, 1], 7, "
            0.0 | F0 F1 F2 F3 F4 B0 F5 B1 F6 B2  . B3  . B4  . B5  . B6
            1.0 |  . F0  .  . B0 F3  .  .  . F6 B3  .  .  .  .  . B6  .
            1.1 |  .  . F1  .  . F4 B1  .  .  .  .  . B4  .  .  .  .  .
            1.2 |  .  .  . F2  .  .  . F5 B2  .  .  .  .  . B5  .  .  .
            2.0 |  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6  .  .");
    }

    #[test]
    #[rustfmt::skip]
    fn one_three_one_with_more_in_flight() {
        assert_caps_chart(&[1, 3, 1], &[7, 3, 1], 9, "
            0.0 | F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 F8 B4  . B5  . B6  . B7  . B8
            1.0 |  . F0  .  . B0 F3  .  .  . F6 B3  .  .  .  .  . B6  .  .  .  .  .
            1.1 |  .  . F1  .  . F4 B1  .  .  .  . F7 B4  .  .  .  .  . B7  .  .  .
            1.2 |  .  .  . F2  .  .  . F5 B2  .  .  .  . F8 B5  .  .  .  .  . B8  .
            2.0 |  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8  .  .");
    }

    #[test]
    #[rustfmt::skip]
    fn fill_drain() {
        let count = StepCount { minibatches: 2, microbatches: 3 };
        let program = schedule(Schedule::Gpipe, &Pipeline::balanced(&[1, 1, 1], 1.0), count).unwrap();
        assert_same(&program, "
            0.0 | F0 F1 F2  .  .  .  . B0 B1 B2 F3 F4 F5  .  .  .  . B3 B4 B5
            1.0 |  . F0 F1 F2  .  . B0 B1 B2  .  . F3 F4 F5  .  . B3 B4 B5  .
            2.0 |  .  . F0 F1 F2 B0 B1 B2  .  .  .  . F3 F4 F5 B3 B4 B5  .  .");
    }

    #[test]
    #[rustfmt::skip]
    fn one_forward_one_backward_with_flush() {
        let count = StepCount { minibatches: 2, microbatches: 4 };
        let program = schedule(Schedule::OneFOneB, &Pipeline::balanced(&[1, 1, 1], 1.0), count).unwrap();
        assert_same(&program, "
            0.0 | F0 F1 F2  .  . B0 F3 B1  . B2  . B3 F4 F5 F6  .  . B4 F7 B5  . B6  . B7
            1.0 |  . F0 F1  . B0 F2 B1 F3 B2  . B3  .  . F4 F5  . B4 F6 B5 F7 B6  . B7  .
            2.0 |  .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .  .  . F4 B4 F5 B5 F6 B6 F7 B7  .  .");
    }
}
