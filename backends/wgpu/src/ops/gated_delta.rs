//! See [`freetoken_backend::GatedDelta`]: the recurrence, a workgroup for some columns of a head's state; then the norm, which needs
//! whole heads.

use freetoken_backend::{GatedDelta, Span};

use super::matmul::window_rows;
use crate::{
    dispatch::{Call, Recorder},
    kernels::{GATED_DELTA, GATED_DELTA_NORM},
    memory::{Slot, buffer},
};

/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Elements of a state that a thread has in registers, all of one column.
const VALUES: u32 = 16;
/// Columns of a state that one workgroup takes, at most: with more of them fewer workgroups work.
const MAX_COLUMNS: u32 = 32;

/// What the kernel cannot do: `most` bytes can be bound.
pub(super) fn supports(op: &GatedDelta, most: usize) -> Result<(), String> {
    let (widest, key_dim) = (VALUES * THREADS, op.p.key_dim);
    if key_dim > widest {
        return Err(format!("a key has {key_dim} dimensions; it takes {widest} at most"));
    }
    let bytes = 4 * op.p.state_values() as usize;
    if bytes > most {
        return Err(format!("a state has {bytes} bytes, and the device binds at most {most}"));
    }
    Ok(())
}

pub(super) fn record(op: &GatedDelta, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, heads) = (p.n_rows as usize, p.n_value_heads as usize);
    let lanes = p.key_dim.div_ceil(VALUES);
    let columns = (THREADS / lanes).min(MAX_COLUMNS).min(p.value_dim);
    let n_blocks = p.value_dim.div_ceil(columns);

    let out = recorder.words(&op.out, n * heads * p.value_dim as usize);
    let qkv = recorder.words(&op.qkv, n * p.qkv_width() as usize);
    let ba = recorder.words(&op.ba, n * p.ba_width as usize);
    let constants = recorder.weight(&op.constants);
    let spans = recorder.slot(&op.spans, p.n_sequences as usize * size_of::<Span>());
    let wide = qkv.is_wide() && p.key_dim.is_multiple_of(4) && p.qkv_width().is_multiple_of(4);
    let slot_bytes = 4 * p.state_values() as usize;
    let (n_slots, per_window) = (p.n_slots as usize, window_rows(recorder.gpu, slot_bytes));
    for first in (0..n_slots).step_by(per_window) {
        let in_window = per_window.min(n_slots - first);
        let start = op.state.range().start + first * slot_bytes;
        let bytes = (in_window * slot_bytes) as u64;
        let state = Slot::part(buffer(op.state.buffer()), start as u64, bytes, recorder.gpu.align());
        let params = [
            p.n_sequences,
            p.n_key_heads,
            p.n_value_heads,
            p.value_dim,
            n_blocks,
            p.ba_width,
            first as u32,
            in_window as u32,
            out.at(4),
            state.at(4),
            qkv.at(4),
            ba.at(4) + p.ba_start,
            constants.at(4),
            spans.at(4),
        ];
        recorder.call(Call {
            kernel: &GATED_DELTA,
            constants: vec![
                ("KEY_DIM", p.key_dim),
                ("COLUMNS", columns),
                ("LANES", lanes),
                ("WIDE", wide as u32),
            ],
            slots: vec![out.clone(), state, qkv.clone(), ba.clone(), constants.clone(), spans.clone()],
            chunks: &[],
            params: &params,
            workgroups: recorder.grid(p.n_sequences as usize * heads * n_blocks as usize),
        });
    }

    recorder.work = (n * heads) as u64 * u64::from(p.value_dim);
    let z = recorder.words(&op.z, n * p.z_width as usize);
    let n_blocks = p.n_value_heads.div_ceil(recorder.gpu.max_teams(THREADS));
    let params = [
        p.n_rows,
        p.n_sequences,
        p.n_value_heads,
        p.value_dim,
        p.z_width,
        n_blocks,
        p.eps.to_bits(),
        out.at(4),
        z.at(4) + p.z_start,
        constants.at(4) + 2 * p.n_value_heads,
        spans.at(4),
    ];
    recorder.call(Call {
        kernel: &GATED_DELTA_NORM,
        constants: vec![("WORKGROUP", THREADS)],
        slots: vec![out, z, constants, spans],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n * n_blocks as usize),
    });
}
