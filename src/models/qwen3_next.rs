//! Qwen3-Next: Qwen3.5 MoE before it had that name. Its delta nets store their projections key head by key head, and each expert has
//! tensors of its own.
//!
//! Source: `Qwen3NextForCausalLM` of Hugging Face transformers.

use super::{
    ConfigFile, ModelError, Weights,
    blocks::{self, MoeStyle, SparseMoe},
    decoder::{Decoder, FeedForward},
    delta_net::InProjections,
    qwen3_5,
};

pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Decoder, ModelError> {
    if !config.counts("mlp_only_layers", usize::MAX)?.is_empty() {
        return Err(config.error("mlp_only_layers", "must be empty: every layer has experts here").into());
    }
    config.optional_count("decoder_sparse_step", 1..=1)?;
    let mut sizes = blocks::sizes(config)?;
    let (hidden, moe) = (sizes.hidden, blocks::moe_sizes(config, sizes.n_layers)?);
    let shared = config.count("shared_expert_intermediate_size", 1..=blocks::MAX_WIDTH)?;
    (sizes.moe, sizes.shared_expert, sizes.intermediate) = (Some(moe), true, shared);
    let renormalize = config.flag("norm_topk_prob", false)?;
    let style = MoeStyle { renormalize, shared: Some(shared), stacked: false };
    qwen3_5::load_family(config, sizes, InProjections::ByKeyHead, weights, |layer, weights| {
        Ok(FeedForward::Sparse(SparseMoe::load(config, hidden, &moe, &style, layer, weights)?))
    })
}
