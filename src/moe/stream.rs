//! Prefill through a ring: while one layer computes, the records that it still lacks and those of the next layer cross the
//! link, each once. Records land in ring slots, or in slots of the cache that nobody has; experts start as they land, a few
//! at a time, and each routed row is computed once, into its own part.

use std::{collections::VecDeque, sync::Arc};

use freetoken_backend::{
    Backend, Banked, Error, Event, ExpertPool, Experts, HostBuffer, Lane, Program, Result, TableChange, View,
};

use super::{
    ExpertBanks, ExpertCache,
    feed::{Below, Feed},
};

/// Pieces of the ring that are computed at a time: while one is, the others are on their way.
const WAVES: usize = 4;
/// Where a layer uses at least this share of its experts, the next one is taken to use all of its own.
const DENSE_SHARE: f64 = 0.75;

/// A record on its way.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    layer: u32,
    expert: u32,
    slot: u32,
    landed: Event,
}

/// What one layer of a prefill step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streamed {
    /// Distinct experts that were on the device already.
    pub n_hits: u64,
    /// Distinct experts that came over the link and were used.
    pub n_fetched: u64,
    /// Of those, that stay in slots of the cache.
    pub n_kept: u64,
    /// Records that came and were not used.
    pub n_wasted: u64,
}

impl Streamed {
    /// What was added since.
    pub fn since(&self, before: &Streamed) -> Streamed {
        Streamed {
            n_hits: self.n_hits - before.n_hits,
            n_fetched: self.n_fetched - before.n_fetched,
            n_kept: self.n_kept - before.n_kept,
            n_wasted: self.n_wasted - before.n_wasted,
        }
    }

    /// Both together.
    pub fn plus(&self, other: &Streamed) -> Streamed {
        Streamed {
            n_hits: self.n_hits + other.n_hits,
            n_fetched: self.n_fetched + other.n_fetched,
            n_kept: self.n_kept + other.n_kept,
            n_wasted: self.n_wasted + other.n_wasted,
        }
    }
}

/// One layer of a step.
pub struct LayerStep<'a> {
    /// Row of the pool's table.
    pub layer: u32,
    /// The next MoE layer of the step.
    pub next_layer: Option<u32>,
    /// i32: what the router chose, once everything queued so far is done.
    pub ids: &'a View,
    /// The experts' op over [`ExpertStream::experts`].
    pub mlp: &'a mut dyn Program,
}

/// The ring and what is in it.
pub struct ExpertStream {
    backend: Arc<dyn Backend>,
    banks: Vec<Arc<HostBuffer>>,
    /// The slots of the cache and of the ring behind a table of their own: the experts that are computed next.
    wave: Arc<ExpertPool>,
    /// The first slot of the ring.
    first_slot: usize,
    /// Behind the last work that read a slot of the ring.
    read_by: Vec<Option<Event>>,
    /// Slots of the ring that a record may be sent to, the next one first.
    free: VecDeque<u32>,
    /// In the order in which they land.
    arrivals: VecDeque<Arrival>,
    /// Experts of the layer that are still to be sent.
    feed: Feed,
    /// Experts of the next layer, which are sent ahead of it, once they are.
    ahead: Feed,
    is_ahead: bool,
    /// While they are sorted: experts that have no slot.
    missing: Vec<u32>,
    /// Routes of each expert of the layer.
    counts: Vec<u32>,
    /// Experts of the layer that have a slot of the cache.
    n_own: usize,
    /// Of the cache's table, by what was sent for the layer.
    changes: Vec<TableChange>,
    table: Vec<i32>,
    ids: Vec<i32>,
}

