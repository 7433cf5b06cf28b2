//! Route points: whatever the host answers, every route is computed once and lands in its own row. The answers are random,
//! and the expected rows are computed here, in f64, from the records themselves.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use half::bf16;

use super::{
    Failure,
    arena::{Rng, normalised_error},
    cases::{ExpertShape, expert_params, routes},
};
use crate::{
    Backend, Error, ExpertMlp, ExpertPool, ExpertRecord, Experts, Format, HostRows, Precision, Program,
    RouteAsk, RoutePoint, RouteReply, Stage, TableChange, View, record,
};

/// A step that breaks off must have ended by then.
const BREAK_OFF_LIMIT: Duration = Duration::from_secs(2);

/// Who may answer for a miss.
#[derive(Clone, Copy)]
struct Choices {
    fetch: bool,
    read_in_place: bool,
    host: bool,
}

pub(super) struct RouteCase {
    pub(super) name: String,
    shape: ExpertShape,
    n_slots: usize,
    choices: Choices,
}

pub(super) fn cases() -> Vec<RouteCase> {
    let choices = [
        ("fetch", Choices { fetch: true, read_in_place: false, host: false }),
        ("read in place", Choices { fetch: false, read_in_place: true, host: false }),
        ("host", Choices { fetch: false, read_in_place: false, host: true }),
        ("any", Choices { fetch: true, read_in_place: true, host: true }),
    ];
    let mut cases = Vec::new();
    for (name, choices) in choices {
        for (format, n, n_slots) in [(Format::Bf16, 1, 2), (Format::Bf16, 6, 10), (Format::F32, 3, 10)] {
            let (hidden, intermediate) = (64, 48);
            let shape = ExpertShape { format, pool: true, n, hidden, intermediate, top_k: 2, experts: 10 };
            cases.push(RouteCase {
                name: format!("route_point/{name} {format} n={n} slots={n_slots}"),
                shape,
                n_slots,
                choices,
            });
        }
    }
    cases
}

struct Rows(Vec<f32>);

impl HostRows for Rows {
    fn wait(&self) -> crate::Result<&[f32]> {
        Ok(&self.0)
    }
}

/// Slots as the host sees them: the equal mirror of the device's table.
struct Mirror {
    slot_of: Vec<i32>,
    owner: Vec<Option<u32>>,
    clock: usize,
}

impl Mirror {
    /// A slot that none of `needed` sits in, round robin.
    fn victim(&mut self, needed: &[u32]) -> Option<usize> {
        for _ in 0..self.owner.len() {
            self.clock = (self.clock + 1) % self.owner.len();
            if self.owner[self.clock].is_none_or(|e| !needed.contains(&e)) {
                return Some(self.clock);
            }
        }
        None
    }
}

/// Two layers that share a pool, and a program with a route point for each.
struct Layers<'a> {
    device: &'a dyn Backend,
    shape: ExpertShape,
    pool: Arc<ExpertPool>,
    program: Box<dyn Program>,
    x: View,
    ids: View,
    weights: View,
    mirror: Mirror,
    rng: Rng,
}

impl<'a> Layers<'a> {
    fn new(device: &'a dyn Backend, s: ExpertShape, n_slots: usize) -> crate::Result<Self> {
        let record = record(s.format, s.hidden, s.intermediate);
        let mut rng = Rng::new(77);
        let mut banks = Vec::new();
        for _ in 0..2 {
            let mut bank = device.alloc_host(s.experts * record.bytes)?;
            fill_bank(&mut rng, &record, bank.as_mut_slice());
            banks.push(Arc::new(bank));
        }
        let slots_per_chunk = 3.min(n_slots);
        let n_chunks = n_slots.div_ceil(slots_per_chunk);
        let mut chunks = Vec::new();
        for _ in 0..n_chunks {
            chunks.push(device.alloc(slots_per_chunk * record.bytes)?);
        }
        let table = device.alloc(2 * s.experts * 4)?.whole();
        device.write(&table, bytemuck::cast_slice(&vec![-1_i32; 2 * s.experts]))?;
        let pool =
            ExpertPool { record, n_layers: 2, n_experts: s.experts, chunks, slots_per_chunk, table, banks };
        let pool = Arc::new(pool);
        let n_routes = s.n * s.top_k;
        let (x, weights, ids) =
            (device.alloc(s.n * s.hidden * 4)?, device.alloc(n_routes * 4)?, device.alloc(n_routes * 4)?);
        let mut stages = Vec::new();
        let mut outputs = Vec::new();
        for layer in 0..2 {
            let mlp = ExpertMlp {
                parts: device.alloc(n_routes * s.hidden * 4)?.whole(),
                x: x.whole(),
                ids: ids.whole(),
                weights: weights.whole(),
                experts: Experts::Pool { pool: pool.clone(), layer },
                p: expert_params(s),
            };
            outputs.push(mlp.parts.clone());
            stages.push(Stage::Route(RoutePoint { mlp }));
        }
        let mirror = Mirror {
            slot_of: vec![-1; 2 * s.experts],
            owner: vec![None; n_chunks * slots_per_chunk],
            clock: 0,
        };
        Ok(Layers {
            program: device.record(&stages, &outputs)?,
            device,
            shape: s,
            pool,
            x: x.whole(),
            ids: ids.whole(),
            weights: weights.whole(),
            mirror,
            rng,
        })
    }

