//! See [`freetoken_backend::EditLogits`]. Little work: the fast path is this one.

use freetoken_backend::{EditLogits, LogitEdit};

use crate::memory::{slice, slice_mut};

pub(crate) fn edit_logits(op: &EditLogits) {
    let logits = slice_mut::<f32>(&op.logits);
    let edits = &slice::<LogitEdit>(&op.edits)[..op.p.capacity as usize];
    for edit in edits.iter().take_while(|edit| edit.row >= 0) {
        let logit =
            &mut logits[edit.row as usize * op.p.vocab as usize..][..op.p.vocab as usize][edit.id as usize];
        *logit = edit.apply(*logit);
    }
}
