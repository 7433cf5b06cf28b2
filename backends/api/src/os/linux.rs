//! Linux: `/proc`, `/sys`, control group v2, `madvise`, `O_DIRECT`. The parsers are pure and take the text of the file.

#![allow(unsafe_code)] // One block: madvise with an advice that never changes what the pages hold.

use memmap2::{Advice, MmapMut};
use std::fs::{File, OpenOptions, read_to_string};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// `cpu_set_t` holds this many CPUs; core_affinity panics beyond.
const CPU_SET_SIZE: usize = 1024;

pub(super) fn physical_cores() -> Vec<usize> {
    let allowed: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().iter().map(|core| core.id).collect();
    let siblings = |cpu: usize| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        read_to_string(path).ok().and_then(|text| parse_cpu_list(&text)).unwrap_or_else(|| vec![cpu])
    };
    let mut cores = one_per_core(&allowed, siblings);
    let quota = cgroup_dirs()
        .iter()
        .filter_map(|dir| parse_cpu_max(&read_to_string(dir.join("cpu.max")).ok()?))
        .min();
    cores.truncate(quota.unwrap_or(usize::MAX));
    if cores.is_empty() { vec![0] } else { cores }
}

pub(super) fn pin_current_thread(cpu: usize) -> bool {
    cpu < CPU_SET_SIZE && core_affinity::set_for_current(core_affinity::CoreId { id: cpu })
}

pub(super) fn available_memory() -> Option<u64> {
    let machine = kib_field(&read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let left = cgroup_dirs().into_iter().filter_map(|dir| {
        let limit = parse_limit(&read_to_string(dir.join("memory.max")).ok()?)?;
        let used = parse_limit(&read_to_string(dir.join("memory.current")).ok()?)?;
        let stat = read_to_string(dir.join("memory.stat")).unwrap_or_default();
        Some(limit.saturating_sub(used.saturating_sub(reclaimable(&stat))))
    });
    Some(left.fold(machine, u64::min))
}

pub(super) fn total_memory() -> Option<u64> {
    let machine = kib_field(&read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    let limits = cgroup_dirs()
        .into_iter()
        .filter_map(|dir| parse_limit(&read_to_string(dir.join("memory.max")).ok()?));
    Some(limits.fold(machine, u64::min))
}

pub(super) fn peak_resident_bytes() -> Option<u64> {
    kib_field(&read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

pub(super) fn cpu_name() -> Option<String> {
    let text = read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?;
    Some(name.trim().to_owned())
}

pub(super) fn advise_huge_pages(map: &MmapMut) {
    // Kernels without transparent huge pages refuse; the memory then has small pages.
    let _ = map.advise(Advice::HugePage);
}

pub(super) fn drop_pages(bytes: &[u8]) {
    let page = rustix::param::page_size();
    let pointer = bytes.as_ptr().cast_mut();
    let skipped = pointer.align_offset(page);
    let len = bytes.len().saturating_sub(skipped) / page * page;
    if len == 0 {
        return;
    }
    // SAFETY: the range lies inside `bytes`, and PAGEOUT only writes back and unmaps: every later read sees the same
    // contents. A kernel that does not know it refuses, and the pages stay.
    let _ = unsafe {
        rustix::mm::madvise(pointer.wrapping_add(skipped).cast(), len, rustix::mm::Advice::LinuxPageOut)
    };
}

pub(super) fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32).open(path)
}

pub(super) fn read_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<usize> {
    file.read_at(into, offset)
}

pub(super) fn forget_cached(file: &File) -> bool {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).is_ok()
}

pub(super) fn free_disk(dir: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(dir).ok()?;
    found.f_bavail.checked_mul(found.f_frsize)
}

/// The smallest allowed CPU of each sibling set, in the order of `allowed`.
fn one_per_core(allowed: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let is_first =
        |cpu: usize| siblings(cpu).into_iter().filter(|other| allowed.contains(other)).min() == Some(cpu);
    allowed.iter().copied().filter(|&cpu| is_first(cpu)).collect()
}

/// This process's control group (v2) and its ancestors: a limit anywhere on the way binds.
fn cgroup_dirs() -> Vec<PathBuf> {
    read_to_string("/proc/self/cgroup").ok().map_or_else(Vec::new, |text| parse_cgroup(&text))
}

fn parse_cgroup(text: &str) -> Vec<PathBuf> {
    let Some(path) = text.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    let dir = Path::new(CGROUP_ROOT).join(path.trim_end());
    dir.ancestors().take_while(|dir| dir.starts_with(CGROUP_ROOT)).map(Path::to_owned).collect()
}

/// A list such as `0-3,8`; `None` if it is anything else.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cpus.extend((first..=last).take(CPU_SET_SIZE));
    }
    Some(cpus)
}

