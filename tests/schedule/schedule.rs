//! Random pipelines: every schedule's programs pass the checker, and programs with a mistake do not.
//!
//! `PIPEC_PROGRAMS` sets the number of programs, by default 10,000; a long run takes 100,000.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use compiler::plan::StageId;
use compiler::plan::schedule::Schedule;
use compiler::schedule::action::Phase;
use compiler::schedule::check::error::CheckError;
use compiler::schedule::check::verify::check;
use compiler::schedule::generators::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::schedule::{
    Bucket, Edge, EdgeId, Instruction, MicrobatchId, Payload, Pipeline, Program, Slot, StageSpec, Token, Version,
    WorkerId,
};

/// SplitMix64: the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }
}

fn random_pipeline(random: &mut Random, name: Schedule) -> Pipeline {
    let chunks = match name {
        Schedule::Interleaved | Schedule::Bfs => 1 + random.below(3),
        Schedule::Zbv | Schedule::DualPipeV => 2,
        _ => 1,
    };
    let has_equal_replicas = chunks > 1 || matches!(name, Schedule::Interleaved | Schedule::Bfs);
    let ranks = 1 + random.below(if chunks == 1 { 5 } else { 4 });
    let stages = ranks * chunks;
    let replicas = 1 + random.below(3);
    let mut time = |limit: u32| f64::from(random.below(limit * 4)) / 4.0;
    let times: Vec<[f64; 3]> = (0..stages).map(|_| [time(5), time(9), time(3)]).collect();
    let specs = times.iter().map(|&[forward, backward, all_reduce]| StageSpec {
        all_reduce,
        recompute: (forward as u32 % 3 == 1).then(|| forward.min(backward)),
        ..StageSpec::new(if has_equal_replicas { replicas } else { 1 + random.below(4) }, forward, backward)
    });
    let mut pipeline = Pipeline::chain(specs.collect());
    for stage in &mut pipeline.stages {
        if stage.replicas > 1 && random.one_in(3) {
            let count = 2 + random.below(3);
            let ready = |at| 1.0 - f64::from(count - 1 - at) / 8.0;
            stage.buckets = (0..count).map(|at| Bucket { ready: ready(at), share: 1.0 / f64::from(count) }).collect();
        }
    }
    if random.one_in(2) {
        for stage in &mut pipeline.stages {
            stage.cap = 1 + random.below(6);
        }
    }
    pipeline = match name {
        Schedule::Zbv | Schedule::DualPipeV => pipeline.folded(),
        _ => pipeline.looped(ranks),
    };
    if random.one_in(5) {
        // Stages without inputs or outputs.
        pipeline.edges.retain(|_| !random.one_in(3));
    }
    for from in 0..stages {
        for to in from + 2..stages {
            if random.one_in(4) {
                pipeline.edges.push(Edge::new(from, to));
            }
        }
    }
    for edge in &mut pipeline.edges {
        edge.forward_us = f64::from(random.below(3));
        edge.backward_us = f64::from(random.below(3));
    }
    pipeline
}

fn random_program(random: &mut Random) -> (Pipeline, Program) {
    let name = Schedule::GENERATED[random.below(Schedule::GENERATED.len() as u32) as usize];
    let pipeline = random_pipeline(random, name);
    let count = if name.is_round_robin() {
        StepCount::minibatches(1 + random.below(20))
    } else {
        StepCount { minibatches: 1 + random.below(4), microbatches: 1 + random.below(12) }
    };
    let program = schedule(name, &pipeline, count);
    let program = program.unwrap_or_else(|error| panic!("{name}, {count:?}: {error}\n{pipeline:?}"));
    (pipeline, program)
}

