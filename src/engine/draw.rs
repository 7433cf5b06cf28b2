//! From what a program left of the logits to a token: from the candidates where they settle it, else from the whole row.

use freetoken_backend::Backend;

use super::{
    EngineError, Sequence,
    input::edits_on_device,
    programs::{Recorded, output},
    sampling::{Candidates, Draw, sample, sample_row},
};

/// Draws tokens; keeps the room for a whole row.
pub(super) struct Drawer {
    /// `[vocab]`
    logits: Vec<f32>,
    sorted: Vec<(f32, u32)>,
    /// Candidates a row.
    top_k: usize,
}

impl Drawer {
    pub(super) fn new(vocab: usize, top_k: usize) -> Self {
        Drawer { logits: vec![0.0; vocab], sorted: Vec::with_capacity(vocab), top_k }
    }

    /// The next token of the sequence in a row of the last replay.
    ///
    /// # Errors
    /// Logits that are no numbers, or the device's refusal.
    pub(super) fn draw(
        &mut self,
        backend: &dyn Backend,
        recorded: &Recorded,
        row: usize,
        sequence: &Sequence,
    ) -> Result<u32, EngineError> {
        let (k, vocab, params) = (self.top_k, self.logits.len(), sequence.params());
        let position = sequence.tokens().len() as u64;
        let edited = edits_on_device(sequence, &recorded.batch);
        if edited {
            let values: &[f32] = bytemuck::cast_slice(recorded.program.output(output::TOP_VALUES));
            let log_sum_exp: &[f32] = bytemuck::cast_slice(recorded.program.output(output::LOG_SUM_EXP));
            let candidates = Candidates {
                ids: &recorded.program.output(output::TOP_IDS)[row * k..][..k],
                logits: &values[row * k..][..k],
                lse: log_sum_exp[row],
                complete: k == vocab,
            };
            if let Draw::Token(token) = sample(&candidates, params, position)? {
                return Ok(token);
            }
        }
        let view = recorded.batch.logits.slice(row * vocab * 4..(row + 1) * vocab * 4);
        backend.read(&view, bytemuck::cast_slice_mut(&mut self.logits))?;
        if let Some(counts) = sequence.counts().filter(|_| !edited) {
            for edit in counts.edits(params, row) {
                let logit = &mut self.logits[edit.id as usize];
                *logit = edit.apply(*logit);
            }
        }
        Ok(sample_row(&self.logits, &mut self.sorted, params, position)?)
    }
}
