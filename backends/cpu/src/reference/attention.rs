//! See [`freetoken_backend::Attention`].

use freetoken_backend::{Attention, PAGE_TOKENS, Weight};

use super::{dot, row, sigmoid};
use crate::memory::{slice, slice_mut};

pub(super) fn attention(op: &Attention) {
    let p = &op.p;
    let (heads, kv_heads, d) = (p.n_heads as usize, p.n_kv_heads as usize, p.head_dim as usize);
    let (q, out) = (slice::<f32>(&op.q), slice_mut::<f32>(&op.out));
    let kv_rows = op.kv.n_pages * 2 * kv_heads * PAGE_TOKENS;
    let kv = Weight::plain(op.kv.view.clone(), op.kv.format, kv_rows, d);
    for n in 0..p.n_rows as usize {
        let out = &mut out[n * heads * d..][..heads * d];
        out.fill(0.0);
        let sequence = slice::<i32>(&op.sequences)[n];
        if sequence < 0 {
            continue;
        }
        let pages = &slice::<i32>(&op.block_table)[sequence as usize * p.max_pages as usize..];
        let length = slice::<i32>(&op.positions)[n] as usize + 1;
        let at = |t: usize, head: usize, value: usize| {
            let page = pages[t / PAGE_TOKENS] as usize;
            row(&kv, ((page * 2 + value) * kv_heads + head) * PAGE_TOKENS + t % PAGE_TOKENS)
        };
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let q = &q[(n * heads + head) * d..][..d];
            let scores: Vec<f64> =
                (0..length).map(|t| (dot(q, &at(t, kv_head, 0)) * p.scale) as f64).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let mut mixed = vec![0.0_f64; d];
            for (t, score) in scores.iter().enumerate() {
                let weight = (score - max).exp() / sum;
                mixed.iter_mut().zip(at(t, kv_head, 1)).for_each(|(m, v)| *m += weight * v as f64);
            }
            let out = &mut out[head * d..][..d];
            out.iter_mut().zip(mixed).for_each(|(out, m)| *out = m as f32);
            if let Some(gate) = &op.gate {
                let gates = &slice::<f32>(&gate.rows)[n * gate.width as usize + (2 * head + 1) * d..];
                out.iter_mut().zip(gates).for_each(|(out, gate)| *out *= sigmoid(*gate));
            }
        }
    }
}
