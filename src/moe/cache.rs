//! The expert cache: which expert of which layer is in which slot, and which one leaves when another comes.
//!
//! It is the host's mirror of the device's slot table. Slots of all layers are one pool. An expert that the current route
//! point uses is *held* from its use to [`ExpertCache::release`], and nothing that is held is evicted. It knows no bytes.

use freetoken_backend::TableChange;

/// Neither a slot, an entry nor a place in the heap.
const NONE: u32 = u32::MAX;

/// What an expert in a slot is worth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Policy {
    /// The later its last use, the more.
    Lru,
    /// The more its uses, each counting half after so many steps (a step visits each layer once). Scans pass it by.
    Lfu {
        /// Steps.
        half_life: f64,
    },
}

/// What changes when the pool changes its size: first the records move, then the table.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Resized {
    /// (from, to): records that move. No slot is both.
    pub moves: Vec<(u32, u32)>,
    /// Writes to the slot table, in order.
    pub changes: Vec<TableChange>,
}

/// The mirror of the slot table, and the worth of every expert.
#[derive(Debug, Clone)]
pub struct ExpertCache {
    n_experts: usize,
    /// What one route point adds to `now`.
    tick: f64,
    policy: Policy,
    /// Route points so far, in the policy's unit of time.
    now: f64,
    /// `[n_layers, n_experts]`: slot, or -1.
    table: Vec<i32>,
    /// `[n_layers, n_experts]`: grows with each use, and needs no ageing (see [`Policy::after_use`]).
    worth: Vec<f64>,
    /// `[n_slots]`: entry, or `NONE`.
    owners: Vec<u32>,
    /// `[n_slots]`: place in the heap, or `NONE` for what is free or held.
    places: Vec<u32>,
    /// Slots with an owner that is not held: a binary heap, the least worth first.
    heap: Vec<u32>,
    /// Slots whose owners the current route point uses.
    held: Vec<u32>,
    /// Slots without an owner, the next one last.
    free: Vec<u32>,
}

impl Policy {
    /// The engine's: the best of those tried on recorded and on made-up traces together (`freetoken bench cache`).
    pub const DEFAULT: Policy = Policy::Lfu { half_life: 32.0 };

    /// The worth after a use. That of [`Policy::Lfu`] is the logarithm of the sum of `2^t` over its uses at time `t` (in
    /// half-lives): all uses age alike, so the order of what is not used does not change.
    fn after_use(self, worth: f64, now: f64) -> f64 {
        match self {
            Policy::Lru => now,
            Policy::Lfu { .. } => {
                let (high, low) = if worth > now { (worth, now) } else { (now, worth) };
                high + (low - high).exp2().ln_1p() * std::f64::consts::LOG2_E
            }
        }
    }
}

impl ExpertCache {
    /// An empty cache. Asserts that there are layers, and a half-life above zero.
    pub fn new(n_layers: usize, n_experts: usize, n_slots: usize, policy: Policy) -> Self {
        assert!(n_layers > 0, "a cache has layers");
        let tick = match policy {
            Policy::Lru => 1.0,
            Policy::Lfu { half_life } => {
                assert!(half_life > 0.0, "a half-life is above zero");
                1.0 / (half_life * n_layers as f64)
            }
        };
        ExpertCache {
            n_experts,
            tick,
            policy,
            now: 0.0,
            table: vec![-1; n_layers * n_experts],
            worth: vec![f64::NEG_INFINITY; n_layers * n_experts],
            owners: vec![NONE; n_slots],
            places: vec![NONE; n_slots],
            heap: Vec::with_capacity(n_slots),
            held: Vec::with_capacity(n_slots),
            free: (0..n_slots as u32).rev().collect(),
        }
    }

    /// Slots.
    pub fn n_slots(&self) -> usize {
        self.owners.len()
    }

    /// Slots without an owner.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Slots that could be given to an expert now: all but the held ones.
    pub fn n_admissible(&self) -> usize {
        self.n_slots() - self.held.len()
    }

    /// The slot of an expert.
    pub fn slot_of(&self, layer: u32, expert: u32) -> Option<u32> {
        u32::try_from(self.table[self.entry(layer, expert)]).ok()
    }

    /// The device's slot table as it should be, `[n_layers, n_experts]`.
    pub fn table(&self) -> &[i32] {
        &self.table
    }

    /// For ordering: an expert with more should rather stay. Negative infinity before the first use.
    pub fn worth(&self, layer: u32, expert: u32) -> f64 {
        self.worth[self.entry(layer, expert)]
    }

