//! Programs as text, printed and read back.
//!
//! ```text
//! program 1f1b-rr {
//!   items 2
//!   microbatches 1
//!   stage 0 replicas=2 cap=2
//!   stage 1 replicas=1 cap=1
//!   edge 0 > 1
//!   worker 0.0 {
//!     load 0                          fetch item 0
//!     0F0                             stage 0, forward, item 0; version 0, slot 0
//!     send 0F0 > 1.0 #0               what 0F0 made, to worker 1.0; token 0
//!     recv 1B0 < 1.0 #1               what 1B0 made, from worker 1.0
//!     wait #1
//!     0B2@v1[3]                       backward of item 2 with version 1, in slot 3
//!     all-reduce 0 round 0 #2
//!     step 0 round 0 v0 > v1 mean 2   `=>` instead of `>` where v1 is written over v0
//!     drop v0
//!   }
//! }
//! ```
//!
//! Version 0 and slot 0 are left out. The edge of a transfer is told by the stage that made it and the peer's stage.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use crate::plan::StageId;
use crate::schedule::{
    EdgeId, Instruction, MAX_WORKERS, MicrobatchId, Payload, Program, ProgramStage, Schedule, Slot, Token, Version,
    WorkerId, WorkerProgram,
};

/// Where and why a text is not a program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: expected {expected}, found `{found}`")]
pub struct ParseError {
    /// The line, from 1.
    pub line: usize,
    /// What could have stood there.
    pub expected: &'static str,
    /// What stands there.
    pub found: String,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program {} {{", self.schedule)?;
        writeln!(f, "  items {}", self.items)?;
        writeln!(f, "  microbatches {}", self.microbatches)?;
        for (index, stage) in self.stages.iter().enumerate() {
            writeln!(f, "  stage {index} replicas={} cap={}", stage.replicas, stage.cap)?;
        }
        for (from, to) in &self.edges {
            writeln!(f, "  edge {} > {}", from.0, to.0)?;
        }
        for worker in &self.workers {
            writeln!(f, "  worker {}.{} {{", worker.stage.0, worker.replica)?;
            for instruction in &worker.instructions {
                writeln!(f, "    {}", self.show(instruction))?;
            }
            writeln!(f, "  }}")?;
        }
        writeln!(f, "}}")
    }
}

impl Program {
    /// One instruction as text. It needs the program for the names of workers and stages.
    pub fn show(&self, instruction: &Instruction) -> String {
        let made_by = |edge: EdgeId, kind: Payload, item: MicrobatchId| {
            let (from, to) = self.edges.get(edge.index()).copied().unwrap_or((StageId(0), StageId(0)));
            match kind {
                Payload::Activation => format!("{}F{}", from.0, item.0),
                Payload::Gradient => format!("{}B{}", to.0, item.0),
            }
        };
        match *instruction {
            Instruction::Load { item } => format!("load {}", item.0),
            Instruction::Forward { stage, item, version, slot } => compute(stage, 'F', item, version, slot),
            Instruction::Backward { stage, item, version, slot } => compute(stage, 'B', item, version, slot),
            Instruction::Send { edge, item, kind, peer, token } => {
                format!("send {} > {} #{}", made_by(edge, kind, item), self.worker_name(peer), token.0)
            }
            Instruction::Recv { edge, item, kind, peer, token } => {
                format!("recv {} < {} #{}", made_by(edge, kind, item), self.worker_name(peer), token.0)
            }
            Instruction::Wait { token } => format!("wait #{}", token.0),
            Instruction::AllReduce { stage, round, token } => {
                format!("all-reduce {} round {round} #{}", stage.0, token.0)
            }
            Instruction::Step { stage, round, from, to, count, in_place } => {
                let arrow = if in_place { "=>" } else { ">" };
                format!("step {} round {round} v{} {arrow} v{} mean {count}", stage.0, from.0, to.0)
            }
            Instruction::Drop { version } => format!("drop v{}", version.0),
        }
    }
}

fn compute(stage: StageId, letter: char, item: MicrobatchId, version: Version, slot: Slot) -> String {
    let mut text = format!("{}{letter}{}", stage.0, item.0);
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
                    let stage = StageId(reader.first.partition_point(|&first| first <= worker.0) as u32 - 1);
                    loop {
                        let line = next();
                        if line.words == ["}"] {
                            break;
                        }
                        instructions.push(reader.instruction(&line, stage)?);
                    }
                    let replica = worker.0 - reader.first[stage.index()];
                    reader.program.workers.push(WorkerProgram { stage, replica, instructions });
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
        // `+1` is a number to Rust and not to us: a program has one way to be written.
        let plain = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| word.parse().ok()).flatten().ok_or_else(|| self.expected("a number below 4294967296"))
    }

    fn after(&self, word: &str, prefix: &str, expected: &'static str) -> Result<u32, ParseError> {
        word.strip_prefix(prefix).ok_or_else(|| self.expected(expected)).and_then(|rest| self.number(rest))
    }
}

struct Reader {
    program: Program,
    /// The first worker of each stage, and the number of workers.
    first: Vec<u32>,
    edges: HashMap<(StageId, StageId), EdgeId>,
}

impl Reader {
    fn stage(&mut self, line: &Line<'_>) -> Result<(), ParseError> {
        const EXPECTED: &str = "`stage N replicas=N cap=N`, stages in order, replicas and cap at least 1";
        let ["stage", index, replicas, cap] = line.words[..] else { return Err(line.expected(EXPECTED)) };
        let index = line.number(index)? as usize;
        let replicas = line.after(replicas, "replicas=", EXPECTED)?;
        let cap = line.after(cap, "cap=", EXPECTED)?;
        let workers = u64::from(self.first[self.first.len() - 1]) + u64::from(replicas);
        if index != self.program.stages.len() || replicas == 0 || cap == 0 || workers > MAX_WORKERS {
            return Err(line.expected(EXPECTED));
        }
        self.first.push(workers as u32);
        self.program.stages.push(ProgramStage { replicas, cap });
        Ok(())
    }

