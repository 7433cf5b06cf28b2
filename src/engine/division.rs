//! Dividing device memory anew while sequences live: more slots for experts and fewer pages for keys and values, or the other
//! way round, between two steps. Nothing is loaded again, and no text changes.

use freetoken_backend::{KvCache, PAGE_TOKENS};

use super::{Engine, EngineError, Sequence, programs::Programs};
use crate::moe::{ByteCount, budget};

/// What is asked for; `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Division {
    /// Slots of the expert cache.
    pub expert_slots: Option<usize>,
    /// Tokens that the key-value cache holds, of all sequences together.
    pub kv_tokens: Option<usize>,
}

impl Engine {
    /// Divides device memory anew. `sequences` are all that hold pages. Experts that lose their slot are the coldest, and so are the
    /// pages of earlier prompts that make room. Programs are recorded again when they are next needed.
    ///
    /// # Errors
    /// [`EngineError::Division`] with what would fit, before anything is changed; or the device's refusal. Asserts that there is
    /// an expert cache where slots are asked for.
    pub fn divide(&mut self, division: Division, sequences: &mut [&mut Sequence]) -> Result<(), EngineError> {
        assert!(self.open.is_none(), "a chunk that is half way through the layers is done first");
        let n_used = self.pages().running;
        assert!(
            division.expert_slots.is_none() || self.elastic().is_some(),
            "a model whose experts are behind a cache"
        );
        let old_slots = self.elastic().map_or(0, |elastic| elastic.n_slots());
        let n_slots = division.expert_slots.unwrap_or(old_slots);
        let n_pages = division.kv_tokens.map_or(self.limits.n_pages, |n| 1 + n.div_ceil(PAGE_TOKENS));
        let record = self.elastic().map_or(0, |elastic| elastic.record_bytes()) as u64;
        let page = self.page_bytes();
        if n_used >= n_pages {
            let (tokens, fits) = ((n_pages - 1) * PAGE_TOKENS, n_used * PAGE_TOKENS);
            return Err(EngineError::KvInUse { tokens, fits });
        }
        let rings = |slots: usize| if record > 0 { budget::ring(slots) } else { 0 };
        let taken = |slots: usize, pages: usize| (slots + rings(slots)) as u64 * record + pages as u64 * page;
        let (before, after) = (taken(old_slots, self.limits.n_pages), taken(n_slots, n_pages));
        let spare = match self.spare {
            Some(spare) => Some(spare),
            None => self.backend.free_bytes()?,
        };
        if let Some(spare) = spare
            && after > before + spare
        {
            let pages =
                usize::try_from((before + spare - taken(old_slots, 0)) / page.max(1)).unwrap_or(usize::MAX);
            let left = (before + spare).saturating_sub(n_pages as u64 * page);
            let slots = usize::try_from(left / record.max(1)).unwrap_or(usize::MAX);
            return Err(EngineError::Division {
                more: ByteCount(after - before),
                spare: ByteCount(spare),
                slots: slots.saturating_sub(rings(slots)).min(slots),
                tokens: pages.saturating_sub(1) * PAGE_TOKENS,
            });
        }
        // What shrinks makes room for what grows.
        if n_slots <= old_slots {
            self.resize_slots(n_slots)?;
            self.resize_kv(n_pages, sequences)?;
        } else {
            self.resize_kv(n_pages, sequences)?;
            self.resize_slots(n_slots)?;
        }
        self.spare = self.spare.map(|spare| before + spare - after);
        Ok(())
    }

    /// Programs point to what is about to change.
    fn forget_programs(&mut self) {
        self.programs = Programs::default();
        self.layered.clear();
    }

    fn resize_slots(&mut self, n_slots: usize) -> Result<(), EngineError> {
        if self.elastic().is_none_or(|elastic| elastic.n_slots() == n_slots) {
            return Ok(());
        }
        self.forget_programs();
        // The last handles of the chunks that go.
        self.batch.experts.clear();
        self.decode_batch.experts.clear();
        let elastic = self.elastic.as_deref_mut().expect("looked at above");
        let resized = elastic.resize(n_slots);
        self.batch.experts = elastic.experts();
        self.decode_batch.experts = elastic.experts();
        Ok(resized?)
    }

    /// Moves the pages in use to the front of a smaller or larger cache.
    fn resize_kv(&mut self, n_pages: usize, sequences: &mut [&mut Sequence]) -> Result<(), EngineError> {
        if n_pages == self.limits.n_pages {
            return Ok(());
        }
        self.forget_programs();
        let too_many = (self.pool.n_pages() - self.pool.n_free()).saturating_sub(n_pages);
        self.prefixes.evict(too_many, &mut self.pool);
        let used = self.pool.used();
        let last = used.last().map_or(0, |&page| page as usize + 1);
        // All layers or none: a device that refuses one leaves the caches as they were.
        let mut resized = Vec::new();
        for kv in &self.batch.kv {
            let page = kv.view.bytes() / kv.n_pages;
            let mut old = vec![0; last * page];
            self.backend.read(&kv.view.slice(0..old.len()), &mut old)?;
            let mut moved = vec![0; used.len() * page];
            for (to, &from) in moved.chunks_exact_mut(page).zip(&used) {
                to.copy_from_slice(&old[from as usize * page..][..page]);
            }
            let view = self.backend.alloc(n_pages * page)?.whole();
            if !moved.is_empty() {
                self.backend.write(&view.slice(page..page + moved.len()), &moved)?;
            }
            resized.push(KvCache { view, format: kv.format, n_pages });
        }
        self.decode_batch.kv = resized.clone();
        self.batch.kv = resized;
        let new = |page: u32| used.binary_search(&page).expect("a page in use") as u32 + 1;
        sequences.iter_mut().flat_map(|sequence| &mut sequence.pages).for_each(|page| *page = new(*page));
        self.prefixes.renumber(new);
        self.pool.pack(&used, n_pages);
        self.limits.n_pages = n_pages;
        Ok(())
    }
}
