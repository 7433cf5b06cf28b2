//! See [`freetoken_backend::Route`].

use freetoken_backend::Route;

use super::{dot, rms_norm, row, sigmoid};
use crate::memory::{slice, slice_mut};

pub(super) fn route(op: &Route) {
    let (hidden, top_k) = (op.p.hidden as usize, op.p.top_k as usize);
    let mut chosen = vec![(0, 0.0); top_k];
    for n in 0..op.p.n_rows as usize {
        let x = &slice::<f32>(&op.x)[n * hidden..][..hidden];
        let normed = rms_norm(x, &row(&op.norm, 0), op.p.eps);
        let logits: Vec<f32> = (0..op.router.rows).map(|e| dot(&row(&op.router, e), &normed)).collect();
        slice_mut::<f32>(&op.normed)[n * hidden..][..hidden].copy_from_slice(&normed);
        if let Some(gate) = &op.shared_gate {
            slice_mut::<f32>(&gate.out)[n] = sigmoid(dot(&row(&gate.weight, 0), &normed));
        }
        let live = slice::<i32>(&op.sequences)[n] >= 0;
        choose(&logits, live, op.p.renormalize == 1, &mut chosen);
        for (k, (id, weight)) in chosen.iter().enumerate() {
            slice_mut::<i32>(&op.ids)[n * top_k + k] = *id;
            slice_mut::<f32>(&op.weights)[n * top_k + k] = *weight;
        }
    }
}

/// Softmax and top-k of one row of router logits: (expert, weight), in ascending order of expert.
pub(crate) fn choose(logits: &[f32], live: bool, renormalize: bool, chosen: &mut [(i32, f32)]) {
    chosen.fill((-1, 0.0));
    if !live {
        return;
    }
    for k in 0..chosen.len() {
        // Scores that are not numbers still choose someone: the first who is left.
        let mut best: Option<usize> = None;
        for (e, &logit) in logits.iter().enumerate() {
            if chosen[..k].iter().all(|&(id, _)| id != e as i32) && best.is_none_or(|b| logit > logits[b]) {
                best = Some(e);
            }
        }
        chosen[k].0 = best.expect("top_k is at most the number of experts") as i32;
    }
    chosen.sort_unstable_by_key(|&(id, _)| id);
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let score = |logit: f32| ((logit - max) as f64).exp();
    let sum: f64 = if renormalize {
        chosen.iter().map(|&(id, _)| score(logits[id as usize])).sum()
    } else {
        logits.iter().map(|&logit| score(logit)).sum()
    };
    for (id, weight) in chosen {
        *weight = (score(logits[*id as usize]) / sum) as f32;
    }
}
