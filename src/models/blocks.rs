//! Blocks that models share: each loads its weights by HF name and emits its ops.

use freetoken_backend::{
    Activation, Attention, AttentionGate, AttentionParams, Combine, CombineParams, Embed, EmbedParams,
    ExpertMlp, ExpertMlpParams, MatMul, MatMulParams, Matrix, Op, RopeCache, RopeCacheParams, Route,
    RouteParams, RoutePoint, SharedExpert, SharedGate, Stage, View, Weight,
};

use super::{ConfigError, ConfigFile, ModelError, MoeSizes, Sizes, Weights};
use crate::engine::Batch;

/// Largest counts that a configuration may name; anything above is a broken file.
pub(super) const MAX_WIDTH: usize = 1 << 20;

/// Reads the fields that decoder-only transformers have in common.
pub(super) fn sizes(config: &ConfigFile<'_>) -> Result<Sizes, ConfigError> {
    let hidden = config.count("hidden_size", 1..=MAX_WIDTH)?;
    let n_heads = config.count("num_attention_heads", 1..=4096)?;
    let n_kv_heads = config.optional_count("num_key_value_heads", 1..=4096)?.unwrap_or(n_heads);
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(config.error(
            "num_key_value_heads",
            format!("is {n_kv_heads}, which does not divide {n_heads} heads"),
        ));
    }
    let head_dim = match config.optional_count("head_dim", 2..=4096)? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(n_heads) => hidden / n_heads,
        None => {
            return Err(
                config.error("head_dim", format!("is missing, and {n_heads} heads do not divide {hidden}"))
            );
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(
            config.error("head_dim", format!("is {head_dim}; it must be even, since rotation takes pairs"))
        );
    }
    Ok(Sizes {
        vocab: config.count("vocab_size", 1..=1 << 24)?,
        hidden,
        n_layers: config.count("num_hidden_layers", 1..=4096)?,
        n_heads,
        n_kv_heads,
        head_dim,
        gated_attention: false,
        intermediate: config.optional_count("intermediate_size", 1..=MAX_WIDTH)?.unwrap_or(0),
        moe: None,
        shared_expert: false,
        recurrent: None,
        max_positions: config.count("max_position_embeddings", 1..=1 << 26)?,
    })
}

/// Reads `rms_norm_eps`.
pub(super) fn eps(config: &ConfigFile<'_>) -> Result<f32, ConfigError> {
    Ok(config.number("rms_norm_eps", 1e-12..=1e-1)? as f32)
}

/// Token embedding, final norm and output head.
pub(super) struct Ends {
    /// `[vocab, hidden]`
    embed_tokens: Weight,
    /// `[hidden]`
    norm: Weight,
    /// `[vocab, hidden]`: the embedding itself where they are tied.
    lm_head: Matrix,
    eps: f32,
}

impl Ends {
    /// `tied`: whether the embedding is the output head too.
    pub(super) fn load(
        config: &ConfigFile<'_>,
        s: &Sizes,
        tied: bool,
        weights: &mut Weights<'_>,
    ) -> Result<Self, ModelError> {
        let embed_tokens = weights.plain_matrix("model.embed_tokens.weight", s.vocab, s.hidden)?;
        let lm_head = if tied {
            embed_tokens.clone().into()
        } else {
            weights.matrix("lm_head.weight", s.vocab, s.hidden)?
        };
        Ok(Ends {
            embed_tokens,
            norm: weights.norm("model.norm.weight", s.hidden)?,
            lm_head,
            eps: eps(config)?,
        })
    }

    pub(super) fn embed(&self, s: &Sizes, b: &Batch) -> Op {
        Embed {
            out: b.x.clone(),
            ids: b.ids.clone(),
            table: self.embed_tokens.clone(),
            p: EmbedParams { n_rows: b.n_rows as u32, hidden: s.hidden as u32, vocab: s.vocab as u32 },
        }
        .into()
    }

