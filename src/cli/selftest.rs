//! `freetoken selftest`: the conformance suite on this machine's device and driver, and golden checkpoints where there are any.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use freetoken_backend::conformance;

use super::{
    model::DeviceArgs,
    terminal::{note, print_line},
};
use crate::{devices, golden, model_files::ModelFiles, models::Inventory};

/// Check that a device computes what it should.
///
/// Runs every op in many shapes and compares with the scalar CPU, in the mode that --precision asks for.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  freetoken selftest\n  freetoken selftest --precision f32 --only expert_mlp\n  \
                        freetoken selftest --golden tests/golden"
)]
pub(super) struct SelftestArgs {
    #[command(flatten)]
    device: DeviceArgs,
    /// Also check golden checkpoints: a directory of one, or of several.
    #[arg(long, value_name = "DIR")]
    golden: Option<PathBuf>,
    /// Only cases, or golden checkpoints, whose name contains this.
    #[arg(long, default_value = "", hide_default_value = true, value_name = "NAME")]
    only: String,
}

pub(super) fn run(args: SelftestArgs) -> Result<()> {
    let device = args.device.open()?;
    let caps = device.caps();
    note(&format!("{} ({}, {}), precision {}", caps.backend, caps.device, caps.detail, caps.precision));
    let host = devices::host(caps.precision, args.device.n_threads())?;
    let report = conformance::run_suite(&*device, &*devices::reference(), &args.only);
    let (mut ran, mut failed) = (0, 0);
    if !report.rows.is_empty() {
        print_line(&report.to_string())?;
        ran += 1;
        failed += usize::from(!report.passed());
    }
    for dir in args.golden.iter().map(golden_dirs).collect::<Result<Vec<_>>>()?.concat() {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        if !name.contains(&args.only) {
            continue;
        }
        let files = ModelFiles::open(Some(&dir))?;
        let inventory =
            Inventory::of_checkpoint(&files.config(), files.checkpoint(), &*devices::reference())?;
        let is_sparse = inventory.sizes.moe.is_some();
        let placements = if is_sparse { golden::PLACEMENTS } else { &golden::PLACEMENTS[..1] };
        for placement in placements.iter().filter(|placement| placement.suits(caps)) {
            let report = golden::run_placed(&dir, &device, &host, placement)?;
            print_line(&format!("\n{name}, experts {}\n{report}", placement.name))?;
            ran += 1;
            failed += usize::from(!report.passed());
        }
    }
    if ran == 0 {
        bail!("no case and no golden checkpoint has a name that contains `{}`", args.only);
    }
    if failed > 0 {
        bail!("this device or its driver computes wrong results: use another one with --backend");
    }
    Ok(())
}

/// The directory itself where it is a golden checkpoint, else those in it.
fn golden_dirs(dir: &PathBuf) -> Result<Vec<PathBuf>> {
    let is_golden = |dir: &PathBuf| dir.join("expected.json").is_file();
    if is_golden(dir) {
        return Ok(vec![dir.clone()]);
    }
    let entries =
        std::fs::read_dir(dir).with_context(|| format!("cannot read the directory {}", dir.display()))?;
    let mut dirs: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_golden).collect();
    dirs.sort();
    if dirs.is_empty() {
        bail!("{} holds no golden checkpoint: one has an expected.json", dir.display());
    }
    Ok(dirs)
}
