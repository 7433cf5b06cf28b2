//! Route points: whatever the host answers, every route is computed once and lands in its own row. The answers are random,
//! and the expected rows are computed here, in f64, from the records themselves.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Failure,
    arena::{Rng, normalised_error},
    cases::{ExpertShape, expert_params, routes},
    weights,
};
use crate::{
    Backend, Banked, Banks, Error, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Fetch, Format,
    NoRoutePoints, Precision, Program, RouteAsk, RoutePoint, RouteReply, RouteServer, Stage, TableChange,
    View, record,
};

/// A step that breaks off must have ended by then.
const BREAK_OFF_LIMIT: Duration = Duration::from_secs(2);

/// The layer of cases that are not about its shape.
const SMALL: ExpertShape = ExpertShape {
    format: Format::Bf16,
    pool: true,
    n: 2,
    hidden: 64,
    intermediate: 48,
    top_k: 2,
    experts: 10,
};

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
        for (format, n, n_slots) in [
            (Format::Bf16, 1, 2),
            (Format::Bf16, 6, 10),
            (Format::F32, 3, 10),
            (Format::Bf16, 40, 10),
            (Format::Fp8, 3, 10),
            (Format::Nvfp4, 1, 2),
            (Format::Nvfp4, 6, 10),
            (Format::Mxfp4, 3, 10),
        ] {
            let (hidden, intermediate) = (64, if format == Format::Mxfp4 { 32 } else { 48 });
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
            weights::records(&record, 0.2, &mut rng, &mut bank.as_mut_slice()[..s.experts * record.bytes]);
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
        let Layers { pool, mirror, rng, program, .. } = self;
        let mut server = Server { asked: Vec::new(), ids: &ids, shape: s, pool, choices, mirror, rng };
        program.replay(&mut server)?;
        let asked = server.asked;
        if asked != [0, 1] {
            return Err(Failure::Wrong(format!("route points asked: {asked:?}")));
        }
        let error = |layer: u32| {
            let want = rows(pool, layer, &ids, &weights, &x, s.top_k);
            live_error(bytemuck::cast_slice(self.program.output(layer as usize)), &want, &ids, s.hidden)
        };
        Ok(error(0).max(error(1)))
    }
}

fn within_bound(device: &dyn Backend, error: f64) -> Result<f64, Failure> {
    let bound = if device.caps().precision == Precision::F32 { 1e-10 } else { 1e-4 };
    if error > bound {
        return Err(Failure::Wrong(format!("error {error:.2e}, bound {bound:.0e}")));
    }
    Ok(error)
}

/// Replays with changing inputs and random answers.
pub(super) fn run(case: &RouteCase, device: &dyn Backend) -> Result<f64, Failure> {
    let mut layers = Layers::new(device, case.shape, case.n_slots)?;
    let errors = (0..6).map(|round| layers.replay(round, case.choices)).collect::<Result<Vec<_>, _>>()?;
    within_bound(device, errors.into_iter().fold(0.0, f64::max))
}

