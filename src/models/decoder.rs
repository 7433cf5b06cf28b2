//! The frame that decoder-only transformers share: embedding, layers of attention and feed-forward on one residual stream,
//! output head. What a layer is made of is the model's.

use freetoken_backend::{Op, Stage};

use super::{
    ConfigFile, Model, ModelError, Rope, Sizes, Weights,
    blocks::{AttentionStyle, Ends, Mlp, SelfAttention, SparseMoe},
};
use crate::engine::Batch;

/// What follows attention in a layer.
pub(super) enum FeedForward {
    Dense(Mlp),
    Sparse(SparseMoe),
}

/// A loaded decoder.
pub(super) struct Decoder {
    sizes: Sizes,
    rope: Rope,
    ends: Ends,
    layers: Vec<(SelfAttention, FeedForward)>,
}

impl Decoder {
    /// Loads the weights; `feed_forward` loads that part of a layer.
    pub(super) fn load(
        config: &ConfigFile<'_>,
        sizes: Sizes,
        attention: &AttentionStyle,
        weights: &mut Weights<'_>,
        feed_forward: impl Fn(usize, &mut Weights<'_>) -> Result<FeedForward, ModelError>,
    ) -> Result<Self, ModelError> {
        let rope = Rope::from_config(config, sizes.head_dim)?;
        let ends = Ends::load(config, &sizes, weights)?;
        let mut layers = Vec::new();
        for layer in 0..sizes.n_layers {
            let attention = SelfAttention::load(config, &sizes, attention, layer, weights)?;
            layers.push((attention, feed_forward(layer, weights)?));
        }
        Ok(Decoder { sizes, rope, ends, layers })
    }
}

impl Model for Decoder {
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
            FeedForward::Sparse(moe) => stages.extend(moe.stages(&self.sizes, batch)),
        }
        stages
    }

    fn head(&self, batch: &Batch) -> Vec<Op> {
        vec![self.ends.head(&self.sizes, batch)]
    }
}
