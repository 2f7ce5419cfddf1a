//! Copies to the host that may still be under way.

use crate::device::error::DeviceError;

/// A copy of device memory on the host: see [`Stream::begin_download`](crate::device::api::Stream::begin_download).
pub enum Download {
    Done(Vec<u8>),
    Pending(Box<dyn PendingDownload>),
}

/// A copy that a device makes.
pub trait PendingDownload: Send {
    fn is_done(&self) -> Result<bool, DeviceError>;

    /// Waits for the copy, and for no later work.
    fn wait(&self) -> Result<(), DeviceError>;

    /// Like [`PendingDownload::wait`], and gives the copy.
    fn bytes(self: Box<Self>) -> Result<Vec<u8>, DeviceError>;
}

impl Download {
    pub fn is_done(&self) -> Result<bool, DeviceError> {
        match self {
            Download::Done(_) => Ok(true),
            Download::Pending(copy) => copy.is_done(),
        }
    }

    /// Waits for the copy, and for no later work.
    pub fn wait(&self) -> Result<(), DeviceError> {
        match self {
            Download::Done(_) => Ok(()),
            Download::Pending(copy) => copy.wait(),
        }
    }

    /// Like [`Download::wait`], and gives the copy.
    pub fn bytes(self) -> Result<Vec<u8>, DeviceError> {
        match self {
            Download::Done(bytes) => Ok(bytes),
            Download::Pending(copy) => copy.bytes(),
        }
    }
}
