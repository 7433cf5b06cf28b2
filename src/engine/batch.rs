//! A batch bucket: the named buffers that ops of a step read and write. Activations are a buffer each; what the host writes
//! every step lies in one buffer, so that it is one write.

use freetoken_backend::{
    Backend, Caps, Experts, Format, KvCache, LogitEdit, MAX_TOP_LOGITS, PAGE_TOKENS, Precision, Result, Span,
    View,
};

use super::{EngineOptions, state::RecurrentState};
use crate::models::{Model, Sizes};

/// Sections of the input buffer start at a multiple of this many bytes, which every device can bind at.
const SECTION_ALIGN: usize = 256;
/// Rows whose logits are computed at a time, and sequences of a batch.
pub(super) const MAX_SEQUENCES: usize = 16;
/// Edits of logits a step; a step that needs more edits on the host.
pub(super) const MAX_EDITS: usize = 16_384;

/// What bounds the buffers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Largest bucket.
    pub(super) max_rows: usize,
    /// Rows whose experts' rows are kept at a time.
    pub(super) tile_rows: usize,
    /// Longest sequence, in tokens.
    pub(super) context: usize,
    /// Pages of the cache.
    pub(super) n_pages: usize,
    /// Whether decode steps have buffers of their own, since a prompt may be half way through the layers.
    pub(super) decodes_apart: bool,
    /// Places for recurrent states of sequences that run, where a model has any.
    pub(super) n_states: usize,
    /// Slots for those that are kept beside.
    pub(super) n_state_slots: usize,
}

/// Share of the memory that there is for it that the experts' rows of a prefill step may take.
const PARTS_SHARE: u64 = 64;
/// What they may take where the device does not tell its memory.
const DEFAULT_PARTS_BYTES: u64 = 64 << 20;
/// The same of everything that a row of a prefill step takes, where experts are streamed: with more rows a step, an expert
/// crosses the link less often.
const STREAMED_SHARE: u64 = 16;
/// Rows of such a step where the device does not tell its memory, and most of them.
const STREAMED_ROWS: [usize; 2] = [1024, 16_384];

impl Limits {
    /// States on the device: of sequences that run, kept ones, and the one before a chunk that may be abandoned.
    pub(super) fn n_all_states(&self) -> usize {
        self.n_states + self.n_state_slots + usize::from(self.decodes_apart)
    }

    /// So many rows, and no cache.
    fn of_rows(max_rows: usize) -> Self {
        Limits {
            max_rows,
            tile_rows: max_rows,
            context: 0,
            n_pages: 0,
            n_states: 0,
            n_state_slots: 0,
            decodes_apart: false,
        }
    }

    /// For sequences of `context` tokens. `memory`: what the device has for all of it, where that is known.
    pub(super) fn new(
        sizes: &Sizes,
        caps: &Caps,
        options: &EngineOptions,
        context: usize,
        memory: Option<u64>,
        streamed: bool,
    ) -> Self {
        let max_sequences = options.max_sequences.clamp(1, MAX_SEQUENCES);
        let of_one = context.div_ceil(PAGE_TOKENS);
        let of_all = options.kv_tokens.map_or(max_sequences * of_one, |n| n.div_ceil(PAGE_TOKENS));
        let n_pages = 1 + of_all.max(of_one);
        let [n_states, n_state_slots] =
            sizes.recurrent.map_or([0, 0], |_| [max_sequences, options.state_slots]);
        let rows = |n: usize| n.clamp(1, 1 << 16).next_power_of_two().max(MAX_SEQUENCES);
        if streamed {
            let row = Limits::of_rows(1);
            let row_bytes = activations(sizes, &row)[..N_ROW_ACTIVATIONS].iter().sum::<usize>() as u64 * 4;
            let [unknown, most] = STREAMED_ROWS;
            let fits = memory.map_or(unknown, |memory| {
                usize::try_from(memory / STREAMED_SHARE / row_bytes.max(1)).unwrap_or(most)
            });
            let bound =
                caps.max_binding_bytes / (sizes.hidden * sizes.moe.map_or(1, |moe| moe.top_k) * 4).max(1);
            let fits = 1 << fits.min(bound).clamp(MAX_SEQUENCES, most).ilog2();
            let max_rows = rows(options.max_chunk.unwrap_or(context)).min(fits);
            let decodes_apart = true;
            let of_rows = Limits::of_rows(max_rows);
            return Limits { context, n_pages, n_states, n_state_slots, decodes_apart, ..of_rows };
        }
        let max_rows = rows(options.max_chunk.unwrap_or(caps.prefill_rows.min(context)));
        // All where memory is plentiful, since each tile reads its experts again.
        let row_bytes = sizes.moe.map_or(0, |moe| moe.top_k * sizes.hidden * size_of::<f32>());
        let share = caps.total_bytes.map_or(DEFAULT_PARTS_BYTES, |total| total / PARTS_SHARE);
        let most = usize::try_from(share).unwrap_or(usize::MAX).min(caps.max_binding_bytes);
        let fits = (most / row_bytes.max(1)).clamp(1, max_rows);
        let tile_rows = 1 << fits.ilog2();
        Limits { tile_rows, context, n_pages, n_states, n_state_slots, ..Limits::of_rows(max_rows) }
    }
}

