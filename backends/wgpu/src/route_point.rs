//! A route point on one queue: the ids go out and the hits follow at once behind them; the host waits for the ids alone and
//! answers; then one submission brings table changes and fetches and computes the experts that arrived and those read in place;
//! the host's own rows come last. While the host waits it encodes everything up to the next question.
//!
//! A bank that the device cannot read passes through guest slots that no table of the pool knows.

use std::{sync::Arc, time::Duration};

use freetoken_backend::{
    Banked, Error, ExpertMlp, ExpertPool, Experts, Fetch, HostMemory, LinkSample, NOWHERE, OpSpec, Result,
    RouteAsk, RouteReply, RouteServer,
};
use wgpu::{BufferDescriptor, BufferUsages};

use crate::{
    commands::{Commands, Copy, Run},
    device::Gpu,
    dispatch::{Call, Dispatch, Recorder},
    host::WgpuHostMemory,
    kernels::TABLE_CHANGES,
    memory::{Slot, buffer},
    ops::expert_mlp,
    places::{Bank, NEVER, Places},
    staging::Staging,
    timing::{self, Stamps},
};

/// Bytes of guest slots, unless one record takes more.
const GUEST_BYTES: usize = 64 << 20;
/// What a letter says of an expert that is read in place.
const IN_PLACE: i32 = -2;

/// Host memory that the host answers from. All route points of a device share it: each waits for its question, and so for whatever the
/// one before it sent.
#[derive(Default)]
pub(crate) struct Desk {
    /// i32: the slot of each expert of the layer, [`IN_PLACE`], or -1; the number of table changes; each one's entry and slot.
    letter: Option<WgpuHostMemory>,
    /// f32 `[n_rows, top_k, hidden]`: what the host computes.
    rows: Option<WgpuHostMemory>,
    /// Around the last fetch, where the device can write them.
    stamps: Option<Stamps>,
    /// Bytes of that fetch, if no question has told of it.
    fetched_bytes: Option<u64>,
}

impl Desk {
    /// Makes room for a letter and for rows.
    fn reserve(&mut self, letter_bytes: usize, rows_bytes: usize, gpu: &Gpu) -> Result<()> {
        if self.stamps.is_none() {
            self.stamps = Stamps::between_copies(gpu);
        }
        for (memory, bytes) in [(&mut self.letter, letter_bytes), (&mut self.rows, rows_bytes)] {
            if memory.as_ref().is_none_or(|memory| memory.bytes().len() < bytes) {
                *memory = Some(gpu.host.alloc(gpu, bytes)?);
            }
        }
        Ok(())
    }
}

/// Table changes that a letter has room for: each expert may arrive, and another leave for it.
fn most_changes(n_experts: usize) -> usize {
    2 * n_experts
}

/// Slots for experts that are read in place where the device cannot do that.
struct Guests {
    /// Records.
    slots: wgpu::Buffer,
    n_slots: usize,
    /// The guest slot of each expert, or -1.
    table: wgpu::Buffer,
    entries: Vec<i32>,
    dispatches: Vec<Dispatch>,
}

impl Guests {
    fn record(op: &ExpertMlp, pool: &ExpertPool, recorder: &mut Recorder<'_>) -> Self {
        let bytes = GUEST_BYTES.min(recorder.gpu.max_binding());
        let n_slots = (bytes / pool.record.bytes).clamp(1, pool.n_experts);
        let slots =
            recorder.scratch.get(recorder.gpu, "route_point.guest_slots", n_slots * pool.record.bytes);
        let table = recorder.scratch.get(recorder.gpu, "route_point.guest_table", pool.n_experts * 4);
        let places = Places {
            table: Slot::whole(&table),
            first_entry: 0,
            chunks: vec![Slot::whole(&slots)],
            slots_per_chunk: n_slots,
            banked: NEVER,
            bank: Bank::default(),
        };
        expert_mlp::record_at(op, pool, &places, recorder);
        let dispatches = std::mem::take(&mut recorder.dispatches);
        Guests { slots, n_slots, table, entries: vec![-1; pool.n_experts], dispatches }
    }

