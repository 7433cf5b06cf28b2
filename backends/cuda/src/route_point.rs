//! A route point, staged: what the host is asked lies in pinned memory, and its answer becomes two small arrays that the
//! experts' kernels read: the ids without the routes that the host computes, and the slot of each expert of the layer.
//!
//! Experts that are read in place need no kernel of their own: the layer's bank, mapped into the device's addresses, is
//! appended to the pool's chunks, so that expert `e` has the slot `n_slots + e` behind the real ones and the same kernel
//! reads it over the link, each byte once.

use std::{ops::Range, sync::Arc};

use freetoken_backend::{
    Buffer, ExpertMlp, ExpertPool, Experts, HostMemory, Result, RouteAsk, RouteReply, RouteServer, View,
};

use crate::{
    driver::Span,
    memory::{self, CudaMemory, Device, PinnedMemory},
};

/// Sections of the host's and the device's arrays start at a multiple of this many bytes.
const ALIGN: usize = 256;
/// Slot of an expert that the host computes, while an answer is settled.
const ON_HOST: i32 = -2;

/// Memory that all route points of a program use in turn: each is done with it before the next one asks.
pub(crate) struct Desk {
    /// What the host reads: ids, weights, table and rows, one behind the other.
    pub(crate) asked: PinnedMemory,
    /// What the host writes: its answer and its rows.
    pub(crate) answered: PinnedMemory,
    /// The answer on the device.
    answer: Buffer,
}

/// Sizes of a route point, in values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sizes {
    n_rows: usize,
    top_k: usize,
    hidden: usize,
    n_experts: usize,
    n_slots: usize,
    /// The layer's first entry in the table, and entries of the whole table.
    first_entry: usize,
    n_entries: usize,
}

impl Sizes {
    fn of(mlp: &ExpertMlp) -> Self {
        let (pool, layer) = pool_of(mlp);
        Sizes {
            n_rows: mlp.p.n_rows as usize,
            top_k: mlp.p.top_k as usize,
            hidden: mlp.p.hidden as usize,
            n_experts: pool.n_experts,
            n_slots: pool.n_slots(),
            first_entry: pool.entry(layer, 0),
            n_entries: pool.n_layers * pool.n_experts,
        }
    }

    fn n_routes(&self) -> usize {
        self.n_rows * self.top_k
    }

    /// Bytes of ids, weights, table and rows in what is asked.
    fn asked(&self) -> [Range<usize>; 4] {
        sections([self.n_routes(), self.n_routes(), self.n_experts, self.n_rows * self.hidden])
    }

    /// Bytes of ids, table and the host's rows in what is answered.
    fn answered(&self) -> [Range<usize>; 3] {
        sections([self.n_routes(), self.n_experts, self.n_routes() * self.hidden])
    }
}

/// Where arrays of so many 32-bit values lie.
fn sections<const N: usize>(values: [usize; N]) -> [Range<usize>; N] {
    let mut end = 0;
    values.map(|n| {
        let start = end;
        end += (n * 4).next_multiple_of(ALIGN);
        start..start + n * 4
    })
}

impl Desk {
    /// Room for the largest of the route points; `None` without any.
    pub(crate) fn new<'a>(
        device: &Arc<Device>,
        points: impl Iterator<Item = &'a ExpertMlp> + Clone,
    ) -> Result<Option<Self>> {
        let largest = |bytes: fn(Sizes) -> usize| points.clone().map(|mlp| bytes(Sizes::of(mlp))).max();
        let Some(asked) = largest(|sizes| sizes.asked()[3].end) else { return Ok(None) };
        let answered = largest(|sizes| sizes.answered()[2].end).unwrap_or(0);
        let answer = largest(|sizes| sizes.answered()[1].end).unwrap_or(0);
        Ok(Some(Desk {
            asked: device.pin(asked)?,
            answered: device.pin(answered)?,
            answer: Buffer::new(device.alloc(answer)?),
        }))
    }
}

