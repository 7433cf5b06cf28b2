//! See [`freetoken_backend::ExpertMlp`]: gate and up, then down, through each window of chunks. How routes are walked through
//! depends on how many of them an expert has.

use freetoken_backend::{Banks, Combine, ExpertMlp, ExpertPool, Experts, Format, View};

use super::{
    half_rows::{self, Rows},
    matmul::{COOPERATIVE_TILE, FEW_ROWS, THREADS, TILE, sharing_threads, wide_cols},
    pool_only,
    route::MAX_EXPERTS,
};
use crate::{
    device::Gpu,
    dispatch::{Call, Recorder, format_code},
    kernels::{
        EXPERT_MLP_COMBINE, EXPERT_MLP_COOPERATIVE, EXPERT_MLP_FEW, EXPERT_MLP_GROUP, EXPERT_MLP_TILED,
        Kernel,
    },
    memory::Slot,
    places::{Bank, Places},
};

/// Routes whose ids every workgroup can search for those of its expert.
const SEARCHED_ROUTES: u32 = 256;
/// Routes of an expert, on the average, up to which weights are read once for every two.
const FEW_ROUTES: u32 = 8;
/// Routes of a tile in that case.
const FEW_TILE: u32 = 16;

/// Rows up to which down combines: of more, weights are better read once for all of them.
const COMBINED_ROWS: u32 = 1;
/// Outputs of a workgroup then.
const COMBINED_OUTPUTS: u32 = 4;

/// What the device lacks for it.
pub(super) fn supports(op: &ExpertMlp, gpu: &Gpu) -> Result<(), String> {
    pool_only(&op.experts)?;
    let Experts::Pool { pool, layer } = &op.experts else { return Ok(()) };
    if op.p.in_place > 0 {
        Bank::of_pool(pool, *layer, gpu)?;
    }
    let largest = pool.chunks.iter().map(|chunk| chunk.bytes()).max().unwrap_or(0);
    if largest > gpu.max_binding() {
        return Err(format!(
            "a chunk has {largest} bytes, and the device binds at most {}",
            gpu.max_binding()
        ));
    }
    let inner = 4 * op.p.n_rows as usize * op.p.top_k as usize * op.p.intermediate as usize;
    if inner > gpu.max_binding() {
        return Err(format!(
            "{inner} bytes between gate and down, and the device binds at most {}",
            gpu.max_binding()
        ));
    }
    if op.p.n_experts as usize > MAX_EXPERTS {
        return Err(format!("{} experts; it sorts routes among {MAX_EXPERTS} at most", op.p.n_experts));
    }
    Ok(())
}

pub(super) fn record(op: &ExpertMlp, recorder: &mut Recorder<'_>) {
    let Experts::Pool { pool, layer } = &op.experts else { unreachable!("refused by `supports`") };
    let mut places = Places::of_pool(pool, *layer, recorder);
    if op.p.in_place > 0 {
        places.banked = -1;
        places.bank = Bank::of_pool(pool, *layer, recorder.gpu).expect("refused by `supports`");
    }
    record_at(op, pool, &places, recorder);
}

/// Computes the routes whose expert lies in `places`, and leaves the others alone.
pub(crate) fn record_at(op: &ExpertMlp, pool: &ExpertPool, places: &Places, recorder: &mut Recorder<'_>) {
    let inner = inner(op, recorder);
    let mut halves = [Half::gate_up(op, pool, &inner, recorder), Half::down(op, pool, &inner, recorder)];
    let walk = Walk::choose(op, pool.record.format, halves.iter().all(Half::is_wide), recorder);
    for half in &mut halves {
        if std::ptr::eq(walk.kernel, &EXPERT_MLP_COOPERATIVE) {
            half.make_rows(op, recorder);
        }
        windows(half, op, pool, places, &walk, recorder);
    }
}

