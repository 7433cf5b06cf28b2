use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

/// Few different pages, so that beginnings meet.
fn tokens(pages: &[u32]) -> Vec<u32> {
    pages.iter().flat_map(|&page| std::iter::repeat_n(page, PAGE_TOKENS)).collect()
}

fn recurrent(n_slots: usize, n_host: usize) -> PrefixCache {
    PrefixCache::new(Some(StatePlaces::new(n_slots, n_host)))
}

impl PrefixCache {
    fn n_nodes(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// All tokens up to and with a node's.
    fn text(&self, id: usize) -> Vec<u32> {
        let Node { parent, key, .. } = self.node(id);
        let above = parent.map_or(Vec::new(), |id| self.text(id));
        [&above[..], &key.tokens[..key.n]].concat()
    }

    fn ids(&self) -> impl Iterator<Item = usize> {
        (0..self.nodes.len()).filter(|&id| self.nodes[id].is_some())
    }
}

#[test]
fn a_beginning_is_found_and_the_oldest_leaf_leaves_first() {
    let (mut pool, mut tree) = (BlockPool::new(10), PrefixCache::new(None));
    let mut a = Vec::new();
    assert!(pool.grow(&mut a, 3 * PAGE_TOKENS));
    assert_eq!(tree.keep(&tokens(&[1, 2, 3]), &a, false, &mut pool), None);
    let mut b = Vec::new();
    assert_eq!(tree.adopt(&tokens(&[1, 2, 9]), &mut b, &mut pool).state, None);
    assert_eq!(b, a[..2]);
    assert!(pool.grow(&mut b, 3 * PAGE_TOKENS));
    tree.keep(&tokens(&[1, 2, 9]), &b, false, &mut pool);
    assert_eq!((tree.n_nodes(), tree.n_evictable(&pool)), (4, 0));
    assert_eq!(tree.evict(9, &mut pool), 0, "all are held");
    let last = a[2];
    pool.shrink(&mut a, 0);
    assert_eq!((tree.n_evictable(&pool), tree.evict(9, &mut pool)), (1, 1));
    assert_eq!(pool.n_holders(last), 0);
    pool.shrink(&mut b, 0);
    assert_eq!(tree.evict(2, &mut pool), 2, "the leaf, then its parent");
    let mut c = Vec::new();
    tree.adopt(&tokens(&[1, 2, 9]), &mut c, &mut pool);
    assert_eq!(c.len(), 1);
    pool.shrink(&mut c, 0);
    assert_eq!((tree.evict(9, &mut pool), tree.n_nodes(), pool.n_free()), (1, 0, 9));
}

#[test]
fn a_page_that_is_not_full_goes_to_who_goes_on_from_it() {
    let (mut pool, mut tree) = (BlockPool::new(6), PrefixCache::new(None));
    let text: Vec<u32> = (0..PAGE_TOKENS as u32 + 3).collect();
    let mut pages = Vec::new();
    assert!(pool.grow(&mut pages, text.len()));
    tree.keep(&text, &pages, false, &mut pool);
    assert_eq!(tree.n_nodes(), 1, "who runs still writes to the second");
    tree.keep(&text, &pages, true, &mut pool);
    let longer: Vec<u32> = text.iter().copied().chain([99, 98]).collect();
    let mut next = Vec::new();
    assert_eq!(tree.adopt(&longer, &mut next, &mut pool).n_tokens, PAGE_TOKENS, "it has a holder");
    pool.shrink(&mut next, 0);
    let second = pages[1];
    pool.shrink(&mut pages, 0);
    assert_eq!(tree.adopt(&longer, &mut next, &mut pool).n_tokens, text.len());
    assert_eq!((next[1], pool.n_holders(second), tree.n_nodes()), (second, 1, 1));
    let mut other = Vec::new();
    assert_eq!(tree.adopt(&longer, &mut other, &mut pool).n_tokens, PAGE_TOKENS);
    // Two ends of one beginning: the last one stays.
    for end in [[7, 7], [8, 8]] {
        let text: Vec<u32> = text[..PAGE_TOKENS].iter().copied().chain(end).collect();
        let mut pages = other.clone();
        pool.share(other[0]);
        assert!(pool.grow(&mut pages, text.len()));
        tree.keep(&text, &pages, true, &mut pool);
        pool.shrink(&mut pages, 0);
    }
    assert_eq!((tree.n_nodes(), pool.n_free()), (2, 5 - 1 - 1 - 1));
}

/// Keeps a state behind pages of a text that runs.
fn stow(tree: &mut PrefixCache, pool: &mut BlockPool, text: &[u32], n_pages: usize) -> Option<Stow> {
    let (text, mut pages) = (&tokens(text)[..n_pages * PAGE_TOKENS], Vec::new());
    tree.adopt(text, &mut pages, pool);
    assert!(pool.grow(&mut pages, text.len()));
    let stow = tree.keep(text, &pages, false, pool);
    pool.shrink(&mut pages, 0);
    stow
}

/// Pages that a text finds, where their state lies, and where it is brought to.
fn found(tree: &mut PrefixCache, pool: &mut BlockPool, text: &[u32]) -> (usize, Option<Place>, Option<u32>) {
    let mut pages = Vec::new();
    let found = tree.adopt(&tokens(text), &mut pages, pool);
    assert_eq!(pages.len(), found.n_tokens.div_ceil(PAGE_TOKENS));
    pool.shrink(&mut pages, 0);
    (found.n_tokens / PAGE_TOKENS, found.state, found.moved_to)
}

#[test]
fn states_fill_slots_then_host_memory_and_the_least_worth_leaves() {
    let (mut pool, mut tree) = (BlockPool::new(30), recurrent(2, 1));
    let text = [1, 2, 3, 4];
    let into = |place| Some(Stow { spill: None, place });
    assert_eq!(stow(&mut tree, &mut pool, &text, 2), into(Place::Slot(0)));
    assert_eq!(stow(&mut tree, &mut pool, &text, 2), None, "it is there");
    assert_eq!(stow(&mut tree, &mut pool, &text, 4), into(Place::Slot(1)));
    assert_eq!(found(&mut tree, &mut pool, &text), (4, Some(Place::Slot(1)), None));
    assert_eq!(found(&mut tree, &mut pool, &[1, 2, 9]), (2, Some(Place::Slot(0)), None));
    // The longest unused one goes to host memory, where it is found again, and stays while no slot is free.
    let spilled = Some(Stow { spill: Some([1, 0]), place: Place::Slot(1) });
    assert_eq!(stow(&mut tree, &mut pool, &[5, 6, 7], 1), spilled);
    assert_eq!(found(&mut tree, &mut pool, &text), (4, Some(Place::Host(0)), None));
    // All is full. The fifth page alone costs one page, less than two; its page leaves with it.
    let n_nodes = tree.n_nodes();
    assert_eq!(stow(&mut tree, &mut pool, &[8, 8, 8], 3), into(Place::Slot(1)));
    assert_eq!(tree.n_nodes(), n_nodes - 1 + 3);
    assert_eq!(found(&mut tree, &mut pool, &[5, 6, 7]), (0, None, None));
    // Two of the hits were to keep more of a text.
    assert_eq!(tree.counters(), StateCounters { slot_hits: 4, host_hits: 1, spilled: 1, dropped: 1 });
}

#[test]
fn a_state_in_host_memory_is_lifted_to_a_free_slot() {
    let (mut pool, mut tree) = (BlockPool::new(30), recurrent(1, 2));
    stow(&mut tree, &mut pool, &[1, 2], 2);
    let end = [tokens(&[3]), vec![7, 7]].concat();
    let mut pages = Vec::new();
    assert!(pool.grow(&mut pages, end.len()));
    let spilled = Some(Stow { spill: Some([0, 0]), place: Place::Slot(0) });
    assert_eq!(tree.keep(&end, &pages, true, &mut pool), spilled);
    pool.shrink(&mut pages, 0);
    assert_eq!(found(&mut tree, &mut pool, &[1, 2]), (2, Some(Place::Host(0)), None));
    // Who goes on from an end takes its state along, and pages that lead nowhere else.
    assert_eq!(tree.adopt(&end, &mut pages, &mut pool).state, Some(Place::Slot(0)));
    assert_eq!(tree.n_nodes(), 2);
    assert_eq!(found(&mut tree, &mut pool, &[1, 2]), (2, Some(Place::Host(0)), Some(0)));
    assert_eq!(found(&mut tree, &mut pool, &[1, 2]), (2, Some(Place::Slot(0)), None));
}

#[test]
fn without_places_nothing_recurrent_is_kept() {
    let (mut pool, mut tree) = (BlockPool::new(30), recurrent(0, 0));
    assert_eq!(stow(&mut tree, &mut pool, &[1, 2], 2), None);
    assert_eq!((tree.n_nodes(), pool.n_free()), (0, 29));
}

/// What agents send: two long system prompts in turn, and many short ends, of which each comes once.
fn agents() -> Vec<Vec<u32>> {
    let mut next = 1000;
    let mut requests = Vec::new();
    for phase in 0..6 {
        let system = [100, 200][phase % 2];
        for _ in 0..30 {
            next += 3;
            requests.push((system..system + 30).chain(next..next + 3).collect());
        }
    }
    requests
}

/// Tokens that are computed where what is kept leaves by age alone. `ends`: the beginnings of a text of so many pages that are kept,
/// an entry each; `most`: entries; `leaves_only`: those that another one begins with stay.
fn computed_by_age(
    requests: &[Vec<u32>],
    ends: fn(usize) -> Vec<usize>,
    most: usize,
    leaves_only: bool,
) -> usize {
    let mut kept: HashMap<&[u32], usize> = HashMap::new();
    let mut n_computed = 0;
    for (now, text) in requests.iter().enumerate() {
        let ends = ends(text.len());
        let n_found = ends.iter().copied().filter(|&n| kept.contains_key(&text[..n])).max().unwrap_or(0);
        n_computed += text.len() - n_found;
        kept.extend(ends.iter().filter(|&&n| leaves_only || n >= n_found).map(|&n| (&text[..n], now)));
        while kept.len() > most {
            let goes_on =
                |entry: &[u32], other: &[u32]| other.len() > entry.len() && other.starts_with(entry);
            let stays = |entry: &[u32]| leaves_only && kept.keys().any(|other| goes_on(entry, other));
            let free = kept.iter().filter(|(entry, _)| !stays(entry));
            let oldest = *free.min_by_key(|(entry, used)| (**used, entry.len())).unwrap().0;
            kept.remove(oldest);
        }
    }
    n_computed * PAGE_TOKENS
}

/// Tokens that are computed with this tree; `stops`: pages behind which states are kept beside the ends.
fn computed(requests: &[Vec<u32>], mut tree: PrefixCache, n_pages: usize, stops: &[usize]) -> usize {
    let mut pool = BlockPool::new(n_pages + 1);
    let mut n_computed = 0;
    for text in requests {
        let (text, mut pages) = (tokens(text), Vec::new());
        let n_found = tree.adopt(&text, &mut pages, &mut pool).n_tokens;
        n_computed += text.len() - n_found;
        let missing = text.len() / PAGE_TOKENS - pages.len();
        tree.evict(missing.saturating_sub(pool.n_free()), &mut pool);
        assert!(pool.grow(&mut pages, text.len()));
        for n in stops.iter().map(|n| n * PAGE_TOKENS).filter(|&n| n > n_found).chain([text.len()]) {
            tree.keep(&text[..n], &pages, false, &mut pool);
        }
        pool.shrink(&mut pages, 0);
    }
    n_computed
}

#[test]
fn agents_compute_less_than_with_eviction_by_age() {
    let requests = agents();
    let once = (2 * 30 + requests.len() * 3) * PAGE_TOKENS;
    let again = 4 * 30 * PAGE_TOKENS;
    // Room for both system prompts and ten ends.
    let by_age = computed_by_age(&requests, |n| (1..=n).collect(), 90, true);
    assert_eq!(by_age, once + again, "a system prompt is computed in each phase");
    assert_eq!(computed(&requests, PrefixCache::new(None), 90, &[]), once, "once");
    // States: room for six, and for all pages.
    let by_age = computed_by_age(&requests, |n| vec![30, n], 6, false);
    assert_eq!(by_age, once + again, "the same");
    assert_eq!(computed(&requests, recurrent(2, 4), 1000, &[30]), once, "once");
}

#[derive(Debug, Clone)]
enum Action {
    /// A sequence over these pages, and a few tokens more, begins.
    Begin(Vec<u32>, usize),
    /// The n-th sequence keeps so many of its pages.
    Keep(usize, usize),
    /// The n-th sequence ends; its pages are kept or not.
    End(usize, bool),
    Evict(usize),
    Pack,
    /// Other numbers of places for states.
    Restow(usize, usize),
    Forget,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => (prop::collection::vec(0..3u32, 1..6), 0..3usize).prop_map(|(pages, n)| Action::Begin(pages, n)),
        4 => (0..8usize, 1..6usize).prop_map(|(i, n)| Action::Keep(i, n)),
        6 => (0..8usize, any::<bool>()).prop_map(|(i, keep)| Action::End(i, keep)),
        3 => (1..8usize).prop_map(Action::Evict),
        1 => Just(Action::Pack),
        1 => (0..4usize, 0..4usize).prop_map(|(slots, host)| Action::Restow(slots, host)),
        1 => Just(Action::Forget),
    ]
}

