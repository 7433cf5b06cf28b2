//! Llama 3 and the many models of its shape: grouped-query attention, SwiGLU, no norms on heads.
//!
//! Source: `LlamaForCausalLM` of Hugging Face transformers.

use freetoken_backend::{Op, Stage};

use super::{
    ConfigFile, Model, ModelError, Rope, Sizes, Weights,
    blocks::{self, AttentionStyle, Ends, Mlp, SelfAttention},
};
use crate::engine::Batch;

pub(super) struct Llama {
    sizes: Sizes,
    rope: Rope,
    ends: Ends,
    layers: Vec<(SelfAttention, Mlp)>,
}

impl Llama {
    pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Self, ModelError> {
        config.silu()?;
        let sizes = blocks::sizes(config)?;
        let style = AttentionStyle { qk_norm: false, bias: config.flag("attention_bias", false)? };
        let mlp_bias = config.flag("mlp_bias", false)?;
        let rope = Rope::from_config(config, sizes.head_dim)?;
        let ends = Ends::load(config, &sizes, weights)?;
        let mut layers = Vec::new();
        for layer in 0..sizes.n_layers {
            layers.push((
                SelfAttention::load(config, &sizes, &style, layer, weights)?,
                Mlp::load(config, &sizes, mlp_bias, layer, weights)?,
            ));
        }
        Ok(Llama { sizes, rope, ends, layers })
    }
}

impl Model for Llama {
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
