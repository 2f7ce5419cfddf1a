//! The text format of programs: printer and parser.
//!
//! ```text
//! program 1f1b-rr {
//!   items 2
//!   microbatches 1
//!   stage 0 replicas=2 cap=2
//!   stage 1 replicas=1 cap=1
//!   edge 0 > 1
//!   worker 0.0 {
//!     load 0F0                        fetch the inputs of 0F0 for item 0
//!     0F0                             stage 0, forward, item 0; version 0, slot 0
//!     send 0F0 > 1.0 #0               the output of 0F0, to worker 1.0; token 0
//!     recv 1B0 < 1.0 #1               the gradients of 1B0, from worker 1.0
//!     wait #1
//!     0B2@v1[3]                       backward of item 2 with version 1, in slot 3; 0I2 and 0W2 if split
//!     all-reduce 0 round 0 #2
//!     step 0 round 0 v0 > v1 mean 2   `=>` instead of `>` if v1 overwrites v0
//!     drop 0 v0
//!     recompute 0F2@v1[3]             reruns forward 0F2 for its backward
//!     reduce-scatter 0 round 1 #3     the all-reduce under ZeRO: this worker gets its shard
//!     all-gather 0 v2 #4              gathers the shards of version 2; both take a bucket like all-reduce
//!     checkpoint 0 v2
//!   }
//! }
//! ```
//!
//! Version 0, slot 0 and bucket 0 are omitted, and the rank of a stage if it equals the stage number (else `stage 4
//! rank=0 replicas=1 cap=3`). Optional stage fields after the cap are `buckets=3` (the collectives then name it:
//! `all-reduce 0 round 0 bucket 2 #4`), `zero=1` (`zero=1:2` if groups of 2 replicas shard) and `recompute`. A transfer
//! is named by the action that produced it and by both workers. If the receiver has several stages, the receiving one is
//! added: `send 0F0 > 1.0 as 5 #7`. Gradients are named `1B0`, also if `1I0` made them.
//!
//! A version refers to the stage's own parameters. A tied weight of stages that step at different times uses the oldest
//! version that any of them has for the item.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::plan::zero::Zero;
use crate::schedule::action::{Phase, Work};
use crate::schedule::shape::MAX_WORKERS;
use crate::schedule::{
    EdgeId, Instruction, MicrobatchId, Payload, Program, ProgramStage, RankId, Slot, Token, Version, WorkerId,
    WorkerProgram,
};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: expected {expected}, found `{found}`")]
pub struct ParseError {
    pub line: usize,
    pub expected: &'static str,
    pub found: String,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program {} {{", self.schedule)?;
        writeln!(f, "  items {}", self.items)?;
        writeln!(f, "  microbatches {}", self.microbatches)?;
        for (index, stage) in self.stages.iter().enumerate() {
            let rank = if stage.rank.index() == index { String::new() } else { format!("rank={} ", stage.rank.0) };
            let again = if stage.recompute { " recompute" } else { "" };
            let buckets = if stage.buckets == 1 { String::new() } else { format!(" buckets={}", stage.buckets) };
            let zero = Zero { level: stage.zero, degree: stage.shard_degree };
            let zero = if stage.zero == 0 { String::new() } else { format!(" zero={zero}") };
            writeln!(f, "  stage {index} {rank}replicas={} cap={}{buckets}{zero}{again}", stage.replicas, stage.cap)?;
        }
        for (from, to) in &self.edges {
            writeln!(f, "  edge {} > {}", from.0, to.0)?;
        }
        for worker in &self.workers {
            writeln!(f, "  worker {}.{} {{", worker.rank.0, worker.replica)?;
            for instruction in &worker.instructions {
                writeln!(f, "    {}", self.show(instruction))?;
            }
            writeln!(f, "  }}")?;
        }
        writeln!(f, "}}")
    }
}

impl Program {
    pub fn show(&self, instruction: &Instruction) -> String {
        let made_by = |edge: EdgeId, kind: Payload, item: MicrobatchId| {
            let (from, to) = self.ends(edge);
            match kind {
                Payload::Activation => format!("{}F{}", from.0, item.0),
                Payload::Gradient => format!("{}B{}", to.0, item.0),
            }
        };
        // The receiving stage, if its rank has several.
        let taker = |edge: EdgeId, kind: Payload| {
            let (from, to) = self.ends(edge);
            let taker = if kind == Payload::Activation { to } else { from };
            let several = self.stages.get(taker.index()).is_some_and(|s| self.stages_of(s.rank).nth(1).is_some());
            if several { format!(" as {}", taker.0) } else { String::new() }
        };
        match *instruction {
            Instruction::Load { stage, item } => format!("load {}F{}", stage.0, item.0),
            Instruction::Forward { .. }
            | Instruction::Backward { .. }
            | Instruction::BackwardInput { .. }
            | Instruction::BackwardWeight { .. } => instruction.work().map(compute).unwrap_or_default(),
            Instruction::Recompute { stage, item, version, slot } => {
                let of = Work { stage, item, part: Phase::Forward };
                format!("recompute {}", compute((of, version, slot)))
            }
            Instruction::Send { edge, item, kind, peer, token } => {
                let (what, to) = (made_by(edge, kind, item), self.worker_name(peer));
                format!("send {what} > {to}{} #{}", taker(edge, kind), token.0)
            }
            Instruction::Recv { edge, item, kind, peer, token } => {
                let (what, from) = (made_by(edge, kind, item), self.worker_name(peer));
                format!("recv {what} < {from}{} #{}", taker(edge, kind), token.0)
            }
            Instruction::Wait { token } => format!("wait #{}", token.0),
            Instruction::AllReduce { stage, round, bucket, token } => {
                format!("all-reduce {} round {round}{} #{}", stage.0, bucket_suffix(bucket), token.0)
            }
            Instruction::ReduceScatter { stage, round, bucket, token } => {
                format!("reduce-scatter {} round {round}{} #{}", stage.0, bucket_suffix(bucket), token.0)
            }
            Instruction::AllGather { stage, version, bucket, token } => {
                format!("all-gather {} v{}{} #{}", stage.0, version.0, bucket_suffix(bucket), token.0)
            }
            Instruction::Step { stage, round, from, to, count, in_place } => {
                let arrow = if in_place { "=>" } else { ">" };
                format!("step {} round {round} v{} {arrow} v{} mean {count}", stage.0, from.0, to.0)
            }
            Instruction::Drop { stage, version } => format!("drop {} v{}", stage.0, version.0),
            Instruction::Checkpoint { stage, version } => format!("checkpoint {} v{}", stage.0, version.0),
        }
    }
}

/// The bucket of a collective; bucket 0 is omitted.
fn bucket_suffix(bucket: u32) -> String {
    if bucket == 0 { String::new() } else { format!(" bucket {bucket}") }
}

fn compute((work, version, slot): (Work, Version, Slot)) -> String {
    let mut text = work.to_string();
    if version.0 > 0 {
        text += &format!("@v{}", version.0);
    }
    if slot.0 > 0 {
        text += &format!("[{}]", slot.0);
    }
    text
}

impl FromStr for Program {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut lines =
            text.lines().enumerate().map(|(at, line)| Line { at: at + 1, words: line.split_whitespace().collect() });
        let end = text.lines().count() + 1;
        let mut next = || loop {
            match lines.next() {
                Some(line) if line.words.is_empty() => {}
                Some(line) => return line,
                None => return Line { at: end, words: Vec::new() },
            }
        };
        let head = next();
        let ["program", name, "{"] = head.words[..] else { return Err(head.expected("`program SCHEDULE {`")) };
        let schedule: Schedule = name.parse().map_err(|_| head.expected("the name of a schedule"))?;
        let line = next();
        let ["items", items] = line.words[..] else { return Err(line.expected("`items N`")) };
        let items = line.number(items)?;
        let line = next();
        let ["microbatches", microbatches] = line.words[..] else { return Err(line.expected("`microbatches N`")) };
        let microbatches = line.number(microbatches)?;
        let mut reader = Reader {
            program: Program {
                schedule,
                items,
                microbatches,
                stages: Vec::new(),
                edges: Vec::new(),
                workers: Vec::new(),
            },
            first: vec![0],
            edges: HashMap::new(),
        };
        loop {
            let line = next();
            match line.words[..] {
                ["stage", ..] if reader.program.edges.is_empty() && reader.program.workers.is_empty() => {
                    reader.stage(&line)?;
                }
                ["edge", from, ">", to] if reader.program.workers.is_empty() => reader.edge(&line, from, to)?,
                ["worker", name, "{"] => {
                    let worker = reader.worker(&line, name)?;
                    if worker.index() != reader.program.workers.len() {
                        return Err(line.expected("the next worker in order"));
                    }
                    let mut instructions = Vec::new();
                    let rank = reader.rank(worker);
                    loop {
                        let line = next();
                        if line.words == ["}"] {
                            break;
                        }
                        instructions.push(reader.instruction(&line, rank)?);
                    }
                    let replica = worker.0 - reader.first[rank.index()];
                    reader.program.workers.push(WorkerProgram { rank, replica, instructions });
                }
                ["}"] => {
                    let line_after = next();
                    if !line_after.words.is_empty() {
                        return Err(line_after.expected("the end"));
                    }
                    return Ok(reader.program);
                }
                _ => return Err(line.expected("`stage`, `edge`, `worker` in this order, or `}`")),
            }
        }
    }
}

