//! Qwen3-MoE: the attention of Qwen3; the layers that `decoder_sparse_step` and `mlp_only_layers` choose have routed experts
//! instead of a dense MLP.
//!
//! Source: `Qwen3MoeForCausalLM` of Hugging Face transformers.

use super::{
    ConfigFile, ModelError, Weights,
    blocks::{self, AttentionStyle, Mlp, MoeStyle, SparseMoe},
    decoder::{Decoder, FeedForward},
};

pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Decoder, ModelError> {
    config.silu()?;
    config.full_attention()?;
    let mut sizes = blocks::sizes(config)?;
    let attention = AttentionStyle { qk_norm: true, bias: config.flag("attention_bias", false)? };
    let dense = config.counts("mlp_only_layers", sizes.n_layers)?;
    let step = config.optional_count("decoder_sparse_step", 1..=4096)?.unwrap_or(1);
    let is_sparse = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    let n_sparse = (0..sizes.n_layers).filter(|&layer| is_sparse(layer)).count();
    let (hidden, moe) = (sizes.hidden, blocks::moe_sizes(config, n_sparse)?);
    let style = MoeStyle { renormalize: config.flag("norm_topk_prob", false)?, shared: None, stacked: false };
    sizes.moe = Some(moe);
    if n_sparse == sizes.n_layers {
        // Named in every configuration, used by no layer.
        sizes.intermediate = 0;
    }
    Decoder::load(config, sizes, &attention, weights, |layer, weights| {
        Ok(match is_sparse(layer) {
            true => FeedForward::Sparse(SparseMoe::load(config, hidden, &moe, &style, layer, weights)?),
            false => FeedForward::Dense(Mlp::load(config, hidden, false, layer, weights)?),
        })
    })
}
