//! What device, link and host can do, measured at start-up in at most two seconds: each alone, and both at once, since a
//! host that computes and a link that copies share its memory. Kept on disk for the next start.

use std::{
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use freetoken_backend::{
    Backend, Banked, Caps, ExpertMlp, ExpertMlpParams, ExpertPool, ExpertRecord, Experts, Lane,
    NoRoutePoints, Result, RouteAsk, RoutePoint, RouteReply, RouteServer, Stage, View,
};

use serde::Serialize;

use super::{ExpertBanks, HostExperts, Rates};

/// Where the rate of the disk is kept.
const DISK_FILE: &str = "disk.json";
/// How long each of the rates is measured.
const WINDOW: Duration = Duration::from_millis(200);
/// Memory that is read to learn how fast the device reads its own.
const READ_BYTES: usize = 256 << 20;
/// Route points of the program whose round trips are measured, and how often it runs.
const POINTS: usize = 8;
const ROUNDS: usize = 12;
/// Rows over which an expert is bound by operations, not by bytes.
const MANY_ROWS: usize = 16;
/// Experts of a route point of the probe.
const TOP_K: usize = 8;

/// The rates for these experts: those on disk, or measured now and written there. The `n_ring` slots behind `first_slot` are used, and
/// the experts that are `there`, by layers, in their banks.
///
/// # Errors
/// The device's. A file that cannot be read or written is no error: the rates are measured again.
pub(super) fn rates(
    backend: &Arc<dyn Backend>,
    pool: &Arc<ExpertPool>,
    [first_slot, n_ring]: [usize; 2],
    banks: &ExpertBanks,
    there: &[(u32, Banked)],
    host: Option<&mut HostExperts>,
    folder: Option<&Path>,
) -> Result<Rates> {
    let host_caps = host.as_ref().map(|host| host.caps().clone());
    let file = folder.map(|folder| folder.join(file_name(backend.caps(), &pool.record, host_caps.as_ref())));
    if let Some(rates) = file.as_deref().and_then(read) {
        return Ok(rates);
    }
    let rates = Probe { backend, pool, first_slot, n_ring, banks, there }.measure(host)?;
    if let Some(file) = file {
        write(&file, &rates);
    }
    Ok(rates)
}

/// The rates that an earlier run measured for experts of this layout; `host` is what computes beside the device.
pub fn saved_rates(folder: &Path, caps: &Caps, record: &ExpertRecord, host: Option<&Caps>) -> Option<Rates> {
    read(&folder.join(file_name(caps, record, host)))
}

/// Bytes a second that the disk gave when experts were last read from it.
pub fn saved_disk_rate(folder: &Path) -> Option<f64> {
    let rate: f64 = serde_json::from_slice(&fs::read(folder.join(DISK_FILE)).ok()?).ok()?;
    (rate.is_finite() && rate > 0.0).then_some(rate)
}

/// Keeps the rate of the disk for the next start.
pub(super) fn save_disk_rate(folder: &Path, rate: f64) {
    write(&folder.join(DISK_FILE), &rate);
}

/// The file of a device, a host and a layout of experts.
fn file_name(caps: &Caps, record: &ExpertRecord, host: Option<&Caps>) -> String {
    let host_name = host.map_or("none".into(), |host| format!("{} {}", host.device, host.detail));
    let name = format!(
        "{} {} {} {} {host_name} {} {}x{}.json",
        caps.backend,
        caps.device,
        caps.detail,
        caps.precision,
        record.format,
        record.hidden,
        record.intermediate
    );
    name.chars().map(|c| if c.is_ascii_alphanumeric() || ".-".contains(c) { c } else { '_' }).collect()
}

fn read(file: &Path) -> Option<Rates> {
    let rates: Rates = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    rates.is_valid().then_some(rates)
}

/// Without the file, the next start measures again.
fn write(file: &Path, value: &impl Serialize) {
    let folder = file.parent().unwrap_or(Path::new("."));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(file, serde_json::to_vec(value)?));
    drop(written);
}

struct Probe<'a> {
    backend: &'a Arc<dyn Backend>,
    pool: &'a Arc<ExpertPool>,
    first_slot: usize,
    n_ring: usize,
    banks: &'a ExpertBanks,
    /// By layers.
    there: &'a [(u32, Banked)],
}

