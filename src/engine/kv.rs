//! The pages of the KV cache: which are free, and nothing about what is in them.

use freetoken_backend::PAGE_TOKENS;

/// Hands out pages. Page 0 is never handed out: it takes what padded rows write.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<u32>,
}

impl BlockPool {
    /// A pool of `n_pages` pages, page 0 among them.
    pub fn new(n_pages: usize) -> Self {
        BlockPool::with_used(n_pages, 0)
    }

    /// The same with the first `n_used` pages behind page 0 handed out.
    pub(super) fn with_used(n_pages: usize, n_used: usize) -> Self {
        BlockPool { free: (1 + n_used as u32..n_pages as u32).rev().collect() }
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
        pages.extend(self.free.drain(self.free.len() - missing..).rev());
        true
    }

    /// Takes pages back that lie behind the first `n_tokens` tokens.
    pub fn shrink(&mut self, pages: &mut Vec<u32>, n_tokens: usize) {
        self.free.extend(pages.drain(n_tokens.div_ceil(PAGE_TOKENS).min(pages.len())..).rev());
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
}
