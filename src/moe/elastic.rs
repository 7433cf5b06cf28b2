//! Experts behind a cache: the server of a step's route points, and everything between two steps that moves records.
//!
//! Device and host are two backends; which ones, this does not know.

use std::{path::PathBuf, sync::Arc, time::Instant};

use freetoken_backend::{
    Backend, Error, Event, ExpertPool, Experts, Lane, Result, RouteAsk, RouteReply, RouteServer,
};

use super::{
    Choices, Counters, ExpertBanks, ExpertCost, ExpertStream, HostExperts, LayerStep, Mode, Observed,
    PlanError, Planned, Planner, PlannerOptions, Policy, Rates, StepKind, Streamed, budget,
    plan::FETCHED_BEHIND, probe,
};

/// Largest chunk of a pool: what is freed and given to another pool at a time.
const CHUNK_BYTES: usize = 256 << 20;
/// The same where a device takes few buffers at a time.
const FEW_BUFFERS: u32 = 64;

/// Records that are sent before one is waited for.
const SENT_AT_ONCE: usize = 64;

/// How experts that have no place on the device are treated.
#[derive(Clone)]
pub struct ElasticOptions {
    /// Where misses are computed.
    pub mode: Mode,
    /// Which expert leaves the cache.
    pub policy: Policy,
    /// Whether the device may read what has no slot in host memory, where it can.
    pub in_place: bool,
    /// A backend that computes on the host.
    pub host: Option<Arc<dyn Backend>>,
    /// Placement by counts, not by clocks.
    pub deterministic: bool,
    /// Known rates; measured otherwise.
    pub rates: Option<Rates>,
    /// Folder in which measured rates are kept.
    pub probes: Option<PathBuf>,
}

impl Default for ElasticOptions {
    fn default() -> Self {
        ElasticOptions {
            mode: Mode::Auto,
            policy: Policy::DEFAULT,
            in_place: true,
            host: None,
            deterministic: false,
            rates: None,
            probes: None,
        }
    }
}

/// Sums of everything that was done for misses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ElasticCounters {
    /// Route points of decode steps.
    pub decode: Counters,
    /// Route points of prompts that are too short to be streamed.
    pub prompts: Counters,
    /// Layers of prefill steps.
    pub prefill: Streamed,
    /// Seconds in which the host computed experts.
    pub host_seconds: f64,
    /// Seconds that the device measured of its link, and the bytes in them.
    pub link_seconds: f64,
    /// Bytes of `link_seconds`.
    pub link_bytes: u64,
}

/// A record on its way into a slot that the device's table does not name yet.
#[derive(Default)]
struct Behind {
    /// Rows of the table to write once everything has landed.
    layers: Vec<u32>,
    landed: Option<Event>,
}

/// The experts of a model, more than the device holds.
pub struct Elastic {
    backend: Arc<dyn Backend>,
    banks: ExpertBanks,
    pool: Arc<ExpertPool>,
    /// Slots behind those of the cache.
    n_ring: usize,
    /// Routes of the largest step.
    n_routes: usize,
    /// Routes of a row.
    top_k: usize,
    planner: Planner,
    host: Option<HostExperts>,
    stream: ExpertStream,
    behind: Behind,
    reply: RouteReply,
    /// What the last reply should take.
    planned: Planned,
    /// When the last route point of the step was answered.
    answered: Option<Instant>,
    counters: ElasticCounters,
}

