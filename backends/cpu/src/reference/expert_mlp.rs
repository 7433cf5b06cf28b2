//! See [`freetoken_backend::ExpertMlp`].

use freetoken_backend::ExpertMlp;

use super::{dot, row_of, silu};
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
        let x = &slice::<f32>(&op.x)[route / top_k * hidden..][..hidden];
        let activated = |i: usize| silu(dot(&row_of(&e.gate, i), x)) * dot(&row_of(&e.up, i), x);
        let activated: Vec<f32> = (0..inner).map(activated).collect();
        let weight = slice::<f32>(&op.weights)[route];
        for (i, part) in parts[route * hidden..][..hidden].iter_mut().enumerate() {
            *part = weight * dot(&row_of(&e.down, i), &activated);
        }
    }
}