/// The buffers of a bucket, as models bind them. Smaller buckets are the front of the same buffers.
#[derive(Debug, Clone)]
pub struct Batch {
    /// Rows of this bucket.
    pub n_rows: usize,
    /// Rows of the block table, and rows whose logits are computed.
    pub n_sequences: usize,
    /// Columns of the block table.
    pub max_pages: usize,
    /// All that the host writes in a step; the next fields are parts of it.
    pub input: View,
    /// i32 `[n_rows]`
    pub ids: View,
    /// i32 `[n_rows]`
    pub positions: View,
    /// i32 `[n_rows]`: row of the block table, -1 for padding.
    pub sequences: View,
    /// i32 `[n_rows]`
    pub kv_slots: View,
    /// i32 `[n_sequences, max_pages]`
    pub block_table: View,
    /// [`Span`] `[n_sequences]`
    pub spans: View,
    /// i32 `[n_sequences]`: rows of `x`
    pub logit_rows: View,
    /// f32 `[n_sequences]`
    pub inverse_temperatures: View,
    /// [`LogitEdit`] `[MAX_EDITS]`
    pub edits: View,
    /// f32 `[n_rows, hidden]`: the residual stream.
    pub x: View,
    /// f32 `[n_rows, qkv_width]`; in a recurrent layer q, k, v, z, b and a.
    pub qkv: View,
    /// f32 `[n_rows, n_heads * head_dim]`; in a recurrent layer what the convolution gives.
    pub q: View,
    /// f32 `[n_rows, n_heads * head_dim]`; in a recurrent layer what the state gives.
    pub attended: View,
    /// f32 `[n_rows, 2 * n_value_heads]`: b and a of a recurrent layer, where they are a projection of their own.
    pub ba: View,
    /// f32 `[n_rows, intermediate]`
    pub inner: View,
    /// f32 `[n_rows, hidden]`
    pub normed: View,
    /// f32 `[n_rows, hidden]`: what the shared expert gives.
    pub shared: View,
    /// f32 `[n_rows]`: how much of it a row takes.
    pub shared_gates: View,
    /// i32 `[n_moe_layers, n_rows, top_k]`, or `[n_rows, top_k]` where layers share it.
    pub expert_ids: View,
    /// Whether each layer overwrites what the one before it chose.
    pub shares_ids: bool,
    /// Routes of a row.
    pub top_k: usize,
    /// f32 `[n_rows, top_k]`
    pub expert_weights: View,
    /// f32 `[tile_rows, top_k, hidden]`
    pub parts: View,
    /// Rows whose experts' rows are kept at a time: a layer runs through its rows in tiles.
    pub tile_rows: usize,
    /// f32 `[n_sequences, vocab]`
    pub logits: View,
    /// i32 `[n_sequences, MAX_TOP_LOGITS]`
    pub top_ids: View,
    /// f32 `[n_sequences, MAX_TOP_LOGITS]`
    pub top_values: View,
    /// f32 `[n_sequences]`
    pub log_sum_exp: View,
    /// A cache for each layer that keeps keys and values.
    pub kv: Vec<KvCache>,
    /// A state for each recurrent layer.
    pub states: Vec<RecurrentState>,
    /// Places of each state.
    pub n_states: usize,
    /// Where the experts of each MoE layer are.
    pub experts: Vec<Experts>,
    /// Whether experts without a slot are read where they lie, and nobody is asked about them.
    pub reads_in_place: bool,
    /// f32 `[max_positions, rotary_dim / 2, 2]`
    pub rotary: View,
    /// Rotated width of a head.
    pub rotary_dim: usize,
    /// Rows of `rotary`.
    pub max_positions: usize,
}

