//! See [`freetoken_backend::Route`]: a row a workgroup; the gate of a shared expert in a dispatch of its own.

use freetoken_backend::{Route, SharedGate};

use super::matmul::FEW_ROWS;
use crate::{
    dispatch::{Call, Recorder, format_code},
    kernels::{ROUTE, ROUTE_SHARED_GATE},
    memory::Slot,
};

/// Scores and ranks of this many experts fit workgroup memory.
pub(super) const MAX_EXPERTS: usize = 1024;

pub(super) fn record(op: &Route, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, hidden, top_k) = (p.n_rows as usize, p.hidden as usize, p.top_k as usize);
    let ids = recorder.words(&op.ids, n * top_k);
    let weights = recorder.words(&op.weights, n * top_k);
    let normed = recorder.words(&op.normed, n * hidden);
    let x = recorder.words(&op.x, n * hidden);
    let (norm, norm_at, norm_format) = recorder.optional(Some(&op.norm));
    let router = recorder.weight(&op.router);
    let sequences = recorder.words(&op.sequences, n);
    let wide = hidden.is_multiple_of(8) && [&x, &norm, &router].iter().all(|slot| slot.is_wide());
    let params = [
        p.n_rows,
        p.hidden,
        p.top_k,
        p.eps.to_bits(),
        ids.at(4),
        weights.at(4),
        normed.at(4),
        x.at(4),
        norm_at,
        router.at(op.router.format.row_bytes(1)),
        sequences.at(4),
    ];
    // A single workgroup waits for memory: more threads have more loads on their way. Many workgroups do not need that.
    let threads = if n <= FEW_ROWS { recorder.gpu.most_threads() } else { 256 };
    recorder.call(Call {
        kernel: &ROUTE,
        constants: vec![
            ("WORKGROUP", threads),
            ("ROUTER", format_code(op.router.format)),
            ("NORM", norm_format),
            ("RENORMALIZE", p.renormalize),
            ("WIDE", wide as u32),
            ("EXPERTS", p.n_experts),
        ],
        slots: vec![ids, weights, normed.clone(), x, norm, router, sequences],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n),
    });
    if let Some(gate) = &op.shared_gate {
        recorder.work = (2 * n * hidden) as u64;
        record_gate(gate, n, normed, recorder);
    }
}

/// `normed`: the rows that the router left.
fn record_gate(gate: &SharedGate, n: usize, normed: Slot, recorder: &mut Recorder<'_>) {
    let out = recorder.words(&gate.out, n);
    let weight = recorder.weight(&gate.weight);
    let format = gate.weight.format;
    let params = [n as u32, gate.weight.cols as u32, out.at(4), normed.at(4), weight.at(format.row_bytes(1))];
    recorder.call(Call {
        kernel: &ROUTE_SHARED_GATE,
        constants: vec![("WORKGROUP", 256), ("FORMAT", format_code(format))],
        slots: vec![out, normed, weight],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n),
    });
}
