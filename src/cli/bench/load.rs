//! How fast experts come from a disk into host memory, beside how fast the disk can be read at all.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use freetoken_backend::{
    Backend, HostBytes,
    os::{self, AnonymousMemory, DirectFile},
};
use indicatif::BinaryBytes;
use serde_json::json;

use super::{
    super::terminal::Progress,
    report::ReportArgs,
    table::{Column, Table, column},
};
use crate::{
    devices,
    formats::{
        Dtype,
        ftw::Records,
        read::{Read, read_all},
    },
    model_files::ModelFiles,
    models::{self, LoadedExperts, TensorError, WeightSource, Weights},
};

/// Every way is timed so often, in turns, and its best time counts.
const TURNS: usize = 3;
/// Most bytes that are in flight when the disk is read for its own sake.
const WINDOW: usize = 1 << 30;

/// Loading: experts of each directory from the disk into host memory, beside the rate at which the disk is read.
///
/// FTW directories by records; safetensors by reads, and from their mapping.
#[derive(Debug, Args)]
pub(super) struct LoadArgs {
    /// Directories of models.
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 5] = [
    column("way", "", 1.0, 0),
    column("bytes", "GB", 1e-9, 2),
    column("seconds", "s", 1.0, 2),
    column("bytes_per_second", "GB/s", 1e-9, 2),
    column("share_of_disk", "% of disk", 100.0, 1),
];

/// Loads the experts of each directory: records of FTW are read; safetensors are read, and copied from their mapping. The page cache
/// is emptied of all files before each.
pub(super) fn run(args: &LoadArgs) -> Result<()> {
    let dirs = &args.dirs;
    let host = devices::reference();
    let mut ways = Vec::new();
    for dir in dirs {
        let files = ModelFiles::open(Some(dir))?;
        let kinds: &[Kind] = match files.checkpoint().ftw() {
            Some(tensors) if tensors.records(0).is_some() => &[Kind::Records],
            _ => &[Kind::Read, Kind::Mapped],
        };
        for &kind in kinds {
            ways.push(Way { dir, kind, files: ModelFiles::open(Some(dir))?, bytes: 0, seconds: Vec::new() });
        }
    }
    let mut disk = Disk::open(dirs)?;
    let largest = disk.bytes_by_dir.iter().copied().max().unwrap_or(0);
    if let Some(free) = os::available_memory() {
        let (needed, free) = (BinaryBytes(largest + WINDOW as u64), BinaryBytes(free));
        ensure!(
            needed.0 <= free.0,
            "the experts and room to read take up to {needed}, and {free} of memory are free"
        );
    }
    let progress = Progress::bytes("reading", TURNS as u64 * (disk.bytes() + ways.len() as u64 * largest));
    let mut disk_seconds = Vec::new();
    for _ in 0..TURNS {
        disk.forget();
        disk_seconds.push(disk.read(&mut |bytes| progress.add(bytes))?);
        for way in &mut ways {
            disk.forget();
            warm_memory(largest as usize)?;
            way.load(&*host)?;
            progress.add(largest);
        }
    }
    progress.finish();

    let mut table = Table::new(&COLUMNS);
    let disk_bytes = disk.bytes() as f64;
    let disk_seconds = best(disk_seconds);
    let disk_rate = disk_bytes / disk_seconds;
    table.push([
        "the disk itself".into(),
        disk_bytes.into(),
        disk_seconds.into(),
        disk_rate.into(),
        1.0.into(),
    ]);
    for Way { dir, kind, bytes, seconds, .. } in ways {
        let (bytes, seconds) = (bytes as f64, best(seconds));
        let rate = bytes / seconds;
        let name = format!("{}, {}", kind.name(), dir.display());
        table.push([
            name.as_str().into(),
            bytes.into(),
            seconds.into(),
            rate.into(),
            (rate / disk_rate).into(),
        ]);
    }
    let (past, emptied) = (disk.is_direct(), disk.was_emptied);
    let is = |yes| if yes { "" } else { " NOT" };
    let text = || {
        format!(
            "experts from the disk into host memory, the best of {TURNS} turns\nthe disk is{} read past the page cache, which \
             was{} emptied before\n\n{}",
            is(past),
            is(emptied),
            table.text()
        )
    };
    let json = || json!({ "direct": past, "page_cache_emptied": emptied, "rows": table.json() });
    args.report.print(&table, text, json)
}

