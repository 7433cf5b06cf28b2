//! What sequences leave for others: pages and states that are computed once, as long as nobody needs the room.

use freetoken_backend::PAGE_TOKENS;

use super::{Engine, EngineError, Sequence};

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
    /// The device's; the sequence then begins at its first token.
    pub fn adopt(&mut self, sequence: &mut Sequence) -> Result<usize, EngineError> {
        assert!(sequence.pages.is_empty(), "a sequence without pages");
        let Some((_, before)) = sequence.tokens().split_last() else { return Ok(0) };
        let mut pages = Vec::new();
        let found = self.prefixes.adopt(before, self.is_recurrent(), &mut pages, &mut self.pool);
        sequence.pages.extend(pages);
        let restored = found.state.filter(|_| self.is_recurrent());
        if let Some(Err(error)) = restored.map(|state| self.write_state(sequence, &state)) {
            self.release(sequence);
            return Err(error);
        }
        sequence.advance(found.n_tokens);
        Ok(found.n_tokens)
    }

    /// Keeps what is computed of a running sequence for others that begin alike, as long as nobody needs the room: full pages,
    /// and of a recurrent model's sequence only where its last page is full.
    ///
    /// # Errors
    /// The device's; then nothing is kept.
    pub fn keep(&mut self, sequence: &Sequence) -> Result<(), EngineError> {
        let is_full = sequence.n_computed().is_multiple_of(PAGE_TOKENS);
        if self.is_recurrent() && !is_full { Ok(()) } else { self.keep_pages(sequence, false) }
    }

    /// The same for a sequence that ends: all of it is kept, and it gives its pages and its state back.
    ///
    /// # Errors
    /// The device's; then nothing is kept.
    pub fn end(&mut self, sequence: &mut Sequence) -> Result<(), EngineError> {
        let kept = self.keep_pages(sequence, true);
        self.release(sequence);
        kept
    }

    fn keep_pages(&mut self, sequence: &Sequence, with_tail: bool) -> Result<(), EngineError> {
        let computed = &sequence.tokens()[..sequence.n_computed()];
        let state = if self.is_recurrent() { self.read_state(sequence)?.map(Into::into) } else { None };
        self.prefixes.keep(computed, &sequence.pages, with_tail, state, &mut self.pool);
        Ok(())
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