/// Whether down and `combine`, which comes directly behind, are one dispatch: where every expert has a slot that one dispatch binds, a row
/// of x takes nothing but what the routes give, and weights have no scales.
pub(super) fn combines(op: &ExpertMlp, combine: &Combine, gpu: &Gpu) -> bool {
    let Experts::Pool { pool, .. } = &op.experts else { return false };
    let same = |a: &View, b: &View| a.buffer().same(b.buffer()) && a.range() == b.range();
    let (p, q) = (&op.p, &combine.p);
    op.p.n_rows <= COMBINED_ROWS
        && (p.n_rows, p.top_k, p.hidden) == (q.n_rows, q.top_k, q.hidden)
        && same(&op.parts, &combine.parts)
        && same(&op.ids, &combine.ids)
        && combine.shared.is_none()
        && !op.experts.is_cached()
        && pool.chunks.len() <= gpu.max_window()
        && pool.record.format.group().is_none()
        && p.intermediate.is_multiple_of(wide_cols(pool.record.format))
}

/// The op and the [`Combine`] that takes its `parts`, which are not written. See [`combines`].
pub(super) fn record_combined(op: &ExpertMlp, combine: &Combine, recorder: &mut Recorder<'_>) {
    let Experts::Pool { pool, layer } = &op.experts else { unreachable!("seen by `combines`") };
    let places = Places::of_pool(pool, *layer, recorder);
    let inner = inner(op, recorder);
    let gate_up = Half::gate_up(op, pool, &inner, recorder);
    let walk = Walk::choose(op, pool.record.format, gate_up.is_wide(), recorder);
    windows(&gate_up, op, pool, &places, &walk, recorder);
    let out = recorder.words(&combine.x, (op.p.n_rows * op.p.hidden) as usize);
    let down = Half { out, ..Half::down(op, pool, &inner, recorder) };
    windows(&down, op, pool, &places, &Walk::combined(op, recorder), recorder);
}

/// What gate and up leave for down.
fn inner(op: &ExpertMlp, recorder: &mut Recorder<'_>) -> wgpu::Buffer {
    let bytes = (op.p.n_rows * op.p.top_k) as usize * op.p.intermediate as usize * 4;
    recorder.scratch.get(recorder.gpu, "expert_mlp.inner", bytes)
}

/// How a kernel of few routes comes by them: `WALK` of expert_mlp_few.wgsl.
const ALONE: u32 = 0;
const SEARCHED: u32 = 1;
const SORTED: u32 = 2;

