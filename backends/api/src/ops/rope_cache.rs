//! Splits a row of q, k and v, norms q and k per head, rotates them, and writes k and v to the paged cache.
//!
//! Rotation is NeoX style: dimension `i` of the first `rotary_dim` pairs with `i + rotary_dim / 2`;
//! `(a, b) -> (a cos - b sin, b cos + a sin)`. Dimensions from `rotary_dim` on pass unchanged. With `gated`, each head of q is
//! followed by as many gates, which are left for [`super::Attention`].

use bytemuck::{Pod, Zeroable};

use super::{Binding, OpSpec, read, read_write, weight, words, write};
use crate::{Format, View, Weight};

/// Tokens of one page of the KV cache.
pub const PAGE_TOKENS: usize = 16;

/// The keys and values of one layer: `[page][k|v][kv_head][PAGE_TOKENS][head_dim]`. Page 0 takes what padded rows write.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// All pages.
    pub view: View,
    /// F32 or BF16.
    pub format: Format,
    /// Number of pages.
    pub n_pages: usize,
}

impl KvCache {
    /// Bytes of one page of a layer.
    pub fn page_bytes(format: Format, n_kv_heads: usize, head_dim: usize) -> usize {
        2 * n_kv_heads * PAGE_TOKENS * format.row_bytes(head_dim)
    }
}

/// Prepares attention for a row.
#[derive(Debug, Clone)]
pub struct RopeCache {
    /// f32 `[n_rows, n_heads, head_dim]`
    pub q: View,
    /// Where k and v go.
    pub kv: KvCache,
    /// f32 `[n_rows, qkv_width]`: q, then k, then v; see [`RopeCache::qkv_width`].
    pub qkv: View,
    /// Whether `qkv` holds `[query | gate]` for each query head, `head_dim` each.
    pub gated: bool,
    /// RMS norm over each head of q, `[1, head_dim]`.
    pub q_norm: Option<Weight>,
    /// RMS norm over each head of k, `[1, head_dim]`.
    pub k_norm: Option<Weight>,
    /// f32 `[max_positions, rotary_dim / 2, 2]`: cosine and sine.
    pub rotary: View,
    /// i32 `[n_rows]`, each below `max_positions`.
    pub positions: View,
    /// i32 `[n_rows]`: place in the cache, `page * PAGE_TOKENS + offset`. No two rows that are not padding share one.
    pub kv_slots: View,
    /// Sizes.
    pub p: RopeCacheParams,
}

/// Parameters of [`RopeCache`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct RopeCacheParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Query heads.
    pub n_heads: u32,
    /// Key-value heads.
    pub n_kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// Rotated width, even.
    pub rotary_dim: u32,
    /// Rows of the rotary table.
    pub max_positions: u32,
    /// Of the norms.
    pub eps: f32,
}

impl RopeCache {
    /// Columns from one head of q to the next.
    pub fn q_stride(&self) -> u32 {
        if self.gated { 2 * self.p.head_dim } else { self.p.head_dim }
    }

    /// Columns of `qkv`: `n_heads` of q's stride, then k and v, `n_kv_heads * head_dim` each.
    pub fn qkv_width(&self) -> u32 {
        self.p.n_heads * self.q_stride() + 2 * self.p.n_kv_heads * self.p.head_dim
    }
}

impl OpSpec for RopeCache {
    fn name(&self) -> &'static str {
        "rope_cache"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let p = &self.p;
        let (n, d) = (p.n_rows as usize, p.head_dim as usize);
        let kv_bytes = self.kv.n_pages * KvCache::page_bytes(self.kv.format, p.n_kv_heads as usize, d);
        let mut bindings = vec![
            write("q", &self.q, words(n * p.n_heads as usize * d)),
            read_write("kv", &self.kv.view, kv_bytes),
            read("qkv", &self.qkv, words(n * self.qkv_width() as usize)),
        ];
        bindings.extend(self.q_norm.as_ref().map(|w| weight("q_norm", w)));
        bindings.extend(self.k_norm.as_ref().map(|w| weight("k_norm", w)));
        bindings.push(read("rotary", &self.rotary, words((p.max_positions * p.rotary_dim) as usize)));
        bindings.push(read("positions", &self.positions, words(n)));
        bindings.push(read("kv_slots", &self.kv_slots, words(n)));
        bindings
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    fn bytes(&self) -> u64 {
        let (n, d) = (self.p.n_rows as usize, self.p.head_dim as usize);
        let (q, kv) = (self.p.n_heads as usize * d, self.p.n_kv_heads as usize * d);
        (n * (words(2 * q + 2 * kv) + self.kv.format.row_bytes(2 * kv))) as u64
    }

    fn flops(&self) -> u64 {
        let heads = (self.p.n_heads + self.p.n_kv_heads) as u64;
        7 * self.p.n_rows as u64 * heads * self.p.head_dim as u64
    }

    fn check_shape(&self) {
        let d = self.p.head_dim;
        assert!(self.p.rotary_dim.is_multiple_of(2) && self.p.rotary_dim <= d, "rope_cache: rotary_dim");
        for norm in [&self.q_norm, &self.k_norm].into_iter().flatten() {
            assert_eq!(norm.cols, d as usize, "rope_cache: norm");
            norm.check_plain("rope_cache: norm");
        }
    }
}
