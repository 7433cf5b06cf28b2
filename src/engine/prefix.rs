//! What is computed of earlier prompts: a tree over tokens, a page of the KV cache a node. Two prompts that begin alike share
//! the pages of their common beginning; where layers are recurrent, a prompt goes on from a state that is kept at a node.
//!
//! A page that is full never changes, and is shared. The last page of a text is seldom full: the next text that goes on from
//! there takes it out of the tree. What leaves first is a matter of the tokens that would have to be computed again (`worth`).
//! The prefill rate and the bytes of a page or a state are factors of all of them, and drop out. It knows pages and places of
//! states by number, and no device.

#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    iter::successors,
};

use freetoken_backend::PAGE_TOKENS;

use super::{
    BlockPool,
    state_places::{Place, StatePlaces},
    worth::{Age, Clock, Priority},
};

/// Worth of a page that costs one token.
const TOKEN_WORTH: u64 = 256;

/// Tokens of a page; of one that is not full, those that are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PageKey {
    n: usize,
    tokens: [u32; PAGE_TOKENS],
}

impl PageKey {
    fn new(tokens: &[u32]) -> Self {
        let mut key = PageKey { n: tokens.len(), tokens: [0; PAGE_TOKENS] };
        key.tokens[..tokens.len()].copy_from_slice(tokens);
        key
    }

    fn is_full(&self) -> bool {
        self.n == PAGE_TOKENS
    }
}

#[derive(Debug)]
struct Node {
    parent: Option<usize>,
    key: PageKey,
    page: u32,
    n_children: usize,
    age: Age,
    state: Option<KeptState>,
}

/// What recurrent layers keep behind the last token of a node.
#[derive(Debug)]
struct KeptState {
    place: Place,
    age: Age,
}

/// What [`PrefixCache::adopt`] found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Tokens whose pages the new holder has now.
    pub(super) n_tokens: usize,
    /// Where the state behind them lies, until a state is kept the next time. Always there where layers are recurrent and
    /// anything was found.
    pub(super) state: Option<Place>,
    /// The slot that it is to be copied to beside: it lay in host memory, and lies there now.
    pub(super) moved_to: Option<u32>,
}

/// What must be copied so that a state is kept, in order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stow {
    /// A state that makes room: from this slot to this place of host memory.
    pub(super) spill: Option<[u32; 2]>,
    /// Where the new one goes.
    pub(super) place: Place,
}

/// What must be moved so that there are other numbers of places, in order.
#[derive(Debug, Default)]
pub(super) struct Restow {
    /// States that go from a slot to a place of host memory.
    pub(super) spills: Vec<[u32; 2]>,
    /// The slots that become the first ones, by their old number.
    pub(super) slots: Vec<u32>,
    /// The same for host memory.
    pub(super) host: Vec<u32>,
}

/// Sums since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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

/// The tree.
#[derive(Debug)]
pub(super) struct PrefixCache {
    /// By number; those that left are `None`.
    nodes: Vec<Option<Node>>,
    vacant: Vec<usize>,
    /// By parent and tokens.
    children: HashMap<(Option<usize>, PageKey), usize>,
    /// The child whose page is not full, by parent.
    tails: HashMap<Option<usize>, usize>,
    page_clock: Clock,
    state_clock: Clock,
    /// Where layers are recurrent. Every leaf then has a state: without one nobody could go on from it.
    places: Option<StatePlaces>,
    counters: StateCounters,
}

impl PrefixCache {
    /// An empty tree; `places`: for states, where layers are recurrent.
    pub(super) fn new(places: Option<StatePlaces>) -> Self {
        PrefixCache {
            nodes: Vec::new(),
            vacant: Vec::new(),
            children: HashMap::new(),
            tails: HashMap::new(),
            page_clock: Clock::default(),
            state_clock: Clock::default(),
            places,
            counters: StateCounters::default(),
        }
    }

    /// Places of states.
    pub(super) fn places(&self) -> Option<&StatePlaces> {
        self.places.as_ref()
    }

