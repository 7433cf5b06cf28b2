//! What differs by operating system: cores and pinning, memory sizes, anonymous memory, page hints, reads past the page cache.
//!
//! Both implementations have the same functions: `linux` reads `/proc`, `/sys` and the control group; `portable`
//! (Windows, macOS, the BSDs) answers what the standard library and two crates can, and `None` otherwise. This module
//! knows no model and no device.

#[cfg(target_os = "linux")]
#[path = "linux.rs"]
mod imp;
#[cfg(not(target_os = "linux"))]
#[path = "portable.rs"]
mod imp;

mod direct;

use memmap2::MmapMut;
use std::{io, path::Path};

pub use direct::{DIRECT_ALIGN, DirectFile};

/// One logical CPU for each physical core that this process may use, ascending; never empty.
///
/// Respects the calling thread's affinity mask, so ask before pinning. On Linux a control group's CPU quota shortens
/// the list; elsewhere two hyperthreads may count as two cores.
pub fn physical_cores() -> Vec<usize> {
    imp::physical_cores()
}

/// Ties the calling thread, and threads it starts later, to one logical CPU of [`physical_cores`]. False where the
/// system refuses, which costs speed and nothing else.
pub fn pin_current_thread(cpu: usize) -> bool {
    imp::pin_current_thread(cpu)
}

/// Bytes of RAM that this process can still fill without swapping: free and reclaimable, within the control group.
pub fn available_memory() -> Option<u64> {
    imp::available_memory()
}

/// Bytes of RAM of the machine, or of the control group's limit if that is smaller.
pub fn total_memory() -> Option<u64> {
    imp::total_memory()
}

/// The largest resident size of this process so far, in bytes.
pub fn peak_resident_bytes() -> Option<u64> {
    imp::peak_resident_bytes()
}

/// The processor's marketing name, or its architecture where the system does not tell.
pub fn cpu_name() -> String {
    imp::cpu_name().unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH))
}

/// Hints that `bytes`, usually a range of a memory-mapped file, will not be read again soon, so that its pages are the
/// first to be reclaimed. The contents stay: a later read brings them back from the file.
pub fn drop_pages(bytes: &[u8]) {
    imp::drop_pages(bytes);
}

/// Bytes that this user can still write to the file system of a directory.
pub fn free_disk(dir: &Path) -> Option<u64> {
    imp::free_disk(dir)
}

/// Memory outside the allocator: zeroed, page-aligned, on huge pages where the system grants them, and physically
/// present only once written.
#[derive(Debug)]
pub struct AnonymousMemory(MmapMut);

/// Reserves `bytes` of [`AnonymousMemory`].
///
/// # Errors
/// The system's refusal, when the address space or the commit limit is exhausted.
pub fn anonymous(bytes: usize) -> io::Result<AnonymousMemory> {
    let map = MmapMut::map_anon(bytes)?;
    imp::advise_huge_pages(&map);
    Ok(AnonymousMemory(map))
}

impl AsRef<[u8]> for AnonymousMemory {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl AsMut<[u8]> for AnonymousMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn cores_are_distinct_and_the_first_can_be_pinned() {
        let cores = physical_cores();
        assert!(!cores.is_empty());
        assert_eq!(cores.iter().collect::<BTreeSet<_>>().len(), cores.len());
        assert!(!pin_current_thread(usize::MAX));
        if cfg!(target_os = "linux") {
            assert!(std::thread::spawn(move || pin_current_thread(cores[0])).join().unwrap());
        }
    }

    #[test]
    fn memory_sizes_are_ordered() {
        if let (Some(available), Some(total)) = (available_memory(), total_memory()) {
            assert!(0 < available && available <= total, "{available} of {total}");
        }
        assert!(!cpu_name().is_empty());
    }

    #[test]
    fn anonymous_memory_is_zeroed_aligned_and_keeps_its_bytes_when_dropped_from_the_resident_set() {
        let mut memory = anonymous(3 << 20).unwrap();
        assert_eq!(memory.as_ref().as_ptr().addr() % 4096, 0);
        assert!(memory.as_ref().iter().all(|&byte| byte == 0));
        memory.as_mut().fill(7);
        drop_pages(&memory.as_ref()[100..(2 << 20) + 1]);
        drop_pages(&[]);
        assert_eq!(memory.as_ref().len(), 3 << 20);
        assert!(memory.as_ref().iter().all(|&byte| byte == 7));
        if let Some(peak) = peak_resident_bytes() {
            assert!(peak >= 3 << 20);
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(anonymous(usize::MAX / 4).is_err());
    }
}
