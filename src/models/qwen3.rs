//! Qwen3, dense: grouped-query attention with RMS norms on the heads of q and k, SwiGLU.
//!
//! Source: `Qwen3ForCausalLM` of Hugging Face transformers.

use super::{
    ConfigFile, ModelError, Weights,
    blocks::{self, AttentionStyle, Mlp},
    decoder::{Decoder, FeedForward},
};

pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Decoder, ModelError> {
    config.silu()?;
    config.full_attention()?;
    let sizes = blocks::sizes(config)?;
    let attention = AttentionStyle { qk_norm: true, bias: config.flag("attention_bias", false)? };
    let hidden = sizes.hidden;
    Decoder::load(config, sizes, &attention, weights, |layer, weights| {
        Ok(FeedForward::Dense(Mlp::load(config, hidden, false, layer, weights)?))
    })
}
