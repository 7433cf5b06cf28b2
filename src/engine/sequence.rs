//! One timeline of tokens: what is known, what is computed, where its cache lies.

use super::sampling::{SamplingParams, TokenCounts};

/// A sequence of the engine. It holds pages of the KV cache until it is released.
#[derive(Debug)]
pub struct Sequence {
    tokens: Vec<u32>,
    n_computed: usize,
    pub(super) pages: Vec<u32>,
    params: SamplingParams,
    counts: Option<TokenCounts>,
}

impl Sequence {
    /// A sequence that starts with a prompt and may grow to `capacity` tokens without an allocation.
    pub fn new(prompt: &[u32], params: SamplingParams, capacity: usize) -> Self {
        let mut tokens = Vec::with_capacity(capacity.max(prompt.len()));
        tokens.extend_from_slice(prompt);
        let counts = params.penalises().then(|| {
            let mut counts = TokenCounts::with_capacity(capacity);
            prompt.iter().for_each(|&id| counts.add_prompt(id));
            counts
        });
        let pages = Vec::with_capacity(capacity.div_ceil(freetoken_backend::PAGE_TOKENS));
        Sequence { tokens, n_computed: 0, pages, params, counts }
    }

    /// All known tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens whose keys and values are in the cache.
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

    /// Notes that the next `n` tokens are in the cache.
    pub(super) fn advance(&mut self, n: usize) {
        self.n_computed += n;
        debug_assert!(self.n_computed <= self.tokens.len());
    }
}
