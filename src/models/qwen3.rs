//! Qwen3, dense: grouped-query attention with RMS norms on the heads of q and k, SwiGLU.
//!
//! Source: `Qwen3ForCausalLM` of Hugging Face transformers.

use freetoken_backend::{Op, Stage};

use super::{
    ConfigFile, Model, ModelError, Rope, Sizes, Weights,
    blocks::{self, AttentionStyle, Ends, Mlp, SelfAttention},
};
use crate::engine::Batch;

pub(super) struct Qwen3 {
    sizes: Sizes,
    rope: Rope,
    ends: Ends,
    layers: Vec<(SelfAttention, Mlp)>,
}

impl Qwen3 {
    pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Self, ModelError> {
        config.silu()?;
        config.full_attention()?;
        let sizes = blocks::sizes(config)?;
        let style = AttentionStyle { qk_norm: true, bias: config.flag("attention_bias", false)? };
        let rope = Rope::from_config(config, sizes.head_dim)?;
        let ends = Ends::load(config, &sizes, weights)?;
        let mut layers = Vec::new();
        for layer in 0..sizes.n_layers {
            layers.push((
                SelfAttention::load(config, &sizes, &style, layer, weights)?,
                Mlp::load(config, &sizes, false, layer, weights)?,
            ));
        }
        Ok(Qwen3 { sizes, rope, ends, layers })
    }
}

impl Model for Qwen3 {
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
        let (attention, mlp) = &self.layers[layer];
        let mut ops = attention.ops(&self.sizes, layer, batch);
        ops.extend(mlp.ops(batch));
        vec![Stage::Ops(ops)]
    }

    fn head(&self, batch: &Batch) -> Vec<Op> {
        vec![self.ends.head(&self.sizes, batch)]
    }
}
