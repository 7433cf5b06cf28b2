//! The backend's memory, and the one place where a view becomes a slice.
//!
//! Invariant: the backend runs one op at a time under its lock, and `Op::check` has refused every op that binds bytes it
//! writes a second time. So within an op no slice from [`slice_mut`] overlaps another slice, and no slice outlives the op.

#![allow(
    unsafe_code,
    reason = "device memory is shared between handles and written under the backend's lock"
)]

use std::io;

use bytemuck::Pod;
use freetoken_backend::{Buffer, DeviceMemory, HostBytes, HostMemory, View, os};

/// What a buffer of this backend is.
pub(crate) enum CpuMemory {
    /// Anonymous memory of our own.
    Owned {
        /// Start of `_memory`.
        base: *mut u8,
        /// Keeps the pages.
        _memory: os::AnonymousMemory,
        /// Size that was asked for.
        bytes: usize,
    },
    /// Somebody else's bytes, read only.
    Imported(HostBytes),
}

// SAFETY: the pointer leads into `_memory`, which moves with it; access is ordered by the backend's lock.
unsafe impl Send for CpuMemory {}
// SAFETY: as above: nothing is read or written through a shared handle outside of the backend's lock.
unsafe impl Sync for CpuMemory {}

impl DeviceMemory for CpuMemory {
    fn bytes(&self) -> usize {
        match self {
            CpuMemory::Owned { bytes, .. } => *bytes,
            CpuMemory::Imported(bytes) => bytes.len(),
        }
    }
}

impl CpuMemory {
    /// Zeroed memory.
    pub(crate) fn zeroed(bytes: usize) -> io::Result<Self> {
        let mut memory = os::anonymous(bytes.max(1))?;
        Ok(CpuMemory::Owned { base: memory.as_mut().as_mut_ptr(), _memory: memory, bytes })
    }
}

/// Host memory that records lie in.
pub(crate) struct CpuHostMemory {
    pub(crate) memory: os::AnonymousMemory,
    pub(crate) bytes: usize,
}

impl HostMemory for CpuHostMemory {
    fn bytes(&self) -> &[u8] {
        &self.memory.as_ref()[..self.bytes]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_mut()[..self.bytes]
    }
}

fn memory(buffer: &Buffer) -> &CpuMemory {
    buffer.downcast().expect("a view of this backend")
}

/// All bytes of a buffer.
pub(crate) fn bytes(buffer: &Buffer) -> &[u8] {
    match memory(buffer) {
        CpuMemory::Imported(bytes) => bytes.as_slice(),
        CpuMemory::Owned { base, bytes, .. } => {
            // SAFETY: the whole buffer, read under the conditions of `slice`.
            unsafe { std::slice::from_raw_parts(*base, *bytes) }
        }
    }
}

/// The elements of a view. A view that does not end on an element loses the rest.
pub(crate) fn slice<T: Pod>(view: &View) -> &[T] {
    let range = view.range();
    match memory(view.buffer()) {
        CpuMemory::Imported(bytes) => {
            let bytes = &bytes.as_slice()[range];
            bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
        }
        CpuMemory::Owned { base, .. } => {
            // SAFETY: a view lies inside its buffer, whose pages live as long as the view borrows it; by the module's
            // invariant nobody writes these bytes while the slice lives; any bit pattern is a T, and alignment is asserted.
            unsafe {
                let start = base.add(range.start);
                assert!(start.cast::<T>().is_aligned(), "a view aligned to its elements");
                std::slice::from_raw_parts(start.cast(), range.len() / size_of::<T>())
            }
        }
    }
}

/// The elements of a view, to write them. Asserts that the memory is our own.
#[allow(clippy::mut_from_ref, reason = "a view is a handle; the module's invariant makes the slice unique")]
pub(crate) fn slice_mut<T: Pod>(view: &View) -> &mut [T] {
    let range = view.range();
    match memory(view.buffer()) {
        CpuMemory::Imported(_) => panic!("imported memory is read only"),
        CpuMemory::Owned { base, .. } => {
            // SAFETY: as in `slice`; by the module's invariant no other slice overlaps these bytes while this one lives.
            unsafe {
                let start = base.add(range.start);
                assert!(start.cast::<T>().is_aligned(), "a view aligned to its elements");
                std::slice::from_raw_parts_mut(start.cast(), range.len() / size_of::<T>())
            }
        }
    }
}
