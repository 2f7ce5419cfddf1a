//! In-flight micro-batches per replica of a stage, and the weight versions they need.
//!
//! For 1F1B-RR the published rule is ceil(n_s / r_s), with n_s the workers from stage s to the end and r_s its
//! replicas. This starves plans such as 1-3-1, so a plan may state larger caps; each costs stash memory and staleness.
//! In inference, a micro-batch is in flight until all receivers have started on it. Two are enough to overlap compute
//! with sending; skip connections may need more.
//!
//! With a flush, these are the peaks of each schedule, in whole micro-batches of a stage:
//!
//! | schedule | in flight (at most the micro-batches of the minibatch) |
//! | --- | --- |
//! | gpipe, bfs, csv | all |
//! | 1f1b, 2bw | workers from the stage to the end |
//! | interleaved | as 1f1b, plus (p - 1) / v for v chunks on p workers |
//! | zb-h1, zbv | p |
//! | dualpipev | p + 1 |
//! | zb-h2 | 2 p - 1 |
//!
//! With a split backward, some micro-batches in flight have pending weight gradients. Under zb-h1 and zb-h2 stage s of
//! the pipeline defers d s weight-gradient passes (d = 1, 2), so at most d s + 1 are pending. Replicas divide the
//! number of workers before them. For a V the peak comes from its compute table and is bounded by the number in flight.
//!
//! With vertical sync, a minibatch uses the same weight version in every stage: that of the first stage. A stage of r_s
//! replicas makes a version every r_s minibatches; the first stage (r_0 replicas, c_0 in flight on each) every r_0. If
//! the two do not coincide, a stage is up to r_0 - g minibatches ahead, with g their greatest common divisor. Its
//! newest version is then not yet used by any minibatch. So it holds at most
//!
//! ```text
//! min( ceil((c_0 r_0 - g) / r_s),  c_0 ) + 1
//! ```
//!
//! versions, the newest included. This is c_0 if the replica counts are equal.
//!
//! For a tied weight, every micro-batch must see the oldest version that any of its stages would use, which is the
//! first stage's. Without a flush, a later stage with c_s in flight on each replica steps it c_0 - c_s rounds late and
//! holds as many gradient sums.

use crate::plan::schedule::{InFlightRule, PendingWeightGrads, Schedule, VersionRule};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleFlow {
    pub schedule: Schedule,
    pub microbatches: u32,
    pub chunks: u32,
    /// Workers of the whole pipeline, or an upper bound if the pipeline is not known yet.
    pub workers: u32,
    /// Micro-batches beyond the schedule's rule, for schedules without a flush.
    pub room: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub replicas: u32,
    /// Workers of all later stages.
    pub workers_after: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageInFlight {
    pub replicas: u32,
    pub in_flight: u32,
}

/// Known limits of the first stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    Known(StageInFlight),
    /// The replica count is unknown.
    Capped(u32),
    Unknown,
}

impl ScheduleFlow {
    /// In-flight micro-batches per replica of a stage by the schedule's rule; at least 1.
    pub fn in_flight(&self, position: Position) -> u32 {
        let replicas = position.replicas.max(1);
        let to_the_end = position.workers_after.saturating_add(replicas);
        let workers = self.workers.max(to_the_end);
        let wanted = match self.schedule.properties().in_flight {
            // One in compute while the previous one is being sent.
            InFlightRule::Forward => return if position.workers_after > 0 { 2 + self.room } else { 1 },
            InFlightRule::Rounds => {
                return to_the_end.div_ceil(replicas).saturating_add(self.room);
            }
            InFlightRule::Minibatch => self.microbatches,
            InFlightRule::Depth => to_the_end,
            InFlightRule::InterleavedDepth => to_the_end.saturating_add((workers - 1).div_ceil(self.chunks.max(1))),
            InFlightRule::Workers => workers,
            InFlightRule::WorkersAndOne => workers.saturating_add(1),
            InFlightRule::TwiceWorkers => workers.saturating_mul(2) - 1,
        };
        let room = if self.schedule.is_double_buffered() { self.room } else { 0 };
        wanted.min(self.microbatches).div_ceil(replicas).max(1).saturating_add(room)
    }

