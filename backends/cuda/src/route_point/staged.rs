//! A route point between two runs of work: the question is copied into pinned memory, and the answer becomes a small table
//! of slots that the experts' kernels read.

use std::{ops::Range, sync::Arc};

use freetoken_backend::{
    Buffer, ExpertMlp, Fetch, HostMemory, Result, RouteAsk, RouteReply, RouteServer, View,
};

use super::{Point, Sizes, sections};
use crate::{
    driver::Span,
    memory::{self, Device, PinnedMemory},
};

/// Memory that all route points of a program use in turn: each is done with it before the next one asks.
pub(crate) struct Desk {
    /// What the host reads: ids, weights, table and rows, one behind the other.
    asked: PinnedMemory,
    /// What the host writes: slots and its rows.
    answered: PinnedMemory,
    /// The slots on the device.
    answer: Buffer,
}

/// Bytes of ids, weights, table and rows in what is asked.
fn asked(sizes: &Sizes) -> [Range<usize>; 4] {
    sections([sizes.n_routes(), sizes.n_routes(), sizes.row.n_experts, sizes.n_rows * sizes.hidden])
}

/// Bytes of the slots and the host's rows in what is answered.
fn answered(sizes: &Sizes) -> [Range<usize>; 2] {
    sections([sizes.row.n_experts, sizes.n_routes() * sizes.hidden])
}

impl Desk {
    /// Room for the largest of the route points, of which there is one at least.
    pub(crate) fn new<'a>(
        device: &Arc<Device>,
        points: impl Iterator<Item = &'a ExpertMlp> + Clone,
    ) -> Result<Self> {
        let largest = |bytes: fn(&Sizes) -> usize| {
            points.clone().map(|mlp| bytes(&Sizes::of(mlp))).max().unwrap_or_default()
        };
        Ok(Desk {
            asked: device.pin(largest(|sizes| asked(sizes)[3].end))?,
            answered: device.pin(largest(|sizes| answered(sizes)[1].end))?,
            answer: Buffer::new(device.alloc(largest(|sizes| answered(sizes)[0].end))?),
        })
    }
}

/// A route point as it was recorded.
pub(crate) struct StagedPoint {
    point: Point,
    bank: Span,
    parts: Span,
    /// The experts' work over the answer.
    pub(crate) mlp: ExpertMlp,
}

impl StagedPoint {
    /// Prepares a route point. Asserts that its pool has a bank for the layer, made by this device.
    pub(crate) fn new(device: &Arc<Device>, mlp: &ExpertMlp, desk: &Desk) -> Self {
        let point = Point::new(mlp);
        let [slots, _] = answered(&point.sizes);
        StagedPoint {
            bank: memory::host_span(device, &point.bank),
            parts: memory::span(&mlp.parts),
            mlp: point.answered(desk.answer.view(slots)),
            point,
        }
    }

    /// Its layer, as the host knows it.
    pub(crate) fn layer(&self) -> u32 {
        self.point.layer
    }

    /// The copies that bring the question to the host: (destination, source).
    pub(crate) fn question(&self, desk: &Desk) -> [(Span, Span); 4] {
        let Point { sizes, pool, mlp, .. } = &self.point;
        let [ids, weights, table, rows] = asked(sizes);
        let asked = desk.asked.span();
        let entries = sizes.row.first_entry * 4..(sizes.row.first_entry + sizes.row.n_experts) * 4;
        let front = |view: &View, bytes: usize| memory::span(view).slice(0..bytes);
        [
            (asked.slice(ids.clone()), front(&mlp.ids, ids.len())),
            (asked.slice(weights.clone()), front(&mlp.weights, weights.len())),
            (asked.slice(table), memory::span(&pool.table).slice(entries)),
            (asked.slice(rows.clone()), front(&mlp.x, rows.len())),
        ]
    }

    /// The copy that brings the answer to the device: (destination, source).
    pub(crate) fn answer(&self, desk: &Desk) -> (Span, Span) {
        let [slots, _] = answered(&self.point.sizes);
        (memory::span(&desk.answer.view(slots.clone())), desk.answered.span().slice(slots))
    }

    /// What the host is asked, once the copies of [`StagedPoint::question`] are done.
    pub(crate) fn ask<'a>(&self, desk: &'a Desk) -> RouteAsk<'a> {
        self.ask_from(&desk.asked)
    }

    fn ask_from<'a>(&self, asked_memory: &'a PinnedMemory) -> RouteAsk<'a> {
        let [ids, weights, _, rows] = asked(&self.point.sizes);
        let bytes = asked_memory.bytes();
        self.point.ask(&bytes[ids], &bytes[weights], &bytes[rows], None)
    }

    /// Turns the reply into the answer that [`StagedPoint::answer`] copies. The error says what is wrong with the reply.
    pub(crate) fn settle(&self, desk: &mut Desk, reply: &RouteReply) -> std::result::Result<(), String> {
        let [ids, _, table, _] = asked(&self.point.sizes);
        let [slots, _] = answered(&self.point.sizes);
        let (asked, slots) = (desk.asked.bytes(), &mut desk.answered.bytes_mut()[slots]);
        slots.copy_from_slice(&asked[table]);
        reply.settle(
            &self.point.sizes.row,
            bytemuck::cast_slice(&asked[ids]),
            bytemuck::cast_slice_mut(slots),
        )
    }

    /// Queues what the reply changes on the device before the experts' work: table entries, then records.
    pub(crate) fn apply(&self, device: &Device, reply: &RouteReply) -> Result<()> {
        let (driver, stream, pool) = (&device.driver, &device.compute, &self.point.pool);
        let table = memory::span(&pool.table);
        for change in &reply.table {
            let entry = change.entry as usize * 4;
            driver.write_word(stream, table.slice(entry..entry + 4), change.slot as u32)?;
        }
        for Fetch { from, slot } in &reply.fetch {
            let start = from.record as usize * pool.record.bytes;
            let record = self.bank.slice(start..start + pool.record.bytes);
            driver.copy(stream, memory::span(&pool.slot(*slot as usize)), record)?;
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
        let sizes = &self.point.sizes;
        let (row, [_, place]) = (sizes.hidden * 4, answered(sizes));
        let Desk { asked, answered, .. } = desk;
        let ask = self.ask_from(asked);
        server.compute(&ask, host, bytemuck::cast_slice_mut(&mut answered.bytes_mut()[place.clone()]))?;
        let span = answered.span().slice(place);
        let on_host = |route: usize| u32::try_from(ask.ids[route]).is_ok_and(|id| host.contains(&id));
        let mut route = 0;
        while let Some(run) = next_run(route, sizes.n_routes(), on_host) {
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

#[cfg(test)]
mod tests {
    use super::next_run;

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
