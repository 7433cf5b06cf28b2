//! See [`freetoken_backend::ExpertMlp`].

use freetoken_backend::ExpertMlp;

use super::{dot, elements_in, silu};
use crate::{
    experts::find,
    memory::{slice, slice_mut},
};

pub(super) fn expert_mlp(op: &ExpertMlp) {
    let (hidden, inner) = (op.p.hidden as usize, op.p.intermediate as usize);
    let (top_k, n) = (op.p.top_k as usize, op.p.n_rows as usize);
    let parts = slice_mut::<f32>(&op.parts);
    for (route, &id) in slice::<i32>(&op.ids)[..n * top_k].iter().enumerate() {
        let Some(e) = usize::try_from(id).ok().and_then(|id| find(op, id)) else { continue };
        let row = |matrix: &[u8], row: usize, cols: usize| elements_in(e.format, matrix, row * cols, cols);
        let x = &slice::<f32>(&op.x)[route / top_k * hidden..][..hidden];
        let activated = |i: usize| silu(dot(&row(e.gate, i, hidden), x)) * dot(&row(e.up, i, hidden), x);
        let activated: Vec<f32> = (0..inner).map(activated).collect();
        let weight = slice::<f32>(&op.weights)[route];
        for (i, part) in parts[route * hidden..][..hidden].iter_mut().enumerate() {
            *part = weight * dot(&row(e.down, i, inner), &activated);
        }
    }
}
