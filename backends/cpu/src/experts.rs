//! Where the matrices of a routed expert are: apart in a mapped checkpoint, in a slot of a pool, or in the host bank of a layer.

use freetoken_backend::{ExpertMlp, ExpertPool, ExpertRecord, Experts, Format};

use crate::memory::{bytes, slice};

/// The matrices of one expert, as bytes.
#[derive(Clone, Copy)]
pub(crate) struct Matrices<'a> {
    pub(crate) format: Format,
    /// `[intermediate, hidden]`
    pub(crate) gate: &'a [u8],
    /// `[intermediate, hidden]`
    pub(crate) up: &'a [u8],
    /// `[hidden, intermediate]`
    pub(crate) down: &'a [u8],
}

/// The matrices of an expert; `None` where it has no slot and the op does not read in place.
pub(crate) fn find(op: &ExpertMlp, id: usize) -> Option<Matrices<'_>> {
    match &op.experts {
        Experts::InPlace(experts) => {
            let e = &experts[id];
            Some(Matrices {
                format: e.gate.format,
                gate: slice(&e.gate.view),
                up: slice(&e.up.view),
                down: slice(&e.down.view),
            })
        }
        Experts::Pool { pool, layer } => {
            match usize::try_from(slice::<i32>(&pool.table)[pool.entry(*layer, id as u32)]) {
                Ok(slot) => Some(in_slot(pool, slot)),
                Err(_) if op.p.in_place > 0 => Some(in_bank(pool, *layer, id as u32)),
                Err(_) => None,
            }
        }
    }
}

/// The matrices of the record in the host bank of a layer.
pub(crate) fn in_bank(pool: &ExpertPool, layer: u32, id: u32) -> Matrices<'_> {
    in_record(&pool.record, pool.banked(layer, id))
}

/// The matrices of the record in a slot.
pub(crate) fn in_slot(pool: &ExpertPool, slot: usize) -> Matrices<'_> {
    let start = slot % pool.slots_per_chunk * pool.record.bytes;
    let chunk = bytes(&pool.chunks[slot / pool.slots_per_chunk]);
    in_record(&pool.record, &chunk[start..start + pool.record.bytes])
}

fn in_record<'a>(layout: &ExpertRecord, record: &'a [u8]) -> Matrices<'a> {
    Matrices {
        format: layout.format,
        gate: &record[layout.gate()],
        up: &record[layout.up()],
        down: &record[layout.down.clone()],
    }
}
