//! Launches of [`GatedDelta`]: row by row with the state in registers for short spans, and in f32 for all; in decode a head is split
//! over blocks where there are few; chunks on tensor cores for long spans; and one plain kernel for heads of other sizes than 128 by
//! 128.

use freetoken_backend::{GatedDelta, OpSpec, Precision};

use super::{MAX_DECODE_ROWS, Scratch, is_aligned, launch, params};
use crate::launch::{Arg, CardFacts, Launch};

/// Both sides of a state that the fast kernels take.
const FAST_DIM: u32 = 128;
/// Blocks that share a head where heads are fewer than half of the multiprocessors.
const SLICES: u32 = 4;
/// Rows of a chunk.
const CHUNK_ROWS: u32 = 32;
/// Bytes of the record of a chunk and head: four matrices of a chunk's rows, and one of its rows by themselves, in bf16.
const RECORD_BYTES: u32 = 2 * CHUNK_ROWS * (4 * FAST_DIM + CHUNK_ROWS);
/// Chunks of a pair of launches: enough to fill a large card, and few enough that their records stay in its L2.
const CHUNKS: u32 = 32;

pub(super) fn launches(op: &GatedDelta, precision: Precision, card: &CardFacts) -> (Vec<Launch>, usize) {
    let p = &op.p;
    let grid = [p.n_value_heads, p.n_sequences, 1];
    let vectors = [&op.qkv, &op.state].into_iter().all(is_aligned);
    if (p.key_dim, p.value_dim) != (FAST_DIM, FAST_DIM) || !vectors {
        let shared_bytes = 4 * (2 * p.key_dim + p.value_dim);
        return (vec![Launch { shared_bytes, ..launch("gated_delta_any", grid, 128, args(op)) }], 0);
    }
    let in_chunks = precision == Precision::Auto && p.n_rows > MAX_DECODE_ROWS;
    let few_heads = 2 * p.n_value_heads * p.n_sequences <= card.sms;
    if p.n_rows <= MAX_DECODE_ROWS && few_heads && card.sm_90 {
        let grid = [p.n_value_heads * SLICES, p.n_sequences, 1];
        return (vec![launch("gated_delta_slices", grid, 256, args(op))], 0);
    }
    let max_rows = if in_chunks { MAX_DECODE_ROWS } else { u32::MAX };
    let mut launches = vec![launch("gated_delta_rows", grid, 512, with(op, [Arg::U32(max_rows)]))];
    let mut scratch = Scratch::default();
    if in_chunks {
        // The last chunk of each span may be a short one.
        let n_chunks = p.n_rows / CHUNK_ROWS + p.n_sequences;
        let at_once = n_chunks.min(CHUNKS) as usize * p.n_value_heads as usize;
        let records = scratch.place(at_once * RECORD_BYTES as usize);
        let decays = scratch.place(at_once * size_of::<f32>());
        for first in (0..n_chunks).step_by(CHUNKS as usize) {
            let n = CHUNKS.min(n_chunks - first);
            let chunks = [records.clone(), decays.clone(), Arg::U32(first), Arg::U32(max_rows)];
            let states = [records.clone(), decays.clone(), Arg::U32(first), Arg::U32(n), Arg::U32(max_rows)];
            launches.push(launch("gated_delta_chunks", [p.n_value_heads, n, 1], 128, with(op, chunks)));
            // Two records, of which one comes while the other is read, and rows of results.
            let shared_bytes = 2 * RECORD_BYTES + 4 * CHUNK_ROWS * (FAST_DIM + 4);
            let states = launch("gated_delta_states", grid, 256, with(op, states));
            launches.push(Launch { shared_bytes, ..states });
        }
    }
    (launches, scratch.bytes)
}

/// What every kernel is given.
fn args(op: &GatedDelta) -> Vec<Arg> {
    vec![
        params(op.params()),
        Arg::View(op.out.clone()),
        Arg::View(op.state.clone()),
        Arg::View(op.qkv.clone()),
        Arg::View(op.z.clone()),
        Arg::View(op.ba.clone()),
        Arg::View(op.constants.view.clone()),
        Arg::View(op.spans.clone()),
    ]
}

fn with(op: &GatedDelta, more: impl IntoIterator<Item = Arg>) -> Vec<Arg> {
    let mut args = args(op);
    args.extend(more);
    args
}
