//! The barrier before each minibatch, which makes a stopped run end at the same minibatch on all workers.
//!
//! The run ends after a minibatch that no worker has started, so no worker has applied its update and each still
//! contributes its snapshot. With several processes, all barriers hold while the processes agree (`process::stop`).

use crate::checkpoint::points::up;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Admits workers to minibatches until the run is stopped.
pub struct MinibatchBarrier<'a> {
    stop: &'a AtomicUsize,
    period: u32,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Minibatches that some worker of this process has started.
    begun: u32,
    /// Minibatch count at which the stopped run ends.
    end: Option<u32>,
    /// Stop reason (signal number), or 0.
    reason: usize,
    /// True if several processes decide together.
    is_shared: bool,
    is_held: bool,
}

impl<'a> MinibatchBarrier<'a> {
    /// A gate after `done` finished minibatches. Setting `stop` to a non-zero reason ends the run.
    pub fn new(stop: &'a AtomicUsize, period: u32, done: u32) -> MinibatchBarrier<'a> {
        let state = State { begun: done, end: None, reason: 0, is_shared: false, is_held: false };
        MinibatchBarrier { stop, period, state: Mutex::new(state), changed: Condvar::new() }
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the minibatch may start. Blocks while the processes agree on the end; an agreement or the end of the
    /// connections unblocks it.
    pub fn enter(&self, minibatch: u32) -> bool {
        let mut state = self.lock();
        while state.is_held {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let reason = self.asked();
        if state.end.is_none() && !state.is_shared && reason != 0 {
            (state.end, state.reason) = (self.behind(state.begun), reason);
        }
        let may = state.end.is_none_or(|end| minibatch < end);
        if may {
            state.begun = state.begun.max(minibatch.saturating_add(1));
        }
        may
    }

    /// The first valid end position after `begun` started minibatches.
    pub fn behind(&self, begun: u32) -> Option<u32> {
        up(begun.saturating_add(1), self.period)
    }

    /// Minibatch count of a run that ends early.
    pub fn end(&self) -> Option<u32> {
        self.lock().end
    }

    /// Stop reason, or 0.
    pub fn reason(&self) -> usize {
        self.lock().reason
    }

    /// Reason of a stop request to this process, or 0.
    pub fn asked(&self) -> usize {
        self.stop.load(Ordering::Relaxed)
    }

    /// Makes several processes decide together.
    pub fn share(&self) {
        self.lock().is_shared = true;
    }

    /// Closes the gate until the end is known. Returns the number of started minibatches.
    pub fn hold(&self, reason: usize) -> u32 {
        let mut state = self.lock();
        if state.end.is_none() {
            (state.is_held, state.reason) = (true, reason);
        }
        state.begun
    }

    /// Sets the end and opens the gate.
    pub fn end_at(&self, end: Option<u32>) {
        let mut state = self.lock();
        (state.end, state.is_held) = (end, false);
        self.changed.notify_all();
    }

    /// Opens the gate without an agreement, after the run has failed; entering workers will notice the failure.
    pub fn let_go(&self) {
        self.lock().is_held = false;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_run_ends_after_the_last_started_minibatch() {
        let stop = AtomicUsize::new(0);
        let gate = MinibatchBarrier::new(&stop, 2, 4);
        assert!(gate.enter(4) && gate.enter(5) && gate.enter(4));
        assert_eq!((gate.end(), gate.reason()), (None, 0));
        stop.store(15, Ordering::Relaxed);
        // Minibatches 4 and 5 are running: 6 and 7 are the next whole rounds.
        assert_eq!([5, 7, 6, 8, 9].map(|minibatch| gate.enter(minibatch)), [true, true, true, false, false]);
        assert_eq!((gate.end(), gate.reason()), (Some(8), 15));
    }

    #[test]
    fn a_gate_that_is_held_lets_nobody_in_before_the_end_is_known() {
        let stop = AtomicUsize::new(0);
        let gate = MinibatchBarrier::new(&stop, 1, 0);
        gate.share();
        assert!(gate.enter(2));
        stop.store(2, Ordering::Relaxed);
        assert!(gate.enter(3), "others are to be asked first");
        assert_eq!(gate.hold(2), 4);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| [gate.enter(4), gate.enter(6), gate.enter(7)]);
            assert_eq!(gate.end(), None);
            gate.end_at(gate.behind(6));
            assert_eq!(waits.join().unwrap(), [true, true, false]);
        });
        assert_eq!((gate.end(), gate.reason(), gate.hold(15)), (Some(7), 2, 7));
        // Without an agreement, no worker waits.
        let gate = MinibatchBarrier::new(&stop, 1, 0);
        gate.share();
        gate.hold(2);
        gate.let_go();
        assert!(gate.enter(9));
    }
}
