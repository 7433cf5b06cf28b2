//! A route point on one queue: the ids go out and the hits follow at once behind them; the host waits for the ids alone and
//! answers; then come table changes, fetches, the experts that arrived, those read in place, and the host's own rows.
//!
//! The device cannot read a host bank: what is to be read in place passes through guest slots that no table of the pool knows.

use std::sync::Arc;

use freetoken_backend::{Error, ExpertMlp, ExpertPool, Experts, Result, RouteAsk, RouteReply, RouteServer};
use wgpu::{BufferDescriptor, BufferUsages};

use crate::{
    device::Gpu,
    dispatch::{Dispatch, Recorder},
    memory::{Slot, buffer},
    ops::expert_mlp::{self, Places},
    program::submit,
    queue::Lanes,
    staging::Staging,
};

/// Bytes of guest slots, unless one record takes more.
const GUEST_BYTES: usize = 64 << 20;

/// A table that holds a few experts of one layer.
struct Visitors {
    table: wgpu::Buffer,
    entries: Vec<i32>,
    dispatches: Vec<Dispatch>,
}

impl Visitors {
    fn record(
        op: &ExpertMlp,
        pool: &ExpertPool,
        name: &'static str,
        places: Places,
        recorder: &mut Recorder<'_>,
    ) -> Self {
        let table = recorder.scratch.get(recorder.gpu, name, pool.n_experts * 4);
        let places = Places { table: Slot::whole(&table), first_entry: 0, ..places };
        let own = std::mem::take(&mut recorder.dispatches);
        expert_mlp::record_at(op, pool, &places, recorder);
        let dispatches = std::mem::replace(&mut recorder.dispatches, own);
        Visitors { table, entries: vec![-1; pool.n_experts], dispatches }
    }

    /// Computes the routes of these experts, each in its slot.
    fn run(&mut self, experts: impl Iterator<Item = (u32, u32)>, lanes: &mut Lanes, gpu: &Gpu) {
        self.entries.fill(-1);
        for (expert, slot) in experts {
            self.entries[expert as usize] = slot as i32;
        }
        lanes.write(&self.table, 0, bytemuck::cast_slice(&self.entries));
        submit(lanes, &self.dispatches, gpu);
    }
}

/// One recorded route point.
pub(crate) struct RoutePoint {
    mlp: ExpertMlp,
    pool: Arc<ExpertPool>,
    layer: u32,
    hits: Vec<Dispatch>,
    arrivals: Visitors,
    guests: Visitors,
    /// Records that `guests` reads.
    guest_slots: wgpu::Buffer,
    n_guests: usize,
    /// Ids, weights and rows on their way to the host.
    asked: wgpu::Buffer,
    ids: Vec<i32>,
    weights: Vec<f32>,
    rows: Vec<f32>,
    /// What the host computes, `[n_rows, top_k, hidden]`.
    host_rows: Vec<f32>,
    reply: RouteReply,
}

