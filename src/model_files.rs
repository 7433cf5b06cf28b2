//! A model on disk, or the demo model in the binary: everything about it but the weights, read and checked; and the way to
//! an engine, which loads those.

use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
};

use freetoken_backend::{Backend, HostBytes};
use serde_json::{Map, Value};

use crate::{
    chat::template::{ChatTemplate, TemplateError, checkpoint_template},
    engine::{Engine, EngineOptions},
    formats::{
        Checkpoint, Dtype, FormatError,
        ftw::Records,
        generation_config::{GenerationConfig, GenerationConfigError},
        json,
        read::Transfer,
        tokenizer::{Tokenizer, TokenizerError},
    },
    hub,
    loading::{self, LoadError, LoadPlan},
    models::{ConfigFile, TensorError, WeightSource},
};

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelFilesError {
    /// A file is missing or broken.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The tokenizer is broken or belongs to another model.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A generation default is broken.
    #[error(transparent)]
    Generation(#[from] GenerationConfigError),
    /// The chat template is broken.
    #[error("the chat template of {model} cannot be used: {source}; --raw feeds the text without it")]
    Template {
        /// Where it came from.
        model: String,
        /// What is wrong.
        source: TemplateError,
    },
    /// It could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A file of the checkpoint is not there.
    #[error("{model} has no {file}: a Hugging Face checkpoint has one; download it again")]
    Missing {
        /// The directory.
        model: String,
        /// The file.
        file: &'static str,
    },
    /// No such model.
    #[error(
        "there is no model `{name}`: give a directory with config.json and *.safetensors, the name of one in {home}, or ORG/NAME of \
         one that `freetoken pull` can bring"
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// Where names are looked up.
        home: String,
    },
    /// No `--model`, and no demo.
    #[error(
        "no model was given and the demo model is not here (looked in {looked}): give --model DIR, or build with the \
         feature `demo`"
    )]
    NoDemo {
        /// Directories that were tried.
        looked: String,
    },
}

/// Where caches, probes and models live: `$FREETOKEN_HOME`, or `~/.cache/freetoken`.
pub fn home() -> PathBuf {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("FREETOKEN_HOME")
        .or_else(|| {
            set("HOME").or_else(|| set("USERPROFILE")).map(|home| home.join(".cache").join("freetoken"))
        })
        .unwrap_or_else(|| PathBuf::from("freetoken"))
}

/// A model's files, checked, without its weights.
pub struct ModelFiles {
    checkpoint: Checkpoint,
    config: Map<String, Value>,
    /// Path of `config.json`, for errors.
    config_file: String,
    generation: GenerationConfig,
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
}

impl ModelFiles {
    /// Opens a model by path, by its name where [`hub::find`] finds it, or the demo model.
    ///
    /// # Errors
    /// [`ModelFilesError`], one sentence.
    pub fn open(name: Option<&Path>) -> Result<Self, ModelFilesError> {
        let Some(name) = name else { return Self::read(demo()?) };
        match hub::find(name) {
            Some(dir) => Self::read(Checkpoint::open(&dir)?),
            None if name.is_absolute() => Self::read(Checkpoint::open(name)?),
            None => {
                let home = hub::models_dir().display().to_string();
                Err(ModelFilesError::Unknown { name: name.display().to_string(), home })
            }
        }
    }

    fn read(checkpoint: Checkpoint) -> Result<Self, ModelFilesError> {
        let label = |file: &str| checkpoint.dir().join(file).display().to_string();
        let model = || checkpoint.dir().display().to_string();
        let parsed = |file: &str| -> Result<Option<Value>, ModelFilesError> {
            let Some(bytes) = checkpoint.file(file)? else { return Ok(None) };
            Ok(Some(json::parse(&label(file), &bytes)?))
        };
        let config_file = label("config.json");
        let config = parsed("config.json")?
            .ok_or_else(|| ModelFilesError::Missing { model: model(), file: "config.json" })?;
        let generation = match parsed("generation_config.json")? {
            Some(value) => GenerationConfig::parse(&label("generation_config.json"), &value)?,
            None => GenerationConfig::default(),
        };
        let generation = generation.or_from_config(&config_file, &config)?;
        let tokenizer = match checkpoint.file("tokenizer.json")? {
            Some(bytes) => Some(Tokenizer::from_bytes(&label("tokenizer.json"), &bytes)?),
            None => None,
        };
        let tokenizer_config = parsed("tokenizer_config.json")?.unwrap_or_default();
        let jinja = checkpoint.file("chat_template.jinja")?;
        let jinja = jinja.as_ref().map(|bytes| String::from_utf8_lossy(bytes));
        let template = checkpoint_template(&tokenizer_config, jinja.as_deref())
            .map(|t| ChatTemplate::new(t.source, t.bos_token, t.eos_token))
            .transpose()
            .map_err(|source| ModelFilesError::Template { model: model(), source })?;
        let Value::Object(config) = config else {
            return Err(GenerationConfigError::NotAnObject { file: config_file }.into());
        };
        Ok(ModelFiles { checkpoint, config, config_file, generation, tokenizer, template })
    }

