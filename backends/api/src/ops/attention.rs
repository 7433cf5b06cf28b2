//! Causal attention over a paged cache: `out[n, h] = softmax(scale * q[n, h] . K) . V` over positions `0 ..= positions[n]` of
//! the row's own sequence. Query head `h` reads key-value head `h / (n_heads / n_kv_heads)`. With a gate the result is multiplied
//! with its sigmoid.

use bytemuck::{Pod, Zeroable};

use super::{Binding, KvCache, OpSpec, read, words, write};
use crate::View;

/// Attends. Decode rows come from many sequences, prefill rows mostly from one; the op does not care.
#[derive(Debug, Clone)]
pub struct Attention {
    /// f32 `[n_rows, n_heads * head_dim]`; padded rows become 0.
    pub out: View,
    /// f32 `[n_rows, n_heads, head_dim]`
    pub q: View,
    /// Keys and values, this step's included.
    pub kv: KvCache,
    /// i32 `[n_sequences, max_pages]`: the page that holds tokens `16 i ..` of a sequence.
    pub block_table: View,
    /// i32 `[n_rows]`: row of the block table, or -1 for padding.
    pub sequences: View,
    /// i32 `[n_rows]`
    pub positions: View,
    /// What the result is multiplied with, where it is.
    pub gate: Option<AttentionGate>,
    /// Sizes.
    pub p: AttentionParams,
}

/// Gates where the `qkv` of a gated [`super::RopeCache`] has them.
#[derive(Debug, Clone)]
pub struct AttentionGate {
    /// f32 `[n_rows, width]`: the gate of element i of head h is in column `(2 * h + 1) * head_dim + i`.
    pub rows: View,
    /// Columns.
    pub width: u32,
}

/// Parameters of [`Attention`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct AttentionParams {
    /// Rows of the batch.
    pub n_rows: u32,
    /// Rows of the block table.
    pub n_sequences: u32,
    /// Columns of the block table.
    pub max_pages: u32,
    /// Query heads.
    pub n_heads: u32,
    /// Key-value heads; divides `n_heads`.
    pub n_kv_heads: u32,
    /// Width of a head.
    pub head_dim: u32,
    /// What scores are multiplied with.
    pub scale: f32,
}

impl OpSpec for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn bindings(&self) -> Vec<Binding<'_>> {
        let p = &self.p;
        let (n, q) = (p.n_rows as usize, (p.n_heads * p.head_dim) as usize);
        let page = KvCache::page_bytes(self.kv.format, p.n_kv_heads as usize, p.head_dim as usize);
        let mut bindings = vec![
            write("out", &self.out, words(n * q)),
            read("q", &self.q, words(n * q)),
            read("kv", &self.kv.view, self.kv.n_pages * page),
            read("block_table", &self.block_table, words((p.n_sequences * p.max_pages) as usize)),
            read("sequences", &self.sequences, words(n)),
            read("positions", &self.positions, words(n)),
        ];
        bindings
            .extend(self.gate.as_ref().map(|gate| read("gate", &gate.rows, words(n * gate.width as usize))));
        bindings
    }

    fn params(&self) -> &[u8] {
        bytemuck::bytes_of(&self.p)
    }

    /// Without the cache: its length is data.
    fn bytes(&self) -> u64 {
        words((2 * self.p.n_rows * self.p.n_heads * self.p.head_dim) as usize) as u64
    }

    /// Without the cache: its length is data.
    fn flops(&self) -> u64 {
        0
    }

    fn check_shape(&self) {
        assert!(
            self.p.n_kv_heads > 0 && self.p.n_heads.is_multiple_of(self.p.n_kv_heads),
            "attention: heads"
        );
        let gates = 2 * self.p.n_heads * self.p.head_dim;
        assert!(self.gate.as_ref().is_none_or(|gate| gate.width >= gates), "attention: gate");
    }
}
