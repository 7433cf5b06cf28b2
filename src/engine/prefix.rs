//! What is computed of earlier prompts: a tree over tokens, a page of the KV cache a node. Two prompts that begin alike share
//! the pages of their common beginning.
//!
//! Only whole pages are shared: a page that is full never changes. It knows pages by number, and no device.

use std::collections::{BTreeSet, HashMap};

use freetoken_backend::PAGE_TOKENS;

use super::BlockPool;

/// Tokens of a page.
type PageKey = [u32; PAGE_TOKENS];

#[derive(Debug)]
struct Node {
    parent: Option<usize>,
    key: PageKey,
    page: u32,
    n_children: usize,
    used: u64,
}

/// The tree.
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    /// By number; those that left are `None`.
    nodes: Vec<Option<Node>>,
    vacant: Vec<usize>,
    children: HashMap<(Option<usize>, PageKey), usize>,
    /// Nodes without children, the one whose use is longest ago first.
    leaves: BTreeSet<(u64, usize)>,
    /// Counts the calls that use nodes.
    clock: u64,
}

impl PrefixCache {
    /// Pages that the tree holds.
    pub(super) fn n_pages(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Of those, the ones that nobody else holds: [`Self::evict`] can free them all.
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
        self.n_pages() - n_staying
    }

    /// The pages of the longest beginning of `tokens` that is there, for a new holder.
    pub(super) fn adopt(&mut self, tokens: &[u32], pages: &mut Vec<u32>, pool: &mut BlockPool) {
        self.clock += 1;
        let mut at = None;
        for key in keys(tokens) {
            let Some(&child) = self.children.get(&(at, key)) else { break };
            let page = self.touch(child);
            pool.share(page);
            pages.push(page);
            at = Some(child);
        }
    }

    /// Keeps the pages of `tokens`, of which each page but the last is full. Where a beginning is there already, its own
    /// pages stay.
    pub(super) fn keep(&mut self, tokens: &[u32], pages: &[u32], pool: &mut BlockPool) {
        self.clock += 1;
        let mut at = None;
        for (key, &page) in keys(tokens).zip(pages) {
            at = Some(match self.children.get(&(at, key)) {
                Some(&child) => {
                    self.touch(child);
                    child
                }
                None => {
                    pool.share(page);
                    self.add(at, key, page)
                }
            });
        }
    }

    /// Frees `n` pages, those first whose use is longest ago. How many it could free: no more than nobody else holds.
    pub(super) fn evict(&mut self, n: usize, pool: &mut BlockPool) -> usize {
        let mut n_freed = 0;
        let mut spared = Vec::new();
        while n_freed < n
            && let Some((used, id)) = self.leaves.pop_first()
        {
            if pool.n_holders(self.node(id).page) > 1 {
                spared.push((used, id));
                continue;
            }
            let node = self.nodes[id].take().expect("a leaf is a node");
            self.vacant.push(id);
            self.children.remove(&(node.parent, node.key));
            pool.drop_holder(node.page);
            n_freed += 1;
            if let Some(parent) = node.parent {
                let above = self.nodes[parent].as_mut().expect("a parent outlives its children");
                above.n_children -= 1;
                if above.n_children == 0 {
                    self.leaves.insert((above.used, parent));
                }
            }
        }
        self.leaves.extend(spared);
        n_freed
    }

    /// The pages got new numbers.
    pub(super) fn renumber(&mut self, new: impl Fn(u32) -> u32) {
        self.nodes.iter_mut().flatten().for_each(|node| node.page = new(node.page));
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
        let node = Some(Node { parent, key, page, n_children: 0, used: self.clock });
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
        self.leaves.insert((self.clock, id));
        id
    }
}

/// The tokens of each full page.
fn keys(tokens: &[u32]) -> impl Iterator<Item = PageKey> {
    tokens.chunks_exact(PAGE_TOKENS).map(|tokens| tokens.try_into().expect("a page of tokens"))
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
        let (mut pool, mut tree) = (BlockPool::new(10), PrefixCache::default());
        let mut a = Vec::new();
        assert!(pool.grow(&mut a, 3 * PAGE_TOKENS));
        tree.keep(&tokens(&[1, 2, 3]), &a, &mut pool);
        let mut b = Vec::new();
        tree.adopt(&tokens(&[1, 2, 9]), &mut b, &mut pool);
        assert_eq!(b, a[..2]);
        assert!(pool.grow(&mut b, 3 * PAGE_TOKENS));
        tree.keep(&tokens(&[1, 2, 9]), &b, &mut pool);
        assert_eq!((tree.n_pages(), tree.n_evictable(&pool)), (4, 0));
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
        assert_eq!((tree.evict(9, &mut pool), tree.n_pages(), pool.n_free()), (1, 0, 9));
    }

    #[test]
    fn a_part_of_a_page_is_not_kept() {
        let (mut pool, mut tree) = (BlockPool::new(4), PrefixCache::default());
        let mut pages = Vec::new();
        assert!(pool.grow(&mut pages, PAGE_TOKENS + 3));
        tree.keep(&[7; PAGE_TOKENS + 3], &pages, &mut pool);
        assert_eq!(tree.n_pages(), 1);
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
            let (mut pool, mut tree) = (BlockPool::new(24), PrefixCache::default());
            let mut running: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
            // The text up to and with each page.
            let mut written: HashMap<u32, Vec<u32>> = HashMap::new();
            for action in actions {
                match action {
                    Action::Begin(texts) => {
                        let (tokens, mut pages) = (tokens(&texts), Vec::new());
                        tree.adopt(&tokens, &mut pages, &mut pool);
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
                            tree.keep(&tokens(&texts), &pages, &mut pool);
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
