//! What recurrent layers keep of a sequence that runs: a place for it in the buffers that steps work on. It knows sizes, and
//! nothing of what is in a state.

use freetoken_backend::{Backend, Result, View};

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
    pub(super) fn parts(&self, place: u32, n_states: usize) -> [View; 2] {
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

impl Engine {
    /// Whether a sequence has a state beside its keys and values, which stands behind its last computed token and cannot go back.
    pub fn is_recurrent(&self) -> bool {
        self.model().sizes().recurrent.is_some()
    }

    /// Bytes that recurrent layers keep of each sequence.
    pub fn state_bytes(&self) -> usize {
        self.model().sizes().recurrent.map_or(0, |recurrent| recurrent.state_bytes())
    }

    /// Gives a sequence of a recurrent model a place for its state, unless it has one.
    pub(super) fn take_state(&mut self, sequence: &mut Sequence) -> std::result::Result<(), EngineError> {
        if self.is_recurrent() && sequence.state.is_none() {
            sequence.state = Some(self.states.take()?);
        }
        Ok(())
    }

    /// The parts of a sequence's state, which has a place: two of each recurrent layer.
    pub(super) fn state_parts(&self, sequence: &Sequence) -> impl Iterator<Item = View> {
        let place = sequence.state.expect("a sequence with a state");
        self.batch.states.iter().flat_map(move |state| state.parts(place, self.batch.n_states))
    }

    /// After a step that failed, nobody knows which layers have seen its rows: recurrent sequences begin anew.
    pub(super) fn distrust(&self, sequence: &mut Sequence) {
        if self.is_recurrent() {
            sequence.resume_at(0);
        }
    }
}