    /// The directory, or the label of the demo model.
    pub fn name(&self) -> String {
        self.checkpoint.dir().display().to_string()
    }

    /// The weights' files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// `config.json`.
    pub fn config(&self) -> ConfigFile<'_> {
        ConfigFile::new(&self.config_file, &self.config)
    }

    /// Generation defaults.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// [`ModelFilesError::Missing`] where there is none.
    pub fn tokenizer(&self) -> Result<&Tokenizer, ModelFilesError> {
        let missing = || ModelFilesError::Missing { model: self.name(), file: "tokenizer.json" };
        self.tokenizer.as_ref().ok_or_else(missing)
    }

    /// The chat template, where the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// Loads the weights onto a device and makes an engine; `progress` hears the bytes of each tensor.
    ///
    /// # Errors
    /// [`ModelFilesError`], one sentence.
    pub fn engine(
        &self,
        backend: Arc<dyn Backend>,
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Engine, ModelFilesError> {
        let plan = self.plan(&*backend, options)?;
        self.engine_as(&plan, backend, options, progress)
    }

    /// Where each part of the model will live on a device; reads no weights.
    ///
    /// # Errors
    /// [`ModelFilesError`], one sentence, with what would fit where it does not.
    pub fn plan(&self, backend: &dyn Backend, options: &EngineOptions) -> Result<LoadPlan, ModelFilesError> {
        Ok(loading::plan(&self.config(), &self.checkpoint, backend, options)?)
    }

    /// As [`Self::engine`], by a plan that was made for it.
    ///
    /// # Errors
    /// [`ModelFilesError`], one sentence.
    pub fn engine_as(
        &self,
        plan: &LoadPlan,
        backend: Arc<dyn Backend>,
        options: &EngineOptions,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Engine, ModelFilesError> {
        let engine = loading::load_as(plan, &self.config(), &self.checkpoint, backend, options, progress)?;
        if let Some(tokenizer) = &self.tokenizer {
            tokenizer.check_vocab(engine.model().sizes().vocab)?;
        }
        Ok(engine)
    }
}

impl WeightSource for Checkpoint {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        let tensor = Checkpoint::tensor(self, name)?;
        if tensor.shape != shape {
            return Err(TensorError::Shape {
                name: name.into(),
                found: tensor.shape,
                expected: shape.to_vec(),
            });
        }
        Ok((tensor.dtype, tensor.bytes))
    }

    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)> {
        let tensor = self.contains(name).then(|| Checkpoint::tensor(self, name).ok())??;
        Some((tensor.dtype, tensor.shape))
    }

    fn records(&self, moe_layer: usize) -> Option<Records<'_>> {
        self.ftw()?.records(moe_layer)
    }

    fn files(&self) -> Option<Checkpoint> {
        Some(self.clone())
    }

    fn transfer(&self, transfers: Vec<Transfer<'_>>) -> Result<(), TensorError> {
        Ok(Checkpoint::transfer(self, transfers)?)
    }
}

#[cfg(feature = "demo")]
fn demo() -> Result<Checkpoint, ModelFilesError> {
    Ok(Checkpoint::from_files("the demo model", &embedded::FILES)?)
}

/// Looks for `models/demo` beside the binary and below the current folder.
#[cfg(not(feature = "demo"))]
fn demo() -> Result<Checkpoint, ModelFilesError> {
    let beside = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("models/demo")));
    let places: Vec<PathBuf> = beside.into_iter().chain([PathBuf::from("models/demo")]).collect();
    match places.iter().find(|dir| dir.is_dir()) {
        Some(dir) => Ok(Checkpoint::open(dir)?),
        None => {
            let looked: Vec<String> = places.iter().map(|dir| dir.display().to_string()).collect();
            Err(ModelFilesError::NoDemo { looked: looked.join(", ") })
        }
    }
}

/// The demo model's files in the binary, weights at addresses that tensors can be read from.
#[cfg(feature = "demo")]
mod embedded {
    #[repr(C, align(64))]
    struct Aligned<T: ?Sized>(T);

    macro_rules! demo_file {
        ($name:literal) => {{
            static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../models/demo/", $name)));
            ($name, &FILE.0)
        }};
    }

    pub(super) static FILES: [(&str, &[u8]); 7] = [
        demo_file!("config.json"),
        demo_file!("generation_config.json"),
        demo_file!("tokenizer.json"),
        demo_file!("tokenizer_config.json"),
        demo_file!("model.safetensors.index.json"),
        demo_file!("model-00001-of-00002.safetensors"),
        demo_file!("model-00002-of-00002.safetensors"),
    ];
}