/// Where the parts of a step's input lie, in bytes of the input buffer. The list of edits comes last, so that a step
/// writes only as much of it as there is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct InputLayout {
    pub(super) ids: usize,
    pub(super) positions: usize,
    pub(super) sequences: usize,
    pub(super) kv_slots: usize,
    pub(super) logit_rows: usize,
    pub(super) inverse_temperatures: usize,
    pub(super) spans: usize,
    pub(super) block_table: usize,
    pub(super) edits: usize,
    pub(super) bytes: usize,
}

impl InputLayout {
    /// Of a bucket.
    pub(super) fn new(n_rows: usize, n_sequences: usize, max_pages: usize) -> Self {
        let mut end = 0;
        let mut section = |bytes: usize| {
            let start = end;
            end += bytes.next_multiple_of(SECTION_ALIGN);
            start
        };
        InputLayout {
            ids: section(n_rows * 4),
            positions: section(n_rows * 4),
            sequences: section(n_rows * 4),
            kv_slots: section(n_rows * 4),
            logit_rows: section(n_sequences * 4),
            inverse_temperatures: section(n_sequences * 4),
            spans: section(n_sequences * size_of::<Span>()),
            block_table: section(n_sequences * max_pages * 4),
            edits: section(MAX_EDITS * size_of::<LogitEdit>()),
            bytes: end,
        }
    }
}

/// Format of the KV cache.
pub(super) fn kv_format(precision: Precision) -> Format {
    match precision {
        Precision::Auto => Format::Bf16,
        Precision::F32 => Format::F32,
    }
}

/// Activations that take more memory with more rows.
const N_ROW_ACTIVATIONS: usize = 12;

/// f32 values that each activation takes, in the order of [`Batch`]'s fields: those with `max_rows` rows, then the rest.
fn activations(s: &Sizes, limits: &Limits) -> [usize; N_ROW_ACTIVATIONS + 4] {
    let heads = s.n_heads * s.head_dim;
    let (channels, values, ba) =
        s.recurrent.map_or((0, 0, 0), |r| (r.channels(), r.value_width(), 2 * r.n_value_heads));
    let (top_k, n_moe_layers, is_moe) = s.moe.map_or((0, 0, 0), |moe| (moe.top_k, moe.n_layers, 1));
    let n = limits.max_rows;
    [
        n * s.hidden,
        n * s.qkv_width().max(channels + values + ba),
        n * heads.max(channels),
        n * heads.max(values),
        n * ba,
        n * s.intermediate,
        n * s.hidden * is_moe,
        n * s.hidden * s.shared_expert as usize,
        n * s.shared_expert as usize,
        n_moe_layers * n * top_k,
        n * top_k,
        limits.tile_rows * top_k * s.hidden,
        MAX_SEQUENCES * s.vocab,
        MAX_SEQUENCES * MAX_TOP_LOGITS,
        MAX_SEQUENCES * MAX_TOP_LOGITS,
        MAX_SEQUENCES,
    ]
}

