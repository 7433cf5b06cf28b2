//! Route points by themselves: what a layer of a decode step costs when its experts are all in slots, and when some are
//! fetched, read in place, or left to the host. Every way must give the rows that experts in slots give.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use clap::Args;
use freetoken_backend::{
    Backend, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Format, HostBuffer, Lane, LinkSample,
    NoRoutePoints, Op, Program, RouteAsk, RoutePoint, RouteReply, RouteServer, Stage, TableChange, View,
    record,
};

use super::{
    super::model::DeviceArgs,
    median,
    report::{Report, ReportArgs, read_bandwidth},
    subject::WARM_UP,
    table::{Cell, Column, Table, column},
};

/// Replays that are timed at least, of which the median counts.
const MIN_REPLAYS: usize = 9;
/// More are timed until so much time has passed.
const REPLAY_TIME: Duration = Duration::from_millis(300);
/// Experts that are missing in a layer.
const MISSING: [usize; 4] = [1, 2, 4, 8];
/// Slots of a chunk.
const SLOTS_PER_CHUNK: usize = 16;
/// Rows are the same up to this share of the largest value.
const TOLERANCE: f32 = 1e-4;

/// Route points alone: layers whose experts are all in slots, or fetched, read in place, or left to a host that answers zeros.
#[derive(Debug, Args)]
pub(super) struct RoutePointsArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 7] = [
    column("way", "experts", 1.0, 0),
    column("missing", "missing", 1.0, 0),
    column("seconds", "us a layer", 1e6, 1),
    column("extra_seconds", "us extra", 1e6, 1),
    column("bytes", "MB", 1e-6, 2),
    column("bytes_per_second", "GB/s", 1e-9, 1),
    column("link_bytes_per_second", "link GB/s", 1e-9, 1),
];

/// What is measured. All layers share one bank, and routes change from layer to layer.
#[derive(Clone, Copy)]
struct Shape {
    hidden: usize,
    intermediate: usize,
    top_k: usize,
    n_experts: usize,
    /// One for each expert, and at least `top_k` to fetch into.
    n_slots: usize,
    n_layers: usize,
}

/// Experts of qwen3-30b-a3b, and half of its layers.
const SHAPE: Shape =
    Shape { hidden: 2048, intermediate: 768, top_k: 8, n_experts: 32, n_slots: 64, n_layers: 24 };

/// Measures every way, 1, 2, 4 and 8 experts each. "extra" is what a layer takes beyond a route point whose experts all have a
/// slot, "GB/s" the bytes in that time, "link GB/s" what the device measured.
pub(super) fn run(args: &RoutePointsArgs) -> Result<()> {
    let backend = &*args.device.open()?;
    let read_bandwidth = read_bandwidth(backend)?;
    let Shape { hidden, intermediate, top_k, n_layers, .. } = SHAPE;
    let subject =
        format!("route points of {n_layers} layers, one row, top {top_k} of {hidden}x{intermediate} in bf16");
    let table = measure(backend, SHAPE)?;
    Report { subject, caps: backend.caps(), read_bandwidth, expert_use: &[], table }.print(&args.report)
}

fn measure(backend: &dyn Backend, shape: Shape) -> Result<Table> {
    let layers = Layers::new(backend, shape)?;
    let ops = layers.mlps.iter().map(|mlp| Stage::Ops(vec![Op::from(mlp.clone())])).collect::<Vec<_>>();
    let mut plain = backend.record(&ops, &[])?;
    let points = layers.mlps.iter().map(|mlp| Stage::Route(RoutePoint { mlp: mlp.clone() }));
    let mut routed = backend.record(&points.collect::<Vec<_>>(), &[])?;

    let mut table = Table::new(&COLUMNS);
    layers.prepare(0)?;
    let seconds = median_replay(&mut *plain, &mut NoRoutePoints)? / shape.n_layers as f64;
    let expected = layers.parts()?;
    table.push([
        "no route point".into(),
        0.into(),
        seconds.into(),
        Cell::Empty,
        Cell::Empty,
        Cell::Empty,
        Cell::Empty,
    ]);

    let mut all_hit = 0.0;
    for (way, missing) in ways(backend, shape) {
        layers.prepare(missing)?;
        let mut server = Server::new(&layers.pool, way, missing);
        let seconds = median_replay(&mut *routed, &mut server)? / shape.n_layers as f64;
        layers.check(way, missing, &expected)?;
        if way == Way::Slots {
            all_hit = seconds;
        }
        let extra = seconds - all_hit;
        let bytes = (missing * layers.pool.record.bytes) as f64;
        let moves = matches!(way, Way::Fetched | Way::InPlace);
        let crosses_link = moves && extra > 0.0 && !backend.caps().host_memory;
        // The last fetch of one way is told at the first question of the next.
        let link = server.link.filter(|_| way == Way::Fetched);
        let link = link.map_or(Cell::Empty, |link| (link.bytes as f64 / link.seconds).into());
        table.push([
            way.to_string().as_str().into(),
            missing.into(),
            seconds.into(),
            if way == Way::Slots { Cell::Empty } else { extra.into() },
            if moves { bytes.into() } else { Cell::Empty },
            if crosses_link { (bytes / extra).into() } else { Cell::Empty },
            link,
        ]);
    }
    Ok(table)
}

