//! See [`freetoken_backend::EditLogits`].

use freetoken_backend::{EditLogits, LogitEdit};

use crate::{
    dispatch::{Call, Recorder},
    kernels::EDIT_LOGITS,
};

pub(super) fn record(op: &EditLogits, recorder: &mut Recorder<'_>) {
    let logits = recorder.words(&op.logits, op.p.n_rows as usize * op.p.vocab as usize);
    let edits = recorder.slot(&op.edits, op.p.capacity as usize * size_of::<LogitEdit>());
    let params = [op.p.vocab, op.p.capacity, logits.at(4), edits.at(4)];
    recorder.call(Call {
        kernel: &EDIT_LOGITS,
        constants: Vec::new(),
        slots: vec![logits, edits],
        chunks: &[],
        params: &params,
        workgroups: [1, 1, 1],
    });
}
