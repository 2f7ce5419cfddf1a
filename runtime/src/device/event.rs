//! Events and timestamps mark points in the work of a stream.

use crate::device::error::DeviceError;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A point in a stream.
#[derive(Clone)]
pub struct Event {
    event: Option<Arc<dyn DeviceEvent>>,
    /// Position among all events, in the order in which they were recorded.
    number: u64,
}

/// An event of a device whose streams run asynchronously.
pub trait DeviceEvent: Any + Send + Sync {
    /// Identifies the stream. Its events occur in the order in which they are recorded.
    fn stream(&self) -> u64;

    fn has_occurred(&self) -> bool;

    /// Waits on the host.
    fn synchronize(&self) -> Result<(), DeviceError>;
}

impl Event {
    /// An event that has occurred.
    pub const OCCURRED: Event = Event { event: None, number: 0 };

    /// An event that has just been recorded.
    pub fn new(event: Arc<dyn DeviceEvent>) -> Event {
        static RECORDED: AtomicU64 = AtomicU64::new(1);
        Event { event: Some(event), number: RECORDED.fetch_add(1, Ordering::Relaxed) }
    }

    /// The device's event; `None` if it has occurred.
    pub fn device_event(&self) -> Option<&dyn DeviceEvent> {
        self.event.as_deref()
    }

    /// True if both are of one stream, and `other` does not occur after this event.
    pub fn includes(&self, other: &Event) -> bool {
        let stream = |event: &Event| event.device_event().map(DeviceEvent::stream);
        stream(self) == stream(other) && self.number >= other.number
    }

    pub fn has_occurred(&self) -> bool {
        self.device_event().is_none_or(DeviceEvent::has_occurred)
    }

    /// Waits on the host.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.device_event().map_or(Ok(()), DeviceEvent::synchronize)
    }
}

/// The time at which a stream reaches a point.
pub enum Timestamp {
    Host(Instant),
    Device(Box<dyn DeviceTimestamp>),
}

/// A timestamp on the clock of a device.
pub trait DeviceTimestamp: Any + Send {
    /// The time since an earlier timestamp of the same stream. Waits on the host for both. `None` for another device's.
    fn since(&self, earlier: &dyn DeviceTimestamp) -> Result<Option<Duration>, DeviceError>;
}

impl Timestamp {
    /// The time since an earlier timestamp of the same stream. Waits on the host for both.
    pub fn since(&self, earlier: &Timestamp) -> Result<Duration, DeviceError> {
        let time = match (self, earlier) {
            (Timestamp::Host(late), Timestamp::Host(early)) => Some(late.duration_since(*early)),
            (Timestamp::Device(late), Timestamp::Device(early)) => late.since(&**early)?,
            _ => None,
        };
        time.ok_or(DeviceError::Foreign { what: "timestamp" })
    }
}
