//! A monitor (Hoare, 1974): state that threads change, and wait for until a peer is lost.

use crate::comm::communicator::PEER_LOST;
use crate::device::error::DeviceError;
use parking_lot::{Condvar, Mutex};

#[derive(Default)]
pub struct Monitor<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Default)]
struct State<T> {
    value: T,
    is_abandoned: bool,
}

impl<T> Monitor<T> {
    pub fn new(value: T) -> Monitor<T> {
        Monitor { state: Mutex::new(State { value, is_abandoned: false }), changed: Condvar::new() }
    }

    /// Reads or changes the state, and lets all who wait look at it.
    pub fn with<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.state.lock().value);
        self.changed.notify_all();
        result
    }

    /// Blocks until `take` finds something or fails, or a peer is lost.
    pub fn wait<R>(&self, mut take: impl FnMut(&mut T) -> Result<Option<R>, DeviceError>) -> Result<R, DeviceError> {
        let mut state = self.state.lock();
        loop {
            if let Some(found) = take(&mut state.value)? {
                return Ok(found);
            }
            if state.is_abandoned {
                return Err(PEER_LOST);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Fails all waits that find nothing, after a peer was lost.
    pub fn abandon(&self) {
        self.state.lock().is_abandoned = true;
        self.changed.notify_all();
    }
}