/// Where the experts of a layer are that are not in slots.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Slots,
    Fetched,
    InPlace,
    Host,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::Slots => "in slots",
            Way::Fetched => "fetched",
            Way::InPlace => "in place",
            Way::Host => "host (zeros)",
        })
    }
}

/// Every way with its numbers of missing experts, the all-hit one first.
fn ways(backend: &dyn Backend, shape: Shape) -> impl Iterator<Item = (Way, usize)> {
    let reads_host = backend.caps().reads_host;
    let missing = move |way| MISSING.into_iter().filter(move |&n| n <= shape.top_k).map(move |n| (way, n));
    [(Way::Slots, 0)]
        .into_iter()
        .chain(missing(Way::Fetched))
        .chain(missing(Way::InPlace).filter(move |_| reads_host))
        .chain([(Way::Host, shape.top_k)])
}

/// The layers on the device. Expert `e` lies in slot `e`, for every layer that does not miss it.
struct Layers<'a> {
    backend: &'a dyn Backend,
    shape: Shape,
    pool: Arc<ExpertPool>,
    /// One a layer.
    mlps: Vec<ExpertMlp>,
}

impl<'a> Layers<'a> {
    fn new(backend: &'a dyn Backend, shape: Shape) -> Result<Self> {
        let Shape { hidden, intermediate, top_k, n_experts, n_slots, n_layers } = shape;
        let record = record(Format::Bf16, hidden, intermediate);
        let mut bank = backend.alloc_host(n_experts * record.bytes)?;
        fill(&mut bank);
        let bank = Arc::new(bank);
        let chunk = || backend.alloc(SLOTS_PER_CHUNK * record.bytes);
        let pool = Arc::new(ExpertPool {
            n_layers,
            n_experts,
            chunks: (0..n_slots.div_ceil(SLOTS_PER_CHUNK)).map(|_| chunk()).collect::<Result<_, _>>()?,
            slots_per_chunk: SLOTS_PER_CHUNK,
            table: backend.alloc(n_layers * n_experts * 4)?.whole(),
            banks: vec![bank.clone(); n_layers],
            record,
        });
        for expert in 0..n_experts {
            let start = expert * pool.record.bytes;
            let event = backend.upload(Lane::Compute, &bank, start, &pool.slot(expert))?;
            backend.wait(event)?;
        }
        let filled = |words: &[u32]| -> Result<View> {
            let view = backend.alloc(words.len() * 4)?.whole();
            backend.write(&view, bytemuck::cast_slice(words))?;
            Ok(view)
        };
        let x: Vec<u32> = (0..hidden).map(|i| ((i * 7 % 13) as f32 * 0.1 - 0.6).to_bits()).collect();
        let (x, weights) = (filled(&x)?, filled(&vec![(1.0 / top_k as f32).to_bits(); top_k])?);
        let mlp = |layer: usize| -> Result<ExpertMlp> {
            let mut ids: Vec<u32> = (0..top_k).map(|k| ((layer * top_k + k) % n_experts) as u32).collect();
            ids.sort_unstable();
            Ok(ExpertMlp {
                parts: backend.alloc(top_k * hidden * 4)?.whole(),
                x: x.clone(),
                ids: filled(&ids)?,
                weights: weights.clone(),
                experts: Experts::Pool { pool: pool.clone(), layer: layer as u32 },
                p: ExpertMlpParams {
                    n_rows: 1,
                    top_k: top_k as u32,
                    hidden: hidden as u32,
                    intermediate: intermediate as u32,
                    n_experts: n_experts as u32,
                    in_place: 0,
                },
            })
        };
        let mlps = (0..n_layers).map(mlp).collect::<Result<_>>()?;
        Ok(Layers { backend, shape, pool, mlps })
    }

    /// Takes the slots of the first `missing` experts of each layer's row, and spoils the rows of the last run.
    fn prepare(&self, missing: usize) -> Result<()> {
        let Shape { top_k, n_experts, hidden, .. } = self.shape;
        let mut table: Vec<i32> = (0..self.mlps.len()).flat_map(|_| 0..n_experts as i32).collect();
        for (mlp, row) in self.mlps.iter().zip(table.chunks_exact_mut(n_experts)) {
            let mut ids = vec![0_i32; top_k];
            self.backend.read(&mlp.ids, bytemuck::cast_slice_mut(&mut ids))?;
            ids[..missing].iter().for_each(|&id| row[id as usize] = -1);
            self.backend.write(&mlp.parts, bytemuck::cast_slice(&vec![f32::NAN; top_k * hidden]))?;
        }
        Ok(self.backend.write(&self.pool.table, bytemuck::cast_slice(&table))?)
    }

