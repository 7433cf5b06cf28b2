//! Ops of one small kernel, and what benches compare with: a plain read, nothing, and products.

use freetoken_backend::{Combine, EditLogits, Embed, Format, OpSpec, RopeCache, ShortConv, View};

use super::{MAX_DECODE_ROWS, format, launch, optional, params};
use crate::launch::{Arg, CardFacts, Launch, Unsupported};

pub(super) fn embed(op: &Embed) -> Launch {
    let args = vec![
        params(op.params()),
        Arg::View(op.out.clone()),
        Arg::View(op.ids.clone()),
        Arg::View(op.table.view.clone()),
        format(op.table.format),
    ];
    launch("embed", [op.p.hidden.div_ceil(1024), op.p.n_rows, 1], 256, args).early()
}

pub(super) fn rope_cache(op: &RopeCache) -> Result<Launch, Unsupported> {
    if op.kv.format == Format::F16 {
        return Err(Unsupported("the cache is f32 or bf16".into()));
    }
    let p = &op.p;
    let (q_norm, q_norm_format) = optional(op.q_norm.as_ref());
    let (k_norm, k_norm_format) = optional(op.k_norm.as_ref());
    let args = vec![
        params(op.params()),
        Arg::View(op.q.clone()),
        Arg::View(op.kv.view.clone()),
        Arg::View(op.qkv.clone()),
        q_norm,
        k_norm,
        Arg::View(op.rotary.clone()),
        Arg::View(op.positions.clone()),
        Arg::View(op.kv_slots.clone()),
        format(op.kv.format),
        q_norm_format,
        k_norm_format,
        Arg::U32(op.kv.n_pages as u32),
        Arg::U32(op.q_stride()),
    ];
    Ok(launch("rope_cache", [(p.n_heads + 2 * p.n_kv_heads).div_ceil(4), p.n_rows, 1], 128, args).early())
}

/// Rows of a tile of [`ShortConv`]: one where all may be of different sequences.
const CONV_ROWS: u32 = 16;

pub(super) fn short_conv(op: &ShortConv) -> Launch {
    let p = &op.p;
    let tile = if p.n_rows <= MAX_DECODE_ROWS { 1 } else { CONV_ROWS };
    let args = vec![
        params(op.params()),
        Arg::View(op.out.clone()),
        Arg::View(op.state.clone()),
        Arg::View(op.x.clone()),
        Arg::View(op.weight.view.clone()),
        Arg::View(op.sequences.clone()),
        Arg::View(op.spans.clone()),
        format(op.weight.format),
        Arg::U32(tile),
    ];
    launch("short_conv", [p.channels.div_ceil(128), p.n_rows.div_ceil(tile), 1], 128, args).early()
}

pub(super) fn combine(op: &Combine) -> Launch {
    let (rows, gates) = match &op.shared {
        Some(shared) => (Arg::View(shared.rows.clone()), Arg::View(shared.gates.clone())),
        None => (Arg::Null, Arg::Null),
    };
    let args = vec![
        params(op.params()),
        Arg::View(op.x.clone()),
        Arg::View(op.parts.clone()),
        Arg::View(op.ids.clone()),
        rows,
        gates,
    ];
    launch("combine", [op.p.hidden.div_ceil(128), op.p.n_rows, 1], 128, args).early()
}

pub(super) fn edit_logits(op: &EditLogits) -> Launch {
    let args = vec![params(op.params()), Arg::View(op.logits.clone()), Arg::View(op.edits.clone())];
    launch("edit_logits", [1, 1, 1], 1024, args).early()
}

/// Reads a view once. Its word of scratch is written only if the view's words cancel out to this very number.
pub(crate) fn read(view: &View, card: &CardFacts) -> Launch {
    const NEVER: u32 = 0x9e37_79b9;
    let n_vectors = (view.bytes() / 16) as u32;
    let args = vec![Arg::Scratch(0), Arg::View(view.clone()), Arg::U32(n_vectors), Arg::U32(NEVER)];
    launch("read", [4 * card.sms, 1, 1], 512, args)
}

/// Does nothing.
pub(crate) fn empty() -> Launch {
    launch("empty", [1, 1, 1], 32, vec![]).early()
}

/// Multiplies out of registers, and how many floating-point operations that is.
pub(crate) fn products(card: &CardFacts) -> (Launch, f64) {
    const TURNS: u32 = 4096;
    /// No sum of a product of its kind.
    const NEVER: f32 = -1.0;
    let n_blocks = 2 * card.sms;
    let args = vec![Arg::Scratch(0), Arg::U32(TURNS), Arg::U32(NEVER.to_bits())];
    // Eight warps, eight tiles of 16 x 8 x 16 in a turn.
    let flops = f64::from(n_blocks) * 8.0 * 8.0 * f64::from(TURNS) * 2.0 * (16 * 8 * 16) as f64;
    (launch("mma_rate", [n_blocks, 1, 1], 256, args), flops)
}
