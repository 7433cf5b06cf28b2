//! What recurrent layers keep of a sequence: a place for it on the device, and copies in host memory from which another sequence
//! can go on. It knows sizes, and nothing of what is in a state.

use freetoken_backend::{Backend, PAGE_TOKENS, Result, View};

use super::{Engine, EngineError, Sequence};
use crate::models::RecurrentSizes;

/// The states of one layer, a place for each sequence.
#[derive(Debug, Clone)]
pub struct RecurrentState {
    /// f32 `[n_states, kernel - 1, channels]`
    pub conv: View,
    /// f32 `[n_states, n_value_heads, key_dim, value_dim]`
    pub delta: View,
}

impl RecurrentState {
    /// Room for `n_states` sequences in each recurrent layer.
    ///
    /// # Errors
    /// The device has no room.
    pub(super) fn of_layers(backend: &dyn Backend, s: &RecurrentSizes, n_states: usize) -> Result<Vec<Self>> {
        let room = |values: usize| Ok(backend.alloc(4 * n_states * values)?.whole());
        let layer = |_| Ok(RecurrentState { conv: room(s.conv_values())?, delta: room(s.delta_values())? });
        (0..s.n_layers).map(layer).collect()
    }

    /// What it keeps of the sequence in a place.
    fn parts(&self, place: u32, n_states: usize) -> [View; 2] {
        [&self.conv, &self.delta].map(|view| {
            let bytes = view.bytes() / n_states;
            view.slice(place as usize * bytes..(place as usize + 1) * bytes)
        })
    }
}

/// Hands out places of states.
#[derive(Debug)]
pub(super) struct StatePool {
    n: usize,
    free: Vec<u32>,
}

impl StatePool {
    /// A pool of `n` places.
    pub(super) fn new(n: usize) -> Self {
        StatePool { n, free: (0..n as u32).rev().collect() }
    }

    /// A place for a sequence that has none.
    pub(super) fn take(&mut self) -> std::result::Result<u32, EngineError> {
        self.free.pop().ok_or(EngineError::StatesFull { n: self.n })
    }

    /// Takes a sequence's place back.
    pub(super) fn give_back(&mut self, place: Option<u32>) {
        self.free.extend(place);
    }
}

/// The state of a sequence behind some of its tokens, in host memory. Keys and values are not in it.
#[derive(Debug, Clone)]
pub struct StateSnapshot {
    tokens: Vec<u32>,
    /// Of all layers, one behind the other; empty where no layer is recurrent, or nothing was computed.
    bytes: Vec<u8>,
}

impl StateSnapshot {
    /// The tokens behind which the state stands.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes of host memory that it takes.
    pub fn bytes(&self) -> usize {
        self.bytes.len() + size_of_val(&self.tokens[..])
    }
}

impl Engine {
    /// Whether a sequence has a state beside its keys and values, which stands behind its last computed token and cannot go back.
    pub fn is_recurrent(&self) -> bool {
        self.model().sizes().recurrent.is_some()
    }

    /// Bytes that recurrent layers keep of each sequence.
    pub fn state_bytes(&self) -> usize {
        self.model().sizes().recurrent.map_or(0, |recurrent| recurrent.state_bytes())
    }

    /// Copies the state of a sequence, as it is behind its computed tokens.
    ///
    /// # Errors
    /// The device's.
    pub fn save_state(&self, sequence: &Sequence) -> std::result::Result<StateSnapshot, EngineError> {
        let tokens = sequence.tokens()[..sequence.n_computed()].to_vec();
        let mut bytes = Vec::new();
        if let Some(place) = sequence.state.filter(|_| !tokens.is_empty()) {
            bytes.resize(self.state_bytes(), 0);
            let mut rest = &mut bytes[..];
            for part in self.batch.states.iter().flat_map(|state| state.parts(place, self.batch.n_states)) {
                let into = rest.split_off_mut(..part.bytes()).expect("as many bytes as all layers keep");
                self.backend.read(&part, into)?;
            }
        }
        Ok(StateSnapshot { tokens, bytes })
    }

