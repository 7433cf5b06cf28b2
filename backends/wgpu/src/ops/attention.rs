//! See [`freetoken_backend::Attention`]: one pass, or parts of each sequence and a merge where there are few rows.

use freetoken_backend::{Attention, Format, KvCache, PAGE_TOKENS};

use crate::{
    dispatch::{Call, Recorder},
    kernels::{ATTENTION, ATTENTION_MERGE},
    memory::Slot,
};

/// Threads of a workgroup; each owns four dimensions of a head.
const THREADS: u32 = 256;
/// Bytes of keys, and of values, in workgroup memory.
const KEY_BYTES: u32 = 4096;
/// Workgroups that keep a large device busy.
const BUSY: usize = 256;
/// Parts of a sequence, at most: the merge reads them all.
const MAX_SPLITS: usize = 64;

/// What the kernel cannot do.
pub(super) fn supports(op: &Attention) -> Result<(), String> {
    let d = op.p.head_dim;
    if !d.is_multiple_of(8) || d > 4 * THREADS {
        return Err(format!("a head has {d} dimensions; it takes multiples of 8 up to {}", 4 * THREADS));
    }
    Ok(())
}

pub(super) fn record(op: &Attention, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, n_heads, d) = (p.n_rows as usize, p.n_heads as usize, p.head_dim as usize);
    // Its flops are data: what they are when every sequence is as long as it can be.
    recorder.work = 4 * (n * n_heads * d * p.max_pages as usize * PAGE_TOKENS) as u64;
    let group = p.n_heads / p.n_kv_heads;
    let heads = group.min(4 * THREADS / p.head_dim).max(1);
    let n_blocks = group.div_ceil(heads);
    let tokens = (KEY_BYTES / op.kv.format.row_bytes(d) as u32).clamp(1, 64);
    let n_workgroups = n * (p.n_kv_heads * n_blocks) as usize;
    let longest = (p.max_pages as usize * PAGE_TOKENS).div_ceil(tokens as usize);
    let splits = BUSY.div_ceil(n_workgroups).min(MAX_SPLITS).min(longest.max(1));

    let result = recorder.words(&op.out, n * n_heads * d);
    let (out, peaks) = if splits == 1 {
        // Nobody writes peaks then.
        (result.clone(), Slot::whole(&recorder.scratch.get(recorder.gpu, "attention.peaks", 8)))
    } else {
        let bytes = n * n_heads * splits;
        (
            Slot::whole(&recorder.scratch.get(recorder.gpu, "attention.partial", bytes * d * 4)),
            Slot::whole(&recorder.scratch.get(recorder.gpu, "attention.peaks", bytes * 8)),
        )
    };
    let q = recorder.words(&op.q, n * n_heads * d);
    let kv = recorder
        .slot(&op.kv.view, op.kv.n_pages * KvCache::page_bytes(op.kv.format, p.n_kv_heads as usize, d));
    let block_table = recorder.words(&op.block_table, (p.n_sequences * p.max_pages) as usize);
    let sequences = recorder.words(&op.sequences, n);
    let positions = recorder.words(&op.positions, n);
    let (gate, gate_width) = match &op.gate {
        Some(gate) => (recorder.words(&gate.rows, n * gate.width as usize), gate.width),
        None => (recorder.nothing(), 0),
    };
    let gated = ("GATED", op.gate.is_some() as u32);
    let params = [
        p.n_rows,
        p.max_pages,
        p.n_heads,
        p.n_kv_heads,
        p.scale.to_bits(),
        n_blocks,
        out.at(4),
        q.at(4),
        kv.at(16),
        block_table.at(4),
        sequences.at(4),
        positions.at(4),
        gate_width,
        gate.at(4),
    ];
    recorder.call(Call {
        kernel: &ATTENTION,
        constants: vec![
            ("KV_BF16", (op.kv.format == Format::Bf16) as u32),
            ("HEAD_DIM", p.head_dim),
            ("HEADS", heads),
            ("TOKENS", tokens),
            ("SPLITS", splits as u32),
            gated,
        ],
        slots: vec![out.clone(), peaks.clone(), q, kv, block_table, sequences, positions, gate.clone()],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n_workgroups * splits),
    });
    if splits > 1 {
        recorder.work = (n * n_heads * d * splits) as u64;
        let params = [p.n_rows, p.n_heads, result.at(4), gate_width, gate.at(4)];
        recorder.call(Call {
            kernel: &ATTENTION_MERGE,
            constants: vec![("SPLITS", splits as u32), ("HEAD_DIM", p.head_dim), gated],
            slots: vec![result, out, peaks, gate],
            chunks: &[],
            params: &params,
            workgroups: recorder.grid(n * n_heads),
        });
    }
}
