//! What bounds the buffers of a step: rows, pages, states, and the bytes that all of them take on a device. Pure.

use std::iter::once;

use freetoken_backend::{Caps, Format, KvCache, MAX_TOP_LOGITS, PAGE_TOKENS, Precision};

use super::EngineOptions;
use crate::models::Sizes;

/// Rows whose logits are computed at a time, and sequences of a batch.
pub(super) const MAX_SEQUENCES: usize = 16;

/// Share of the memory that there is for it that the experts' rows of a prefill step may take.
const PARTS_SHARE: u64 = 64;
/// What they may take where the device does not tell its memory.
const DEFAULT_PARTS_BYTES: u64 = 64 << 20;
/// The same of everything that a row of a prefill step takes, where experts are streamed: with more rows a step, an expert
/// crosses the link less often.
const STREAMED_SHARE: u64 = 16;
/// Rows of such a step where the device does not tell its memory, and most of them.
const STREAMED_ROWS: [usize; 2] = [1024, 16_384];

/// Activations that take more memory with more rows.
const N_ROW_ACTIVATIONS: usize = 12;
/// All of them.
pub(super) const N_ACTIVATIONS: usize = N_ROW_ACTIVATIONS + 4;

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

impl Limits {
    /// States on the device: of sequences that run, kept ones, and the one before a chunk that may be abandoned.
    pub(super) fn n_all_states(&self) -> usize {
        self.n_states + self.n_state_slots + usize::from(self.decodes_apart)
    }

    /// So many rows, and no cache.
    pub(super) fn of_rows(max_rows: usize) -> Self {
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
            let row_bytes = row.activations(sizes)[..N_ROW_ACTIVATIONS].iter().sum::<usize>() as u64 * 4;
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

    /// f32 values that each activation takes, in the order of [`super::Batch`]'s fields: those with `max_rows` rows, then the rest.
    pub(super) fn activations(&self, s: &Sizes) -> [usize; N_ACTIVATIONS] {
        let heads = s.n_heads * s.head_dim;
        let (channels, values, ba) =
            s.recurrent.map_or((0, 0, 0), |r| (r.channels(), r.value_width(), 2 * r.n_value_heads));
        let (top_k, n_moe_layers, is_moe) = s.moe.map_or((0, 0, 0), |moe| (moe.top_k, moe.n_layers, 1));
        let n = self.max_rows;
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
            self.tile_rows * top_k * s.hidden,
            MAX_SEQUENCES * s.vocab,
            MAX_SEQUENCES * MAX_TOP_LOGITS,
            MAX_SEQUENCES * MAX_TOP_LOGITS,
            MAX_SEQUENCES,
        ]
    }

    /// Bytes that a batch, its caches and states included, will take on a device; at most, where a model rotates part of a head.
    pub(super) fn bytes(&self, s: &Sizes, precision: Precision) -> u64 {
        let page = KvCache::page_bytes(kv_format(precision), s.n_kv_heads, s.head_dim) as u64;
        let kv = page * self.n_pages as u64 * s.n_kv_layers() as u64;
        let states = s.recurrent.map_or(0, |recurrent| self.n_all_states() * recurrent.state_bytes()) as u64;
        let apart = self.decodes_apart.then(|| Limits::of_rows(MAX_SEQUENCES));
        let activations: usize = once(*self).chain(apart).flat_map(|limits| limits.activations(s)).sum();
        kv + states + 4 * (activations + self.context * s.head_dim) as u64
    }
}

/// Format of the KV cache.
pub(super) fn kv_format(precision: Precision) -> Format {
    match precision {
        Precision::Auto => Format::Bf16,
        Precision::F32 => Format::F32,
    }
}
