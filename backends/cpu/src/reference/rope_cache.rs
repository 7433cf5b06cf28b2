//! See [`freetoken_backend::RopeCache`]. Little work: the fast path is this one.

use freetoken_backend::{Format, KvCache, PAGE_TOKENS, RopeCache, Weight};
use half::bf16;

use super::rms_scale;
use crate::memory::{slice, slice_mut};

pub(crate) fn rope_cache(op: &RopeCache) {
    let p = &op.p;
    let (heads, kv_heads, d) = (p.n_heads as usize, p.n_kv_heads as usize, p.head_dim as usize);
    let (q_stride, width) = (op.q_stride() as usize, op.qkv_width() as usize);
    let rotary_dim = p.rotary_dim as usize;
    let (positions, kv_slots) = (slice::<i32>(&op.positions), slice::<i32>(&op.kv_slots));
    let (q_out, qkv) = (slice_mut::<f32>(&op.q), slice::<f32>(&op.qkv));
    for n in 0..p.n_rows as usize {
        let rotary = &slice::<f32>(&op.rotary)[positions[n] as usize * rotary_dim..][..rotary_dim];
        let row = &qkv[n * width..][..width];
        let (q, kv) = row.split_at(heads * q_stride);
        let (k, v) = kv.split_at(kv_heads * d);
        for (out, q) in q_out[n * heads * d..].chunks_exact_mut(d).zip(q.chunks_exact(q_stride)) {
            out.copy_from_slice(&q[..d]);
            prepare(out, op.q_norm.as_ref(), rotary, p.eps);
        }
        for head in 0..kv_heads {
            let place = place(&op.kv, kv_heads, d, kv_slots[n] as usize, head);
            store(&op.kv, place, &v[head * d..][..d], kv_heads * PAGE_TOKENS * d);
            // 256 covers the heads of every model we know; a wider one takes the allocation.
            let mut stack = [0.0_f32; 256];
            let mut heap = Vec::new();
            let key: &mut [f32] = if d <= stack.len() {
                &mut stack[..d]
            } else {
                heap.resize(d, 0.0);
                &mut heap
            };
            key.copy_from_slice(&k[head * d..][..d]);
            prepare(key, op.k_norm.as_ref(), rotary, p.eps);
            store(&op.kv, place, key, 0);
        }
    }
}

/// Norm, then rotation.
fn prepare(x: &mut [f32], norm: Option<&Weight>, rotary: &[f32], eps: f32) {
    if let Some(norm) = norm {
        let scale = rms_scale(x, eps);
        match norm.format {
            Format::F32 => scale_by(x, scale, slice::<f32>(&norm.view).iter().copied()),
            Format::Bf16 => scale_by(x, scale, slice::<bf16>(&norm.view).iter().map(|w| w.to_f32())),
            Format::F16 => scale_by(x, scale, slice::<half::f16>(&norm.view).iter().map(|w| w.to_f32())),
            Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => unreachable!("refused by the op's check"),
        }
    }
    let half = rotary.len() / 2;
    for i in 0..half {
        let (a, b, cos, sin) = (x[i], x[i + half], rotary[2 * i], rotary[2 * i + 1]);
        x[i] = a * cos - b * sin;
        x[i + half] = b * cos + a * sin;
    }
}

fn scale_by(x: &mut [f32], scale: f32, weight: impl Iterator<Item = f32>) {
    x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
}

/// First element of a head's key in a slot.
fn place(kv: &KvCache, kv_heads: usize, d: usize, slot: usize, head: usize) -> usize {
    let (page, offset) = (slot / PAGE_TOKENS, slot % PAGE_TOKENS);
    assert!(page < kv.n_pages, "kv slot {slot} in {} pages", kv.n_pages);
    ((page * 2 * kv_heads + head) * PAGE_TOKENS + offset) * d
}

fn store(kv: &KvCache, place: usize, values: &[f32], shift: usize) {
    let range = place + shift..place + shift + values.len();
    match kv.format {
        Format::F32 => slice_mut::<f32>(&kv.view)[range].copy_from_slice(values),
        Format::Bf16 => {
            let out = &mut slice_mut::<bf16>(&kv.view)[range];
            out.iter_mut().zip(values).for_each(|(out, v)| *out = bf16::from_f32(*v));
        }
        Format::F16 | Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => unreachable!("refused by `supports`"),
    }
}