impl Probe<'_> {
    fn measure(&self, host: Option<&mut HostExperts>) -> Result<Rates> {
        let device_read = self.device_read()?;
        let link_alone = self.link(WINDOW)?;
        let [in_slots, asked] = self.round_trip()?;
        let mut rates = Rates {
            link_alone,
            link_shared: link_alone,
            // Without a host nothing is planned for it.
            host_alone: 1.0,
            host_shared: 1.0,
            device_read,
            host_flops: 1.0,
            reply_seconds: (asked - in_slots).max(0.0),
            wake_seconds: 0.0,
            combine_seconds: 0.0,
            fetch_seconds: 0.0,
            copy_lane: false,
        };
        let Some(host) = host else { return Ok(rates) };
        let record = self.pool.record.weight_bytes() as f64;
        let mut work = HostWork::new(self.banks, self.there);
        // The first pass finds pages and threads that sleep.
        work.run(host, Duration::ZERO, TOP_K, 1)?;
        rates.host_alone = record / work.run(host, WINDOW, TOP_K, 1)?;
        let one = work.run(host, WINDOW / 4, 1, 1)?;
        rates.wake_seconds = (one - record / rates.host_alone).max(0.0);
        let many = work.run(host, WINDOW / 4, 1, MANY_ROWS)?;
        rates.host_flops = MANY_ROWS as f64 * self.pool.record.flops_per_row() / many;
        [rates.link_shared, rates.host_shared] = self.both(host, &mut work, &rates)?;
        // What was measured side by side is not faster than alone.
        rates.link_shared = rates.link_shared.min(rates.link_alone);
        rates.host_shared = rates.host_shared.min(rates.host_alone);
        Ok(rates)
    }

    /// Bytes a second of the device's own memory.
    fn device_read(&self) -> Result<f64> {
        let chunk = &self.pool.chunks[0];
        let view = chunk.view(0..READ_BYTES.min(chunk.bytes()) / 16 * 16);
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            best = best.min(self.backend.time_read(&view)?.max(1e-9));
        }
        Ok(view.bytes() as f64 / best)
    }

    /// Queues records into the slots of the ring, and gives their bytes.
    fn queue_records(&self, next: &mut usize, n: usize) -> Result<usize> {
        let record = self.pool.record.bytes;
        for _ in 0..n {
            let (layer, from) = self.there[*next % self.there.len()];
            let slot = self.first_slot + *next % self.n_ring;
            let (bank, start) = (&self.banks.layers()[layer as usize], from.record as usize * record);
            self.backend.upload(Lane::Copy, bank, start, &self.pool.slot(slot))?;
            *next += 1;
        }
        Ok(n * record)
    }

    /// Bytes a second over the link.
    fn link(&self, window: Duration) -> Result<f64> {
        let mut next = 0;
        self.queue_records(&mut next, 2)?;
        self.backend.wait(self.backend.event(Lane::Copy)?)?;
        let (start, mut bytes) = (Instant::now(), 0);
        while start.elapsed() < window {
            bytes += self.queue_records(&mut next, 8)?;
            self.backend.wait(self.backend.event(Lane::Copy)?)?;
        }
        Ok(bytes as f64 / start.elapsed().as_secs_f64())
    }

    /// Link and host at once: bytes a second of each. The host computes while queued records cross the link, as many as take
    /// about as long, so that hardly a part of either runs alone.
    fn both(&self, host: &mut HostExperts, work: &mut HostWork<'_>, rates: &Rates) -> Result<[f64; 2]> {
        let as_long = TOP_K as f64 * rates.link_alone / rates.host_alone;
        let n_sent = (as_long.round() as usize).clamp(1, 64 * TOP_K);
        let record = self.pool.record.weight_bytes() as f64;
        let (mut next, mut link_bytes, mut link_seconds) = (0, 0, 0.0);
        let (mut host_experts, mut host_seconds) = (0, 0.0);
        let start = Instant::now();
        while start.elapsed() < WINDOW {
            let begun = Instant::now();
            let bytes = self.queue_records(&mut next, n_sent)?;
            let queued = begun.elapsed();
            host_experts += work.call(host, TOP_K, 1)?;
            host_seconds += (begun.elapsed() - queued).as_secs_f64();
            self.backend.wait(self.backend.event(Lane::Copy)?)?;
            link_seconds += begun.elapsed().as_secs_f64();
            link_bytes += bytes;
        }
        Ok([link_bytes as f64 / link_seconds, host_experts as f64 * record / host_seconds])
    }

    /// Seconds of a layer in which all experts but one have slots: as an op, and with a host that is asked and computes
    /// nothing at once.
    fn round_trip(&self) -> Result<[f64; 2]> {
        let record = &self.pool.record;
        let top_k = TOP_K.min(self.n_ring).min(self.pool.n_experts);
        let words = |n: usize| -> Result<View> { Ok(self.backend.alloc(n * 4)?.whole()) };
        let ids = words(top_k)?;
        self.backend.write(&ids, bytemuck::cast_slice(&(0..top_k as i32).collect::<Vec<_>>()))?;
        let table = words(self.pool.n_layers * self.pool.n_experts)?;
        let mut slots = vec![-1_i32; self.pool.n_layers * self.pool.n_experts];
        (1..top_k).for_each(|i| slots[i] = (self.first_slot + i) as i32);
        self.backend.write(&table, bytemuck::cast_slice(&slots))?;
        let pool = self.pool.behind(table, self.pool.banks.clone());
        let mlp = ExpertMlp {
            parts: words(top_k * record.hidden)?,
            x: words(record.hidden)?,
            ids,
            weights: words(top_k)?,
            experts: Experts::Pool { pool: Arc::new(pool), layer: 0 },
            p: ExpertMlpParams {
                n_rows: 1,
                top_k: top_k as u32,
                hidden: record.hidden as u32,
                intermediate: record.intermediate as u32,
                n_experts: self.pool.n_experts as u32,
                in_place: 0,
            },
        };
        let op = Stage::Ops(vec![mlp.clone().into()]);
        let mut in_slots = self.backend.record(&vec![op; POINTS], &[])?;
        let mut asked = self.backend.record(&vec![Stage::Route(RoutePoint { mlp }); POINTS], &[])?;
        let mut best = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            let start = Instant::now();
            in_slots.replay(&mut NoRoutePoints)?;
            let between = Instant::now();
            asked.replay(&mut TakesTheFirst)?;
            best[0] = best[0].min((between - start).as_secs_f64());
            best[1] = best[1].min(between.elapsed().as_secs_f64());
        }
        Ok(best.map(|seconds| seconds / POINTS as f64))
    }
}