/// Experts without a slot, in a program without route points: read from the bank where the op says so, else left alone.
pub(super) fn without_slots(
    device: &dyn Backend,
    format: Format,
    n_rows: usize,
    in_place: bool,
) -> Result<f64, Failure> {
    let shape = ExpertShape { format, n: n_rows, ..SMALL };
    if in_place && !device.caps().reads_host {
        let why = "the device does not read host memory".into();
        let refused = Error::Unsupported { backend: device.caps().backend, op: "expert_mlp", why };
        return Err(Failure::Backend(refused));
    }
    let Layers { pool, x, ids, weights, mut rng, .. } = Layers::new(device, shape, 4)?;
    let parts = device.alloc(n_rows * shape.top_k * shape.hidden * 4)?.whole();
    let p = ExpertMlpParams { in_place: in_place as u32, ..expert_params(shape) };
    let experts = Experts::Pool { pool: pool.clone(), layer: 1 };
    let op = ExpertMlp { parts, x: x.clone(), ids: ids.clone(), weights: weights.clone(), experts, p };
    let parts = op.parts.clone();
    let mut program = device.record(&[Stage::Ops(vec![op.into()])], std::slice::from_ref(&parts))?;
    // Experts 3, 5 and 7 of the layer have slots 2, 0 and 3.
    let mut table = vec![-1_i32; 2 * shape.experts];
    for (expert, slot) in [(3, 2), (5, 0), (7, 3)] {
        table[shape.experts + expert] = slot;
        device.write(&pool.slot(slot as usize), pool.banked(1, expert as u32))?;
    }
    device.write(&pool.table, bytemuck::cast_slice(&table))?;
    let mut worst = 0.0_f64;
    for round in 0..3 {
        let mut floats = |n: usize| (0..n).map(|_| rng.symmetric(1.0)).collect::<Vec<f32>>();
        let (x_now, weights_now) = (floats(n_rows * shape.hidden), floats(n_rows * shape.top_k));
        let turned = |e: i32| if e < 0 { e } else { (e + round) % shape.experts as i32 };
        let routed: Vec<i32> = (0..n_rows).flat_map(|row| routes(row, shape)).map(turned).collect();
        device.write(&x, bytemuck::cast_slice(&x_now))?;
        device.write(&weights, bytemuck::cast_slice(&weights_now))?;
        device.write(&ids, bytemuck::cast_slice(&routed))?;
        let before = floats(n_rows * shape.top_k * shape.hidden);
        device.write(&parts, bytemuck::cast_slice(&before))?;
        program.replay(&mut NoRoutePoints)?;
        let got: &[f32] = bytemuck::cast_slice(program.output(0));
        let computed = |id: i32| id >= 0 && (in_place || table[shape.experts + id as usize] >= 0);
        for (route, _) in routed.iter().enumerate().filter(|(_, id)| !computed(**id)) {
            let row = route * shape.hidden..(route + 1) * shape.hidden;
            if got[row.clone()] != before[row] {
                return Err(Failure::Wrong(format!(
                    "round {round}: route {route} has no place and was written"
                )));
            }
        }
        let live: Vec<i32> = routed.iter().map(|&id| if computed(id) { id } else { -1 }).collect();
        let want = rows(&pool, 1, &live, &weights_now, &x_now, shape.top_k);
        worst = worst.max(live_error(got, &want, &live, shape.hidden));
    }
    within_bound(device, worst)
}

/// A host that breaks off in the middle of a step, by an error or by unwinding, ends the step in time, and the next step is
/// right again.
pub(super) fn break_off(device: &dyn Backend) -> Result<f64, Failure> {
    let mut layers = Layers::new(device, SMALL, 10)?;
    let mut worst = layers.replay(0, Choices { fetch: false, read_in_place: false, host: true })?;
    for unwinds in [false, true] {
        let start = Instant::now();
        let mut server = BreaksOff { unwinds };
        let replayed = std::panic::catch_unwind(AssertUnwindSafe(|| layers.program.replay(&mut server)));
        if matches!(replayed, Ok(Ok(()))) {
            return Err(Failure::Wrong("a step whose host broke off counts as done".into()));
        }
        if start.elapsed() > BREAK_OFF_LIMIT {
            return Err(Failure::Wrong(format!("breaking off took {:.1} s", start.elapsed().as_secs_f64())));
        }
        worst = worst.max(layers.replay(1, Choices { fetch: false, read_in_place: false, host: true })?);
    }
    within_bound(device, worst)
}

/// A reply that leaves a routed expert out fails the step and no other one: rows of nobody would be rows of another step.
pub(super) fn left_out(device: &dyn Backend) -> Result<f64, Failure> {
    let mut layers = Layers::new(device, SMALL, 10)?;
    let on_host = Choices { fetch: false, read_in_place: false, host: true };
    let worst = layers.replay(0, on_host)?;
    match layers.program.replay(&mut Silent) {
        Err(Error::StepFailed { why, .. }) if why.contains("expert") => {}
        Err(error) => return Err(error.into()),
        Ok(()) => return Err(Failure::Wrong("a step without rows for a route counts as done".into())),
    }
    within_bound(device, worst.max(layers.replay(1, on_host)?))
}

/// Answers nothing.
struct Silent;

impl RouteServer for Silent {
    fn answer(&mut self, _: &RouteAsk<'_>, _: &mut RouteReply) -> crate::Result<()> {
        Ok(())
    }

