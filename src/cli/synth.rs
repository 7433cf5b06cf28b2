//! `freetoken synth`: a checkpoint of random weights on disk, in the files and with the names of a real one.

mod expert_use;
mod shape;

use std::{
    collections::HashMap,
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use clap::{ArgGroup, Args};
use freetoken_backend::{Precision, os};
use half::bf16;
use indicatif::{BinaryBytes, HumanCount};
use serde_json::{Map, Value};

pub(super) use expert_use::{ExpertUse, N_TOKENS, distinct_experts, n_distinct, random_routes, random_token};
pub(super) use shape::{Shape, ShapeArgs};

use super::terminal::{Progress, note, print_line};
use crate::{
    devices::{self, BackendChoice},
    engine::EngineOptions,
    formats::{
        json,
        tokenizer::Tokenizer,
        write::{TensorSpec, write_sharded},
    },
    model_files::ModelFiles,
    models::{Inventory, MoeSizes, RoutingLaw, Synthetic},
};

/// Most bytes of a shard, as published checkpoints have it.
const SHARD_BYTES: u64 = 5_000_000_000;
/// Bytes that are made before they are written.
const BUFFER: usize = 1 << 25;
/// Files that belong to a tokenizer; the first must be there.
const TOKENIZER_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Write a checkpoint of random weights.
///
/// For measuring speed without the real weights. The routing of its experts is measured on random tokens and printed.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("shape").required(true).args(["like", "config"]),
    after_help = "Examples:\n  freetoken synth q30 --like qwen3-30b-a3b --layers 24\n  \
                  freetoken synth q36 --like qwen3.6-35b-a3b --layers 8 --format nvfp4\n  freetoken synth tiny --config config.json --routing zipf:1.0 --tokenizer models/demo"
)]
pub(super) struct SynthArgs {
    /// The directory to write: a new one, or an empty one.
    #[arg(value_name = "OUT_DIR")]
    out: PathBuf,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Copy the tokenizer and chat template of the model in this directory.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
}

pub(super) fn run(args: SynthArgs) -> Result<()> {
    let shape = args.shape.read()?.expect("the arguments require a shape");
    let inventory = shape.inventory()?;
    let synthetic = Synthetic::new(args.shape.seed).with_routing(args.shape.routing, &inventory.sizes);
    let mut files = match &args.tokenizer {
        Some(dir) => tokenizer_files(dir, inventory.sizes.vocab)?,
        None => Vec::new(),
    };
    files.extend(text_files(&shape.fields)?);
    let existed = claim(&args.out)?;
    if let Err(error) = write(&args.out, &inventory, &synthetic, &files) {
        remove(&args.out, existed);
        return Err(error);
    }
    print_line(&format!(
        "{}: {} tensors, {} parameters ({} active a token), {}",
        args.out.display(),
        inventory.tensors.len(),
        HumanCount(inventory.n_params()),
        HumanCount(inventory.n_active_params()),
        BinaryBytes(inventory.bytes())
    ))?;
    match &inventory.sizes.moe {
        Some(moe) => measure(&args, moe, inventory.bytes()),
        None => Ok(()),
    }
}

/// Makes the directory, or sees that it is empty. True if it was there.
fn claim(dir: &Path) -> Result<bool> {
    if dir.exists() {
        let mut entries = fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?;
        ensure!(entries.next().is_none(), "{} is not empty: give a new directory", dir.display());
        return Ok(true);
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
    Ok(false)
}

/// Removes what was written into a directory that was empty. The error that led here is the one to report.
fn remove(dir: &Path, existed: bool) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let _ = fs::remove_file(entry.path());
    }
    if !existed {
        let _ = fs::remove_dir(dir);
    }
}

/// The files beside the weights that a configuration implies, itself last.
fn text_files(config: &Map<String, Value>) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut generation = Map::new();
    for field in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        generation
            .extend(config.get(field).filter(|id| !id.is_null()).map(|id| (field.to_owned(), id.clone())));
    }
    let text = serde_json::to_vec_pretty::<Map<String, Value>>;
    Ok(vec![("generation_config.json", text(&generation)?), ("config.json", text(config)?)])
}

