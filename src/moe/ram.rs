//! Which experts are in host memory where it does not hold them all: a cache over the disk, in each layer's bank a part of it.
//!
//! Pure. A layer's bank has so many records, and gives them away by the same policy as the slots of the device. Whoever uses a record
//! holds it, from [`RamCache::touch`] or [`RamCache::admit`] to [`RamCache::let_go`] or to the next pass of its layer; nothing that
//! is held is overwritten. It counts the uses that come down to it: an expert that the device has in a slot needs no record.

use freetoken_backend::{Banked, TableChange};

use super::cache::{ExpertCache, Policy};

/// The records of all layers' banks.
#[derive(Debug, Clone)]
pub struct RamCache {
    layers: Vec<ExpertCache>,
    /// What nobody but the device's table asks for.
    changes: Vec<TableChange>,
}

impl RamCache {
    /// Empty banks with so many records each. Asserts that each has one at least.
    pub fn new(n_experts: usize, n_records: &[usize], policy: Policy) -> Self {
        assert!(n_records.iter().all(|&n| n > 0), "a bank has a record at least");
        let bank = |&n: &usize| ExpertCache::new(1, n_experts, n.min(n_experts), policy);
        RamCache { layers: n_records.iter().map(bank).collect(), changes: Vec::with_capacity(2) }
    }

    /// Records of a layer's bank.
    pub fn n_records(&self, layer: u32) -> usize {
        self.layers[layer as usize].n_slots()
    }

    /// Records of all banks.
    pub fn n_all(&self) -> usize {
        self.layers.iter().map(ExpertCache::n_slots).sum()
    }

    /// Records of a layer that could be given to an expert now: all but the held ones.
    pub fn n_admissible(&self, layer: u32) -> usize {
        self.layers[layer as usize].n_admissible()
    }

    /// The record of an expert.
    pub fn record_of(&self, layer: u32, expert: u32) -> Option<u32> {
        self.layers[layer as usize].slot_of(0, expert)
    }

    /// An expert of a layer that has a record, if there is one.
    pub fn any(&self, layer: u32) -> Option<Banked> {
        let table = self.layers[layer as usize].table();
        let expert = table.iter().position(|record| *record >= 0)?;
        Some(Banked { expert: expert as u32, record: table[expert] as u32 })
    }

    /// Begins a pass of a layer: nothing of its bank is held any more.
    pub fn begin(&mut self, layer: u32) {
        self.layers[layer as usize].release();
    }

    /// Counts a use, with a record or without, and holds the record. Gives the record.
    pub fn touch(&mut self, layer: u32, expert: u32) -> Option<u32> {
        self.layers[layer as usize].touch(0, expert)
    }

    /// Gives a record, held, to an expert that has none: that of the expert of least worth, or `None` if all are held. Counts no use.
    pub fn admit(&mut self, layer: u32, expert: u32) -> Option<u32> {
        self.changes.clear();
        self.layers[layer as usize].admit(0, expert, &mut self.changes)
    }

    /// Ends the hold of a record before its pass ends. Asserts that it is held.
    pub fn let_go(&mut self, layer: u32, record: u32) {
        self.layers[layer as usize].let_go(record);
    }

    /// Takes the record of an expert away, whose read failed. Asserts that it has one, and that it is held.
    pub fn expel(&mut self, layer: u32, expert: u32) {
        self.changes.clear();
        self.layers[layer as usize].expel(0, expert, &mut self.changes);
    }
}

