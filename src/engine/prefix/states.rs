//! The states of the tree: behind which nodes there is one, where it lies, and which of them leave. States of one model have one
//! size; what moves between places is said, and done elsewhere.

use freetoken_backend::PAGE_TOKENS;

use super::{PageKey, PrefixCache};
use crate::engine::{
    BlockPool,
    state_places::{Place, StatePlaces},
    worth::Age,
};

/// What recurrent layers keep behind the last token of a node.
#[derive(Debug)]
pub(super) struct KeptState {
    pub(super) place: Place,
    pub(super) age: Age,
}

/// What must be copied so that a state is kept, in order.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::engine) struct Stow {
    /// A state that makes room: from this slot to this place of host memory.
    pub(in crate::engine) spill: Option<[u32; 2]>,
    /// Where the new one goes.
    pub(in crate::engine) place: Place,
}

/// What must be moved so that there are other numbers of places, in order.
#[derive(Debug, Default)]
pub(in crate::engine) struct Restow {
    /// States that go from a slot to a place of host memory.
    pub(in crate::engine) spills: Vec<[u32; 2]>,
    /// The slots that become the first ones, by their old number.
    pub(in crate::engine) slots: Vec<u32>,
    /// The same for host memory.
    pub(in crate::engine) host: Vec<u32>,
}

/// Sums since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct StateCounters {
    /// Sequences that went on from a state in a slot of the device.
    pub slot_hits: u64,
    /// From one in host memory.
    pub host_hits: u64,
    /// States that went from a slot to host memory.
    pub spilled: u64,
    /// States that left for the room of others.
    pub dropped: u64,
}

impl PrefixCache {
    /// Places of states.
    pub(in crate::engine) fn places(&self) -> Option<&StatePlaces> {
        self.places.as_ref()
    }

    /// What happened to states.
    pub(in crate::engine) fn counters(&self) -> StateCounters {
        self.counters
    }

    /// Whether a state is kept behind these tokens.
    pub(super) fn has_state(&self, tokens: &[u32]) -> bool {
        let mut keys = tokens.chunks(PAGE_TOKENS).map(PageKey::new);
        let last = keys.try_fold(None, |at, key| self.children.get(&(at, key)).map(|&child| Some(child)));
        last.flatten().is_some_and(|id| self.node(id).state.is_some())
    }

    /// Where a node's state lies; and the slot that it has from now on, where it lies in host memory and a slot is free.
    pub(super) fn use_state(&mut self, id: usize) -> (Option<Place>, Option<u32>) {
        let PrefixCache { nodes, places, state_clock, .. } = self;
        let state = nodes[id].as_mut().and_then(|node| node.state.as_mut());
        let Some((state, places)) = state.zip(places.as_mut()) else { return (None, None) };
        state_clock.count_use(&mut state.age);
        let place = state.place;
        let slot = matches!(place, Place::Host(_)).then(|| places.slots.take()).flatten();
        if let Some(slot) = slot {
            places.give_back(place);
            state.place = Place::Slot(slot);
        }
        (Some(place), slot)
    }

    /// Tokens that would have to be computed to have the state of a node again: those behind the next state above.
    pub(super) fn tokens_of_state(&self, id: usize) -> u64 {
        let above = self.above(id).take_while(|node| node.state.is_none());
        (self.node(id).key.n + above.map(|node| node.key.n).sum::<usize>()) as u64
    }

    /// A free place for a state, taken; `None` where there are no places at all. Where all are taken, the state that is worth the
    /// least leaves; where all slots are, the one whose use is longest ago goes to host memory, since that costs the same for each.
    pub(super) fn make_room_for_state(&mut self, pool: &mut BlockPool) -> Option<Stow> {
        let n = self.places.as_ref()?.n();
        if n == 0 {
            return None;
        }
        if self.places.as_ref()?.n_used() == n {
            self.drop_least_state(|_| true, pool);
        }
        let slots = &self.places.as_ref()?.slots;
        let spill = (slots.n() > 0 && slots.n_used() == slots.n()).then(|| self.spill());
        let place = self.places.as_mut()?.take().expect("a free place");
        Some(Stow { spill, place })
    }

