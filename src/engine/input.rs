//! The input of a step: what changes from token to token, packed on the host into the sections of one buffer.

use bytemuck::Zeroable;
use freetoken_backend::{LogitEdit, PAGE_TOKENS, Span};

use super::{Batch, Sequence, batch::MAX_EDITS};

/// The host's copy of a batch's input buffer, as 32-bit words.
#[derive(Debug)]
pub(super) struct StepInput {
    words: Vec<u32>,
}

impl StepInput {
    /// Room for the input of any bucket of `largest`.
    pub(super) fn new(largest: &Batch) -> Self {
        StepInput { words: vec![0; largest.layout().bytes / 4] }
    }

    /// The next `n` tokens of each sequence, in order, and padding behind them. Padded rows write to page 0 and attend to
    /// nothing.
    pub(super) fn put_rows<'s>(
        &mut self,
        batch: &Batch,
        sequences: impl Iterator<Item = &'s Sequence>,
        n: usize,
    ) {
        let layout = batch.layout();
        let (mut row, mut n_sequences) = (0, 0);
        for (i, sequence) in sequences.enumerate() {
            let first = row;
            for (token, position) in sequence.pending()[..n].iter().zip(sequence.n_computed()..) {
                let page = sequence.pages[position / PAGE_TOKENS];
                self.words[layout.ids / 4 + row] = *token;
                self.words[layout.positions / 4 + row] = position as u32;
                self.words[layout.sequences / 4 + row] = i as u32;
                self.words[layout.kv_slots / 4 + row] =
                    page * PAGE_TOKENS as u32 + (position % PAGE_TOKENS) as u32;
                row += 1;
            }
            let table = layout.block_table / 4 + i * batch.max_pages;
            self.words[table..table + sequence.pages.len()].copy_from_slice(&sequence.pages);
            self.put_span(
                batch,
                i,
                Span {
                    first: first as i32,
                    end: row as i32,
                    slot: sequence.state.map_or(0, |slot| slot as i32),
                    resumes: (sequence.n_computed() > 0) as i32,
                },
            );
            n_sequences += 1;
        }
        (n_sequences..batch.n_sequences).for_each(|i| self.put_span(batch, i, Span::zeroed()));
        for row in row..batch.n_rows {
            self.words[layout.ids / 4 + row] = 0;
            self.words[layout.positions / 4 + row] = 0;
            self.words[layout.sequences / 4 + row] = u32::MAX;
            self.words[layout.kv_slots / 4 + row] = (row % PAGE_TOKENS) as u32;
        }
    }

    fn put_span(&mut self, batch: &Batch, i: usize, span: Span) {
        let place = batch.layout().spans / 4 + i * size_of::<Span>() / 4;
        self.words[place..][..4].copy_from_slice(bytemuck::cast_slice(&[span]));
    }

    /// The rows of the residual stream whose logits are computed.
    pub(super) fn put_logit_rows(&mut self, batch: &Batch, rows: impl Iterator<Item = usize>) {
        let start = batch.layout().logit_rows / 4;
        self.words[start..].iter_mut().zip(rows).for_each(|(word, row)| *word = row as u32);
    }

    /// Temperatures and edits of the logits; gives the whole input.
    pub(super) fn put_sampling<'s>(
        &mut self,
        batch: &Batch,
        sequences: impl Iterator<Item = &'s Sequence>,
    ) -> &[u8] {
        let layout = batch.layout();
        let temperatures = layout.inverse_temperatures / 4;
        self.words[temperatures..temperatures + batch.n_sequences].fill(f32::to_bits(1.0));
        let mut end = layout.edits / 4;
        let mut put = |words: &mut [u32], edit: LogitEdit| {
            words[end..end + 4].copy_from_slice(bytemuck::cast_slice(&[edit]));
            end += 4;
            end
        };
        for (row, sequence) in sequences.enumerate() {
            let params = sequence.params();
            if !params.is_greedy() {
                self.words[temperatures + row] = f32::to_bits(1.0 / params.temperature);
            }
            if let Some(counts) = sequence.counts().filter(|_| edits_on_device(sequence, batch)) {
                counts.edits(params, row).for_each(|edit| _ = put(&mut self.words, edit));
            }
        }
        let end = put(&mut self.words, LogitEdit::END);
        bytemuck::cast_slice(&self.words[..end])
    }

    /// The input without sampling.
    pub(super) fn rows(&self, batch: &Batch) -> &[u8] {
        bytemuck::cast_slice(&self.words[..batch.layout().edits / 4])
    }
}

/// Whether the penalties of a sequence are few enough for its share of the list of edits; otherwise the host applies them.
pub(super) fn edits_on_device(sequence: &Sequence, batch: &Batch) -> bool {
    sequence.counts().is_none_or(|counts| counts.n_distinct() <= (MAX_EDITS - 1) / batch.n_sequences)
}
