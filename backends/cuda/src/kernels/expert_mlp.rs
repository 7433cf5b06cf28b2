//! Launches of [`ExpertMlp`]: two kernels that read each expert once for up to 16 rows; routes sorted by expert and grouped
//! tiles for more, on tensor cores where precision and format allow it.

use bytemuck::{Pod, Zeroable};
use freetoken_backend::{Banks, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Format, OpSpec, Precision};

use super::{
    MAX_DECODE_ROWS, Scratch, by_format, decode_columns, is_aligned, launch,
    matmul::{HIGH_TILE, LOW_TILE, MmaTile, TALL_TILE},
    mma_columns, number, params,
};
use crate::launch::{Arg, Launch, Unsupported};

/// Experts that one block can sort.
const MAX_SORTED_EXPERTS: u32 = 1024;
/// Warps of a decode block.
const WARPS: u32 = 4;
/// Rows of an f32 tile.
const TILE: u32 = 64;
/// Kernels of f32 tiles by format.
const GATE_UP_TILES: [&str; 4] = [
    "expert_tile_gate_up_f32",
    "expert_tile_gate_up_bf16",
    "expert_tile_gate_up_f16",
    "expert_tile_gate_up_scaled",
];
const DOWN_TILES: [&str; 4] =
    ["expert_tile_down_f32", "expert_tile_down_bf16", "expert_tile_down_f16", "expert_tile_down_scaled"];

/// `ExpertPlace` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct RecordPlace {
    format: u32,
    n_slots: u32,
    slots_per_chunk: u32,
    record_bytes: u32,
    gate: BankStarts,
    up: BankStarts,
    down: BankStarts,
}

/// Where the parts of a matrix start in a record.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct BankStarts {
    codes: u32,
    scales: u32,
    globals: u32,
}

impl From<Banks> for BankStarts {
    fn from(banks: Banks) -> Self {
        let [codes, scales, globals] =
            [banks.codes, banks.scales, banks.globals].map(|bank| bank.start as u32);
        BankStarts { codes, scales, globals }
    }
}

/// Where records are found.
struct Place {
    /// i32 `[n_experts]`: the slot of each expert, or -1.
    table: Arg,
    /// u64 `[n_chunks]`: device addresses of chunks.
    chunks: Arg,
}

pub(super) fn launches(op: &ExpertMlp, precision: Precision) -> Result<(Vec<Launch>, usize), Unsupported> {
    let Experts::Pool { pool, layer } = &op.experts else {
        return Err(Unsupported("experts in place need host memory".into()));
    };
    let place =
        Place { table: Arg::View(pool.table_row(*layer)), chunks: Arg::ChunkTable(pool.clone(), *layer) };
    let record = &pool.record;
    let p = &op.p;
    let head = vec![params(op.params()), record_place(pool)?];
    let are_multiples = |of: u32| p.hidden.is_multiple_of(of) && p.intermediate.is_multiple_of(of);
    if p.n_rows <= MAX_DECODE_ROWS {
        let vectors = are_multiples(decode_columns(record.format)) && is_aligned(&op.x);
        return Ok(decode(op, record.format, &place, head, vectors));
    }
    if p.n_experts > MAX_SORTED_EXPERTS {
        return Err(Unsupported(format!("{} experts; at most {MAX_SORTED_EXPERTS}", p.n_experts)));
    }
    let mma = precision == Precision::Auto
        && mma_columns(record.format).is_some_and(are_multiples)
        && is_aligned(&op.x)
        && is_aligned(&op.parts);
    Ok(prefill(op, record.format, &place, head, mma))
}

