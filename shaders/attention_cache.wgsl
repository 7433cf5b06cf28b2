// What the kernels that walk the cache share: their parameters, and where a token lies.
//
// cache: [page][k|v][kv_head][16][head_dim], f32 or bf16 packed in pairs.

override KV_BF16: bool = false;
override HEADS: u32 = 8u;

const PAGE_TOKENS: u32 = 16u;
const LOWEST: f32 = -3.4e38;

struct Params {
    n_rows: u32,
    max_pages: u32,
    n_heads: u32,
    n_kv_heads: u32,
    scale: f32,
    // Blocks of HEADS heads that a key-value head has.
    n_blocks: u32,
    out_at: u32,
    q_at: u32,
    // Of vec4s.
    kv_at: u32,
    block_table_at: u32,
    sequences_at: u32,
    positions_at: u32,
    gate_width: u32,
    gate_at: u32,
}
var<immediate> p: Params;

// Row of the cache that holds the key of a token; values lie n_kv_heads * PAGE_TOKENS rows behind.
fn cache_row(sequence: u32, token: u32, kv_head: u32) -> u32 {
    let page = u32(block_table[p.block_table_at + sequence * p.max_pages + token / PAGE_TOKENS]);
    return (page * 2u * p.n_kv_heads + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS;
}
