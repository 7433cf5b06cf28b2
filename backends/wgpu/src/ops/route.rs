//! See [`freetoken_backend::Route`]: scores, by many workgroups where rows are few; then the choice, a row a workgroup.

use freetoken_backend::Route;

use super::matmul::FEW_ROWS;
use crate::{
    dispatch::{Call, Recorder, format_code},
    kernels::{ROUTE, ROUTE_SCORES},
    memory::Slot,
};

/// Orders and ranks of this many experts fit workgroup memory.
pub(super) const MAX_EXPERTS: usize = 1024;
/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Experts whose scores are computed at a time.
const BLOCK: u32 = 4;

pub(super) fn record(op: &Route, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, n_experts, top_k) = (p.n_rows as usize, p.n_experts as usize, p.top_k as usize);
    let scores = Slot::whole(&recorder.scratch.get(recorder.gpu, "route.scores", 4 * n * n_experts));
    record_scores(op, scores.clone(), recorder);
    recorder.work = (n * n_experts * n_experts) as u64;
    let ids = recorder.words(&op.ids, n * top_k);
    let weights = recorder.words(&op.weights, n * top_k);
    let sequences = recorder.words(&op.sequences, n);
    let params = [p.n_rows, p.top_k, ids.at(4), weights.at(4), sequences.at(4)];
    recorder.call(Call {
        kernel: &ROUTE,
        constants: vec![("WORKGROUP", THREADS), ("RENORMALIZE", p.renormalize), ("EXPERTS", p.n_experts)],
        slots: vec![ids, weights, scores, sequences],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n),
    });
}

/// `scores`: f32 `[n_rows, n_experts]`.
fn record_scores(op: &Route, scores: Slot, recorder: &mut Recorder<'_>) {
    let p = &op.p;
    let (n, hidden) = (p.n_rows as usize, p.hidden as usize);
    let normed = recorder.words(&op.normed, n * hidden);
    let gates = match &op.shared_gate {
        Some(gate) => recorder.words(&gate.out, n),
        None => Slot::whole(&recorder.scratch.get(recorder.gpu, "route.gates", 4)),
    };
    let x = recorder.words(&op.x, n * hidden);
    let (norm, norm_at, norm_format) = recorder.optional(Some(&op.norm));
    let router = recorder.weight(&op.router);
    let (gate, gate_at, gate_format) = recorder.optional(op.shared_gate.as_ref().map(|gate| &gate.weight));
    let wide = hidden.is_multiple_of(8) && [&x, &norm, &router].iter().all(|slot| slot.is_wide());
    let split = n <= FEW_ROWS;
    let block = if split { BLOCK } else { p.n_experts };
    let blocks = p.n_experts.div_ceil(block) + u32::from(op.shared_gate.is_some());
    let params = [
        p.n_rows,
        p.hidden,
        p.eps.to_bits(),
        normed.at(4),
        gates.at(4),
        x.at(4),
        norm_at,
        router.at(op.router.format.row_bytes(1)),
        gate_at,
    ];
    recorder.call(Call {
        kernel: &ROUTE_SCORES,
        constants: vec![
            ("WORKGROUP", THREADS),
            ("ROUTER", format_code(op.router.format)),
            ("NORM", norm_format),
            ("GATE", gate_format),
            ("WIDE", wide as u32),
            ("SPLIT", split as u32),
            ("EXPERTS", p.n_experts),
            ("BLOCK", block),
        ],
        slots: vec![scores, normed, gates, x, norm, router, gate],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n * blocks as usize),
    });
}
