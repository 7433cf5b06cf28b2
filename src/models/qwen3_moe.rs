//! Qwen3-MoE: the attention of Qwen3; the layers that `decoder_sparse_step` and `mlp_only_layers` choose have routed experts
//! instead of a dense MLP.
//!
//! Source: `Qwen3MoeForCausalLM` of Hugging Face transformers.

use freetoken_backend::{Op, Stage};

use super::{
    ConfigFile, Model, ModelError, MoeSizes, Rope, Sizes, Weights,
    blocks::{self, AttentionStyle, Ends, Mlp, SelfAttention, SparseMoe},
};
use crate::engine::Batch;

pub(super) struct Qwen3Moe {
    sizes: Sizes,
    moe: MoeSizes,
    rope: Rope,
    ends: Ends,
    layers: Vec<(SelfAttention, FeedForward)>,
}

enum FeedForward {
    Dense(Mlp),
    Sparse(SparseMoe),
}

impl Qwen3Moe {
    pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Self, ModelError> {
        config.silu()?;
        config.full_attention()?;
        let mut sizes = blocks::sizes(config)?;
        let style = AttentionStyle { qk_norm: true, bias: config.flag("attention_bias", false)? };
        let dense = config.counts("mlp_only_layers", sizes.n_layers)?;
        let step = config.optional_count("decoder_sparse_step", 1..=4096)?.unwrap_or(1);
        let is_sparse = |layer: usize| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
        let n_sparse = (0..sizes.n_layers).filter(|&layer| is_sparse(layer)).count();
        let moe = blocks::moe_sizes(config, n_sparse)?;
        sizes.moe = Some(moe);
        if n_sparse == sizes.n_layers {
            // Named in every configuration, used by no layer.
            sizes.intermediate = 0;
        }
        let rope = Rope::from_config(config, sizes.head_dim)?;
        let ends = Ends::load(config, &sizes, weights)?;
        let mut layers = Vec::new();
        for layer in 0..sizes.n_layers {
            let attention = SelfAttention::load(config, &sizes, &style, layer, weights)?;
            let feed_forward = if is_sparse(layer) {
                FeedForward::Sparse(SparseMoe::load(config, &sizes, &moe, layer, weights)?)
            } else {
                FeedForward::Dense(Mlp::load(config, &sizes, false, layer, weights)?)
            };
            layers.push((attention, feed_forward));
        }
        Ok(Qwen3Moe { sizes, moe, rope, ends, layers })
    }
}

impl Model for Qwen3Moe {
    fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn rope(&self) -> &Rope {
        &self.rope
    }

    fn embed(&self, batch: &Batch) -> Vec<Op> {
        vec![self.ends.embed(&self.sizes, batch)]
    }

    fn layer(&self, layer: usize, batch: &Batch) -> Vec<Stage> {
        let (attention, feed_forward) = &self.layers[layer];
        let mut stages = vec![Stage::Ops(attention.ops(&self.sizes, layer, batch))];
        match feed_forward {
            FeedForward::Dense(mlp) => stages.push(Stage::Ops(mlp.ops(batch))),
            FeedForward::Sparse(moe) => stages.extend(moe.stages(&self.sizes, &self.moe, batch)),
        }
        stages
    }

    fn head(&self, batch: &Batch) -> Vec<Op> {
        vec![self.ends.head(&self.sizes, batch)]
    }
}