    pub(super) fn head(&self, s: &Sizes, b: &Batch) -> Op {
        MatMul {
            out: b.logits.clone(),
            x: b.x.clone(),
            rows: Some(b.logit_rows.clone()),
            norm: Some(self.norm.clone()),
            weight: self.lm_head.clone(),
            bias: None,
            p: MatMulParams {
                n_rows: b.n_sequences as u32,
                in_features: s.hidden as u32,
                out_features: s.vocab as u32,
                activation: Activation::None as u32,
                accumulate: 0,
                eps: self.eps,
            },
        }
        .into()
    }
}

/// What a projection's op differs in.
pub(super) struct Projection<'a> {
    pub(super) out: &'a View,
    pub(super) x: &'a View,
    pub(super) norm: Option<&'a Weight>,
    pub(super) weight: &'a Matrix,
    pub(super) bias: &'a Option<Vec<Weight>>,
    pub(super) activation: Activation,
    pub(super) accumulate: bool,
    pub(super) eps: f32,
}

impl Projection<'_> {
    pub(super) fn op(self, n_rows: usize) -> Op {
        let rows = self.weight.rows();
        MatMul {
            out: self.out.clone(),
            x: self.x.clone(),
            rows: None,
            norm: self.norm.cloned(),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            p: MatMulParams {
                n_rows: n_rows as u32,
                in_features: self.weight.cols() as u32,
                out_features: if self.activation == Activation::SiluGlu { rows / 2 } else { rows } as u32,
                activation: self.activation as u32,
                accumulate: self.accumulate as u32,
                eps: self.eps,
            },
        }
        .into()
    }
}

/// Grouped-query attention with rotary positions: norm, qkv, per-head norm, rotation, attention, output projection.
pub(super) struct SelfAttention {
    input_layernorm: Weight,
    /// q over k over v.
    qkv_proj: Matrix,
    qkv_bias: Option<Vec<Weight>>,
    q_norm: Option<Weight>,
    k_norm: Option<Weight>,
    o_proj: Matrix,
    o_bias: Option<Vec<Weight>>,
    /// Which of the layers with keys and values it is.
    kv_layer: usize,
    eps: f32,
}

/// What attention differs in between models.
pub(super) struct AttentionStyle {
    /// RMS norm over each head of q and k.
    pub(super) qk_norm: bool,
    /// Bias on q, k, v and o.
    pub(super) bias: bool,
}

impl SelfAttention {
    /// `kv_layer`: which of the layers with keys and values it is.
    pub(super) fn load(
        config: &ConfigFile<'_>,
        s: &Sizes,
        style: &AttentionStyle,
        [layer, kv_layer]: [usize; 2],
        weights: &mut Weights<'_>,
    ) -> Result<Self, ModelError> {
        let name = |what: &str| format!("model.layers.{layer}.{what}");
        let (q, kv) = (s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim);
        let pieces = [("q_proj", s.qkv_width() - 2 * kv), ("k_proj", kv), ("v_proj", kv)];
        let weight_of = |(what, rows): (&str, usize)| (name(&format!("self_attn.{what}.weight")), rows);
        let mut norm = |what: &str| match style.qk_norm {
            true => weights.norm(&name(&format!("self_attn.{what}.weight")), s.head_dim).map(Some),
            false => Ok(None),
        };
        let (q_norm, k_norm) = (norm("q_norm")?, norm("k_norm")?);
        let mut bias = |parts: &[(&str, usize)]| -> Result<_, ModelError> {
            let load = |(what, rows): &(&str, usize)| {
                weights.vector(&name(&format!("self_attn.{what}.bias")), *rows)
            };
            if style.bias {
                Ok(Some(parts.iter().map(load).collect::<Result<Vec<_>, _>>()?))
            } else {
                Ok(None)
            }
        };
        let (qkv_bias, o_bias) = (bias(&pieces)?, bias(&[("o_proj", s.hidden)])?);
        Ok(SelfAttention {
            input_layernorm: weights.norm(&name("input_layernorm.weight"), s.hidden)?,
            qkv_proj: weights.stacked(&pieces.map(weight_of), s.hidden)?,
            qkv_bias,
            q_norm,
            k_norm,
            o_proj: weights.matrix(&name("self_attn.o_proj.weight"), s.hidden, q)?,
            o_bias,
            kv_layer,
            eps: eps(config)?,
        })
    }

