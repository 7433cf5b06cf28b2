//! See [`freetoken_backend::MatMul`]: one row or a few read each weight once, many are computed in tiles. A matrix in several pieces,
//! or larger than a binding, takes a dispatch for each run of rows that can be bound at once.

use freetoken_backend::{MatMul, Matrix, Weight};

use crate::{
    device::Gpu,
    dispatch::{Call, Recorder, format_code},
    kernels::{MATMUL_FEW, MATMUL_GEMV, MATMUL_TILED},
    memory::{Slot, buffer},
};

/// Rows of a batch that are computed without tiles.
pub(super) const FEW_ROWS: usize = 16;
/// Threads of a workgroup whose teams work apart.
pub(super) const THREADS: u32 = 128;
/// Rows and outputs of a tile.
const TILE: u32 = 64;

/// Rows of a matrix that one binding holds.
pub(super) fn window_rows(gpu: &Gpu, row_bytes: usize) -> usize {
    ((gpu.max_binding() - 2 * gpu.align() as usize) / row_bytes).max(1)
}

/// Rows of one piece of a matrix.
struct Run<'a> {
    piece: usize,
    weight: &'a Weight,
    /// Row of the piece.
    first: usize,
    /// Rows up to the end of the piece.
    rows: usize,
}

/// The run that starts at a row of the whole matrix.
fn run(matrix: &Matrix, row: usize) -> Run<'_> {
    let mut first = row;
    for (piece, weight) in matrix.pieces().iter().enumerate() {
        if first < weight.rows {
            return Run { piece, weight, first, rows: weight.rows - first };
        }
        first -= weight.rows;
    }
    unreachable!("row {row} of a matrix of {}", matrix.rows())
}

impl Run<'_> {
    /// The first `rows` rows.
    fn slot(&self, rows: usize, align: u32) -> Slot {
        let row_bytes = self.weight.format.row_bytes(self.weight.cols);
        let start = (self.weight.view.range().start + self.first * row_bytes) as u64;
        Slot::part(buffer(self.weight.view.buffer()), start, (rows * row_bytes) as u64, align)
    }
}

pub(super) fn record(op: &MatMul, recorder: &mut Recorder<'_>) {
    let outputs = op.p.out_features as usize;
    let row_bytes = op.weight.format().row_bytes(op.weight.cols());
    let window = window_rows(recorder.gpu, row_bytes);
    let whole = recorder.work;
    let mut done = 0;
    while done < outputs {
        let gate = run(&op.weight, done);
        let up = op.is_glu().then(|| run(&op.weight, outputs + done));
        let rows =
            gate.rows.min(outputs - done).min(window).min(up.as_ref().map_or(usize::MAX, |up| up.rows));
        recorder.work = whole * rows as u64 / outputs as u64;
        part(op, recorder, &gate, up.as_ref(), done, rows);
        done += rows;
    }
}

/// Outputs `first .. first + rows`.
fn part(
    op: &MatMul,
    recorder: &mut Recorder<'_>,
    gate: &Run<'_>,
    up: Option<&Run<'_>>,
    first: usize,
    rows: usize,
) {
    let p = &op.p;
    let (n, cols, align) = (p.n_rows as usize, p.in_features as usize, recorder.gpu.align());
    let element = gate.weight.format.row_bytes(1);
    let out = recorder.words(&op.out, n * p.out_features as usize);
    // With `rows` the data decides which rows of x are read: all of the view is bound.
    let x =
        if op.rows.is_some() { recorder.slot(&op.x, op.x.bytes()) } else { recorder.words(&op.x, n * cols) };
    let gathered = op.rows.as_ref().map_or_else(|| recorder.nothing(), |rows| recorder.words(rows, n));
    let (norm, norm_at, norm_format) = recorder.optional(op.norm.as_ref());
    let weight = gate.slot(rows, align);
    let up_weight = up.map_or_else(|| recorder.nothing(), |up| up.slot(rows, align));
    let bias_of =
        |run: Option<&Run<'_>>| run.zip(op.bias.as_ref()).map(|(run, bias)| (&bias[run.piece], run.first));
    let (gate_bias, up_bias) = (bias_of(Some(gate)), bias_of(up));
    let (bias, bias_at, bias_format) = recorder.optional(gate_bias.map(|(bias, _)| bias));
    let (up_bias_slot, up_bias_at, _) = recorder.optional(up_bias.map(|(bias, _)| bias));
    let wide = cols.is_multiple_of(8) && [&x, &norm, &weight, &up_weight].iter().all(|slot| slot.is_wide());
    let params = [
        p.n_rows,
        p.in_features,
        p.out_features,
        p.eps.to_bits(),
        first as u32,
        rows as u32,
        out.at(4),
        x.at(4),
        gathered.at(4),
        norm_at,
        weight.at(element),
        up_weight.at(element),
        bias_at + gate_bias.map_or(0, |(_, first)| first as u32),
        up_bias_at + up_bias.map_or(0, |(_, first)| first as u32),
    ];
    let mut constants = vec![
        ("FORMAT", format_code(gate.weight.format)),
        ("NORM", norm_format),
        ("BIAS", bias_format),
        ("GLU", up.is_some() as u32),
        ("GATHER", op.rows.is_some() as u32),
        ("ACCUMULATE", p.accumulate),
    ];
    // A team computes so many outputs of a row that four rows of weights are read at a time, or two for a single row.
    let teams = recorder.gpu.max_teams(THREADS);
    let per_glu = if up.is_some() { 2 } else { 1 };
    let (kernel, workgroups) = match n {
        1 if wide => {
            let outputs = teams * 2 / per_glu;
            constants.extend([("WORKGROUP", THREADS), ("OUTPUTS", outputs)]);
            (&MATMUL_GEMV, recorder.grid(rows.div_ceil(outputs as usize)))
        }
        2..=FEW_ROWS if wide => {
            let outputs = teams * 4 / per_glu;
            let quads = p.n_rows.div_ceil(4).next_power_of_two();
            constants.extend([("WORKGROUP", THREADS), ("OUTPUTS", outputs), ("QUADS", quads)]);
            (&MATMUL_FEW, recorder.grid(rows.div_ceil(outputs as usize)))
        }
        _ => {
            constants.extend([("WIDE", wide as u32), ("TILE", TILE)]);
            (&MATMUL_TILED, [(rows as u32).div_ceil(TILE), p.n_rows.div_ceil(TILE), 1])
        }
    };
    let slots = vec![out, x, gathered, norm, weight, up_weight, bias, up_bias_slot];
    recorder.call(Call { kernel, constants, slots, chunks: &[], params: &params, workgroups });
}
