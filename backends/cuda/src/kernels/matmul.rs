//! Launches of [`MatMul`]: a kernel that reads the weight once for up to 16 rows, tiles for more, on tensor cores where
//! precision and format allow it. A weight in pieces is a launch a piece.

use freetoken_backend::{Activation, Format, MatMul, MatMulParams, Precision, View, Weight};

use super::{MAX_DECODE_ROWS, Scratch, by_format, format, is_aligned, launch, optional, params};
use crate::launch::{Arg, Launch, Unsupported};

/// Rows of an f32 tile, and its columns without a GLU.
const TILE: u32 = 64;
/// Columns of a tensor-core tile without a GLU.
const MMA_COLUMNS: u32 = 128;
/// Up to how many rows tensor-core tiles have 64 rows and not 128.
const MMA_SMALL_ROWS: u32 = 512;
/// Elements of a row of the weight in one stage of a tensor-core tile, and stages.
const MMA_STAGE: u32 = 32 * 4;

/// Part of the weight that one launch multiplies.
struct Part<'a> {
    /// Its place among the columns of `out`.
    start: usize,
    n_columns: u32,
    weight: View,
    /// The second half of a GLU.
    up: Option<View>,
    bias: Option<&'a Weight>,
    up_bias: Option<View>,
}

pub(super) fn launches(op: &MatMul, precision: Precision) -> Result<(Vec<Launch>, usize), Unsupported> {
    if op.weight.format().group().is_some() {
        return Err(Unsupported(format!("its weight is {}; f32, bf16 and f16 run", op.weight.format())));
    }
    let parts = parts(op)?;
    if op.p.n_rows <= MAX_DECODE_ROWS {
        return Ok((parts.iter().map(|part| gemv(op, part)).collect(), 0));
    }
    let mut scratch = Scratch::default();
    let weight_format = op.weight.format();
    let mma = precision == Precision::Auto
        && weight_format == Format::Bf16
        && op.p.in_features.is_multiple_of(8)
        && parts.iter().all(|part| is_aligned(&part.weight) && part.up.as_ref().is_none_or(is_aligned));
    let values = op.p.n_rows as usize * op.p.in_features as usize;
    let mut launches = Vec::new();
    let x = if mma {
        let x = scratch.place(2 * values);
        launches.push(prepare("prepare_bf16", op, x.clone()));
        x
    } else if op.norm.is_some() || op.rows.is_some() {
        let x = scratch.place(4 * values);
        launches.push(prepare("prepare_f32", op, x.clone()));
        x
    } else {
        Arg::View(op.x.clone())
    };
    let tiles = if mma { mma_tiles } else { f32_tiles };
    launches.extend(parts.iter().map(|part| tiles(op, part, x.clone())));
    Ok((launches, scratch.bytes))
}

fn parts(op: &MatMul) -> Result<Vec<Part<'_>>, Unsupported> {
    let pieces = op.weight.pieces();
    let bias = |i: usize| op.bias.as_ref().map(|bias| &bias[i]);
    if !op.is_glu() {
        let mut start = 0;
        let part = |(i, piece): (usize, &Weight)| {
            let (weight, n_columns) = (piece.view.clone(), piece.rows as u32);
            let part = Part { start, n_columns, weight, up: None, bias: bias(i), up_bias: None };
            start += piece.rows;
            part
        };
        return Ok(pieces.iter().enumerate().map(part).collect());
    }
    let n = op.p.out_features as usize;
    let (weight, up, up_bias) = match pieces {
        [both] => {
            let half = |view: &View, bytes: usize| view.slice(bytes..2 * bytes);
            let up_bias = bias(0).map(|b| half(&b.view, b.format.row_bytes(n)));
            (both.view.clone(), half(&both.view, n * both.format.row_bytes(both.cols)), up_bias)
        }
        [gate, up] if gate.rows == up.rows => {
            if bias(0).map(|b| b.format) != bias(1).map(|b| b.format) {
                return Err(Unsupported("the biases of gate and up differ in format".into()));
            }
            (gate.view.clone(), up.view.clone(), bias(1).map(|b| b.view.clone()))
        }
        _ => return Err(Unsupported("a GLU whose weight is neither one piece nor gate and up".into())),
    };
    Ok(vec![Part { start: 0, n_columns: n as u32, weight, up: Some(up), bias: bias(0), up_bias }])
}