    fn compute(&mut self, _: &RouteAsk<'_>, _: &[u32], _: &mut [f32]) -> crate::Result<()> {
        unreachable!("nothing was given to the host")
    }
}

/// Answers at random, and computes what it takes on itself.
struct Server<'a> {
    asked: Vec<u32>,
    /// What the route points must ask for.
    ids: &'a [i32],
    shape: ExpertShape,
    pool: &'a ExpertPool,
    choices: Choices,
    mirror: &'a mut Mirror,
    rng: &'a mut Rng,
}

impl RouteServer for Server<'_> {
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> crate::Result<()> {
        let Server { asked, ids, shape, pool, choices, mirror, rng } = self;
        asked.push(ask.layer);
        assert_eq!((ask.ids, ask.n_rows, ask.top_k), (*ids, shape.n, shape.top_k), "what the host is asked");
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
                reply.fetch.push(Fetch { from: Banked::own(expert), slot: slot as u32 });
                continue;
            }
            if choices.read_in_place && (pick <= 1 || !choices.host) {
                reply.read_in_place.push(Banked::own(expert));
            } else if choices.host {
                reply.host.push(expert);
            } else {
                reply.read_in_place.push(Banked::own(expert));
            }
        }
        Ok(())
    }

    fn compute(&mut self, ask: &RouteAsk<'_>, host: &[u32], parts: &mut [f32]) -> crate::Result<()> {
        let hidden = self.shape.hidden;
        let all = rows(self.pool, ask.layer, ask.ids, ask.weights, ask.rows, ask.top_k);
        for (route, &id) in ask.ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
            if host.contains(&(id as u32)) {
                let row = route * hidden..(route + 1) * hidden;
                parts[row.clone()].iter_mut().zip(&all[row]).for_each(|(part, v)| *part = *v as f32);
            }
        }
        Ok(())
    }
}

/// Gives up at the first question.
struct BreaksOff {
    unwinds: bool,
}

impl RouteServer for BreaksOff {
    fn answer(&mut self, ask: &RouteAsk<'_>, _: &mut RouteReply) -> crate::Result<()> {
        if self.unwinds {
            std::panic::resume_unwind(Box::new("the host is gone"));
        }
        Err(Error::StepFailed { layer: ask.layer, why: "the host gives up".into() })
    }

    fn compute(&mut self, _: &RouteAsk<'_>, _: &[u32], _: &mut [f32]) -> crate::Result<()> {
        unreachable!("nothing was given to the host")
    }
}

fn live_error(got: &[f32], want: &[f64], ids: &[i32], hidden: usize) -> f64 {
    let live = |i: &usize| ids[i / hidden] >= 0;
    let got: Vec<f32> = (0..got.len()).filter(live).map(|i| got[i]).collect();
    let want: Vec<f32> = (0..want.len()).filter(live).map(|i| want[i] as f32).collect();
    normalised_error(&got, &want)
}

/// What `parts` must hold, `[routes, hidden]`.
fn rows(pool: &ExpertPool, layer: u32, ids: &[i32], weights: &[f32], x: &[f32], top_k: usize) -> Vec<f64> {
    let r = &pool.record;
    let (hidden, intermediate) = (r.hidden, r.intermediate);
    let mut parts = vec![0.0; ids.len() * hidden];
    for (route, &id) in ids.iter().enumerate().filter(|(_, id)| **id >= 0) {
        let bytes = pool.banked(layer, id as u32);
        let x = &x[route / top_k * hidden..][..hidden];
        let dot = |banks: &Banks, row: usize, x: &[f64]| -> f64 {
            let cols = x.len();
            (0..cols).map(|i| weights::element(r.format, bytes, banks, row, i, cols) * x[i]).sum()
        };
        let x: Vec<f64> = x.iter().map(|&x| x as f64).collect();
        let inner: Vec<f64> = (0..intermediate)
            .map(|row| {
                let gate = dot(&r.gate_up, row, &x);
                gate / (1.0 + (-gate).exp()) * dot(&r.gate_up, intermediate + row, &x)
            })
            .collect();
        for (row, part) in parts[route * hidden..][..hidden].iter_mut().enumerate() {
            *part = weights[route] as f64 * dot(&r.down, row, &inner);
        }
    }
    parts
}
