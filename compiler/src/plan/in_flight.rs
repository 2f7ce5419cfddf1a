//! How many micro-batches one replica of a stage may have in flight, and how many weight versions it holds for them.
//!
//! For 1F1B-RR the published rule is ceil(n_s / r_s), n_s being the workers from stage s to the end and r_s its replicas. It
//! starves plans such as 1-3-1, so a plan may state larger caps; each costs stash memory and staleness. For inference an item is in
//! flight until all who listen have begun with it: with two, a stage works on one while the other is sent; where stages are skipped,
//! a plan states more.
//!
//! For schedules with a flush the figures are what the schedule can reach at its peak, in whole micro-batches of a stage:
//!
//! | schedule | in flight, at most the micro-batches of the minibatch |
//! | --- | --- |
//! | gpipe, bfs, csv | all |
//! | 1f1b, 2bw | workers from the stage to the end |
//! | interleaved | that, and (p - 1) / v more for v chunks on p workers |
//! | zb-h1, zbv | p |
//! | dualpipev | p + 1 |
//! | zb-h2 | 2 p - 1 |

//! Where backwards are split, some of the items in flight are between the halves of theirs. Under zb-h1 and zb-h2 the stage at place s
//! of its pipeline leaves d s second halves for later, d being 1 and 2, so that d s + 1 are at the most; replicas share the
//! workers before them. What a V leaves is read off its table, and no more than is in flight.
//!
//! With vertical sync a minibatch uses in every stage the version that has seen what the first stage's has. A stage of r_s replicas
//! makes a version every r_s minibatches, the first, of r_0 replicas and with c_0 in flight on each, one every r_0; where these do not
//! come together a stage is up to r_0 - g minibatches ahead, g being their greatest common divisor, and its newest version is not yet one
//! that any minibatch uses. So at the most it holds
//!
//! ```text
//! min( ceil((c_0 r_0 - g) / r_s),  c_0 ) + 1
//! ```
//!
//! of those that minibatches in flight or to come use, and the newest: c_0 where replicas are equal.
//!
//! Of a parameter that several stages have an item sees the oldest version that any of them would give it, which is the first one's. So where
//! nothing is flushed a later stage, c_s in flight on each replica, steps it c_0 - c_s rounds behind its own: as many sums wait.

use crate::plan::ScheduleKind;

/// What of a schedule decides how much is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleFlow {
    /// Order of work.
    pub schedule: ScheduleKind,
    /// Micro-batches in one minibatch.
    pub microbatches: u32,
    /// Chunks per worker.
    pub chunks: u32,
    /// Workers of the whole pipeline, or a bound on them where the pipeline is not known yet.
    pub workers: u32,
    /// What is in flight beyond the rule where nothing is flushed.
    pub room: u32,
}

/// Where a stage stands in its pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Replicas of the stage.
    pub replicas: u32,
    /// Workers of all later stages.
    pub workers_after: u32,
}

/// What a stage has in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lanes {
    /// Replicas of the stage.
    pub replicas: u32,
    /// Micro-batches in flight on each.
    pub in_flight: u32,
}

/// What is known of the first stage, where all follow its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// Everything.
    Known(Lanes),
    /// Its cap, and not its replicas.
    Capped(u32),
    /// No more than how many workers there may be.
    Unknown,
}

impl ScheduleFlow {
    /// Micro-batches in flight on one replica of a stage at `position`, by the schedule's own rule; at least 1.
    pub fn in_flight(&self, position: Position) -> u32 {
        let replicas = position.replicas.max(1);
        let to_the_end = position.workers_after.saturating_add(replicas);
        let workers = self.workers.max(to_the_end);
        let wanted = match self.schedule {
            // One that is worked on, while the one before is on its way to those who listen.
            ScheduleKind::Inference => return if position.workers_after > 0 { 2 + self.room } else { 1 },
            ScheduleKind::RoundRobin | ScheduleKind::RoundRobinVsync => {
                return to_the_end.div_ceil(replicas).saturating_add(self.room);
            }
            ScheduleKind::Gpipe | ScheduleKind::Bfs | ScheduleKind::Csv => self.microbatches,
            ScheduleKind::OneFOneB | ScheduleKind::TwoBw => to_the_end,
            ScheduleKind::Interleaved => to_the_end.saturating_add((workers - 1).div_ceil(self.chunks.max(1))),
            ScheduleKind::ZbH1 | ScheduleKind::Zbv => workers,
            ScheduleKind::DualPipeV => workers.saturating_add(1),
            ScheduleKind::ZbH2 => workers.saturating_mul(2) - 1,
        };
        let room = if self.schedule == ScheduleKind::TwoBw { self.room } else { 0 };
        wanted.min(self.microbatches).div_ceil(replicas).max(1).saturating_add(room)
    }

