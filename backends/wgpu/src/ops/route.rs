//! See [`freetoken_backend::Route`].

use freetoken_backend::Route;

use super::matmul::FEW_ROWS;
use crate::{
    dispatch::{Call, Recorder, format_code},
    kernels::ROUTE,
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
        slots: vec![ids, weights, normed, x, norm, router, sequences],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid(n),
    });
}
