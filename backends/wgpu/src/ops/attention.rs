//! See [`freetoken_backend::Attention`]: many rows in tiles, on cooperative matrices where there are any; else one pass, or parts of each
//! sequence and a merge where there are few rows.

use freetoken_backend::{Attention, Format, KvCache, PAGE_TOKENS};

use super::matmul::FEW_ROWS;
use crate::{
    dispatch::{Call, Recorder},
    kernels::{ATTENTION, ATTENTION_COOPERATIVE, ATTENTION_MERGE, ATTENTION_TILED, Kernel},
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

/// Queries and threads of a tile.
const TILE_QUERIES: u32 = 32;
const TILE_THREADS: u32 = 128;
/// Dimensions of a head that a tile has sums for.
const MAX_TILED_DIM: u32 = 256;
/// Queries of a tile on cooperative matrices, which have 16 rows and columns.
const COOPERATIVE_QUERIES: u32 = 128;
const MATRIX: u32 = 16;

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
    let read = Read::of(op, recorder);
    let out = recorder.words(&op.out, n * n_heads * d);
    if n > FEW_ROWS && p.head_dim <= MAX_TILED_DIM && read.q.is_wide() {
        match cooperative_tokens(op, recorder) {
            Some(tokens) => cooperative_tiles(op, &read, out, tokens, recorder),
            None => tiles(op, &read, out, recorder),
        }
    } else {
        rows(op, &read, out, recorder);
    }
}

/// What both ways read.
struct Read {
    q: Slot,
    kv: Slot,
    block_table: Slot,
    sequences: Slot,
    positions: Slot,
    gate: Slot,
    gate_width: u32,
}

impl Read {
    fn of(op: &Attention, recorder: &Recorder<'_>) -> Self {
        let p = &op.p;
        let (n, d) = (p.n_rows as usize, p.head_dim as usize);
        let kv_bytes = op.kv.n_pages * KvCache::page_bytes(op.kv.format, p.n_kv_heads as usize, d);
        let (gate, gate_width) = match &op.gate {
            Some(gate) => (recorder.words(&gate.rows, n * gate.width as usize), gate.width),
            None => (recorder.nothing(), 0),
        };
        Read {
            q: recorder.words(&op.q, n * p.n_heads as usize * d),
            kv: recorder.slot(&op.kv.view, kv_bytes),
            block_table: recorder.words(&op.block_table, (p.n_sequences * p.max_pages) as usize),
            sequences: recorder.words(&op.sequences, n),
            positions: recorder.words(&op.positions, n),
            gate,
            gate_width,
        }
    }

    fn slots(&self) -> [Slot; 6] {
        [&self.q, &self.kv, &self.block_table, &self.sequences, &self.positions, &self.gate].map(Slot::clone)
    }

    /// Parameters of a kernel that takes the heads of a key-value head in so many blocks.
    fn params(&self, op: &Attention, n_blocks: u32, out: &Slot) -> [u32; 14] {
        let p = &op.p;
        [
            p.n_rows,
            p.max_pages,
            p.n_heads,
            p.n_kv_heads,
            p.scale.to_bits(),
            n_blocks,
            out.at(4),
            self.q.at(4),
            self.kv.at(16),
            self.block_table.at(4),
            self.sequences.at(4),
            self.positions.at(4),
            self.gate_width,
            self.gate.at(4),
        ]
    }
}

/// In tiles of queries.
fn tiles(op: &Attention, read: &Read, out: Slot, recorder: &mut Recorder<'_>) {
    // Values come eight dimensions a thread, those of up to 64 tokens at a time.
    let values = (8 * TILE_THREADS / op.p.head_dim).min(64);
    let constants = [("KV_BF16", (op.kv.format == Format::Bf16) as u32), ("VALUES", 1 << values.ilog2())];
    tiled(op, read, out, recorder, &ATTENTION_TILED, TILE_QUERIES, &constants);
}

/// Tokens that a tile on cooperative matrices takes at a time; `None` where it is not for this op, or has no room.
fn cooperative_tokens(op: &Attention, recorder: &Recorder<'_>) -> Option<u32> {
    let d = op.p.head_dim;
    let tokens = if d <= 128 { 32 } else { 16 };
    // Keys and values; scores and weights; a vec4 or two a subgroup.
    let bytes = 2 * 2 * tokens * (d + 8) + 6 * COOPERATIVE_QUERIES * (tokens + 8) + 2 * COOPERATIVE_QUERIES;
    let fits = bytes <= recorder.gpu.limits.max_compute_workgroup_storage_size;
    let may = recorder.gpu.cooperative && op.kv.format == Format::Bf16 && d.is_multiple_of(MATRIX);
    (may && fits).then_some(tokens)
}

/// The same on cooperative matrices.
fn cooperative_tiles(op: &Attention, read: &Read, out: Slot, tokens: u32, recorder: &mut Recorder<'_>) {
    tiled(op, read, out, recorder, &ATTENTION_COOPERATIVE, COOPERATIVE_QUERIES, &[("TOKENS", tokens)]);
}

/// A kernel whose workgroups own so many queries.
fn tiled(
    op: &Attention,
    read: &Read,
    out: Slot,
    recorder: &mut Recorder<'_>,
    kernel: &'static Kernel,
    queries: u32,
    constants: &[(&'static str, u32)],
) {
    let p = &op.p;
    let group = p.n_heads / p.n_kv_heads;
    let heads = group.min(queries);
    let n_blocks = group.div_ceil(heads);
    let n_workgroups = p.n_rows.div_ceil(queries / heads) * p.n_kv_heads * n_blocks;
    let shape = [("HEAD_DIM", p.head_dim), ("HEADS", heads), ("GATED", op.gate.is_some() as u32)];
    recorder.call(Call {
        kernel,
        constants: [&shape, constants].concat(),
        slots: [out.clone()].into_iter().chain(read.slots()).collect(),
        chunks: &[],
        params: &read.params(op, n_blocks, &out),
        workgroups: recorder.grid(n_workgroups as usize),
    });
}

/// Row by row.
fn rows(op: &Attention, read: &Read, result: Slot, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, n_heads, d) = (p.n_rows as usize, p.n_heads as usize, p.head_dim as usize);
    let group = p.n_heads / p.n_kv_heads;
    let heads = group.min(4 * THREADS / p.head_dim).max(1);
    let n_blocks = group.div_ceil(heads);
    let tokens = (KEY_BYTES / op.kv.format.row_bytes(d) as u32).clamp(1, 64);
    let n_workgroups = n * (p.n_kv_heads * n_blocks) as usize;
    let longest = (p.max_pages as usize * PAGE_TOKENS).div_ceil(tokens as usize);
    let splits = BUSY.div_ceil(n_workgroups).min(MAX_SPLITS).min(longest.max(1));
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
    let gated = ("GATED", op.gate.is_some() as u32);
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
        slots: [out.clone(), peaks.clone()].into_iter().chain(read.slots()).collect(),
        chunks: &[],
        params: &read.params(op, n_blocks, &out),
        workgroups: recorder.grid(n_workgroups * splits),
    });
    if splits > 1 {
        recorder.work = (n * n_heads * d * splits) as u64;
        let params = [p.n_rows, p.n_heads, result.at(4), read.gate_width, read.gate.at(4)];
        recorder.call(Call {
            kernel: &ATTENTION_MERGE,
            constants: vec![("SPLITS", splits as u32), ("HEAD_DIM", p.head_dim), gated],
            slots: vec![result, out, peaks, read.gate.clone()],
            chunks: &[],
            params: &params,
            workgroups: recorder.grid(n * n_heads),
        });
    }
}