    /// Micro-batches that one replica of a stage has between the halves of their backward, of so many in flight; 0 where it is whole.
    pub fn apart(&self, position: Position, in_flight: u32) -> u32 {
        let replicas = position.replicas.max(1);
        let before = self.workers.saturating_sub(position.workers_after).saturating_sub(replicas);
        let depth = match self.schedule {
            ScheduleKind::ZbH1 => 1,
            ScheduleKind::ZbH2 => 2,
            ScheduleKind::Zbv | ScheduleKind::DualPipeV => return in_flight,
            _ => return 0,
        };
        before.div_ceil(replicas).saturating_mul(depth).saturating_add(1).min(in_flight)
    }

    /// Weight versions that one replica of a stage holds. No fewer, where not everything is known of the first stage.
    pub fn versions(&self, own: Lanes, first: First) -> u32 {
        match (self.schedule, first) {
            (ScheduleKind::RoundRobin, _) => own.in_flight,
            (ScheduleKind::RoundRobinVsync, First::Known(first)) => synced(own.replicas, first),
            (ScheduleKind::RoundRobinVsync, First::Capped(cap)) => cap.saturating_add(1),
            // A first stage of one replica has as many in flight as there are workers; one of more has fewer by one at least.
            (ScheduleKind::RoundRobinVsync, First::Unknown) => self.workers.saturating_add(self.room),
            (ScheduleKind::TwoBw, _) => 2,
            _ => 1,
        }
    }

    /// Rounds of which a replica's sums for parameters that it shares with other stages wait for their step, beside the one that is added to. No
    /// fewer, where not everything is known of the first stage.
    pub fn late(&self, own: Lanes, first: First) -> u32 {
        match (self.schedule, first) {
            (ScheduleKind::RoundRobin, First::Known(first)) => ahead(own, first),
            // As many replicas as leave this stage its own.
            (ScheduleKind::RoundRobin, First::Capped(in_flight)) => {
                let replicas = self.workers.saturating_sub(own.replicas).max(1);
                ahead(own, Lanes { replicas, in_flight })
            }
            // By the rule a first stage of r replicas has ceil(workers / r) in flight on each and what is beyond it: r - 1 more than that
            // many workers' at the most.
            (ScheduleKind::RoundRobin, First::Unknown) => {
                let replicas = u64::from(self.workers.saturating_sub(own.replicas).max(1));
                let items = u64::from(self.workers) + replicas - 1 + replicas * u64::from(self.room);
                rounds(own, items)
            }
            _ => 0,
        }
    }
}

/// Rounds by which a stage gets ahead of the first before it steps a parameter that both have: an item sees the version of it that the first
/// stage's item sees, so that the stage's own sums of these rounds wait.
fn ahead(own: Lanes, first: Lanes) -> u32 {
    rounds(own, u64::from(first.in_flight) * u64::from(first.replicas.max(1)))
}

/// The same, of so many items in flight at the first.
fn rounds(own: Lanes, items: u64) -> u32 {
    let replicas = u64::from(own.replicas.max(1));
    let rounds = items.saturating_sub(u64::from(own.in_flight) * replicas).div_ceil(replicas);
    u32::try_from(rounds).unwrap_or(u32::MAX)
}

/// Weight versions that a stage of so many replicas holds at the most under vertical sync.
pub fn synced(replicas: u32, first: Lanes) -> u32 {
    let [own, of_first] = [replicas, first.replicas].map(|replicas| u64::from(replicas.max(1)));
    let cap = u64::from(first.in_flight.max(1));
    let used = (cap * of_first - common_divisor(own, of_first)).div_ceil(own).min(cap);
    u32::try_from(used + 1).unwrap_or(u32::MAX)
}

/// The greatest common divisor, with 1 for 0.
pub fn common_divisor(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a.max(1), b.max(1));
    while y != 0 {
        (x, y) = (y, x % y);
    }
    x
}

