//! Penalties: which logits change, and by how much, because of the tokens a sequence already holds.
//!
//! [`TokenCounts`] grows by one token at a time; a repeated token allocates nothing. It knows no logits: the
//! edits go to wherever these are.

use std::collections::HashMap;

use freetoken_backend::LogitEdit;

use super::SamplingParams;

/// Which tokens a sequence has seen, in order of first appearance, and how often each is in its output.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts {
    seen: Vec<SeenToken>,
    /// Token id to its place in `seen`.
    places: HashMap<u32, usize>,
}

#[derive(Clone, Copy, Debug)]
struct SeenToken {
    id: u32,
    n_outputs: u32,
}

impl TokenCounts {
    /// Counts with room for `n_distinct` tokens; nothing is allocated until more distinct ones appear.
    pub fn with_capacity(n_distinct: usize) -> Self {
        Self { seen: Vec::with_capacity(n_distinct), places: HashMap::with_capacity(n_distinct) }
    }

    /// What the penalties of `params` count of a prompt, if there are any.
    pub fn of_prompt(prompt: &[u32], params: &SamplingParams, capacity: usize) -> Option<Self> {
        params.penalises().then(|| {
            let mut counts = TokenCounts::with_capacity(capacity);
            prompt.iter().for_each(|&id| counts.add_prompt(id));
            counts
        })
    }

    /// Notes a token of the prompt.
    pub fn add_prompt(&mut self, id: u32) {
        self.entry(id);
    }

    /// Counts a generated token.
    pub fn add_output(&mut self, id: u32) {
        self.entry(id).n_outputs += 1;
    }

    /// Different tokens seen: no list of edits is longer.
    pub fn n_distinct(&self) -> usize {
        self.seen.len()
    }

    /// The edits that `params` asks for in row `row` of the logits, one for each token whose logit changes, in
    /// order of first appearance.
    pub fn edits(&self, params: &SamplingParams, row: usize) -> impl Iterator<Item = LogitEdit> {
        let SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, .. } = *params;
        self.seen.iter().filter_map(move |&SeenToken { id, n_outputs }| {
            let presence = if n_outputs > 0 { presence_penalty } else { 0.0 };
            let subtract = presence + frequency_penalty * n_outputs as f32;
            (repetition_penalty != 1.0 || subtract != 0.0).then_some(LogitEdit {
                row: row as i32,
                id,
                repetition: repetition_penalty,
                subtract,
            })
        })
    }

    fn entry(&mut self, id: u32) -> &mut SeenToken {
        let place = *self.places.entry(id).or_insert(self.seen.len());
        if place == self.seen.len() {
            self.seen.push(SeenToken { id, n_outputs: 0 });
        }
        &mut self.seen[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_edit_the_tokens_seen() {
        let mut counts = TokenCounts::with_capacity(8);
        [5, 3, 5].into_iter().for_each(|id| counts.add_prompt(id));
        [3, 9, 9].into_iter().for_each(|id| counts.add_output(id));
        let edits = |params: SamplingParams| {
            assert!(params.penalises());
            counts.edits(&params, 0).map(|edit| (edit.id, edit.repetition, edit.subtract)).collect::<Vec<_>>()
        };
        assert_eq!(
            edits(SamplingParams { repetition_penalty: 2.0, ..SamplingParams::GREEDY }),
            [(5, 2.0, 0.0), (3, 2.0, 0.0), (9, 2.0, 0.0)]
        );
        assert_eq!(
            edits(SamplingParams { presence_penalty: 1.0, frequency_penalty: 0.5, ..SamplingParams::GREEDY }),
            [(3, 1.0, 1.5), (9, 1.0, 2.0)]
        );
        assert!(
            !SamplingParams::GREEDY.penalises() && counts.edits(&SamplingParams::GREEDY, 0).next().is_none()
        );

        let edit = LogitEdit { row: 0, id: 0, repetition: 2.0, subtract: 0.5 };
        assert_eq!([3.0, -3.0, 0.0].map(|logit| edit.apply(logit)), [1.0, -6.5, -0.5]);
    }
}