impl Elastic {
    /// Makes the pool: `n_slots` and a ring of `n_ring`, for steps of at most `max_rows` rows of which `routed_rows` are the
    /// sizes with route points; fills it with the first experts of each layer, and measures the rates unless they are known.
    ///
    /// # Errors
    /// A mode that cannot be honoured, or the device's refusal.
    pub fn new(
        backend: Arc<dyn Backend>,
        banks: ExpertBanks,
        top_k: usize,
        [n_slots, n_ring]: [usize; 2],
        max_rows: usize,
        routed_rows: &[usize],
        options: &ElasticOptions,
    ) -> std::result::Result<Self, ElasticError> {
        let record = banks.record().expect("a model with experts").clone();
        let (n_layers, n_experts) = (banks.layers().len(), banks.n_experts());
        let mut host = match &options.host {
            Some(host) => Some(HostExperts::new(host.clone(), &banks, top_k, routed_rows)?),
            None => None,
        };
        let n_routes = max_rows * top_k;
        let pool = Arc::new(make_pool(&*backend, &banks, n_slots + n_ring, None)?);
        let stream = ExpertStream::new(backend.clone(), &banks, &pool, n_slots, n_ring, n_routes)?;
        let rates = match options.rates {
            Some(rates) => rates,
            None => probe::rates(
                &backend,
                &pool,
                [n_slots, n_ring],
                &banks,
                host.as_mut(),
                options.probes.as_deref(),
            )?,
        };
        let planner = Planner::new(PlannerOptions {
            n_layers,
            n_experts,
            n_slots,
            policy: options.policy,
            expert: ExpertCost {
                record_bytes: record.weight_bytes() as u64,
                flops_per_row: record.flops_per_row(),
            },
            rates,
            mode: options.mode,
            choices: Choices {
                fetch: n_slots > 0,
                read_in_place: options.in_place && backend.caps().reads_host,
                host: host.is_some(),
            },
            deterministic: options.deterministic,
        })?;
        let mut elastic = Elastic {
            backend,
            banks,
            pool,
            n_ring,
            n_routes,
            top_k,
            planner,
            host,
            stream,
            behind: Behind::default(),
            reply: RouteReply::with_capacity(n_experts),
            planned: Planned::default(),
            answered: None,
            counters: ElasticCounters::default(),
        };
        elastic.fill()?;
        elastic.check_copies()?;
        Ok(elastic)
    }

    /// Where the experts of each MoE layer are.
    pub fn experts(&self) -> Vec<Experts> {
        Experts::of_layers(&self.pool)
    }

    /// Where those of a prefill's layer are.
    pub fn streamed_experts(&self) -> Experts {
        self.stream.experts()
    }

    /// Slots that hold experts from step to step.
    pub fn n_slots(&self) -> usize {
        self.planner.cache().n_slots()
    }

    /// Slots that prefill streams through.
    pub fn n_ring(&self) -> usize {
        self.n_ring
    }

    /// Whether the host may be given misses.
    pub fn host_shares(&self) -> bool {
        self.has_host() && self.planner.options().mode != Mode::Gpu
    }

    /// Whether every miss of so many rows has somewhere to go, however they are routed.
    pub fn serves(&self, n_rows: usize) -> bool {
        let needed = (n_rows * self.top_k).min(self.pool.n_experts);
        self.reads_in_place() || self.has_host() || needed <= self.n_slots()
    }

    /// Whether a step may read its misses in place, with nobody asked.
    pub fn reads_in_place(&self) -> bool {
        self.planner.options().choices.read_in_place
    }

    /// Whether the host computes experts too.
    pub fn has_host(&self) -> bool {
        self.host.is_some()
    }

    /// Experts of all layers.
    pub fn n_experts(&self) -> usize {
        self.pool.n_layers * self.pool.n_experts
    }

    /// Bytes of an expert.
    pub fn record_bytes(&self) -> usize {
        self.pool.record.bytes
    }

    /// Bytes of device memory for slots.
    pub fn device_bytes(&self) -> u64 {
        self.pool.chunks.iter().map(|chunk| chunk.bytes() as u64).sum()
    }

    /// Bytes of host memory for banks.
    pub fn bank_bytes(&self) -> u64 {
        self.banks.bytes()
    }

    /// Rates as they were measured, and how the running model differs.
    pub fn rates(&self) -> (&Rates, &Observed) {
        (&self.planner.options().rates, self.planner.observed())
    }

    /// Treats misses otherwise from now on.
    ///
    /// # Errors
    /// A mode that cannot be honoured; it is then as it was.
    pub fn set_mode(&mut self, mode: Mode) -> std::result::Result<(), ElasticError> {
        Ok(self.planner.set_mode(mode)?)
    }