    /// The least that an expert in a slot is worth that could leave; less than anything while a slot is free.
    pub fn least_worth(&self) -> f64 {
        match self.heap.first() {
            Some(&slot) if self.free.is_empty() => self.worth[self.owners[slot as usize] as usize],
            _ => f64::NEG_INFINITY,
        }
    }

    /// Counts a use, in a slot or not, and holds the slot. Gives the slot.
    pub fn touch(&mut self, layer: u32, expert: u32) -> Option<u32> {
        let entry = self.entry(layer, expert);
        self.worth[entry] = self.policy.after_use(self.worth[entry], self.now);
        let slot = u32::try_from(self.table[entry]).ok()?;
        if self.places[slot as usize] != NONE {
            self.leave_heap(slot);
            self.held.push(slot);
        }
        Some(slot)
    }

    /// Gives a slot, held, to an expert that has none: a free one, or that of the expert of least worth; `None` if all are
    /// held. It counts no use. Asserts that the expert has none.
    pub fn admit(&mut self, layer: u32, expert: u32, changes: &mut Vec<TableChange>) -> Option<u32> {
        let entry = self.entry(layer, expert);
        assert_eq!(self.table[entry], -1, "an expert is admitted once");
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = *self.heap.first()?;
                self.leave_heap(slot);
                self.disown(slot, changes);
                slot
            }
        };
        self.own(slot, entry as u32, changes);
        self.held.push(slot);
        Some(slot)
    }

    /// Ends the hold of one slot before its route point ends. Asserts that it is held.
    pub fn let_go(&mut self, slot: u32) {
        self.end_hold(slot);
        self.enter_heap(slot);
    }

    /// Takes the slot of an expert away, as when its record could not be brought. Asserts that it has one, and that it is held.
    pub fn expel(&mut self, layer: u32, expert: u32, changes: &mut Vec<TableChange>) {
        let slot = self.slot_of(layer, expert).expect("an expert with a slot");
        self.end_hold(slot);
        self.disown(slot, changes);
        self.free.push(slot);
    }

    /// Ends a route point: nothing is held any more.
    pub fn release(&mut self) {
        self.now += self.tick;
        while let Some(slot) = self.held.pop() {
            self.enter_heap(slot);
        }
    }

    /// Forgets what is in the slots, as after a failed step: the whole table is to be written again. Past uses still
    /// count.
    pub fn clear(&mut self) {
        self.table.fill(-1);
        self.owners.fill(NONE);
        self.places.fill(NONE);
        self.heap.clear();
        self.held.clear();
        self.free.clear();
        self.free.extend((0..self.owners.len() as u32).rev());
    }

    /// Changes the number of slots between two steps. Slots vanish at the end; only the experts of least worth lose
    /// theirs. Allocates. Asserts that nothing is held.
    pub fn resize(&mut self, n_slots: usize) -> Resized {
        assert!(self.held.is_empty(), "a pool is resized between steps");
        let mut resized = Resized::default();
        while self.heap.len() > n_slots {
            let slot = self.heap[0];
            self.leave_heap(slot);
            self.disown(slot, &mut resized.changes);
            self.free.push(slot);
        }
        self.free.retain(|slot| (*slot as usize) < n_slots);
        for from in n_slots as u32..self.owners.len() as u32 {
            let entry = self.owners[from as usize];
            if entry != NONE {
                let to = self.free.pop().expect("no more experts than slots are left");
                self.leave_heap(from);
                self.own(to, entry, &mut resized.changes);
                self.enter_heap(to);
                resized.moves.push((from, to));
            }
        }
        self.free.extend(self.owners.len() as u32..n_slots as u32);
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.owners.resize(n_slots, NONE);
        self.places.resize(n_slots, NONE);
        for slots in [&mut self.heap, &mut self.held, &mut self.free] {
            slots.reserve(n_slots.saturating_sub(slots.len()));
        }
        resized
    }

    fn end_hold(&mut self, slot: u32) {
        let place = self.held.iter().position(|held| *held == slot).expect("a slot that is held");
        self.held.swap_remove(place);
    }

    fn entry(&self, layer: u32, expert: u32) -> usize {
        debug_assert!((expert as usize) < self.n_experts);
        layer as usize * self.n_experts + expert as usize
    }

    fn own(&mut self, slot: u32, entry: u32, changes: &mut Vec<TableChange>) {
        self.owners[slot as usize] = entry;
        self.table[entry as usize] = slot as i32;
        changes.push(TableChange { entry, slot: slot as i32 });
    }

    fn disown(&mut self, slot: u32, changes: &mut Vec<TableChange>) {
        let entry = std::mem::replace(&mut self.owners[slot as usize], NONE);
        self.table[entry as usize] = -1;
        changes.push(TableChange { entry, slot: -1 });
    }

    /// Whether the owner of `a` leaves before that of `b`. Ties: the lower slot.
    fn is_colder(&self, a: u32, b: u32) -> bool {
        let key = |slot: u32| self.worth[self.owners[slot as usize] as usize];
        (key(a), a) < (key(b), b)
    }

    fn enter_heap(&mut self, slot: u32) {
        self.heap.push(slot);
        self.rise(self.heap.len() - 1);
    }

    fn leave_heap(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.places[slot as usize], NONE) as usize;
        let last = self.heap.pop().expect("a slot with a place is in the heap");
        if last != slot {
            self.heap[place] = last;
            self.rise(place);
            self.sink(self.places[last as usize] as usize);
        }
    }

    /// Moves the slot at `place` towards the root as far as it is colder.
    fn rise(&mut self, mut place: usize) {
        let slot = self.heap[place];
        while place > 0 {
            let parent = (place - 1) / 2;
            if !self.is_colder(slot, self.heap[parent]) {
                break;
            }
            self.put(place, self.heap[parent]);
            place = parent;
        }
        self.put(place, slot);
    }

    /// Moves the slot at `place` away from the root as far as others are colder.
    fn sink(&mut self, mut place: usize) {
        let slot = self.heap[place];
        loop {
            let mut child = 2 * place + 1;
            if child + 1 < self.heap.len() && self.is_colder(self.heap[child + 1], self.heap[child]) {
                child += 1;
            }
            if child >= self.heap.len() || !self.is_colder(self.heap[child], slot) {
                break;
            }
            self.put(place, self.heap[child]);
            place = child;
        }
        self.put(place, slot);
    }

    fn put(&mut self, place: usize, slot: u32) {
        self.heap[place] = slot;
        self.places[slot as usize] = place as u32;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POLICIES: [Policy; 2] = [Policy::Lru, Policy::Lfu { half_life: 4.0 }];

    /// A route point that uses `experts` and fetches every miss that finds a slot.
    fn route(cache: &mut ExpertCache, layer: u32, experts: &[u32]) -> Vec<TableChange> {
        let mut changes = Vec::new();
        for &expert in experts {
            cache.touch(layer, expert);
        }
        for &expert in experts {
            if cache.slot_of(layer, expert).is_none() {
                cache.admit(layer, expert, &mut changes);
            }
        }
        cache.release();
        changes
    }

    fn resident(cache: &ExpertCache) -> Vec<usize> {
        (0..cache.table().len()).filter(|&entry| cache.table()[entry] >= 0).collect()
    }

    #[test]
    fn the_least_recent_of_all_layers_leaves_first() {
        let mut cache = ExpertCache::new(2, 4, 4, Policy::Lru);
        route(&mut cache, 0, &[0, 1]);
        route(&mut cache, 1, &[0, 1]);
        route(&mut cache, 0, &[0]);
        assert_eq!(route(&mut cache, 1, &[2])[0], TableChange { entry: 1, slot: -1 });
        assert_eq!(route(&mut cache, 1, &[3])[0], TableChange { entry: 4, slot: -1 });
        assert_eq!(resident(&cache), [0, 5, 6, 7]);
    }

    #[test]
    fn what_is_used_often_survives_a_scan() {
        for (policy, survives) in [(Policy::Lru, false), (Policy::Lfu { half_life: 100.0 }, true)] {
            let mut cache = ExpertCache::new(1, 16, 4, policy);
            (0..3).for_each(|_| drop(route(&mut cache, 0, &[0, 1])));
            (2..16).for_each(|expert| drop(route(&mut cache, 0, &[expert])));
            assert_eq!(cache.slot_of(0, 0).is_some(), survives, "{policy:?}");
        }
    }

    #[test]
    fn old_uses_count_less() {
        let mut cache = ExpertCache::new(1, 3, 2, Policy::Lfu { half_life: 2.0 });
        (0..8).for_each(|_| drop(route(&mut cache, 0, &[0])));
        let old = cache.worth(0, 0);
        (0..40).for_each(|_| drop(route(&mut cache, 0, &[1])));
        assert_eq!(cache.worth(0, 0), old);
        route(&mut cache, 0, &[2]);
        assert_eq!(resident(&cache), [1, 2]);
    }

    #[test]
    fn a_use_without_a_slot_counts() {
        let mut cache = ExpertCache::new(1, 4, 1, Policy::Lru);
        assert_eq!(cache.worth(0, 3), f64::NEG_INFINITY);
        assert_eq!(cache.touch(0, 3), None);
        cache.release();
        cache.touch(0, 2);
        assert!(cache.worth(0, 2) > cache.worth(0, 3));
    }

    #[test]
    fn a_pool_is_filled_hottest_last() {
        let (mut cache, mut changes) = (ExpertCache::new(1, 8, 3, Policy::Lru), Vec::new());
        for expert in [5, 6, 7] {
            cache.admit(0, expert, &mut changes);
        }
        cache.release();
        route(&mut cache, 0, &[0]);
        route(&mut cache, 0, &[1]);
        assert_eq!(resident(&cache), [0, 1, 7]);
    }

    #[test]
    fn a_cleared_cache_hands_out_every_slot_again() {
        let mut cache = ExpertCache::new(1, 8, 3, Policy::Lru);
        route(&mut cache, 0, &[0, 1]);
        cache.touch(0, 1);
        cache.clear();
        assert!(cache.table().iter().all(|&slot| slot == -1));
        assert_eq!(cache.n_admissible(), 3);
        assert!(route(&mut cache, 0, &[2, 3, 4]).iter().all(|change| change.slot >= 0));
    }

    #[derive(Debug, Clone)]
    enum Event {
        Route(u32, Vec<u32>),
        Resize(usize),
        Clear,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            12 => (0..3u32, prop::collection::btree_set(0..8u32, 1..6))
                .prop_map(|(layer, experts)| Event::Route(layer, experts.into_iter().collect())),
            2 => (0..20usize).prop_map(Event::Resize),
            1 => Just(Event::Clear),
        ]
    }

    proptest! {
        /// A device that obeys the changes finds each expert where the mirror says, whoever leaves is worth least, and
        /// what is used stays.
        #[test]
        fn the_mirror_is_the_table(events in prop::collection::vec(event(), 1..80), n_slots in 0..12usize) {
            for policy in POLICIES {
                let mut cache = ExpertCache::new(3, 8, n_slots, policy);
                let mut table = [-1; 24];
                let mut records = vec![None; n_slots];
                let mut worth = [f64::NEG_INFINITY; 24];
                for event in &events {
                    match event {
                        Event::Route(layer, experts) => {
                            let entries: Vec<usize> =
                                experts.iter().map(|expert| (layer * 8 + expert) as usize).collect();
                            let was_resident = resident(&cache);
                            let changes = route(&mut cache, *layer, experts);
                            for change in changes {
                                let entry = change.entry as usize;
                                table[entry] = change.slot;
                                if change.slot >= 0 {
                                    records[change.slot as usize] = Some(entry);
                                    continue;
                                }
                                prop_assert!(!entries.contains(&entry), "the current layer stays");
                                let mut stayed = was_resident
                                    .iter()
                                    .filter(|e| cache.table()[**e] >= 0 && !entries.contains(e));
                                prop_assert!(stayed.all(|&e| worth[e] >= worth[entry]));
                            }
                            let n_there = entries.iter().filter(|e| cache.table()[**e] >= 0).count();
                            prop_assert_eq!(n_there, experts.len().min(records.len()));
                            entries.iter().for_each(|&e| worth[e] = cache.worth(*layer, e as u32 % 8));
                        }
                        Event::Resize(n) => {
                            let mut hottest = resident(&cache);
                            let resized = cache.resize(*n);
                            records.resize(records.len().max(*n), None);
                            for &(from, to) in &resized.moves {
                                records[to as usize] = records[from as usize];
                            }
                            records.truncate(*n);
                            resized.changes.iter().for_each(|c| table[c.entry as usize] = c.slot);
                            hottest.sort_by(|a, b| worth[*b].total_cmp(&worth[*a]));
                            let least = hottest.iter().take(*n).next_back().map_or(0.0, |&e| worth[e]);
                            prop_assert_eq!(resident(&cache).len(), hottest.len().min(*n));
                            prop_assert!(resident(&cache).iter().all(|&e| worth[e] >= least));
                            prop_assert_eq!(cache.n_admissible(), *n);
                        }
                        Event::Clear => {
                            cache.clear();
                            table.fill(-1);
                        }
                    }
                    prop_assert_eq!(cache.table(), &table[..]);
                    for (entry, &slot) in table.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                        prop_assert_eq!(records[slot as usize], Some(entry));
                    }
                }
            }
        }
    }
}
