//! The models: one file an architecture, named by its `model_type`, over blocks they share.
//!
//! A model emits ops for a batch and knows no device, no weight format and no memory budget. What differs between two
//! models is visible when their files lie side by side.

mod blocks;
mod config;
mod decoder;
mod inventory;
mod llama;
mod qwen3;
mod qwen3_moe;
mod rope;
mod synthetic;
mod weights;

use freetoken_backend::{Op, Stage};
use serde_json::{Map, Value};

use crate::{engine::Batch, formats::FormatError};
pub use config::{ConfigError, ConfigFile};
pub use inventory::Inventory;
pub use rope::Rope;
pub use synthetic::{RoutingLaw, Synthetic, SyntheticCheckpoint};
pub use weights::{LoadedExperts, RecordSink, TensorError, WeightSource, Weights};

/// A loaded model: what turns a batch into ops. All ops of a step are `embed`, then each layer in order, then `head`.
pub trait Model: Send + Sync {
    /// Its sizes.
    fn sizes(&self) -> &Sizes;

    /// How positions are encoded.
    fn rope(&self) -> &Rope;

    /// Token ids to the residual stream.
    fn embed(&self, batch: &Batch) -> Vec<Op>;

    /// One layer, residual stream to residual stream. Experts are always behind a route point; where all of them have a place,
    /// the engine makes an op of it.
    fn layer(&self, layer: usize, batch: &Batch) -> Vec<Stage>;

    /// The chosen rows of the residual stream to logits.
    fn head(&self, batch: &Batch) -> Vec<Op>;
}

/// What an engine must know of a model to make room for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sizes {
    /// Rows of the embedding and of the output head.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key-value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Widest dense MLP, 0 where there is none.
    pub intermediate: usize,
    /// Routed experts, where there are any.
    pub moe: Option<MoeSizes>,
    /// Longest context the model was made for.
    pub max_positions: usize,
}

/// Sizes of the MoE layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeSizes {
    /// Layers that have experts.
    pub n_layers: usize,
    /// Experts of a layer.
    pub n_experts: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Width inside an expert.
    pub intermediate: usize,
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A weight is missing or wrong.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] freetoken_backend::Error),
}

impl From<FormatError> for ModelError {
    fn from(error: FormatError) -> Self {
        ModelError::Tensor(error.into())
    }
}

/// Loads the model that a `config.json` describes.
///
/// # Errors
/// [`ModelError`]: an unknown `model_type`, a bad field, a missing or misshapen tensor, no memory.
pub fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Box<dyn Model>, ModelError> {
    config.known_quantisation()?;
    Ok(match config.text("model_type")?.as_str() {
        "llama" => Box::new(llama::load(config, weights)?),
        "qwen3" => Box::new(qwen3::load(config, weights)?),
        "qwen3_moe" => Box::new(qwen3_moe::load(config, weights)?),
        other => return Err(config.unknown_model_type(other).into()),
    })
}

/// Architectures that [`load`] knows, as `config.json` names them.
pub const MODEL_TYPES: [&str; 3] = ["llama", "qwen3", "qwen3_moe"];

/// The fields of a published shape, for checkpoints that are made up.
///
/// Sizes are those of the models' own `config.json` files.
pub fn published_config(name: &str) -> Option<Map<String, Value>> {
    let json = match name {
        "qwen3-30b-a3b" => serde_json::json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu",
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": null,
            "attention_bias": false, "tie_word_embeddings": false, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
            "bos_token_id": 151643, "eos_token_id": 151645
        }),
        "qwen3-8b" => serde_json::json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
            "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": null,
            "attention_bias": false, "tie_word_embeddings": false, "bos_token_id": 151643, "eos_token_id": 151645
        }),
        "llama-3.1-8b" => serde_json::json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "rope_scaling": { "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3" },
            "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false,
            "bos_token_id": 128000, "eos_token_id": 128009
        }),
        _ => return None,
    };
    let Value::Object(fields) = json else { unreachable!("written as an object above") };
    Some(fields)
}

/// Names that [`published_config`] knows.
pub const PUBLISHED: [&str; 3] = ["qwen3-30b-a3b", "qwen3-8b", "llama-3.1-8b"];
