//! Prompts: chunks of pending tokens, as many at a time as keep the device busy; where experts are streamed, layer by layer, so
//! that others may decode in between.

use std::{collections::hash_map::Entry, iter::once};

use super::{
    Engine, EngineError, Sequence,
    batch::MAX_SEQUENCES,
    layered::Layered,
    programs::{self, Kind},
    step::{MOST_ROUTED_ROWS, replay, settle},
};
use crate::moe::Elastic;

/// A chunk of a prompt whose experts are streamed, between two layers.
pub(super) struct OpenChunk {
    bucket: usize,
    n_rows: usize,
    /// MoE layers that are done.
    n_done: usize,
}

impl Engine {
    /// Computes all pending tokens of a sequence, of which there is one at least, and draws the next one, which is not
    /// appended. `proceed` is told the number of tokens computed after each chunk; where it says no and tokens are left,
    /// the result is `None`.
    ///
    /// # Errors
    /// [`EngineError`]; the sequence keeps what was computed.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        proceed: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<u32>, EngineError> {
        assert!(!sequence.pending().is_empty(), "a prefill computes one token at least");
        while !sequence.pending().is_empty() {
            self.compute(sequence, self.chunk(sequence.pending().len()))?;
            if !proceed(sequence.n_computed()) && !sequence.pending().is_empty() {
                return Ok(None);
            }
        }
        self.pick(sequence)?;
        self.draw(0, sequence).map(Some)
    }

    /// Rows of the next step for `n` pending tokens: the next larger bucket where little of it is padding, else the next
    /// smaller one.
    pub fn chunk(&self, n: usize) -> usize {
        let n = n.min(self.batch.n_rows);
        let above = n.next_power_of_two();
        if 4 * n >= 3 * above { n } else { above / 2 }
    }

    /// Computes the next `n` pending tokens of a sequence.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was computed, and of a recurrent model's sequence nothing is left after a step that failed.
    pub fn compute(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        while !self.compute_unit(sequence, n)? {}
        Ok(())
    }

    /// Begins to compute the next `n` pending tokens of a sequence, or goes on with it: one layer where experts are streamed,
    /// else all of it. Whether the tokens are computed now; until then decode steps of other sequences may run, and nothing
    /// else but [`Self::abandon`].
    ///
    /// # Errors
    /// As [`Self::compute`].
    pub fn compute_unit(&mut self, sequence: &mut Sequence, n: usize) -> Result<bool, EngineError> {
        let n = match &self.open {
            Some(open) => open.n_rows,
            None => {
                self.make_room(sequence, n)?;
                n
            }
        };
        match self.compute_rows(sequence, n) {
            Ok(true) => self.advance(sequence, n),
            Ok(false) => return Ok(false),
            Err(error) => {
                self.distrust(sequence);
                return Err(error);
            }
        }
        Ok(true)
    }

    /// The same for a sequence that has the room.
    fn compute_rows(&mut self, sequence: &Sequence, n: usize) -> Result<bool, EngineError> {
        if self.open.is_none() && self.streams(n) {
            self.put_aside(sequence)?;
            let bucket = self.layered_input(sequence, n)?;
            self.open = Some(OpenChunk { bucket, n_rows: n, n_done: 0 });
        }
        if let Some(OpenChunk { bucket, n_rows, n_done }) = self.open.take() {
            let Engine { backend, layered, elastic, .. } = self;
            let (layered, serving) =
                layered.get_mut(&bucket).zip(elastic.as_deref_mut()).expect("made for it");
            let is_done = settle(layered.run_layer(n_done, &**backend, serving), elastic)?;
            if !is_done {
                self.open = Some(OpenChunk { bucket, n_rows, n_done: n_done + 1 });
            }
            return Ok(is_done);
        }
        let Engine { backend, model, batch, programs, input, elastic, .. } = self;
        let recorded = programs.get(Kind::Prefill, n, &**backend, &**model, batch)?;
        input.put_rows(&recorded.batch, once(sequence), n);
        backend.write(&recorded.batch.input, input.rows(&recorded.batch))?;
        replay(Kind::Prefill, &mut *recorded.program, elastic)?;
        Ok(true)
    }

    /// Leaves the chunk of a sequence that is half way through the layers, if there is one: its tokens are not computed, and what
    /// was computed before stays.
    pub fn abandon(&mut self, sequence: &mut Sequence) {
        if self.open.take().is_some() {
            self.elastic.iter_mut().for_each(|elastic| elastic.abandon());
            if self.bring_back(sequence).is_err() {
                self.distrust(sequence);
            }
        }
    }

    /// Whether a chunk is half way through the layers.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether a chunk of `n` tokens has its experts streamed to the device.
    pub fn streams(&self, n: usize) -> bool {
        let most =
            if self.elastic().is_some_and(Elastic::host_shares) { MOST_ROUTED_ROWS } else { MAX_SEQUENCES };
        self.elastic().is_some_and(|elastic| n > most || !elastic.serves(n))
    }

    /// Writes the next `n` tokens as the input of the step that streams experts to them, and gives its bucket.
    pub(super) fn layered_input(&mut self, sequence: &Sequence, n: usize) -> Result<usize, EngineError> {
        let bucket = n.next_power_of_two();
        self.layered_program(bucket)?;
        let Engine { backend, layered, input, .. } = self;
        let batch = &layered[&bucket].batch;
        input.put_rows(batch, once(sequence), n);
        backend.write(&batch.input, input.rows(batch))?;
        Ok(bucket)
    }

    /// Records the step that streams experts to a bucket of tokens, unless it is there.
    pub(super) fn layered_program(&mut self, bucket: usize) -> Result<(), EngineError> {
        let Engine { backend, model, batch, layered, elastic, .. } = self;
        if let Entry::Vacant(place) = layered.entry(bucket) {
            let elastic = elastic.as_deref().expect("asked for by an engine with a cache");
            let batch = batch.bucket(bucket).with_shared_ids();
            let stages = programs::stages(Kind::Prefill, &**model, &batch);
            place.insert(Layered::record(&**backend, batch, stages, elastic)?);
        }
        Ok(())
    }

    pub(super) fn advance(&mut self, sequence: &mut Sequence, n: usize) {
        sequence.advance(n);
        self.last_row = n - 1;
    }
}