struct Line<'a> {
    at: usize,
    words: Vec<&'a str>,
}

impl Line<'_> {
    fn expected(&self, expected: &'static str) -> ParseError {
        let found = if self.words.is_empty() { "the end of the text".to_string() } else { self.words.join(" ") };
        ParseError { line: self.at, expected, found }
    }

    fn number(&self, word: &str) -> Result<u32, ParseError> {
        // Rust parses `+1`, the format does not accept it: there is one way to write a program.
        let plain = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| word.parse().ok()).flatten().ok_or_else(|| self.expected("a number below 4294967296"))
    }

    fn after(&self, word: &str, prefix: &str, expected: &'static str) -> Result<u32, ParseError> {
        word.strip_prefix(prefix).ok_or_else(|| self.expected(expected)).and_then(|rest| self.number(rest))
    }
}

struct Reader {
    program: Program,
    first: Vec<u32>,
    edges: HashMap<(StageId, StageId), EdgeId>,
}

impl Reader {
    fn stage(&mut self, line: &Line<'_>) -> Result<(), ParseError> {
        const EXPECTED: &str = "`stage N replicas=N cap=N`, stages in order, replicas and cap at least 1; or `stage N \
                                rank=N replicas=N cap=N`, ranks in order of their first stages, with equal replicas; \
                                then optional `buckets=N`, `zero=N` or `zero=N:N`, and `recompute`";
        let (words, recompute) = match line.words.split_last() {
            Some((&"recompute", words)) => (words, true),
            _ => (&line.words[..], false),
        };
        let (words, zero, shard_degree) = match words.split_last() {
            Some((last, before)) if last.starts_with("zero=") => match last.split_once(':') {
                Some((level, degree)) => (before, line.after(level, "zero=", EXPECTED)?, line.number(degree)?),
                None => (before, line.after(last, "zero=", EXPECTED)?, 0),
            },
            _ => (words, 0, 0),
        };
        let (words, buckets) = match words.split_last() {
            Some((last, before)) if last.starts_with("buckets=") => (before, line.after(last, "buckets=", EXPECTED)?),
            _ => (words, 1),
        };
        let (rank, [index, replicas, cap]) = match *words {
            ["stage", index, replicas, cap] => (index, [index, replicas, cap]),
            ["stage", index, rank, replicas, cap] if rank != format!("rank={index}") => {
                (rank.strip_prefix("rank=").ok_or_else(|| line.expected(EXPECTED))?, [index, replicas, cap])
            }
            _ => return Err(line.expected(EXPECTED)),
        };
        let (index, rank) = (line.number(index)? as usize, RankId(line.number(rank)?));
        let replicas = line.after(replicas, "replicas=", EXPECTED)?;
        let cap = line.after(cap, "cap=", EXPECTED)?;
        let ranks = self.first.len() - 1;
        let known = self.program.stages.iter().find(|stage| stage.rank == rank);
        let fits = match known {
            Some(stage) => stage.replicas == replicas,
            None => rank.index() == ranks,
        };
        let more = if known.is_none() { u64::from(replicas) } else { 0 };
        let workers = u64::from(self.first[ranks]) + more;
        if index != self.program.stages.len()
            || replicas == 0
            || cap == 0
            || buckets == 0
            || workers > MAX_WORKERS
            || !fits
        {
            return Err(line.expected(EXPECTED));
        }
        if known.is_none() {
            self.first.push(workers as u32);
        }
        self.program.stages.push(ProgramStage { rank, replicas, cap, recompute, buckets, zero, shard_degree });
        Ok(())
    }

