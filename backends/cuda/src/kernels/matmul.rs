//! Launches of [`MatMul`]: a kernel that reads the weight once for up to 16 rows, tiles for more, on tensor cores where
//! precision and format allow it. A weight in pieces is a launch a piece.

use freetoken_backend::{Format, MatMul, Precision, View, Weight};

use super::{
    MAX_DECODE_ROWS, Scratch, by_format, decode_columns, format, is_aligned, launch, mma_columns, optional,
    params,
};
use crate::launch::{Arg, Launch, Unsupported};

/// Rows of an f32 tile, and its columns without a GLU.
const TILE: u32 = 64;
/// Kernels of f32 tiles by format.
const TILES: [&str; 4] = ["matmul_tile_f32", "matmul_tile_bf16", "matmul_tile_f16", "matmul_tile_scaled"];
const GLU_TILES: [&str; 4] =
    ["matmul_tile_glu_f32", "matmul_tile_glu_bf16", "matmul_tile_glu_f16", "matmul_tile_glu_scaled"];
/// Up to how many rows tiles on tensor cores are low.
const MMA_LOW_ROWS: u32 = 512;

/// A tile on tensor cores, as `tile_bf16.cuh` has it: rows of x, rows of the weight, of which a GLU has half for gate and half for up;
/// columns of both in a stage, and stages.
pub(super) struct MmaTile {
    pub(super) rows: u32,
    /// Rows that the last tile of an expert may have more.
    pub(super) more_rows: u32,
    weight_rows: u32,
    columns: u32,
    stages: u32,
}

pub(super) const LOW_TILE: MmaTile =
    MmaTile { rows: 64, more_rows: 0, weight_rows: 64, columns: 64, stages: 3 };
pub(super) const HIGH_TILE: MmaTile =
    MmaTile { rows: 128, more_rows: 0, weight_rows: 128, columns: 32, stages: 4 };
pub(super) const TALL_TILE: MmaTile = MmaTile { more_rows: 32, ..HIGH_TILE };

impl MmaTile {
    /// Blocks that so many columns of a result take.
    pub(super) fn blocks(&self, n_columns: u32, is_glu: bool) -> u32 {
        n_columns.div_ceil(if is_glu { self.weight_rows / 2 } else { self.weight_rows })
    }

    /// A launch of blocks that multiply such tiles, of a weight of this format.
    pub(super) fn launch(&self, kernel: &'static str, grid: [u32; 3], of: Format, args: Vec<Arg>) -> Launch {
        // Of a weight with scales, stages hold bytes, and there are two of 16-bit numbers.
        let weight_bytes = if of.group().is_some() { self.stages + 4 } else { 2 * self.stages };
        let x_rows = self.rows + self.more_rows;
        let shared_bytes = self.columns * (x_rows * 2 * self.stages + self.weight_rows * weight_bytes);
        Launch { shared_bytes, ..launch(kernel, grid, 128, args) }
    }
}

/// Part of the weight that one launch multiplies.
struct Part<'a> {
    /// Its place among the columns of `out`.
    start: usize,
    n_columns: u32,
    weight: Rows,
    /// The second half of a GLU.
    up: Option<Rows>,
    bias: Option<&'a Weight>,
    up_bias: Option<View>,
}

impl Part<'_> {
    fn is_aligned(&self) -> bool {
        self.weight.is_aligned() && self.up.as_ref().is_none_or(Rows::is_aligned)
    }
}

/// Rows of a weight: codes, and the scales and globals that its format has.
#[derive(Clone)]
struct Rows {
    codes: View,
    scales: Option<View>,
    globals: Option<View>,
}

impl Rows {
    fn of(weight: &Weight) -> Self {
        let Weight { view, scales, globals, .. } = weight;
        Rows { codes: view.clone(), scales: scales.clone(), globals: globals.clone() }
    }

    /// The lower half of a weight's rows.
    fn lower_half(weight: &Weight) -> Self {
        let half = |view: &View, bytes: usize| view.slice(bytes / 2..bytes);
        Rows {
            codes: half(&weight.view, weight.code_bytes()),
            scales: weight.scales.as_ref().map(|view| half(view, weight.scale_bytes())),
            globals: weight.globals.as_ref().map(|view| half(view, weight.global_bytes())),
        }
    }

    /// Whether codes can be loaded 16 bytes at a time and scales in pairs, rows being whole.
    fn is_aligned(&self) -> bool {
        is_aligned(&self.codes)
            && self.scales.as_ref().is_none_or(|view| view.range().start.is_multiple_of(2))
    }
}

