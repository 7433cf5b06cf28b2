//! See [`freetoken_backend::RopeCache`].

use freetoken_backend::{Format, KvCache, RopeCache};

use crate::{
    dispatch::{Call, Recorder},
    kernels::ROPE_CACHE,
};

pub(super) fn record(op: &RopeCache, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, heads, kv_heads, d) =
        (p.n_rows as usize, p.n_heads as usize, p.n_kv_heads as usize, p.head_dim as usize);
    let q = recorder.words(&op.q, n * heads * d);
    let kv = recorder.slot(&op.kv.view, op.kv.n_pages * KvCache::page_bytes(op.kv.format, kv_heads, d));
    let qkv = recorder.words(&op.qkv, n * op.qkv_width() as usize);
    let (q_norm, q_norm_at, q_norm_format) = recorder.optional(op.q_norm.as_ref());
    let (k_norm, k_norm_at, k_norm_format) = recorder.optional(op.k_norm.as_ref());
    let rotary = recorder.words(&op.rotary, (p.max_positions * p.rotary_dim) as usize);
    let positions = recorder.words(&op.positions, n);
    let kv_slots = recorder.words(&op.kv_slots, n);
    let params = [
        p.n_rows,
        p.n_heads,
        p.n_kv_heads,
        p.head_dim,
        p.rotary_dim,
        p.eps.to_bits(),
        q.at(4),
        kv.at(4),
        qkv.at(4),
        q_norm_at,
        k_norm_at,
        rotary.at(8) * 2,
        positions.at(4),
        kv_slots.at(4),
    ];
    recorder.call(Call {
        kernel: &ROPE_CACHE,
        constants: vec![
            ("WORKGROUP", 64),
            ("KV_BF16", (op.kv.format == Format::Bf16) as u32),
            ("GATED", op.gated as u32),
            ("Q_NORM", q_norm_format),
            ("K_NORM", k_norm_format),
        ],
        slots: vec![q, kv, qkv, q_norm, k_norm, rotary, positions, kv_slots],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n * (heads + 2 * kv_heads)),
    });
}