/// `cpu.max` is `<quota> <period>` in microseconds, or `max <period>`: whole cores, rounded up, at least 1.
fn parse_cpu_max(text: &str) -> Option<usize> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (usize, usize) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then(|| quota.div_ceil(period).max(1))
}

/// Bytes in a file such as `memory.max`; `None` for `max`.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// Bytes of page cache that `memory.current` counts and the kernel can take back.
fn reclaimable(memory_stat: &str) -> u64 {
    let field = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        matches!(name, "inactive_file" | "active_file").then(|| value.parse::<u64>().ok())?
    };
    memory_stat.lines().filter_map(field).fold(0, u64::saturating_add)
}

/// A field `<name> <value> kB` of `/proc/meminfo` or `/proc/self/status`, in bytes.
fn kib_field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(parse_cpu_list("5"), Some(vec![5]));
        assert_eq!(parse_cpu_list(""), None);
        assert_eq!(parse_cpu_list("0-x"), None);
        assert_eq!(parse_cpu_list("0-18446744073709551615").map(|cpus| cpus.len()), Some(CPU_SET_SIZE));
    }

    #[test]
    fn hyperthreads_of_one_core_count_once() {
        let pairs = |cpu: usize| vec![cpu % 4, cpu % 4 + 4];
        assert_eq!(one_per_core(&[0, 1, 2, 3, 4, 5, 6, 7], pairs), [0, 1, 2, 3]);
        assert_eq!(one_per_core(&[1, 5, 6], pairs), [1, 6], "the mask may leave only the second sibling");
    }

    #[test]
    fn quotas_round_up_to_whole_cores() {
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max("250000 100000\n"), Some(3));
        assert_eq!(parse_cpu_max("50000 100000\n"), Some(1));
        assert_eq!(parse_cpu_max("50000 0\n"), None);
        assert_eq!(parse_cpu_max(""), None);
    }

    #[test]
    fn memory_files() {
        let meminfo = "MemTotal:       24689264 kB\nMemFree:        11 kB\nMemAvailable:   24000000 kB\n";
        assert_eq!(kib_field(meminfo, "MemTotal:"), Some(24_689_264 << 10));
        assert_eq!(kib_field(meminfo, "MemAvailable:"), Some(24_000_000 << 10));
        assert_eq!(kib_field(meminfo, "VmHWM:"), None);
        assert_eq!(kib_field("MemTotal: 18446744073709551615 kB", "MemTotal:"), None);
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("1073741824\n"), Some(1 << 30));
        assert_eq!(reclaimable("anon 5\nfile 70\ninactive_file 30\nactive_file 20\n"), 50);
    }

    #[test]
    fn a_control_group_is_bound_by_its_ancestors() {
        let dirs = parse_cgroup("12:cpu:/old\n0::/a.slice/b.scope\n");
        assert_eq!(
            dirs,
            ["/sys/fs/cgroup/a.slice/b.scope", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup"].map(PathBuf::from)
        );
        assert_eq!(parse_cgroup("0::/\n"), [PathBuf::from("/sys/fs/cgroup/")]);
        assert!(parse_cgroup("12:cpu:/old\n").is_empty());
    }
}