    fn rank(&self, worker: WorkerId) -> RankId {
        RankId(self.first.partition_point(|&first| first <= worker.0) as u32 - 1)
    }

    fn edge(&mut self, line: &Line<'_>, from: &str, to: &str) -> Result<(), ParseError> {
        let (from, to) = (StageId(line.number(from)?), StageId(line.number(to)?));
        let known = self.edges.insert((from, to), EdgeId(self.program.edges.len() as u32));
        if from >= to || to.index() >= self.program.stages.len() || known.is_some() {
            return Err(line.expected("a new edge from an earlier to a later stage"));
        }
        self.program.edges.push((from, to));
        Ok(())
    }

    fn worker(&self, line: &Line<'_>, name: &str) -> Result<WorkerId, ParseError> {
        const EXPECTED: &str = "a worker, RANK.REPLICA, of the stages above";
        let (rank, replica) = name.split_once('.').ok_or_else(|| line.expected(EXPECTED))?;
        let (rank, replica) = (line.number(rank)? as usize, line.number(replica)?);
        match (self.first.get(rank), self.first.get(rank.saturating_add(1))) {
            (Some(first), Some(next)) if replica < next - first => Ok(WorkerId(first + replica)),
            _ => Err(line.expected(EXPECTED)),
        }
    }

