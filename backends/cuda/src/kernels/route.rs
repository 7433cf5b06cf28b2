//! Launches of [`Route`]: one kernel for up to 16 rows; norm, product and choice for more.

use freetoken_backend::{Format, OpSpec, Route};

use super::{MAX_DECODE_ROWS, Scratch, format, is_aligned, launch, optional, params};
use crate::launch::{Arg, Launch, Unsupported};

/// Experts that one warp can choose from.
const MAX_EXPERTS: u32 = 512;
/// Warps of a block.
const WARPS: u32 = 4;
/// Rows and experts of a tile of logits for many rows.
const TILE: [u32; 2] = [64, 128];
/// Blocks that fill a card, over which the columns are cut, and into how many parts at most.
const ENOUGH_BLOCKS: u32 = 256;
const MAX_PARTS: u32 = 16;

pub(super) fn launches(op: &Route) -> Result<(Vec<Launch>, usize), Unsupported> {
    let p = &op.p;
    if p.n_experts > MAX_EXPERTS {
        return Err(Unsupported(format!("{} experts; at most {MAX_EXPERTS}", p.n_experts)));
    }
    let mut scratch = Scratch::default();
    let logits_bytes = 4 * p.n_rows as usize * p.n_experts as usize;
    let view = |view: &freetoken_backend::View| Arg::View(view.clone());
    let shared = op.shared_gate.as_ref();
    let gates = shared.map_or(Arg::Null, |gate| view(&gate.out));
    let (shared_weight, shared_format) = optional(shared.map(|gate| &gate.weight));
    let vectors = p.hidden.is_multiple_of(8)
        && op.norm.format != Format::F16
        && [&op.x, &op.router.view, &op.norm.view].into_iter().all(is_aligned)
        && shared.is_none_or(|gate| gate.weight.format == op.router.format && is_aligned(&gate.weight.view));
    let decode = match (op.router.format, p.n_rows) {
        (Format::F32, 0..=1) => Some("route_f32_n1"),
        (Format::F32, 2..=MAX_DECODE_ROWS) => Some("route_f32_n16"),
        (Format::Bf16, 0..=1) => Some("route_bf16_n1"),
        (Format::Bf16, 2..=MAX_DECODE_ROWS) => Some("route_bf16_n16"),
        _ => None,
    };
    if let Some(kernel) = decode.filter(|_| vectors) {
        let args = vec![
            params(op.params()),
            view(&op.ids),
            view(&op.weights),
            view(&op.normed),
            view(&op.x),
            view(&op.norm.view),
            view(&op.router.view),
            view(&op.sequences),
            gates,
            shared_weight,
            scratch.place(logits_bytes),
            Arg::Counters,
            format(op.norm.format),
        ];
        let grid = [(p.n_experts + shared.is_some() as u32).div_ceil(WARPS), 1, 1];
        return Ok((vec![launch(kernel, grid, 32 * WARPS, args).early()], scratch.bytes));
    }
    let tiles = [p.n_rows.div_ceil(TILE[0]), p.n_experts.div_ceil(TILE[1])];
    let n_parts = (ENOUGH_BLOCKS / (tiles[0] * tiles[1])).clamp(1, MAX_PARTS);
    let sums = scratch.place(n_parts as usize * logits_bytes);
    let norm = vec![
        view(&op.normed),
        view(&op.x),
        Arg::Null,
        view(&op.norm.view),
        format(op.norm.format),
        Arg::U32(p.hidden),
        Arg::U32(p.eps.to_bits()),
    ];
    let product = vec![
        params(op.params()),
        sums.clone(),
        view(&op.normed),
        view(&op.router.view),
        format(op.router.format),
    ];
    let choose = vec![
        params(op.params()),
        view(&op.ids),
        view(&op.weights),
        sums,
        Arg::U32(n_parts),
        view(&op.sequences),
        gates,
        shared_weight,
        shared_format,
        view(&op.normed),
    ];
    let launches = vec![
        launch("prepare_f32", [p.n_rows, 1, 1], 256, norm),
        launch("route_tile", [tiles[0], tiles[1], n_parts], 256, product),
        launch("route_choose", [p.n_rows.div_ceil(WARPS), 1, 1], 32 * WARPS, choose),
    ];
    Ok((launches, scratch.bytes))
}