/// Uses and frees so much memory: a hypervisor may take longer to give memory that was free than the disk takes to fill it, and
/// which way gets such memory must not decide.
fn warm_memory(bytes: usize) -> Result<()> {
    let mut memory = os::anonymous(bytes.max(1)).context("cannot reserve memory to load into")?;
    memory.as_mut().fill(1);
    Ok(())
}

fn best(seconds: Vec<f64>) -> f64 {
    seconds.into_iter().fold(f64::INFINITY, f64::min)
}

/// How experts come into memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Records,
    Read,
    Mapped,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Records => "records read",
            Kind::Read => "tensors read",
            Kind::Mapped => "tensors mapped",
        }
    }
}

/// A way to load a directory, and what it took.
struct Way<'a> {
    dir: &'a Path,
    kind: Kind,
    files: ModelFiles,
    /// Of all experts in memory.
    bytes: u64,
    seconds: Vec<f64>,
}

impl Way<'_> {
    /// Loads the experts once; the other weights stay where they are.
    fn load(&mut self, host: &dyn Backend) -> Result<()> {
        let checkpoint = self.files.checkpoint();
        let mapped = Mapped(checkpoint);
        let source: &dyn WeightSource = if self.kind == Kind::Mapped { &mapped } else { checkpoint };
        let started = Instant::now();
        let mut heard = |_| ();
        let mut weights = Weights::new(host, source, &mut heard).with_banks();
        models::load(&self.files.config(), &mut weights)?;
        let experts = weights.into_experts();
        self.seconds.push(started.elapsed().as_secs_f64());
        let LoadedExperts::Banked(banks) = experts else { unreachable!("banks were asked for") };
        ensure!(banks.bytes() > 0, "{} has no routed experts: give another model", self.dir.display());
        self.bytes = banks.bytes();
        Ok(())
    }
}

/// A source whose bytes are copied from where they are mapped.
struct Mapped<'a>(&'a dyn WeightSource);

impl WeightSource for Mapped<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        self.0.tensor(name, shape)
    }

    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)> {
        self.0.spec(name)
    }

    fn records(&self, moe_layer: usize) -> Option<Records<'_>> {
        self.0.records(moe_layer)
    }
}

/// The files that hold weights, to be read for their own sake.
struct Disk {
    files: Vec<(DirectFile, u64)>,
    bytes_by_dir: Vec<u64>,
    window: AnonymousMemory,
    was_emptied: bool,
}

impl Disk {
    fn open(dirs: &[PathBuf]) -> Result<Self> {
        let (mut files, mut bytes_by_dir) = (Vec::new(), Vec::new());
        for dir in dirs {
            let mut bytes = 0;
            for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
                let path = entry.with_context(|| format!("cannot list {}", dir.display()))?.path();
                if path.extension().is_some_and(|end| end == "safetensors" || end == "ftw") {
                    let read = || -> std::io::Result<_> {
                        let file = DirectFile::open(&path)?;
                        let len = file.n_bytes()?;
                        Ok((file, len))
                    };
                    let (file, len) = read().with_context(|| format!("cannot read {}", path.display()))?;
                    bytes += len;
                    files.push((file, len));
                }
            }
            bytes_by_dir.push(bytes);
        }
        let most = files.iter().map(|(_, len)| *len as usize).max().unwrap_or(0);
        let mut window =
            os::anonymous(most.clamp(1, WINDOW)).context("cannot reserve memory to read into")?;
        // The first touch of a page is not the disk's time.
        window.as_mut().fill(1);
        Ok(Disk { files, bytes_by_dir, window, was_emptied: true })
    }

    fn bytes(&self) -> u64 {
        self.bytes_by_dir.iter().sum()
    }

    fn is_direct(&self) -> bool {
        self.files.iter().all(|(file, _)| file.is_direct())
    }

    fn forget(&mut self) {
        self.was_emptied &= self.files.iter().all(|(file, _)| file.forget_cached());
    }

    /// Reads all files once; gives the seconds.
    fn read(&mut self, progress: &mut dyn FnMut(u64)) -> Result<f64> {
        let started = Instant::now();
        for (file, len) in &self.files {
            let mut offset = 0;
            while offset < *len {
                let bytes = ((len - offset) as usize).min(self.window.as_ref().len());
                let into = &mut self.window.as_mut()[..bytes];
                read_all([Read { file, offset, into }], progress)?;
                offset += bytes as u64;
            }
        }
        Ok(started.elapsed().as_secs_f64())
    }
}
