//! The models: one file an architecture, named by its `model_type`, over blocks they share.
//!
//! A model emits ops for a batch and knows no device, no weight format and no memory budget. What differs between two
//! models is visible when their files lie side by side.

mod blocks;
mod config;
mod decoder;
mod delta_net;
mod inventory;
mod layout;
mod llama;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod rope;
mod synthetic;
mod weights;

use freetoken_backend::{Op, Stage};
use serde_json::{Map, Value};

use crate::{engine::Batch, formats::FormatError};
pub use config::{ConfigError, ConfigFile};
pub use inventory::Inventory;
pub use layout::{Ungrouped, quantization_config};
pub use rope::Rope;
pub use synthetic::{RoutingLaw, Synthetic, SyntheticCheckpoint};
pub use weights::{LoadedExperts, RecordSink, Spelling, TensorError, WeightSource, Weights};

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
    /// Whether each query head comes with as many gates.
    pub gated_attention: bool,
    /// Widest dense MLP or shared expert, 0 where there is none.
    pub intermediate: usize,
    /// Routed experts, where there are any.
    pub moe: Option<MoeSizes>,
    /// Whether each MoE layer has an expert that every token passes.
    pub shared_expert: bool,
    /// Layers that keep a state in place of keys and values, where there are any.
    pub recurrent: Option<RecurrentSizes>,
    /// Longest context the model was made for.
    pub max_positions: usize,
}

impl Sizes {
    /// Layers that keep keys and values: all that are not recurrent.
    pub fn n_kv_layers(&self) -> usize {
        self.n_layers - self.recurrent.map_or(0, |recurrent| recurrent.n_layers)
    }

    /// Columns of q, its gates, k and v.
    pub fn qkv_width(&self) -> usize {
        let q_heads = if self.gated_attention { 2 * self.n_heads } else { self.n_heads };
        (q_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}

/// Sizes of the layers that are gated delta nets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecurrentSizes {
    /// How many layers.
    pub n_layers: usize,
    /// Heads of q and k; divides `n_value_heads`.
    pub n_key_heads: usize,
    /// Heads of v, and of the state.
    pub n_value_heads: usize,
    /// Width of a head of q and k.
    pub key_dim: usize,
    /// Width of a head of v.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub kernel: usize,
}

impl RecurrentSizes {
    /// Channels of the convolution: q, k and v.
    pub fn channels(&self) -> usize {
        2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim
    }

    /// Columns of v, of z and of the output.
    pub fn value_width(&self) -> usize {
        self.n_value_heads * self.value_dim
    }

    /// f32 values that the convolution of a layer keeps of a sequence.
    pub fn conv_values(&self) -> usize {
        (self.kernel - 1) * self.channels()
    }

    /// f32 values of the state of a layer for a sequence.
    pub fn delta_values(&self) -> usize {
        self.n_value_heads * self.key_dim * self.value_dim
    }

    /// Bytes that all layers keep of a sequence.
    pub fn state_bytes(&self) -> usize {
        4 * self.n_layers * (self.conv_values() + self.delta_values())
    }
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
        "qwen3_5" | "qwen3_5_text" => Box::new(qwen3_5::load(config, weights)?),
        "qwen3_5_moe" | "qwen3_5_moe_text" => Box::new(qwen3_5_moe::load(config, weights)?),
        other => return Err(config.unknown_model_type(other).into()),
    })
}

/// Architectures that [`load`] knows, as `config.json` names them.
pub const MODEL_TYPES: [&str; 5] = ["llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"];

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
        "qwen3.6-35b-a3b" => serde_json::json!({
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "torch_dtype": "bfloat16", "tie_word_embeddings": false,
            "text_config": {
                "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", "vocab_size": 248320, "hidden_size": 2048,
                "num_hidden_layers": 40, "full_attention_interval": 4, "num_attention_heads": 16,
                "num_key_value_heads": 2, "head_dim": 256, "attn_output_gate": true, "attention_bias": false,
                "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu",
                "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
                "rope_parameters": { "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25 },
                "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
                "shared_expert_intermediate_size": 512, "mlp_only_layers": [], "eos_token_id": 248044
            }
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
pub const PUBLISHED: [&str; 4] = ["qwen3-30b-a3b", "qwen3.6-35b-a3b", "qwen3-8b", "llama-3.1-8b"];

/// What published checkpoints have beside the language model, and how its tensors' names begin.
const LEFT_ASIDE: [(&str, &str); 2] =
    [("the image tower", "model.visual."), ("the prediction of further tokens", "mtp.")];

/// Whether a tensor belongs to a part of published checkpoints that no model here runs.
pub fn is_left_aside(name: &str) -> bool {
    LEFT_ASIDE.iter().any(|(_, prefix)| name.starts_with(prefix))
}

/// The parts of a checkpoint that no model here runs, in words; `None` where it has none.
pub fn left_aside<'n>(names: impl Iterator<Item = &'n str>) -> Option<String> {
    let mut counts = [0; LEFT_ASIDE.len()];
    for name in names {
        let part = LEFT_ASIDE.iter().position(|(_, prefix)| name.starts_with(prefix));
        part.into_iter().for_each(|part| counts[part] += 1);
    }
    let counted = LEFT_ASIDE.iter().zip(counts).filter(|(_, n)| *n > 0);
    let words: Vec<String> = counted.map(|((what, _), n)| format!("{what} ({n} tensors)")).collect();
    (!words.is_empty()).then(|| words.join(" and "))
}
