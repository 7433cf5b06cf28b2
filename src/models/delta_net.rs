//! A gated delta net in place of attention: norm, projections, a short convolution, a state that each token reads and corrects, output
//! projection. What it keeps of a sequence does not grow.
//!
//! Source: `Qwen3_5GatedDeltaNet` and `Qwen3NextGatedDeltaNet` of Hugging Face transformers.

use freetoken_backend::{
    Activation, GatedDelta, GatedDeltaParams, MAX_CONV_KERNEL, Matrix, Op, ShortConv, ShortConvParams, Weight,
};

use super::{
    ConfigError, ConfigFile, ModelError, RecurrentSizes, Sizes, Weights,
    blocks::{self, Projection},
};
use crate::engine::Batch;

/// Widest head that a configuration may name; anything above is a broken file.
const MAX_HEAD: usize = 1024;

/// Reads the fields of the delta nets, of which there are `n_layers`.
pub(super) fn sizes(config: &ConfigFile<'_>, n_layers: usize) -> Result<RecurrentSizes, ConfigError> {
    let n_key_heads = config.count("linear_num_key_heads", 1..=4096)?;
    let n_value_heads = config.count("linear_num_value_heads", 1..=4096)?;
    if !n_value_heads.is_multiple_of(n_key_heads) {
        let problem = format!("is {n_value_heads}, which {n_key_heads} heads of keys do not divide");
        return Err(config.error("linear_num_value_heads", problem));
    }
    Ok(RecurrentSizes {
        n_layers,
        n_key_heads,
        n_value_heads,
        key_dim: config.count("linear_key_head_dim", 1..=MAX_HEAD)?,
        value_dim: config.count("linear_value_head_dim", 1..=MAX_HEAD)?,
        kernel: config.count("linear_conv_kernel_dim", 2..=MAX_CONV_KERNEL)?,
    })
}