    /// Computes the routes of these experts, as many at a time as there are slots.
    fn run(
        &mut self,
        experts: &[Banked],
        pool: &ExpertPool,
        bank: &WgpuHostMemory,
        commands: &mut Commands<'_>,
        staging: &mut Staging,
    ) -> Result<()> {
        let bytes = pool.record.bytes;
        for experts in experts.chunks(self.n_slots) {
            self.entries.fill(-1);
            for (slot, from) in experts.iter().enumerate() {
                self.entries[from.expert as usize] = slot as i32;
                let start = from.record as usize * bytes;
                commands.bring(staging, bank, start, &self.slots, slot * bytes, bytes)?;
            }
            // A write does not wait for what is not submitted.
            commands.submit();
            commands.lanes.write(&self.table, 0, bytemuck::cast_slice(&self.entries));
            commands.dispatch(&self.dispatches);
        }
        Ok(())
    }
}

/// One recorded route point.
pub(crate) struct RoutePoint {
    mlp: ExpertMlp,
    pool: Arc<ExpertPool>,
    layer: u32,
    hits: Vec<Dispatch>,
    /// What the host wrote, where the device reads it.
    letter: wgpu::Buffer,
    changes: Vec<Dispatch>,
    /// The routes of the experts that the letter names.
    named: Vec<Dispatch>,
    /// Where the device cannot read the layer's bank.
    guests: Option<Guests>,
    /// Ids, weights, rows and the layer's row of the slot table on their way to the host; then the stamps around the last fetch.
    asked: wgpu::Buffer,
    /// The layer's row of the slot table, then as the reply settles it.
    places: Vec<i32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    rows: Vec<f32>,
    reply: RouteReply,
}

