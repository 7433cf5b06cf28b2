//! Where the matrices of a routed expert are: apart in a mapped checkpoint, in a slot of a pool, or in the host bank of a layer.

use freetoken_backend::{ExpertMlp, ExpertPool, ExpertRecord, Experts};

use crate::{
    memory::{bytes, slice},
    stored::Stored,
};

/// The matrices of one expert, all of one format.
#[derive(Clone, Copy)]
pub(crate) struct Matrices<'a> {
    /// `[intermediate, hidden]`
    pub(crate) gate: Stored<'a>,
    /// `[intermediate, hidden]`
    pub(crate) up: Stored<'a>,
    /// `[hidden, intermediate]`
    pub(crate) down: Stored<'a>,
}

/// The matrices of an expert; `None` where it has no slot and the op does not read in place.
pub(crate) fn find(op: &ExpertMlp, id: usize) -> Option<Matrices<'_>> {
    match &op.experts {
        Experts::InPlace(experts) => {
            let e = &experts[id];
            Some(Matrices { gate: Stored::of(&e.gate), up: Stored::of(&e.up), down: Stored::of(&e.down) })
        }
        Experts::Pool { pool, layer } => match slice::<i32>(&pool.table)[pool.entry(*layer, id as u32)] {
            place if place >= 0 => Some(at_place(pool, *layer, place as usize)),
            _ if op.p.in_place > 0 => Some(in_bank(pool, *layer, id as u32)),
            _ => None,
        },
    }
}

/// The matrices of a record in a slot, or behind the slots in the host bank of a layer.
pub(crate) fn at_place(pool: &ExpertPool, layer: u32, place: usize) -> Matrices<'_> {
    match place.checked_sub(pool.n_slots()) {
        Some(record) => in_bank(pool, layer, record as u32),
        None => in_slot(pool, place),
    }
}

/// The matrices of a record in the host bank of a layer.
fn in_bank(pool: &ExpertPool, layer: u32, record: u32) -> Matrices<'_> {
    in_record(&pool.record, pool.banked(layer, record))
}

/// The matrices of the record in a slot.
fn in_slot(pool: &ExpertPool, slot: usize) -> Matrices<'_> {
    let start = slot % pool.slots_per_chunk * pool.record.bytes;
    let chunk = bytes(&pool.chunks[slot / pool.slots_per_chunk]);
    in_record(&pool.record, &chunk[start..start + pool.record.bytes])
}

fn in_record<'a>(layout: &ExpertRecord, record: &'a [u8]) -> Matrices<'a> {
    let (format, hidden, inner) = (layout.format, layout.hidden, layout.intermediate);
    Matrices {
        gate: Stored::in_record(record, &layout.gate(), format, inner, hidden),
        up: Stored::in_record(record, &layout.up(), format, inner, hidden),
        down: Stored::in_record(record, &layout.down, format, hidden, inner),
    }
}