impl RoutePoint {
    pub(crate) fn record(mlp: &ExpertMlp, recorder: &mut Recorder<'_>) -> Self {
        let Experts::Pool { pool, layer } = &mlp.experts else { unreachable!("refused by `supports`") };
        let (n, top_k, hidden) = (mlp.p.n_rows as usize, mlp.p.top_k as usize, mlp.p.hidden as usize);
        let guest_bytes = GUEST_BYTES.min(recorder.gpu.max_binding());
        let n_guests = (guest_bytes / pool.record.bytes).clamp(1, pool.n_experts);
        let guest_slots =
            recorder.scratch.get(recorder.gpu, "route_point.guest_slots", n_guests * pool.record.bytes);
        let in_pool = || Places::of_pool(pool, *layer, recorder);
        let (places, arrived) = (in_pool(), in_pool());
        let guest_places =
            Places { chunks: vec![guest_slots.clone()], slots_per_chunk: n_guests as u32, ..in_pool() };
        expert_mlp::record_at(mlp, pool, &places, recorder);
        let hits = std::mem::take(&mut recorder.dispatches);
        let asked = recorder.gpu.device.create_buffer(&BufferDescriptor {
            label: None,
            size: 4 * (2 * n * top_k + n * hidden) as u64,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        RoutePoint {
            arrivals: Visitors::record(mlp, pool, "route_point.arrivals", arrived, recorder),
            guests: Visitors::record(mlp, pool, "route_point.guests", guest_places, recorder),
            mlp: mlp.clone(),
            pool: pool.clone(),
            layer: *layer,
            hits,
            guest_slots,
            n_guests,
            asked,
            ids: vec![0; n * top_k],
            weights: vec![0.0; n * top_k],
            rows: vec![0.0; n * hidden],
            host_rows: vec![0.0; n * top_k * hidden],
            reply: RouteReply::with_capacity(pool.n_experts),
        }
    }

    /// Asks the host and does what it answers.
    pub(crate) fn replay(
        &mut self,
        lanes: &mut Lanes,
        staging: &mut Staging,
        gpu: &Gpu,
        server: &mut dyn RouteServer,
    ) -> Result<()> {
        let seq = self.send_question(lanes);
        submit(lanes, &self.hits, gpu);
        self.read_question(lanes, seq)?;
        let mut reply = std::mem::take(&mut self.reply);
        reply.clear();
        let done = server
            .answer(&self.ask(), &mut reply)
            .and_then(|()| self.follow(&reply, lanes, staging, gpu))
            .and_then(|()| self.take_host_rows(&reply.host, lanes, staging, server));
        self.reply = reply;
        done
    }

    fn ask(&self) -> RouteAsk<'_> {
        let RoutePoint { layer, mlp, ids, weights, rows, .. } = self;
        let (n_rows, top_k) = (mlp.p.n_rows as usize, mlp.p.top_k as usize);
        RouteAsk { layer: *layer, n_rows, top_k, ids, weights, rows, link: None }
    }

    /// Copies what the host decides by.
    fn send_question(&self, lanes: &mut Lanes) -> u64 {
        let mut encoder = lanes.encoder();
        let mut end = 0;
        let parts = [
            (&self.mlp.ids, self.ids.len()),
            (&self.mlp.weights, self.weights.len()),
            (&self.mlp.x, self.rows.len()),
        ];
        for (view, words) in parts {
            let bytes = 4 * words as u64;
            let start = view.range().start as u64;
            encoder.copy_buffer_to_buffer(buffer(view.buffer()), start, &self.asked, end, Some(bytes));
            end += bytes;
        }
        lanes.submit(Some(encoder))
    }

    fn read_question(&mut self, lanes: &Lanes, seq: u64) -> Result<()> {
        let RoutePoint { ids, weights, rows, asked, .. } = self;
        lanes.mapped(asked, asked.size(), seq, |bytes| {
            let (id_bytes, rest) = bytes.split_at(4 * ids.len());
            let (weight_bytes, row_bytes) = rest.split_at(4 * weights.len());
            bytemuck::cast_slice_mut(ids).copy_from_slice(id_bytes);
            bytemuck::cast_slice_mut(weights).copy_from_slice(weight_bytes);
            bytemuck::cast_slice_mut(rows).copy_from_slice(row_bytes);
        })
    }

    /// Does what the reply says.
    fn follow(
        &mut self,
        reply: &RouteReply,
        lanes: &mut Lanes,
        staging: &mut Staging,
        gpu: &Gpu,
    ) -> Result<()> {
        self.check(reply)?;
        let RoutePoint { pool, layer, .. } = self;
        let table = (buffer(pool.table.buffer()), pool.table.range().start as u64);
        for change in &reply.table {
            lanes.write(table.0, table.1 + 4 * u64::from(change.entry), &change.slot.to_le_bytes());
        }
        for &(expert, slot) in &reply.fetch {
            let slot = pool.slot(slot as usize);
            let at = slot.range().start as u64;
            staging.upload(lanes, buffer(slot.buffer()), at, pool.banked(*layer, expert))?;
        }
        if !reply.fetch.is_empty() {
            self.arrivals.run(reply.fetch.iter().copied(), lanes, gpu);
        }
        for experts in reply.read_in_place.chunks(self.n_guests) {
            for (guest, &expert) in experts.iter().enumerate() {
                let at = (guest * pool.record.bytes) as u64;
                staging.upload(lanes, &self.guest_slots, at, pool.banked(*layer, expert))?;
            }
            self.guests.run(experts.iter().copied().zip(0..), lanes, gpu);
        }
        Ok(())
    }

    /// Lets the host compute its rows while the device works; each goes to its own place.
    fn take_host_rows(
        &mut self,
        host: &[u32],
        lanes: &mut Lanes,
        staging: &mut Staging,
        server: &mut dyn RouteServer,
    ) -> Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        let mut rows = std::mem::take(&mut self.host_rows);
        let computed = server.compute(&self.ask(), host, &mut rows);
        self.host_rows = rows;
        computed?;
        let hidden = self.mlp.p.hidden as usize;
        let (parts, start) = (buffer(self.mlp.parts.buffer()), self.mlp.parts.range().start);
        for (route, &id) in self.ids.iter().enumerate() {
            if id >= 0 && host.contains(&(id as u32)) {
                let row = &self.host_rows[route * hidden..(route + 1) * hidden];
                let at = (start + 4 * route * hidden) as u64;
                staging.upload(lanes, parts, at, bytemuck::cast_slice(row))?;
            }
        }
        Ok(())
    }

    /// Refuses what names an expert, a slot or an entry that there is not.
    fn check(&self, reply: &RouteReply) -> Result<()> {
        let (pool, n_experts) = (&self.pool, self.pool.n_experts as u32);
        let mut banked = reply.fetch.iter().map(|(expert, _)| expert).chain(&reply.read_in_place);
        let entries = (pool.n_layers * pool.n_experts) as u32;
        if banked.any(|&expert| expert >= n_experts) || reply.host.iter().any(|&expert| expert >= n_experts) {
            return Err(self.failed("the reply names an expert that the layer does not have"));
        }
        if reply.fetch.iter().any(|&(_, slot)| slot as usize >= pool.n_slots())
            || reply
                .table
                .iter()
                .any(|change| change.entry >= entries || change.slot >= pool.n_slots() as i32)
        {
            return Err(self.failed("the reply names a slot that the pool does not have"));
        }
        if pool.banks.is_empty() && !(reply.fetch.is_empty() && reply.read_in_place.is_empty()) {
            return Err(self.failed("the reply wants records, and the pool has no host banks"));
        }
        Ok(())
    }

    fn failed(&self, why: &str) -> Error {
        Error::StepFailed { layer: self.layer, why: why.into() }
    }
}