    /// Sums since the start.
    pub fn counters(&self) -> ElasticCounters {
        let (decode, prompts) = (self.planner.counters(), *self.planner.prompt_counters());
        ElasticCounters { decode, prompts, ..self.counters }
    }

    /// Of decode steps since the start, by layer.
    pub fn layer_counters(&self) -> &[Counters] {
        self.planner.layer_counters()
    }

    /// The program of the next decode step.
    pub fn next_step(&self) -> StepKind {
        self.planner.next_step()
    }

    /// Prepares for a program with route points, of a decode step or of a prompt: the device's table is as the planner thinks.
    ///
    /// # Errors
    /// The device's.
    pub fn begin(&mut self, decodes: bool) -> Result<()> {
        self.planner.begin(decodes);
        self.answered = None;
        self.land()
    }

    /// Ends a step that read its misses in place: `ids` `[n_layers, n_rows, top_k]` are what its routers chose. Some of
    /// the misses are brought into slots while the next step runs.
    ///
    /// # Errors
    /// The device's.
    pub fn end_in_place(&mut self, ids: &[i32]) -> Result<()> {
        self.planner.begin(true);
        self.land()?;
        for (layer, ids) in ids.chunks_exact(ids.len() / self.pool.n_layers).enumerate() {
            self.fetch_behind(layer as u32, ids)?;
        }
        Ok(())
    }

    /// Learns what a layer chose, and sends for some of its misses.
    fn fetch_behind(&mut self, layer: u32, ids: &[i32]) -> Result<()> {
        self.reply.clear();
        let caught_up = self.planner.catch_up(layer, ids, FETCHED_BEHIND, &mut self.reply);
        caught_up.map_err(|why| failed(layer, &why))?;
        if self.reply.fetch.is_empty() {
            return Ok(());
        }
        // Who leaves, leaves before the slot is overwritten; who comes is named once it has landed.
        for change in self.reply.table.iter().filter(|change| change.slot < 0) {
            let entry = change.entry as usize * 4;
            self.backend.write(&self.pool.table.slice(entry..entry + 4), bytemuck::bytes_of(&change.slot))?;
        }
        let left = self.backend.event(Lane::Compute)?;
        self.backend.after(Lane::Copy, left)?;
        for &(expert, slot) in &self.reply.fetch {
            self.behind.landed = Some(self.upload(layer, expert, slot)?);
        }
        self.behind.layers.push(layer);
        Ok(())
    }

    /// Names what landed since the last step in the device's table.
    fn land(&mut self) -> Result<()> {
        let Some(landed) = self.behind.landed.take() else { return Ok(()) };
        self.backend.wait(landed)?;
        self.behind.layers.iter().try_for_each(|&layer| self.write_row(layer))?;
        self.behind.layers.clear();
        Ok(())
    }

    /// Leaves a prefill between two of its layers.
    pub fn abandon(&mut self) {
        self.stream.reset();
    }

    /// Computes the experts of one layer of a prefill.
    ///
    /// # Errors
    /// The device's; the step cannot go on.
    pub fn stream(&mut self, step: LayerStep<'_>) -> Result<()> {
        self.land()?;
        let layer = step.layer;
        let streamed = self.stream.layer(step, self.planner.cache_mut())?;
        self.counters.prefill = self.counters.prefill.plus(&streamed);
        if streamed.n_kept > 0 { self.write_row(layer) } else { Ok(()) }
    }

    /// Forgets what is in the slots: after a failed step nobody knows.
    ///
    /// # Errors
    /// The device's.
    pub fn forget(&mut self) -> Result<()> {
        // What is still on its way must not arrive behind what comes next.
        let sent = self.backend.event(Lane::Copy)?;
        self.backend.after(Lane::Compute, sent)?;
        self.behind = Behind::default();
        self.stream.reset();
        self.planner.cache_mut().clear();
        self.write_table()
    }

