//! Agreement of the processes on the last minibatch after one of them receives a stop signal.
//!
//! ```text
//! signalled process ──stop──▶ process 0 ──hold──▶ all others ──begun──▶ process 0 ──end──▶ all others
//! ```
//!
//! A process on hold starts no minibatch, so its reported count stays valid until the end is known. Frames of a
//! connection keep their order, and readers and writers continue while workers are on hold, so there is no deadlock.

use crate::checkpoint::barrier::MinibatchBarrier;
use crate::process::connection::Outbound;
use crate::process::fields::Fields;
use crate::process::frame::{FrameError, Kind};
use crate::process::run_status::RunStatus;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Polling interval for the stop signal.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The end in a frame if the run has no later end position.
const NEVER: u32 = u32::MAX;

/// One process's state of the agreement.
pub struct StopAgreement<'a> {
    gate: &'a MinibatchBarrier<'a>,
    own: usize,
    queues: BTreeMap<usize, Sender<Outbound>>,
    /// On process 0, after a stop signal: minibatches started, by process.
    begun: Mutex<Option<BTreeMap<usize, u32>>>,
}

impl<'a> StopAgreement<'a> {
    /// `queues` lead to the other processes. The gate then no longer decides alone.
    pub fn new(
        gate: &'a MinibatchBarrier<'a>,
        own: usize,
        queues: BTreeMap<usize, Sender<Outbound>>,
    ) -> StopAgreement<'a> {
        gate.share();
        StopAgreement { gate, own, queues, begun: Mutex::new(None) }
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, Option<BTreeMap<usize, u32>>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, process: usize, kind: Kind, number: u32) {
        // The queue has no reader after the end of the run.
        if let Some(queue) = self.queues.get(&process) {
            let _ = queue.send(Outbound::of(kind, number.to_le_bytes().to_vec()));
        }
    }

    fn send_all(&self, kind: Kind, number: u32) {
        self.queues.keys().for_each(|process| self.send(*process, kind, number));
    }

    /// Polls for the stop signal until the workers have ended, which disconnects `over`.
    pub fn watch(&self, over: &Receiver<()>, run_status: &RunStatus) {
        let mut is_reported = false;
        while over.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let reason = u32::try_from(self.gate.asked()).unwrap_or(NEVER);
            if reason != 0 && !is_reported {
                is_reported = true;
                match self.own {
                    0 => self.begin(reason),
                    _ => self.send(0, Kind::Stop, reason),
                }
            }
            if run_status.cause().is_some() {
                self.gate.let_go();
            }
        }
    }

    /// On process 0: starts the agreement. Only the first stop signal counts.
    fn begin(&self, reason: u32) {
        let mut begun = self.lock();
        if begun.is_none() {
            *begun = Some(BTreeMap::from([(0, self.gate.hold(reason as usize))]));
            self.send_all(Kind::Hold, reason);
            self.decide(&begun);
        }
    }

    /// On process 0: once all have reported, sends them the end.
    fn decide(&self, begun: &Option<BTreeMap<usize, u32>>) {
        let Some(begun) = begun.as_ref().filter(|begun| begun.len() > self.queues.len()) else { return };
        let end = self.gate.behind(begun.values().copied().max().unwrap_or(0));
        self.send_all(Kind::End, end.unwrap_or(NEVER));
        self.gate.end_at(end);
    }

    /// Handles a frame of the agreement.
    pub fn take(&self, process: usize, kind: Kind, fields: &mut Fields<'_>) -> Result<(), FrameError> {
        let number = fields.u32("the stop request")?;
        fields.end()?;
        match (kind, self.own, process) {
            (Kind::Stop, 0, _) => self.begin(number),
            (Kind::ResumedState, 0, _) => {
                let mut begun = self.lock();
                match begun.as_mut().map(|begun| begun.insert(process, number)) {
                    Some(None) => self.decide(&begun),
                    _ => return Err(FrameError::Unexpected { kind }),
                }
            }
            (Kind::Hold, _, 0) => {
                let begun = self.gate.hold(number as usize);
                self.send(0, Kind::ResumedState, begun);
            }
            (Kind::End, _, 0) => self.gate.end_at(Some(number).filter(|end| *end != NEVER)),
            _ => return Err(FrameError::Unexpected { kind }),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossbeam_channel::unbounded;
    use std::sync::atomic::AtomicUsize;

    /// Three processes whose frames the test delivers by hand.
    #[test]
    fn all_end_behind_what_nobody_has_begun() {
        let stop = AtomicUsize::new(0);
        let gates = [3, 7, 5].map(|begun| MinibatchBarrier::new(&stop, 2, begun));
        let (to, from): (Vec<_>, Vec<_>) = (0..3).map(|_| unbounded::<(usize, Outbound)>()).unzip();
        // A relay records the sender of each frame.
        let mut relays = Vec::new();
        let mut queues = |own: usize, others: &[usize]| {
            let mut made = BTreeMap::new();
            for &other in others {
                let (queue, frames) = unbounded();
                made.insert(other, queue);
                relays.push((own, other, frames));
            }
            made
        };
        let all = [queues(0, &[1, 2]), queues(1, &[0, 2]), queues(2, &[0, 1])];
        let parts: Vec<StopAgreement<'_>> =
            (0..).zip(all).map(|(own, queues)| StopAgreement::new(&gates[own], own, queues)).collect();
        // Two processes receive a signal at once; the second stop frame reaches process 0 first.
        parts[2].send(0, Kind::Stop, 15);
        parts[1].send(0, Kind::Stop, 2);
        relays.reverse();
        loop {
            let before = to.iter().map(|to| to.len()).sum::<usize>();
            for (own, other, frames) in &relays {
                frames.try_iter().for_each(|frame| to[*other].send((*own, frame)).unwrap());
            }
            let mut taken = before;
            for (own, from) in from.iter().enumerate() {
                for (process, frame) in from.try_iter() {
                    taken += 1;
                    parts[own].take(process, frame.kind, &mut Fields::of(&frame.head)).unwrap();
                }
            }
            if taken == 0 {
                break;
            }
        }
        assert_eq!(gates.each_ref().map(|gate| (gate.end(), gate.reason())), [(Some(8), 15); 3]);
        let late = parts[0].take(1, Kind::ResumedState, &mut Fields::of(&9u32.to_le_bytes()));
        assert_eq!(late, Err(FrameError::Unexpected { kind: Kind::ResumedState }));
        assert!(parts[1].take(2, Kind::End, &mut Fields::of(&9u32.to_le_bytes())).is_err());
        assert!(parts[1].take(0, Kind::End, &mut Fields::of(&[9])).is_err());
    }
}
