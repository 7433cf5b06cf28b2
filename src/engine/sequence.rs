//! One timeline of tokens: what is known, what is computed, where its cache lies.

use super::sampling::{SamplingParams, TokenCounts};

/// A sequence of the engine. It holds pages of the KV cache, and a recurrent state where the model has one, until it is released.
#[derive(Debug)]
pub struct Sequence {
    tokens: Vec<u32>,
    n_computed: usize,
    pub(super) pages: Vec<u32>,
    /// Place of its recurrent state.
    pub(super) state: Option<u32>,
    params: SamplingParams,
    counts: Option<TokenCounts>,
}

impl Sequence {
    /// A sequence that starts with a prompt and may grow to `capacity` tokens without an allocation.
    pub fn new(prompt: &[u32], params: SamplingParams, capacity: usize) -> Self {
        let mut tokens = Vec::with_capacity(capacity.max(prompt.len()));
        tokens.extend_from_slice(prompt);
        let counts = TokenCounts::of_prompt(prompt, &params, capacity);
        let pages = Vec::with_capacity(capacity.div_ceil(freetoken_backend::PAGE_TOKENS));
        Sequence { tokens, n_computed: 0, pages, state: None, params, counts }
    }

    /// All known tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that are computed: their keys and values are in the cache, and the state stands behind them.
    pub fn n_computed(&self) -> usize {
        self.n_computed
    }

    /// Tokens known and not computed.
    pub fn pending(&self) -> &[u32] {
        &self.tokens[self.n_computed..]
    }

    /// How its next token is drawn.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// What its penalties count, where it has any.
    pub fn counts(&self) -> Option<&TokenCounts> {
        self.counts.as_ref()
    }

    /// Appends a drawn token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if let Some(counts) = &mut self.counts {
            counts.add_output(token);
        }
    }

    /// Begins anew with another prompt and keeps what is computed of a common beginning. One token at least stays pending, so
    /// that the one behind the prompt can be drawn.
    pub(super) fn rebase(&mut self, prompt: &[u32]) {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.n_computed = self.n_computed.min(common).min(prompt.len().saturating_sub(1));
        self.tokens.clear();
        self.tokens.extend_from_slice(prompt);
        self.counts = TokenCounts::of_prompt(prompt, &self.params, self.tokens.capacity());
    }

    /// Counts the first `n` tokens as computed, and no others.
    pub(super) fn resume_at(&mut self, n: usize) {
        assert!(n <= self.tokens.len(), "{n} of {} tokens", self.tokens.len());
        self.n_computed = n;
    }

    /// Notes that the next `n` tokens are in the cache.
    pub(super) fn advance(&mut self, n: usize) {
        self.n_computed += n;
        debug_assert!(self.n_computed <= self.tokens.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebasing_keeps_what_is_computed_of_a_common_beginning() {
        let params = SamplingParams { presence_penalty: 1.0, ..SamplingParams::GREEDY };
        let computed = || {
            let mut sequence = Sequence::new(&[1, 2, 3], params, 8);
            sequence.push(4);
            sequence.push(5);
            sequence.advance(4);
            sequence
        };
        for (prompt, n_computed) in [
            (&[1, 2, 3, 4, 5, 6][..], 4),
            (&[1, 2, 3, 9, 5], 3),
            (&[1, 2, 3, 4], 3),
            (&[1, 2], 1),
            (&[9, 2, 3], 0),
            (&[1], 0),
        ] {
            let mut sequence = computed();
            sequence.rebase(prompt);
            assert_eq!((sequence.tokens(), sequence.n_computed()), (prompt, n_computed));
            let counts = sequence.counts().expect("there is a penalty");
            assert_eq!(
                counts.edits(&params, 0).count(),
                0,
                "{prompt:?} is no output, which alone is penalised"
            );
        }
    }
}
