//! Llama 3 and the many models of its shape: grouped-query attention, SwiGLU, no norms on heads.
//!
//! Source: `LlamaForCausalLM` of Hugging Face transformers.

use super::{
    ConfigFile, ModelError, Weights,
    blocks::{self, AttentionStyle, Mlp},
    decoder::{Decoder, FeedForward},
};

pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Decoder, ModelError> {
    config.silu()?;
    let sizes = blocks::sizes(config)?;
    let attention = AttentionStyle { qk_norm: false, bias: config.flag("attention_bias", false)? };
    let mlp_bias = config.flag("mlp_bias", false)?;
    let hidden = sizes.hidden;
    Decoder::load(config, sizes, &attention, weights, |layer, weights| {
        Ok(FeedForward::Dense(Mlp::load(config, hidden, mlp_bias, layer, weights)?))
    })
}
