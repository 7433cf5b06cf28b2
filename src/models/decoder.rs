//! The frame that decoder-only models share: embedding, layers of attention (or of what stands in its place) and feed-forward on
//! one residual stream, output head. What a layer is made of is the model's.

use freetoken_backend::{Op, Stage};

use super::{
    ConfigFile, Model, ModelError, Rope, Sizes, Weights,
    blocks::{AttentionStyle, Ends, Mlp, SelfAttention, SparseMoe},
    delta_net::DeltaNet,
};
use crate::engine::Batch;

/// What mixes tokens in a layer.
pub(super) enum Mixer {
    Attention(SelfAttention),
    Delta(DeltaNet),
}

/// What follows it.
pub(super) enum FeedForward {
    Dense(Mlp),
    Sparse(SparseMoe),
}

/// A loaded decoder.
pub(super) struct Decoder {
    sizes: Sizes,
    rope: Rope,
    ends: Ends,
    layers: Vec<(Mixer, FeedForward)>,
}

impl Decoder {
    /// Loads the weights of a model with attention in every layer; `feed_forward` loads the rest of a layer.
    pub(super) fn load(
        config: &ConfigFile<'_>,
        sizes: Sizes,
        attention: &AttentionStyle,
        weights: &mut Weights<'_>,
        feed_forward: impl Fn(usize, &mut Weights<'_>) -> Result<FeedForward, ModelError>,
    ) -> Result<Self, ModelError> {
        let rope = Rope::from_config(config, sizes.head_dim)?;
        let ends = Ends::load(config, &sizes, config.flag("tie_word_embeddings", false)?, weights)?;
        let layer = |layer: usize, sizes: &Sizes, weights: &mut Weights<'_>| {
            let attention = SelfAttention::load(config, sizes, attention, [layer; 2], weights)?;
            Ok((Mixer::Attention(attention), feed_forward(layer, weights)?))
        };
        Self::of_layers(sizes, rope, ends, weights, layer)
    }

    /// Loads the layers of a model one by one.
    pub(super) fn of_layers(
        sizes: Sizes,
        rope: Rope,
        ends: Ends,
        weights: &mut Weights<'_>,
        layer: impl Fn(usize, &Sizes, &mut Weights<'_>) -> Result<(Mixer, FeedForward), ModelError>,
    ) -> Result<Self, ModelError> {
        let layers = (0..sizes.n_layers).map(|i| layer(i, &sizes, weights)).collect::<Result<_, _>>()?;
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
        let (mixer, feed_forward) = &self.layers[layer];
        let mut stages = vec![Stage::Ops(match mixer {
            Mixer::Attention(attention) => attention.ops(&self.sizes, batch),
            Mixer::Delta(delta) => delta.ops(&self.sizes, batch),
        })];
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
