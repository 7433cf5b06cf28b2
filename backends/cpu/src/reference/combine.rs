//! See [`freetoken_backend::Combine`]. Little work: the fast path is this one.

use freetoken_backend::{Combine, SharedExpert};

use crate::memory::{slice, slice_mut};

pub(crate) fn combine(op: &Combine) {
    let (hidden, top_k, n) = (op.p.hidden as usize, op.p.top_k as usize, op.p.n_rows as usize);
    let (x, parts) = (slice_mut::<f32>(&op.x), slice::<f32>(&op.parts));
    for (route, _) in slice::<i32>(&op.ids)[..n * top_k].iter().enumerate().filter(|(_, id)| **id >= 0) {
        let x = &mut x[route / top_k * hidden..][..hidden];
        x.iter_mut().zip(&parts[route * hidden..][..hidden]).for_each(|(x, part)| *x += part);
    }
    if let Some(SharedExpert { rows, gates }) = &op.shared {
        let rows = slice::<f32>(rows)[..n * hidden].chunks_exact(hidden).zip(slice::<f32>(gates));
        for (x, (row, gate)) in x.chunks_exact_mut(hidden).zip(rows) {
            x.iter_mut().zip(row).for_each(|(x, v)| *x += gate * v);
        }
    }
}
