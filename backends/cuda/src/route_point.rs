//! A route point: its sizes, where the experts of its layer are, and how a reply is settled into a slot for each of them.
//! `bell` asks and answers inside one graph, `staged` between two runs of work.
//!
//! Experts that are read in place need no kernel of their own: the layer's bank, mapped into the device's addresses, lies
//! behind the pool's chunks, so that expert `e` has the slot `n_slots + e` there and the same kernel reads it over the link,
//! each byte once.

pub(crate) mod bell;
pub(crate) mod staged;

use std::{ops::Range, sync::Arc};

use freetoken_backend::{
    ExpertMlp, ExpertMlpParams, ExpertPool, Experts, HostBuffer, LinkSample, RouteAsk, RouteReply, View,
};

/// Sections of what host and device share start at a multiple of this many bytes.
const ALIGN: usize = 256;
/// Slot of an expert that is nowhere the device could read it.
const NOWHERE: i32 = -1;
/// Slot of an expert that the host computes.
const ON_HOST: i32 = -2;

/// Sizes of a route point, in values.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sizes {
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
}

/// Where arrays of so many 32-bit values lie, one behind the other.
fn sections<const N: usize>(values: [usize; N]) -> [Range<usize>; N] {
    let mut end = 0;
    values.map(|n| {
        let start = end;
        end += (n * 4).next_multiple_of(ALIGN);
        start..start + n * 4
    })
}

fn pool_of(mlp: &ExpertMlp) -> (&Arc<ExpertPool>, u32) {
    match &mlp.experts {
        Experts::Pool { pool, layer } => (pool, *layer),
        Experts::InPlace(_) => unreachable!("checked before a program is recorded"),
    }
}

/// A route point as it was recorded.
struct Point {
    sizes: Sizes,
    layer: u32,
    pool: Arc<ExpertPool>,
    bank: Arc<HostBuffer>,
    /// The experts that have a slot.
    mlp: ExpertMlp,
}

impl Point {
    /// Asserts that the pool has a bank for the layer.
    fn new(mlp: &ExpertMlp) -> Self {
        let (pool, layer) = pool_of(mlp);
        Point {
            sizes: Sizes::of(mlp),
            layer,
            pool: pool.clone(),
            bank: pool.banks.get(layer as usize).expect("a route point has a bank for its layer").clone(),
            mlp: ExpertMlp { p: ExpertMlpParams { in_place: 0, ..mlp.p }, ..mlp.clone() },
        }
    }

    /// The experts to which `table`, i32 `[n_experts]`, gives a slot, or a place in the bank behind the slots.
    fn answered(&self, table: View) -> ExpertMlp {
        let pool = ExpertPool {
            record: self.pool.record.clone(),
            n_layers: 1,
            n_experts: self.pool.n_experts,
            chunks: self.pool.chunks.clone(),
            slots_per_chunk: self.pool.slots_per_chunk,
            table,
            banks: vec![self.bank.clone()],
        };
        ExpertMlp { experts: Experts::Pool { pool: Arc::new(pool), layer: 0 }, ..self.mlp.clone() }
    }

    fn ask<'a>(
        &self,
        ids: &'a [u8],
        weights: &'a [u8],
        rows: &'a [u8],
        link: Option<LinkSample>,
    ) -> RouteAsk<'a> {
        RouteAsk {
            layer: self.layer,
            n_rows: self.sizes.n_rows,
            top_k: self.sizes.top_k,
            ids: bytemuck::cast_slice(ids),
            weights: bytemuck::cast_slice(weights),
            rows: bytemuck::cast_slice(rows),
            link,
        }
    }
}

/// `slots`: as in the table, then as the reply leaves them, with places in the bank, and [`ON_HOST`]. The error says what is
/// wrong with the reply.
fn settle(sizes: &Sizes, reply: &RouteReply, ids: &[i32], slots: &mut [i32]) -> Result<(), String> {
    let n_slots = sizes.n_slots as i32;
    if reply.table.len() > 2 * sizes.n_experts || reply.fetch.len() > sizes.n_experts {
        return Err(format!(
            "the reply changes {} entries of the slot table and fetches {} of {} experts",
            reply.table.len(),
            reply.fetch.len(),
            sizes.n_experts
        ));
    }
    for change in &reply.table {
        let entry = change.entry as usize;
        if entry >= sizes.n_entries || !(NOWHERE..n_slots).contains(&change.slot) {
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
    for &id in ids.iter().filter(|id| **id >= 0) {
        match slots.get(id as usize) {
            None => return Err(unknown(id as u32)),
            Some(&NOWHERE) => return Err(format!("expert {id} has no slot and is not in the reply")),
            Some(_) => {}
        }
    }
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

    fn settled(reply: &RouteReply, ids: [i32; 4]) -> Result<[i32; 5], String> {
        let mut slots = SLOTS;
        settle(&SIZES, reply, &ids, &mut slots).map(|()| slots)
    }

    #[test]
    fn hits_need_no_reply() {
        assert_eq!(settled(&RouteReply::default(), [0, 4, -1, 0]), Ok(SLOTS));
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
        assert_eq!(settled(&reply, [1, 2, 3, 4]), Ok([-1, 2, ON_HOST, 4 + 3, 0]));
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
            (RouteReply { fetch: vec![(0, 2); 6], ..reply() }, [0; 4], "fetches 6 of 5"),
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
}