    /// Micro-batches with pending weight gradients per replica, at most `in_flight`; 0 if the backward is not split.
    pub fn pending_weight_grads(&self, position: Position, in_flight: u32) -> u32 {
        let replicas = position.replicas.max(1);
        let before = self.workers.saturating_sub(position.workers_after).saturating_sub(replicas);
        let depth = match self.schedule.properties().split {
            Some(PendingWeightGrads::PerEarlierWorker(depth)) => depth,
            Some(PendingWeightGrads::InFlight) => return in_flight,
            None => return 0,
        };
        before.div_ceil(replicas).saturating_mul(depth).saturating_add(1).min(in_flight)
    }

    /// Weight versions per replica of a stage; an upper bound if the first stage is not fully known.
    pub fn versions(&self, own: StageInFlight, first: First) -> u32 {
        match (self.schedule.versions(), first) {
            (VersionRule::Stashed, _) => own.in_flight,
            (VersionRule::Synchronised, First::Known(first)) => synced(own.replicas, first),
            (VersionRule::Synchronised, First::Capped(cap)) => cap.saturating_add(1),
            // A first stage of one replica has as many in flight as there are workers; with more replicas, at least one
            // fewer.
            (VersionRule::Synchronised, First::Unknown) => self.workers.saturating_add(self.room),
            (VersionRule::Previous, _) => 2,
            _ => 1,
        }
    }

    /// Rounds of tied-weight gradient sums that wait for their step, besides the current round; an upper bound if the
    /// first stage is not fully known.
    pub fn late(&self, own: StageInFlight, first: First) -> u32 {
        match (self.schedule.versions(), first) {
            (VersionRule::Stashed, First::Known(first)) => rounds_ahead(own, first),
            // The most replicas the first stage can have.
            (VersionRule::Stashed, First::Capped(in_flight)) => {
                let replicas = self.workers.saturating_sub(own.replicas).max(1);
                rounds_ahead(own, StageInFlight { replicas, in_flight })
            }
            // By the rule, a first stage of r replicas has ceil(workers / r) in flight on each, plus `room`. In total
            // that is at most r - 1 more than `workers`, plus r times `room`.
            (VersionRule::Stashed, First::Unknown) => {
                let replicas = u64::from(self.workers.saturating_sub(own.replicas).max(1));
                let items = u64::from(self.workers) + replicas - 1 + replicas * u64::from(self.room);
                rounds(own, items)
            }
            _ => 0,
        }
    }
}

/// Rounds by which a stage is ahead of the first stage when it steps a tied weight. Each micro-batch must see the
/// version that the first stage sees, so the sums of these rounds wait.
fn rounds_ahead(own: StageInFlight, first: StageInFlight) -> u32 {
    rounds(own, u64::from(first.in_flight) * u64::from(first.replicas.max(1)))
}

/// [`ahead`] for `items` in flight at the first stage.
fn rounds(own: StageInFlight, items: u64) -> u32 {
    let replicas = u64::from(own.replicas.max(1));
    let rounds = items.saturating_sub(u64::from(own.in_flight) * replicas).div_ceil(replicas);
    u32::try_from(rounds).unwrap_or(u32::MAX)
}

/// Upper bound of the weight versions of a stage under vertical sync.
pub fn synced(replicas: u32, first: StageInFlight) -> u32 {
    let [own, of_first] = [replicas, first.replicas].map(|replicas| u64::from(replicas.max(1)));
    let cap = u64::from(first.in_flight.max(1));
    let used = (cap * of_first - common_divisor(own, of_first)).div_ceil(own).min(cap);
    u32::try_from(used + 1).unwrap_or(u32::MAX)
}

/// Greatest common divisor; 0 counts as 1.
pub fn common_divisor(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a.max(1), b.max(1));
    while y != 0 {
        (x, y) = (y, x % y);
    }
    x
}

/// The published caps of a whole pipeline, first stage first.
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

