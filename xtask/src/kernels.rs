//! `cargo xtask kernels [--check]`: compiles `backends/cuda/kernels/*.cu` for every generation of cards into
//! `backends/cuda/kernels.bundle`, and prints registers and spills of each kernel. With `--check` it compares instead of
//! writing. Needs no GPU and no CUDA toolkit: the compiler library comes from `FREETOKEN_NVRTC`, or from its package, which
//! is fetched into `target/nvrtc` once.

#[path = "../../backends/cuda/src/bundle/container.rs"]
mod container;
mod nvrtc;
mod usage;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};

use container::{Target, hash, packs};
use lzma_rust2::{LzmaOptions, LzmaWriter};
use nvrtc::{Compiler, Source};
use usage::Usage;

const SOURCES: &str = "backends/cuda/kernels";
const BUNDLE: &str = "backends/cuda/kernels.bundle";
const MAX_BUNDLE_BYTES: usize = 4 << 20;

/// Machine code for each generation, and PTX for those that are not known yet. No target of one generation only ("a").
const TARGETS: [Target; 7] = [
    Target::Cubin(8, 0),
    Target::Cubin(8, 6),
    Target::Cubin(8, 9),
    Target::Cubin(9, 0),
    Target::Cubin(10, 0),
    Target::Cubin(12, 0),
    Target::Ptx(8, 0),
];

/// Images by target and module.
type Images = BTreeMap<(Target, String), Vec<u8>>;

/// Compiles and writes, or compares.
pub(crate) fn run(args: &[&str]) -> Result<()> {
    let check = match args {
        [] => false,
        ["--check"] => true,
        _ => bail!("usage: cargo xtask kernels [--check]"),
    };
    let (sources, headers) = (files("cu")?, files("cuh")?);
    let compiler = Compiler::open()?;
    let (images, usage) = compile(&compiler, &sources, &headers)?;
    usage::print(&usage);
    let spilling: Vec<&str> =
        usage.iter().filter(|u| u.spilled_bytes > 0).map(|u| u.kernel.as_str()).collect();
    ensure!(spilling.is_empty(), "kernels that spill registers: {}", spilling.join(", "));
    if check {
        return compare(&images);
    }
    let bundle = pack(&images)?;
    ensure!(
        bundle.len() <= MAX_BUNDLE_BYTES,
        "{BUNDLE} would take {} bytes: have fewer variants",
        bundle.len()
    );
    fs::write(BUNDLE, &bundle).with_context(|| format!("{BUNDLE} cannot be written"))?;
    let raw: usize = images.values().map(Vec::len).sum();
    println!("{BUNDLE}: {} images, {} KiB, {} KiB packed", images.len(), raw >> 10, bundle.len() >> 10);
    Ok(())
}

/// Files of the kernels' folder with this extension, by name.
fn files(extension: &str) -> Result<Vec<Source>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(SOURCES).with_context(|| format!("{SOURCES} cannot be read"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == extension) {
            files.push(Source::read(&path)?);
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Compiles every file for every target, on all cores.
fn compile(compiler: &Compiler, sources: &[Source], headers: &[Source]) -> Result<(Images, Vec<Usage>)> {
    let jobs: Vec<(&Source, Target)> =
        sources.iter().flat_map(|source| TARGETS.map(|target| (source, target))).collect();
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        while let Some(&(source, target)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let compiled = compiler.compile(source, headers, target)?;
            done.lock().unwrap_or_else(PoisonError::into_inner).push((source, target, compiled));
        }
        Ok(())
    };
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a compiling thread does not panic"))
    })?;
    let mut images = Images::new();
    let mut usage = Vec::new();
    for (source, target, compiled) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        usage.extend(usage::read(&compiled.log, target));
        images.insert((target, stem(&source.name).to_owned()), compiled.image);
    }
    usage.sort_by(|a, b| (&a.kernel, a.target).cmp(&(&b.kernel, b.target)));
    Ok((images, usage))
}

fn stem(name: &str) -> &str {
    Path::new(name).file_stem().and_then(|stem| stem.to_str()).unwrap_or(name)
}

fn pack(images: &Images) -> Result<Vec<u8>> {
    let mut bundle = container::MAGIC.to_vec();
    bundle.extend((images.len() as u32).to_le_bytes());
    let mut of_targets: BTreeMap<Target, Vec<u8>> = BTreeMap::new();
    for ((target, module), image) in images {
        let mut name = module.clone().into_bytes();
        assert!(name.len() < container::NAME_BYTES, "the name of {module}.cu is too long");
        name.resize(container::NAME_BYTES, 0);
        bundle.extend(name);
        for number in [target.code(), image.len() as u32] {
            bundle.extend(number.to_le_bytes());
        }
        bundle.extend(hash(image).to_le_bytes());
        of_targets.entry(*target).or_default().extend(image);
    }
    for (target, images) in of_targets {
        let mut options = LzmaOptions { nice_len: LzmaOptions::NICE_LEN_MAX, ..LzmaOptions::with_preset(7) };
        if let Target::Cubin(..) = target {
            // An instruction takes 16 bytes.
            (options.lc, options.lp, options.pb) = (0, 4, 4);
        }
        let mut packed = LzmaWriter::new_use_header(Vec::new(), &options, Some(images.len() as u64))?;
        packed.write_all(&images)?;
        let packed = packed.finish()?;
        bundle.extend((packed.len() as u32).to_le_bytes());
        bundle.extend(packed);
    }
    Ok(bundle)
}

/// Compares with the bundle, image by image, and names the modules that differ.
fn compare(compiled: &Images) -> Result<()> {
    let bundle = fs::read(BUNDLE).with_context(|| format!("{BUNDLE} cannot be read"))?;
    let mut committed = Images::new();
    for pack in packs(&bundle).map_err(anyhow::Error::msg)? {
        let unpacked = pack.unpack().map_err(anyhow::Error::msg)?;
        let modules = pack.images.iter().map(|image| (pack.target, image.module.to_owned()));
        committed.extend(modules.zip(unpacked));
    }
    let mut differing: Vec<String> = compiled
        .keys()
        .chain(committed.keys())
        .filter(|key| compiled.get(key) != committed.get(key))
        .map(|(target, module)| format!("{module} ({})", usage::name(*target)))
        .collect();
    differing.sort();
    differing.dedup();
    ensure!(
        differing.is_empty(),
        "{BUNDLE} is not what the sources give; run `cargo xtask kernels`. Different: {}",
        differing.join(", ")
    );
    println!("{BUNDLE}: {} images as the sources give them", compiled.len());
    Ok(())
}