    pub(super) fn ops(&self, s: &Sizes, b: &Batch) -> Vec<Op> {
        let (n_rows, n_heads, n_kv_heads) = (b.n_rows as u32, s.n_heads as u32, s.n_kv_heads as u32);
        let head_dim = s.head_dim as u32;
        let qkv = Projection {
            out: &b.qkv,
            x: &b.x,
            norm: Some(&self.input_layernorm),
            weight: &self.qkv_proj,
            bias: &self.qkv_bias,
            activation: Activation::None,
            accumulate: false,
            eps: self.eps,
        };
        let rope_cache = RopeCache {
            q: b.q.clone(),
            kv: b.kv[self.kv_layer].clone(),
            qkv: b.qkv.clone(),
            gated: s.gated_attention,
            q_norm: self.q_norm.clone(),
            k_norm: self.k_norm.clone(),
            rotary: b.rotary.clone(),
            positions: b.positions.clone(),
            kv_slots: b.kv_slots.clone(),
            p: RopeCacheParams {
                n_rows,
                n_heads,
                n_kv_heads,
                head_dim,
                rotary_dim: b.rotary_dim as u32,
                max_positions: b.max_positions as u32,
                eps: self.eps,
            },
        };
        let attention = Attention {
            out: b.attended.clone(),
            q: b.q.clone(),
            kv: b.kv[self.kv_layer].clone(),
            block_table: b.block_table.clone(),
            sequences: b.sequences.clone(),
            positions: b.positions.clone(),
            gate: s
                .gated_attention
                .then(|| AttentionGate { rows: b.qkv.clone(), width: s.qkv_width() as u32 }),
            p: AttentionParams {
                n_rows,
                n_sequences: b.n_sequences as u32,
                max_pages: b.max_pages as u32,
                n_heads,
                n_kv_heads,
                head_dim,
                scale: (s.head_dim as f32).powf(-0.5),
            },
        };
        let o = Projection {
            out: &b.x,
            x: &b.attended,
            norm: None,
            weight: &self.o_proj,
            bias: &self.o_bias,
            activation: Activation::None,
            accumulate: true,
            eps: self.eps,
        };
        vec![qkv.op(b.n_rows), rope_cache.into(), attention.into(), o.op(b.n_rows)]
    }
}

/// A dense SwiGLU MLP: norm, gate and up, down.
pub(super) struct Mlp {
    post_attention_layernorm: Weight,
    /// gate over up
    gate_up_proj: Matrix,
    gate_up_bias: Option<Vec<Weight>>,
    down_proj: Matrix,
    down_bias: Option<Vec<Weight>>,
    eps: f32,
}

impl Mlp {
    pub(super) fn load(
        config: &ConfigFile<'_>,
        hidden: usize,
        bias: bool,
        layer: usize,
        weights: &mut Weights<'_>,
    ) -> Result<Self, ModelError> {
        let inner = config.count("intermediate_size", 1..=MAX_WIDTH)?;
        let name = |what: &str| format!("model.layers.{layer}.{what}");
        let mut biases = |parts: &[(&str, usize)]| -> Result<_, ModelError> {
            let load =
                |(what, rows): &(&str, usize)| weights.vector(&name(&format!("mlp.{what}.bias")), *rows);
            if bias { Ok(Some(parts.iter().map(load).collect::<Result<Vec<_>, _>>()?)) } else { Ok(None) }
        };
        let gate_up_bias = biases(&[("gate_proj", inner), ("up_proj", inner)])?;
        let down_bias = biases(&[("down_proj", hidden)])?;
        let gate_up = [(name("mlp.gate_proj.weight"), inner), (name("mlp.up_proj.weight"), inner)];
        Ok(Mlp {
            post_attention_layernorm: weights.norm(&name("post_attention_layernorm.weight"), hidden)?,
            gate_up_proj: weights.stacked(&gate_up, hidden)?,
            gate_up_bias,
            down_proj: weights.matrix(&name("mlp.down_proj.weight"), hidden, inner)?,
            down_bias,
            eps: eps(config)?,
        })
    }

