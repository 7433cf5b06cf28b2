//! `freetoken convert`: a checkpoint as an FTW directory, which loads at the disk's speed.

use std::path::{self, Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use freetoken_backend::{Format, os};
use indicatif::BinaryBytes;

use super::terminal::{Progress, note, print_line};
use crate::{convert::Conversion, model_files::ModelFiles};

/// Write a checkpoint as an FTW directory, whose experts are loaded at the speed of the disk.
///
/// Every expert becomes one record, so that it is one read and one copy. Layers are converted one by one; a run that was cut off goes
/// on when it is started again. Tensors that the model does not use are left out.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  freetoken convert Qwen3-30B-A3B q30.ftw\n  freetoken convert Qwen3-30B-A3B q30-nvfp4 --quantize nvfp4"
)]
pub(super) struct ConvertArgs {
    /// A directory with config.json and *.safetensors, or the name of one under $FREETOKEN_HOME/models.
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// The directory to write: a new one, an empty one, or one that a run of the same conversion left unfinished.
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Round the experts to fewer bits; all else stays as it is [default: as they are].
    #[arg(long, value_name = "nvfp4|mxfp4|fp8_block", value_parser = format)]
    quantize: Option<Format>,
    /// Remove an FTW checkpoint that is in the directory.
    #[arg(long)]
    force: bool,
}

/// A format that experts are rounded to.
fn format(text: &str) -> Result<Format, String> {
    match text {
        "nvfp4" => Ok(Format::Nvfp4),
        "mxfp4" => Ok(Format::Mxfp4),
        "fp8_block" => Ok(Format::Fp8),
        _ => Err("experts are rounded to nvfp4, mxfp4 or fp8_block".into()),
    }
}

pub(super) fn run(args: ConvertArgs) -> Result<()> {
    let files = ModelFiles::open(Some(&args.source))?;
    let same = |a: &Path, b: &Path| Some(a.canonicalize().ok()? == b.canonicalize().ok()?);
    ensure!(
        same(files.checkpoint().dir(), &args.out) != Some(true),
        "{} is the source itself: give another directory",
        args.out.display()
    );
    let conversion = Conversion::plan(&files, args.quantize)?;
    let experts =
        conversion.expert_format().map(|format| format!(", experts in {format}")).unwrap_or_default();
    let (from, to) = (BinaryBytes(conversion.source_bytes()), BinaryBytes(conversion.bytes()));
    note(&format!("{}: {from} become {to}{experts}", files.name()));
    let absolute = path::absolute(&args.out)?;
    let free = absolute.ancestors().find(|dir| dir.is_dir()).and_then(os::free_disk);
    if let Some(free) = free.filter(|&free| free < conversion.bytes()) {
        note(&format!(
            "the disk of {} has {} free: this may not be enough",
            args.out.display(),
            BinaryBytes(free)
        ));
    }
    let progress = Progress::bytes("converting", conversion.bytes());
    conversion.run(&args.out, args.force, &mut |bytes| progress.add(bytes))?;
    progress.finish();
    print_line(&format!("{}: {to} in FTW{experts}", args.out.display()))
}
