//! Launches of [`Attention`]: ranges of the context side by side for up to 16 rows, tiles of rows on tensor cores for more,
//! and one plain kernel for what remains.

use freetoken_backend::{Attention, Format, OpSpec, PAGE_TOKENS, Precision};

use super::{MAX_DECODE_ROWS, Scratch, format, is_aligned, launch, params};
use crate::launch::{Arg, CardFacts, Launch, N_COUNTERS, Unsupported};

/// Tokens of the shortest range that a block walks.
const RANGE_TOKENS: u32 = 32;
/// Most ranges of a row.
const MAX_RANGES: u32 = 128;
/// Blocks for each multiprocessor. Those that a short sequence leaves idle come last, and leave at once.
const BLOCKS_PER_SM: u32 = 2;
/// Most heads that the warps of a block share; with more there are two sets of warps.
const HEADS_OF_A_SET: u32 = 4;

pub(super) fn launches(
    op: &Attention,
    precision: Precision,
    card: &CardFacts,
) -> Result<(Vec<Launch>, usize), Unsupported> {
    if op.kv.format == Format::F16 {
        return Err(Unsupported("the cache is f32 or bf16".into()));
    }
    let p = &op.p;
    let vectors = [&op.out, &op.q, &op.kv.view].into_iter().all(is_aligned);
    let is_usual = vectors && matches!(p.head_dim, 32 | 64 | 128 | 256);
    if p.n_rows <= MAX_DECODE_ROWS && is_usual {
        return Ok(decode(op, card));
    }
    let mut args = args(op);
    if p.n_rows > MAX_DECODE_ROWS && precision == Precision::Auto && op.kv.format == Format::Bf16 && is_usual
    {
        // Rows of a block and tokens of a stage.
        let (kernel, rows, tokens) = match p.head_dim {
            32 => ("attention_prefill_d32", 128, 64),
            64 => ("attention_prefill_d64", 128, 64),
            128 => ("attention_prefill_d128", 128, 64),
            _ => ("attention_prefill_d256", 64, 32),
        };
        let grid = [p.n_heads, p.n_rows.div_ceil(rows), 1];
        // Keys and values of two stages, and queries.
        let shared_bytes = (2 * 2 * tokens + rows) * p.head_dim * 2;
        return Ok((vec![Launch { shared_bytes, ..launch(kernel, grid, 128, args) }], 0));
    }
    args.push(format(op.kv.format));
    let grid = [p.n_rows, p.n_heads.div_ceil(4), 1];
    Ok((vec![Launch { shared_bytes: 16 * p.head_dim, ..launch("attention_any", grid, 128, args) }], 0))
}

/// What every kernel is given.
fn args(op: &Attention) -> Vec<Arg> {
    let (gates, gate_width) = match &op.gate {
        Some(gate) => (Arg::View(gate.rows.clone()), gate.width),
        None => (Arg::Null, 0),
    };
    vec![
        params(op.params()),
        Arg::View(op.out.clone()),
        Arg::View(op.q.clone()),
        Arg::View(op.kv.view.clone()),
        Arg::View(op.block_table.clone()),
        Arg::View(op.sequences.clone()),
        Arg::View(op.positions.clone()),
        gates,
        Arg::U32(gate_width),
    ]
}

fn decode(op: &Attention, card: &CardFacts) -> (Vec<Launch>, usize) {
    let p = &op.p;
    let group = p.n_heads / p.n_kv_heads;
    let bf16 = op.kv.format == Format::Bf16;
    let (kernel, heads) = match (bf16, p.head_dim, group) {
        (false, 32, _) => ("attention_decode_f32_d32_h4", 4),
        (false, 64, _) => ("attention_decode_f32_d64_h4", 4),
        (false, 128, _) => ("attention_decode_f32_d128_h4", 4),
        (false, _, _) => ("attention_decode_f32_d256_h4", 4),
        (true, 32, _) => ("attention_decode_bf16_d32_h4", 4),
        (true, 64, 1) => ("attention_decode_bf16_d64_h1", 1),
        (true, 64, 2..=4) => ("attention_decode_bf16_d64_h4", 4),
        (true, 64, _) => ("attention_decode_bf16_d64_h8", 8),
        (true, 128, 1) => ("attention_decode_bf16_d128_h1", 1),
        (true, 128, 2..=4) => ("attention_decode_bf16_d128_h4", 4),
        (true, 128, _) => ("attention_decode_bf16_d128_h8", 8),
        (true, _, 1..=4) => ("attention_decode_bf16_d256_h4", 4),
        (true, _, _) => ("attention_decode_bf16_d256_h8", 8),
    };
    let blocks_per_row = p.n_kv_heads * group.div_ceil(heads);
    let n_blocks = p.n_rows * blocks_per_row;
    // Blocks for all multiprocessors, but no range that could never be used.
    let most = p.max_pages.div_ceil(RANGE_TOKENS / PAGE_TOKENS as u32);
    let ranges = (BLOCKS_PER_SM * card.sms).div_ceil(n_blocks).min(most).clamp(1, MAX_RANGES);
    let ranges = if n_blocks as usize > N_COUNTERS { 1 } else { ranges };
    let mut scratch = Scratch::default();
    let records = p.n_rows as usize * p.n_heads as usize * ranges as usize;
    let mut args = args(op);
    args.extend([scratch.place(4 * records * (p.head_dim as usize + 4)), Arg::Counters]);
    let threads = 128 * heads.div_ceil(HEADS_OF_A_SET);
    (vec![launch(kernel, [blocks_per_row, ranges, p.n_rows], threads, args).early()], scratch.bytes)
}
