//! A meeting of several workers: each brings something, all leave with what everyone brought, in the order of members.
//!
//! The sum over replicas is built on it: every replica adds the same terms in the same order, so all get the same bits
//! without a leader.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Why a meeting did not take place: some member is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abandoned;

struct Meeting<T> {
    brought: Vec<Option<T>>,
    all: Option<Arc<Vec<T>>>,
    left: usize,
}

struct State<T> {
    meetings: HashMap<u64, Meeting<T>>,
    abandoned: bool,
}

/// Meetings of a fixed group of members, told apart by number.
pub struct Rendezvous<T> {
    members: usize,
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Rendezvous<T> {
    /// A place for `members` workers to meet.
    pub fn new(members: usize) -> Rendezvous<T> {
        let state = Mutex::new(State { meetings: HashMap::new(), abandoned: false });
        Rendezvous { members, state, changed: Condvar::new() }
    }

    // A worker that panicked holding the lock left only whole meetings behind: nothing under the lock can panic half way.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Member `member` brings its part to meeting `number`, and does not wait.
    pub fn bring(&self, number: u64, member: usize, part: T) {
        let mut state = self.lock();
        let members = self.members;
        let meeting = state.meetings.entry(number).or_insert_with(|| Meeting {
            brought: (0..members).map(|_| None).collect(),
            all: None,
            left: 0,
        });
        meeting.brought[member] = Some(part);
        if meeting.brought.iter().all(Option::is_some) {
            meeting.all = Some(Arc::new(meeting.brought.drain(..).flatten().collect()));
            self.changed.notify_all();
        }
    }

    /// Waits until all members brought their part to the meeting. Ends when they did, or when a member abandons.
    pub fn meet(&self, number: u64) -> Result<Arc<Vec<T>>, Abandoned> {
        let mut state = self.lock();
        loop {
            if let Some(meeting) = state.meetings.get_mut(&number)
                && let Some(all) = meeting.all.clone()
            {
                meeting.left += 1;
                if meeting.left == self.members {
                    state.meetings.remove(&number);
                }
                return Ok(all);
            }
            if state.abandoned {
                return Err(Abandoned);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A member will not come any more; everyone who waits is told.
    pub fn abandon(&self) {
        self.lock().abandoned = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_leave_with_all_parts_in_order() {
        let place = Rendezvous::new(3);
        std::thread::scope(|scope| {
            for member in 0..3 {
                let place = &place;
                scope.spawn(move || {
                    for number in 0..50 {
                        place.bring(number, member, member as u64 * 100 + number);
                        let all = place.meet(number).unwrap();
                        assert_eq!(*all, [number, 100 + number, 200 + number]);
                    }
                });
            }
        });
        assert!(place.lock().meetings.is_empty());
    }

    #[test]
    fn nobody_waits_for_a_member_that_is_gone() {
        let place = Rendezvous::<u32>::new(2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                place.bring(0, 0, 1);
                place.meet(0)
            });
            place.abandon();
            assert_eq!(waiter.join().unwrap(), Err(Abandoned));
        });
    }
}