/// How a kernel comes by its routes.
struct Walk {
    kernel: &'static Kernel,
    /// Of gate and up, and of down.
    constants: [Vec<(&'static str, u32)>; 2],
    /// Ids, or routes sorted by expert in tiles.
    routes: Slot,
    /// Where ids begin, or the number of tiles that there is room for.
    routes_at: u32,
    /// Routes or tiles: workgroups a block of outputs.
    n: u32,
    /// Outputs of a workgroup: of gate and up, and of down.
    outputs: [u32; 2],
}

impl Walk {
    fn choose(op: &ExpertMlp, format: Format, wide: bool, recorder: &mut Recorder<'_>) -> Self {
        let n_routes = op.p.n_rows * op.p.top_k;
        let ids = recorder.words(&op.ids, n_routes as usize);
        let few = |walk: u32, routes: Slot, routes_at: u32, n: u32| {
            // Rows of down are short.
            let split = walk == ALONE && format.group().is_none() && recorder.gpu.is_parallel;
            let shared = if split { sharing_threads(op.p.hidden) } else { THREADS };
            let teams = recorder.gpu.max_teams(THREADS);
            let constants = |down, threads, split| {
                vec![("DOWN", down), ("WORKGROUP", threads), ("WALK", walk), ("SPLIT", split as u32)]
            };
            Walk {
                kernel: &EXPERT_MLP_FEW,
                constants: [constants(0, shared, split), constants(1, THREADS, false)],
                routes,
                routes_at,
                n,
                outputs: [if split { 2 } else { 2 * teams }, 4 * teams],
            }
        };
        if wide && op.p.n_rows == 1 {
            return few(ALONE, ids.clone(), ids.at(4), n_routes);
        }
        if wide && op.p.n_rows as usize <= FEW_ROWS && n_routes <= SEARCHED_ROUTES {
            return few(SEARCHED, ids.clone(), ids.at(4), n_routes);
        }
        if wide && n_routes <= FEW_ROUTES * op.p.n_experts {
            let (routes, n) = group(op, &ids, FEW_TILE, recorder);
            return few(SORTED, routes, n, n);
        }
        if wide && recorder.gpu.takes_halves(format) {
            let [down, across] = COOPERATIVE_TILE;
            let (routes, n) = group(op, &ids, down, recorder);
            return Walk {
                kernel: &EXPERT_MLP_COOPERATIVE,
                constants: [0, 1].map(|down| vec![("DOWN", down)]),
                routes,
                routes_at: n,
                n,
                outputs: [across / 2, across],
            };
        }
        let (routes, n) = group(op, &ids, TILE, recorder);
        Walk {
            kernel: &EXPERT_MLP_TILED,
            constants: [0, 1].map(|down| vec![("DOWN", down), ("WIDE", wide as u32)]),
            routes,
            routes_at: n,
            n,
            outputs: [TILE, 2 * TILE],
        }
    }

    /// Of down that combines: a team takes a route of a row.
    fn combined(op: &ExpertMlp, recorder: &Recorder<'_>) -> Self {
        let ids = recorder.words(&op.ids, (op.p.n_rows * op.p.top_k) as usize);
        let lanes = recorder.gpu.subgroups.unwrap_or(32);
        let threads = (lanes * op.p.top_k).next_power_of_two().clamp(64, 256);
        Walk {
            kernel: &EXPERT_MLP_COMBINE,
            constants: [(); 2].map(|()| vec![("WORKGROUP", threads), ("TOP_K", op.p.top_k)]),
            routes_at: ids.at(4),
            routes: ids,
            n: op.p.n_rows,
            outputs: [COMBINED_OUTPUTS; 2],
        }
    }
}

/// Sorts routes by expert into tiles; the routes, and how many tiles there can be.
fn group(op: &ExpertMlp, ids: &Slot, tile: u32, recorder: &mut Recorder<'_>) -> (Slot, u32) {
    let n_routes = op.p.n_rows * op.p.top_k;
    let max_tiles = n_routes.div_ceil(tile) + op.p.n_experts.min(n_routes);
    let bytes = 4 * (1 + 3 * max_tiles + n_routes) as usize;
    let routes = Slot::whole(&recorder.scratch.get(recorder.gpu, "expert_mlp.routes", bytes));
    recorder.call(Call {
        kernel: &EXPERT_MLP_GROUP,
        constants: vec![("EXPERTS", op.p.n_experts), ("TILE", tile)],
        slots: vec![routes.clone(), ids.clone()],
        chunks: &[],
        params: &[n_routes, max_tiles, ids.at(4)],
        workgroups: [1, 1, 1],
    });
    (routes, max_tiles)
}

/// Gate and up, or down.
struct Half {
    down: bool,
    out: Slot,
    x: Slot,
    /// What rows are multiplied with: of routes, or of what the halves of x lack.
    weights: Slot,
    in_features: u32,
    out_features: u32,
    /// See [`wide_cols`].
    wide_cols: u32,
    /// Of gate or down, from the start of a record: codes in elements, scales in bytes, globals in words.
    starts: [u32; 3],
    /// Rows from a gate row to its up row.
    to_up: u32,
}

impl Half {
    fn gate_up(op: &ExpertMlp, pool: &ExpertPool, inner: &wgpu::Buffer, recorder: &Recorder<'_>) -> Self {
        Half {
            down: false,
            out: Slot::whole(inner),
            x: recorder.words(&op.x, (op.p.n_rows * op.p.hidden) as usize),
            weights: recorder.words(&op.weights, (op.p.n_rows * op.p.top_k) as usize),
            in_features: op.p.hidden,
            out_features: op.p.intermediate,
            wide_cols: wide_cols(pool.record.format),
            starts: starts(&pool.record.gate_up, pool.record.format),
            to_up: op.p.intermediate,
        }
    }

    fn down(op: &ExpertMlp, pool: &ExpertPool, inner: &wgpu::Buffer, recorder: &Recorder<'_>) -> Self {
        Half {
            down: true,
            out: recorder.words(&op.parts, (op.p.n_rows * op.p.top_k * op.p.hidden) as usize),
            x: Slot::whole(inner),
            weights: recorder.words(&op.weights, (op.p.n_rows * op.p.top_k) as usize),
            in_features: op.p.intermediate,
            out_features: op.p.hidden,
            wide_cols: wide_cols(pool.record.format),
            starts: starts(&pool.record.down, pool.record.format),
            to_up: 0,
        }
    }

    /// Takes x as halves from here on. Of down, the weights of routes go with them.
    fn make_rows(&mut self, op: &ExpertMlp, recorder: &mut Recorder<'_>) {
        let rows = Rows {
            n: op.p.n_rows * if self.down { op.p.top_k } else { 1 },
            cols: self.in_features,
            x: &self.x,
            gathered: None,
            norm: None,
            eps: 0.0,
            weights: self.down.then_some(&self.weights),
        };
        let made = half_rows::record(&rows, recorder);
        (self.x, self.weights) = (made.halves, made.scales);
    }

    fn is_wide(&self) -> bool {
        self.in_features.is_multiple_of(self.wide_cols) && self.x.is_wide()
    }
}

/// Where a matrix begins: element of codes, byte of scales, word of globals.
fn starts(banks: &Banks, format: Format) -> [u32; 3] {
    // Codes take a whole number of bytes for 32 elements, and banks start at a multiple of those.
    let element = banks.codes.start / format.row_bytes(32) * 32;
    [element, banks.scales.start, banks.globals.start / 4].map(|at| at as u32)
}

/// Dispatches one half for each window of chunks: those of the pool, then those of the bank.
fn windows(
    half: &Half,
    op: &ExpertMlp,
    pool: &ExpertPool,
    places: &Places,
    walk: &Walk,
    recorder: &mut Recorder<'_>,
) {
    let n_routes = op.p.n_rows * op.p.top_k;
    let all: Vec<&Slot> = places.chunks.iter().chain(&places.bank.windows).collect();
    let window = all.len().next_power_of_two().min(recorder.gpu.max_window());
    let outputs = walk.outputs[half.down as usize];
    let own = [("FORMAT", format_code(pool.record.format)), ("OUTPUTS", outputs)];
    let constants = [&walk.constants[half.down as usize][..], &own].concat();
    let n_pooled = places.chunks.len();
    // The slots, or the experts in the bank, that lie in the first `n` chunks.
    let slots = |n: usize| (n.min(n_pooled) * places.slots_per_chunk) as u32;
    let banked = |n: usize| (n.saturating_sub(n_pooled) * places.bank.per_window) as u32;
    for (i, chunks) in all.chunks(window).enumerate() {
        let mut bound: Vec<Slot> = chunks.iter().copied().cloned().collect();
        bound.resize(window, bound[0].clone());
        let (first, end) = (i * window, i * window + chunks.len());
        let params = [
            n_routes,
            op.p.top_k,
            half.in_features,
            half.out_features,
            places.first_entry,
            places.slots_per_chunk.max(1) as u32,
            slots(first),
            slots(end) - slots(first),
            places.banked as u32,
            places.bank.per_window.max(1) as u32,
            banked(first),
            banked(end) - banked(first),
            (pool.record.bytes / 16) as u32,
            half.starts[0],
            half.starts[1],
            half.starts[2],
            half.to_up,
            half.out.at(4),
            half.x.at(4),
            walk.routes_at,
            half.weights.at(4),
            places.table.at(4),
        ];
        let read = [&half.x, &walk.routes, &half.weights, &places.table];
        recorder.call(Call {
            kernel: walk.kernel,
            constants: constants.clone(),
            slots: [&half.out].into_iter().chain(read).cloned().collect(),
            chunks: &bound,
            params: &params,
            workgroups: [half.out_features.div_ceil(outputs), walk.n, 1],
        });
    }
}
