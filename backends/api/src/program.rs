//! Programs: what a backend records once and replays once a step, and the questions it asks the host on the way.

use crate::{Error, ExpertMlp, Op, Result};

/// A MoE layer whose experts may be elsewhere: the only place in a step where the host decides. Ops before it end with
/// the router, ops after it start with the combine.
#[derive(Debug, Clone)]
pub struct RoutePoint {
    /// The work: its experts are a pool with host banks.
    pub mlp: ExpertMlp,
}

/// Part of a program.
#[derive(Debug, Clone)]
pub enum Stage {
    /// Ops in order.
    Ops(Vec<Op>),
    /// A question to the host, then the experts' work.
    Route(RoutePoint),
}

/// What the host sees at a route point.
#[derive(Debug)]
pub struct RouteAsk<'a> {
    /// Row of the pool's table: counts MoE layers.
    pub layer: u32,
    /// Rows of the batch.
    pub n_rows: usize,
    /// Routes of a row.
    pub top_k: usize,
    /// Expert ids, `[n_rows, top_k]`; -1 for padding.
    pub ids: &'a [i32],
    /// Router weights, `[n_rows, top_k]`.
    pub weights: &'a [f32],
    /// What the experts multiply, `[n_rows, hidden]`; may be empty where every route has a slot.
    pub rows: &'a [f32],
    /// What the device measured of its link since the last question, where it measures.
    pub link: Option<LinkSample>,
}

/// Bytes that a device brought over its link, and how long that took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSample {
    /// Bytes.
    pub bytes: u64,
    /// Seconds.
    pub seconds: f64,
}

/// One write to the slot table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableChange {
    /// Entry, `layer * n_experts + expert`.
    pub entry: u32,
    /// Its slot from now on, or -1.
    pub slot: i32,
}

/// An expert, and the record of its layer's bank that it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Banked {
    /// Expert id.
    pub expert: u32,
    /// Number of the record.
    pub record: u32,
}

impl Banked {
    /// In a bank that holds every expert of its layer, in order.
    pub fn own(expert: u32) -> Self {
        Banked { expert, record: expert }
    }
}

/// A record on its way from the host bank into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fetch {
    /// What, and from where.
    pub from: Banked,
    /// Where to.
    pub slot: u32,
}

/// What the host answers. Experts in none of the lists are hits; where every route hits, the reply is empty. The lists keep their
/// capacity from step to step.
#[derive(Default)]
pub struct RouteReply {
    /// Applied in order before anything is computed: former owners leave, arrivals enter.
    pub table: Vec<TableChange>,
    /// Records to bring from the host bank into slots.
    pub fetch: Vec<Fetch>,
    /// Experts to read from the host bank without a slot.
    pub read_in_place: Vec<Banked>,
    /// Experts whose rows the host computes, in [`RouteServer::compute`].
    pub host: Vec<u32>,
}

impl RouteReply {
    /// An empty reply with room for a layer of `n_experts`.
    pub fn with_capacity(n_experts: usize) -> Self {
        RouteReply {
            table: Vec::with_capacity(2 * n_experts),
            fetch: Vec::with_capacity(n_experts),
            read_in_place: Vec::with_capacity(n_experts),
            host: Vec::with_capacity(n_experts),
        }
    }

    /// Forgets the last answer and keeps the room.
    pub fn clear(&mut self) {
        self.table.clear();
        self.fetch.clear();
        self.read_in_place.clear();
        self.host.clear();
    }
}

/// A layer's row of the slot table of its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableRow {
    /// Experts of the layer.
    pub n_experts: usize,
    /// Numbers of slots.
    pub n_slots: usize,
    /// Records of the layer's bank.
    pub n_records: usize,
    /// The layer's first entry in the table.
    pub first_entry: usize,
    /// Entries of the whole table.
    pub n_entries: usize,
}

/// Place of an expert that has no slot, in a table and in a settled row.
pub const NOWHERE: i32 = -1;
/// Place of an expert that the host computes, in a settled row.
pub const ON_HOST: i32 = -2;

impl RouteReply {
    /// Settles where the experts of a layer are. `places` `[n_experts]` is the layer's row of the table as it was when the device
    /// asked; then each is a slot, `n_slots + record` for a record that is read in its bank, [`ON_HOST`], or [`NOWHERE`].
    ///
    /// # Errors
    /// A sentence about what is wrong with the reply: whatever it is, no routed expert is left out.
    pub fn settle(&self, row: &TableRow, ids: &[i32], places: &mut [i32]) -> std::result::Result<(), String> {
        let n_slots = row.n_slots as i32;
        if self.table.len() > 2 * row.n_experts || self.fetch.len() > row.n_experts {
            return Err(format!(
                "the reply changes {} entries of the slot table and fetches {} of {} experts",
                self.table.len(),
                self.fetch.len(),
                row.n_experts
            ));
        }
        for change in &self.table {
            let entry = change.entry as usize;
            if entry >= row.n_entries || !(NOWHERE..n_slots).contains(&change.slot) {
                return Err(format!("the reply puts {} into entry {entry} of the slot table", change.slot));
            }
            if let Some(place) = entry.checked_sub(row.first_entry).and_then(|expert| places.get_mut(expert))
            {
                *place = change.slot;
            }
        }
        let in_bank = |from: &Banked| match from {
            Banked { record, .. } if (*record as usize) < row.n_records => Ok(()),
            Banked { expert, record } => Err(format!(
                "the reply finds expert {expert} in record {record} of a bank that has {}",
                row.n_records
            )),
        };
        for Fetch { from, slot } in &self.fetch {
            let (expert, slot) = (from.expert, *slot);
            in_bank(from)?;
            if places.get(expert as usize) != Some(&(slot as i32)) {
                return Err(format!(
                    "the reply fetches expert {expert} into slot {slot}, which its table does not name"
                ));
            }
        }
        for from in &self.read_in_place {
            let place = places.get_mut(from.expert as usize).ok_or_else(|| unknown(from.expert))?;
            in_bank(from)?;
            *place = n_slots + from.record as i32;
        }
        for &expert in &self.host {
            *places.get_mut(expert as usize).ok_or_else(|| unknown(expert))? = ON_HOST;
        }
        for &id in ids.iter().filter(|id| **id >= 0) {
            match places.get(id as usize) {
                None => return Err(unknown(id as u32)),
                Some(&NOWHERE) => return Err(format!("expert {id} has no slot and is not in the reply")),
                Some(_) => {}
            }
        }
        Ok(())
    }
}