    pub(super) fn ops(&self, b: &Batch) -> Vec<Op> {
        let gate_up = Projection {
            out: &b.inner,
            x: &b.x,
            norm: Some(&self.post_attention_layernorm),
            weight: &self.gate_up_proj,
            bias: &self.gate_up_bias,
            activation: Activation::SiluGlu,
            accumulate: false,
            eps: self.eps,
        };
        let down = Projection {
            out: &b.x,
            x: &b.inner,
            norm: None,
            weight: &self.down_proj,
            bias: &self.down_bias,
            activation: Activation::None,
            accumulate: true,
            eps: self.eps,
        };
        vec![gate_up.op(b.n_rows), down.op(b.n_rows)]
    }
}

/// Reads the fields that MoE models have in common. `n_layers` is how many layers have experts.
pub(super) fn moe_sizes(config: &ConfigFile<'_>, n_layers: usize) -> Result<MoeSizes, ConfigError> {
    let n_experts = config.count("num_experts", 1..=65_536)?;
    let top_k = config.count("num_experts_per_tok", 1..=1024)?;
    if top_k > n_experts {
        let problem = format!("is {top_k}, more than the {n_experts} experts of `num_experts`");
        return Err(config.error("num_experts_per_tok", problem));
    }
    Ok(MoeSizes {
        n_layers,
        n_experts,
        top_k,
        intermediate: config.count("moe_intermediate_size", 1..=MAX_WIDTH)?,
    })
}

/// Routed experts: norm and router, experts, sum; and the expert that every token passes, where there is one.
pub(super) struct SparseMoe {
    post_attention_layernorm: Weight,
    /// `[n_experts, hidden]`
    gate: Weight,
    /// Which of the MoE layers it is.
    moe_layer: usize,
    shared: Option<SharedMlp>,
    renormalize: bool,
    eps: f32,
}

/// The expert that every token passes, as far as its gate lets it.
struct SharedMlp {
    /// `[1, hidden]`
    gate: Weight,
    /// gate over up
    gate_up_proj: Matrix,
    down_proj: Matrix,
}

/// What routed experts differ in between models.
pub(super) struct MoeStyle {
    /// Whether the weights of the chosen experts sum to one.
    pub(super) renormalize: bool,
    /// Width of the shared expert, where there is one.
    pub(super) shared: Option<usize>,
    /// Whether the family's checkpoints have the experts of a layer in one tensor; looked at where there is no checkpoint.
    pub(super) stacked: bool,
}

impl SparseMoe {
    pub(super) fn load(
        config: &ConfigFile<'_>,
        hidden: usize,
        moe: &MoeSizes,
        style: &MoeStyle,
        layer: usize,
        weights: &mut Weights<'_>,
    ) -> Result<Self, ModelError> {
        let name = |what: &str| format!("model.layers.{layer}.{what}");
        let expert = |e: usize, what: &str| name(&format!("mlp.experts.{e}.{what}.weight"));
        let (gate, experts) = (name("mlp.gate.weight"), name("mlp.experts"));
        let stacked =
            weights.contains(&format!("{experts}.gate_up_proj")) || style.stacked && !weights.contains(&gate);
        let (n, inner) = (moe.n_experts, moe.intermediate);
        let post_attention_layernorm = weights.norm(&name("post_attention_layernorm.weight"), hidden)?;
        let shared = match style.shared {
            Some(inner) => Some(SharedMlp::load(&name("mlp"), hidden, inner, weights)?),
            None => None,
        };
        Ok(SparseMoe {
            post_attention_layernorm,
            gate: weights.plain_matrix(&gate, n, hidden)?,
            moe_layer: match stacked {
                true => weights.stacked_experts(&experts, n, hidden, inner)?,
                false => weights.experts(n, hidden, inner, expert)?,
            },
            shared,
            renormalize: style.renormalize,
            eps: eps(config)?,
        })
    }