    /// Changes the number of slots between two steps; the hottest experts stay. Programs that were recorded before must be
    /// recorded again.
    ///
    /// # Errors
    /// The device's refusal: of memory, then the slots are as they were; of a copy, then they are empty.
    pub fn resize(&mut self, n_slots: usize) -> Result<()> {
        self.land()?;
        let n_ring = budget::ring(n_slots);
        let pool = make_pool(&*self.backend, &self.banks, n_slots + n_ring, Some(&self.pool))?;
        let stream =
            ExpertStream::new(self.backend.clone(), &self.banks, &pool, n_slots, n_ring, self.n_routes)?;
        let is_kept = |slot: u32| {
            let chunk = slot as usize / pool.slots_per_chunk;
            pool.slots_per_chunk == self.pool.slots_per_chunk
                && self.pool.chunks.get(chunk).is_some_and(|old| old.same(&pool.chunks[chunk]))
        };
        let before = self.planner.cache().table().to_vec();
        self.planner.cache_mut().resize(n_slots);
        self.planner.set_fetch(n_slots > 0);
        // A record moves by coming again: that needs no copy from slot to slot of any device.
        let table = self.planner.cache().table();
        let came_again: Vec<(usize, u32)> = (0..table.len())
            .filter_map(|entry| Some((entry, u32::try_from(table[entry]).ok()?)))
            .filter(|&(entry, slot)| before[entry] != slot as i32 || !is_kept(slot))
            .collect();
        (self.pool, self.stream) = (Arc::new(pool), stream);
        self.n_ring = n_ring;
        let n_experts = self.pool.n_experts;
        let records = came_again.into_iter();
        let records =
            records.map(|(entry, slot)| ((entry / n_experts) as u32, (entry % n_experts) as u32, slot));
        match self.send(records).and_then(|()| self.write_table()) {
            Ok(()) => Ok(()),
            Err(error) => self.forget().and(Err(error)),
        }
    }

    /// Gives every layer as many of its first experts as there is room for, so that the first step does not start from nothing.
    fn fill(&mut self) -> Result<()> {
        let mut changes = Vec::new();
        let (n_layers, n_experts) = (self.pool.n_layers as u32, self.pool.n_experts as u32);
        let first_of_each = (0..n_experts).flat_map(|expert| (0..n_layers).map(move |layer| (layer, expert)));
        let mut came = Vec::new();
        for (layer, expert) in first_of_each.take(self.planner.cache().n_free()) {
            let slot = self.planner.cache_mut().admit(layer, expert, &mut changes).expect("a slot is free");
            came.push((layer, expert, slot));
        }
        self.planner.cache_mut().release();
        self.send(came.into_iter())?;
        self.write_table()
    }

    /// Brings records into slots and waits for them, a few at a time, since no wait may take long.
    fn send(&self, records: impl Iterator<Item = (u32, u32, u32)>) -> Result<()> {
        let mut sent = 0;
        for (layer, expert, slot) in records {
            let landed = self.upload(layer, expert, slot)?;
            sent += 1;
            if sent % SENT_AT_ONCE == 0 {
                self.backend.wait(landed)?;
            }
        }
        self.backend.wait(self.backend.event(Lane::Copy)?)
    }

    /// Brings a record over the link and back, and compares: there are drivers whose copies report success and do nothing.
    fn check_copies(&self) -> std::result::Result<(), ElasticError> {
        let slot = self.n_slots() as u32;
        let record = self.pool.record.bytes;
        let mut bytes = vec![0; record];
        for layer in [0, self.pool.n_layers as u32 - 1] {
            let expert = self.pool.n_experts as u32 - 1;
            self.backend.wait(self.upload(layer, expert, slot)?)?;
            self.backend.read(&self.pool.slot(slot as usize), &mut bytes)?;
            if bytes != self.pool.banked(layer, expert) {
                return Err(ElasticError::Copies);
            }
        }
        Ok(())
    }