/// `out` from the part's first column on.
fn out(op: &MatMul, part: &Part<'_>) -> Arg {
    Arg::View(op.out.slice(4 * part.start..op.out.bytes()))
}

fn view_or_null(view: Option<&View>) -> Arg {
    view.map_or(Arg::Null, |view| Arg::View(view.clone()))
}

fn gemv(op: &MatMul, part: &Part<'_>) -> Launch {
    let p = &op.p;
    let (norm, norm_format) = optional(op.norm.as_ref());
    let (bias, bias_format) = optional(part.bias);
    let mut args = vec![
        params(bytemuck::bytes_of(p)),
        out(op, part),
        Arg::View(op.x.clone()),
        view_or_null(op.rows.as_ref()),
        norm,
        Arg::View(part.weight.clone()),
        view_or_null(part.up.as_ref()),
        bias,
        view_or_null(part.up_bias.as_ref()),
        Arg::U32(part.n_columns),
        norm_format,
        bias_format,
    ];
    let weight_format = op.weight.format();
    let vectors = p.in_features.is_multiple_of(8)
        && op.norm.as_ref().is_none_or(|norm| norm.format != Format::F16)
        && [Some(&op.x), Some(&part.weight), part.up.as_ref(), op.norm.as_ref().map(|norm| &norm.view)]
            .into_iter()
            .flatten()
            .all(is_aligned);
    let kernel = gemv_kernel(p.n_rows, op.norm.is_some(), weight_format).filter(|_| vectors);
    let Some(Gemv { kernel, warps, rows_per_block }) = kernel else {
        args.push(format(weight_format));
        return launch("matmul_gemv_any", [part.n_columns.div_ceil(4), p.n_rows, 1], 128, args);
    };
    let columns = if op.is_glu() { rows_per_block / 2 } else { rows_per_block };
    launch(kernel, [part.n_columns.div_ceil(columns), 1, 1], 32 * warps, args)
}

/// A kernel for few rows of `x`.
struct Gemv {
    kernel: &'static str,
    /// Warps of a block.
    warps: u32,
    /// Rows of the weight that a block takes.
    rows_per_block: u32,
}

/// The kernel for whole vectors of 16 bytes; `None` where only the one for any width is left.
fn gemv_kernel(n_rows: u32, norm: bool, of: Format) -> Option<Gemv> {
    macro_rules! kernel {
        ($format:literal, $n:literal) => {
            if norm {
                concat!("matmul_gemv_norm_", $format, "_n", $n)
            } else {
                concat!("matmul_gemv_", $format, "_n", $n)
            }
        };
    }
    let (kernel, warps, rows_per_block) = match (of, n_rows) {
        (Format::F32, 0..=1) => (kernel!("f32", 1), 4, 8),
        (Format::F32, _) => (kernel!("f32", 16), 4, 16),
        (Format::F16, 0..=1) => (kernel!("f16", 1), 4, 8),
        (Format::F16, _) => return None,
        (Format::Bf16, 0..=1) => (kernel!("bf16", 1), 4, 8),
        (Format::Bf16, 2) => (kernel!("bf16", 2), 4, 8),
        (Format::Bf16, 3..=4) => (kernel!("bf16", 4), 4, 16),
        (Format::Bf16, 5..=8) => (kernel!("bf16", 8), 8, 32),
        (Format::Bf16, _) => (kernel!("bf16", 16), 8, 32),
        (Format::Fp8 | Format::Nvfp4 | Format::Mxfp4, _) => return None,
    };
    Some(Gemv { kernel, warps, rows_per_block })
}

