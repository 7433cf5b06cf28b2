//! See [`freetoken_backend::TopLogits`].

use freetoken_backend::TopLogits;

use crate::memory::{slice, slice_mut};

pub(super) fn top_logits(op: &TopLogits) {
    let (vocab, k) = (op.p.vocab as usize, op.p.k as usize);
    let (ids, values) = (slice_mut::<i32>(&op.ids), slice_mut::<f32>(&op.values));
    for n in 0..op.p.n_rows as usize {
        let row = &slice::<f32>(&op.logits)[n * vocab..][..vocab];
        let mut keys: Vec<u64> = row.iter().enumerate().map(|(id, &logit)| order(logit, id)).collect();
        keys.sort_unstable();
        for (i, key) in keys[..k].iter().enumerate() {
            let id = *key as u32;
            ids[n * k + i] = id as i32;
            values[n * k + i] = row[id as usize];
        }
        let scale = slice::<f32>(&op.inverse_temperatures)[n] as f64;
        let max = row.iter().map(|&l| l as f64 * scale).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|&l| (l as f64 * scale - max).exp()).sum();
        slice_mut::<f32>(&op.log_sum_exp)[n] = (max + sum.ln()) as f32;
    }
}

/// A key whose ascending order is descending logit, then ascending id.
pub(crate) fn order(logit: f32, id: usize) -> u64 {
    let bits = logit.to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    (!ascending as u64) << 32 | id as u64
}
