//! The barrier before each minibatch, which makes a stopped run end at the same minibatch on all workers.
//!
//! The run ends after a minibatch that no worker has started, so no worker has applied its update and each still
//! contributes its snapshot. With several processes, all barriers hold while the processes agree (`process::stop`).

use crate::checkpoint::points::round_up;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Admits workers to minibatches until the run is stopped.
pub struct MinibatchBarrier<'a> {
    stop: &'a AtomicUsize,
    period: u32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Minibatches that some worker of this process has started.
    started: u32,
    /// Minibatch count at which the stopped run ends.
    end: Option<u32>,
    /// Stop reason (signal number), or 0.
    reason: usize,
    /// True if several processes decide together.
    is_shared: bool,
    is_held: bool,
}

impl<'a> MinibatchBarrier<'a> {
    /// A barrier after `done` finished minibatches. Setting `stop` to a non-zero reason ends the run.
    pub fn new(stop: &'a AtomicUsize, period: u32, done: u32) -> MinibatchBarrier<'a> {
        let state = State { started: done, end: None, reason: 0, is_shared: false, is_held: false };
        MinibatchBarrier { stop, period, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// True if the minibatch may start. Blocks while the processes agree on the end; an agreement or the end of the
    /// connections unblocks it.
    pub fn enter(&self, minibatch: u32) -> bool {
        let mut state = self.state.lock();
        while state.is_held {
            self.changed.wait(&mut state);
        }
        let reason = self.requested_reason();
        if state.end.is_none() && !state.is_shared && reason != 0 {
            (state.end, state.reason) = (self.end_after(state.started), reason);
        }
        let is_admitted = state.end.is_none_or(|end| minibatch < end);
        if is_admitted {
            state.started = state.started.max(minibatch.saturating_add(1));
        }
        is_admitted
    }

    /// The first valid end position after `started` started minibatches.
    pub fn end_after(&self, started: u32) -> Option<u32> {
        round_up(started.saturating_add(1), self.period)
    }

    /// Minibatch count of a run that ends early.
    pub fn end(&self) -> Option<u32> {
        self.state.lock().end
    }

    /// Stop reason, or 0.
    pub fn reason(&self) -> usize {
        self.state.lock().reason
    }

    /// Reason of a stop request to this process, or 0.
    pub fn requested_reason(&self) -> usize {
        self.stop.load(Ordering::Relaxed)
    }

    /// Makes several processes decide together.
    pub fn coordinate(&self) {
        self.state.lock().is_shared = true;
    }

    /// Closes the barrier until the end is known. Returns the number of started minibatches.
    pub fn hold(&self, reason: usize) -> u32 {
        let mut state = self.state.lock();
        if state.end.is_none() {
            (state.is_held, state.reason) = (true, reason);
        }
        state.started
    }

    /// Sets the end and opens the barrier.
    pub fn end_at(&self, end: Option<u32>) {
        let mut state = self.state.lock();
        (state.end, state.is_held) = (end, false);
        self.changed.notify_all();
    }

    /// Opens the barrier without an agreement, after the run has failed; entering workers will notice the failure.
    pub fn open(&self) {
        self.state.lock().is_held = false;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_run_ends_after_the_last_started_minibatch() {
        let stop = AtomicUsize::new(0);
        let barrier = MinibatchBarrier::new(&stop, 2, 4);
        assert!(barrier.enter(4) && barrier.enter(5) && barrier.enter(4));
        assert_eq!((barrier.end(), barrier.reason()), (None, 0));
        stop.store(15, Ordering::Relaxed);
        // Minibatches 4 and 5 are running: 6 and 7 are the next whole rounds.
        assert_eq!([5, 7, 6, 8, 9].map(|minibatch| barrier.enter(minibatch)), [true, true, true, false, false]);
        assert_eq!((barrier.end(), barrier.reason()), (Some(8), 15));
    }

    #[test]
    fn a_gate_that_is_held_lets_nobody_in_before_the_end_is_known() {
        let stop = AtomicUsize::new(0);
        let barrier = MinibatchBarrier::new(&stop, 1, 0);
        barrier.coordinate();
        assert!(barrier.enter(2));
        stop.store(2, Ordering::Relaxed);
        assert!(barrier.enter(3), "others are to be asked first");
        assert_eq!(barrier.hold(2), 4);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| [barrier.enter(4), barrier.enter(6), barrier.enter(7)]);
            assert_eq!(barrier.end(), None);
            barrier.end_at(barrier.end_after(6));
            assert_eq!(waiter.join().unwrap(), [true, true, false]);
        });
        assert_eq!((barrier.end(), barrier.reason(), barrier.hold(15)), (Some(7), 2, 7));
        // Without an agreement, no worker waits.
        let barrier = MinibatchBarrier::new(&stop, 1, 0);
        barrier.coordinate();
        barrier.hold(2);
        barrier.open();
        assert!(barrier.enter(9));
    }
}
