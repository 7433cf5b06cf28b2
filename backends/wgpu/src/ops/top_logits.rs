//! See [`freetoken_backend::TopLogits`]: slices first, then a row at a time.

use freetoken_backend::TopLogits;

use crate::{
    dispatch::{Call, Recorder},
    kernels::{TOP_LOGITS, TOP_LOGITS_SLICE},
    memory::Slot,
};

/// Logits of a slice: with its counters it fits 16 KiB of workgroup memory.
const SLICE: usize = 2048;

pub(super) fn record(op: &TopLogits, recorder: &mut Recorder<'_>) {
    let (n, vocab, k) = (op.p.n_rows as usize, op.p.vocab as usize, op.p.k as usize);
    let n_slices = vocab.div_ceil(SLICE);
    let candidates =
        Slot::whole(&recorder.scratch.get(recorder.gpu, "top_logits.candidates", n * n_slices * k * 8));
    let peaks = Slot::whole(&recorder.scratch.get(recorder.gpu, "top_logits.peaks", n * n_slices * 8));
    let logits = recorder.words(&op.logits, n * vocab);
    let temperatures = recorder.words(&op.inverse_temperatures, n);
    let params = [op.p.vocab, n_slices as u32, logits.at(4), temperatures.at(4)];
    recorder.call(Call {
        kernel: &TOP_LOGITS_SLICE,
        constants: vec![("WORKGROUP", 256), ("SLICE", SLICE as u32), ("K", op.p.k)],
        slots: vec![candidates.clone(), peaks.clone(), logits.clone(), temperatures],
        chunks: &[],
        params: &params,
        workgroups: [n_slices as u32, op.p.n_rows, 1],
    });
    let ids = recorder.words(&op.ids, n * k);
    let values = recorder.words(&op.values, n * k);
    let log_sum_exp = recorder.words(&op.log_sum_exp, n);
    let params = [op.p.vocab, n_slices as u32, ids.at(4), values.at(4), log_sum_exp.at(4), logits.at(4)];
    recorder.call(Call {
        kernel: &TOP_LOGITS,
        constants: vec![("WORKGROUP", recorder.gpu.most_threads()), ("K", op.p.k)],
        slots: vec![ids, values, log_sum_exp, logits, candidates, peaks],
        chunks: &[],
        params: &params,
        workgroups: [op.p.n_rows, 1, 1],
    });
}