/// Gathers, norms and rounds the rows of `x`.
fn prepare(kernel: &'static str, op: &MatMul, to: Arg) -> Launch {
    let (norm, norm_format) = optional(op.norm.as_ref());
    let args = vec![
        to,
        Arg::View(op.x.clone()),
        view_or_null(op.rows.as_ref()),
        norm,
        norm_format,
        Arg::U32(op.p.in_features),
        Arg::U32(op.p.eps.to_bits()),
    ];
    launch(kernel, [op.p.n_rows, 1, 1], 256, args)
}

fn tile_args(op: &MatMul, part: &Part<'_>, x: Arg) -> Vec<Arg> {
    let (bias, bias_format) = optional(part.bias);
    vec![
        params(bytemuck::bytes_of(&op.p)),
        out(op, part),
        x,
        Arg::View(part.weight.clone()),
        view_or_null(part.up.as_ref()),
        bias,
        view_or_null(part.up_bias.as_ref()),
        Arg::U32(part.n_columns),
        bias_format,
    ]
}

fn f32_tiles(op: &MatMul, part: &Part<'_>, x: Arg) -> Launch {
    let (names, columns) = if op.is_glu() {
        (["matmul_tile_glu_f32", "matmul_tile_glu_bf16", "matmul_tile_glu_f16"], TILE / 2)
    } else {
        (["matmul_tile_f32", "matmul_tile_bf16", "matmul_tile_f16"], TILE)
    };
    let grid = [op.p.n_rows.div_ceil(TILE), part.n_columns.div_ceil(columns), 1];
    launch(by_format(op.weight.format(), names), grid, 256, tile_args(op, part, x))
}

fn mma_tiles(op: &MatMul, part: &Part<'_>, x: Arg) -> Launch {
    let rows = mma_rows(op.p.n_rows);
    let (kernel, columns) = match (op.is_glu(), rows) {
        (false, 64) => ("matmul_mma_64", MMA_COLUMNS),
        (false, _) => ("matmul_mma_128", MMA_COLUMNS),
        (true, 64) => ("matmul_mma_glu_64", MMA_COLUMNS / 2),
        (true, _) => ("matmul_mma_glu_128", MMA_COLUMNS / 2),
    };
    let grid = [op.p.n_rows.div_ceil(rows), part.n_columns.div_ceil(columns), 1];
    Launch { shared_bytes: mma_shared_bytes(rows), ..launch(kernel, grid, 256, tile_args(op, part, x)) }
}

/// Rows of a tensor-core tile.
fn mma_rows(n_rows: u32) -> u32 {
    if n_rows <= MMA_SMALL_ROWS { 64 } else { 128 }
}

/// Shared memory of a tensor-core tile of so many rows.
pub(super) fn mma_shared_bytes(rows: u32) -> u32 {
    (rows + MMA_COLUMNS) * MMA_STAGE * 2
}

/// `out = weight . x` in f32 tiles, for rows that need no more than that.
pub(super) fn plain_tiles(n_rows: u32, x: Arg, weight: &Weight, out: Arg) -> Launch {
    let p = MatMulParams {
        n_rows,
        in_features: weight.cols as u32,
        out_features: weight.rows as u32,
        activation: Activation::None as u32,
        accumulate: 0,
        eps: 0.0,
    };
    let args = vec![
        params(bytemuck::bytes_of(&p)),
        out,
        x,
        Arg::View(weight.view.clone()),
        Arg::Null,
        Arg::Null,
        Arg::Null,
        Arg::U32(p.out_features),
        Arg::U32(0),
    ];
    let names = ["matmul_tile_f32", "matmul_tile_bf16", "matmul_tile_f16"];
    let grid = [n_rows.div_ceil(TILE), p.out_features.div_ceil(TILE), 1];
    launch(by_format(weight.format, names), grid, 256, args)
}