/// Covers all schedules, unequal replicas if permitted, several stages per rank, and skip edges.
#[test]
fn every_program_passes_and_reads_back() {
    let programs = std::env::var("PIPEC_PROGRAMS").ok().and_then(|count| count.parse().ok()).unwrap_or(10_000);
    let mut counts: BTreeMap<&str, [u32; 3]> = BTreeMap::new();
    for seed in 0..programs {
        let (pipeline, program) = random_program(&mut Random(seed));
        let replicas = |stage: &StageSpec| stage.replicas;
        let is_unequal = pipeline.stages.iter().any(|stage| replicas(stage) != replicas(&pipeline.stages[0]));
        let has_skips = pipeline.edges.iter().any(|edge| edge.to.0 > edge.from.0 + 1);
        let kinds = counts.entry(program.schedule.name()).or_default();
        for (count, has_property) in kinds.iter_mut().zip([is_unequal, pipeline.chunks() > 1, has_skips]) {
            *count += u32::from(has_property);
        }
        if let Err(error) = check(&program) {
            panic!("seed {seed}: {error}\n{pipeline:?}\n{program}");
        }
        if seed % 4 == 0 {
            assert_eq!(program.to_string().parse::<Program>().as_ref(), Ok(&program), "seed {seed}");
        }
    }
    println!("{programs} programs; with unequal replicas, several stages on a rank, skips: {counts:?}");
    for name in Schedule::GENERATED.iter().filter(|_| programs >= 1000) {
        let [is_unequal, chunks, has_skips] = counts[name.name()];
        let is_chunked = matches!(name, Schedule::Interleaved | Schedule::Bfs | Schedule::Zbv | Schedule::DualPipeV);
        assert!(has_skips > 0 && (is_unequal > 0) != is_chunked && (chunks > 0) == is_chunked, "{name}: {counts:?}");
    }
}

#[test]
fn the_same_pipeline_gives_the_same_program() {
    for seed in 0..50 {
        assert_eq!(random_program(&mut Random(seed)).1, random_program(&mut Random(seed)).1, "seed {seed}");
    }
}

#[test]
fn times_choose_order_and_never_versions() {
    for seed in 0..200 {
        let (mut pipeline, program) = random_program(&mut Random(seed));
        let mut random = Random(seed + 1_000_000);
        for stage in &mut pipeline.stages {
            stage.forward = f64::from(random.below(7));
            stage.backward = f64::from(random.below(7));
            stage.weight = stage.backward / 2.0;
        }
        let count = StepCount { minibatches: program.items / program.microbatches, microbatches: program.microbatches };
        let rescheduled = schedule(program.schedule, &pipeline, count).unwrap();
        for (a, b) in program.workers.iter().zip(&rescheduled.workers) {
            let versions = |instructions: &[Instruction], kind| {
                let works = instructions.iter().filter_map(Instruction::work).filter(|(work, ..)| match kind {
                    Payload::Activation => work.part == Phase::Forward,
                    Payload::Gradient => work.part.ends(),
                });
                let mut works: Vec<_> = works.map(|(work, version, _)| (work.stage, work.item, version)).collect();
                works.sort_unstable();
                works
            };
            for kind in [Payload::Activation, Payload::Gradient] {
                assert_eq!(versions(&a.instructions, kind), versions(&b.instructions, kind), "seed {seed}");
            }
        }
    }
}