    /// One replay with other inputs and random answers; its error.
    fn replay(&mut self, round: usize, choices: Choices) -> Result<f64, Failure> {
        let s = self.shape;
        let mut floats = |n: usize| (0..n).map(|_| self.rng.symmetric(1.0)).collect::<Vec<f32>>();
        let (x, weights) = (floats(s.n * s.hidden), floats(s.n * s.top_k));
        let turned = |e: i32| if e < 0 { e } else { (e + round as i32) % s.experts as i32 };
        let ids: Vec<i32> = (0..s.n).flat_map(|row| routes(row, s)).map(turned).collect();
        self.device.write(&self.x, bytemuck::cast_slice(&x))?;
        self.device.write(&self.weights, bytemuck::cast_slice(&weights))?;
        self.device.write(&self.ids, bytemuck::cast_slice(&ids))?;
        let mut asked = Vec::new();
        let (pool, mirror, rng) = (&self.pool, &mut self.mirror, &mut self.rng);
        let mut serve = |ask: &RouteAsk<'_>, reply: &mut RouteReply| {
            asked.push(ask.layer);
            assert_eq!((ask.ids, ask.n_rows, ask.top_k), (&ids[..], s.n, s.top_k), "what the host is asked");
            answer(ask, reply, pool, choices, mirror, rng);
            Ok(())
        };
        self.program.replay(&mut serve)?;
        if asked != [0, 1] {
            return Err(Failure::Wrong(format!("route points asked: {asked:?}")));
        }
        let error = |layer: u32| {
            let want = rows(pool, layer, &ids, &weights, &x, s.top_k);
            live_error(bytemuck::cast_slice(self.program.output(layer as usize)), &want, &ids, s.hidden)
        };
        Ok(error(0).max(error(1)))
    }

    fn within_bound(&self, error: f64) -> Result<f64, Failure> {
        let bound = if self.device.caps().precision == Precision::F32 { 1e-10 } else { 1e-4 };
        if error > bound {
            return Err(Failure::Wrong(format!("error {error:.2e}, bound {bound:.0e}")));
        }
        Ok(error)
    }
}

/// Replays with changing inputs and random answers.
pub(super) fn run(case: &RouteCase, device: &dyn Backend) -> Result<f64, Failure> {
    let mut layers = Layers::new(device, case.shape, case.n_slots)?;
    let errors = (0..6).map(|round| layers.replay(round, case.choices)).collect::<Result<Vec<_>, _>>()?;
    layers.within_bound(errors.into_iter().fold(0.0, f64::max))
}

/// A host that breaks off in the middle of a step, by an error or by unwinding, ends the step in time, and the next step is
/// right again.
pub(super) fn break_off(device: &dyn Backend) -> Result<f64, Failure> {
    let shape = ExpertShape {
        format: Format::Bf16,
        pool: true,
        n: 2,
        hidden: 64,
        intermediate: 48,
        top_k: 2,
        experts: 10,
    };
    let mut layers = Layers::new(device, shape, 10)?;
    let mut worst = layers.replay(0, Choices { fetch: false, read_in_place: false, host: true })?;
    for unwinds in [false, true] {
        let start = Instant::now();
        let mut serve = |ask: &RouteAsk<'_>, _: &mut RouteReply| {
            if unwinds {
                std::panic::resume_unwind(Box::new("the host is gone"));
            }
            Err(Error::StepFailed { layer: ask.layer, why: "the host gives up".into() })
        };
        let replayed = std::panic::catch_unwind(AssertUnwindSafe(|| layers.program.replay(&mut serve)));
        if matches!(replayed, Ok(Ok(()))) {
            return Err(Failure::Wrong("a step whose host broke off counts as done".into()));
        }
        if start.elapsed() > BREAK_OFF_LIMIT {
            return Err(Failure::Wrong(format!("breaking off took {:.1} s", start.elapsed().as_secs_f64())));
        }
        worst = worst.max(layers.replay(1, Choices { fetch: false, read_in_place: false, host: true })?);
    }
    layers.within_bound(worst)
}

