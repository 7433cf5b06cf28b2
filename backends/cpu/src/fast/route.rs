//! The router: always f32.

use freetoken_backend::Route;

use super::{Activations, Fast, ROW_BLOCK, Scratch, rms_norm, widen};
use crate::{
    memory::{slice, slice_mut},
    parallel::{MAX_TILE_COLS, Rows, for_each_row, for_each_tile, tile_cols},
    reference::{choose, sigmoid},
    stored::Stored,
};

pub(super) fn route(fast: &Fast, op: &Route, scratch: &mut Scratch) {
    let (n, hidden, top_k) = (op.p.n_rows as usize, op.p.hidden as usize, op.p.top_k as usize);
    let n_experts = op.p.n_experts as usize;
    let x = slice::<f32>(&op.x);
    let norm = &mut scratch.norm[..hidden];
    widen(&op.norm, 0, norm);
    let normed = &mut slice_mut::<f32>(&op.normed)[..n * hidden];
    for_each_row(&fast.pool, normed, hidden, |row, out| {
        rms_norm(&x[row * hidden..][..hidden], norm, op.p.eps, out)
    });

    if let Some(gate) = &op.shared_gate {
        let gates = &mut slice_mut::<f32>(&gate.out)[..n];
        for (normed, out) in normed.chunks_exact(hidden).zip(gates.chunks_exact_mut(1)) {
            fast.dot(Stored::of(&gate.weight), Activations::F32(normed), out);
            out[0] = sigmoid(out[0]);
        }
    }
    let normed = Activations::F32(normed);
    let router = Stored::of(&op.router);
    let logits = &mut scratch.partial[..n * n_experts];
    let cols = tile_cols(&fast.pool, n_experts, 1);
    for_each_tile(&fast.pool, logits, n_experts, Rows::All(n), cols, |_, mut tile| {
        let mut values = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        for start in (0..n).step_by(ROW_BLOCK) {
            let rows = start..n.min(start + ROW_BLOCK);
            let values = &mut values[..rows.len() * tile.cols.len()];
            fast.dot(router.part(tile.cols.clone()), normed.rows(rows.clone(), hidden), values);
            for (row, values) in rows.zip(values.chunks_exact(tile.cols.len())) {
                tile.row(row).copy_from_slice(values);
            }
        }
    });

    let (logits, sequences) = (&scratch.partial[..], slice::<i32>(&op.sequences));
    let chosen = &mut scratch.chosen[..n * top_k];
    for_each_row(&fast.pool, chosen, top_k, |row, chosen| {
        choose(&logits[row * n_experts..][..n_experts], sequences[row] >= 0, op.p.renormalize == 1, chosen);
    });
    let (ids, weights) = (slice_mut::<i32>(&op.ids), slice_mut::<f32>(&op.weights));
    for (i, &(id, weight)) in chosen.iter().enumerate() {
        ids[i] = id;
        weights[i] = weight;
    }
}
