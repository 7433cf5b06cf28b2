//! Records beforehand what serving will need: the first prompt of a size would else wait for a compiler, and all who decode
//! beside it too.

use std::iter::successors;

use super::{Engine, EngineError, programs::Kind};

impl Engine {
    /// Records the programs of prompts of any length, and of decode steps of up to `n_sequences`.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn prepare(&mut self, n_sequences: usize) -> Result<(), EngineError> {
        let decodes: &[Kind] = match self.elastic() {
            Some(elastic) if elastic.reads_in_place() => &[Kind::Decode, Kind::DecodeInPlace],
            _ => &[Kind::Decode],
        };
        for bucket in buckets(n_sequences) {
            for &kind in decodes {
                let Engine { backend, model, decode_batch, programs, .. } = self;
                programs.get(kind, bucket, &**backend, &**model, decode_batch)?;
            }
        }
        for bucket in buckets(self.batch.n_rows) {
            if self.streams(bucket) {
                self.layered_program(bucket)?;
            }
            // The smallest chunk of the bucket may be one that is not streamed yet.
            if !self.streams(bucket / 2 + 1) {
                let Engine { backend, model, batch, programs, .. } = self;
                programs.get(Kind::Prefill, bucket, &**backend, &**model, batch)?;
            }
        }
        let Engine { backend, model, batch, programs, .. } = self;
        programs.get(Kind::Pick, 1, &**backend, &**model, batch)?;
        Ok(())
    }

    /// Programs that are recorded.
    pub fn n_programs(&self) -> usize {
        self.programs.len() + self.layered.len()
    }
}

/// Every bucket that up to `n` rows fall into.
fn buckets(n: usize) -> impl Iterator<Item = usize> {
    let last = n.next_power_of_two();
    successors(Some(1), move |&bucket| (bucket < last).then_some(2 * bucket))
}
