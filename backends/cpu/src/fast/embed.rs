//! Embedding rows, converted to f32 straight into the residual stream.

use freetoken_backend::Embed;

use super::{Fast, widen};
use crate::{
    memory::{slice, slice_mut},
    parallel::for_each_row,
};

pub(super) fn embed(fast: &Fast, op: &Embed) {
    let (n, hidden) = (op.p.n_rows as usize, op.p.hidden as usize);
    let ids = slice::<i32>(&op.ids);
    let out = &mut slice_mut::<f32>(&op.out)[..n * hidden];
    for_each_row(&fast.pool, out, hidden, |row, out| widen(&op.table, ids[row] as usize, out));
}