/// Records of each layer's bank where there are `n_records` for all of them: as many in each, and one more in the first ones where
/// that does not come out even.
pub fn divide(n_records: usize, n_layers: usize) -> Vec<usize> {
    (0..n_layers).map(|layer| n_records / n_layers + usize::from(layer < n_records % n_layers)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_are_divided_evenly() {
        assert_eq!(divide(7, 3), [3, 2, 2]);
        assert_eq!(divide(6, 3), [2, 2, 2]);
        assert_eq!(divide(3, 3), [1, 1, 1]);
    }

    #[test]
    fn what_is_held_stays_and_what_is_let_go_of_makes_room() {
        let mut ram = RamCache::new(8, &[2, 1], Policy::Lru);
        let (a, b) = (ram.admit(0, 3).unwrap(), ram.admit(0, 5).unwrap());
        assert_eq!((ram.admit(0, 6), ram.n_admissible(0)), (None, 0));
        ram.let_go(0, b);
        assert_eq!(ram.admit(0, 6), Some(b), "the one that is not held leaves");
        assert_eq!((ram.record_of(0, 5), ram.record_of(0, 3)), (None, Some(a)));
        ram.expel(0, 6);
        assert_eq!((ram.record_of(0, 6), ram.n_admissible(0)), (None, 1));
        assert_eq!(ram.admit(1, 6), Some(0), "another layer has a bank of its own");
        ram.begin(0);
        assert_eq!(ram.n_admissible(0), 2);
        assert_eq!(
            (ram.any(0), ram.any(1)),
            (Some(Banked { expert: 3, record: a }), Some(Banked { expert: 6, record: 0 }))
        );
    }

    #[derive(Debug, Clone)]
    enum Event {
        Pass(u32, Vec<u32>),
        Fail(u32, u32),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let pass = (0..3_u32, prop::collection::btree_set(0..10_u32, 1..8))
            .prop_map(|(layer, experts)| Event::Pass(layer, experts.into_iter().collect()));
        let fail = (0..3_u32, 0..10_u32).prop_map(|(layer, expert)| Event::Fail(layer, expert));
        prop::collection::vec(prop_oneof![6 => pass, 1 => fail], 1..60)
    }

    proptest! {
        /// A record belongs to one expert; nothing of the pass that runs is overwritten; an expert that was let go of is the only
        /// kind that leaves; layers do not touch each other.
        #[test]
        fn records_are_what_their_experts_say(
            events in events(), n_records in prop::collection::vec(1..6_usize, 3), lru in any::<bool>(),
        ) {
            let policy = if lru { Policy::Lru } else { Policy::DEFAULT };
            let mut ram = RamCache::new(10, &n_records, policy);
            // By layer and record: the expert whose bytes are there.
            let mut bytes: BTreeMap<(u32, u32), u32> = BTreeMap::new();
            for event in events {
                match event {
                    Event::Pass(layer, experts) => {
                        ram.begin(layer);
                        let mut held = Vec::new();
                        for &expert in &experts {
                            if let Some(record) = ram.touch(layer, expert) {
                                prop_assert_eq!(bytes.get(&(layer, record)), Some(&expert));
                                held.push((expert, record));
                            }
                        }
                        for &expert in &experts {
                            if held.iter().any(|(known, _)| *known == expert) {
                                continue;
                            }
                            if let Some(record) = ram.admit(layer, expert) {
                                prop_assert!(held.iter().all(|(_, taken)| *taken != record), "held");
                                bytes.insert((layer, record), expert);
                                held.push((expert, record));
                            } else {
                                prop_assert_eq!(held.len(), ram.n_records(layer), "all are held");
                                let (_, record) = held.remove(0);
                                ram.let_go(layer, record);
                                prop_assert_eq!(ram.admit(layer, expert), Some(record));
                                bytes.insert((layer, record), expert);
                                held.push((expert, record));
                            }
                        }
                    }
                    Event::Fail(layer, expert) => {
                        ram.begin(layer);
                        if ram.record_of(layer, expert).is_none() && let Some(record) = ram.admit(layer, expert) {
                            bytes.remove(&(layer, record));
                            ram.expel(layer, expert);
                        }
                    }
                }
                for (&(layer, record), &expert) in &bytes {
                    let of = ram.record_of(layer, expert);
                    prop_assert!(of.is_none() || of == Some(record));
                }
                for layer in 0..3 {
                    let mut taken: Vec<u32> = (0..10).filter_map(|e| ram.record_of(layer, e)).collect();
                    let n = taken.len();
                    taken.sort_unstable();
                    taken.dedup();
                    prop_assert_eq!(taken.len(), n, "one expert a record");
                    prop_assert!(n <= n_records[layer as usize]);
                }
            }
        }
    }
}