/// Micro-batches with pending weight gradients per stage of a whole pipeline; empty if the backward is not split.
pub fn pending_weight_grads(flow: &ScheduleFlow, replicas: &[u32], caps: &[u32]) -> Vec<u32> {
    if !flow.schedule.splits_backward() {
        return Vec::new();
    }
    let workers = replicas.iter().fold(0u32, |sum, &r| sum.saturating_add(r));
    let flow = ScheduleFlow { workers, ..*flow };
    let mut workers_after = workers;
    let mut pending_weight_grads = Vec::with_capacity(replicas.len());
    for (&replicas, &cap) in replicas.iter().zip(caps) {
        workers_after = workers_after.saturating_sub(replicas);
        pending_weight_grads.push(flow.pending_weight_grads(Position { replicas, workers_after }, cap));
    }
    pending_weight_grads
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps(schedule: Schedule, microbatches: u32, replicas: &[u32]) -> Vec<u32> {
        published(&ScheduleFlow { schedule, microbatches, chunks: 2, workers: 0, room: 0 }, replicas)
    }

    #[test]
    fn round_robin_is_the_published_rule() {
        let rr = |replicas: &[u32]| caps(Schedule::OneFOneBRr, 1, replicas);
        assert_eq!(rr(&[1, 1, 1, 1]), [4, 3, 2, 1]);
        assert_eq!(rr(&[3, 1]), [2, 1]);
        assert_eq!(rr(&[1, 3, 1]), [5, 2, 1]);
        assert_eq!(rr(&[1, 4, 2, 1]), [8, 2, 2, 1]);
        assert_eq!(rr(&[9, 5, 1, 1]), [2, 2, 2, 1]);
        assert_eq!(rr(&[7, 4, 3, 1, 1]), [3, 3, 2, 2, 1]);
    }

    #[test]
    fn flushes_never_hold_more_than_the_minibatch() {
        assert_eq!(caps(Schedule::Gpipe, 8, &[1; 4]), [8; 4]);
        assert_eq!(caps(Schedule::OneFOneB, 8, &[1; 4]), [4, 3, 2, 1]);
        assert_eq!(caps(Schedule::OneFOneB, 2, &[1; 4]), [2, 2, 2, 1]);
        // Peaks 5.5, 4.5, 3.5, 2.5 with p = 4, v = 2.
        assert_eq!(caps(Schedule::Interleaved, 8, &[1; 4]), [6, 5, 4, 3]);
        assert_eq!(caps(Schedule::ZbH1, 8, &[1; 4]), [4; 4]);
        assert_eq!(caps(Schedule::ZbH2, 8, &[1; 4]), [7; 4]);
        assert_eq!(caps(Schedule::Inference, 8, &[1; 4]), [2, 2, 2, 1]);
        assert_eq!(caps(Schedule::Gpipe, 8, &[4]), [2]);
    }

    #[test]
    fn second_halves_are_left_for_later() {
        let halves = |schedule, microbatches, replicas: &[u32]| {
            let flow = ScheduleFlow { schedule, microbatches, chunks: 1, workers: 0, room: 0 };
            pending_weight_grads(&flow, replicas, &published(&flow, replicas))
        };
        assert_eq!(halves(Schedule::ZbH1, 8, &[1; 4]), [1, 2, 3, 4]);
        assert_eq!(halves(Schedule::ZbH2, 8, &[1; 4]), [1, 3, 5, 7]);
        assert_eq!(halves(Schedule::ZbH1, 2, &[1; 4]), [1, 2, 2, 2]);
        assert_eq!(halves(Schedule::ZbH1, 8, &[2, 2]), [1, 2]);
        assert!(halves(Schedule::OneFOneB, 8, &[1; 4]).is_empty());
    }

    #[test]
    fn versions() {
        let flow = |schedule| ScheduleFlow { schedule, microbatches: 8, chunks: 1, workers: 4, room: 0 };
        let lanes = |replicas, in_flight| StageInFlight { replicas, in_flight };
        let first = First::Known(lanes(1, 4));
        assert_eq!(flow(Schedule::OneFOneBRr).versions(lanes(1, 3), first), 3);
        assert_eq!(flow(Schedule::OneFOneBRrVsync).versions(lanes(1, 1), first), 4);
        assert_eq!(flow(Schedule::TwoBw).versions(lanes(1, 4), first), 2);
        assert_eq!(flow(Schedule::OneFOneB).versions(lanes(1, 4), first), 1);
    }

    #[test]
    fn sums_of_shared_parameters_wait_for_the_first_stage() {
        let flow = |schedule| ScheduleFlow { schedule, microbatches: 1, chunks: 1, workers: 4, room: 0 };
        let late = |of: StageInFlight, first: First| flow(Schedule::OneFOneBRr).late(of, first);
        let lanes = |replicas, in_flight| StageInFlight { replicas, in_flight };
        assert_eq!([4, 3, 2, 1].map(|own| late(lanes(1, own), First::Known(lanes(1, 4)))), [0, 1, 2, 3]);
        assert_eq!(late(lanes(2, 1), First::Known(lanes(2, 2))), 1);
        assert_eq!(flow(Schedule::OneFOneB).late(lanes(1, 1), First::Unknown), 0);
    }

    #[test]
    fn versions_in_step_with_the_first_stage() {
        let synced =
            |replicas, first: (u32, u32)| synced(replicas, StageInFlight { replicas: first.0, in_flight: first.1 });
        assert_eq!([1, 2, 3].map(|replicas| synced(replicas, (replicas, 5))), [5; 3]);
        assert_eq!(synced(1, (2, 3)), 4, "the newest is between two of the first");
        assert_eq!(synced(2, (1, 4)), 3);
        assert_eq!(synced(2, (3, 1)), 2);
        assert_eq!(synced(1, (7, 2)), 3);
        assert_eq!(synced(u32::MAX, (u32::MAX, u32::MAX)), u32::MAX);
    }

    /// Nor do sums of tied weights wait longer than the bound.
    #[test]
    fn tied_weight_lag_bound_holds() {
        for (room, in_flight) in (0..9).map(|n| (n % 3, 1 + n / 3)) {
            let rule =
                |workers| ScheduleFlow { schedule: Schedule::OneFOneBRr, microbatches: 1, chunks: 1, workers, room };
            for (of_first, own, between) in (0..1000).map(|n| (1 + n % 10, 1 + n / 10 % 10, n / 100)) {
                let workers = of_first + own + between;
                let flow = rule(workers);
                let cap = flow.in_flight(Position { replicas: of_first, workers_after: own + between });
                let own = StageInFlight { replicas: own, in_flight };
                let exact = flow.late(own, First::Known(StageInFlight { replicas: of_first, in_flight: cap }));
                assert!(exact <= flow.late(own, First::Capped(cap)));
                assert!(exact <= flow.late(own, First::Unknown), "{of_first} {own:?} of {workers}, room {room}");
            }
        }
    }

    /// No first stage that the published rule allows exceeds the bound for an unknown first stage.
    #[test]
    fn bound_for_unknown_first_stage_holds() {
        for room in 0..3 {
            let rule = |workers| ScheduleFlow {
                schedule: Schedule::OneFOneBRrVsync,
                microbatches: 1,
                chunks: 1,
                workers,
                room,
            };
            for (of_first, own, between) in (0..1000).map(|n| (1 + n % 10, 1 + n / 10 % 10, n / 100)) {
                let workers = of_first + own + between;
                let flow = rule(workers);
                let in_flight = flow.in_flight(Position { replicas: of_first, workers_after: own + between });
                let first = First::Known(StageInFlight { replicas: of_first, in_flight });
                let own = StageInFlight { replicas: own, in_flight: 1 };
                let exact = flow.versions(own, first);
                assert!(exact <= flow.versions(own, First::Capped(in_flight)));
                assert!(exact <= flow.versions(own, First::Unknown), "{of_first} {own:?} of {workers}, room {room}");
            }
        }
    }
}