/// The published caps of a whole pipeline of `replicas` under `flow`, first stage first.
pub fn published(flow: &ScheduleFlow, replicas: &[u32]) -> Vec<u32> {
    let workers = replicas.iter().fold(0u32, |sum, &r| sum.saturating_add(r));
    let flow = ScheduleFlow { workers, ..*flow };
    let mut workers_after = workers;
    let mut caps = Vec::with_capacity(replicas.len());
    for &replicas in replicas {
        workers_after = workers_after.saturating_sub(replicas);
        caps.push(flow.in_flight(Position { replicas, workers_after }));
    }
    caps
}

/// For each stage of a whole pipeline the items between the halves of their backward, under such caps; empty where it is whole.
pub fn apart(flow: &ScheduleFlow, replicas: &[u32], caps: &[u32]) -> Vec<u32> {
    if !flow.schedule.splits_backward() {
        return Vec::new();
    }
    let workers = replicas.iter().fold(0u32, |sum, &r| sum.saturating_add(r));
    let flow = ScheduleFlow { workers, ..*flow };
    let mut workers_after = workers;
    let mut apart = Vec::with_capacity(replicas.len());
    for (&replicas, &cap) in replicas.iter().zip(caps) {
        workers_after = workers_after.saturating_sub(replicas);
        apart.push(flow.apart(Position { replicas, workers_after }, cap));
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps(schedule: ScheduleKind, microbatches: u32, replicas: &[u32]) -> Vec<u32> {
        published(&ScheduleFlow { schedule, microbatches, chunks: 2, workers: 0, room: 0 }, replicas)
    }

    #[test]
    fn round_robin_is_the_published_rule() {
        let rr = |replicas: &[u32]| caps(ScheduleKind::RoundRobin, 1, replicas);
        assert_eq!(rr(&[1, 1, 1, 1]), [4, 3, 2, 1]);
        assert_eq!(rr(&[3, 1]), [2, 1]);
        assert_eq!(rr(&[1, 3, 1]), [5, 2, 1]);
        assert_eq!(rr(&[1, 4, 2, 1]), [8, 2, 2, 1]);
        assert_eq!(rr(&[9, 5, 1, 1]), [2, 2, 2, 1]);
        assert_eq!(rr(&[7, 4, 3, 1, 1]), [3, 3, 2, 2, 1]);
    }

    #[test]
    fn flushes_never_hold_more_than_the_minibatch() {
        assert_eq!(caps(ScheduleKind::Gpipe, 8, &[1; 4]), [8; 4]);
        assert_eq!(caps(ScheduleKind::OneFOneB, 8, &[1; 4]), [4, 3, 2, 1]);
        assert_eq!(caps(ScheduleKind::OneFOneB, 2, &[1; 4]), [2, 2, 2, 1]);
        // Peaks 5.5, 4.5, 3.5, 2.5 with p = 4, v = 2.
        assert_eq!(caps(ScheduleKind::Interleaved, 8, &[1; 4]), [6, 5, 4, 3]);
        assert_eq!(caps(ScheduleKind::ZbH1, 8, &[1; 4]), [4; 4]);
        assert_eq!(caps(ScheduleKind::ZbH2, 8, &[1; 4]), [7; 4]);
        assert_eq!(caps(ScheduleKind::Inference, 8, &[1; 4]), [2, 2, 2, 1]);
        assert_eq!(caps(ScheduleKind::Gpipe, 8, &[4]), [2]);
    }

    #[test]
    fn second_halves_are_left_for_later() {
        let halves = |schedule, microbatches, replicas: &[u32]| {
            let flow = ScheduleFlow { schedule, microbatches, chunks: 1, workers: 0, room: 0 };
            apart(&flow, replicas, &published(&flow, replicas))
        };
        assert_eq!(halves(ScheduleKind::ZbH1, 8, &[1; 4]), [1, 2, 3, 4]);
        assert_eq!(halves(ScheduleKind::ZbH2, 8, &[1; 4]), [1, 3, 5, 7]);
        assert_eq!(halves(ScheduleKind::ZbH1, 2, &[1; 4]), [1, 2, 2, 2]);
        assert_eq!(halves(ScheduleKind::ZbH1, 8, &[2, 2]), [1, 2]);
        assert!(halves(ScheduleKind::OneFOneB, 8, &[1; 4]).is_empty());
    }

    #[test]
    fn versions() {
        let flow = |schedule| ScheduleFlow { schedule, microbatches: 8, chunks: 1, workers: 4, room: 0 };
        let lanes = |replicas, in_flight| Lanes { replicas, in_flight };
        let first = First::Known(lanes(1, 4));
        assert_eq!(flow(ScheduleKind::RoundRobin).versions(lanes(1, 3), first), 3);
        assert_eq!(flow(ScheduleKind::RoundRobinVsync).versions(lanes(1, 1), first), 4);
        assert_eq!(flow(ScheduleKind::TwoBw).versions(lanes(1, 4), first), 2);
        assert_eq!(flow(ScheduleKind::OneFOneB).versions(lanes(1, 4), first), 1);
    }

    #[test]
    fn sums_of_shared_parameters_wait_for_the_first_stage() {
        let flow = |schedule| ScheduleFlow { schedule, microbatches: 1, chunks: 1, workers: 4, room: 0 };
        let late = |of: Lanes, first: First| flow(ScheduleKind::RoundRobin).late(of, first);
        let lanes = |replicas, in_flight| Lanes { replicas, in_flight };
        assert_eq!([4, 3, 2, 1].map(|own| late(lanes(1, own), First::Known(lanes(1, 4)))), [0, 1, 2, 3]);
        assert_eq!(late(lanes(2, 1), First::Known(lanes(2, 2))), 1);
        assert_eq!(flow(ScheduleKind::OneFOneB).late(lanes(1, 1), First::Unknown), 0);
    }

    #[test]
    fn versions_in_step_with_the_first_stage() {
        let synced = |replicas, first: (u32, u32)| synced(replicas, Lanes { replicas: first.0, in_flight: first.1 });
        assert_eq!([1, 2, 3].map(|replicas| synced(replicas, (replicas, 5))), [5; 3]);
        assert_eq!(synced(1, (2, 3)), 4, "the newest is between two of the first");
        assert_eq!(synced(2, (1, 4)), 3);
        assert_eq!(synced(2, (3, 1)), 2);
        assert_eq!(synced(1, (7, 2)), 3);
        assert_eq!(synced(u32::MAX, (u32::MAX, u32::MAX)), u32::MAX);
    }

    /// Nor does it make sums of shared parameters wait for longer.
    #[test]
    fn sums_wait_no_longer_than_is_said_of_an_unknown_first_stage() {
        for (room, in_flight) in (0..9).map(|n| (n % 3, 1 + n / 3)) {
            let rule = |workers| ScheduleFlow {
                schedule: ScheduleKind::RoundRobin,
                microbatches: 1,
                chunks: 1,
                workers,
                room,
            };
            for (of_first, own, between) in (0..1000).map(|n| (1 + n % 10, 1 + n / 10 % 10, n / 100)) {
                let workers = of_first + own + between;
                let flow = rule(workers);
                let cap = flow.in_flight(Position { replicas: of_first, workers_after: own + between });
                let own = Lanes { replicas: own, in_flight };
                let exact = flow.late(own, First::Known(Lanes { replicas: of_first, in_flight: cap }));
                assert!(exact <= flow.late(own, First::Capped(cap)));
                assert!(exact <= flow.late(own, First::Unknown), "{of_first} {own:?} of {workers}, room {room}");
            }
        }
    }

    /// No first stage that the published rule allows makes a stage hold more than is said where nothing is known of it.
    #[test]
    fn what_is_said_of_an_unknown_first_stage_is_enough() {
        for room in 0..3 {
            let rule = |workers| ScheduleFlow {
                schedule: ScheduleKind::RoundRobinVsync,
                microbatches: 1,
                chunks: 1,
                workers,
                room,
            };
            for (of_first, own, between) in (0..1000).map(|n| (1 + n % 10, 1 + n / 10 % 10, n / 100)) {
                let workers = of_first + own + between;
                let flow = rule(workers);
                let in_flight = flow.in_flight(Position { replicas: of_first, workers_after: own + between });
                let first = First::Known(Lanes { replicas: of_first, in_flight });
                let own = Lanes { replicas: own, in_flight: 1 };
                let exact = flow.versions(own, first);
                assert!(exact <= flow.versions(own, First::Capped(in_flight)));
                assert!(exact <= flow.versions(own, First::Unknown), "{of_first} {own:?} of {workers}, room {room}");
            }
        }
    }
}