/// A small mistake that changes the program's meaning; `None` if the drawn one is not applicable.
fn mutate(random: &mut Random, program: &Program) -> Option<(String, Program)> {
    let mut broken = program.clone();
    let workers = broken.workers.len() as u32;
    let worker = random.below(workers) as usize;
    let trains = program.schedule.trains();
    let stages = program.stages.len() as u32;
    let edges = program.edges.len() as u32;
    let list = &mut broken.workers[worker].instructions;
    if list.is_empty() {
        return None;
    }
    let at = random.below(list.len() as u32) as usize;
    let instruction = list[at];
    let change = match random.below(7) {
        0 => {
            list.remove(at);
            "removed"
        }
        1 => {
            list.insert(at, instruction);
            "doubled"
        }
        2 => {
            // Work uses a message before its Wait.
            let Instruction::Wait { token } = instruction else { return None };
            let is_receive = |i: &Instruction| matches!(i, Instruction::Recv { token: posted, .. } if *posted == token);
            let is_recv = list[..at].iter().any(is_receive);
            let next = (at + 1..list.len()).find(|&next| list[next].work().is_some())?;
            if !is_recv {
                return None;
            }
            list.remove(at);
            list.insert(next, instruction);
            "waited too late"
        }
        3 => {
            // Two instructions of one kind are swapped.
            let kind = std::mem::discriminant(&instruction);
            let stage = instruction.work()?.0.stage;
            let other = (at + 1..list.len()).find(|&other| {
                let is_same_stage = list[other].work().is_some_and(|(work, ..)| work.stage == stage);
                is_same_stage && std::mem::discriminant(&list[other]) == kind
            })?;
            list.swap(at, other);
            "swapped"
        }
        4 => {
            // A Send or all-reduce moves before the work that produces its data.
            if !matches!(instruction, Instruction::Send { .. } | Instruction::AllReduce { .. }) {
                return None;
            }
            let work = (0..at).rev().find(|&work| list[work].work().is_some())?;
            // Buckets may be posted long before the round's last backward, except bucket 0.
            if let Instruction::AllReduce { stage, bucket: 0, .. } = instruction
                && program.stages[stage.index()].buckets > 1
                && list[work].work().is_none_or(|(work, ..)| work.stage != stage || !work.part.ends())
            {
                return None;
            }
            // A replica without micro-batches in a round contributes when the previous round is applied, not after
            // work.
            if matches!(instruction, Instruction::AllReduce { .. })
                && list[work..at].iter().any(|i| matches!(i, Instruction::Step { .. }))
            {
                return None;
            }
            list.remove(at);
            list.insert(work, instruction);
            "sent too early"
        }
        5 => {
            // Two all-reduces are swapped, so replicas reach them in different orders.
            let is_reduce = |i: &Instruction| matches!(i, Instruction::AllReduce { .. });
            let other = (at + 1..list.len()).find(|&other| is_reduce(&list[other]))?;
            if !is_reduce(&instruction) {
                return None;
            }
            list.swap(at, other);
            "reduced in another order"
        }
        _ => {
            let offset = 1 + random.below(3);
            let field = random.below(4);
            let other = |n: u32, of: u32| (n + 1 + offset % of.max(2).saturating_sub(1)) % of.max(2);
            match &mut list[at] {
                Instruction::Load { item, .. } => *item = MicrobatchId(item.0 + offset),
                Instruction::Forward { stage, item, version, slot }
                | Instruction::Recompute { stage, item, version, slot }
                | Instruction::Backward { stage, item, version, slot }
                | Instruction::BackwardInput { stage, item, version, slot }
                | Instruction::BackwardWeight { stage, item, version, slot } => {
                    match field {
                        0 => *stage = StageId(other(stage.0, stages)),
                        1 => *item = MicrobatchId(item.0 + offset),
                        2 => *version = Version(version.0 + offset),
                        // In inference any free slot is valid.
                        _ if trains => *slot = Slot(slot.0 + offset),
                        _ => return None,
                    }
                }
                Instruction::Send { edge, item, kind, peer, token }
                | Instruction::Recv { edge, item, kind, peer, token } => match random.below(5) {
                    0 => *edge = EdgeId(other(edge.0, edges)),
                    1 => *item = MicrobatchId(item.0 + offset),
                    2 if *kind == Payload::Activation => *kind = Payload::Gradient,
                    2 => *kind = Payload::Activation,
                    3 => *peer = WorkerId(other(peer.0, workers)),
                    _ => *token = Token(token.0 + 1_000_000),
                },
                Instruction::Wait { token } => *token = Token(token.0 + 1_000_000),
                Instruction::AllReduce { stage, round, bucket, token } => match field {
                    0 => *stage = StageId(other(stage.0, stages)),
                    1 => *round += offset,
                    2 => *bucket += offset,
                    _ => *token = Token(token.0 + 1_000_000),
                },
                Instruction::Step { stage, round, from, to, count, in_place } => match random.below(6) {
                    0 => *stage = StageId(other(stage.0, stages)),
                    1 => *round += offset,
                    2 => *from = Version(from.0 + offset),
                    3 => *to = Version(to.0 + offset),
                    4 => *count += offset,
                    _ => *in_place = !*in_place,
                },
                Instruction::Drop { version, .. } => *version = Version(version.0 + offset),
                Instruction::ReduceScatter { .. } | Instruction::AllGather { .. } | Instruction::Checkpoint { .. } => {
                    return None;
                }
            }
            "changed"
        }
    };
    if broken == *program {
        return None;
    }
    Some((format!("worker {worker}, {at}: {change} `{}`", program.show(&instruction)), broken))
}

#[test]
fn mistakes_are_found() {
    let mut count = 0;
    for seed in 0..6000 {
        let mut random = Random(seed);
        let (_, program) = random_program(&mut random);
        let Some((change, broken)) = mutate(&mut random, &program) else { continue };
        match check(&broken) {
            Ok(()) => panic!("seed {seed}: {change} went unnoticed in\n{program}"),
            Err(CheckError::Shape { reason }) => {
                panic!("seed {seed}: {change} is reported as `{reason}`, without its place")
            }
            Err(CheckError::At { .. } | CheckError::End { .. }) => {}
        }
        count += 1;
    }
    assert!(count >= 2000, "only {count} mistakes were made");
}

/// A program with one mistake, and the instructions at one of which it must be reported.
struct FaultyProgram {
    what: String,
    broken: Program,
    locations: Vec<(usize, RangeInclusive<usize>)>,
}

const KINDS: [&str; 6] = [
    "dropped communication",
    "doubled",
    "swapped communication",
    "wrong version",
    "missing wait",
    "order of collectives",
];

