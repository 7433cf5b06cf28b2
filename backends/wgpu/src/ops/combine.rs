//! See [`freetoken_backend::Combine`].

use freetoken_backend::{Combine, SharedExpert};

use crate::{
    dispatch::{Call, Recorder},
    kernels::COMBINE,
};

pub(super) fn record(op: &Combine, recorder: &mut Recorder<'_>) {
    let (n, top_k, hidden) = (op.p.n_rows as usize, op.p.top_k as usize, op.p.hidden as usize);
    let x = recorder.words(&op.x, n * hidden);
    let parts = recorder.words(&op.parts, n * top_k * hidden);
    let ids = recorder.words(&op.ids, n * top_k);
    let (rows, gates) = match &op.shared {
        Some(SharedExpert { rows, gates }) => (recorder.words(rows, n * hidden), recorder.words(gates, n)),
        None => (recorder.nothing(), recorder.nothing()),
    };
    let params =
        [op.p.n_rows, op.p.top_k, op.p.hidden, x.at(4), parts.at(4), ids.at(4), rows.at(4), gates.at(4)];
    recorder.call(Call {
        kernel: &COMBINE,
        constants: vec![("SHARED", op.shared.is_some() as u32)],
        slots: vec![x, parts, ids, rows, gates],
        chunks: &[],
        params: &params,
        workgroups: recorder.grid((n * hidden).div_ceil(256)),
    });
}
