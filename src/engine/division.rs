//! Dividing memory anew while sequences live: more slots for experts and fewer pages for keys and values or slots for states, or
//! the other way round, between two steps. Nothing is loaded again, and no text changes.

use freetoken_backend::{KvCache, PAGE_TOKENS, ViewCopy};

use super::{Engine, EngineError, Sequence, programs::Programs};
use crate::moe::{ByteCount, budget};

/// What is asked for; `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Division {
    /// Slots of the expert cache.
    pub expert_slots: Option<usize>,
    /// Tokens that the key-value cache holds, of all sequences together.
    pub kv_tokens: Option<usize>,
    /// Slots for states that are kept for sequences to come.
    pub state_slots: Option<usize>,
    /// Bytes of host memory for states that have no slot.
    pub state_cache_bytes: Option<usize>,
}

/// What shares device memory by a division.
#[derive(Clone, Copy)]
struct Shares {
    expert_slots: usize,
    pages: usize,
    state_slots: usize,
}

/// Bytes of one of each.
#[derive(Clone, Copy)]
struct BytesOfOne {
    record: u64,
    page: u64,
    state: u64,
}

impl Shares {
    fn bytes(self, of_one: BytesOfOne) -> u64 {
        let ring = if of_one.record > 0 { budget::ring(self.expert_slots) } else { 0 };
        (self.expert_slots + ring) as u64 * of_one.record
            + self.pages as u64 * of_one.page
            + self.state_slots as u64 * of_one.state
    }
}

impl Engine {
    /// Divides memory anew. `sequences` are all that hold pages. Experts that lose their slot are the coldest; pages and states of
    /// earlier prompts that make room are those that are worth the least, and states move to host memory while that has room.
    /// Programs are recorded again when they are next needed.
    ///
    /// # Errors
    /// [`EngineError::Division`] with what would fit, before anything is changed; or the device's refusal. Asserts that there is
    /// an expert cache where slots are asked for, and recurrent layers where room for states is.
    pub fn divide(&mut self, division: Division, sequences: &mut [&mut Sequence]) -> Result<(), EngineError> {
        assert!(self.open.is_none(), "a chunk that is half way through the layers is done first");
        let n_used = self.pages().running;
        assert!(
            division.expert_slots.is_none() || self.elastic().is_some(),
            "a model whose experts are behind a cache"
        );
        assert!(
            (division.state_slots, division.state_cache_bytes) == (None, None) || self.is_recurrent(),
            "a model with recurrent layers"
        );
        let old = Shares {
            expert_slots: self.elastic().map_or(0, |elastic| elastic.n_slots()),
            pages: self.limits.n_pages,
            state_slots: self.limits.n_state_slots,
        };
        let new = Shares {
            expert_slots: division.expert_slots.unwrap_or(old.expert_slots),
            pages: division.kv_tokens.map_or(old.pages, |n| 1 + n.div_ceil(PAGE_TOKENS)),
            state_slots: division.state_slots.unwrap_or(old.state_slots),
        };
        if n_used >= new.pages {
            let (tokens, fits) = ((new.pages - 1) * PAGE_TOKENS, n_used * PAGE_TOKENS);
            return Err(EngineError::KvInUse { tokens, fits });
        }
        let of_one = BytesOfOne {
            record: self.elastic().map_or(0, |elastic| elastic.record_bytes()) as u64,
            page: self.page_bytes(),
            state: self.state_bytes() as u64,
        };
        let (before, after) = (old.bytes(of_one), new.bytes(of_one));
        let spare = match self.spare {
            Some(spare) => Some(spare),
            None => self.backend.free_bytes()?,
        };
        if let Some(spare) = spare
            && after > before + spare
        {
            return Err(refusal(before, after, spare, old, new, of_one));
        }
        // What shrinks makes room for what grows.
        let grows = |from: usize, to: usize| to > from;
        for growing in [false, true] {
            if grows(old.expert_slots, new.expert_slots) == growing {
                self.resize_slots(new.expert_slots)?;
            }
            if grows(old.pages, new.pages) == growing {
                self.resize_kv(new.pages, sequences)?;
            }
            if grows(old.state_slots, new.state_slots) == growing {
                self.resize_states(new.state_slots, division.state_cache_bytes)?;
            }
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
        // Neighbours move together.
        let mut runs: Vec<[usize; 3]> = Vec::new();
        for (from, to) in used.iter().map(|&page| page as usize).zip(1..) {
            match runs.last_mut() {
                Some([start, _, n]) if *start + *n == from => *n += 1,
                _ => runs.push([from, to, 1]),
            }
        }
        // All layers or none: a device that refuses one leaves the caches as they were.
        let mut resized = Vec::new();
        for kv in &self.batch.kv {
            let page = kv.view.bytes() / kv.n_pages;
            let view = self.backend.alloc(n_pages * page)?.whole();
            let copies = runs.iter().map(|&[from, to, n]| ViewCopy {
                src: kv.view.slice(from * page..(from + n) * page),
                dst: view.slice(to * page..(to + n) * page),
            });
            self.backend.copy(&copies.collect::<Vec<_>>())?;
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

    /// Changes the room for states that are kept: `n_slots` on the device, and in host memory as many as fit into `host_bytes`,
    /// or as now.
    fn resize_states(&mut self, n_slots: usize, host_bytes: Option<usize>) -> Result<(), EngineError> {
        let Some(kept) = self.kept_states() else { return Ok(()) };
        let n_host = host_bytes.map_or(kept.n_host, |bytes| bytes / kept.state_bytes);
        if (n_slots, n_host) == (kept.n_slots, kept.n_host) {
            return Ok(());
        }
        self.snapshots.grow(&*self.backend, kept.state_bytes, n_slots)?;
        let restow = self.prefixes.restow(n_slots, n_host, &mut self.pool);
        self.limits.n_state_slots = n_slots;
        let moved = self.snapshots.restow(&*self.backend, &restow, n_slots);
        if moved.is_err() {
            self.prefixes.forget_states(&mut self.pool);
        }
        Ok(moved?)
    }
}

/// The error that says what would fit.
fn refusal(before: u64, after: u64, spare: u64, old: Shares, new: Shares, of_one: BytesOfOne) -> EngineError {
    let left = |others: Shares| (before + spare).saturating_sub(others.bytes(of_one));
    let fits = |left: u64, bytes: u64| {
        left.checked_div(bytes).map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX))
    };
    let slots = fits(left(Shares { expert_slots: 0, ..new }), of_one.record);
    let ring = if of_one.record > 0 { budget::ring(slots) } else { 0 };
    let pages = fits(left(Shares { pages: 0, ..old }), of_one.page);
    let states = fits(left(Shares { state_slots: 0, ..old }), of_one.state);
    EngineError::Division {
        more: ByteCount(after - before),
        spare: ByteCount(spare),
        slots: slots.saturating_sub(ring),
        tokens: pages.saturating_sub(1) * PAGE_TOKENS,
        states,
    }
}
