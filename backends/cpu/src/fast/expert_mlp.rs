//! The expert MLP, the CPU's main work: routes are sorted by expert, so that the rows routed to one expert share one pass
//! over its weights; every worker takes tiles of any expert. Bound by DRAM in decode.

use freetoken_backend::ExpertMlp;

use super::{Activations, Fast, ROW_BLOCK, Scratch};
use crate::{
    experts::Matrices,
    memory::{slice, slice_mut},
    parallel::{MAX_TILE_COLS, Rows, for_each_row, for_each_tile, tile_cols},
    reference::silu,
};

/// Runs the routes in `ids` (-1: none) through the experts that `find` gives, and leaves those alone for which it gives none.
pub(super) fn expert_mlp<'a>(
    fast: &Fast,
    op: &ExpertMlp,
    ids: &[i32],
    find: &(dyn Fn(usize) -> Option<Matrices<'a>> + Sync),
    scratch: &mut Scratch,
) {
    let p = &op.p;
    let (n, top_k, hidden, inner) =
        (p.n_rows as usize, p.top_k as usize, p.hidden as usize, p.intermediate as usize);
    let n_sorted = sort_by_expert(&ids[..n * top_k], p.n_experts as usize, |id| find(id).is_some(), scratch);
    let Some(&first) = scratch.experts.first() else { return };
    let find = |id: u32| find(id as usize).expect("sorted because it has a place");
    let format = find(first).gate.format;
    let (groups, experts, order) =
        (Rows::Groups(&scratch.groups), &scratch.experts[..], &scratch.order[..n_sorted]);
    let n_groups = experts.len();

    // The row of each sorted route; a single row serves all its routes as it is.
    let x = slice::<f32>(&op.x);
    let x_rows = if n == 1 { 1 } else { n_sorted };
    let sources = |row: usize| &x[if n == 1 { 0 } else { order[row] as usize / top_k } * hidden..][..hidden];
    let x = match fast.rounded(format, x_rows, hidden, sources, &mut scratch.rounded) {
        Some(rounded) => rounded,
        None if n == 1 => Activations::F32(&x[..hidden]),
        None => {
            let rows = &mut scratch.rows[..x_rows * hidden];
            for_each_row(&fast.pool, rows, hidden, |row, out| out.copy_from_slice(sources(row)));
            Activations::F32(rows)
        }
    };

    // inner[route] = silu(gate . x) * (up . x)
    let activated = &mut scratch.inner[..n_sorted * inner];
    let cols = tile_cols(&fast.pool, inner, n_groups);
    for_each_tile(&fast.pool, activated, inner, groups, cols, |group, mut tile| {
        let expert = find(experts[group]);
        let mut gate = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        let mut up = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        for start in tile.rows.clone().step_by(ROW_BLOCK) {
            let rows = start..tile.rows.end.min(start + ROW_BLOCK);
            let x = if n == 1 { x } else { x.rows(rows.clone(), hidden) };
            let used = rows.len() * tile.cols.len();
            fast.dot(expert.gate.part(tile.cols.clone()), x, &mut gate[..used]);
            fast.dot(expert.up.part(tile.cols.clone()), x, &mut up[..used]);
            let width = tile.cols.len();
            for (i, row) in rows.enumerate() {
                let (gate, up) = (&gate[i * width..], &up[i * width..]);
                for ((out, gate), up) in tile.row(row).iter_mut().zip(gate).zip(up) {
                    *out = silu(*gate) * up;
                }
            }
        }
    });
    let activated = &scratch.inner[..n_sorted * inner];
    let activated = fast.activations(format, activated, inner, &mut scratch.inner_rounded);

    // One row a route, weighted, at the route's own place.
    let weights = slice::<f32>(&op.weights);
    let parts = &mut slice_mut::<f32>(&op.parts)[..n * top_k * hidden];
    let in_place = order.iter().enumerate().all(|(i, &route)| i == route as usize);
    let sorted =
        if in_place { &mut parts[..n_sorted * hidden] } else { &mut scratch.rows[..n_sorted * hidden] };
    let cols = tile_cols(&fast.pool, hidden, n_groups);
    for_each_tile(&fast.pool, sorted, hidden, groups, cols, |group, mut tile| {
        let expert = find(experts[group]);
        let mut down = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        for start in tile.rows.clone().step_by(ROW_BLOCK) {
            let rows = start..tile.rows.end.min(start + ROW_BLOCK);
            let used = rows.len() * tile.cols.len();
            let x = activated.rows(rows.clone(), inner);
            fast.dot(expert.down.part(tile.cols.clone()), x, &mut down[..used]);
            for (row, values) in rows.zip(down.chunks_exact(tile.cols.len())) {
                let weight = weights[order[row] as usize];
                tile.row(row).iter_mut().zip(values).for_each(|(out, v)| *out = weight * v);
            }
        }
    });
    if !in_place {
        let (sorted, place) = (&scratch.rows[..], &scratch.place[..]);
        for_each_row(&fast.pool, parts, hidden, |route, part| {
            let place = place[route] as usize;
            if order.get(place) == Some(&(route as u32)) {
                part.copy_from_slice(&sorted[place * hidden..][..hidden]);
            }
        });
    }
}

/// Counting sort of the routes whose expert has a place: `order`, its inverse `place`, and a group for each expert in use.
fn sort_by_expert(
    ids: &[i32],
    n_experts: usize,
    has_place: impl Fn(usize) -> bool,
    scratch: &mut Scratch,
) -> usize {
    let starts = &mut scratch.starts[..n_experts + 1];
    starts.fill(0);
    for &id in ids.iter().filter(|id| **id >= 0) {
        starts[id as usize + 1] += 1;
    }
    scratch.groups.clear();
    scratch.experts.clear();
    scratch.groups.push(0);
    for expert in 0..n_experts {
        let n = if starts[expert + 1] > 0 && has_place(expert) { starts[expert + 1] } else { 0 };
        starts[expert + 1] = starts[expert] + n;
        if n > 0 {
            scratch.experts.push(expert as u32);
            scratch.groups.push(starts[expert + 1] as usize);
        }
    }
    for (route, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
        if scratch.experts.binary_search(&(id as u32)).is_ok() {
            let place = starts[id as usize];
            starts[id as usize] += 1;
            scratch.order[place as usize] = route as u32;
            scratch.place[route] = place;
        }
    }
    scratch.groups.last().copied().unwrap_or(0)
}
