//! Draws of requests that change logits in ways that the device does not know, or want to see them: biases, grammars and
//! log-probabilities. From a whole row, on the host.

use super::{Logprob, Request, Token};
use crate::engine::sampling::{SamplingError, TokenCounts, sample_row};

/// Room for a row.
pub(super) struct RowDraw {
    /// `[vocab]`, as the model gave them: to be filled before each draw.
    pub(super) logits: Vec<f32>,
    /// `[vocab]`, with biases, penalties and the mask.
    edited: Vec<f32>,
    sorted: Vec<(f32, u32)>,
    /// `[vocab / 32]`
    mask: Vec<u32>,
}

impl RowDraw {
    /// For rows of `vocab` logits.
    pub(super) fn new(vocab: usize) -> Self {
        RowDraw {
            logits: vec![0.0; vocab],
            edited: vec![0.0; vocab],
            sorted: Vec::with_capacity(vocab),
            mask: vec![0; vocab.div_ceil(32)],
        }
    }

    /// Whether a request needs it.
    pub(super) fn is_needed(request: &Request) -> bool {
        request.constraint.is_some() || request.logprobs.is_some() || !request.logit_bias.is_empty()
    }

    /// The next token of a request whose sequence has `position` tokens. `counts`: what its penalties count, if it has any.
    ///
    /// # Errors
    /// Logits that are no numbers.
    pub(super) fn draw(
        &mut self,
        request: &mut Request,
        counts: Option<&TokenCounts>,
        position: usize,
    ) -> Result<Token, SamplingError> {
        self.edited.copy_from_slice(&self.logits);
        for &(id, bias) in &request.logit_bias {
            let logit = &mut self.edited[id as usize];
            *logit = if bias <= -100.0 { f32::NEG_INFINITY } else { *logit + bias };
        }
        for edit in counts.iter().flat_map(|counts| counts.edits(&request.sampling, 0)) {
            let logit = &mut self.edited[edit.id as usize];
            *logit = edit.apply(*logit);
        }
        if let Some(constraint) = &mut request.constraint {
            self.mask.fill(0);
            constraint.allow(&mut self.mask);
            for (id, logit) in self.edited.iter_mut().enumerate() {
                if self.mask[id / 32] >> (id % 32) & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let id = sample_row(&self.edited, &mut self.sorted, &request.sampling, position as u64)?;
        Ok(match request.logprobs {
            Some(n_top) => self.with_logprobs(id, n_top),
            None => Token { id, logprob: None, top: Vec::new() },
        })
    }

    fn with_logprobs(&mut self, id: u32, n_top: usize) -> Token {
        let best = self.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mass: f64 = self.logits.iter().map(|logit| f64::from(logit - best).exp()).sum();
        let all = f64::from(best) + mass.ln();
        let logprob = |logit: f32| (f64::from(logit) - all) as f32;
        self.sorted.clear();
        self.sorted.extend(self.logits.iter().copied().zip(0..));
        let n_top = n_top.min(self.sorted.len());
        let best_first = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if n_top > 0 {
            self.sorted.select_nth_unstable_by(n_top - 1, best_first);
        }
        let top = &mut self.sorted[..n_top];
        top.sort_unstable_by(best_first);
        let top = top.iter().map(|&(logit, id)| Logprob { id, logprob: logprob(logit) }).collect();
        Token { id, logprob: Some(logprob(self.logits[id as usize])), top }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by a panic")]
mod tests {
    use super::*;
    use crate::{engine::sampling::SamplingParams, scheduler::Constraint};

    struct Only(u32);

    impl Constraint for Only {
        fn allow(&mut self, mask: &mut [u32]) {
            mask[self.0 as usize / 32] |= 1 << (self.0 % 32);
        }

        fn accept(&mut self, _: u32) -> bool {
            true
        }
    }

    fn request() -> Request {
        Request {
            prompt: vec![1],
            sampling: SamplingParams::GREEDY,
            logit_bias: Vec::new(),
            max_tokens: 1,
            eos: Vec::new(),
            logprobs: None,
            constraint: None,
            anchors: Vec::new(),
        }
    }

    #[test]
    fn biases_masks_and_penalties_choose_and_logprobs_are_of_the_model() {
        let mut row = RowDraw::new(40);
        let drawn = |row: &mut RowDraw, mut request: Request, counts: Option<&TokenCounts>| {
            row.logits.fill(0.0);
            (row.logits[7], row.logits[35]) = (2.0, 1.0);
            row.draw(&mut request, counts, 3).unwrap()
        };
        assert_eq!(drawn(&mut row, request(), None).id, 7);
        assert_eq!(drawn(&mut row, Request { logit_bias: vec![(3, 5.0)], ..request() }, None).id, 3);
        assert_eq!(drawn(&mut row, Request { logit_bias: vec![(7, -100.0)], ..request() }, None).id, 35);
        let only = Request { constraint: Some(Box::new(Only(34))), ..request() };
        assert_eq!(drawn(&mut row, only, None).id, 34);
        let sampling = SamplingParams { presence_penalty: 2.0, ..SamplingParams::GREEDY };
        let mut counts = TokenCounts::default();
        counts.add_output(7);
        let penalised = Request { sampling, logprobs: Some(2), ..request() };
        let token = drawn(&mut row, penalised, Some(&counts));
        let all = (38.0 + 2.0_f64.exp() + 1.0_f64.exp()).ln() as f32;
        assert_eq!((token.id, token.top[0].id, token.top[1].id), (35, 7, 35));
        assert!((token.logprob.unwrap() - (1.0 - all)).abs() < 1e-6);
        assert!((token.top[0].logprob - (2.0 - all)).abs() < 1e-6);
    }
}
