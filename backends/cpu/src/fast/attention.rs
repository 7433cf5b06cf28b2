//! Attention with a running softmax, page by page; the query heads of a key-value head share one pass over its cache. Where
//! there are fewer (row, head) pairs than workers the cache is split, and the parts are merged.

use freetoken_backend::{Attention, Format, PAGE_TOKENS};
use half::bf16;

use super::{Fast, Scratch};
use crate::{
    isa::{self, KvRow},
    memory::{slice, slice_mut},
    parallel::{Rows, for_each_row, for_each_tile},
    reference::sigmoid,
};

/// Query heads that share a pass.
const MAX_GROUP: usize = 16;
/// Shortest part of a cache that is worth a task.
const MIN_SPLIT: usize = 256;

/// Values a head's part takes behind its `head_dim` sums: running maximum and sum of exponentials.
const TAIL: usize = 2;

fn n_splits(items: usize, longest: usize, n_workers: usize) -> usize {
    (2 * n_workers).div_ceil(items).min(longest.div_ceil(MIN_SPLIT)).max(1)
}

/// f32 values of scratch that an op takes at most.
pub(super) fn scratch_values(op: &Attention, n_workers: usize) -> usize {
    let items = (op.p.n_rows * op.p.n_kv_heads) as usize;
    let splits = n_splits(items, op.p.max_pages as usize * PAGE_TOKENS, n_workers);
    (op.p.n_rows * op.p.n_heads) as usize * splits * (op.p.head_dim as usize + TAIL)
}

pub(super) fn attention(fast: &Fast, op: &Attention, scratch: &mut Scratch) {
    let p = &op.p;
    let (n, heads, kv_heads, d) =
        (p.n_rows as usize, p.n_heads as usize, p.n_kv_heads as usize, p.head_dim as usize);
    let (sequences, positions) = (slice::<i32>(&op.sequences), slice::<i32>(&op.positions));
    let length = |row: usize| if sequences[row] < 0 { 0 } else { positions[row] as usize + 1 };
    let longest = (0..n).map(length).max().unwrap_or(0);
    let splits = n_splits(n * kv_heads, longest, fast.pool.n_workers());

    // partial[row, kv_head, split] = the group's heads, each d sums and the tail
    let group = heads / kv_heads;
    let width = group * (d + TAIL);
    let n_parts = n * kv_heads * splits;
    let partial = &mut scratch.partial[..n_parts * width];
    for_each_tile(&fast.pool, partial, width, Rows::Each(n_parts), width, |part, mut tile| {
        let (item, split) = (part / splits, part % splits);
        let (row, kv_head) = (item / kv_heads, item % kv_heads);
        let pages_a_split = length(row).div_ceil(PAGE_TOKENS).div_ceil(splits);
        let start = (split * pages_a_split * PAGE_TOKENS).min(length(row));
        let end = ((split + 1) * pages_a_split * PAGE_TOKENS).min(length(row));
        for (i, part) in tile.row(part).chunks_mut(MAX_GROUP * (d + TAIL)).enumerate() {
            let first_head = kv_head * group + i * MAX_GROUP;
            attend(fast, op, row, kv_head, first_head, start..end, part);
        }
    });

    let partial = &scratch.partial[..];
    let out = &mut slice_mut::<f32>(&op.out)[..n * heads * d];
    for_each_row(&fast.pool, out, heads * d, |row, out| {
        for (head, out) in out.chunks_exact_mut(d).enumerate() {
            let part = |split: usize| {
                let start =
                    ((row * kv_heads + head / group) * splits + split) * width + head % group * (d + TAIL);
                partial[start..start + d + TAIL].split_at(d)
            };
            let max = (0..splits).map(|s| part(s).1[0]).fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            out.fill(0.0);
            for (sums, tail) in (0..splits).map(part).filter(|(_, tail)| tail[1] > 0.0) {
                let scale = (tail[0] - max).exp();
                sum += scale * tail[1];
                out.iter_mut().zip(sums).for_each(|(out, v)| *out += scale * v);
            }
            if sum > 0.0 {
                out.iter_mut().for_each(|out| *out /= sum);
            }
            if let Some(gate) = &op.gate {
                let gates = &slice::<f32>(&gate.rows)[row * gate.width as usize + (2 * head + 1) * d..];
                out.iter_mut().zip(gates).for_each(|(out, gate)| *out *= sigmoid(*gate));
            }
        }
    });
}

/// Some heads of one row over the positions `span`: unnormalised sums, maximum, sum of exponentials.
fn attend(
    fast: &Fast,
    op: &Attention,
    row: usize,
    kv_head: usize,
    first_head: usize,
    span: std::ops::Range<usize>,
    part: &mut [f32],
) {
    let p = &op.p;
    let (kv_heads, d) = (p.n_kv_heads as usize, p.head_dim as usize);
    let q = &slice::<f32>(&op.q)[(row * p.n_heads as usize + first_head) * d..];
    for part in part.chunks_exact_mut(d + TAIL) {
        let (sums, tail) = part.split_at_mut(d);
        sums.fill(0.0);
        tail.copy_from_slice(&[f32::NEG_INFINITY, 0.0]);
    }
    if span.is_empty() {
        return;
    }
    let sequence = slice::<i32>(&op.sequences)[row] as usize;
    let pages = &slice::<i32>(&op.block_table)[sequence * p.max_pages as usize..][..p.max_pages as usize];
    let mut scores = [0.0_f32; PAGE_TOKENS];
    for first in span.clone().step_by(PAGE_TOKENS) {
        let in_page = PAGE_TOKENS.min(span.end - first);
        let page = pages[first / PAGE_TOKENS] as usize;
        let keys = ((page * 2) * kv_heads + kv_head) * PAGE_TOKENS * d;
        let values = ((page * 2 + 1) * kv_heads + kv_head) * PAGE_TOKENS * d;
        for (part, q) in part.chunks_exact_mut(d + TAIL).zip(q.chunks_exact(d)) {
            let (sums, tail) = part.split_at_mut(d);
            let mut max = tail[0];
            for (t, score) in scores[..in_page].iter_mut().enumerate() {
                *score = p.scale * isa::dot_kv(fast.isa, q, kv_row(op, keys + t * d, d));
                max = max.max(*score);
            }
            if max > tail[0] {
                let rescale = (tail[0] - max).exp();
                sums.iter_mut().for_each(|s| *s *= rescale);
                tail[1] *= rescale;
                tail[0] = max;
            }
            for (t, score) in scores[..in_page].iter().enumerate() {
                let weight = (score - max).exp();
                tail[1] += weight;
                isa::axpy_kv(fast.isa, weight, kv_row(op, values + t * d, d), sums);
            }
        }
    }
}

fn kv_row(op: &Attention, start: usize, d: usize) -> KvRow<'_> {
    match op.kv.format {
        Format::F32 => KvRow::F32(&slice::<f32>(&op.kv.view)[start..start + d]),
        Format::Bf16 => KvRow::Bf16(&slice::<bf16>(&op.kv.view)[start..start + d]),
        Format::F16 | Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => unreachable!("refused by `supports`"),
    }
}