    /// What happened to states.
    pub(super) fn counters(&self) -> StateCounters {
        self.counters
    }

    /// Pages that the tree holds and nobody else, and that lead to no page that is held: [`Self::evict`] can free them all.
    pub(super) fn n_evictable(&self, pool: &BlockPool) -> usize {
        let mut stays = vec![false; self.nodes.len()];
        let mut n_staying = 0;
        for (id, node) in self.nodes.iter().enumerate() {
            // What is held stays, and with it everything above.
            let mut at = node.as_ref().filter(|node| pool.n_holders(node.page) > 1).map(|_| id);
            while let Some(id) = at.filter(|&id| !std::mem::replace(&mut stays[id], true)) {
                n_staying += 1;
                at = self.node(id).parent;
            }
        }
        self.nodes.len() - self.vacant.len() - n_staying
    }

    /// Gives a new holder the pages of the longest beginning of `tokens` that is there, where layers are recurrent with a state
    /// behind it.
    pub(super) fn adopt(&mut self, tokens: &[u32], pages: &mut Vec<u32>, pool: &mut BlockPool) -> Found {
        let mut path = self.path(tokens);
        let rest = &tokens[path.len() * PAGE_TOKENS..];
        let tail = self.tails.get(&path.last().copied()).copied().filter(|&tail| {
            let Node { key, page, .. } = self.node(tail);
            // Whoever else holds it still writes to it.
            rest.starts_with(&key.tokens[..key.n]) && pool.n_holders(*page) == 1
        });
        if self.places.is_some() && tail.is_none() {
            let n = path.iter().rposition(|&id| self.node(id).state.is_some()).map_or(0, |i| i + 1);
            path.truncate(n);
        }
        for &id in &path {
            let Node { age, page, .. } = self.nodes[id].as_mut().expect("the number of a node");
            self.page_clock.count_use(age);
            pool.share(*page);
            pages.push(*page);
        }
        let mut found = Found { n_tokens: path.len() * PAGE_TOKENS, ..Found::default() };
        match tail {
            Some(tail) => {
                let Node { parent, key, page, state, .. } = self.remove(tail);
                // Its holder is the sequence now.
                pages.push(page);
                found.n_tokens += key.n;
                found.state = state.map(|state| state.place);
                self.trim(parent, pool);
            }
            None => {
                (found.state, found.moved_to) =
                    path.last().map_or((None, None), |&last| self.use_state(last));
            }
        }
        match found.state {
            Some(Place::Slot(_)) => self.counters.slot_hits += 1,
            Some(Place::Host(_)) => self.counters.host_hits += 1,
            None => {}
        }
        found
    }