/// What batches of any size share.
struct Caches {
    kv: Vec<KvCache>,
    states: Vec<RecurrentState>,
    n_states: usize,
    experts: Vec<Experts>,
    rotary: View,
    rotary_dim: usize,
    max_positions: usize,
}

/// A buffer for each activation.
fn buffers(backend: &dyn Backend, s: &Sizes, limits: &Limits) -> Result<[View; N_ROW_ACTIVATIONS + 4]> {
    let mut buffers = Vec::new();
    for values in activations(s, limits) {
        buffers.push(backend.alloc(values * 4)?.whole());
    }
    Ok(buffers.try_into().expect("a buffer for each activation"))
}

/// Bytes that a batch, its caches and states included, will take on a device; at most, where a model rotates part of a head.
pub(super) fn bytes(s: &Sizes, limits: &Limits, precision: Precision) -> u64 {
    let page = KvCache::page_bytes(kv_format(precision), s.n_kv_heads, s.head_dim) as u64;
    let kv = page * limits.n_pages as u64 * s.n_kv_layers() as u64;
    let states = s.recurrent.map_or(0, |recurrent| limits.n_all_states() * recurrent.state_bytes()) as u64;
    let apart = limits.decodes_apart.then(|| Limits::of_rows(MAX_SEQUENCES));
    let activations: usize =
        std::iter::once(*limits).chain(apart).flat_map(|limits| activations(s, &limits)).sum();
    kv + states + 4 * (activations + limits.context * s.head_dim) as u64
}

impl Batch {
    /// Makes the buffers of the largest bucket.
    ///
    /// # Errors
    /// The device has no room.
    pub(super) fn new(
        backend: &dyn Backend,
        model: &dyn Model,
        limits: &Limits,
        experts: Vec<Experts>,
    ) -> Result<Self> {
        let s = model.sizes();
        let format = kv_format(backend.caps().precision);
        let page_bytes = KvCache::page_bytes(format, s.n_kv_heads, s.head_dim);
        let mut kv = Vec::new();
        for _ in 0..s.n_kv_layers() {
            let view = backend.alloc(limits.n_pages * page_bytes)?.whole();
            kv.push(KvCache { view, format, n_pages: limits.n_pages });
        }
        let states = match &s.recurrent {
            Some(recurrent) => RecurrentState::of_layers(backend, recurrent, limits.n_states)?,
            None => Vec::new(),
        };
        let table = model.rope().table(limits.context);
        let rotary = backend.alloc(table.len() * 4)?.whole();
        backend.write(&rotary, bytemuck::cast_slice(&table))?;
        let rotary_dim = model.rope().rotary_dim();
        let (n_states, max_positions) = (limits.n_states, limits.context);
        let caches = Caches { kv, states, n_states, experts, rotary, rotary_dim, max_positions };
        Batch::over(caches, backend, s, limits)
    }

    /// Buffers of their own for steps of few rows, over the same caches and experts.
    ///
    /// # Errors
    /// The device has no room.
    pub(super) fn beside(&self, backend: &dyn Backend, s: &Sizes) -> Result<Self> {
        let caches = Caches {
            kv: self.kv.clone(),
            states: self.states.clone(),
            n_states: self.n_states,
            experts: self.experts.clone(),
            rotary: self.rotary.clone(),
            rotary_dim: self.rotary_dim,
            max_positions: self.max_positions,
        };
        Batch::over(caches, backend, s, &Limits::of_rows(MAX_SEQUENCES))
    }