/// A route point as it was recorded.
pub(crate) struct Point {
    sizes: Sizes,
    layer: u32,
    pool: Arc<ExpertPool>,
    bank: Span,
    parts: Span,
    /// The experts' work over the answer.
    pub(crate) mlp: ExpertMlp,
}

impl Point {
    /// Prepares a route point. Asserts that its pool has a bank for the layer, made by this device.
    pub(crate) fn new(device: &Arc<Device>, mlp: &ExpertMlp, desk: &Desk) -> Self {
        let (pool, layer) = pool_of(mlp);
        let sizes = Sizes::of(mlp);
        let bank = pool.banks.get(layer as usize).expect("a route point has a bank for its layer");
        let span = memory::host_span(device, bank);
        assert!(span.bytes() >= pool.n_experts * pool.record.bytes, "a bank holds every expert of its layer");
        let slots_per_chunk = pool.slots_per_chunk.max(1);
        let chunk_bytes = slots_per_chunk * pool.record.bytes;
        let in_place = (0..span.bytes()).step_by(chunk_bytes).map(|start| {
            let span = span.slice(start..span.bytes().min(start + chunk_bytes));
            Buffer::new(CudaMemory::Mapped { span, _bank: bank.clone() })
        });
        let [ids, table, _] = sizes.answered();
        let answered = ExpertPool {
            record: pool.record.clone(),
            n_layers: 1,
            n_experts: pool.n_experts,
            chunks: pool.chunks.iter().cloned().chain(in_place).collect(),
            slots_per_chunk,
            table: desk.answer.view(table),
            banks: Vec::new(),
        };
        Point {
            sizes,
            layer,
            pool: pool.clone(),
            bank: span,
            parts: memory::span(&mlp.parts),
            mlp: ExpertMlp {
                ids: desk.answer.view(ids),
                experts: Experts::Pool { pool: Arc::new(answered), layer: 0 },
                ..mlp.clone()
            },
        }
    }

    /// Its layer, as the host knows it.
    pub(crate) fn layer(&self) -> u32 {
        self.layer
    }

    /// The copies that bring the question to the host: (destination, source).
    pub(crate) fn question(&self, mlp: &ExpertMlp, desk: &Desk) -> [(Span, Span); 4] {
        let [ids, weights, table, rows] = self.sizes.asked();
        let asked = desk.asked.span();
        let entries = self.sizes.first_entry * 4..(self.sizes.first_entry + self.sizes.n_experts) * 4;
        let front = |view: &View, bytes: usize| memory::span(view).slice(0..bytes);
        [
            (asked.slice(ids.clone()), front(&mlp.ids, ids.len())),
            (asked.slice(weights.clone()), front(&mlp.weights, weights.len())),
            (asked.slice(table), memory::span(&self.pool.table).slice(entries)),
            (asked.slice(rows.clone()), front(&mlp.x, rows.len())),
        ]
    }

    /// The copy that brings the answer to the device: (destination, source).
    pub(crate) fn answer(&self, desk: &Desk) -> (Span, Span) {
        let [_, table, _] = self.sizes.answered();
        (memory::span(&desk.answer.view(0..table.end)), desk.answered.span().slice(0..table.end))
    }

