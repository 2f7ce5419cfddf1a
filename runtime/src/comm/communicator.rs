//! A communicator: every member contributes a value, and every member receives all values in rank order.
//!
//! Stages exchange the gradients of tied weights with it. Replicas learn which gradients there are, and exchange samples
//! of moving averages and norms. Every member adds the same terms in the same order, so all get bitwise equal results
//! without a leader. If members are in several processes, each process has its own copy and forwards its contributions.

use crate::comm::monitor::Monitor;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use compiler::op::KernelError;
use std::collections::HashMap;
use std::sync::Arc;

/// The failure of a collective because a member is lost, or sent something invalid.
pub const PEER_LOST: DeviceError = DeviceError::Kernel(KernelError::Disconnected);

/// Numbered tensors, which a member contributes: terms of a tied weight by rank, shards by parameter, or the one
/// operand of a collective.
pub type Tensors = Vec<(usize, Arc<Buffer>)>;

struct Collective<T> {
    contributions: Vec<Option<T>>,
    values: Option<Arc<Vec<T>>>,
    readers: usize,
}

/// Forwards a local contribution to other processes: sequence number, rank, value.
pub type Forward<T> = Box<dyn Fn(u64, usize, &T) + Send + Sync>;

/// Collectives of a fixed group of members, identified by sequence number.
pub struct Communicator<T> {
    members: usize,
    local_members: usize,
    forward: Option<Forward<T>>,
    collectives: Monitor<HashMap<u64, Collective<T>>>,
}

impl<T> Communicator<T> {
    /// Creates a communicator within one process.
    pub fn new(members: usize) -> Communicator<T> {
        Communicator::among(members, members, None)
    }

    /// Creates a communicator with `local_members` local members; `forward` sends their contributions to the other processes.
    pub fn among(members: usize, local_members: usize, forward: Option<Forward<T>>) -> Communicator<T> {
        Communicator { members, local_members, forward, collectives: Monitor::new(HashMap::new()) }
    }

    /// True if other processes receive the contributions of local members.
    pub fn has_remote_members(&self) -> bool {
        self.forward.is_some()
    }

    /// Contributes a value to collective `number` without blocking.
    pub fn contribute(&self, number: u64, member: usize, part: T) {
        if let Some(forward) = &self.forward {
            forward(number, member, &part);
        }
        self.arrive(number, member, part);
    }

    /// Records a contribution. Returns false if the rank is invalid or has already contributed.
    pub fn arrive(&self, number: u64, member: usize, part: T) -> bool {
        self.collectives.with(|collectives| {
            let collective = collectives.entry(number).or_insert_with(|| Collective {
                contributions: (0..self.members).map(|_| None).collect(),
                values: None,
                readers: 0,
            });
            match collective.contributions.get_mut(member) {
                Some(slot @ None) => *slot = Some(part),
                _ => return false,
            }
            if collective.contributions.iter().all(Option::is_some) {
                collective.values = Some(Arc::new(collective.contributions.drain(..).flatten().collect()));
            }
            true
        })
    }

    /// Blocks until all members have contributed, or one abandons. Returns the values in rank order.
    pub fn wait(&self, number: u64) -> Result<Arc<Vec<T>>, DeviceError> {
        self.collectives.wait(|collectives| {
            let Some(collective) = collectives.get_mut(&number) else { return Ok(None) };
            let Some(values) = collective.values.clone() else { return Ok(None) };
            collective.readers += 1;
            if collective.readers == self.local_members {
                collectives.remove(&number);
            }
            Ok(Some(values))
        })
    }

    /// Number of collectives that have contributions, local or remote, and that not all local members have read.
    pub fn unfinished(&self) -> usize {
        self.collectives.with(|collectives| collectives.len())
    }

    /// Fails all current and future waits, after a member was lost.
    pub fn abandon(&self) {
        self.collectives.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_leave_with_all_parts_in_order() {
        let communicator = Communicator::new(3);
        std::thread::scope(|scope| {
            for member in 0..3 {
                let communicator = &communicator;
                scope.spawn(move || {
                    for number in 0..50 {
                        communicator.contribute(number, member, member as u64 * 100 + number);
                        let values = communicator.wait(number).unwrap();
                        assert_eq!(*values, [number, 100 + number, 200 + number]);
                    }
                });
            }
        });
        assert!(communicator.unfinished() == 0);
    }

    #[test]
    fn parts_are_forwarded_and_arrive_once() {
        let (to, receiver) = crossbeam_channel::unbounded();
        let forward: Forward<u32> = Box::new(move |number, member, part| to.send((number, member, *part)).unwrap());
        let communicator = Communicator::among(2, 1, Some(forward));
        assert!(communicator.arrive(3, 1, 8));
        assert!(!communicator.arrive(3, 1, 9), "it has come already");
        assert!(!communicator.arrive(3, 2, 9), "there is no such member");
        communicator.contribute(3, 0, 7);
        assert_eq!(receiver.try_recv(), Ok((3, 0, 7)));
        assert_eq!(*communicator.wait(3).unwrap(), [7, 8]);
        assert!(communicator.unfinished() == 0);
    }

    #[test]
    fn nobody_waits_for_a_member_that_is_gone() {
        let communicator = Communicator::<u32>::new(2);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                communicator.contribute(0, 0, 1);
                communicator.wait(0)
            });
            communicator.abandon();
            assert_eq!(waiter.join().unwrap(), Err(PEER_LOST));
        });
    }
}
