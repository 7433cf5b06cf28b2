//! Experts behind a cache: the server of a step's route points, and everything between two steps that moves records.
//!
//! Device and host are two backends; which ones, this does not know.

mod route_server;

use std::{collections::VecDeque, path::PathBuf, sync::Arc, time::Instant};

use freetoken_backend::{Backend, Banked, Error, Event, ExpertPool, Experts, Lane, Result, RouteReply};

use super::{
    Choices, Counters, DiskSums, DiskTier, ExpertBanks, ExpertCost, ExpertStream, HostExperts, LayerStep,
    Mode, Observed, PlanError, Planned, Planner, PlannerOptions, Policy, RamCache, Rates, StepKind, Streamed,
    budget, plan::FETCHED_BEHIND, probe,
};

/// Largest chunk of a pool: what is freed and given to another pool at a time.
const CHUNK_BYTES: usize = 256 << 20;
/// The same where a device takes few buffers at a time.
const FEW_BUFFERS: u32 = 64;

/// Records that are sent before one is waited for.
const SENT_AT_ONCE: usize = 64;
/// Bytes that are read from a disk at the start, to learn how fast it is.
const FIRST_READ_BYTES: usize = 512 << 20;

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
    /// What came from a disk.
    pub disk: DiskSums,
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
    /// Where the banks do not hold every expert.
    disk: Option<DiskTier>,
    /// Experts that the host is given next, and that come from the disk for it.
    given: Vec<Banked>,
    coming: VecDeque<Banked>,
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
    /// sizes with route points; fills it with the first experts of each layer, and measures the rates unless they are known. What
    /// the banks do not hold comes from a disk.
    ///
    /// # Errors
    /// A mode that cannot be honoured, the device's refusal, or a disk that cannot be read.
    pub fn new(
        backend: Arc<dyn Backend>,
        mut banks: ExpertBanks,
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
        let mut disk = banks.reader()?.map(|(reader, n_records)| {
            let ram = RamCache::new(n_experts, &n_records, options.policy);
            (DiskTier::new(reader, ram.n_all()), ram)
        });
        let there = match &mut disk {
            Some((disk, ram)) => first_reads(disk, ram, [n_layers, n_experts], record.bytes)?,
            None => all_experts([n_layers, n_experts]).map(|(layer, e)| (layer, Banked::own(e))).collect(),
        };
        let rates = match options.rates {
            Some(rates) => rates,
            None => probe::rates(
                &backend,
                &pool,
                [n_slots, n_ring],
                &banks,
                &there,
                host.as_mut(),
                options.probes.as_deref(),
            )?,
        };
        let mut planner = Planner::new(PlannerOptions {
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
        let disk = disk.map(|(disk, ram)| {
            planner.set_ram(ram);
            if let Some(rate) = disk.rate() {
                planner.set_disk_rate(rate);
                options.probes.iter().for_each(|folder| probe::save_disk_rate(folder, rate));
            }
            disk
        });
        let mut elastic = Elastic {
            backend,
            banks,
            pool,
            n_ring,
            n_routes,
            top_k,
            planner,
            host,
            disk,
            given: Vec::with_capacity(n_experts),
            coming: VecDeque::with_capacity(n_experts),
            stream,
            behind: Behind::default(),
            reply: RouteReply::with_capacity(n_experts),
            planned: Planned::default(),
            answered: None,
            counters: ElasticCounters::default(),
        };
        elastic.fill(&there)?;
        elastic.check_copies(&there)?;
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
        let in_ram = |layer| self.planner.ram().is_none_or(|ram| needed <= ram.n_records(layer));
        let on_device = self.reads_in_place() || needed <= self.n_slots();
        self.has_host() || on_device && (0..self.pool.n_layers as u32).all(in_ram)
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

    /// Experts that the banks have room for, where that is not all of them.
    pub fn n_records(&self) -> Option<usize> {
        self.planner.ram().map(RamCache::n_all)
    }

    /// Bytes a second that came from the disk of late; `None` without one.
    pub fn disk_rate(&self) -> Option<f64> {
        self.disk.as_ref()?.rate()
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
        let disk = self.disk.as_ref().map(DiskTier::sums).unwrap_or_default();
        ElasticCounters { decode, prompts, disk, ..self.counters }
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
        // Records that the device still reads are not overwritten.
        self.stream.rest()?;
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
        for fetch in &self.reply.fetch {
            self.behind.landed = Some(self.upload(layer, fetch.from.record, fetch.slot)?);
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
        self.settle(None);
    }

    /// Waits for what is on its way from the disk, of one layer or of all.
    fn settle(&mut self, layer: Option<u32>) {
        if let Some(disk) = &mut self.disk {
            disk.settle(layer, self.planner.from_disk().1);
        }
    }

    /// Computes the experts of one layer of a prefill.
    ///
    /// # Errors
    /// The device's; the step cannot go on.
    pub fn stream(&mut self, step: LayerStep<'_>) -> Result<()> {
        self.land()?;
        let layer = step.layer;
        let (cache, ram) = self.planner.caches_mut();
        let streamed = self.stream.layer(step, cache, self.disk.as_mut().zip(ram))?;
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
        self.settle(None);
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
        match self.bring(records.collect()).and_then(|()| self.write_table()) {
            Ok(()) => Ok(()),
            Err(error) => self.forget().and(Err(error)),
        }
    }

    /// Gives every layer as many of its first experts as there is room for, of those that are `there` in host memory, so that the
    /// first step does not start from nothing.
    fn fill(&mut self, there: &[(u32, Banked)]) -> Result<()> {
        let mut changes = Vec::new();
        let mut first_of_each = there.to_vec();
        first_of_each.sort_by_key(|(layer, from)| (from.expert, *layer));
        let mut came = Vec::new();
        for (layer, from) in first_of_each.into_iter().take(self.planner.cache().n_free()) {
            let admitted = self.planner.cache_mut().admit(layer, from.expert, &mut changes);
            came.push((layer, from.record, admitted.expect("a slot is free")));
        }
        self.planner.cache_mut().release();
        self.send(came.into_iter())?;
        self.write_table()
    }

    /// Brings experts, by layer, into slots, those that are in no bank by way of one; and waits for them.
    fn bring(&mut self, experts: Vec<(u32, u32, u32)>) -> Result<()> {
        if self.disk.is_none() {
            return self.send(experts.into_iter());
        }
        for of_layer in experts.chunk_by(|a, b| a.0 == b.0) {
            let mut rest = of_layer;
            while let Some(&(layer, ..)) = rest.first() {
                let disk = self.disk.as_mut().expect("looked at above");
                let (_, ram) = self.planner.from_disk();
                disk.settle(Some(layer), ram);
                ram.begin(layer);
                let (now, later) = rest.split_at(rest.len().min(ram.n_records(layer)));
                for &(_, expert, _) in now {
                    ram.touch(layer, expert);
                }
                let mut records = Vec::with_capacity(now.len());
                for &(_, expert, slot) in now {
                    let record = ram.record_of(layer, expert).unwrap_or_else(|| {
                        let record = ram.admit(layer, expert).expect("as many as there are records");
                        disk.request(layer, Banked { expert, record });
                        record
                    });
                    records.push((Banked { expert, record }, slot));
                }
                records.iter().try_for_each(|(from, _)| disk.wait(layer, *from, ram))?;
                self.send(records.into_iter().map(|(from, slot)| (layer, from.record, slot)))?;
                rest = later;
            }
        }
        Ok(())
    }

    /// Brings records into slots and waits for them, a few at a time, since no wait may take long.
    fn send(&self, records: impl Iterator<Item = (u32, u32, u32)>) -> Result<()> {
        let mut sent = 0;
        for (layer, record, slot) in records {
            let landed = self.upload(layer, record, slot)?;
            sent += 1;
            if sent % SENT_AT_ONCE == 0 {
                self.backend.wait(landed)?;
            }
        }
        self.backend.wait(self.backend.event(Lane::Copy)?)
    }

    /// Brings a record over the link and back, and compares: there are drivers whose copies report success and do nothing.
    fn check_copies(&self, there: &[(u32, Banked)]) -> std::result::Result<(), ElasticError> {
        let slot = self.n_slots() as u32;
        let mut bytes = vec![0; self.pool.record.bytes];
        for (layer, from) in there.first().into_iter().chain(there.last()) {
            self.backend.wait(self.upload(*layer, from.record, slot)?)?;
            self.backend.read(&self.pool.slot(slot as usize), &mut bytes)?;
            if bytes != self.pool.banked(*layer, from.record) {
                return Err(ElasticError::Copies);
            }
        }
        Ok(())
    }

    fn upload(&self, layer: u32, record: u32, slot: u32) -> Result<Event> {
        let (bank, start) = (&self.banks.layers()[layer as usize], record as usize * self.pool.record.bytes);
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

/// Every expert, by layers.
fn all_experts([n_layers, n_experts]: [usize; 2]) -> impl Iterator<Item = (u32, u32)> {
    (0..n_layers as u32).flat_map(move |layer| (0..n_experts as u32).map(move |expert| (layer, expert)))
}

/// Reads the first experts of some layers, so that the rate of the disk is known; gives those that are there then, by layers.
fn first_reads(
    disk: &mut DiskTier,
    ram: &mut RamCache,
    sizes: [usize; 2],
    record_bytes: usize,
) -> Result<Vec<(u32, Banked)>> {
    let mut there = Vec::new();
    let n_most = FIRST_READ_BYTES.div_ceil(record_bytes);
    for (layer, expert) in all_experts(sizes) {
        if there.len() == n_most {
            break;
        }
        let Some(record) = ram.admit(layer, expert) else { continue };
        disk.request(layer, Banked { expert, record });
        there.push((layer, Banked { expert, record }));
    }
    there.iter().try_for_each(|(layer, from)| disk.wait(*layer, *from, ram))?;
    there.iter().for_each(|(layer, from)| ram.let_go(*layer, from.record));
    Ok(there)
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