fn answer(
    ask: &RouteAsk<'_>,
    reply: &mut RouteReply,
    pool: &ExpertPool,
    choices: Choices,
    mirror: &mut Mirror,
    rng: &mut Rng,
) {
    let mut needed: Vec<u32> =
        ask.ids.iter().filter(|&&e| e >= 0).map(|&e| pool.entry(ask.layer, e as u32) as u32).collect();
    needed.sort_unstable();
    needed.dedup();
    for &entry in &needed {
        if mirror.slot_of[entry as usize] >= 0 {
            continue;
        }
        let expert = entry % pool.n_experts as u32;
        let pick = rng.below(3);
        let may_fetch = choices.fetch && (pick == 0 || !(choices.read_in_place || choices.host));
        if let Some(slot) = may_fetch.then(|| mirror.victim(&needed)).flatten() {
            if let Some(owner) = mirror.owner[slot].replace(entry) {
                mirror.slot_of[owner as usize] = -1;
                reply.table.push(TableChange { entry: owner, slot: -1 });
            }
            mirror.slot_of[entry as usize] = slot as i32;
            reply.table.push(TableChange { entry, slot: slot as i32 });
            reply.fetch.push((expert, slot as u32));
            continue;
        }
        if choices.read_in_place && (pick <= 1 || !choices.host) {
            reply.read_in_place.push(expert);
        } else if choices.host {
            reply.host.push(expert);
        } else {
            reply.read_in_place.push(expert);
        }
    }
    if !reply.host.is_empty() {
        let all = rows(pool, ask.layer, ask.ids, ask.weights, ask.rows, ask.top_k);
        reply.host_rows = Some(Arc::new(Rows(all.iter().map(|&v| v as f32).collect())));
    }
}

fn live_error(got: &[f32], want: &[f64], ids: &[i32], hidden: usize) -> f64 {
    let live = |i: &usize| ids[i / hidden] >= 0;
    let got: Vec<f32> = (0..got.len()).filter(live).map(|i| got[i]).collect();
    let want: Vec<f32> = (0..want.len()).filter(live).map(|i| want[i] as f32).collect();
    normalised_error(&got, &want)
}

fn fill_bank(rng: &mut Rng, record: &ExpertRecord, bank: &mut [u8]) {
    match record.format {
        Format::F32 => {
            bank.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&rng.symmetric(0.2).to_le_bytes()))
        }
        _ => bank
            .chunks_exact_mut(2)
            .for_each(|b| b.copy_from_slice(&bf16::from_f32(rng.symmetric(0.2)).to_le_bytes())),
    }
}

fn element(format: Format, bytes: &[u8], i: usize) -> f64 {
    match format {
        Format::F32 => f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("four bytes")) as f64,
        _ => bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64(),
    }
}

/// What `parts` must hold, `[routes, hidden]`.
fn rows(pool: &ExpertPool, layer: u32, ids: &[i32], weights: &[f32], x: &[f32], top_k: usize) -> Vec<f64> {
    let r = &pool.record;
    let (hidden, intermediate) = (r.hidden, r.intermediate);
    let mut parts = vec![0.0; ids.len() * hidden];
    for (route, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
        let bytes = pool.banked(layer, id as u32);
        let (gate_up, down) = (&bytes[r.gate_up.clone()], &bytes[r.down.clone()]);
        let x = &x[route / top_k * hidden..][..hidden];
        let dot = |row: usize| -> f64 {
            (0..hidden).map(|i| element(r.format, gate_up, row * hidden + i) * x[i] as f64).sum()
        };
        let inner: Vec<f64> = (0..intermediate)
            .map(|row| {
                let gate = dot(row);
                gate / (1.0 + (-gate).exp()) * dot(intermediate + row)
            })
            .collect();
        for (row, part) in parts[route * hidden..][..hidden].iter_mut().enumerate() {
            let sum: f64 =
                (0..intermediate).map(|i| element(r.format, down, row * intermediate + i) * inner[i]).sum();
            *part = weights[route] as f64 * sum;
        }
    }
    parts
}