    fn upload(&self, layer: u32, expert: u32, slot: u32) -> Result<Event> {
        let (bank, start) = (&self.banks.layers()[layer as usize], expert as usize * self.pool.record.bytes);
        self.backend.upload(Lane::Copy, bank, start, &self.pool.slot(slot as usize))
    }

    /// Writes a layer's row of the device's table as the mirror has it.
    fn write_row(&self, layer: u32) -> Result<()> {
        let row = self.pool.row(layer);
        let entries = &self.planner.cache().table()[row.first_entry..][..row.n_experts];
        self.backend.write(&self.pool.table_row(layer), bytemuck::cast_slice(entries))
    }

    fn write_table(&self) -> Result<()> {
        self.backend.write(&self.pool.table, bytemuck::cast_slice(self.planner.cache().table()))
    }
}

impl RouteServer for Elastic {
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> Result<()> {
        let now = Instant::now();
        if let Some(before) = self.answered.replace(now) {
            self.planner.observe_interval(&self.planned, (now - before).as_secs_f64());
        }
        if let Some(link) = ask.link {
            self.counters.link_seconds += link.seconds;
            self.counters.link_bytes += link.bytes;
            // What was read in place is in no sample.
            if self.planned.n_fetched > 0 && self.planned.n_in_place == 0 {
                self.planner.observe_link(&self.planned, link.seconds);
            }
        }
        self.planned = self.planner.plan(ask.layer, ask.ids, reply).map_err(|why| failed(ask.layer, &why))?;
        Ok(())
    }

    fn compute(&mut self, ask: &RouteAsk<'_>, host: &[u32], parts: &mut [f32]) -> Result<()> {
        let start = Instant::now();
        self.host.as_mut().expect("planned only where there is a host").compute(ask, host, parts)?;
        let seconds = start.elapsed().as_secs_f64();
        self.counters.host_seconds += seconds;
        self.planner.observe_host(&self.planned, seconds);
        Ok(())
    }
}

/// Why experts cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ElasticError {
    /// The mode cannot be honoured.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device's refusal.
    #[error(transparent)]
    Backend(#[from] Error),
    /// What arrives on the device is not what was sent.
    #[error(
        "a record that was copied to the device came back changed: the driver's copies cannot be trusted; update it, or \
         choose another device with --backend"
    )]
    Copies,
}

fn failed(layer: u32, why: &PlanError) -> Error {
    Error::StepFailed { layer, why: why.to_string() }
}

/// A pool of `n_slots` slots over all layers, as much memory as they take. Chunks of an earlier pool are kept where they are as
/// large as they must be now, and so is its table.
fn make_pool(
    backend: &dyn Backend,
    banks: &ExpertBanks,
    n_slots: usize,
    old: Option<&ExpertPool>,
) -> Result<ExpertPool> {
    let record = banks.record().expect("a model with experts").clone();
    let (n_layers, n_experts) = (banks.layers().len(), banks.n_experts());
    let caps = backend.caps();
    let chunk_bytes = match caps.max_storage_buffers {
        few if few < FEW_BUFFERS => caps.max_binding_bytes,
        _ => CHUNK_BYTES.min(caps.max_binding_bytes),
    };
    let slots_per_chunk = (chunk_bytes / record.bytes).max(1);
    let mut chunks = Vec::new();
    for start in (0..n_slots.max(1)).step_by(slots_per_chunk) {
        let bytes = slots_per_chunk.min(n_slots.max(1) - start) * record.bytes;
        let kept = old.and_then(|old| old.chunks.get(chunks.len())).filter(|chunk| chunk.bytes() == bytes);
        chunks.push(match kept {
            Some(chunk) => chunk.clone(),
            None => backend.alloc(bytes)?,
        });
    }
    let table = match old {
        Some(old) => old.table.clone(),
        None => backend.alloc(n_layers * n_experts * 4)?.whole(),
    };
    Ok(ExpertPool {
        record,
        n_layers,
        n_experts,
        chunks,
        slots_per_chunk,
        table,
        banks: banks.layers().to_vec(),
    })
}