impl ExpertStream {
    /// A ring of `n_ring` slots behind the `first_slot` ones of the cache, for steps of at most `n_routes` routes.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn new(
        backend: Arc<dyn Backend>,
        banks: &ExpertBanks,
        pool: &ExpertPool,
        first_slot: usize,
        n_ring: usize,
        n_routes: usize,
    ) -> Result<Self> {
        assert!(n_ring > 0 && first_slot + n_ring <= pool.n_slots(), "the ring lies behind the cache");
        let n_experts = pool.n_experts;
        let wave = pool.behind(backend.alloc(n_experts * 4)?.whole(), Vec::new());
        Ok(ExpertStream {
            backend,
            banks: banks.layers().to_vec(),
            wave: Arc::new(wave),
            first_slot,
            read_by: vec![None; n_ring],
            free: (first_slot as u32..(first_slot + n_ring) as u32).collect(),
            arrivals: VecDeque::with_capacity(n_ring),
            feed: Feed::new(n_experts, false),
            ahead: Feed::new(n_experts, true),
            is_ahead: false,
            missing: Vec::with_capacity(n_experts),
            counts: vec![0; n_experts],
            n_own: 0,
            changes: Vec::with_capacity(n_experts),
            table: vec![-1; n_experts],
            ids: vec![0; n_routes],
        })
    }

    /// Where the experts of a wave are, whatever their layer.
    pub fn experts(&self) -> Experts {
        Experts::Pool { pool: self.wave.clone(), layer: 0 }
    }

    /// Forgets what was on its way, after a step that failed.
    pub fn reset(&mut self) {
        self.feed.clear();
        self.ahead.clear();
        while let Some(arrival) = self.arrivals.pop_front() {
            self.give_back(arrival.slot);
        }
    }

    /// Waits until the device has every record that was sent: until then those of host memory stay.
    ///
    /// # Errors
    /// The device's.
    pub fn rest(&mut self) -> Result<()> {
        self.feed.rest(&*self.backend)?;
        self.ahead.rest(&*self.backend)
    }

    /// Computes the experts of a layer. What host memory does not hold comes from `below`. Asserts that the cache holds nothing.
    ///
    /// # Errors
    /// The device's, or a read that failed; the step cannot go on.
    pub(super) fn layer(
        &mut self,
        step: LayerStep<'_>,
        cache: &mut ExpertCache,
        mut below: Option<Below<'_>>,
    ) -> Result<Streamed> {
        let LayerStep { layer, next_layer, ids, mlp } = step;
        let n_routes = ids.bytes() / 4;
        self.backend.read(ids, bytemuck::cast_slice_mut(&mut self.ids[..n_routes]))?;
        self.counts.fill(0);
        for id in self.ids[..n_routes].iter().filter(|id| **id >= 0) {
            let Some(count) = self.counts.get_mut(*id as usize) else {
                let why = format!("the router chose expert {id} of {}", self.counts.len());
                return Err(Error::StepFailed { layer, why });
            };
            *count += 1;
        }
        let mut streamed = Streamed { n_wasted: self.drop_unused(layer), ..Streamed::default() };
        let n_used = self.counts.iter().filter(|count| **count > 0).count();
        let is_dense = n_used as f64 >= DENSE_SHARE * self.counts.len() as f64;
        let has_slot = |&expert: &u32| cache.slot_of(layer, expert).is_some();
        self.n_own = (0..self.counts.len() as u32).filter(has_slot).count();
        self.table.fill(-1);
        for expert in 0..self.counts.len() as u32 {
            if self.counts[expert as usize] > 0
                && let Some(slot) = cache.touch(layer, expert)
            {
                self.table[expert as usize] = slot as i32;
                streamed.n_hits += 1;
            }
        }
        assert!(self.arrivals.iter().all(|arrival| arrival.layer == layer), "arrivals of another step");
        // Each wave costs a pass over all routes. Where nothing is to come any more there is one; else the ring has room again soon.
        let n_coming = self.arrivals.len();
        let is_last = streamed.n_hits + n_coming as u64 == n_used as u64 && self.have_landed()?;
        let n_first = if is_last { n_coming } else { 0 };
        if streamed.n_hits > 0 || n_first > 0 {
            self.compute(n_first, mlp)?;
            streamed.n_fetched += n_first as u64;
        }
        self.begin(layer, cache, &mut below)?;
        loop {
            self.send(layer, next_layer.filter(|_| is_dense), cache, &mut below)?;
            let wave = self.read_by.len().div_ceil(WAVES);
            let n = self.arrivals.iter().take(wave).take_while(|arrival| arrival.layer == layer).count();
            if n == 0 {
                break;
            }
            self.table.fill(-1);
            self.compute(n, mlp)?;
            streamed.n_fetched += n as u64;
        }
        cache.release();
        streamed.n_kept = self.changes.iter().filter(|change| change.slot >= 0).count() as u64;
        self.changes.clear();
        Ok(streamed)
    }

    /// Whether all records that were sent are there. They land in their order.
    fn have_landed(&self) -> Result<bool> {
        self.arrivals.back().map_or(Ok(true), |last| self.backend.reached(last.landed))
    }

    /// Computes the experts in `table` and the first `n` that arrive, once they are there. These are done then, and their slots of the
    /// ring are free.
    fn compute(&mut self, n: usize, mlp: &mut dyn Program) -> Result<()> {
        for arrival in self.arrivals.iter().take(n) {
            self.table[arrival.expert as usize] = arrival.slot as i32;
        }
        if let Some(last) = n.checked_sub(1) {
            self.backend.after(Lane::Compute, self.arrivals[last].landed)?;
        }
        self.backend.write(&self.wave.table, bytemuck::cast_slice(&self.table))?;
        mlp.submit()?;
        let read = self.backend.event(Lane::Compute)?;
        for arrival in self.arrivals.drain(..n) {
            self.counts[arrival.expert as usize] = 0;
            if let Some(place) = (arrival.slot as usize).checked_sub(self.first_slot) {
                self.read_by[place] = Some(read);
                self.free.push_back(arrival.slot);
            }
        }
        Ok(())
    }

    /// Drops what came for the layer and no row needs. Its slots take the next records: one lane, one order.
    fn drop_unused(&mut self, layer: u32) -> u64 {
        let n_before = self.arrivals.len();
        for _ in 0..n_before {
            let arrival = self.arrivals.pop_front().expect("as many as there were");
            let is_cached = (arrival.slot as usize) < self.first_slot;
            if arrival.layer != layer || is_cached || self.counts[arrival.expert as usize] > 0 {
                self.arrivals.push_back(arrival);
            } else {
                self.give_back(arrival.slot);
            }
        }
        (n_before - self.arrivals.len()) as u64
    }

    fn give_back(&mut self, slot: u32) {
        if slot as usize >= self.first_slot {
            self.free.push_back(slot);
        }
    }

    fn is_coming(&self, layer: u32, expert: u32) -> bool {
        self.arrivals.iter().any(|arrival| (arrival.layer, arrival.expert) == (layer, expert))
    }

    /// Begins to send what is missing, those with most rows first.
    fn begin(&mut self, layer: u32, cache: &ExpertCache, below: &mut Option<Below<'_>>) -> Result<()> {
        let mut missing = std::mem::take(&mut self.missing);
        missing.clear();
        let is_missing = |expert: u32| {
            self.counts[expert as usize] > 0
                && cache.slot_of(layer, expert).is_none()
                && !self.is_coming(layer, expert)
        };
        missing.extend((0..self.counts.len() as u32).filter(|&expert| is_missing(expert)));
        missing.sort_by_key(|&expert| (std::cmp::Reverse(self.counts[expert as usize]), expert));
        // What was sent ahead of the layer lies in its bank too.
        self.ahead.rest(&*self.backend)?;
        self.is_ahead = false;
        self.feed.begin(layer, missing.iter().copied(), &*self.backend, below)?;
        self.missing = missing;
        Ok(())
    }

    /// Sends records while there is room for them: of this layer, then of the next. It waits for the disk only where there is nothing
    /// to compute meanwhile.
    fn send(
        &mut self,
        layer: u32,
        next_layer: Option<u32>,
        cache: &mut ExpertCache,
        below: &mut Option<Below<'_>>,
    ) -> Result<()> {
        while self.arrivals.len() < self.read_by.len() {
            if !self.feed.is_done() {
                let waits = self.arrivals.is_empty();
                let Some(from) = self.feed.next(waits, &*self.backend, below)? else { return Ok(()) };
                let Some(slot) = self.slot_for(layer, from.expert, cache)? else { return Ok(()) };
                let landed = self.upload(layer, from, slot)?;
                self.feed.sent(from.record, landed, below);
            } else if let Some(next) = next_layer {
                if !std::mem::replace(&mut self.is_ahead, true) {
                    let missing = (0..self.counts.len() as u32).filter(|&e| cache.slot_of(next, e).is_none());
                    self.ahead.begin(next, missing, &*self.backend, below)?;
                }
                let Some(from) = self.ahead.next(false, &*self.backend, below)? else { return Ok(()) };
                let Some(slot) = self.ring_slot()? else { return Ok(()) };
                let landed = self.upload(next, from, slot)?;
                self.ahead.sent(from.record, landed, below);
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    /// A slot that nobody has, as long as the layer has less than its share of the cache; else one of the ring.
    fn slot_for(&mut self, layer: u32, expert: u32, cache: &mut ExpertCache) -> Result<Option<u32>> {
        if self.n_own >= cache.n_slots() / self.banks.len() || cache.n_free() == 0 {
            return self.ring_slot();
        }
        self.n_own += 1;
        Ok(cache.admit(layer, expert, &mut self.changes))
    }

    /// The next free slot of the ring; what is sent to it from now on waits for the work that still reads it.
    fn ring_slot(&mut self) -> Result<Option<u32>> {
        let Some(slot) = self.free.pop_front() else { return Ok(None) };
        if let Some(read) = self.read_by[slot as usize - self.first_slot].take() {
            self.backend.after(Lane::Copy, read)?;
        }
        Ok(Some(slot))
    }

    fn upload(&mut self, layer: u32, from: Banked, slot: u32) -> Result<Event> {
        let (bank, record) = (&self.banks[layer as usize], self.wave.record.bytes);
        let start = from.record as usize * record;
        let landed = self.backend.upload(Lane::Copy, bank, start, &self.wave.slot(slot as usize))?;
        self.arrivals.push_back(Arrival { layer, expert: from.expert, slot, landed });
        Ok(landed)
    }
}
