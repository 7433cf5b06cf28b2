//! Qwen3.5 and 3.6 MoE: the frame of Qwen3.5 with routed experts in every layer, and one that every token passes as far as its gate
//! lets it.
//!
//! Source: `Qwen3_5MoeForConditionalGeneration` of Hugging Face transformers.

use super::{
    ConfigFile, ModelError, Weights,
    blocks::{self, MoeStyle, SparseMoe},
    decoder::{Decoder, FeedForward},
    delta_net::InProjections,
    qwen3_5,
};

pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Decoder, ModelError> {
    let text = qwen3_5::text(config)?;
    if !text.counts("mlp_only_layers", usize::MAX)?.is_empty() {
        return Err(text.error("mlp_only_layers", "must be empty: every layer has experts here").into());
    }
    let mut sizes = blocks::sizes(&text)?;
    let (hidden, moe) = (sizes.hidden, blocks::moe_sizes(&text, sizes.n_layers)?);
    let shared = text.count("shared_expert_intermediate_size", 1..=blocks::MAX_WIDTH)?;
    (sizes.moe, sizes.shared_expert, sizes.intermediate) = (Some(moe), true, shared);
    let style = MoeStyle { renormalize: true, shared: Some(shared), stacked: true };
    qwen3_5::load_family(config, sizes, InProjections::Apart, weights, |layer, weights| {
        Ok(FeedForward::Sparse(SparseMoe::load(&text, hidden, &moe, &style, layer, weights)?))
    })
}
