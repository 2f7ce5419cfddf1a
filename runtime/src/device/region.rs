//! Ranges of device memory.
//!
//! A region is an address and a length: the address of a GPU's memory is opaque to the host. Regions borrow their
//! buffer, so safe code can neither outlive it nor write a range that it also reads. Only the device that owns the
//! memory dereferences the address.

use crate::device::error::DeviceError;
use std::marker::PhantomData;
use std::ops::Range;

/// Memory to read.
#[derive(Clone, Copy)]
pub struct Region<'a> {
    start: *mut u8,
    bytes: usize,
    is_host: bool,
    memory: PhantomData<&'a [u8]>,
}

/// Memory to write.
pub struct RegionMut<'a>(Region<'a>, PhantomData<&'a mut [u8]>);

impl<'a> Region<'a> {
    /// # Safety
    ///
    /// The memory is allocated for the lifetime, and not written where it is read. With `is_host`, the host may dereference
    /// `start` and the bytes are initialised.
    pub(super) unsafe fn new(start: *mut u8, bytes: usize, is_host: bool) -> Region<'a> {
        Region { start, bytes, is_host, memory: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The address of the first byte, in the address space of the device.
    pub fn address(&self) -> u64 {
        self.start as usize as u64
    }

    /// Panics if the range is not within the region.
    pub fn slice(self, range: Range<usize>) -> Region<'a> {
        assert!(range.start <= range.end && range.end <= self.bytes, "a range lies within its region");
        Region { start: self.start.wrapping_add(range.start), bytes: range.end - range.start, ..self }
    }

    /// A view through which the memory may be written.
    ///
    /// # Safety
    ///
    /// Nothing else reads or writes the memory for the lifetime, and it may be written.
    pub unsafe fn assume_exclusive(self) -> RegionMut<'a> {
        RegionMut(self, PhantomData)
    }

    /// The bytes of host memory.
    pub fn host(self) -> Result<&'a [u8], DeviceError> {
        match self.is_host {
            // SAFETY: the region borrows initialised host memory: see `new`.
            true => Ok(unsafe { std::slice::from_raw_parts(self.start, self.bytes) }),
            false => Err(DeviceError::Foreign { what: "memory" }),
        }
    }
}

impl<'a> RegionMut<'a> {
    pub fn len(&self) -> usize {
        self.0.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.0.bytes == 0
    }

    /// The address of the first byte, in the address space of the device.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// A shorter borrow.
    pub fn reborrow(&mut self) -> RegionMut<'_> {
        RegionMut(self.0, PhantomData)
    }

    pub fn as_region(&self) -> Region<'_> {
        self.0
    }

    /// Panics if the range is not within the region.
    pub fn slice(self, range: Range<usize>) -> RegionMut<'a> {
        RegionMut(self.0.slice(range), PhantomData)
    }

    /// The bytes of host memory.
    pub fn host(self) -> Result<&'a mut [u8], DeviceError> {
        match self.0.is_host {
            // SAFETY: the region borrows initialised host memory exclusively: see `Region::assume_exclusive`.
            true => Ok(unsafe { std::slice::from_raw_parts_mut(self.0.start, self.0.bytes) }),
            false => Err(DeviceError::Foreign { what: "memory" }),
        }
    }
}