/// How the checkpoints of a family store what a delta net makes of its input.
#[derive(Debug, Clone, Copy)]
pub(super) enum InProjections {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`.
    Apart,
    /// `in_proj_qkvz` and `in_proj_ba`, whose rows come key head by key head: what belongs to the first, then to the next.
    ByKeyHead,
}

/// The weights of a layer.
pub(super) struct DeltaNet {
    input_layernorm: Weight,
    /// q, k and v over z, and over b and a where all have one format.
    in_proj: Matrix,
    /// b over a, where they are stored apart.
    ba_proj: Option<Matrix>,
    /// `[channels, kernel]`
    conv1d: Weight,
    /// A_log, dt_bias and the weight of the norm.
    constants: Weight,
    out_proj: Matrix,
    /// Which of the recurrent layers it is.
    state: usize,
    eps: f32,
}

impl DeltaNet {
    /// `state`: which of the recurrent layers it is.
    pub(super) fn load(
        config: &ConfigFile<'_>,
        s: &Sizes,
        stored: InProjections,
        [layer, state]: [usize; 2],
        weights: &mut Weights<'_>,
    ) -> Result<Self, ModelError> {
        let r = recurrent(s);
        let name = |what: &str| format!("model.layers.{layer}.{what}");
        let linear = |what: &str| name(&format!("linear_attn.{what}"));
        let (heads, values) = (r.n_value_heads, r.value_width());
        let (in_proj, ba_proj) = match stored {
            InProjections::Apart => {
                let mut pieces =
                    vec![(linear("in_proj_qkv.weight"), r.channels()), (linear("in_proj_z.weight"), values)];
                let ba = [(linear("in_proj_b.weight"), heads), (linear("in_proj_a.weight"), heads)];
                let ba_proj = match weights.are_alike(&pieces[0].0, &ba[0].0) {
                    true => {
                        pieces.extend(ba);
                        None
                    }
                    false => Some(weights.stacked(&ba, s.hidden)?),
                };
                (weights.stacked(&pieces, s.hidden)?, ba_proj)
            }
            InProjections::ByKeyHead => {
                let (n, of_one) = (r.n_key_heads, heads / r.n_key_heads);
                let qkvz = [r.key_dim, r.key_dim, of_one * r.value_dim, of_one * r.value_dim];
                let ba_proj =
                    weights.part_by_part(&linear("in_proj_ba.weight"), n, &[of_one, of_one], s.hidden)?;
                (weights.part_by_part(&linear("in_proj_qkvz.weight"), n, &qkvz, s.hidden)?, Some(ba_proj))
            }
        };
        let constants =
            [(linear("A_log"), heads), (linear("dt_bias"), heads), (linear("norm.weight"), r.value_dim)];
        Ok(DeltaNet {
            input_layernorm: weights.norm(&name("input_layernorm.weight"), s.hidden)?,
            in_proj,
            ba_proj,
            conv1d: weights.channel_taps(&linear("conv1d.weight"), r.channels(), r.kernel)?,
            constants: weights.joined_f32(&constants)?,
            out_proj: weights.matrix(&linear("out_proj.weight"), s.hidden, values)?,
            state,
            eps: blocks::eps(config)?,
        })
    }

    pub(super) fn ops(&self, s: &Sizes, b: &Batch) -> Vec<Op> {
        let r = recurrent(s);
        let (state, eps) = (&b.states[self.state], self.eps);
        let (n_rows, n_sequences, n_slots) = (b.n_rows as u32, b.n_sequences as u32, b.n_states as u32);
        let in_proj = Projection {
            out: &b.qkv,
            x: &b.x,
            norm: Some(&self.input_layernorm),
            weight: &self.in_proj,
            bias: &None,
            activation: Activation::None,
            accumulate: false,
            eps,
        };
        let ba_proj = self.ba_proj.as_ref().map(|weight| Projection { out: &b.ba, weight, ..in_proj });
        let (channels, width) = (r.channels() as u32, self.in_proj.rows() as u32);
        let conv = ShortConv {
            out: b.q.clone(),
            state: state.conv.clone(),
            x: b.qkv.clone(),
            weight: self.conv1d.clone(),
            sequences: b.sequences.clone(),
            spans: b.spans.clone(),
            p: ShortConvParams {
                n_rows,
                n_sequences,
                n_slots,
                channels,
                x_width: width,
                kernel: r.kernel as u32,
            },
        };
        let (ba, ba_width, ba_start) = match self.ba_proj {
            Some(_) => (&b.ba, 2 * r.n_value_heads as u32, 0),
            None => (&b.qkv, width, channels + r.value_width() as u32),
        };
        let delta = GatedDelta {
            out: b.attended.clone(),
            state: state.delta.clone(),
            qkv: b.q.clone(),
            z: b.qkv.clone(),
            ba: ba.clone(),
            constants: self.constants.clone(),
            spans: b.spans.clone(),
            p: GatedDeltaParams {
                n_rows,
                n_sequences,
                n_slots,
                n_key_heads: r.n_key_heads as u32,
                n_value_heads: r.n_value_heads as u32,
                key_dim: r.key_dim as u32,
                value_dim: r.value_dim as u32,
                z_width: width,
                z_start: channels,
                ba_width,
                ba_start,
                eps,
            },
        };
        let out_proj = Projection {
            out: &b.x,
            x: &b.attended,
            norm: None,
            weight: &self.out_proj,
            bias: &None,
            activation: Activation::None,
            accumulate: true,
            eps,
        };
        let mut ops = vec![in_proj.op(b.n_rows)];
        ops.extend(ba_proj.map(|projection| projection.op(b.n_rows)));
        ops.extend([conv.into(), delta.into(), out_proj.op(b.n_rows)]);
        ops
    }
}

fn recurrent(s: &Sizes) -> &RecurrentSizes {
    s.recurrent.as_ref().expect("a model with recurrent layers states their sizes")
}
