//! See [`freetoken_backend::Embed`].

use freetoken_backend::Embed;

use super::row;
use crate::memory::{slice, slice_mut};

pub(super) fn embed(op: &Embed) {
    let hidden = op.p.hidden as usize;
    let out = slice_mut::<f32>(&op.out);
    for (out, &id) in out.chunks_exact_mut(hidden).zip(&slice::<i32>(&op.ids)[..op.p.n_rows as usize]) {
        out.copy_from_slice(&row(&op.table, id as usize));
    }
}
