//! Top-k over the vocabulary: sums of exponentials in parallel chunks, candidates in one pass against a rising threshold.

use freetoken_backend::{MAX_TOP_LOGITS, TopLogits};

use super::{Fast, Scratch};
use crate::{
    memory::{slice, slice_mut},
    parallel::{Rows, for_each_tile},
    reference::order,
};

/// Logits of one task.
const CHUNK: usize = 4096;
/// Candidates kept before they are cut down to k.
pub(super) const MAX_KEYS: usize = 4 * MAX_TOP_LOGITS;

/// f32 values of scratch that an op takes: a maximum and a sum a chunk.
pub(super) fn scratch_values(op: &TopLogits) -> usize {
    op.p.n_rows as usize * (op.p.vocab as usize).div_ceil(CHUNK) * 2
}

pub(super) fn top_logits(fast: &Fast, op: &TopLogits, scratch: &mut Scratch) {
    let (n, vocab, k) = (op.p.n_rows as usize, op.p.vocab as usize, op.p.k as usize);
    let logits = slice::<f32>(&op.logits);
    let scales = slice::<f32>(&op.inverse_temperatures);
    let width = 2 * vocab.div_ceil(CHUNK);
    let partial = &mut scratch.partial[..n * width];
    for_each_tile(&fast.pool, partial, width, Rows::Each(n), 2, |row, mut tile| {
        let chunk = tile.cols.start / 2;
        let logits = &logits[row * vocab..][chunk * CHUNK..vocab.min((chunk + 1) * CHUNK)];
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = logits.iter().map(|&l| ((l - max) * scales[row]).exp()).sum();
        tile.row(row).copy_from_slice(&[max, sum]);
    });
    for row in 0..n {
        let chunks = scratch.partial[row * width..][..width].chunks_exact(2);
        let max = chunks.clone().map(|c| c[0]).fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = chunks.map(|c| c[1] * ((c[0] - max) * scales[row]).exp()).sum();
        slice_mut::<f32>(&op.log_sum_exp)[row] = max * scales[row] + sum.ln();

        let logits = &logits[row * vocab..][..vocab];
        select(logits, k, &mut scratch.keys);
        for (i, key) in scratch.keys.iter().enumerate() {
            let id = *key as u32;
            slice_mut::<i32>(&op.ids)[row * k + i] = id as i32;
            slice_mut::<f32>(&op.values)[row * k + i] = logits[id as usize];
        }
    }
}

/// The keys of the k largest logits, in order.
fn select(logits: &[f32], k: usize, keys: &mut Vec<u64>) {
    keys.clear();
    let mut worst = u64::MAX;
    for (id, &logit) in logits.iter().enumerate() {
        let key = order(logit, id);
        if key < worst {
            keys.push(key);
            if keys.len() == MAX_KEYS {
                keys.select_nth_unstable(k - 1);
                keys.truncate(k);
                worst = keys[k - 1];
            }
        }
    }
    keys.sort_unstable();
    keys.truncate(k);
}