impl RoutePoint {
    /// Also gives the copies that ask the host.
    pub(crate) fn record(
        mlp: &ExpertMlp,
        desk: &mut Desk,
        recorder: &mut Recorder<'_>,
    ) -> Result<(Self, Vec<Copy>)> {
        let Experts::Pool { pool, layer } = &mlp.experts else { unreachable!("refused by `supports`") };
        let (n, top_k, hidden) = (mlp.p.n_rows as usize, mlp.p.top_k as usize, mlp.p.hidden as usize);
        let n_experts = pool.n_experts;
        let letter_bytes = 4 * (n_experts + 1 + 2 * most_changes(n_experts));
        desk.reserve(letter_bytes, 4 * n * top_k * hidden, recorder.gpu)?;
        recorder.work = mlp.flops().max(mlp.bytes());

        expert_mlp::record_at(mlp, pool, &Places::of_pool(pool, *layer, recorder), recorder);
        let hits = std::mem::take(&mut recorder.dispatches);

        let letter = recorder.scratch.get(recorder.gpu, "route_point.letter", letter_bytes);
        let table = recorder.words(&pool.table, pool.n_layers * n_experts);
        recorder.call(Call {
            kernel: &TABLE_CHANGES,
            constants: Vec::new(),
            params: &[table.at(4), n_experts as u32],
            slots: vec![table, Slot::whole(&letter)],
            chunks: &[],
            workgroups: [1, 1, 1],
        });
        let changes = std::mem::take(&mut recorder.dispatches);

        let bank = Bank::of_pool(pool, *layer, recorder.gpu);
        let needs_guests = bank.is_err() && !pool.banks.is_empty();
        let places = Places {
            table: Slot::whole(&letter),
            first_entry: 0,
            banked: IN_PLACE,
            bank: bank.unwrap_or_default(),
            ..Places::of_pool(pool, *layer, recorder)
        };
        expert_mlp::record_at(mlp, pool, &places, recorder);
        let named = std::mem::take(&mut recorder.dispatches);
        let row = pool.table_row(*layer);
        let parts =
            [(&mlp.ids, n * top_k), (&mlp.weights, n * top_k), (&mlp.x, n * hidden), (&row, n_experts)];
        let parts = parts.map(|(view, words)| (buffer(view.buffer()), view.range().start, 4 * words));
        let stamps = desk.stamps.as_ref().map(|stamps| (&stamps.ticks, 0, Stamps::BYTES));
        let parts = || parts.into_iter().chain(stamps);
        let asked = recorder.gpu.device.create_buffer(&BufferDescriptor {
            label: None,
            size: parts().map(|(.., bytes)| bytes as u64).sum(),
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut at = 0;
        let mut question = Vec::new();
        for (src, start, bytes) in parts() {
            question.push(Copy { src: src.clone(), start, dst: asked.clone(), at, bytes });
            at += bytes;
        }
        let point = RoutePoint {
            guests: needs_guests.then(|| Guests::record(mlp, pool, recorder)),
            mlp: mlp.clone(),
            pool: pool.clone(),
            layer: *layer,
            hits,
            letter,
            changes,
            named,
            asked,
            places: vec![NOWHERE; n_experts],
            ids: vec![0; n * top_k],
            weights: vec![0.0; n * top_k],
            rows: vec![0.0; n * hidden],
            reply: RouteReply::with_capacity(n_experts),
        };
        Ok((point, question))
    }

    /// Asks the host, with everything before it, and does what it answers; then adds what comes behind.
    pub(crate) fn replay(
        &mut self,
        behind: &Run,
        commands: &mut Commands<'_>,
        staging: &mut Staging,
        desk: &mut Desk,
        server: &mut dyn RouteServer,
    ) -> Result<()> {
        let seq = commands.submit();
        commands.dispatch(&self.hits);
        commands.submit();
        let encoded = commands.ahead(behind);
        let link = self.read_question(commands, seq, desk)?;
        let mut reply = std::mem::take(&mut self.reply);
        reply.clear();
        let done = server
            .answer(&self.ask(link), &mut reply)
            .and_then(|()| self.follow(&reply, commands, staging, desk))
            .and_then(|()| self.take_host_rows(&reply.host, commands, staging, desk, server));
        self.reply = reply;
        if done.is_err() {
            desk.fetched_bytes = None;
        }
        commands.add(behind, encoded);
        done
    }

    fn ask(&self, link: Option<LinkSample>) -> RouteAsk<'_> {
        let RoutePoint { layer, mlp, ids, weights, rows, .. } = self;
        let (n_rows, top_k) = (mlp.p.n_rows as usize, mlp.p.top_k as usize);
        RouteAsk { layer: *layer, n_rows, top_k, ids, weights, rows, link }
    }

    /// Waits for the question; gives what the device measured of the last fetch.
    fn read_question(
        &mut self,
        commands: &Commands<'_>,
        seq: u64,
        desk: &mut Desk,
    ) -> Result<Option<LinkSample>> {
        let mut ticks = [0; 2];
        let RoutePoint { ids, weights, rows, places, asked, .. } = self;
        commands.lanes.mapped(asked, asked.size(), seq, Duration::ZERO, |bytes| {
            let (id_bytes, rest) = bytes.split_at(4 * ids.len());
            let (weight_bytes, rest) = rest.split_at(4 * weights.len());
            let (row_bytes, rest) = rest.split_at(4 * rows.len());
            let (place_bytes, stamps) = rest.split_at(4 * places.len());
            bytemuck::cast_slice_mut(ids).copy_from_slice(id_bytes);
            bytemuck::cast_slice_mut(weights).copy_from_slice(weight_bytes);
            bytemuck::cast_slice_mut(rows).copy_from_slice(row_bytes);
            bytemuck::cast_slice_mut(places).copy_from_slice(place_bytes);
            bytemuck::cast_slice_mut(&mut ticks)[..stamps.len()].copy_from_slice(stamps);
        })?;
        let seconds = timing::seconds(ticks, commands.lanes);
        let bytes = desk.fetched_bytes.take().filter(|_| seconds > 0.0);
        Ok(bytes.map(|bytes| LinkSample { bytes, seconds }))
    }

    /// Adds what the reply says, and the experts' work; the device begins at once where the host computes too.
    fn follow(
        &mut self,
        reply: &RouteReply,
        commands: &mut Commands<'_>,
        staging: &mut Staging,
        desk: &mut Desk,
    ) -> Result<()> {
        self.check(reply)?;
        let RoutePoint { pool, layer, guests, .. } = self;
        let in_place = if guests.is_none() { &reply.read_in_place[..] } else { &[] };
        let names_any = !(reply.fetch.is_empty() && in_place.is_empty());
        if names_any || !reply.table.is_empty() {
            let letter = desk.letter.as_mut().expect("reserved when the point was recorded");
            let n_words = write_letter(letter, pool.n_experts, reply, in_place);
            commands.bring(staging, letter, 0, &self.letter, 0, 4 * n_words)?;
        }
        if !reply.table.is_empty() {
            commands.dispatch(&self.changes);
        }
        let bytes = pool.record.bytes;
        let bank = pool.banks.get(*layer as usize).and_then(|bank| bank.downcast::<WgpuHostMemory>());
        let is_timed = bank.is_some_and(|bank| bank.buffer().is_some()) && !reply.fetch.is_empty();
        let stamps = desk.stamps.as_ref().filter(|_| is_timed);
        let bank = || bank.expect("a bank of this backend: `check` saw that there is one");
        if let Some(stamps) = stamps {
            stamps.write(0, commands.encoder());
        }
        for Fetch { from, slot } in &reply.fetch {
            let slot = pool.slot(*slot as usize);
            let (to, at) = (buffer(slot.buffer()), slot.range().start);
            commands.bring(staging, bank(), from.record as usize * bytes, to, at, bytes)?;
        }
        if let Some(stamps) = stamps {
            stamps.write(1, commands.encoder());
            stamps.resolve(commands.encoder());
            desk.fetched_bytes = Some((reply.fetch.len() * bytes) as u64);
        }
        if names_any {
            commands.dispatch(&self.named);
        }
        if let Some(guests) = guests.as_mut().filter(|_| !reply.read_in_place.is_empty()) {
            guests.run(&reply.read_in_place, pool, bank(), commands, staging)?;
        }
        if !reply.host.is_empty() {
            commands.submit();
        }
        Ok(())
    }

    /// Lets the host compute its rows while the device works; each goes to its own place.
    fn take_host_rows(
        &self,
        host: &[u32],
        commands: &mut Commands<'_>,
        staging: &mut Staging,
        desk: &mut Desk,
        server: &mut dyn RouteServer,
    ) -> Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        let rows = desk.rows.as_mut().expect("reserved when the point was recorded");
        let row_bytes = 4 * self.mlp.p.hidden as usize;
        let taken = &mut rows.bytes_mut()[..self.ids.len() * row_bytes];
        server.compute(&self.ask(None), host, bytemuck::cast_slice_mut(taken))?;
        let (parts, start) = (buffer(self.mlp.parts.buffer()), self.mlp.parts.range().start);
        let is_host = |id: &i32| *id >= 0 && host.contains(&(*id as u32));
        let mut route = 0;
        // Neighbours go together.
        for run in self.ids.chunk_by(|a, b| is_host(a) == is_host(b)) {
            if is_host(&run[0]) {
                let at = route * row_bytes;
                commands.bring(staging, rows, at, parts, start + at, run.len() * row_bytes)?;
            }
            route += run.len();
        }
        Ok(())
    }