    fn instruction(&self, line: &Line<'_>, here: RankId) -> Result<Instruction, ParseError> {
        let stage = |word: &str| line.number(word).map(StageId);
        let token = |word: &str| line.after(word, "#", "a token, `#N`").map(Token);
        let version = |word: &str| line.after(word, "v", "a version, `vN`").map(Version);
        let bucket = |rest: &[&str]| rest.get(1).map_or(Ok(0), |bucket| line.number(bucket));
        let (words, taker) = match line.words[..] {
            [verb, what, arrow, peer, "as", taker, name] => (vec![verb, what, arrow, peer, name], Some(stage(taker)?)),
            _ => (line.words.clone(), None),
        };
        Ok(match words[..] {
            ["load", what] => match made(line, what)? {
                Work { stage, item, part: Phase::Forward } => Instruction::Load { stage, item },
                _ => return Err(line.expected("the forward whose data is loaded")),
            },
            ["send", what, ">", peer, name] => {
                let (peer, token) = (self.worker(line, peer)?, token(name)?);
                let (edge, kind, item) = self.transfer(line, what, taker, [here, self.rank(peer)])?;
                Instruction::Send { edge, item, kind, peer, token }
            }
            ["recv", what, "<", peer, name] => {
                let (peer, token) = (self.worker(line, peer)?, token(name)?);
                let (edge, kind, item) = self.transfer(line, what, taker, [self.rank(peer), here])?;
                Instruction::Recv { edge, item, kind, peer, token }
            }
            ["wait", name] => Instruction::Wait { token: token(name)? },
            [verb @ ("all-reduce" | "reduce-scatter"), of, "round", round, ref rest @ .., name]
                if matches!(rest, [] | ["bucket", _]) =>
            {
                let (stage, round, bucket, token) = (stage(of)?, line.number(round)?, bucket(rest)?, token(name)?);
                match verb {
                    "all-reduce" => Instruction::AllReduce { stage, round, bucket, token },
                    _ => Instruction::ReduceScatter { stage, round, bucket, token },
                }
            }
            ["step", of, "round", round, from, arrow @ (">" | "=>"), to, "mean", count] => Instruction::Step {
                stage: stage(of)?,
                round: line.number(round)?,
                from: version(from)?,
                to: version(to)?,
                count: line.number(count)?,
                in_place: arrow == "=>",
            },
            ["all-gather", of, made, ref rest @ .., name] if matches!(rest, [] | ["bucket", _]) => {
                let (stage, version, bucket) = (stage(of)?, version(made)?, bucket(rest)?);
                Instruction::AllGather { stage, version, bucket, token: token(name)? }
            }
            ["drop", of, name] => Instruction::Drop { stage: stage(of)?, version: version(name)? },
            ["checkpoint", of, name] => Instruction::Checkpoint { stage: stage(of)?, version: version(name)? },
            [word] | ["recompute", word] => {
                let (work, slot) = match word.strip_suffix(']').and_then(|word| word.split_once('[')) {
                    Some((work, slot)) => (work, Slot(line.number(slot)?)),
                    None => (word, Slot(0)),
                };
                let (work, version) = match work.split_once('@') {
                    Some((work, name)) => (work, version(name)?),
                    None => (work, Version(0)),
                };
                let (work, again) = (made(line, work)?, words.len() > 1);
                match work.part {
                    Phase::Forward if again => {
                        Instruction::Recompute { stage: work.stage, item: work.item, version, slot }
                    }
                    _ if again => return Err(line.expected("the forward to recompute")),
                    _ => work.instruction(version, slot),
                }
            }
            _ => return Err(line.expected("an instruction")),
        })
    }

