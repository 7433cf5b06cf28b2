//! Arguments that mean the same on every command: which model, on which device, how exactly.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Result;
use clap::{Args, ValueEnum};
use freetoken_backend::{Backend, Precision};
use indicatif::BinaryBytes;

use super::{
    memory::MemoryArgs,
    plan::Said,
    pull::pull,
    terminal::{Progress, note},
};
use crate::{
    devices::{self, BackendChoice},
    engine::{Engine, EngineOptions},
    hub::{self, HubError, ModelName},
    model_files::ModelFiles,
    models,
    moe::ExpertPlan,
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
    /// A directory with config.json and *.safetensors; or ORG/NAME on the Hugging Face hub, which is looked for in the Hugging
    /// Face cache and under $FREETOKEN_HOME/models, and else downloaded [default: the demo model].
    #[arg(long, short, value_name = "DIR|ORG/NAME")]
    pub(super) model: Option<PathBuf>,
    /// Download nothing; HF_HUB_OFFLINE=1 means the same.
    #[arg(long)]
    pub(super) offline: bool,
    /// Tokens that prompt and answer may have together [default: the model's own limit, at most 8192].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    pub(super) context: Option<u32>,
    #[command(flatten)]
    pub(super) device: DeviceArgs,
    #[command(flatten)]
    pub(super) memory: MemoryArgs,
}

impl ModelArgs {
    /// Reads everything about the model but its weights. A model that is not on this machine is brought first.
    pub(super) fn files(&self) -> Result<ModelFiles> {
        let absent = self.model.as_deref().filter(|name| hub::find(name).is_none());
        match absent.and_then(Path::to_str).and_then(|name| name.parse::<ModelName>().ok()) {
            None => Ok(ModelFiles::open(self.model.as_deref())?),
            Some(name) if self.offline || hub::offline_by_environment() => {
                Err(HubError::Offline { name: name.to_string() }.into())
            }
            Some(name) => Ok(ModelFiles::open(Some(&pull(&name)?))?),
        }
    }

    /// Options of an engine for so many sequences at a time.
    pub(super) fn options(&self, max_sequences: usize) -> EngineOptions {
        EngineOptions {
            context: self.context.map_or(DEFAULT_CONTEXT, |n| n as usize),
            max_sequences,
            ..EngineOptions::default()
        }
    }

    /// Loads the weights, with a bar on a terminal.
    pub(super) fn engine(&self, files: &ModelFiles, max_sequences: usize) -> Result<Engine> {
        self.engine_with(files, self.options(max_sequences), &mut |_| {})
    }

    /// The same, where somebody else hears the bytes of each tensor too.
    pub(super) fn engine_with(
        &self,
        files: &ModelFiles,
        options: EngineOptions,
        loaded: &mut dyn FnMut(u64),
    ) -> Result<Engine> {
        let backend = self.device.open()?;
        let options = self.memory.options(options, &*backend, &self.device)?;
        let plan = files.plan(&*backend, &options)?;
        // Where everything fits there is nothing to know.
        if plan.experts != ExpertPlan::Resident {
            note(&format!("plan: {}", Said::new(&plan, &*backend, &options).text()));
        }
        let progress = Progress::bytes("loading", files.checkpoint().total_bytes());
        let engine = files.engine_as(&plan, backend, &options, &mut |bytes| {
            progress.add(bytes);
            loaded(bytes);
        })?;
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
