//! A host bank whose records are filled while others of them are read: the memory of a cache over a disk.

#![allow(unsafe_code)] // One block: a part of the bank is written through a shared handle.

use std::{ops::Range, sync::Arc};

use crate::HostBuffer;

/// Host memory that devices read as a bank, and that many threads fill part by part.
#[derive(Debug)]
pub struct FillingBank {
    memory: Arc<HostBuffer>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: `start` leads into `memory`, which moves with it; `part` says who may write where.
unsafe impl Send for FillingBank {}
// SAFETY: as above.
unsafe impl Sync for FillingBank {}

impl FillingBank {
    /// Of memory that nobody else has yet.
    pub fn new(mut memory: HostBuffer) -> Self {
        let all = memory.as_mut_slice();
        let (start, bytes) = (all.as_mut_ptr(), all.len());
        FillingBank { memory: Arc::new(memory), start, bytes }
    }

    /// The memory as devices know it.
    pub fn memory(&self) -> &Arc<HostBuffer> {
        &self.memory
    }

    /// A part of it, to fill it. Asserts that it lies inside.
    ///
    /// # Safety
    /// As long as the slice lives nobody else, host or device, reads or writes these bytes.
    #[allow(clippy::mut_from_ref, reason = "the caller promises that the slice is unique")]
    pub unsafe fn part(&self, part: Range<usize>) -> &mut [u8] {
        assert!(part.start <= part.end && part.end <= self.bytes, "{part:?} of {} bytes", self.bytes);
        // SAFETY: the part lies in the memory, which lives as long as the slice; that nobody else uses it is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(part.start), part.len()) }
    }
}