pub(super) fn launches(op: &MatMul, precision: Precision) -> Result<(Vec<Launch>, usize), Unsupported> {
    let parts = parts(op)?;
    if op.p.n_rows <= MAX_DECODE_ROWS {
        return Ok((parts.iter().map(|part| gemv(op, part)).collect(), 0));
    }
    let mut scratch = Scratch::default();
    let weight_format = op.weight.format();
    let mma = precision == Precision::Auto
        && mma_columns(weight_format).is_some_and(|columns| op.p.in_features.is_multiple_of(columns))
        && parts.iter().all(Part::is_aligned);
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
            let (weight, n_columns) = (Rows::of(piece), piece.rows as u32);
            let part = Part { start, n_columns, weight, up: None, bias: bias(i), up_bias: None };
            start += piece.rows;
            part
        };
        return Ok(pieces.iter().enumerate().map(part).collect());
    }
    let n = op.p.out_features as usize;
    let (weight, up, up_bias) = match pieces {
        [both] => {
            let up_bias = bias(0).map(|b| b.view.slice(b.format.row_bytes(n)..2 * b.format.row_bytes(n)));
            (Rows::of(both), Rows::lower_half(both), up_bias)
        }
        [gate, up] if gate.rows == up.rows => {
            if bias(0).map(|b| b.format) != bias(1).map(|b| b.format) {
                return Err(Unsupported("the biases of gate and up differ in format".into()));
            }
            (Rows::of(gate), Rows::of(up), bias(1).map(|b| b.view.clone()))
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

/// What a launch is told of a weight that may have scales, behind its other arguments.
fn scale_args(part: &Part<'_>) -> [Arg; 4] {
    let up = part.up.as_ref();
    [
        view_or_null(part.weight.scales.as_ref()),
        view_or_null(up.and_then(|up| up.scales.as_ref())),
        view_or_null(part.weight.globals.as_ref()),
        view_or_null(up.and_then(|up| up.globals.as_ref())),
    ]
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
        Arg::View(part.weight.codes.clone()),
        view_or_null(part.up.as_ref().map(|up| &up.codes)),
        bias,
        view_or_null(part.up_bias.as_ref()),
        Arg::U32(part.n_columns),
        norm_format,
        bias_format,
    ];
    let weight_format = op.weight.format();
    let vectors = p.in_features.is_multiple_of(decode_columns(weight_format))
        && part.is_aligned()
        && is_aligned(&op.x)
        && op.norm.as_ref().is_none_or(|norm| norm.format != Format::F16 && is_aligned(&norm.view));
    let kernel = gemv_kernel(p.n_rows, op.norm.is_some(), weight_format).filter(|_| vectors);
    if kernel.is_none() || weight_format.group().is_some() {
        args.extend(scale_args(part));
    }
    let Some(Gemv { kernel, warps, rows_per_block }) = kernel else {
        args.push(format(weight_format));
        return launch("matmul_gemv_any", [part.n_columns.div_ceil(4), p.n_rows, 1], 128, args);
    };
    let columns = if op.is_glu() { rows_per_block / 2 } else { rows_per_block };
    launch(kernel, [part.n_columns.div_ceil(columns), 1, 1], 32 * warps, args).early()
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
        (Format::Fp8, 0..=2) => (kernel!("fp8", 2), 8, 16),
        (Format::Fp8, _) => (kernel!("fp8", 8), 4, 32),
        (Format::Nvfp4, 0..=2) => (kernel!("nvfp4", 2), 8, 16),
        (Format::Nvfp4, _) => (kernel!("nvfp4", 8), 4, 32),
        (Format::Mxfp4, 0..=2) => (kernel!("mxfp4", 2), 8, 16),
        (Format::Mxfp4, _) => (kernel!("mxfp4", 8), 4, 32),
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
    let mut args = vec![
        params(bytemuck::bytes_of(&op.p)),
        out(op, part),
        x,
        Arg::View(part.weight.codes.clone()),
        view_or_null(part.up.as_ref().map(|up| &up.codes)),
        bias,
        view_or_null(part.up_bias.as_ref()),
        Arg::U32(part.n_columns),
        bias_format,
    ];
    if op.weight.format().group().is_some() {
        args.extend(scale_args(part));
        args.push(format(op.weight.format()));
    }
    args
}

fn f32_tiles(op: &MatMul, part: &Part<'_>, x: Arg) -> Launch {
    let (names, columns) = if op.is_glu() { (GLU_TILES, TILE / 2) } else { (TILES, TILE) };
    let grid = [op.p.n_rows.div_ceil(TILE), part.n_columns.div_ceil(columns), 1];
    launch(by_format(op.weight.format(), names), grid, 256, tile_args(op, part, x))
}

fn mma_tiles(op: &MatMul, part: &Part<'_>, x: Arg) -> Launch {
    let tile = if op.p.n_rows <= MMA_LOW_ROWS { LOW_TILE } else { HIGH_TILE };
    let kernel = match (op.weight.format().group().is_some(), op.is_glu(), tile.rows) {
        (false, false, 64) => "matmul_mma_64",
        (false, false, _) => "matmul_mma_128",
        (false, true, 64) => "matmul_mma_glu_64",
        (false, true, _) => "matmul_mma_glu_128",
        (true, false, 64) => "matmul_mma_scaled_64",
        (true, false, _) => "matmul_mma_scaled_128",
        (true, true, 64) => "matmul_mma_scaled_glu_64",
        (true, true, _) => "matmul_mma_scaled_glu_128",
    };
    let grid = [op.p.n_rows.div_ceil(tile.rows), tile.blocks(part.n_columns, op.is_glu()), 1];
    tile.launch(kernel, grid, op.weight.format(), tile_args(op, part, x))
}
