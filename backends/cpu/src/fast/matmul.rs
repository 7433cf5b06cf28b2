//! Matmul in tiles of output columns: a task reads its rows of the weight once for all rows of the batch.

use std::ops::Range;

use freetoken_backend::{MatMul, Matrix, Weight};

use super::{Activations, Fast, ROW_BLOCK, Scratch, rms_norm, widen};
use crate::{
    memory::{slice, slice_mut},
    parallel::{MAX_TILE_COLS, Rows, for_each_row, for_each_tile, tile_cols},
    reference::silu,
    stored::Stored,
};

pub(super) fn matmul(fast: &Fast, op: &MatMul, scratch: &mut Scratch) {
    let (n, width, out_width) = (op.p.n_rows as usize, op.p.in_features as usize, op.p.out_features as usize);
    let x = inputs(fast, op, &mut scratch.rows[..n * width], &mut scratch.norm[..width]);
    let x = fast.activations(op.weight.format(), x, width, &mut scratch.rounded);
    let out = &mut slice_mut::<f32>(&op.out)[..n * out_width];
    let cols = tile_cols(&fast.pool, out_width, 1);
    for_each_tile(&fast.pool, out, out_width, Rows::All(n), cols, |_, mut tile| {
        let cols = tile.cols.clone();
        let mut first = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        let mut second = [0.0; MAX_TILE_COLS * ROW_BLOCK];
        for start in (0..n).step_by(ROW_BLOCK) {
            let rows = start..n.min(start + ROW_BLOCK);
            let x = x.rows(rows.clone(), width);
            let used = rows.len() * cols.len();
            project(fast, op, cols.clone(), x, &mut first[..used]);
            if op.is_glu() {
                project(fast, op, out_width + cols.start..out_width + cols.end, x, &mut second[..used]);
                first[..used].iter_mut().zip(&second).for_each(|(gate, up)| *gate = silu(*gate) * up);
            }
            for (row, values) in rows.zip(first.chunks_exact(cols.len())) {
                let out = tile.row(row);
                if op.p.accumulate == 1 {
                    out.iter_mut().zip(values).for_each(|(out, v)| *out += v);
                } else {
                    out.copy_from_slice(values);
                }
            }
        }
    });
}

/// The rows that the weight multiplies: `x` itself, or gathered and normed.
fn inputs<'a>(fast: &Fast, op: &'a MatMul, prepared: &'a mut [f32], norm: &mut [f32]) -> &'a [f32] {
    let width = op.p.in_features as usize;
    let x = slice::<f32>(&op.x);
    if op.norm.is_none() && op.rows.is_none() {
        return &x[..prepared.len()];
    }
    if let Some(weight) = &op.norm {
        widen(weight, 0, norm);
    }
    for_each_row(&fast.pool, prepared, width, |row, out| {
        let from = op.rows.as_ref().map_or(row, |rows| slice::<i32>(rows)[row] as usize);
        let x = &x[from * width..][..width];
        match op.norm {
            Some(_) => rms_norm(x, norm, op.p.eps, out),
            None => out.copy_from_slice(x),
        }
    });
    prepared
}

/// `into[i * rows + r]`: rows of the stacked pieces times `x`, and their bias.
fn project(fast: &Fast, op: &MatMul, rows: Range<usize>, x: Activations<'_>, into: &mut [f32]) {
    let width = rows.len();
    each_piece(&op.weight, rows, |piece, rows, at| {
        let weight = Stored::of(&op.weight.pieces()[piece]).part(rows.clone());
        if rows.len() == width {
            fast.dot(weight, x, into);
        } else {
            let mut part = [0.0; MAX_TILE_COLS * ROW_BLOCK];
            let part = &mut part[..into.len() / width * rows.len()];
            fast.dot(weight, x, part);
            for (into, part) in into.chunks_exact_mut(width).zip(part.chunks_exact(rows.len())) {
                into[at..at + rows.len()].copy_from_slice(part);
            }
        }
        if let Some(bias) = &op.bias {
            let mut values = [0.0; MAX_TILE_COLS];
            let values = &mut values[..rows.len()];
            widen_part(&bias[piece], rows.clone(), values);
            for into in into.chunks_exact_mut(width) {
                into[at..at + rows.len()].iter_mut().zip(&*values).for_each(|(into, b)| *into += b);
            }
        }
    });
}

fn widen_part(bias: &Weight, range: Range<usize>, out: &mut [f32]) {
    let row_bytes = bias.format.row_bytes(1);
    let view = bias.view.slice(range.start * row_bytes..range.end * row_bytes);
    widen(&Weight::plain(view, bias.format, 1, range.len()), 0, out);
}

/// Calls `f(piece, rows of the piece, their place in rows)` for the pieces that `rows` touches.
fn each_piece(matrix: &Matrix, rows: Range<usize>, mut f: impl FnMut(usize, Range<usize>, usize)) {
    let mut top = 0;
    for (i, piece) in matrix.pieces().iter().enumerate() {
        let (start, end) = (rows.start.max(top), rows.end.min(top + piece.rows));
        if start < end {
            f(i, start - top..end - top, start - rows.start);
        }
        top += piece.rows;
    }
}
