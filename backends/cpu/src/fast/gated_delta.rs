//! The gated delta rule, a task a value head of a sequence, row by row: the state passes the core's cache once a row, and beside the
//! projections of a prompt that is little, so that the form for whole chunks is left to devices that need it.

use std::ops::Range;

use freetoken_backend::{GatedDelta, Span};

use super::{Fast, Scratch};
use crate::{
    isa::{self, DeltaRow, KvRow},
    memory::{slice, slice_mut},
    parallel::{Cut, Rows, for_each_row, for_each_tile_pair},
    reference::{log_decay, rms_scale, sigmoid, silu},
};

/// f32 values that are prepared for a row: q and k of each key head, decay and beta of each value head.
fn prepared_width(op: &GatedDelta) -> usize {
    2 * (op.p.n_key_heads * op.p.key_dim + op.p.n_value_heads) as usize
}

/// f32 values of scratch that an op takes.
pub(super) fn scratch_values(op: &GatedDelta) -> usize {
    op.p.n_rows as usize * prepared_width(op)
}

pub(super) fn gated_delta(fast: &Fast, op: &GatedDelta, scratch: &mut Scratch) {
    let p = &op.p;
    let (n, heads, dk, dv) =
        (p.n_rows as usize, p.n_value_heads as usize, p.key_dim as usize, p.value_dim as usize);
    let (keys, group) = (p.n_key_heads as usize * dk, (p.n_value_heads / p.n_key_heads) as usize);
    let (qkv, qkv_width) = (slice::<f32>(&op.qkv), p.qkv_width() as usize);
    let constants = slice::<f32>(&op.constants.view);

    let width = prepared_width(op);
    let prepared = &mut scratch.rows[..n * width];
    for_each_row(&fast.pool, prepared, width, |row, out| {
        let (units, rates) = out.split_at_mut(2 * keys);
        let raw = qkv[row * qkv_width..].chunks_exact(dk);
        for (i, (unit, raw)) in units.chunks_exact_mut(dk).zip(raw).enumerate() {
            let squares = isa::dot_kv(fast.isa, raw, KvRow::F32(raw));
            let of_query = if i < p.n_key_heads as usize { (dk as f32).sqrt() } else { 1.0 };
            let scale = 1.0 / ((squares + 1e-6).sqrt() * of_query);
            unit.iter_mut().zip(raw).for_each(|(unit, x)| *unit = x * scale);
        }
        let ba = &slice::<f32>(&op.ba)[row * p.ba_width as usize + p.ba_start as usize..];
        for (head, rates) in rates.chunks_exact_mut(2).enumerate() {
            rates[0] = log_decay(constants[head], ba[heads + head] + constants[heads + head]).exp() as f32;
            rates[1] = sigmoid(ba[head]);
        }
    });

    let spans = &slice::<Span>(&op.spans)[..p.n_sequences as usize];
    scratch.row_spans.clear();
    scratch.slot_spans.clear();
    for span in spans {
        let (rows, slots) = places(span);
        scratch.row_spans.push(rows);
        scratch.slot_spans.push(slots);
    }
    let prepared = &scratch.rows[..n * width];
    let out = Cut::new(slice_mut(&op.out), heads * dv, Rows::Spans(&scratch.row_spans), dv);
    let states = Cut::new(slice_mut(&op.state), heads * dk * dv, Rows::Spans(&scratch.slot_spans), dk * dv);
    for_each_tile_pair(&fast.pool, &out, &states, |span, mut out, mut states| {
        if out.rows.is_empty() {
            return;
        }
        let head = out.cols.start / dv;
        let state = states.row(states.rows.start);
        if spans[span].resumes == 0 {
            state.fill(0.0);
        }
        for row in out.rows.clone() {
            let (units, rates) = prepared[row * width..][..width].split_at(2 * keys);
            let delta = DeltaRow {
                decay: rates[2 * head],
                beta: rates[2 * head + 1],
                q: &units[head / group * dk..][..dk],
                k: &units[keys + head / group * dk..][..dk],
                v: &qkv[row * qkv_width + 2 * keys + head * dv..][..dv],
            };
            let out = out.row(row);
            isa::delta(fast.isa, delta, state, out);
            let scale = rms_scale(out, p.eps);
            let z = &slice::<f32>(&op.z)[row * p.z_width as usize + p.z_start as usize + head * dv..];
            for (out, (norm, z)) in out.iter_mut().zip(constants[2 * heads..].iter().zip(z)) {
                *out *= scale * norm * silu(*z);
            }
        }
    });
}

/// Rows of a span, and the slot of its state as a range.
fn places(span: &Span) -> (Range<usize>, Range<usize>) {
    if span.first == span.end {
        return (0..0, 0..0);
    }
    (span.first as usize..span.end as usize, span.slot as usize..span.slot as usize + 1)
}