    /// Makes the buffers of the rows of `limits`.
    fn over(caches: Caches, backend: &dyn Backend, s: &Sizes, limits: &Limits) -> Result<Self> {
        let Caches { kv, states, n_states, experts, rotary, rotary_dim, max_positions } = caches;
        let max_pages = max_positions.div_ceil(PAGE_TOKENS);
        let input = backend.alloc(InputLayout::new(limits.max_rows, MAX_SEQUENCES, max_pages).bytes)?.whole();
        let [
            x,
            qkv,
            q,
            attended,
            ba,
            inner,
            normed,
            shared,
            shared_gates,
            expert_ids,
            expert_weights,
            parts,
            logits,
            top_ids,
            top_values,
            log_sum_exp,
        ] = buffers(backend, s, limits)?;
        let whole = Batch {
            n_rows: limits.max_rows,
            n_sequences: MAX_SEQUENCES,
            max_pages,
            ids: input.clone(),
            positions: input.clone(),
            sequences: input.clone(),
            kv_slots: input.clone(),
            block_table: input.clone(),
            spans: input.clone(),
            logit_rows: input.clone(),
            inverse_temperatures: input.clone(),
            edits: input.clone(),
            input,
            x,
            qkv,
            q,
            attended,
            ba,
            inner,
            normed,
            shared,
            shared_gates,
            expert_ids,
            shares_ids: false,
            top_k: s.moe.map_or(0, |moe| moe.top_k),
            expert_weights,
            parts,
            tile_rows: limits.tile_rows,
            logits,
            top_ids,
            top_values,
            log_sum_exp,
            kv,
            states,
            n_states,
            experts,
            reads_in_place: false,
            rotary,
            rotary_dim,
            max_positions,
        };
        Ok(whole.bucket(limits.max_rows))
    }

    /// The front of the buffers, for a bucket of `n_rows` rows.
    pub(super) fn bucket(&self, n_rows: usize) -> Batch {
        assert!(n_rows <= self.n_rows, "a bucket of these buffers");
        let n_sequences = n_rows.min(MAX_SEQUENCES);
        let layout = InputLayout::new(n_rows, n_sequences, self.max_pages);
        let section = |start: usize, bytes: usize| self.input.slice(start..start + bytes);
        Batch {
            n_rows,
            n_sequences,
            expert_ids: self.expert_ids.slice(0..self.experts.len() * n_rows * self.top_k * 4),
            ids: section(layout.ids, n_rows * 4),
            positions: section(layout.positions, n_rows * 4),
            sequences: section(layout.sequences, n_rows * 4),
            kv_slots: section(layout.kv_slots, n_rows * 4),
            block_table: section(layout.block_table, n_sequences * self.max_pages * 4),
            spans: section(layout.spans, n_sequences * size_of::<Span>()),
            logit_rows: section(layout.logit_rows, n_sequences * 4),
            inverse_temperatures: section(layout.inverse_temperatures, n_sequences * 4),
            edits: section(layout.edits, MAX_EDITS * size_of::<LogitEdit>()),
            ..self.clone()
        }
    }

    /// i32 `[n_rows, top_k]`: the experts that a MoE layer chose.
    pub fn expert_ids_of(&self, moe_layer: usize) -> View {
        let bytes = self.n_rows * self.top_k * 4;
        let start = if self.shares_ids { 0 } else { moe_layer * bytes };
        self.expert_ids.slice(start..start + bytes)
    }

    /// The same batch with one place for the ids of all layers.
    pub(super) fn with_shared_ids(self) -> Batch {
        let bytes = self.n_rows * self.top_k * 4;
        Batch { expert_ids: self.expert_ids.slice(0..bytes), shares_ids: true, ..self }
    }

    /// Where the host writes.
    pub(super) fn layout(&self) -> InputLayout {
        InputLayout::new(self.n_rows, self.n_sequences, self.max_pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_of_the_input_do_not_meet() {
        let l = InputLayout::new(1000, 16, 77);
        let starts = [
            l.ids,
            l.positions,
            l.sequences,
            l.kv_slots,
            l.logit_rows,
            l.inverse_temperatures,
            l.spans,
            l.block_table,
            l.edits,
            l.bytes,
        ];
        assert!(starts.is_sorted() && starts.iter().all(|s| s.is_multiple_of(SECTION_ALIGN)));
        assert!(
            l.positions >= 4000
                && l.bytes - l.edits >= MAX_EDITS * 16
                && l.edits - l.block_table >= 16 * 77 * 4
                && l.block_table - l.spans >= 16 * 16
        );
    }
}