    /// What the host is asked, once the copies of [`Point::question`] are done.
    pub(crate) fn ask<'a>(&self, asked: &'a PinnedMemory) -> RouteAsk<'a> {
        let [ids, weights, _, rows] = self.sizes.asked();
        let asked = asked.bytes();
        RouteAsk {
            layer: self.layer,
            n_rows: self.sizes.n_rows,
            top_k: self.sizes.top_k,
            ids: bytemuck::cast_slice(&asked[ids]),
            weights: bytemuck::cast_slice(&asked[weights]),
            rows: bytemuck::cast_slice(&asked[rows]),
            link: None,
        }
    }

    /// Turns the reply into the answer that [`Point::answer`] copies. The error says what is wrong with the reply.
    pub(crate) fn settle(&self, desk: &mut Desk, reply: &RouteReply) -> std::result::Result<(), String> {
        let [asked_ids, _, asked_table, _] = self.sizes.asked();
        let [ids, table, _] = self.sizes.answered();
        let asked = desk.asked.bytes();
        let (before, after) = desk.answered.bytes_mut().split_at_mut(table.start);
        let (before, after) = (&mut before[ids], &mut after[..table.len()]);
        before.copy_from_slice(&asked[asked_ids]);
        after.copy_from_slice(&asked[asked_table]);
        settle(&self.sizes, reply, bytemuck::cast_slice_mut(before), bytemuck::cast_slice_mut(after))
    }

    /// Queues what the reply changes on the device before the experts' work: table entries, then records.
    pub(crate) fn apply(&self, device: &Device, reply: &RouteReply) -> Result<()> {
        let (driver, stream) = (&device.driver, &device.compute);
        let table = memory::span(&self.pool.table);
        for change in &reply.table {
            let entry = change.entry as usize * 4;
            driver.write_word(stream, table.slice(entry..entry + 4), change.slot as u32)?;
        }
        for &(expert, slot) in &reply.fetch {
            let start = expert as usize * self.pool.record.bytes;
            let record = self.bank.slice(start..start + self.pool.record.bytes);
            driver.copy(stream, memory::span(&self.pool.slot(slot as usize)), record)?;
        }
        Ok(())
    }

    /// Lets the host compute its rows while the device works, and queues their way behind the experts' work.
    pub(crate) fn take_host_rows(
        &self,
        device: &Device,
        desk: &mut Desk,
        host: &[u32],
        server: &mut dyn RouteServer,
    ) -> Result<()> {
        if host.is_empty() {
            return Ok(());
        }
        let (row, [.., place]) = (self.sizes.hidden * 4, self.sizes.answered());
        let Desk { asked, answered, .. } = desk;
        let ask = self.ask(asked);
        server.compute(&ask, host, bytemuck::cast_slice_mut(&mut answered.bytes_mut()[place.clone()]))?;
        let span = answered.span().slice(place);
        let on_host = |route: usize| u32::try_from(ask.ids[route]).is_ok_and(|id| host.contains(&id));
        let mut route = 0;
        while let Some(run) = next_run(route, self.sizes.n_routes(), on_host) {
            let bytes = run.start * row..run.end * row;
            device.driver.copy(&device.compute, self.parts.slice(bytes.clone()), span.slice(bytes))?;
            route = run.end;
        }
        Ok(())
    }
}

/// The next longest run of `from..n` in which every number is chosen.
fn next_run(from: usize, n: usize, chosen: impl Fn(usize) -> bool) -> Option<Range<usize>> {
    let start = (from..n).find(|&i| chosen(i))?;
    Some(start..(start..n).find(|&i| !chosen(i)).unwrap_or(n))
}

fn pool_of(mlp: &ExpertMlp) -> (&Arc<ExpertPool>, u32) {
    match &mlp.experts {
        Experts::Pool { pool, layer } => (pool, *layer),
        Experts::InPlace(_) => unreachable!("checked before a program is recorded"),
    }
}

/// `ids`: as routed, then without the routes that the host computes. `slots`: as in the table, then as the kernels find
/// each expert of the layer. The error says what is wrong with the reply.
fn settle(
    sizes: &Sizes,
    reply: &RouteReply,
    ids: &mut [i32],
    slots: &mut [i32],
) -> std::result::Result<(), String> {
    let n_slots = sizes.n_slots as i32;
    for change in &reply.table {
        let entry = change.entry as usize;
        if entry >= sizes.n_entries || !(-1..n_slots).contains(&change.slot) {
            return Err(format!("the reply puts {} into entry {entry} of the slot table", change.slot));
        }
        if let Some(slot) = entry.checked_sub(sizes.first_entry).and_then(|expert| slots.get_mut(expert)) {
            *slot = change.slot;
        }
    }
    for &(expert, slot) in &reply.fetch {
        if slots.get(expert as usize) != Some(&(slot as i32)) {
            return Err(format!(
                "the reply fetches expert {expert} into slot {slot}, which its table does not name"
            ));
        }
    }
    for &expert in &reply.read_in_place {
        let slot = slots.get_mut(expert as usize).ok_or_else(|| unknown(expert))?;
        *slot = n_slots + expert as i32;
    }
    for &expert in &reply.host {
        *slots.get_mut(expert as usize).ok_or_else(|| unknown(expert))? = ON_HOST;
    }
    for id in ids.iter_mut().filter(|id| **id >= 0) {
        match slots.get(*id as usize) {
            None => return Err(unknown(*id as u32)),
            Some(&ON_HOST) => *id = -1,
            Some(&slot) if slot < 0 => {
                return Err(format!("expert {id} has no slot and is not in the reply"));
            }
            Some(_) => {}
        }
    }
    slots.iter_mut().filter(|slot| **slot == ON_HOST).for_each(|slot| *slot = -1);
    Ok(())
}

