//! See [`freetoken_backend::MatMul`]: one row or a few read each weight once from memory, many are computed in tiles. A matrix in
//! several pieces, or larger than a binding, takes a dispatch for each run of rows that can be bound at once; then a GLU's up rows come
//! first.

use std::ops::Range;

use freetoken_backend::{Format, MatMul, Matrix, View, Weight};

use super::half_rows::{self, HalfRows, Rows};
use crate::{
    device::Gpu,
    dispatch::{Call, Recorder, format_code},
    kernels::{MATMUL_COOPERATIVE, MATMUL_FEW, MATMUL_GEMV, MATMUL_TILED},
    memory::{Slot, buffer},
};

/// Rows of a batch that are computed without tiles.
pub(super) const FEW_ROWS: usize = 16;
/// Rows of which each two meet a weight at a time: more are quicker in fours, however few columns a thread has of them then.
const PAIRED_ROWS: usize = 4;
/// Threads of a workgroup whose teams work apart.
pub(super) const THREADS: u32 = 128;
/// Outputs of a row below which a workgroup shares the columns of each four rows.
const FEW_OUTPUTS: usize = 8192;
/// Rows of x that a workgroup of tile.wgsl takes, and of the weight the fewest.
pub(super) const TILE: u32 = 64;
/// Workgroups of tiles that keep a large device busy.
const BUSY: u32 = 240;
/// Rows of x, and of weights, of a tile on cooperative matrices.
pub(super) const COOPERATIVE_TILE: [u32; 2] = [64, 128];

/// Threads of a workgroup that shares columns: each has two loads of a row, as far as the bounds allow.
pub(super) fn sharing_threads(cols: u32) -> u32 {
    (cols / 16).next_power_of_two().clamp(64, 256)
}

/// Rows of a matrix that one binding holds.
pub(super) fn window_rows(gpu: &Gpu, row_bytes: usize) -> usize {
    ((gpu.max_binding() - 2 * gpu.align() as usize) / row_bytes).max(1)
}

/// Rows of a matrix that one dispatch binds.
fn bound_rows(matrix: &Matrix, gpu: &Gpu) -> usize {
    let (format, cols) = (matrix.format(), matrix.cols());
    let banks = [format.row_bytes(cols), format.scale_row_bytes(cols), format.global_row_bytes()];
    window_rows(gpu, banks.into_iter().max().unwrap_or(1))
}

/// Columns of a row are a multiple of this where rows are wide, as rows.wgsl says.
pub(super) fn wide_cols(format: Format) -> u32 {
    match format {
        Format::F32 | Format::Bf16 | Format::F16 => 8,
        Format::Fp8 => 16,
        Format::Nvfp4 | Format::Mxfp4 => 32,
    }
}

/// How gate and up meet: `GLU` of matmul.wgsl.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Glu {
    /// No GLU, or the up rows of one.
    None = 0,
    /// In one dispatch.
    Together = 1,
    /// The gate rows; up is in `out`.
    Apart = 2,
}

fn is_together(op: &MatMul, gpu: &Gpu) -> bool {
    op.weight.pieces().len() == 1 && op.weight.rows() <= bound_rows(&op.weight, gpu)
}

/// What the device lacks for it.
pub(super) fn supports(op: &MatMul, gpu: &Gpu) -> Result<(), String> {
    if op.is_glu() && op.p.accumulate == 1 && !is_together(op, gpu) {
        return Err("gate and up cannot be bound together, and their product would be added to `out`".into());
    }
    Ok(())
}

/// Rows of one piece of a matrix.
struct Run<'a> {
    piece: usize,
    weight: &'a Weight,
    /// Row of the piece.
    first: usize,
}

/// The run that starts at a row of the whole matrix.
fn run(matrix: &Matrix, row: usize) -> Run<'_> {
    let mut first = row;
    for (piece, weight) in matrix.pieces().iter().enumerate() {
        if first < weight.rows {
            return Run { piece, weight, first };
        }
        first -= weight.rows;
    }
    unreachable!("row {row} of a matrix of {}", matrix.rows())
}

impl Run<'_> {
    /// The first `rows` rows of a part of the weight.
    fn slot(&self, part: &View, row_bytes: usize, rows: usize, align: u32) -> Slot {
        let start = (part.range().start + self.first * row_bytes) as u64;
        Slot::part(buffer(part.buffer()), start, (rows * row_bytes) as u64, align)
    }
}

pub(super) fn record(op: &MatMul, recorder: &mut Recorder<'_>) {
    let outputs = op.p.out_features as usize;
    let halves = &mut None;
    if !op.is_glu() {
        windows(op, recorder, 0, Glu::None, halves);
    } else if is_together(op, recorder.gpu) {
        part(op, recorder, &run(&op.weight, 0), 0..outputs, Glu::Together, halves);
    } else {
        windows(op, recorder, outputs, Glu::None, halves);
        windows(op, recorder, 0, Glu::Apart, halves);
    }
}

/// All outputs, from the rows that begin at row `top`.
fn windows(op: &MatMul, recorder: &mut Recorder<'_>, top: usize, glu: Glu, halves: &mut Option<HalfRows>) {
    let outputs = op.p.out_features as usize;
    let (whole, most) = (recorder.work, bound_rows(&op.weight, recorder.gpu));
    let mut done = 0;
    while done < outputs {
        let run = run(&op.weight, top + done);
        let rows = (run.weight.rows - run.first).min(outputs - done).min(most);
        recorder.work = whole * rows as u64 / op.weight.rows() as u64;
        part(op, recorder, &run, done..done + rows, glu, halves);
        done += rows;
    }
    recorder.work = whole;
}