/// From a position to the end of the list, where unfinished work is reported.
const END: usize = usize::MAX;

/// The peers of a communication: worker and list position.
fn find_peers(program: &Program, worker: usize, instruction_of_worker: Instruction) -> Vec<(usize, usize)> {
    let is_peer = |other: usize, instruction: &Instruction| match (instruction_of_worker, *instruction) {
        (
            Instruction::Send { edge, item, kind, peer, .. },
            Instruction::Recv { edge: e, item: i, kind: k, peer: p, .. },
        )
        | (
            Instruction::Recv { edge, item, kind, peer, .. },
            Instruction::Send { edge: e, item: i, kind: k, peer: p, .. },
        ) => (edge, item, kind) == (e, i, k) && (peer.index(), p.index()) == (other, worker),
        (
            Instruction::AllReduce { stage, round, bucket, .. },
            Instruction::AllReduce { stage: s, round: r, bucket: b, .. },
        ) => other != worker && (stage, round, bucket) == (s, r, b),
        _ => false,
    };
    let lists = program.workers.iter().enumerate();
    let peers = lists.flat_map(|(other, list)| {
        let places = list.instructions.iter().enumerate();
        places.filter(move |(_, instruction)| is_peer(other, instruction)).map(move |(at, _)| (other, at))
    });
    peers.collect()
}

fn break_program(random: &mut Random, program: &Program, kind: usize) -> Option<FaultyProgram> {
    let mut broken = program.clone();
    let worker = random.below(program.workers.len() as u32) as usize;
    let list = &mut broken.workers[worker].instructions;
    let is_candidate = |instruction: &Instruction| match (kind, instruction) {
        (0, Instruction::Send { .. } | Instruction::Recv { .. } | Instruction::AllReduce { .. }) | (1, _) => true,
        (2, Instruction::Send { .. } | Instruction::Recv { .. }) | (4, Instruction::Wait { .. }) => true,
        (3, Instruction::Step { .. }) | (5, Instruction::AllReduce { .. }) => true,
        (3, instruction) => instruction.work().is_some(),
        _ => false,
    };
    let candidates: Vec<usize> = (0..list.len()).filter(|&at| is_candidate(&list[at])).collect();
    if candidates.is_empty() {
        return None;
    }
    let at = candidates[random.below(candidates.len() as u32) as usize];
    let instruction = list[at];
    let from = |others: Vec<(usize, usize)>| others.into_iter().map(|(other, at)| (other, at..=END));
    let locations = match kind {
        0 => {
            list.remove(at);
            from(find_peers(program, worker, instruction)).chain([(worker, at..=END)]).collect()
        }
        1 => {
            list.insert(at, instruction);
            vec![(worker, at + 1..=at + 1)]
        }
        2 => {
            let channel = |instruction: &Instruction| match *instruction {
                Instruction::Send { edge, kind, peer, .. } => Some((true, edge, kind, peer)),
                Instruction::Recv { edge, kind, peer, .. } => Some((false, edge, kind, peer)),
                _ => None,
            };
            let other = (at + 1..list.len()).find(|&other| channel(&list[other]) == channel(&instruction))?;
            list.swap(at, other);
            match instruction {
                // It sends what does not exist yet.
                Instruction::Send { .. } => vec![(worker, at..=at)],
                _ => {
                    let sends =
                        find_peers(program, worker, instruction).into_iter().map(|(other, at)| (other, at..=at));
                    sends.chain([(worker, at..=other)]).collect()
                }
            }
        }
        3 => {
            let offset = 1 + random.below(3);
            match &mut list[at] {
                Instruction::Forward { version, .. }
                | Instruction::Backward { version, .. }
                | Instruction::BackwardInput { version, .. }
                | Instruction::BackwardWeight { version, .. } => version.0 += offset,
                Instruction::Step { from, .. } if offset == 1 => from.0 += offset,
                Instruction::Step { to, .. } => to.0 += offset,
                _ => return None,
            }
            vec![(worker, at..=at)]
        }
        4 => {
            let Instruction::Wait { token } = instruction else { return None };
            list.remove(at);
            let post = list[..at].iter().rev().find(|i| match **i {
                Instruction::Send { token: of, .. }
                | Instruction::Recv { token: of, .. }
                | Instruction::AllReduce { token: of, .. } => of == token,
                _ => false,
            });
            match *post? {
                // The work that uses the message.
                Instruction::Recv { edge, item, kind, .. } => {
                    let (from, to) = program.edges[edge.index()];
                    let is_user = |i: &Instruction| match i.work() {
                        Some((work, ..)) if kind == Payload::Activation => {
                            (work.stage, work.item, work.part) == (to, item, Phase::Forward)
                        }
                        Some((work, ..)) => (work.stage, work.item) == (from, item) && work.part.makes_gradients(),
                        None => false,
                    };
                    let user = (at..list.len()).find(|&user| is_user(&list[user]))?;
                    vec![(worker, user..=user)]
                }
                Instruction::AllReduce { stage, round, .. } => {
                    let is_step = |i: &Instruction| match *i {
                        Instruction::Step { stage: of, round: r, .. } => (of, r) == (stage, round),
                        _ => false,
                    };
                    let step = (at..list.len()).find(|&step| is_step(&list[step]))?;
                    vec![(worker, at..=step)]
                }
                // A buffer is overwritten while in use, or the transfer is unfinished at the end.
                _ => vec![(worker, at..=END)],
            }
        }
        _ => {
            let is_reduce = |i: &Instruction| matches!(i, Instruction::AllReduce { .. });
            let other = (at + 1..list.len()).find(|&other| is_reduce(&list[other]))?;
            list.swap(at, other);
            from(find_peers(program, worker, instruction)).chain([(worker, at..=END)]).collect()
        }
    };
    let what = format!("{} at worker {worker}, {at} (`{}`)", KINDS[kind], program.show(&instruction));
    Some(FaultyProgram { what, broken, locations })
}