/// The tokenizer of another model, if its ids lie in the vocabulary.
fn tokenizer_files(dir: &Path, vocab: usize) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut files = Vec::new();
    for name in
        TOKENIZER_FILES.into_iter().filter(|name| *name == TOKENIZER_FILES[0] || dir.join(name).exists())
    {
        files.push((name, json::read_bytes(&dir.join(name), json::TOKENIZER_LIMIT)?));
    }
    Tokenizer::from_bytes(&dir.join(TOKENIZER_FILES[0]).display().to_string(), &files[0].1)?
        .check_vocab(vocab)?;
    Ok(files)
}

/// Writes the weights, then the rest: a directory with a config.json is complete.
fn write(dir: &Path, inventory: &Inventory, synthetic: &Synthetic, files: &[(&str, Vec<u8>)]) -> Result<()> {
    let progress = Progress::bytes("writing", inventory.bytes());
    let tensors: HashMap<&str, &TensorSpec> =
        inventory.tensors.iter().map(|t| (t.name.as_str(), t)).collect();
    // Of elements, so that they lie as they must.
    let mut buffer = vec![bf16::ZERO; BUFFER / size_of::<bf16>()];
    let mut produce = |name: &str, out: &mut dyn Write| {
        let tensor = tensors[name];
        let bytes = tensor.bytes();
        for start in (0..bytes).step_by(BUFFER) {
            let made = &mut bytemuck::cast_slice_mut(&mut buffer)[..BUFFER.min(bytes - start)];
            synthetic.fill_parallel(tensor, start, made);
            out.write_all(made)?;
            progress.add(made.len() as u64);
        }
        Ok(())
    };
    write_sharded(dir, inventory.tensors.iter().cloned(), SHARD_BYTES, &mut produce)?;
    for (name, bytes) in files {
        let path = dir.join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    progress.finish();
    Ok(())
}

/// Routes random tokens through the checkpoint and prints how its experts are used.
fn measure(args: &SynthArgs, moe: &MoeSizes, bytes: u64) -> Result<()> {
    if os::available_memory().is_some_and(|free| free < bytes) {
        note("the weights do not fit into free memory: how their experts are used was not measured");
        return Ok(());
    }
    let backend = devices::open(&BackendChoice::Auto, Precision::Auto, None, &mut note)?;
    let options = EngineOptions {
        context: N_TOKENS,
        max_sequences: 1,
        max_chunk: Some(N_TOKENS),
        ..EngineOptions::default()
    };
    let mut engine = ModelFiles::open(Some(&args.out))?.engine(backend, &options, &mut |_| ())?;
    let routes = random_routes(&mut engine, args.shape.seed)?;
    print_expert_use(args.shape.routing, moe, &routes)
}

/// A line a layer, below what the law says.
fn print_expert_use(law: RoutingLaw, moe: &MoeSizes, routes: &[Vec<i32>]) -> Result<()> {
    let shares = law.shares(moe);
    let quarter: f64 = shares[..moe.n_experts.div_ceil(4)].iter().sum::<f64>() / moe.top_k as f64;
    let entropy: f64 = shares.iter().map(|s| s / moe.top_k as f64).map(|share| -share * share.log2()).sum();
    print_line("  layer  experts in use  top quarter takes  entropy")?;
    print_line(&format!(
        "{:>7} {:>15} {:>17.1}% {entropy:>8.2}",
        law.to_string(),
        moe.n_experts,
        100.0 * quarter
    ))?;
    for (layer, ids) in routes.iter().enumerate() {
        let ExpertUse { n_in_use, top_quarter, entropy } = ExpertUse::new(ids, moe.n_experts);
        print_line(&format!("{layer:>7} {n_in_use:>15} {:>17.1}% {entropy:>8.2}", 100.0 * top_quarter))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_directory_is_refused_and_a_failure_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a/b");
        assert!(!claim(&out).unwrap());
        assert!(claim(&out).unwrap(), "empty");
        fs::write(out.join("model.safetensors"), "x").unwrap();
        let sentence = claim(&out).unwrap_err().to_string();
        assert!(sentence.ends_with("is not empty: give a new directory"), "{sentence}");
        remove(&out, true);
        assert!(claim(&out).unwrap());
        remove(&out, false);
        assert!(!out.exists());
    }
}