    /// Refuses what names an expert, a slot or an entry that there is not.
    fn check(&mut self, reply: &RouteReply) -> Result<()> {
        let RoutePoint { pool, layer, ids, places, .. } = self;
        let settled = reply.settle(&pool.row(*layer), ids, places);
        settled.map_err(|why| Error::StepFailed { layer: *layer, why })?;
        if pool.banks.is_empty() && !(reply.fetch.is_empty() && reply.read_in_place.is_empty()) {
            return Err(self.failed("the reply wants records, and the pool has no host banks"));
        }
        Ok(())
    }

    fn failed(&self, why: &str) -> Error {
        Error::StepFailed { layer: self.layer, why: why.into() }
    }
}

/// Writes a reply down; how many words it takes.
fn write_letter(
    letter: &mut WgpuHostMemory,
    n_experts: usize,
    reply: &RouteReply,
    in_place: &[Banked],
) -> usize {
    let words: &mut [i32] = bytemuck::cast_slice_mut(letter.bytes_mut());
    let (entries, rest) = words.split_at_mut(n_experts);
    entries.fill(-1);
    reply.fetch.iter().for_each(|fetch| entries[fetch.from.expert as usize] = fetch.slot as i32);
    in_place.iter().for_each(|from| entries[from.expert as usize] = IN_PLACE);
    let (n_changes, changes) = rest.split_at_mut(1);
    n_changes[0] = reply.table.len() as i32;
    for (words, change) in changes.chunks_exact_mut(2).zip(&reply.table) {
        words.copy_from_slice(&[change.entry as i32, change.slot]);
    }
    n_experts + 1 + 2 * reply.table.len()
}