    /// Parses `0F3` and the optional receiving stage, for the given sender and receiver ranks.
    fn transfer(
        &self,
        line: &Line<'_>,
        what: &str,
        taker: Option<StageId>,
        [sender, receiver]: [RankId; 2],
    ) -> Result<(EdgeId, Payload, MicrobatchId), ParseError> {
        let Work { stage: maker, item, part } = made(line, what)?;
        let kind = match part {
            Phase::Forward => Payload::Activation,
            Phase::Backward => Payload::Gradient,
            _ => return Err(line.expected("activations, `0F3`, or gradients, `1B3`")),
        };
        let rank_of = |stage: StageId| self.program.stages.get(stage.index()).map(|stage| stage.rank);
        let mut held = (0..).map(StageId).zip(&self.program.stages).filter(|(_, stage)| stage.rank == receiver);
        let taker = match (taker, held.next(), held.next()) {
            (Some(taker), _, Some(_)) => taker,
            (None, Some((only, _)), None) => only,
            _ => return Err(line.expected("`as STAGE` if and only if the receiver has several stages")),
        };
        let ends = if kind == Payload::Activation { (maker, taker) } else { (taker, maker) };
        match self.edges.get(&ends) {
            Some(&edge) if rank_of(maker) == Some(sender) && rank_of(taker) == Some(receiver) => Ok((edge, kind, item)),
            _ => Err(line.expected("a transfer over an edge of the program")),
        }
    }
}

fn made(line: &Line<'_>, word: &str) -> Result<Work, ParseError> {
    let wrong = || line.expected("an instruction");
    let (at, letter) = word.char_indices().find(|(_, c)| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let part = Phase::ALL.into_iter().find(|part| part.letter() == letter).ok_or_else(wrong)?;
    Ok(Work { stage: StageId(line.number(&word[..at])?), item: MicrobatchId(line.number(&word[at + 1..])?), part })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Pipeline;
    use crate::schedule::generators::schedule;
    use crate::schedule::semantics::StepCount;

    const TWO_ONE: &str = "\
program 1f1b-rr {
  items 3
  microbatches 1
  stage 0 replicas=2 cap=2
  stage 1 replicas=1 cap=1
  edge 0 > 1
  worker 0.0 {
    recv 1B0 < 1.0 #0
    load 0F0
    0F0
    send 0F0 > 1.0 #1
    recv 1B2 < 1.0 #2
    load 0F2
    0F2[1]
    send 0F2 > 1.0 #3
    wait #0
    0B0
    all-reduce 0 round 0 #4
    wait #1
    wait #2
    0B2[1]
    all-reduce 0 round 1 #5
    wait #3
    wait #4
    step 0 round 0 v0 => v1 mean 2
    wait #5
    step 0 round 1 v1 => v2 mean 1
  }
";

    #[test]
    fn prints_what_a_worker_does() {
        let program =
            schedule(Schedule::OneFOneBRr, &Pipeline::balanced(&[2, 1], 1.0), StepCount::minibatches(3)).unwrap();
        let text = program.to_string();
        assert!(text.starts_with(TWO_ONE), "{text}");
    }

    #[test]
    fn reads_back_what_it_printed() {
        let count = StepCount { minibatches: 2, microbatches: 3 };
        for name in Schedule::GENERATED {
            let count = if name.is_round_robin() { StepCount::minibatches(7) } else { count };
            let pipeline = match name {
                Schedule::Interleaved | Schedule::Bfs => Pipeline::balanced(&[2; 4], 2.0).looped(2),
                Schedule::Zbv | Schedule::DualPipeV => Pipeline::balanced(&[2; 4], 2.0).folded(),
                _ => Pipeline::balanced(&[1, 3, 2], 2.0),
            };
            let program = schedule(name, &pipeline, count).unwrap();
            assert_eq!(program.to_string().parse::<Program>(), Ok(program));
        }
    }

    #[test]
    fn says_where_it_stumbled() {
        let broken = TWO_ONE.replace("send 0F2 > 1.0", "send 1F2 > 1.0");
        let error = broken.parse::<Program>().unwrap_err();
        assert_eq!((error.line, error.found.as_str()), (15, "send 1F2 > 1.0 #3"));
        let error = TWO_ONE.parse::<Program>().unwrap_err();
        assert_eq!(error.found, "the end of the text");
        for text in ["", "program", "program x {", "program gpipe {\nitems 99999999999\n"] {
            assert!(text.parse::<Program>().is_err());
        }
    }
}
