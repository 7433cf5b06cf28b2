//! What is computed of earlier prompts: a tree over tokens, a page of the KV cache a node. Two prompts that begin alike share
//! the pages of their common beginning; where layers are recurrent, a prompt goes on from a state that is kept at a node.
//!
//! A page that is full never changes, and is shared. The last page of a text is seldom full: the next text that goes on from
//! there takes it out of the tree. It knows pages by number and states as bytes, and no device.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use freetoken_backend::PAGE_TOKENS;

use super::BlockPool;

/// What recurrent layers keep behind the last token of a node.
pub(super) type StateBytes = Arc<[u8]>;

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
    used: u64,
    state: Option<StateBytes>,
}

/// What [`PrefixCache::adopt`] found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Tokens whose pages the new holder has now.
    pub(super) n_tokens: usize,
    /// The state behind them, where one was asked for.
    pub(super) state: Option<StateBytes>,
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
    /// Nodes without children, the one whose use is longest ago first.
    leaves: BTreeSet<(u64, usize)>,
    /// Counts the calls that use nodes.
    clock: u64,
    /// Of all states.
    state_bytes: usize,
    most_state_bytes: usize,
}

impl PrefixCache {
    /// An empty tree that keeps at most so many bytes of states.
    pub(super) fn new(most_state_bytes: usize) -> Self {
        PrefixCache {
            nodes: Vec::new(),
            vacant: Vec::new(),
            children: HashMap::new(),
            tails: HashMap::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            state_bytes: 0,
            most_state_bytes,
        }
    }

    /// Pages that the tree holds and nobody else: [`Self::evict`] can free them all.
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

    /// Gives a new holder the pages of the longest beginning of `tokens` that is there; `needs_state`: with a state behind it.
    pub(super) fn adopt(
        &mut self,
        tokens: &[u32],
        needs_state: bool,
        pages: &mut Vec<u32>,
        pool: &mut BlockPool,
    ) -> Found {
        self.clock += 1;
        let mut path = Vec::new();
        for key in tokens.chunks_exact(PAGE_TOKENS).map(PageKey::new) {
            let Some(&child) = self.children.get(&(path.last().copied(), key)) else { break };
            path.push(child);
        }
        let rest = &tokens[path.len() * PAGE_TOKENS..];
        let tail = self.tails.get(&path.last().copied()).copied().filter(|&tail| {
            let Node { key, page, state, .. } = self.node(tail);
            let goes_on = rest.starts_with(&key.tokens[..key.n]);
            // Whoever else holds it still writes to it.
            goes_on && pool.n_holders(*page) == 1 && (!needs_state || state.is_some())
        });
        if needs_state && tail.is_none() {
            let n = path.iter().rposition(|&id| self.node(id).state.is_some()).map_or(0, |i| i + 1);
            path.truncate(n);
        }
        for &id in &path {
            let page = self.touch(id);
            pool.share(page);
            pages.push(page);
        }
        let mut found = Found { n_tokens: path.len() * PAGE_TOKENS, state: None };
        match tail {
            Some(tail) => {
                let Node { key, page, state, .. } = self.remove(tail);
                // Its holder is the sequence now.
                pages.push(page);
                found = Found { n_tokens: found.n_tokens + key.n, state };
            }
            None => found.state = path.last().and_then(|&id| self.node(id).state.clone()),
        }
        found
    }

    /// Keeps the pages of `tokens`, and the state behind them. The last page is kept where it is not full only with
    /// `with_tail`: nobody may write to it any more. Where a beginning is there already, its own pages stay.
    pub(super) fn keep(
        &mut self,
        tokens: &[u32],
        pages: &[u32],
        with_tail: bool,
        state: Option<StateBytes>,
        pool: &mut BlockPool,
    ) {
        self.clock += 1;
        let mut at = None;
        let keys = tokens.chunks(PAGE_TOKENS).map(PageKey::new);
        for (key, &page) in keys.zip(pages).filter(|(key, _)| key.is_full() || with_tail) {
            at = Some(match self.children.get(&(at, key)) {
                Some(&child) => {
                    self.touch(child);
                    child
                }
                None => {
                    if let Some(&other) = self.tails.get(&at).filter(|_| !key.is_full()) {
                        let Node { page, .. } = self.remove(other);
                        pool.drop_holder(page);
                    }
                    pool.share(page);
                    self.add(at, key, page)
                }
            });
        }
        let n_kept = if with_tail { tokens.len() } else { tokens.len() / PAGE_TOKENS * PAGE_TOKENS };
        if let (Some(last), Some(state)) = (at, state.filter(|_| n_kept == tokens.len())) {
            let node = self.nodes[last].as_mut().expect("the number of a node");
            self.state_bytes += state.len();
            self.state_bytes -= node.state.replace(state).map_or(0, |old| old.len());
            self.forget_states();
        }
    }