    /// Moves the state in a slot whose use is longest ago to host memory, which has room.
    fn spill(&mut self) -> [u32; 2] {
        let PrefixCache { nodes, places, counters, .. } = self;
        let states = nodes.iter_mut().flatten().filter_map(|node| node.state.as_mut());
        let in_slots = states.filter(|state| matches!(state.place, Place::Slot(_)));
        let coldest = in_slots.min_by_key(|state| state.age.turn).expect("slots are taken by states");
        let places = places.as_mut().expect("a state has a place");
        let host = places.host.take().expect("host memory has room");
        let Place::Slot(slot) = std::mem::replace(&mut coldest.place, Place::Host(host)) else {
            unreachable!("one of those in slots")
        };
        places.give_back(Place::Slot(slot));
        counters.spilled += 1;
        [slot, host]
    }

    /// Drops the state that is worth the least of those whose place is one of these, and pages that lead to no state then.
    fn drop_least_state(&mut self, is_one: impl Fn(Place) -> bool, pool: &mut BlockPool) {
        let ids = (0..self.nodes.len()).filter(|&id| {
            let node = self.nodes[id].as_ref();
            node.and_then(|node| node.state.as_ref()).is_some_and(|state| is_one(state.place))
        });
        let priority = |id: usize| {
            let state = self.node(id).state.as_ref().expect("one of those with a state");
            state.age.priority(self.tokens_of_state(id))
        };
        let (priority, id) = ids.map(|id| (priority(id), id)).min().expect("places are taken by states");
        self.state_clock.leave(priority);
        self.drop_state(id);
        self.counters.dropped += 1;
        self.trim(Some(id), pool);
    }

    /// Changes the number of places; states for which none is left leave, those that are worth the least first. Asserts that
    /// layers are recurrent.
    pub(in crate::engine) fn restow(
        &mut self,
        n_slots: usize,
        n_host: usize,
        pool: &mut BlockPool,
    ) -> Restow {
        let mut restow = Restow::default();
        self.places.as_mut().expect("recurrent layers").host.grow(n_host);
        loop {
            let StatePlaces { slots, host } = self.places.as_ref().expect("looked at above");
            if host.n_used() > n_host {
                self.drop_least_state(|place| matches!(place, Place::Host(_)), pool);
            } else if slots.n_used() <= n_slots {
                break;
            } else if host.n_used() < n_host {
                restow.spills.push(self.spill());
            } else {
                self.drop_least_state(|_| true, pool);
            }
        }
        for place in self.nodes.iter_mut().flatten().filter_map(|node| Some(&mut node.state.as_mut()?.place))
        {
            let (number, numbers) = match place {
                Place::Slot(number) => (number, &mut restow.slots),
                Place::Host(number) => (number, &mut restow.host),
            };
            numbers.push(std::mem::replace(number, numbers.len() as u32));
        }
        let n_used = [restow.slots.len(), restow.host.len()];
        self.places = Some(StatePlaces::with_used(n_slots, n_host, n_used));
        restow
    }

    /// Forgets all states, and with them all that is kept: nobody knows any more what is in their places.
    pub(in crate::engine) fn forget_states(&mut self, pool: &mut BlockPool) {
        for id in 0..self.nodes.len() {
            if self.nodes[id].as_ref().is_some_and(|node| node.state.is_some()) {
                self.drop_state(id);
                self.trim(Some(id), pool);
            }
        }
    }

    fn drop_state(&mut self, id: usize) {
        let state = self.nodes[id].as_mut().and_then(|node| node.state.take());
        if let (Some(state), Some(places)) = (state, &mut self.places) {
            places.give_back(state.place);
        }
    }
}
