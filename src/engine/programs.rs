//! The programs of a model: one for each kind of step and batch bucket, recorded before the step that needs it.

use std::collections::{HashMap, hash_map::Entry};

use freetoken_backend::{
    Backend, EditLogits, EditLogitsParams, MAX_TOP_LOGITS, Op, Program, Result, Stage, TopLogits,
    TopLogitsParams,
};

use super::{Batch, batch::MAX_EDITS};
use crate::models::Model;

/// What a program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// Tokens to keys and values: a chunk of a prompt.
    Prefill,
    /// Rows of the residual stream to logits.
    Logits,
    /// The same, and what a sampler needs of them.
    Pick,
    /// All of it: one token a sequence.
    Decode,
    /// The same without route points: experts that have no slot are read from the host's memory.
    DecodeInPlace,
}

impl Kind {
    /// Whether tokens come out of it.
    fn draws(self) -> bool {
        matches!(self, Kind::Pick | Kind::Decode | Kind::DecodeInPlace)
    }
}

/// What a decode program gives, in order.
pub(super) mod output {
    pub(in super::super) const TOP_IDS: usize = 0;
    pub(in super::super) const TOP_VALUES: usize = 1;
    pub(in super::super) const LOG_SUM_EXP: usize = 2;
    /// Of [`super::Kind::DecodeInPlace`] alone: the experts that each layer chose.
    pub(in super::super) const EXPERT_IDS: usize = 3;
}

/// A program and the buffers it works on.
pub(super) struct Recorded {
    pub(super) batch: Batch,
    pub(super) program: Box<dyn Program>,
}

/// All programs so far.
#[derive(Default)]
pub(super) struct Programs(HashMap<(Kind, usize), Recorded>);

impl Programs {
    /// The program for `n` rows, recorded now unless it is there.
    ///
    /// # Errors
    /// The device's refusal.
    pub(super) fn get(
        &mut self,
        kind: Kind,
        n: usize,
        backend: &dyn Backend,
        model: &dyn Model,
        largest: &Batch,
    ) -> Result<&mut Recorded> {
        let bucket = n.next_power_of_two();
        let place = match self.0.entry((kind, bucket)) {
            Entry::Occupied(there) => return Ok(there.into_mut()),
            Entry::Vacant(place) => place,
        };
        let mut batch = largest.bucket(bucket);
        batch.reads_in_place |= kind == Kind::DecodeInPlace;
        let candidates = bucket * top_k(model) * 4;
        let mut outputs = Vec::new();
        if kind.draws() {
            outputs.push(batch.top_ids.slice(0..candidates));
            outputs.push(batch.top_values.slice(0..candidates));
            outputs.push(batch.log_sum_exp.slice(0..bucket * 4));
        }
        if kind == Kind::DecodeInPlace {
            outputs.push(batch.expert_ids.clone());
        }
        let program = backend.record(&stages(kind, model, &batch), &outputs)?;
        Ok(place.insert(Recorded { batch, program }))
    }
}

impl Programs {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// One that was recorded for `n` rows.
    pub(super) fn recorded(&self, kind: Kind, n: usize) -> &Recorded {
        self.0.get(&(kind, n.next_power_of_two())).expect("a program that has run")
    }
}

/// Candidates a row.
pub(super) fn top_k(model: &dyn Model) -> usize {
    MAX_TOP_LOGITS.min(model.sizes().vocab)
}

/// What a program of this kind runs.
pub(super) fn stages(kind: Kind, model: &dyn Model, batch: &Batch) -> Vec<Stage> {
    let mut stages = Vec::new();
    if matches!(kind, Kind::Prefill | Kind::Decode | Kind::DecodeInPlace) {
        stages.push(Stage::Ops(model.embed(batch)));
        stages.extend((0..model.sizes().n_layers).flat_map(|layer| model.layer(layer, batch)));
    }
    if kind != Kind::Prefill {
        stages.push(Stage::Ops(model.head(batch)));
    }
    if kind.draws() {
        stages.push(Stage::Ops(sampling(model, batch)));
    }
    placed(stages, batch)
}

/// The same stages without route points whose experts all have a place, or are read where they lie; and as few of them as possible.
fn placed(stages: Vec<Stage>, batch: &Batch) -> Vec<Stage> {
    let mut placed: Vec<Stage> = Vec::new();
    for stage in stages {
        let stage = match stage {
            Stage::Route(mut point) if !point.mlp.experts.is_cached() || batch.reads_in_place => {
                point.mlp.p.in_place = batch.reads_in_place as u32;
                Stage::Ops(vec![point.mlp.into()])
            }
            stage => stage,
        };
        match (placed.last_mut(), stage) {
            (Some(Stage::Ops(ops)), Stage::Ops(more)) => ops.extend(more),
            (_, stage) => placed.push(stage),
        }
    }
    placed
}

fn sampling(model: &dyn Model, batch: &Batch) -> Vec<Op> {
    let (n_rows, vocab) = (batch.n_sequences as u32, model.sizes().vocab as u32);
    let edit = EditLogits {
        logits: batch.logits.clone(),
        edits: batch.edits.clone(),
        p: EditLogitsParams { n_rows, vocab, capacity: MAX_EDITS as u32 },
    };
    let top = TopLogits {
        ids: batch.top_ids.clone(),
        values: batch.top_values.clone(),
        log_sum_exp: batch.log_sum_exp.clone(),
        logits: batch.logits.clone(),
        inverse_temperatures: batch.inverse_temperatures.clone(),
        p: TopLogitsParams { n_rows, vocab, k: top_k(model) as u32 },
    };
    vec![edit.into(), top.into()]
}
