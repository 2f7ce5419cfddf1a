//! A communicator: every member contributes a value, and every member receives all values in rank order.
//!
//! All-reduce over replicas uses it. Every replica adds the same terms in the same order, so all get the same bits without a
//! leader. With members in other processes, each process has its own copy; contributions are forwarded to the others.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Why a meeting did not take place: some member is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLost;

struct Meeting<T> {
    brought: Vec<Option<T>>,
    all: Option<Arc<Vec<T>>>,
    left: usize,
}

struct State<T> {
    meetings: HashMap<u64, Meeting<T>>,
    abandoned: bool,
}

/// Tells other processes what a member of this one brings: the meeting's number, the member, its part.
pub type Forward<T> = Box<dyn Fn(u64, usize, &T) + Send + Sync>;

/// Meetings of a fixed group of members, told apart by number.
pub struct Communicator<T> {
    members: usize,
    /// Members that are workers of this process.
    here: usize,
    forward: Option<Forward<T>>,
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T> Communicator<T> {
    /// A place for `members` workers to meet.
    pub fn new(members: usize) -> Communicator<T> {
        Communicator::among(members, members, None)
    }

    /// A place of which only so many members are `here`, and others are told of their parts.
    pub fn among(members: usize, here: usize, forward: Option<Forward<T>>) -> Communicator<T> {
        let state = Mutex::new(State { meetings: HashMap::new(), abandoned: false });
        Communicator { members, here, forward, state, changed: Condvar::new() }
    }

    // A worker that panicked holding the lock left only whole meetings behind: nothing under the lock can panic half way.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Member `member` brings its part to meeting `number`, and does not wait.
    pub fn bring(&self, number: u64, member: usize, part: T) {
        if let Some(forward) = &self.forward {
            forward(number, member, &part);
        }
        self.arrive(number, member, part);
    }

    /// The part of a member comes to meeting `number`; says whether that member was still awaited there.
    pub fn arrive(&self, number: u64, member: usize, part: T) -> bool {
        let mut state = self.lock();
        let members = self.members;
        let meeting = state.meetings.entry(number).or_insert_with(|| Meeting {
            brought: (0..members).map(|_| None).collect(),
            all: None,
            left: 0,
        });
        match meeting.brought.get_mut(member) {
            Some(place @ None) => *place = Some(part),
            _ => return false,
        }
        if meeting.brought.iter().all(Option::is_some) {
            meeting.all = Some(Arc::new(meeting.brought.drain(..).flatten().collect()));
            self.changed.notify_all();
        }
        true
    }

    /// Waits until all members brought their part to the meeting. Ends when they did, or when a member abandons.
    pub fn meet(&self, number: u64) -> Result<Arc<Vec<T>>, PeerLost> {
        let mut state = self.lock();
        loop {
            if let Some(meeting) = state.meetings.get_mut(&number)
                && let Some(all) = meeting.all.clone()
            {
                meeting.left += 1;
                if meeting.left == self.here {
                    state.meetings.remove(&number);
                }
                return Ok(all);
            }
            if state.abandoned {
                return Err(PeerLost);
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
        let place = Communicator::new(3);
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
    fn parts_are_forwarded_and_arrive_once() {
        let (to, told) = crossbeam_channel::unbounded();
        let forward: Forward<u32> = Box::new(move |number, member, part| to.send((number, member, *part)).unwrap());
        let place = Communicator::among(2, 1, Some(forward));
        assert!(place.arrive(3, 1, 8));
        assert!(!place.arrive(3, 1, 9), "it has come already");
        assert!(!place.arrive(3, 2, 9), "there is no such member");
        place.bring(3, 0, 7);
        assert_eq!(told.try_recv(), Ok((3, 0, 7)));
        assert_eq!(*place.meet(3).unwrap(), [7, 8]);
        assert!(place.lock().meetings.is_empty());
    }

    #[test]
    fn nobody_waits_for_a_member_that_is_gone() {
        let place = Communicator::<u32>::new(2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                place.bring(0, 0, 1);
                place.meet(0)
            });
            place.abandon();
            assert_eq!(waiter.join().unwrap(), Err(PeerLost));
        });
    }
}