    /// Drops the states whose use is longest ago, until the others may stay.
    fn forget_states(&mut self) {
        while self.state_bytes > self.most_state_bytes {
            let with_state = self.nodes.iter_mut().flatten().filter(|node| node.state.is_some());
            let oldest = with_state.min_by_key(|node| node.used).expect("bytes are of states");
            self.state_bytes -= oldest.state.take().map_or(0, |state| state.len());
        }
    }

    /// Frees `n` pages, those first whose use is longest ago. How many it could free: no more than nobody else holds.
    pub(super) fn evict(&mut self, n: usize, pool: &mut BlockPool) -> usize {
        let mut n_freed = 0;
        let mut spared = Vec::new();
        while n_freed < n
            && let Some(&(used, id)) = self.leaves.first()
        {
            if pool.n_holders(self.node(id).page) > 1 {
                self.leaves.pop_first();
                spared.push((used, id));
                continue;
            }
            let Node { page, .. } = self.remove(id);
            pool.drop_holder(page);
            n_freed += 1;
        }
        self.leaves.extend(spared);
        n_freed
    }

    /// Takes a leaf out.
    fn remove(&mut self, id: usize) -> Node {
        let node = self.nodes[id].take().expect("a leaf is a node");
        assert_eq!(node.n_children, 0, "only leaves leave");
        self.vacant.push(id);
        self.leaves.remove(&(node.used, id));
        self.children.remove(&(node.parent, node.key));
        if !node.key.is_full() {
            self.tails.remove(&node.parent);
        }
        self.state_bytes -= node.state.as_ref().map_or(0, |state| state.len());
        if let Some(parent) = node.parent {
            let above = self.nodes[parent].as_mut().expect("a parent outlives its children");
            above.n_children -= 1;
            if above.n_children == 0 {
                self.leaves.insert((above.used, parent));
            }
        }
        node
    }

    /// The pages got new numbers.
    pub(super) fn renumber(&mut self, new: impl Fn(u32) -> u32) {
        self.nodes.iter_mut().flatten().for_each(|node| node.page = new(node.page));
    }