/// How kernels find the records of a pool and of the bank behind it.
pub(crate) fn record_place(pool: &ExpertPool) -> Result<Arg, Unsupported> {
    let record = &pool.record;
    let Ok(record_bytes) = u32::try_from(record.bytes) else {
        return Err(Unsupported(format!("an expert of {} bytes; at most 4 GiB", record.bytes)));
    };
    let place = RecordPlace {
        format: number(record.format),
        n_slots: pool.n_slots() as u32,
        // A pool without a slot has a bank all the same.
        slots_per_chunk: pool.slots_per_chunk.max(1) as u32,
        record_bytes,
        gate: record.gate().into(),
        up: record.up().into(),
        down: record.down.clone().into(),
    };
    Ok(params(bytemuck::bytes_of(&place)))
}

fn decode(
    op: &ExpertMlp,
    of: Format,
    place: &Place,
    mut args: Vec<Arg>,
    vectors: bool,
) -> (Vec<Launch>, usize) {
    let p = &op.p;
    let n_routes = p.n_rows * p.top_k;
    let mut scratch = Scratch::default();
    let inner = scratch.place(4 * n_routes as usize * p.intermediate as usize);
    args.extend([Arg::View(op.ids.clone()), place.table.clone(), place.chunks.clone()]);
    let mut up_args = args.clone();
    up_args.extend([inner.clone(), Arg::View(op.x.clone())]);
    let mut down_args = args;
    down_args.extend([Arg::View(op.parts.clone()), inner, Arg::View(op.weights.clone())]);
    if !vectors || (of == Format::F16 && p.n_rows > 1) {
        let grid = |columns: u32| [columns.div_ceil(WARPS), n_routes, 1];
        let launches = vec![
            launch("expert_gate_up_any", grid(p.intermediate), 32 * WARPS, up_args),
            launch("expert_down_any", grid(p.hidden), 32 * WARPS, down_args),
        ];
        return (launches, scratch.bytes);
    }
    let Decode { up, down, warps, rows } = decode_kernels(of, p);
    let launches = vec![
        launch(up, [p.intermediate.div_ceil(rows / 2), n_routes, 1], 32 * warps, up_args).early(),
        launch(down, [p.hidden.div_ceil(rows), n_routes, 1], 32 * warps, down_args).early(),
    ];
    (launches, scratch.bytes)
}

/// Kernels for few rows of `x`.
struct Decode {
    up: &'static str,
    down: &'static str,
    /// Warps of a block.
    warps: u32,
    /// Rows of weights that a block takes: of down, or half of them of gate and half of up.
    rows: u32,
}

fn decode_kernels(of: Format, p: &ExpertMlpParams) -> Decode {
    macro_rules! kernels {
        ($of:literal, $n:literal, $warps:literal, $rows:literal) => {
            Decode {
                up: concat!("expert_gate_up_", $of, "_n", $n),
                down: concat!("expert_down_", $of, "_n", $n),
                warps: $warps,
                rows: $rows,
            }
        };
    }
    // Kernels for BF16 take 1, 2 or 16 rows of an expert at a time, those for weights with scales 1, 2 or 8; the fewer, the more
    // loads are under way. Further rows read the expert again, out of a cache where it does not come over the link.
    let is_sparse = p.n_rows * p.top_k <= 2 * p.n_experts && (p.in_place == 0 || p.n_rows <= 2);
    match (of, p.n_rows) {
        (Format::F32, 0..=1) => kernels!("f32", 1, 4, 16),
        (Format::F32, _) => kernels!("f32", 16, 4, 16),
        (Format::Bf16, 0..=1) => kernels!("bf16", 1, 4, 16),
        (Format::Bf16, _) if is_sparse => kernels!("bf16", 2, 4, 16),
        (Format::Bf16, _) => kernels!("bf16", 16, 4, 16),
        (Format::F16, _) => kernels!("f16", 1, 4, 16),
        (Format::Fp8, 0..=1) => kernels!("fp8", 1, 4, 32),
        (Format::Fp8, _) if is_sparse => kernels!("fp8", 2, 2, 32),
        (Format::Fp8, _) => kernels!("fp8", 8, 4, 32),
        (Format::Nvfp4, 0..=1) => kernels!("nvfp4", 1, 4, 32),
        (Format::Nvfp4, _) if is_sparse => kernels!("nvfp4", 2, 2, 32),
        (Format::Nvfp4, _) => kernels!("nvfp4", 8, 4, 32),
        (Format::Mxfp4, 0..=1) => kernels!("mxfp4", 1, 4, 32),
        (Format::Mxfp4, _) if is_sparse => kernels!("mxfp4", 2, 2, 32),
        (Format::Mxfp4, _) => kernels!("mxfp4", 8, 4, 32),
    }
}

