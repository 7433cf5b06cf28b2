//! What sequences leave for others: pages and states that are computed once, as long as nobody needs the room.

use freetoken_backend::PAGE_TOKENS;

use super::{Engine, EngineError, Sequence, prefix::Found};

/// Pages of the key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// All that sequences may have.
    pub total: usize,
    /// Held by running sequences.
    pub running: usize,
    /// Kept for sequences to come.
    pub kept: usize,
}

impl Engine {
    /// Finds what is computed of the beginning of a new sequence already, and gives the number of its tokens. One token at least
    /// stays pending.
    ///
    /// # Errors
    /// All places for states are taken, or the device's; the sequence then begins at its first token.
    pub fn adopt(&mut self, sequence: &mut Sequence) -> Result<usize, EngineError> {
        assert!(sequence.pages.is_empty(), "a sequence without pages");
        self.take_state(sequence)?;
        let Some((_, before)) = sequence.tokens().split_last() else { return Ok(0) };
        let mut pages = Vec::new();
        let found = self.prefixes.adopt(before, &mut pages, &mut self.pool);
        sequence.pages.extend(pages);
        if let Err(error) = self.resume(sequence, &found) {
            self.release(sequence);
            self.prefixes.forget_states(&mut self.pool);
            return Err(error);
        }
        sequence.advance(found.n_tokens);
        Ok(found.n_tokens)
    }

    /// Copies the state that was found.
    fn resume(&self, sequence: &Sequence, found: &Found) -> Result<(), EngineError> {
        if let Some(place) = found.state {
            self.take_up(sequence, place)?;
        }
        found.moved_to.map_or(Ok(()), |slot| self.copy_to_slot(sequence, slot))
    }

    /// Keeps what is computed of a running sequence for others that begin alike, as long as nobody needs the room: full pages,
    /// and of a recurrent model's sequence only where its last page is full.
    ///
    /// # Errors
    /// The device's; then no state is kept any more.
    pub fn keep(&mut self, sequence: &Sequence) -> Result<(), EngineError> {
        let is_full = sequence.n_computed().is_multiple_of(PAGE_TOKENS);
        if self.is_recurrent() && !is_full { Ok(()) } else { self.keep_pages(sequence, false) }
    }

    /// The same for a sequence that ends: all of it is kept, and it gives its pages and its state back.
    ///
    /// # Errors
    /// The device's; then no state is kept any more.
    pub fn end(&mut self, sequence: &mut Sequence) -> Result<(), EngineError> {
        let kept = self.keep_pages(sequence, true);
        self.release(sequence);
        kept
    }

    fn keep_pages(&mut self, sequence: &Sequence, with_tail: bool) -> Result<(), EngineError> {
        let computed = &sequence.tokens()[..sequence.n_computed()];
        let stow = self.prefixes.keep(computed, &sequence.pages, with_tail, &mut self.pool);
        let stowed = stow.map_or(Ok(()), |stow| self.stow(sequence, &stow));
        if stowed.is_err() {
            self.prefixes.forget_states(&mut self.pool);
        }
        stowed
    }

    /// Bytes of a page of the key-value cache, of all layers together.
    pub fn page_bytes(&self) -> u64 {
        self.batch.kv.iter().map(|kv| (kv.view.bytes() / kv.n_pages) as u64).sum()
    }

    /// Pages of the key-value cache, and who holds them. Walks all pages that are kept.
    pub fn pages(&self) -> Pages {
        let (total, kept) = (self.pool.n_pages() - 1, self.prefixes.n_evictable(&self.pool));
        Pages { total, running: total - self.pool.n_free() - kept, kept }
    }

    /// Gives a sequence's pages and its state back.
    pub fn release(&mut self, sequence: &mut Sequence) {
        self.pool.shrink(&mut sequence.pages, 0);
        self.states.give_back(sequence.state.take());
    }

    /// Begins a sequence anew with another prompt. What is computed of a common beginning is kept, so that the next turn of a
    /// conversation computes only what is new; penalties see all of it as prompt. A recurrent model keeps all that is computed, or
    /// where the prompt does not go on from there, nothing.
    pub fn rebase(&mut self, sequence: &mut Sequence, prompt: &[u32]) {
        let n_before = sequence.n_computed();
        sequence.rebase(prompt);
        if self.is_recurrent() && sequence.n_computed() < n_before {
            sequence.resume_at(0);
        }
        let n_computed = sequence.n_computed();
        self.pool.shrink(&mut sequence.pages, n_computed);
    }
}
