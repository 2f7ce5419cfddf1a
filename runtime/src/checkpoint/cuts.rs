//! Where a run is cut for checkpoints, and where it ends early when it is told to.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// After which minibatches a run is cut: every so many, or as soon behind as rounds end at every stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Minibatches between two cuts, at least 1.
    pub every: u32,
    /// Minibatches between two places where rounds end at every stage.
    pub period: u32,
    /// Minibatches of the whole run.
    pub whole: u32,
}

impl Cuts {
    /// The first cut behind so many minibatches; nothing where the run ends before.
    pub fn after(&self, minibatches: u32) -> Option<u32> {
        let every = self.every.max(1);
        // Multiples in front of that place may be cut behind it.
        let first = (minibatches.saturating_sub(self.period) / every).max(1);
        let cuts = (first..).map_while(|count| up(count.checked_mul(every)?, self.period));
        cuts.take_while(|cut| *cut <= self.whole).find(|cut| *cut > minibatches)
    }

    /// Whether there is a cut after so many minibatches.
    pub fn is_at(&self, minibatches: u32) -> bool {
        minibatches > 0 && self.after(minibatches - 1) == Some(minibatches)
    }
}

/// The next multiple of a period.
fn up(minibatches: u32, period: u32) -> Option<u32> {
    minibatches.div_ceil(period.max(1)).checked_mul(period.max(1))
}

/// Where all workers ask before they begin a minibatch, so that a run that is told to stop ends for all of them at the same one.
///
/// The end lies behind a minibatch that nobody has begun, so nobody has made the update in front of it: each worker still gives its
/// part of that cut.
pub struct Gate<'a> {
    stop: &'a AtomicBool,
    period: u32,
    state: Mutex<State>,
}

struct State {
    /// Minibatches that some worker has begun.
    begun: u32,
    /// Minibatches that the run has, once it is told to stop.
    end: Option<u32>,
}

impl<'a> Gate<'a> {
    /// A gate of a run of which `done` minibatches are made. Whoever sets `stop` ends it.
    pub fn new(stop: &'a AtomicBool, period: u32, done: u32) -> Gate<'a> {
        Gate { stop, period, state: Mutex::new(State { begun: done, end: None }) }
    }

    // Nothing under the lock can panic half way.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the minibatch may be begun.
    pub fn enter(&self, minibatch: u32) -> bool {
        let mut state = self.lock();
        if state.end.is_none() && self.stop.load(Ordering::Relaxed) {
            state.end = up(state.begun.saturating_add(1), self.period);
        }
        let may = state.end.is_none_or(|end| minibatch < end);
        if may {
            state.begun = state.begun.max(minibatch.saturating_add(1));
        }
        may
    }

    /// Minibatches that the run has, if it ends early.
    pub fn end(&self) -> Option<u32> {
        self.lock().end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_lie_where_rounds_end() {
        let all = |every, period, whole| {
            let cuts = Cuts { every, period, whole };
            let found: Vec<u32> = (1..=whole).filter(|at| cuts.is_at(*at)).collect();
            // One after the other from anywhere is the same.
            for from in 0..whole {
                assert_eq!(cuts.after(from), found.iter().copied().find(|cut| *cut > from), "{every} {period} {from}");
            }
            found
        };
        assert_eq!(all(3, 1, 12), [3, 6, 9, 12]);
        assert_eq!(all(3, 2, 13), [4, 6, 10, 12]);
        assert_eq!(all(1, 4, 11), [4, 8]);
        assert_eq!(all(5, 4, 7), [0u32; 0]);
        assert_eq!(Cuts { every: u32::MAX, period: 7, whole: u32::MAX }.after(u32::MAX), None);
    }

    #[test]
    fn a_run_that_is_told_to_stop_ends_behind_what_nobody_has_begun() {
        let stop = AtomicBool::new(false);
        let gate = Gate::new(&stop, 2, 4);
        assert!(gate.enter(4) && gate.enter(5) && gate.enter(4));
        assert_eq!(gate.end(), None);
        stop.store(true, Ordering::Relaxed);
        // Minibatches 4 and 5 are under way: 6 and 7 are the next whole rounds.
        assert_eq!([5, 7, 6, 8, 9].map(|minibatch| gate.enter(minibatch)), [true, true, true, false, false]);
        assert_eq!(gate.end(), Some(8));
    }
}