    pub(super) fn stages(&self, s: &Sizes, b: &Batch) -> Vec<Stage> {
        let moe = s.moe.as_ref().expect("a model with experts states their sizes");
        let (hidden, top_k) = (s.hidden as u32, moe.top_k as u32);
        let (ids, weights) = (&b.expert_ids_of(self.moe_layer), &b.expert_weights);
        let route = Route {
            ids: ids.clone(),
            weights: weights.clone(),
            normed: b.normed.clone(),
            x: b.x.clone(),
            norm: self.post_attention_layernorm.clone(),
            router: self.gate.clone(),
            sequences: b.sequences.clone(),
            shared_gate: self
                .shared
                .as_ref()
                .map(|shared| SharedGate { out: b.shared_gates.clone(), weight: shared.gate.clone() }),
            p: RouteParams {
                n_rows: b.n_rows as u32,
                hidden,
                n_experts: moe.n_experts as u32,
                top_k,
                renormalize: self.renormalize as u32,
                eps: self.eps,
            },
        };
        let mut ops = vec![route.into()];
        ops.extend(self.shared.iter().flat_map(|shared| shared.ops(b, self.eps)));
        let mut stages = vec![Stage::Ops(ops)];
        for start in (0..b.n_rows).step_by(b.tile_rows) {
            let rows = start..b.n_rows.min(start + b.tile_rows);
            let part = |view: &View, width: usize| view.slice(rows.start * width * 4..rows.end * width * 4);
            let (ids, n_rows) = (part(ids, moe.top_k), rows.len() as u32);
            let mlp = ExpertMlp {
                parts: b.parts.clone(),
                x: part(&b.normed, s.hidden),
                ids: ids.clone(),
                weights: part(weights, moe.top_k),
                experts: b.experts[self.moe_layer].clone(),
                p: ExpertMlpParams {
                    n_rows,
                    top_k,
                    hidden,
                    intermediate: moe.intermediate as u32,
                    n_experts: moe.n_experts as u32,
                    in_place: 0,
                },
            };
            let x = part(&b.x, s.hidden);
            let p = CombineParams { n_rows, top_k, hidden };
            let shared = self
                .shared
                .as_ref()
                .map(|_| SharedExpert { rows: part(&b.shared, s.hidden), gates: part(&b.shared_gates, 1) });
            let combine = Combine { x, parts: b.parts.clone(), ids, shared, p };
            stages.extend([Stage::Route(RoutePoint { mlp }), Stage::Ops(vec![combine.into()])]);
        }
        stages
    }
}

impl SharedMlp {
    fn load(mlp: &str, hidden: usize, inner: usize, weights: &mut Weights<'_>) -> Result<Self, ModelError> {
        let name = |what: &str| format!("{mlp}.shared_expert.{what}.weight");
        let gate_up = [(name("gate_proj"), inner), (name("up_proj"), inner)];
        Ok(SharedMlp {
            gate: weights.plain_matrix(&format!("{mlp}.shared_expert_gate.weight"), 1, hidden)?,
            gate_up_proj: weights.stacked(&gate_up, hidden)?,
            down_proj: weights.matrix(&name("down_proj"), hidden, inner)?,
        })
    }

    /// From the rows that the router normed.
    fn ops(&self, b: &Batch, eps: f32) -> [Op; 2] {
        let gate_up = Projection {
            out: &b.inner,
            x: &b.normed,
            norm: None,
            weight: &self.gate_up_proj,
            bias: &None,
            activation: Activation::SiluGlu,
            accumulate: false,
            eps,
        };
        let down = Projection {
            out: &b.shared,
            x: &b.inner,
            weight: &self.down_proj,
            activation: Activation::None,
            ..gate_up
        };
        [gate_up.op(b.n_rows), down.op(b.n_rows)]
    }
}