const N_PAGES: usize = 24;

/// A tree, and a model that knows what each page and each place holds.
struct World {
    pool: BlockPool,
    tree: PrefixCache,
    /// Tokens and pages.
    running: Vec<(Vec<u32>, Vec<u32>)>,
    /// The text up to and with each page.
    written: HashMap<u32, Vec<u32>>,
    /// The text behind which the state in each place stands.
    states: HashMap<Place, Vec<u32>>,
}

impl World {
    fn new(tree: PrefixCache) -> Self {
        let (running, written, states) = (Vec::new(), HashMap::new(), HashMap::new());
        World { pool: BlockPool::new(N_PAGES), tree, running, written, states }
    }

    fn keep(&mut self, text: &[u32], pages: &[u32], with_tail: bool) {
        let stow = self.tree.keep(text, pages, with_tail, &mut self.pool);
        if let Some(Stow { spill, place }) = stow {
            if let Some([slot, host]) = spill {
                let state = self.states.remove(&Place::Slot(slot)).expect("a state in the slot");
                self.states.insert(Place::Host(host), state);
            }
            self.states.insert(place, text.to_vec());
        }
    }

    fn apply(&mut self, action: Action) -> Result<(), TestCaseError> {
        let is_recurrent = self.tree.places().is_some();
        match action {
            Action::Begin(pages, n_more) => {
                let text = [tokens(&pages), vec![pages[0]; n_more]].concat();
                let mut pages = Vec::new();
                let found = self.tree.adopt(&text[..text.len() - 1], &mut pages, &mut self.pool);
                prop_assert_eq!(pages.len(), found.n_tokens.div_ceil(PAGE_TOKENS));
                for (i, page) in pages.iter().enumerate() {
                    prop_assert_eq!(&self.written[page], &text[..found.n_tokens.min((i + 1) * PAGE_TOKENS)]);
                }
                prop_assert_eq!(found.state.is_some(), is_recurrent && found.n_tokens > 0);
                if let Some(place) = found.state {
                    prop_assert_eq!(&self.states[&place], &text[..found.n_tokens]);
                    if let Some(slot) = found.moved_to {
                        self.states.insert(Place::Slot(slot), text[..found.n_tokens].to_vec());
                    }
                }
                let missing = text.len().div_ceil(PAGE_TOKENS) - pages.len();
                self.tree.evict(missing.saturating_sub(self.pool.n_free()), &mut self.pool);
                if self.pool.grow(&mut pages, text.len()) {
                    for (i, &page) in pages.iter().enumerate().skip(found.n_tokens / PAGE_TOKENS) {
                        self.written.insert(page, text[..text.len().min((i + 1) * PAGE_TOKENS)].to_vec());
                    }
                    self.running.push((text, pages));
                } else {
                    self.pool.shrink(&mut pages, 0);
                }
            }
            Action::Keep(i, n_pages) if !self.running.is_empty() => {
                let (text, pages) = self.running[i % self.running.len()].clone();
                let n_tokens = text.len() / PAGE_TOKENS * PAGE_TOKENS;
                self.keep(&text[..n_tokens.min(n_pages * PAGE_TOKENS)], &pages, false);
            }
            Action::End(i, keep) if !self.running.is_empty() => {
                let (text, mut pages) = self.running.swap_remove(i % self.running.len());
                if keep {
                    self.keep(&text, &pages, true);
                }
                self.pool.shrink(&mut pages, 0);
            }
            Action::Keep(..) | Action::End(..) => {}
            Action::Evict(n) => {
                let wanted = n.min(self.tree.n_evictable(&self.pool));
                let n_freed = self.tree.evict(n, &mut self.pool);
                prop_assert!(n_freed == wanted || is_recurrent && n_freed > wanted, "{n_freed} of {wanted}");
            }
            Action::Pack => {
                let old = self.pool.used();
                self.pool.pack(&old, N_PAGES);
                let new = |page: u32| old.iter().position(|&p| p == page).unwrap() as u32 + 1;
                self.tree.renumber(new);
                self.running.iter_mut().flat_map(|(_, pages)| pages).for_each(|page| *page = new(*page));
                self.written =
                    old.iter().zip(1..).map(|(from, to)| (to, self.written[from].clone())).collect();
            }
            Action::Restow(n_slots, n_host) if is_recurrent => {
                let Restow { spills, slots, host } = self.tree.restow(n_slots, n_host, &mut self.pool);
                for [slot, host] in spills {
                    let state = self.states.remove(&Place::Slot(slot)).expect("a state in the slot");
                    self.states.insert(Place::Host(host), state);
                }
                let slots = slots
                    .iter()
                    .zip(0..)
                    .map(|(&old, new)| (Place::Slot(new), self.states[&Place::Slot(old)].clone()));
                let host = host
                    .iter()
                    .zip(0..)
                    .map(|(&old, new)| (Place::Host(new), self.states[&Place::Host(old)].clone()));
                self.states = slots.chain(host).collect();
                let places = self.tree.places().unwrap();
                prop_assert_eq!((places.slots.n(), places.host.n()), (n_slots, n_host));
            }
            Action::Restow(..) => {}
            Action::Forget => self.tree.forget_states(&mut self.pool),
        }
        Ok(())
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let World { pool, tree, running, written, states } = self;
        for (text, pages) in running {
            for (i, page) in pages.iter().enumerate() {
                prop_assert_eq!(&written[page], &text[..text.len().min((i + 1) * PAGE_TOKENS)]);
            }
        }
        let mut held: Vec<u32> = running.iter().flat_map(|(_, pages)| pages).copied().collect();
        held.extend(tree.ids().map(|id| tree.node(id).page));
        held.sort_unstable();
        for page in 1..N_PAGES as u32 {
            let n = held.iter().filter(|&&p| p == page).count();
            prop_assert_eq!(pool.n_holders(page), n as u32);
        }
        held.dedup();
        prop_assert_eq!(held.len() + pool.n_free(), N_PAGES - 1);
        let mut places = HashSet::new();
        for id in tree.ids() {
            let (node, text) = (tree.node(id), tree.text(id));
            prop_assert_eq!(&written[&node.page], &text);
            if let Some(KeptState { place, .. }) = node.state {
                prop_assert!(places.insert(place));
                prop_assert_eq!(&states[&place], &text);
            }
            prop_assert!(tree.places().is_none() || node.n_children > 0 || node.state.is_some(), "a leaf");
        }
        let Some(all) = tree.places() else { return Ok(()) };
        for (tier, is_of) in [(&all.slots, true), (&all.host, false)] {
            let n = places.iter().filter(|place| matches!(place, Place::Slot(_)) == is_of).count();
            prop_assert!(n == tier.n_used() && n <= tier.n());
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn nothing_is_lost_or_held_for_two_texts(
        is_recurrent in any::<bool>(),
        actions in prop::collection::vec(action(), 1..80),
    ) {
        let tree = if is_recurrent { recurrent(2, 2) } else { PrefixCache::new(None) };
        let mut world = World::new(tree);
        for action in actions {
            world.apply(action)?;
            world.check()?;
        }
    }
}