fn unknown(expert: u32) -> String {
    format!("expert {expert} is not one of the layer")
}

/// The host's side of a program: decides at each route point, and computes what it takes on itself.
pub trait RouteServer {
    /// Fills the (empty) reply. The device waits.
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> Result<()>;

    /// Computes the routes whose expert is in `host`, each into its own row of `parts` `[n_rows, top_k, hidden]`, weighted, and
    /// leaves the other rows alone. Called once the reply is on its way, so that the device works meanwhile.
    fn compute(&mut self, ask: &RouteAsk<'_>, host: &[u32], parts: &mut [f32]) -> Result<()>;
}

/// The server of programs without route points.
pub struct NoRoutePoints;

impl RouteServer for NoRoutePoints {
    fn answer(&mut self, ask: &RouteAsk<'_>, _: &mut RouteReply) -> Result<()> {
        let why = "the program asks for experts, and all of them should have a place".into();
        Err(Error::StepFailed { layer: ask.layer, why })
    }

    fn compute(&mut self, ask: &RouteAsk<'_>, _: &[u32], _: &mut [f32]) -> Result<()> {
        Err(Error::StepFailed { layer: ask.layer, why: "nothing was given to the host".into() })
    }
}

/// A recorded list of stages with everything it needs already made: a replay allocates nothing and compiles nothing.
pub trait Program: Send {
    /// Runs the whole program in order behind all earlier work, asks `server` at each route point, and returns when the
    /// outputs can be read. After an error nothing it wrote may be used.
    fn replay(&mut self, server: &mut dyn RouteServer) -> Result<()>;

    /// Queues the whole program in [`crate::Lane::Compute`] and returns; its outputs are not brought to the host. Asserts that
    /// it holds no route point.
    fn submit(&mut self) -> Result<()>;

    /// The `i`-th output named when the program was recorded, as the last replay left it: f32 or i32 as 32-bit words.
    fn output(&self, i: usize) -> &[u32];
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layer 1 of 2, five experts, four slots.
    const ROW: TableRow = TableRow { n_experts: 5, n_slots: 4, n_records: 3, first_entry: 5, n_entries: 10 };
    const SLOTS: [i32; 5] = [2, -1, -1, -1, 0];

    fn settled(reply: &RouteReply, ids: [i32; 4]) -> std::result::Result<[i32; 5], String> {
        let mut slots = SLOTS;
        reply.settle(&ROW, &ids, &mut slots).map(|()| slots)
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
            fetch: vec![Fetch { from: Banked::own(1), slot: 2 }],
            read_in_place: vec![Banked { expert: 3, record: 2 }],
            host: vec![2],
        };
        assert_eq!(settled(&reply, [1, 2, 3, 4]), Ok([-1, 2, ON_HOST, 4 + 2, 0]));
    }

    #[test]
    fn a_reply_that_cannot_be_right_is_an_error() {
        let reply = RouteReply::default;
        let change = |entry, slot| RouteReply { table: vec![TableChange { entry, slot }], ..reply() };
        let fetch = |expert, record| Fetch { from: Banked { expert, record }, slot: 2 };
        let wrong = [
            (reply(), [0, 1, 0, 0], "expert 1 has no slot"),
            (reply(), [0, 5, 0, 0], "expert 5 is not one"),
            (change(10, 0), [0; 4], "entry 10"),
            (change(5, 4), [0; 4], "puts 4"),
            (change(5, -2), [0; 4], "puts -2"),
            (RouteReply { fetch: vec![fetch(1, 1)], ..reply() }, [0; 4], "fetches expert 1"),
            (RouteReply { fetch: vec![fetch(9, 1)], ..reply() }, [0; 4], "fetches expert 9"),
            (RouteReply { fetch: vec![fetch(1, 3)], ..reply() }, [0; 4], "record 3 of a bank that has 3"),
            (RouteReply { fetch: vec![fetch(0, 0); 6], ..reply() }, [0; 4], "fetches 6 of 5"),
            (
                RouteReply { read_in_place: vec![Banked { expert: 5, record: 0 }], ..reply() },
                [0; 4],
                "expert 5",
            ),
            (RouteReply { read_in_place: vec![Banked::own(4)], ..reply() }, [0; 4], "record 4"),
        ];
        for (reply, ids, why) in wrong {
            let error = settled(&reply, ids).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
