//! See [`freetoken_backend::ExpertMlp`].

use freetoken_backend::{ExpertMlp, ExpertRecord, ExpertWeights, Experts, View, Weight};

use super::{dot, row, silu};
use crate::memory::{slice, slice_mut};

pub(super) fn expert_mlp(op: &ExpertMlp) {
    let (hidden, top_k, n) = (op.p.hidden as usize, op.p.top_k as usize, op.p.n_rows as usize);
    let parts = slice_mut::<f32>(&op.parts);
    for (route, &id) in slice::<i32>(&op.ids)[..n * top_k].iter().enumerate() {
        if id < 0 {
            continue;
        }
        let e = match (&op.experts, find(&op.experts, id as usize)) {
            (_, Found::Apart(e)) => e.clone(),
            (Experts::Pool { pool, .. }, Found::Slot(slot)) => weights_in(&pool.record, &pool.slot(slot)),
            (Experts::InPlace(_), Found::Slot(_)) => unreachable!("slots lie in pools"),
        };
        let x = &slice::<f32>(&op.x)[route / top_k * hidden..][..hidden];
        let inner: Vec<f32> =
            (0..e.gate.rows).map(|i| silu(dot(&row(&e.gate, i), x)) * dot(&row(&e.up, i), x)).collect();
        let weight = slice::<f32>(&op.weights)[route];
        for (i, part) in parts[route * hidden..][..hidden].iter_mut().enumerate() {
            *part = weight * dot(&row(&e.down, i), &inner);
        }
    }
}

/// Where an expert is.
pub(crate) enum Found<'a> {
    /// Its matrices, apart.
    Apart(&'a ExpertWeights),
    /// In this slot of its pool.
    Slot(usize),
}

/// Finds an expert that has a place.
pub(crate) fn find(experts: &Experts, id: usize) -> Found<'_> {
    match experts {
        Experts::InPlace(experts) => Found::Apart(&experts[id]),
        Experts::Pool { pool, layer } => {
            let slot = slice::<i32>(&pool.table)[pool.entry(*layer, id as u32)];
            Found::Slot(usize::try_from(slot).expect("a routed expert has a slot"))
        }
    }
}

/// The three matrices of a record.
fn weights_in(layout: &ExpertRecord, record: &View) -> ExpertWeights {
    let (hidden, intermediate) = (layout.hidden, layout.intermediate);
    let matrix = |range, rows, cols| Weight { view: record.slice(range), format: layout.format, rows, cols };
    ExpertWeights {
        gate: matrix(layout.gate(), intermediate, hidden),
        up: matrix(layout.up(), intermediate, hidden),
        down: matrix(layout.down.clone(), hidden, intermediate),
    }
}