/// Over a thousand mistakes of six kinds, each reported at its location, at its peer, or where it first has an effect.
#[test]
fn random_errors_are_located() {
    let mut counts = [0; KINDS.len()];
    for seed in 0..4000 {
        let mut random = Random(seed);
        let (_, program) = random_program(&mut random);
        let kind = seed as usize % KINDS.len();
        let Some(FaultyProgram { what: fault, broken, locations }) = break_program(&mut random, &program, kind) else {
            continue;
        };
        let error = check(&broken).expect_err(&format!("seed {seed}: {fault}"));
        let (name, place) = match &error {
            CheckError::Shape { reason } => panic!("seed {seed}: {fault} is reported as `{reason}`"),
            CheckError::At { worker, at, .. } => (worker, *at),
            CheckError::End { worker, .. } => (worker, END),
        };
        let is_match = |(worker, places): &(usize, RangeInclusive<usize>)| {
            *name == program.worker_name(WorkerId(*worker as u32)) && places.contains(&place)
        };
        assert!(
            locations.iter().any(is_match),
            "seed {seed}: {fault} is reported as: {error}; expected at {locations:?}\n{program}"
        );
        counts[kind] += 1;
    }
    println!("{:?}", KINDS.iter().zip(counts).collect::<Vec<_>>());
    assert!(counts.iter().sum::<i32>() >= 1000 && counts.iter().all(|&count| count >= 100), "{counts:?}");
}

#[test]
fn errors_are_located() {
    let pipeline = Pipeline::balanced(&[1, 1], 2.0);
    let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(2)).unwrap();
    let text = program.to_string().replace("1B1@v1", "1B1");
    let error = check(&text.parse().unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "worker 1.0, instruction 12 (`1B1`): weights: the forward used version 1, this backward uses 0"
    );
    let text = program.to_string().replace("    wait #0\n    load 1F0\n    1F0\n", "    load 1F0\n    1F0\n");
    let error = check(&text.parse().unwrap()).unwrap_err().to_string();
    assert!(error.ends_with("no Wait yet for the activations of micro-batch 0 over edge 0"), "{error}");
}

#[test]
fn opposite_orders_of_waiting_are_a_deadlock() {
    // Each stage waits for the other's activations before it sends its output.
    let text = "program inference {
      items 1
      microbatches 1
      stage 0 replicas=1 cap=1
      stage 1 replicas=1 cap=1
      edge 0 > 1
      worker 0.0 {
        load 0F0
        0F0
        send 0F0 > 1.0 #0
        wait #0
      }
      worker 1.0 {
        load 1F0
        1F0
      }
    }";
    let error = check(&text.parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("worker 1.0, instruction 1"), "{error}");
    let stuck = text
        .replace("load 1F0\n        1F0", "recv 0F0 < 0.0 #1\n wait #1\n load 1F0\n 1F0")
        .replace("send 0F0 > 1.0 #0\n        wait #0\n", "");
    let error = check(&stuck.parse().unwrap()).unwrap_err().to_string();
    assert_eq!(error, "worker 1.0, instruction 1 (`wait #1`): deadlock: 0.0 never sends micro-batch 0");
}
