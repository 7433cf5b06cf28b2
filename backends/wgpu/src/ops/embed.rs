//! See [`freetoken_backend::Embed`].

use freetoken_backend::Embed;

use super::matmul::window_rows;
use crate::{
    dispatch::{Call, Recorder, format_code},
    kernels::EMBED,
    memory::{Slot, buffer},
};

pub(super) fn record(op: &Embed, recorder: &mut Recorder<'_>) {
    let (n, hidden) = (op.p.n_rows as usize, op.p.hidden as usize);
    let row_bytes = op.table.format.row_bytes(hidden);
    let out = recorder.words(&op.out, n * hidden);
    let ids = recorder.words(&op.ids, n);
    let window = window_rows(recorder.gpu, row_bytes);
    for first in (0..op.table.rows).step_by(window) {
        let rows = window.min(op.table.rows - first);
        let start = (op.table.view.range().start + first * row_bytes) as u64;
        let bytes = (rows * row_bytes) as u64;
        let table = Slot::part(buffer(op.table.view.buffer()), start, bytes, recorder.gpu.align());
        let table_at = table.at(op.table.format.row_bytes(1));
        let params = [op.p.n_rows, op.p.hidden, first as u32, rows as u32, out.at(4), ids.at(4), table_at];
        recorder.call(Call {
            kernel: &EMBED,
            constants: vec![("FORMAT", format_code(op.table.format))],
            slots: vec![out.clone(), ids.clone(), table],
            chunks: &[],
            params: &params,
            workgroups: recorder.grid((n * hidden).div_ceil(256)),
        });
    }
}