    /// Lets a sequence go on from a snapshot: behind its tokens all are pending. The sequence must begin with them, and their keys
    /// and values must be in its pages: it has computed them itself, or shares the pages of one that has. Asserts both.
    ///
    /// # Errors
    /// All places for states are taken, or the device's error.
    pub fn restore(
        &mut self,
        sequence: &mut Sequence,
        snapshot: &StateSnapshot,
    ) -> std::result::Result<(), EngineError> {
        let n = snapshot.tokens.len();
        assert!(sequence.tokens().starts_with(&snapshot.tokens), "a sequence that begins with its tokens");
        assert!(n <= sequence.pages.len() * PAGE_TOKENS, "a sequence with pages for its tokens");
        self.take_state(sequence)?;
        // Until all of it is written, nothing counts.
        sequence.resume_at(0);
        if let Some(place) = sequence.state.filter(|_| n > 0) {
            let mut rest = &snapshot.bytes[..];
            for part in self.batch.states.iter().flat_map(|state| state.parts(place, self.batch.n_states)) {
                let from = rest.split_off(..part.bytes()).expect("a snapshot of this model");
                self.backend.write(&part, from)?;
            }
        }
        sequence.resume_at(n);
        self.pool.shrink(&mut sequence.pages, n);
        Ok(())
    }

    /// Gives a sequence of a recurrent model a place for its state, unless it has one.
    pub(super) fn take_state(&mut self, sequence: &mut Sequence) -> std::result::Result<(), EngineError> {
        if self.is_recurrent() && sequence.state.is_none() {
            sequence.state = Some(self.states.take()?);
        }
        Ok(())
    }

    /// After a step that failed, nobody knows which layers have seen its rows: recurrent sequences begin anew.
    pub(super) fn distrust(&self, sequence: &mut Sequence) {
        if self.is_recurrent() {
            sequence.resume_at(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{devices, engine::EngineOptions, engine::sampling::SamplingParams, model_files::ModelFiles};

    /// A sequence goes on from the state of another one in its pages, and what is left over of a state is not seen.
    #[test]
    fn a_state_and_shared_pages_are_a_beginning() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_5_moe-f32");
        let options = EngineOptions { context: 64, max_sequences: 1, ..EngineOptions::default() };
        let files = ModelFiles::open(Some(&dir)).unwrap();
        let mut engine = files.engine(devices::reference(), &options, &mut |_| ()).unwrap();
        let sequence = |tokens: &[u32]| Sequence::new(tokens, SamplingParams::GREEDY, 64);
        let (common, end): (Vec<u32>, Vec<u32>) = ((5..30).collect(), (40..47).collect());
        let whole = [&common[..], &end].concat();
        let mut alone = sequence(&whole);
        let expected = engine.prefill(&mut alone, &mut |_| true).unwrap();
        let expected_state = engine.save_state(&alone).unwrap();
        engine.release(&mut alone);

        let mut first = sequence(&common);
        engine.compute(&mut first, common.len()).unwrap();
        let state = engine.save_state(&first).unwrap();
        let pages = std::mem::take(&mut first.pages);
        engine.release(&mut first);

        // Somebody else uses the place in between.
        let mut other = sequence(&end);
        engine.compute(&mut other, end.len()).unwrap();
        engine.release(&mut other);

        let mut second = sequence(&whole);
        second.pages = pages;
        engine.restore(&mut second, &state).unwrap();
        assert_eq!(second.pending(), &end);
        assert_eq!(engine.prefill(&mut second, &mut |_| true).unwrap(), expected);
        let reached = engine.save_state(&second).unwrap();
        assert!(reached.tokens == expected_state.tokens);
        let values = |s: &StateSnapshot| bytemuck::allocation::pod_collect_to_vec::<u8, f32>(&s.bytes);
        for (got, want) in values(&reached).iter().zip(values(&expected_state)) {
            assert!((got - want).abs() < 1e-4, "{got} instead of {want}");
        }
        let half = state.bytes.len() / 2;
        assert!(state.bytes[..half].iter().any(|&b| b != 0) && state.bytes[half..].iter().any(|&b| b != 0));
    }
}