    /// The rows of each layer.
    fn parts(&self) -> Result<Vec<Vec<f32>>> {
        let read = |mlp: &ExpertMlp| {
            let mut parts = vec![0.0_f32; self.shape.top_k * self.shape.hidden];
            self.backend.read(&mlp.parts, bytemuck::cast_slice_mut(&mut parts)).map(|()| parts)
        };
        Ok(self.mlps.iter().map(read).collect::<Result<_, _>>()?)
    }

    /// Compares the rows with those of experts in slots, or with the host's zeros.
    fn check(&self, way: Way, missing: usize, expected: &[Vec<f32>]) -> Result<()> {
        for (layer, (got, expected)) in self.parts()?.iter().zip(expected).enumerate() {
            let largest = expected.iter().fold(0.0_f32, |largest, v| largest.max(v.abs()));
            let n_on_host = if way == Way::Host { missing * self.shape.hidden } else { 0 };
            let wanted = expected.iter().enumerate().map(|(i, &v)| if i < n_on_host { 0.0 } else { v });
            let is_same =
                got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() <= TOLERANCE * largest);
            ensure!(
                is_same && largest > 0.0,
                "layer {layer} computes wrong rows with {missing} experts {way}: do not use this device for experts that do not fit"
            );
        }
        Ok(())
    }
}

/// Small numbers in bf16, other ones in each record.
fn fill(bank: &mut HostBuffer) {
    for (i, value) in bank.as_mut_slice().chunks_exact_mut(2).enumerate() {
        let random = ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u16;
        value.copy_from_slice(&(0x3c00 | random & 0x807f).to_le_bytes());
    }
}

/// Answers for the same experts in every layer of every replay. What was fetched leaves its slot within `top_k` fetches.
struct Server<'a> {
    pool: &'a ExpertPool,
    way: Way,
    missing: usize,
    /// Entries of the table that own the slots behind those of the experts.
    owners: Vec<Option<u32>>,
    next: usize,
    link: Option<LinkSample>,
}

impl<'a> Server<'a> {
    fn new(pool: &'a ExpertPool, way: Way, missing: usize) -> Self {
        Server { pool, way, missing, owners: vec![None; missing], next: 0, link: None }
    }
}

impl RouteServer for Server<'_> {
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> freetoken_backend::Result<()> {
        if let Some(sample) = ask.link {
            let link = self.link.get_or_insert(LinkSample { bytes: 0, seconds: 0.0 });
            link.bytes += sample.bytes;
            link.seconds += sample.seconds;
        }
        for expert in ask.ids[..self.missing].iter().map(|&id| id as u32) {
            match self.way {
                Way::Slots => {}
                Way::InPlace => reply.read_in_place.push(expert),
                Way::Host => reply.host.push(expert),
                Way::Fetched => {
                    let slot = self.pool.n_experts + self.next;
                    let entry = self.pool.entry(ask.layer, expert) as u32;
                    if let Some(owner) = self.owners[self.next].replace(entry) {
                        reply.table.push(TableChange { entry: owner, slot: -1 });
                    }
                    reply.table.push(TableChange { entry, slot: slot as i32 });
                    reply.fetch.push((expert, slot as u32));
                    self.next = (self.next + 1) % self.owners.len();
                }
            }
        }
        Ok(())
    }

    fn compute(
        &mut self,
        ask: &RouteAsk<'_>,
        host: &[u32],
        parts: &mut [f32],
    ) -> freetoken_backend::Result<()> {
        let hidden = parts.len() / ask.ids.len();
        for (row, id) in parts.chunks_exact_mut(hidden).zip(ask.ids) {
            if host.contains(&(*id as u32)) {
                row.fill(0.0);
            }
        }
        Ok(())
    }
}

/// Seconds of a replay.
fn median_replay(program: &mut dyn Program, server: &mut dyn RouteServer) -> Result<f64> {
    for _ in 0..WARM_UP {
        program.replay(server)?;
    }
    let (begin, mut seconds) = (Instant::now(), Vec::new());
    while seconds.len() < MIN_REPLAYS || begin.elapsed() < REPLAY_TIME {
        let start = Instant::now();
        program.replay(server)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    Ok(median(seconds))
}

#[cfg(test)]
mod tests {
    use freetoken_backend::Precision;

    use super::*;
    use crate::devices::{self, BackendChoice};

    #[test]
    fn every_way_gives_the_rows_of_experts_in_slots() {
        let cpu = devices::open(&BackendChoice::Cpu, Precision::F32, Some(1), &mut |_| ()).unwrap();
        let shape = Shape { hidden: 64, intermediate: 32, top_k: 2, n_experts: 6, n_slots: 16, n_layers: 3 };
        let table = measure(&*cpu, shape).unwrap();
        let ways: Vec<String> = table
            .csv()
            .lines()
            .skip(1)
            .map(|line| line.split(',').take(2).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            ways,
            [
                "no route point 0",
                "in slots 0",
                "fetched 1",
                "fetched 2",
                "in place 1",
                "in place 2",
                "host (zeros) 2"
            ]
        );
    }
}