fn prefill(op: &ExpertMlp, of: Format, place: &Place, mut args: Vec<Arg>, mma: bool) -> (Vec<Launch>, usize) {
    let p = &op.p;
    let n_routes = p.n_rows * p.top_k;
    let tile = mma_tile(of, n_routes, p.n_experts);
    let (rows, more_rows) = if mma { (tile.rows, tile.more_rows) } else { (TILE, 0) };
    let max_tiles = n_routes / rows + n_routes.min(p.n_experts);
    let mut scratch = Scratch::default();
    let n_tiles = scratch.place(4);
    let tiles = scratch.place(16 * max_tiles as usize);
    let order = scratch.place(4 * n_routes as usize);
    let inner = scratch.place(if mma { 2 } else { 4 } * n_routes as usize * p.intermediate as usize);
    let sort = vec![
        args[0].clone(),
        args[1].clone(),
        n_tiles.clone(),
        tiles.clone(),
        order.clone(),
        Arg::View(op.ids.clone()),
        place.table.clone(),
        Arg::U32(rows),
        Arg::U32(more_rows),
    ];
    let mut launches = vec![launch("expert_sort", [1, 1, 1], 1024, sort)];
    let x = if mma {
        let x = scratch.place(2 * p.n_rows as usize * p.hidden as usize);
        let round = vec![
            x.clone(),
            Arg::View(op.x.clone()),
            Arg::Null,
            Arg::Null,
            Arg::U32(0),
            Arg::U32(p.hidden),
            Arg::U32(0),
        ];
        launches.push(launch("prepare_bf16", [p.n_rows, 1, 1], 256, round));
        x
    } else {
        Arg::View(op.x.clone())
    };
    args.extend([n_tiles, tiles, order, place.chunks.clone()]);
    let mut up_args = args.clone();
    up_args.extend([inner.clone(), x]);
    let mut down_args = args;
    down_args.extend([Arg::View(op.parts.clone()), inner, Arg::View(op.weights.clone())]);
    if mma {
        let (up, down) = match (of, rows) {
            (Format::Bf16, 64) => ("expert_mma_gate_up_64", "expert_mma_down_64"),
            (Format::Bf16, _) => ("expert_mma_gate_up_160", "expert_mma_down_160"),
            (_, 64) => ("expert_mma_gate_up_scaled_64", "expert_mma_down_scaled_64"),
            (_, _) => ("expert_mma_gate_up_scaled_128", "expert_mma_down_scaled_128"),
        };
        launches.push(tile.launch(up, [tile.blocks(p.intermediate, true), max_tiles, 1], of, up_args));
        launches.push(tile.launch(down, [tile.blocks(p.hidden, false), max_tiles, 1], of, down_args));
    } else {
        let (up, down) = (by_format(of, GATE_UP_TILES), by_format(of, DOWN_TILES));
        launches.push(launch(up, [max_tiles, p.intermediate.div_ceil(TILE / 2), 1], 256, up_args));
        launches.push(launch(down, [max_tiles, p.hidden.div_ceil(TILE), 1], 256, down_args));
    }
    (launches, scratch.bytes)
}

/// A tensor-core tile: low where most experts have few routes.
fn mma_tile(of: Format, n_routes: u32, n_experts: u32) -> MmaTile {
    match of {
        _ if n_routes / n_experts.max(1) <= 96 => LOW_TILE,
        Format::Bf16 => TALL_TILE,
        _ => HIGH_TILE,
    }
}