    /// Where a node's state lies; and the slot that it has from now on, where it lies in host memory and a slot is free.
    fn use_state(&mut self, id: usize) -> (Option<Place>, Option<u32>) {
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

    /// Keeps the pages of `tokens`, and, where layers are recurrent, the state behind the last of them: what must be copied for
    /// that. The last page is kept where it is not full only with `with_tail`: nobody may write to it any more. Where a beginning
    /// is there already, its own pages stay. Asserts that a state stands behind what is kept.
    pub(super) fn keep(
        &mut self,
        tokens: &[u32],
        pages: &[u32],
        with_tail: bool,
        pool: &mut BlockPool,
    ) -> Option<Stow> {
        let n_kept = if with_tail { tokens.len() } else { tokens.len() / PAGE_TOKENS * PAGE_TOKENS };
        assert!(self.places.is_none() || n_kept == tokens.len(), "a state stands behind all tokens");
        let tokens = &tokens[..n_kept];
        // Room first: what leaves may be part of this beginning.
        let stow = if self.places.is_some() && !tokens.is_empty() && !self.has_state(tokens) {
            Some(self.make_room_for_state(pool)?)
        } else {
            None
        };
        let mut at = None;
        for (key, &page) in tokens.chunks(PAGE_TOKENS).map(PageKey::new).zip(pages) {
            at = Some(match self.children.get(&(at, key)) {
                Some(&child) => {
                    let Node { age, .. } = self.nodes[child].as_mut().expect("the number of a node");
                    self.page_clock.renew(age);
                    child
                }
                None => {
                    if let Some(&other) = self.tails.get(&at).filter(|_| !key.is_full()) {
                        self.drop_node(other, pool);
                    }
                    pool.share(page);
                    self.add(at, key, page)
                }
            });
        }
        let PrefixCache { nodes, state_clock, .. } = self;
        let node = nodes[at?].as_mut().expect("the number of a node");
        match (&stow, &mut node.state) {
            (Some(Stow { place, .. }), state) => {
                *state = Some(KeptState { place: *place, age: state_clock.begin() });
            }
            (None, Some(state)) => state_clock.renew(&mut state.age),
            (None, None) => {}
        }
        stow
    }

    /// A free place for a state, taken; `None` where there are no places at all. Where all are taken, the state that is worth the
    /// least leaves; where all slots are, the one whose use is longest ago goes to host memory, since that costs the same for each.
    fn make_room_for_state(&mut self, pool: &mut BlockPool) -> Option<Stow> {
        let places = self.places.as_ref().filter(|places| places.n() > 0)?;
        if places.n_used() == places.n() {
            self.drop_least_state(|_| true, pool);
        }
        let spill = match self.places.as_ref()?.slots {
            ref slots if slots.n() > 0 && slots.n_used() == slots.n() => Some(self.spill()),
            _ => None,
        };
        let places = self.places.as_mut()?;
        let slot = places.slots.take().map(Place::Slot);
        let place = slot.or_else(|| places.host.take().map(Place::Host)).expect("a free place");
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
    pub(super) fn restow(&mut self, n_slots: usize, n_host: usize, pool: &mut BlockPool) -> Restow {
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
    pub(super) fn forget_states(&mut self, pool: &mut BlockPool) {
        for id in 0..self.nodes.len() {
            if self.nodes[id].as_ref().is_some_and(|node| node.state.is_some()) {
                self.drop_state(id);
                self.trim(Some(id), pool);
            }
        }
    }

    /// Frees `n` pages that nobody else holds, or as many as there are: leaves, and where layers are recurrent what leads to no
    /// state without them, so that it may be a few more. How many.
    pub(super) fn evict(&mut self, n: usize, pool: &mut BlockPool) -> usize {
        let before = pool.n_free();
        let mut leaves = BinaryHeap::new();
        if n > 0 {
            let ids = (0..self.nodes.len()).filter(|&id| self.frees_page(id, pool));
            leaves.extend(ids.map(|id| Reverse((self.leaf_priority(id), id))));
        }
        while pool.n_free() < before + n
            && let Some(Reverse((priority, id))) = leaves.pop()
        {
            self.page_clock.leave(priority);
            let above = self.drop_node(id, pool);
            let above = self.trim(above, pool).filter(|&id| self.frees_page(id, pool));
            leaves.extend(above.map(|id| Reverse((self.leaf_priority(id), id))));
        }
        pool.n_free() - before
    }

    /// Whether this is a leaf whose page nobody else holds.
    fn frees_page(&self, id: usize, pool: &BlockPool) -> bool {
        let node = self.nodes[id].as_ref();
        node.is_some_and(|node| node.n_children == 0 && pool.n_holders(node.page) == 1)
    }

    /// The pages got new numbers.
    pub(super) fn renumber(&mut self, new: impl Fn(u32) -> u32) {
        self.nodes.iter_mut().flatten().for_each(|node| node.page = new(node.page));
    }

    /// The nodes of the full pages that `tokens` begin with.
    fn path(&self, tokens: &[u32]) -> Vec<usize> {
        let mut path = Vec::new();
        for key in tokens.chunks_exact(PAGE_TOKENS).map(PageKey::new) {
            let Some(&child) = self.children.get(&(path.last().copied(), key)) else { break };
            path.push(child);
        }
        path
    }

    /// Whether a state is kept behind these tokens.
    fn has_state(&self, tokens: &[u32]) -> bool {
        let mut keys = tokens.chunks(PAGE_TOKENS).map(PageKey::new);
        let last = keys.try_fold(None, |at, key| self.children.get(&(at, key)).map(|&child| Some(child)));
        last.flatten().is_some_and(|id| self.node(id).state.is_some())
    }

    fn node(&self, id: usize) -> &Node {
        self.nodes[id].as_ref().expect("the number of a node")
    }

    /// The nodes above, from the next one to the root's child.
    fn above(&self, id: usize) -> impl Iterator<Item = &Node> {
        let up = |node: &&Node| node.parent.map(|id| self.node(id));
        successors(up(&self.node(id)), up)
    }

    /// Tokens that would have to be computed to have the state of a node again: those behind the next state above.
    fn tokens_of_state(&self, id: usize) -> u64 {
        let above = self.above(id).take_while(|node| node.state.is_none());
        (self.node(id).key.n + above.map(|node| node.key.n).sum::<usize>()) as u64
    }

    /// When a leaf leaves. Without it and its state, the pages above lead nowhere up to the next one that leads elsewhere: they
    /// leave with it, and its worth is that of a page of them.
    fn leaf_priority(&self, id: usize) -> Priority {
        let node = self.node(id);
        let worth = if self.places.is_some() {
            let alone = |node: &&Node| node.state.is_none() && node.n_children == 1;
            let n_pages = 1 + self.above(id).take_while(alone).count();
            self.tokens_of_state(id) * TOKEN_WORTH / n_pages as u64
        } else {
            node.key.n as u64 * TOKEN_WORTH
        };
        node.age.priority(worth)
    }

    /// Takes a node and those above it out, as long as they lead to no state; the first that stays. All stay where layers are not
    /// recurrent.
    fn trim(&mut self, mut at: Option<usize>, pool: &mut BlockPool) -> Option<usize> {
        while self.places.is_some()
            && let Some(id) = at
            && let Node { n_children: 0, state: None, .. } = self.node(id)
        {
            at = self.drop_node(id, pool);
        }
        at
    }

    /// Takes a leaf out and lets go of its page; its parent.
    fn drop_node(&mut self, id: usize, pool: &mut BlockPool) -> Option<usize> {
        let Node { parent, page, .. } = self.remove(id);
        pool.drop_holder(page);
        parent
    }

    fn drop_state(&mut self, id: usize) {
        let state = self.nodes[id].as_mut().and_then(|node| node.state.take());
        if let (Some(state), Some(places)) = (state, &mut self.places) {
            places.give_back(state.place);
        }
    }

    /// Takes a leaf out. The place of its state is free then.
    fn remove(&mut self, id: usize) -> Node {
        let node = self.nodes[id].take().expect("a leaf is a node");
        assert_eq!(node.n_children, 0, "only leaves leave");
        self.vacant.push(id);
        self.children.remove(&(node.parent, node.key));
        if !node.key.is_full() {
            self.tails.remove(&node.parent);
        }
        if let (Some(state), Some(places)) = (&node.state, &mut self.places) {
            places.give_back(state.place);
        }
        if let Some(parent) = node.parent {
            self.nodes[parent].as_mut().expect("a parent outlives its children").n_children -= 1;
        }
        node
    }

    fn add(&mut self, parent: Option<usize>, key: PageKey, page: u32) -> usize {
        if let Some(parent) = parent {
            self.nodes[parent].as_mut().expect("the number of a node").n_children += 1;
        }
        let node = Some(Node { parent, key, page, n_children: 0, age: self.page_clock.begin(), state: None });
        let id = match self.vacant.pop() {
            Some(id) => {
                self.nodes[id] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        };
        self.children.insert((parent, key), id);
        if !key.is_full() {
            self.tails.insert(parent, id);
        }
        id
    }
}