/// Gives the first expert to a host that computes nothing.
struct TakesTheFirst;

impl RouteServer for TakesTheFirst {
    fn answer(&mut self, _: &RouteAsk<'_>, reply: &mut RouteReply) -> Result<()> {
        reply.host.push(0);
        Ok(())
    }

    fn compute(&mut self, _: &RouteAsk<'_>, _: &[u32], parts: &mut [f32]) -> Result<()> {
        parts.fill(0.0);
        Ok(())
    }
}

/// Calls of the host's experts, other ones each time, so that no cache holds them.
struct HostWork<'a> {
    /// By layers.
    there: &'a [(u32, Banked)],
    next: usize,
    x: Vec<f32>,
    parts: Vec<f32>,
}

impl<'a> HostWork<'a> {
    fn new(banks: &ExpertBanks, there: &'a [(u32, Banked)]) -> Self {
        let hidden = banks.record().expect("a model with experts").hidden;
        HostWork { there, next: 0, x: vec![0.1; MANY_ROWS * hidden], parts: Vec::new() }
    }

    /// Seconds an expert takes, in calls of `n` experts with `n_rows` rows each.
    fn run(&mut self, host: &mut HostExperts, window: Duration, n: usize, n_rows: usize) -> Result<f64> {
        let (start, mut n_computed) = (Instant::now(), 0);
        loop {
            n_computed += self.call(host, n, n_rows)?;
            if start.elapsed() >= window {
                return Ok(start.elapsed().as_secs_f64() / n_computed as f64);
            }
        }
    }

    /// One call; gives its distinct experts.
    fn call(&mut self, host: &mut HostExperts, n: usize, n_rows: usize) -> Result<usize> {
        let (top_k, hidden) = (host.top_k(), self.x.len() / MANY_ROWS);
        self.next %= self.there.len();
        let (layer, _) = self.there[self.next];
        let rest = self.there[self.next..].iter().take_while(|(of, _)| *of == layer);
        let experts: Vec<Banked> = rest.take(n.min(top_k)).map(|(_, from)| *from).collect();
        self.next += experts.len();
        let route = |k: usize| experts.get(k).map_or(-1, |from| from.expert as i32);
        let mut row: Vec<i32> = (0..top_k).map(route).collect();
        row.sort_unstable();
        let ids = row.repeat(n_rows);
        self.parts.resize(n_rows * top_k * hidden, 0.0);
        let ask = RouteAsk {
            layer,
            n_rows,
            top_k,
            ids: &ids,
            weights: &vec![1.0; ids.len()],
            rows: &self.x[..n_rows * hidden],
            link: None,
        };
        host.compute(&ask, &experts, &mut self.parts)?;
        Ok(experts.len())
    }
}