    fn edge(&mut self, line: &Line<'_>, from: &str, to: &str) -> Result<(), ParseError> {
        let (from, to) = (StageId(line.number(from)?), StageId(line.number(to)?));
        let known = self.edges.insert((from, to), EdgeId(self.program.edges.len() as u32));
        if from >= to || to.index() >= self.program.stages.len() || known.is_some() {
            return Err(line.expected("an edge that is new, from an earlier to a later stage"));
        }
        self.program.edges.push((from, to));
        Ok(())
    }

    fn worker(&self, line: &Line<'_>, name: &str) -> Result<WorkerId, ParseError> {
        const EXPECTED: &str = "a worker, STAGE.REPLICA, of a stage above";
        let (stage, replica) = name.split_once('.').ok_or_else(|| line.expected(EXPECTED))?;
        let (stage, replica) = (line.number(stage)? as usize, line.number(replica)?);
        match self.program.stages.get(stage) {
            Some(known) if replica < known.replicas => Ok(WorkerId(self.first[stage] + replica)),
            _ => Err(line.expected(EXPECTED)),
        }
    }

    fn instruction(&self, line: &Line<'_>, here: StageId) -> Result<Instruction, ParseError> {
        let stage = |word: &str| line.number(word).map(StageId);
        let token = |word: &str| line.after(word, "#", "a token, `#N`").map(Token);
        let version = |word: &str| line.after(word, "v", "a version, `vN`").map(Version);
        Ok(match line.words[..] {
            ["load", item] => Instruction::Load { item: MicrobatchId(line.number(item)?) },
            ["send", what, ">", peer, name] => {
                let (peer, token) = (self.worker(line, peer)?, token(name)?);
                let (edge, kind, item) = self.transfer(line, what, here, peer, true)?;
                Instruction::Send { edge, item, kind, peer, token }
            }
            ["recv", what, "<", peer, name] => {
                let (peer, token) = (self.worker(line, peer)?, token(name)?);
                let (edge, kind, item) = self.transfer(line, what, here, peer, false)?;
                Instruction::Recv { edge, item, kind, peer, token }
            }
            ["wait", name] => Instruction::Wait { token: token(name)? },
            ["all-reduce", of, "round", round, name] => {
                Instruction::AllReduce { stage: stage(of)?, round: line.number(round)?, token: token(name)? }
            }
            ["step", of, "round", round, from, arrow @ (">" | "=>"), to, "mean", count] => Instruction::Step {
                stage: stage(of)?,
                round: line.number(round)?,
                from: version(from)?,
                to: version(to)?,
                count: line.number(count)?,
                in_place: arrow == "=>",
            },
            ["drop", name] => Instruction::Drop { version: version(name)? },
            [word] => {
                let (work, slot) = match word.strip_suffix(']').and_then(|word| word.split_once('[')) {
                    Some((work, slot)) => (work, Slot(line.number(slot)?)),
                    None => (word, Slot(0)),
                };
                let (work, version) = match work.split_once('@') {
                    Some((work, name)) => (work, version(name)?),
                    None => (work, Version(0)),
                };
                let (stage, kind, item) = made(line, work)?;
                match kind {
                    Payload::Activation => Instruction::Forward { stage, item, version, slot },
                    Payload::Gradient => Instruction::Backward { stage, item, version, slot },
                }
            }
            _ => return Err(line.expected("an instruction")),
        })
    }

    /// What travels, from `0F3` and the two ends.
    fn transfer(
        &self,
        line: &Line<'_>,
        what: &str,
        here: StageId,
        peer: WorkerId,
        sending: bool,
    ) -> Result<(EdgeId, Payload, MicrobatchId), ParseError> {
        let (stage, kind, item) = made(line, what)?;
        let peer = StageId(self.first.partition_point(|&first| first <= peer.0) as u32 - 1);
        let (sender, receiver) = if sending { (here, peer) } else { (peer, here) };
        let ends = if kind == Payload::Activation { (sender, receiver) } else { (receiver, sender) };
        match self.edges.get(&ends) {
            Some(&edge) if stage == sender => Ok((edge, kind, item)),
            _ => Err(line.expected("a transfer over an edge of the program")),
        }
    }
}

fn made(line: &Line<'_>, word: &str) -> Result<(StageId, Payload, MicrobatchId), ParseError> {
    let letter = word.find(['F', 'B']).ok_or_else(|| line.expected("an instruction"))?;
    let kind = if word.as_bytes()[letter] == b'F' { Payload::Activation } else { Payload::Gradient };
    Ok((StageId(line.number(&word[..letter])?), kind, MicrobatchId(line.number(&word[letter + 1..])?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Pipeline;
    use crate::schedule::rule::StepCount;
    use crate::schedule::scheduler::schedule;

    const TWO_ONE: &str = "\
program 1f1b-rr {
  items 3
  microbatches 1
  stage 0 replicas=2 cap=2
  stage 1 replicas=1 cap=1
  edge 0 > 1
  worker 0.0 {
    recv 1B0 < 1.0 #0
    load 0
    0F0
    send 0F0 > 1.0 #1
    recv 1B2 < 1.0 #2
    load 2
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
        for name in Schedule::ALL {
            let count = if name.is_round_robin() { StepCount::minibatches(7) } else { count };
            let program = schedule(name, &Pipeline::balanced(&[1, 3, 2], 2.0), count).unwrap();
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
