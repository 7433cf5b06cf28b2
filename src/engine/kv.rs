//! The pages of the KV cache: which are free, who shares them, and nothing about what is in them.

use freetoken_backend::PAGE_TOKENS;

/// Hands out pages. Page 0 is never handed out: it takes what padded rows write.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<u32>,
    /// `[n_pages]`: holders of each page.
    holders: Vec<u32>,
}

impl BlockPool {
    /// A pool of `n_pages` pages, page 0 among them.
    pub fn new(n_pages: usize) -> Self {
        BlockPool { free: (1..n_pages as u32).rev().collect(), holders: vec![0; n_pages] }
    }

    /// Pages, page 0 among them.
    pub fn n_pages(&self) -> usize {
        self.holders.len()
    }

    /// Pages that can be handed out.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Extends `pages` to cover `n_tokens` tokens. False, and nothing taken, if there are too few.
    #[must_use]
    pub fn grow(&mut self, pages: &mut Vec<u32>, n_tokens: usize) -> bool {
        let missing = n_tokens.div_ceil(PAGE_TOKENS).saturating_sub(pages.len());
        if missing > self.free.len() {
            return false;
        }
        let taken = self.free.drain(self.free.len() - missing..).rev();
        for page in taken {
            self.holders[page as usize] = 1;
            pages.push(page);
        }
        true
    }

    /// Lets go of pages that lie behind the first `n_tokens` tokens.
    pub fn shrink(&mut self, pages: &mut Vec<u32>, n_tokens: usize) {
        for page in pages.drain(n_tokens.div_ceil(PAGE_TOKENS).min(pages.len())..).rev() {
            self.drop_holder(page);
        }
    }

    /// Makes somebody else hold a page that is held.
    pub(super) fn share(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        assert!(*holders > 0, "page {page} is held by nobody");
        *holders += 1;
    }

    /// Lets go of a page; it is free once nobody holds it.
    pub(super) fn drop_holder(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders = holders.checked_sub(1).expect("a page that is held");
        if *holders == 0 {
            self.free.push(page);
        }
    }

    /// Holders of a page.
    pub(super) fn n_holders(&self, page: u32) -> u32 {
        self.holders[page as usize]
    }

    /// The pages that somebody holds, ascending.
    pub(super) fn used(&self) -> Vec<u32> {
        (1..self.holders.len() as u32).filter(|&page| self.n_holders(page) > 0).collect()
    }

    /// Gives the pages in [`Self::used`] numbers from 1 on, in a pool of `n_pages`, which are enough.
    pub(super) fn pack(&mut self, used: &[u32], n_pages: usize) {
        assert!(used.len() < n_pages, "pages in use and page 0");
        let mut holders = vec![0; n_pages];
        holders[1..].iter_mut().zip(used).for_each(|(to, &from)| *to = self.n_holders(from));
        self.free = (1 + used.len() as u32..n_pages as u32).rev().collect();
        self.holders = holders;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_handed_out_once_and_come_back() {
        let mut pool = BlockPool::new(6);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.grow(&mut a, 17) && pool.grow(&mut b, 1));
        assert_eq!((a.len(), b.len(), pool.n_free()), (2, 1, 2));
        assert!(pool.grow(&mut a, 32), "still inside the second page");
        assert_eq!(a.len(), 2);
        assert!(!pool.grow(&mut b, 16 * 4), "one page too many");
        assert_eq!((b.len(), pool.n_free()), (1, 2));
        let mut all: Vec<u32> = a.iter().chain(&b).copied().collect();
        all.sort_unstable();
        all.dedup();
        assert!(all.len() == 3 && !all.contains(&0));
        pool.shrink(&mut a, 16);
        assert_eq!((a.len(), pool.n_free()), (1, 3));
        pool.shrink(&mut a, 0);
        pool.shrink(&mut b, 0);
        assert_eq!(pool.n_free(), 5);
    }

    #[test]
    fn a_shared_page_is_free_once_its_last_holder_is_gone() {
        let mut pool = BlockPool::new(5);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.grow(&mut a, 32));
        b.push(a[1]);
        pool.share(a[1]);
        pool.shrink(&mut a, 0);
        assert_eq!(pool.n_free(), 3);
        let old = b[0];
        assert_eq!(pool.used(), [old]);
        pool.pack(&[old], 3);
        b[0] = 1;
        assert_eq!((pool.n_free(), pool.n_holders(1)), (1, 1));
        pool.shrink(&mut b, 0);
        assert_eq!(pool.n_free(), 2);
    }
}