/// Some outputs, from the rows of a run. What cooperative matrices want of x is made for the first part that runs on them.
fn part(
    op: &MatMul,
    recorder: &mut Recorder<'_>,
    run: &Run<'_>,
    outputs: Range<usize>,
    glu: Glu,
    halves: &mut Option<HalfRows>,
) {
    let (p, weight) = (&op.p, run.weight);
    let (n, cols, align) = (p.n_rows as usize, p.in_features as usize, recorder.gpu.align());
    let to_up = if glu == Glu::Together { outputs.len() } else { 0 };
    let (format, rows) = (weight.format, outputs.len() + to_up);
    let out = recorder.words(&op.out, n * p.out_features as usize);
    // With `rows` the data decides which rows of x are read: all of the view is bound.
    let mut x =
        if op.rows.is_some() { recorder.slot(&op.x, op.x.bytes()) } else { recorder.words(&op.x, n * cols) };
    let mut gathered = op.rows.as_ref().map(|rows| recorder.words(rows, n));
    let (mut norm, mut norm_at, mut norm_format) = recorder.optional(op.norm.as_ref());
    let codes = run.slot(&weight.view, format.row_bytes(cols), rows, align);
    let other = |part: &Option<View>, row_bytes| match part {
        Some(part) => run.slot(part, row_bytes, rows, align),
        None => recorder.nothing(),
    };
    let scales = other(&weight.scales, format.scale_row_bytes(cols));
    let globals = other(&weight.globals, format.global_row_bytes());
    let (bias, bias_at, bias_format) = recorder.optional(op.bias.as_ref().map(|bias| &bias[run.piece]));
    // Codes of 32 elements take a whole number of bytes in every format.
    let codes_at = codes.at(1) as usize * 32 / format.row_bytes(32);
    let scales_at = scales.at(1);
    assert!(format != Format::Fp8 || scales_at.is_multiple_of(4), "f32 scales lie on words");
    let wide = p.in_features.is_multiple_of(wide_cols(format))
        && [&x, &norm, &codes].iter().all(|slot| slot.is_wide())
        && (format != Format::Nvfp4 || scales_at.is_multiple_of(2));
    let cooperative = wide && n > FEW_ROWS && recorder.gpu.takes_halves(format);
    if cooperative {
        let made = halves.get_or_insert_with(|| {
            let rows = Rows {
                n: p.n_rows,
                cols: p.in_features,
                x: &x,
                gathered: gathered.as_ref(),
                norm: op.norm.as_ref(),
                eps: p.eps,
                weights: None,
            };
            half_rows::record(&rows, recorder)
        });
        (x, gathered) = (made.halves.clone(), Some(made.scales.clone()));
        (norm, norm_at, norm_format) = recorder.optional(None);
    }
    let gather = (gathered.is_some() && !cooperative) as u32;
    let gathered = gathered.unwrap_or_else(|| recorder.nothing());
    let params = [
        p.n_rows,
        p.in_features,
        p.out_features,
        p.eps.to_bits(),
        outputs.start as u32,
        outputs.len() as u32,
        out.at(4),
        x.at(4),
        gathered.at(4),
        norm_at,
        codes_at as u32,
        scales_at,
        globals.at(4),
        bias_at + run.first as u32,
        to_up as u32,
    ];
    let mut constants = vec![
        ("FORMAT", format_code(format)),
        ("NORM", norm_format),
        ("BIAS", bias_format),
        ("GLU", glu as u32),
        ("GATHER", gather),
        ("ACCUMULATE", p.accumulate),
    ];
    // A team computes so many outputs of a row that four rows of weights are read at a time.
    let teams = recorder.gpu.max_teams(THREADS);
    let per_glu = if glu == Glu::Together { 2 } else { 1 };
    let rows = outputs.len();
    let (kernel, workgroups) = match n {
        1..=PAIRED_ROWS if wide => {
            let split = rows < FEW_OUTPUTS && format.group().is_none() && recorder.gpu.is_parallel;
            let outputs = if split { 4 } else { teams * 4 } / per_glu;
            let threads = if split { sharing_threads(p.in_features) } else { THREADS };
            let (split, many) = (split as u32, (n > 1) as u32);
            constants.extend([
                ("WORKGROUP", threads),
                ("OUTPUTS", outputs),
                ("SPLIT", split),
                ("MANY", many),
            ]);
            (&MATMUL_GEMV, recorder.grid(rows.div_ceil(outputs as usize)))
        }
        _ if wide && n <= FEW_ROWS => {
            let outputs = teams * 4 / per_glu;
            let quads = p.n_rows.div_ceil(4).next_power_of_two();
            constants.extend([("WORKGROUP", THREADS), ("OUTPUTS", outputs), ("QUADS", quads)]);
            (&MATMUL_FEW, recorder.grid(rows.div_ceil(outputs as usize)))
        }
        _ if cooperative => {
            let [down, across] = COOPERATIVE_TILE;
            (&MATMUL_COOPERATIVE, [(rows as u32).div_ceil(across / per_glu), p.n_rows.div_ceil(down), 1])
        }
        _ => {
            // A tile of twice as many outputs reads less, and has room for gate and up; but many cores want many tiles.
            let tiles = p.n_rows.div_ceil(TILE) * (rows as u32).div_ceil(2 * TILE);
            let is_long = glu != Glu::Together && recorder.gpu.is_parallel && tiles >= BUSY;
            let outputs = if is_long { 2 * TILE } else { TILE };
            constants.extend([("WIDE", wide as u32), ("OUTPUTS", outputs)]);
            (&MATMUL_TILED, [(rows as u32).div_ceil(outputs), p.n_rows.div_ceil(TILE), 1])
        }
    };
    let slots = vec![out, x, gathered, norm, codes, scales, globals, bias];
    recorder.call(Call { kernel, constants, slots, chunks: &[], params: &params, workgroups });
}