fn unknown(expert: u32) -> String {
    format!("expert {expert} is not one of the layer")
}

#[cfg(test)]
mod tests {
    use freetoken_backend::TableChange;

    use super::*;

    /// Layer 1 of 2, five experts, four slots, two rows of two routes.
    const SIZES: Sizes =
        Sizes { n_rows: 2, top_k: 2, hidden: 8, n_experts: 5, n_slots: 4, first_entry: 5, n_entries: 10 };
    const SLOTS: [i32; 5] = [2, -1, -1, -1, 0];

    fn settled(reply: &RouteReply, mut ids: [i32; 4]) -> std::result::Result<([i32; 4], [i32; 5]), String> {
        let mut slots = SLOTS;
        settle(&SIZES, reply, &mut ids, &mut slots).map(|()| (ids, slots))
    }

    #[test]
    fn hits_need_no_reply() {
        assert_eq!(settled(&RouteReply::default(), [0, 4, -1, 0]), Ok(([0, 4, -1, 0], SLOTS)));
    }

    #[test]
    fn each_way_gives_an_expert_a_place() {
        let change = |entry, slot| TableChange { entry, slot };
        let reply = RouteReply {
            table: vec![change(5, -1), change(3, -1), change(6, 2)],
            fetch: vec![(1, 2)],
            read_in_place: vec![3],
            host: vec![2],
        };
        assert_eq!(settled(&reply, [1, 2, 3, 4]), Ok(([1, -1, 3, 4], [-1, 2, -1, 4 + 3, 0])));
    }

    #[test]
    fn a_reply_that_cannot_be_right_is_an_error() {
        let reply = RouteReply::default;
        let change = |entry, slot| RouteReply { table: vec![TableChange { entry, slot }], ..reply() };
        let wrong = [
            (reply(), [0, 1, 0, 0], "expert 1 has no slot"),
            (reply(), [0, 5, 0, 0], "expert 5 is not one"),
            (change(10, 0), [0; 4], "entry 10"),
            (change(5, 4), [0; 4], "puts 4"),
            (change(5, -2), [0; 4], "puts -2"),
            (RouteReply { fetch: vec![(1, 2)], ..reply() }, [0; 4], "fetches expert 1"),
            (RouteReply { fetch: vec![(9, 2)], ..reply() }, [0; 4], "fetches expert 9"),
            (RouteReply { read_in_place: vec![5], ..reply() }, [0; 4], "expert 5"),
        ];
        for (reply, ids, why) in wrong {
            let error = settled(&reply, ids).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn sections_follow_each_other() {
        assert_eq!(sections([3, 64, 65]), [0..12, 256..512, 512..772]);
    }

    #[test]
    fn runs_cover_what_is_chosen() {
        let chosen = [true, true, false, true, false, false, true];
        let (mut runs, mut from) = (Vec::new(), 0);
        while let Some(run) = next_run(from, chosen.len(), |i| chosen[i]) {
            from = run.end;
            runs.push(run);
        }
        assert_eq!(runs, [0..2, 3..4, 6..7]);
    }
}