    #[cfg(test)]
    fn n_nodes(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    fn node(&self, id: usize) -> &Node {
        self.nodes[id].as_ref().expect("the number of a node")
    }

    /// Notes a use, and gives the page.
    fn touch(&mut self, id: usize) -> u32 {
        let clock = self.clock;
        let node = self.nodes[id].as_mut().expect("the number of a node");
        let before = std::mem::replace(&mut node.used, clock);
        if self.leaves.remove(&(before, id)) {
            self.leaves.insert((clock, id));
        }
        node.page
    }

    fn add(&mut self, parent: Option<usize>, key: PageKey, page: u32) -> usize {
        if let Some(parent) = parent {
            let above = self.nodes[parent].as_mut().expect("the number of a node");
            above.n_children += 1;
            self.leaves.remove(&(above.used, parent));
        }
        let node = Some(Node { parent, key, page, n_children: 0, used: self.clock, state: None });
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
        self.leaves.insert((self.clock, id));
        id
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Few different pages, so that beginnings meet.
    fn tokens(pages: &[u32]) -> Vec<u32> {
        pages.iter().flat_map(|&page| std::iter::repeat_n(page, PAGE_TOKENS)).collect()
    }

    #[test]
    fn a_beginning_is_found_and_the_oldest_leaf_leaves_first() {
        let (mut pool, mut tree) = (BlockPool::new(10), PrefixCache::new(0));
        let mut a = Vec::new();
        assert!(pool.grow(&mut a, 3 * PAGE_TOKENS));
        tree.keep(&tokens(&[1, 2, 3]), &a, false, None, &mut pool);
        let mut b = Vec::new();
        tree.adopt(&tokens(&[1, 2, 9]), false, &mut b, &mut pool);
        assert_eq!(b, a[..2]);
        assert!(pool.grow(&mut b, 3 * PAGE_TOKENS));
        tree.keep(&tokens(&[1, 2, 9]), &b, false, None, &mut pool);
        assert_eq!((tree.n_nodes(), tree.n_evictable(&pool)), (4, 0));
        assert_eq!(tree.evict(9, &mut pool), 0, "all are held");
        let last = a[2];
        pool.shrink(&mut a, 0);
        assert_eq!((tree.n_evictable(&pool), tree.evict(9, &mut pool)), (1, 1));
        assert_eq!(pool.n_holders(last), 0);
        pool.shrink(&mut b, 0);
        assert_eq!(tree.evict(2, &mut pool), 2, "the leaf, then its parent");
        let mut c = Vec::new();
        tree.adopt(&tokens(&[1, 2, 9]), false, &mut c, &mut pool);
        assert_eq!(c.len(), 1);
        pool.shrink(&mut c, 0);
        assert_eq!((tree.evict(9, &mut pool), tree.n_nodes(), pool.n_free()), (1, 0, 9));
    }

    #[test]
    fn a_page_that_is_not_full_goes_to_who_goes_on_from_it() {
        let (mut pool, mut tree) = (BlockPool::new(6), PrefixCache::new(0));
        let text: Vec<u32> = (0..PAGE_TOKENS as u32 + 3).collect();
        let mut pages = Vec::new();
        assert!(pool.grow(&mut pages, text.len()));
        tree.keep(&text, &pages, false, None, &mut pool);
        assert_eq!(tree.n_nodes(), 1, "who runs still writes to the second");
        tree.keep(&text, &pages, true, None, &mut pool);
        let longer: Vec<u32> = text.iter().copied().chain([99, 98]).collect();
        let mut next = Vec::new();
        assert_eq!(tree.adopt(&longer, false, &mut next, &mut pool).n_tokens, PAGE_TOKENS, "it has a holder");
        pool.shrink(&mut next, 0);
        let second = pages[1];
        pool.shrink(&mut pages, 0);
        assert_eq!(tree.adopt(&longer, false, &mut next, &mut pool).n_tokens, text.len());
        assert_eq!((next[1], pool.n_holders(second), tree.n_nodes()), (second, 1, 1));
        let mut other = Vec::new();
        assert_eq!(tree.adopt(&longer, false, &mut other, &mut pool).n_tokens, PAGE_TOKENS);
        // Two ends of one beginning: the last one stays.
        for end in [[7, 7], [8, 8]] {
            let text: Vec<u32> = text[..PAGE_TOKENS].iter().copied().chain(end).collect();
            let mut pages = other.clone();
            pool.share(other[0]);
            assert!(pool.grow(&mut pages, text.len()));
            tree.keep(&text, &pages, true, None, &mut pool);
            pool.shrink(&mut pages, 0);
        }
        assert_eq!((tree.n_nodes(), pool.n_free()), (2, 5 - 1 - 1 - 1));
    }

    #[test]
    fn a_recurrent_text_goes_on_from_the_last_state_and_old_states_leave() {
        let state = |value: u8| -> Option<StateBytes> { Some(vec![value; 10].into()) };
        let (mut pool, mut tree) = (BlockPool::new(20), PrefixCache::new(25));
        let mut pages = Vec::new();
        let text = tokens(&[1, 2, 3, 4]);
        assert!(pool.grow(&mut pages, text.len()));
        tree.keep(&text[..2 * PAGE_TOKENS], &pages, false, state(2), &mut pool);
        tree.keep(&text, &pages, false, None, &mut pool);
        let found = |tree: &mut PrefixCache, pool: &mut BlockPool, text: &[u32]| {
            let mut pages = Vec::new();
            let found = tree.adopt(text, true, &mut pages, pool);
            assert_eq!(pages.len(), found.n_tokens.div_ceil(PAGE_TOKENS));
            pool.shrink(&mut pages, 0);
            (found.n_tokens / PAGE_TOKENS, found.state.map(|state| state[0]))
        };
        assert_eq!(found(&mut tree, &mut pool, &text), (2, Some(2)));
        tree.keep(&text, &pages, true, state(4), &mut pool);
        assert_eq!(found(&mut tree, &mut pool, &text), (4, Some(4)));
        assert_eq!(found(&mut tree, &mut pool, &tokens(&[1, 2, 9])), (2, Some(2)));
        assert_eq!(tree.state_bytes, 20);
        tree.keep(&text[..PAGE_TOKENS], &pages, false, state(1), &mut pool);
        assert_eq!(tree.state_bytes, 20);
        assert_eq!(found(&mut tree, &mut pool, &text), (2, Some(2)), "the fourth was used longest ago");
        assert_eq!(found(&mut tree, &mut pool, &tokens(&[9])), (0, None));
        pool.shrink(&mut pages, 0);
        assert_eq!((tree.evict(9, &mut pool), tree.state_bytes, pool.n_free()), (4, 0, 19));
    }

    #[derive(Debug, Clone)]
    enum Action {
        /// A sequence over these pages begins.
        Begin(Vec<u32>),
        /// The n-th sequence ends; its pages are kept or not.
        End(usize, bool),
        Evict(usize),
        Pack,
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            4 => prop::collection::vec(0..3u32, 1..6).prop_map(Action::Begin),
            3 => (0..8usize, any::<bool>()).prop_map(|(i, keep)| Action::End(i, keep)),
            2 => (1..8usize).prop_map(Action::Evict),
            1 => Just(Action::Pack),
        ]
    }

    proptest! {
        /// Against a model that knows what each page holds.
        #[test]
        fn no_page_is_lost_or_held_for_two_texts(actions in prop::collection::vec(action(), 1..60)) {
            let (mut pool, mut tree) = (BlockPool::new(24), PrefixCache::new(0));
            let mut running: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
            // The text up to and with each page.
            let mut written: HashMap<u32, Vec<u32>> = HashMap::new();
            for action in actions {
                match action {
                    Action::Begin(texts) => {
                        let (tokens, mut pages) = (tokens(&texts), Vec::new());
                        tree.adopt(&tokens, false, &mut pages, &mut pool);
                        for (i, page) in pages.iter().enumerate() {
                            prop_assert_eq!(&written[page], &texts[..=i]);
                        }
                        let n_cached = pages.len();
                        let missing = texts.len() - n_cached;
                        if missing > pool.n_free() {
                            tree.evict(missing - pool.n_free(), &mut pool);
                        }
                        if pool.grow(&mut pages, tokens.len()) {
                            for i in n_cached..texts.len() {
                                written.insert(pages[i], texts[..=i].to_vec());
                            }
                            running.push((texts, pages));
                        } else {
                            pool.shrink(&mut pages, 0);
                        }
                    }
                    Action::End(i, keep) if !running.is_empty() => {
                        let i = i % running.len();
                        let (texts, mut pages) = running.swap_remove(i);
                        if keep {
                            tree.keep(&tokens(&texts), &pages, false, None, &mut pool);
                        }
                        pool.shrink(&mut pages, 0);
                    }
                    Action::End(..) => {}
                    Action::Evict(n) => {
                        let evictable = tree.n_evictable(&pool);
                        prop_assert_eq!(tree.evict(n, &mut pool), n.min(evictable));
                    }
                    Action::Pack => {
                        let old = pool.used();
                        pool.pack(&old, 24);
                        let new = |page: u32| old.iter().position(|&p| p == page).unwrap() as u32 + 1;
                        tree.renumber(new);
                        running.iter_mut().flat_map(|(_, pages)| pages).for_each(|page| *page = new(*page));
                        written = old.iter().zip(1..).map(|(from, to)| (to, written[from].clone())).collect();
                    }
                }
                for (texts, pages) in &running {
                    for (i, page) in pages.iter().enumerate() {
                        prop_assert_eq!(&written[page], &texts[..=i]);
                    }
                }
                let mut held: Vec<u32> = running.iter().flat_map(|(_, pages)| pages).copied().collect();
                held.extend(tree.nodes.iter().flatten().map(|node| node.page));
                held.sort_unstable();
                for page in 1..24 {
                    let n = held.iter().filter(|&&p| p == page).count();
                    prop_assert_eq!(pool.n_holders(page), n as u32);
                }
                held.dedup();
                prop_assert_eq!(held.len() + pool.n_free(), 23);
            }
        }
    }
}
