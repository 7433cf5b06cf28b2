//! Arguments that mean the same on every command: which model, on which device, how exactly.

use std::{path::PathBuf, sync::Arc};

use anyhow::Result;
use clap::{Args, ValueEnum};
use freetoken_backend::{Backend, Precision};
use indicatif::BinaryBytes;

use super::{
    memory::MemoryArgs,
    terminal::{Progress, note},
};
use crate::{
    devices::{self, BackendChoice},
    engine::{Engine, EngineOptions},
    model_files::ModelFiles,
    models,
};

/// Context that is made room for unless one is asked for: long enough for a conversation, small enough for a laptop.
const DEFAULT_CONTEXT: usize = 8192;

/// `--precision`
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum PrecisionArg {
    /// The backend's fast mode: matmul inputs and the KV cache may be bf16.
    Auto,
    /// Activations and sums in float32 everywhere.
    F32,
}

/// Where to run.
#[derive(Debug, Clone, Args)]
pub(super) struct DeviceArgs {
    /// The device: auto, cuda[:N|:UUID], wgpu[:N|:NAME], or cpu. cuda-staged launches kernel by kernel, for sanitizers and
    /// profilers.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub(super) backend: BackendChoice,
    /// How exactly to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) precision: PrecisionArg,
    /// CPU threads [default: one for each physical core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(super) threads: Option<u16>,
}

impl DeviceArgs {
    /// CPU threads that were asked for.
    pub(super) fn n_threads(&self) -> Option<usize> {
        self.threads.map(usize::from)
    }

    /// Opens the device.
    pub(super) fn open(&self) -> Result<Arc<dyn Backend>> {
        let precision = match self.precision {
            PrecisionArg::Auto => Precision::Auto,
            PrecisionArg::F32 => Precision::F32,
        };
        Ok(devices::open(&self.backend, precision, self.n_threads(), &mut note)?)
    }
}

/// What to run, and where.
#[derive(Debug, Clone, Args)]
pub(super) struct ModelArgs {
    /// A directory with config.json and *.safetensors, or the name of one under $FREETOKEN_HOME/models
    /// [default: the demo model].
    #[arg(long, short, value_name = "DIR")]
    pub(super) model: Option<PathBuf>,
    /// Tokens that prompt and answer may have together [default: the model's own limit, at most 8192].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    pub(super) context: Option<u32>,
    #[command(flatten)]
    pub(super) device: DeviceArgs,
    #[command(flatten)]
    pub(super) memory: MemoryArgs,
}

impl ModelArgs {
    /// Reads everything about the model but its weights.
    pub(super) fn files(&self) -> Result<ModelFiles> {
        Ok(ModelFiles::open(self.model.as_deref())?)
    }

    /// Loads the weights, with a bar on a terminal.
    pub(super) fn engine(&self, files: &ModelFiles, max_sequences: usize) -> Result<Engine> {
        let options = EngineOptions {
            context: self.context.map_or(DEFAULT_CONTEXT, |n| n as usize),
            max_sequences,
            ..EngineOptions::default()
        };
        let backend = self.device.open()?;
        let options = self.memory.options(options, &*backend, &self.device)?;
        let progress = Progress::bytes("loading", files.checkpoint().total_bytes());
        let engine = files.engine(backend, &options, &mut |bytes| progress.add(bytes))?;
        progress.finish();
        self.memory.say(&engine);
        if let Some(parts) = models::left_aside(files.checkpoint().tensor_names()) {
            note(&format!("left aside: {parts}"));
        }
        if engine.is_recurrent() {
            let bytes = BinaryBytes(engine.state_bytes() as u64);
            note(&format!("recurrent layers keep {bytes} of each sequence beside its keys and values"));
        }
        if let Some(asked) = self.context.filter(|&n| n as usize > engine.context()) {
            note(&format!(
                "the model's own limit is {} tokens: --context {asked} is cut to it",
                engine.context()
            ));
        }
        Ok(engine)
    }
}
