//! Everything but Linux: what the standard library and core_affinity answer, `None` for the rest.

use memmap2::MmapMut;
use std::{fs::File, io, path::Path};

pub(super) fn physical_cores() -> Vec<usize> {
    let ids = core_affinity::get_core_ids().unwrap_or_default();
    if ids.is_empty() {
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    }
    ids.into_iter().map(|core| core.id).collect()
}

pub(super) fn pin_current_thread(cpu: usize) -> bool {
    let core = core_affinity::CoreId { id: cpu };
    core_affinity::get_core_ids().is_some_and(|ids| ids.contains(&core))
        && core_affinity::set_for_current(core)
}

pub(super) fn available_memory() -> Option<u64> {
    None
}

pub(super) fn total_memory() -> Option<u64> {
    None
}

pub(super) fn peak_resident_bytes() -> Option<u64> {
    None
}

/// Windows sets this variable for every process.
pub(super) fn cpu_name() -> Option<String> {
    std::env::var("PROCESSOR_IDENTIFIER").ok()
}

pub(super) fn advise_huge_pages(_map: &MmapMut) {}

pub(super) fn drop_pages(_bytes: &[u8]) {}

pub(super) fn open_direct(_path: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(windows)]
pub(super) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, into, offset)
}

#[cfg(unix)]
pub(super) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, into, offset)
}

pub(super) fn forget_cached(_file: &File) -> bool {
    false
}

pub(super) fn free_disk(_dir: &Path) -> Option<u64> {
    None
}
