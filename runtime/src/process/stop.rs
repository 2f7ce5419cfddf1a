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
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;

/// Polling interval for the stop signal.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The end in a frame if the run has no later end position.
const NEVER: u32 = u32::MAX;

/// One process's state of the agreement.
pub struct StopAgreement<'a> {
    barrier: &'a MinibatchBarrier<'a>,
    process: usize,
    queues: BTreeMap<usize, Sender<Outbound>>,
    /// On process 0, after a stop signal: minibatches started, by process.
    started: Mutex<Option<BTreeMap<usize, u32>>>,
}

impl<'a> StopAgreement<'a> {
    /// `queues` lead to the other processes. The barrier then no longer decides alone.
    pub fn new(
        barrier: &'a MinibatchBarrier<'a>,
        process: usize,
        queues: BTreeMap<usize, Sender<Outbound>>,
    ) -> StopAgreement<'a> {
        barrier.coordinate();
        StopAgreement { barrier, process, queues, started: Mutex::new(None) }
    }

    fn send(&self, process: usize, kind: Kind, number: u32) {
        // The queue has no reader after the end of the run.
        if let Some(queue) = self.queues.get(&process) {
            let _ = queue.send(Outbound::of(kind, &number));
        }
    }

    fn send_all(&self, kind: Kind, number: u32) {
        self.queues.keys().for_each(|process| self.send(*process, kind, number));
    }

    /// Polls for the stop signal until the workers have ended, which disconnects `workers_ended`.
    pub fn watch(&self, workers_ended: &Receiver<()>, run_status: &RunStatus) {
        let mut is_reported = false;
        while workers_ended.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let reason = u32::try_from(self.barrier.requested_reason()).unwrap_or(NEVER);
            if reason != 0 && !is_reported {
                is_reported = true;
                match self.process {
                    0 => self.begin(reason),
                    _ => self.send(0, Kind::Stop, reason),
                }
            }
            if run_status.cause().is_some() {
                self.barrier.open();
            }
        }
    }

    /// On process 0: starts the agreement. Only the first stop signal counts.
    fn begin(&self, reason: u32) {
        let mut started = self.started.lock();
        if started.is_none() {
            *started = Some(BTreeMap::from([(0, self.barrier.hold(reason as usize))]));
            self.send_all(Kind::Hold, reason);
            self.decide(&started);
        }
    }

    /// On process 0: once all have reported, sends them the end.
    fn decide(&self, started: &Option<BTreeMap<usize, u32>>) {
        let Some(started) = started.as_ref().filter(|started| started.len() > self.queues.len()) else { return };
        let end = self.barrier.end_after(started.values().copied().max().unwrap_or(0));
        self.send_all(Kind::End, end.unwrap_or(NEVER));
        self.barrier.end_at(end);
    }

    /// Handles a frame of the agreement.
    pub fn handle(&self, process: usize, kind: Kind, fields: &mut Fields<'_>) -> Result<(), FrameError> {
        let number = fields.value("the stop request")?;
        fields.end()?;
        match (kind, self.process, process) {
            (Kind::Stop, 0, _) => self.begin(number),
            (Kind::ResumedState, 0, _) => {
                let mut started = self.started.lock();
                match started.as_mut().map(|started| started.insert(process, number)) {
                    Some(None) => self.decide(&started),
                    _ => return Err(FrameError::Unexpected { kind }),
                }
            }
            (Kind::Hold, _, 0) => {
                let started = self.barrier.hold(number as usize);
                self.send(0, Kind::ResumedState, started);
            }
            (Kind::End, _, 0) => self.barrier.end_at(Some(number).filter(|end| *end != NEVER)),
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
        let barriers = [3, 7, 5].map(|started| MinibatchBarrier::new(&stop, 2, started));
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..3).map(|_| unbounded::<(usize, Outbound)>()).unzip();
        // A relay records the sender of each frame.
        let mut relays = Vec::new();
        let mut queues = |process: usize, peers: &[usize]| {
            let mut peer_queues = BTreeMap::new();
            for &peer in peers {
                let (queue, frames) = unbounded();
                peer_queues.insert(peer, queue);
                relays.push((process, peer, frames));
            }
            peer_queues
        };
        let queues_of = [queues(0, &[1, 2]), queues(1, &[0, 2]), queues(2, &[0, 1])];
        let agreements: Vec<StopAgreement<'_>> = (0..)
            .zip(queues_of)
            .map(|(process, queues)| StopAgreement::new(&barriers[process], process, queues))
            .collect();
        // Two processes receive a signal at once; the second stop frame reaches process 0 first.
        agreements[2].send(0, Kind::Stop, 15);
        agreements[1].send(0, Kind::Stop, 2);
        relays.reverse();
        loop {
            let before = senders.iter().map(|sender| sender.len()).sum::<usize>();
            for (process, peer, frames) in &relays {
                frames.try_iter().for_each(|frame| senders[*peer].send((*process, frame)).unwrap());
            }
            let mut handled = before;
            for (process, receiver) in receivers.iter().enumerate() {
                for (sender, frame) in receiver.try_iter() {
                    handled += 1;
                    agreements[process].handle(sender, frame.kind, &mut Fields::of(&frame.head)).unwrap();
                }
            }
            if handled == 0 {
                break;
            }
        }
        assert_eq!(barriers.each_ref().map(|barrier| (barrier.end(), barrier.reason())), [(Some(8), 15); 3]);
        let late = agreements[0].handle(1, Kind::ResumedState, &mut Fields::of(&[9]));
        assert_eq!(late, Err(FrameError::Unexpected { kind: Kind::ResumedState }));
        assert!(agreements[1].handle(2, Kind::End, &mut Fields::of(&[9])).is_err());
        assert!(agreements[1].handle(0, Kind::End, &mut Fields::of(&[])).is_err());
    }
}
