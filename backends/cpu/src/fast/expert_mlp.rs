//! The expert MLP, the CPU's main work: routes are sorted by expert, so that the rows routed to one expert share one pass
//! over its weights; every worker takes tiles of any expert. Bound by DRAM in decode.

use freetoken_backend::{ExpertMlp, ExpertPool, ExpertRecord, Experts, Format};

use super::{Activations, Fast, ROW_BLOCK, Scratch};
use crate::{
    isa,
    memory::{bytes, slice, slice_mut},
    parallel::{MAX_TILE_COLS, Rows, for_each_row, for_each_tile, tile_cols},
    reference::{Found, find, silu},
};

/// The matrices of one expert, as bytes.
#[derive(Clone, Copy)]
pub(crate) struct Matrices<'a> {
    pub(crate) format: Format,
    pub(crate) gate: &'a [u8],
    pub(crate) up: &'a [u8],
    pub(crate) down: &'a [u8],
}

/// The matrices of a record.
pub(crate) fn matrices_in<'a>(layout: &ExpertRecord, record: &'a [u8]) -> Matrices<'a> {
    Matrices {
        format: layout.format,
        gate: &record[layout.gate()],
        up: &record[layout.up()],
        down: &record[layout.down.clone()],
    }
}

/// The matrices of the record in a slot.
pub(crate) fn matrices_of_slot(pool: &ExpertPool, slot: usize) -> Matrices<'_> {
    let start = slot % pool.slots_per_chunk * pool.record.bytes;
    let chunk = bytes(&pool.chunks[slot / pool.slots_per_chunk]);
    matrices_in(&pool.record, &chunk[start..start + pool.record.bytes])
}

/// Finds experts that have a place on the device.
pub(super) fn resident<'a>(op: &'a ExpertMlp) -> impl Fn(usize) -> Matrices<'a> + Sync {
    move |id| match (&op.experts, find(&op.experts, id)) {
        (_, Found::Apart(e)) => Matrices {
            format: e.gate.format,
            gate: slice(&e.gate.view),
            up: slice(&e.up.view),
            down: slice(&e.down.view),
        },
        (Experts::Pool { pool, .. }, Found::Slot(slot)) => matrices_of_slot(pool, slot),
        (Experts::InPlace(_), Found::Slot(_)) => unreachable!("slots lie in pools"),
    }
}

/// Runs the routes in `ids` (-1: none) through the experts that `find` gives.
pub(super) fn expert_mlp<'a>(
    fast: &Fast,
    op: &ExpertMlp,
    ids: &[i32],
    find: &(dyn Fn(usize) -> Matrices<'a> + Sync),
    scratch: &mut Scratch,
) {
    let p = &op.p;
    let (n, top_k, hidden, inner) =
        (p.n_rows as usize, p.top_k as usize, p.hidden as usize, p.intermediate as usize);
    let n_sorted = sort_by_expert(&ids[..n * top_k], p.n_experts as usize, scratch);
    let Some(&first) = scratch.experts.first() else { return };
    let format = find(first as usize).format;
    let (groups, experts, order) =
        (Rows::Groups(&scratch.groups), &scratch.experts[..], &scratch.order[..n_sorted]);
    let n_groups = experts.len();
    let half = fast.takes_bf16(format);

    // The row of each sorted route; a single row serves all its routes as it is.
    let x = slice::<f32>(&op.x);
    let x_rows = if n == 1 { 1 } else { n_sorted };
    let sources = |row: usize| &x[if n == 1 { 0 } else { order[row] as usize / top_k } * hidden..][..hidden];
    let x = if half {
        let rounded = &mut scratch.rounded[..x_rows * hidden];
        for_each_row(&fast.pool, rounded, hidden, |row, out| isa::to_bf16(fast.isa, sources(row), out));
        Activations::Bf16(rounded)
    } else if n == 1 {
        Activations::F32(&x[..hidden])
    } else {
        let rows = &mut scratch.rows[..x_rows * hidden];
        for_each_row(&fast.pool, rows, hidden, |row, out| out.copy_from_slice(sources(row)));
        Activations::F32(rows)
    };

    // inner[route] = silu(gate . x) * (up . x)
    let activated = &mut scratch.inner[..n_sorted * inner];
    let cols = tile_cols(&fast.pool, inner, n_groups);
    for_each_tile(&fast.pool, activated, inner, groups, cols, |group, mut tile| {
        let expert = find(experts[group] as usize);
        let mut gate = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        let mut up = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        for start in tile.rows.clone().step_by(ROW_BLOCK) {
            let rows = start..tile.rows.end.min(start + ROW_BLOCK);
            let x = if n == 1 { x } else { x.rows(rows.clone(), hidden) };
            let used = rows.len() * tile.cols.len();
            fast.dot(format, expert.gate, tile.cols.clone(), hidden, x, &mut gate[..used]);
            fast.dot(format, expert.up, tile.cols.clone(), hidden, x, &mut up[..used]);
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
        let expert = find(experts[group] as usize);
        let mut down = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        for start in tile.rows.clone().step_by(ROW_BLOCK) {
            let rows = start..tile.rows.end.min(start + ROW_BLOCK);
            let used = rows.len() * tile.cols.len();
            let x = activated.rows(rows.clone(), inner);
            fast.dot(format, expert.down, tile.cols.clone(), inner, x, &mut down[..used]);
            for (row, values) in rows.zip(down.chunks_exact(tile.cols.len())) {
                let weight = weights[order[row] as usize];
                tile.row(row).iter_mut().zip(values).for_each(|(out, v)| *out = weight * v);
            }
        }
    });
    if !in_place {
        let (sorted, place) = (&scratch.rows[..], &scratch.place[..]);
        for_each_row(&fast.pool, parts, hidden, |route, part| {
            if ids[route] >= 0 {
                part.copy_from_slice(&sorted[place[route] as usize * hidden..][..hidden]);
            }
        });
    }
}

/// Counting sort of the routes that have an expert: `order`, its inverse `place`, and a group for each expert in use.
fn sort_by_expert(ids: &[i32], n_experts: usize, scratch: &mut Scratch) -> usize {
    let starts = &mut scratch.starts[..n_experts + 1];
    starts.fill(0);
    for &id in ids.iter().filter(|id| **id >= 0) {
        starts[id as usize + 1] += 1;
    }
    scratch.groups.clear();
    scratch.experts.clear();
    scratch.groups.push(0);
    for expert in 0..n_experts {
        let n = starts[expert + 1];
        starts[expert + 1] += starts[expert];
        if n > 0 {
            scratch.experts.push(expert as u32);
            scratch.groups.push(starts[expert + 1] as usize);
        }
    }
    for (route, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
        let place = starts[id as usize];
        starts[id as usize] += 1;
        scratch.order[place as usize] = route as u32;
        scratch.place[route] = place;
    }
    scratch.groups.last().copied().unwrap_or(0)
}
