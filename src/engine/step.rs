//! The engine: one step of the model for some sequences. Pack the input, replay the program of the bucket, draw tokens.
//!
//! A decode step allocates nothing.

use std::{collections::HashMap, iter::once, ops::Range, sync::Arc};

use freetoken_backend::{Backend, NoRoutePoints, PAGE_TOKENS, Program, Stage};

use super::{
    Batch, BlockPool, EngineError, EngineOptions, Sequence,
    draw::Drawer,
    input::StepInput,
    layered::Layered,
    limits::{Limits, MAX_SEQUENCES},
    prefill::OpenChunk,
    prefix::PrefixCache,
    programs::{self, Kind, Programs, output},
    snapshots::Snapshots,
    state::StatePool,
    state_places::StatePlaces,
};
use crate::{
    models::{LoadedExperts, Model},
    moe::{Elastic, ExpertPlan, Mode, StepKind},
};

/// Rows of the steps that have route points.
const ROUTED_ROWS: [usize; 7] = [1, 2, 4, 8, MAX_SEQUENCES, 32, MOST_ROUTED_ROWS];
/// The longest prompt among them. Each of its experts has few rows, which the host computes about as fast as it reads them.
pub(super) const MOST_ROUTED_ROWS: usize = 64;

/// A model on a device, with room for sequences.
pub struct Engine {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) model: Box<dyn Model>,
    /// The buffers of the largest bucket.
    pub(super) batch: Batch,
    /// The buffers of decode steps, where a prompt may be half way through the layers meanwhile.
    pub(super) decode_batch: Batch,
    pub(super) pool: BlockPool,
    pub(super) prefixes: PrefixCache,
    pub(super) states: StatePool,
    pub(super) snapshots: Snapshots,
    pub(super) limits: Limits,
    pub(super) programs: Programs,
    /// Prefill steps by bucket, where experts are streamed.
    pub(super) layered: HashMap<usize, Layered>,
    /// Experts behind a cache; `None` where all of them are on the device.
    pub(super) elastic: Option<Box<Elastic>>,
    /// Bytes of `--vram` that nothing takes; `None` without that limit.
    pub(super) spare: Option<u64>,
    /// A chunk of a prompt that is half way through the layers.
    pub(super) open: Option<OpenChunk>,
    pub(super) input: StepInput,
    drawer: Drawer,
    /// Where the last computed token's row is in the residual stream.
    pub(super) last_row: usize,
    /// The program whose logits are there to be drawn from, and its rows.
    drawn_from: (Kind, usize),
}
impl Engine {
    /// Makes room for a loaded model and records its decode step. `plan` says what `experts` were loaded for.
    ///
    /// # Errors
    /// [`EngineError::TooLarge`] before anything is allocated, a mode that cannot be honoured, or the device's refusal.
    pub fn new(
        backend: Arc<dyn Backend>,
        model: Box<dyn Model>,
        experts: LoadedExperts,
        plan: ExpertPlan,
        options: &EngineOptions,
    ) -> Result<Self, EngineError> {
        let (sizes, caps) = (model.sizes(), backend.caps());
        let context = options.context.clamp(1, sizes.max_positions);
        let free = backend.free_bytes()?;
        let (streamed, memory) = match plan {
            ExpertPlan::Cached { budget, .. } => (true, budget),
            ExpertPlan::Resident | ExpertPlan::InPlace => (false, None),
        };
        let limits = |context: usize| Limits::new(sizes, caps, options, context, memory, streamed);
        let needed = |context: usize| limits(context).bytes(sizes, caps.precision);
        if let Some(free) = free.filter(|&free| needed(context) > free) {
            let mut fits = context;
            while fits > PAGE_TOKENS && needed(fits) > free {
                fits /= 2;
            }
            let (needed_mib, free_mib) = (needed(context) >> 20, free >> 20);
            return Err(EngineError::TooLarge { context, needed_mib, free_mib, fits });
        }
        let limits = limits(context);
        let spare = match plan {
            ExpertPlan::Cached { spare, .. } if options.vram.is_some() => spare,
            _ => None,
        };
        let (elastic, experts) = match (experts, plan) {
            (LoadedExperts::Placed(experts), _) => (None, experts),
            (LoadedExperts::Banked(banks), ExpertPlan::Cached { n_slots, n_ring, .. }) => {
                let top_k = sizes.moe.map_or(0, |moe| moe.top_k);
                let slots = [n_slots, n_ring];
                let options = &options.elastic;
                let backend = backend.clone();
                let elastic =
                    Elastic::new(backend, banks, top_k, slots, limits.max_rows, &ROUTED_ROWS, options)?;
                let experts = elastic.experts();
                (Some(Box::new(elastic)), experts)
            }
            (LoadedExperts::Banked(banks), ExpertPlan::InPlace) => (None, banks.in_place(&*backend)?),
            (LoadedExperts::Banked(_), ExpertPlan::Resident) => unreachable!("banks are loaded for a plan"),
        };
        let mut batch = Batch::new(&*backend, &*model, &limits, experts)?;
        batch.reads_in_place = plan == ExpertPlan::InPlace;
        let decode_batch =
            if elastic.is_some() { batch.beside(&*backend, model.sizes())? } else { batch.clone() };
        let state_bytes = model.sizes().recurrent.map(|recurrent| recurrent.state_bytes());
        let (places, snapshots) = match state_bytes {
            None => (None, Snapshots::default()),
            Some(bytes) => {
                let n_slots = limits.n_state_slots;
                let snapshots = Snapshots::new(&*backend, bytes, n_slots, limits.decodes_apart)?;
                (Some(StatePlaces::new(n_slots, options.state_cache / bytes)), snapshots)
            }
        };
        let mut engine = Engine {
            pool: BlockPool::new(limits.n_pages),
            prefixes: PrefixCache::new(places),
            snapshots,
            decode_batch,
            open: None,
            states: StatePool::new(limits.n_states),
            programs: Programs::default(),
            layered: HashMap::new(),
            elastic,
            spare,
            input: StepInput::new(&batch),
            drawer: Drawer::new(model.sizes().vocab, programs::top_k(&*model)),
            last_row: 0,
            drawn_from: (Kind::Decode, 1),
            backend,
            model,
            batch,
            limits,
        };
        engine.programs.get(Kind::Decode, 1, &*engine.backend, &*engine.model, &engine.decode_batch)?;
        Ok(engine)
    }

    /// Experts behind a cache; `None` where all of them are on the device.
    pub fn elastic(&self) -> Option<&Elastic> {
        self.elastic.as_deref()
    }

    /// Treats experts without a place on the device otherwise from the next step on.
    ///
    /// # Errors
    /// A mode that cannot be honoured; it is then as it was. Asserts that there is a cache.
    pub fn set_experts_mode(&mut self, mode: Mode) -> Result<(), EngineError> {
        let elastic = self.elastic.as_deref_mut().expect("a model whose experts are behind a cache");
        Ok(elastic.set_mode(mode)?)
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The device.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.limits.context
    }

    /// Bytes of device memory for caches and activations.
    pub fn bytes(&self) -> u64 {
        self.limits.bytes(self.model.sizes(), self.backend.caps().precision)
    }

    /// The stages that a chunk of `n` tokens of a prompt runs, or the longest chunk: for reports.
    pub fn prefill_stages(&self, n: usize) -> Vec<Stage> {
        let batch = self.batch.bucket(n.next_power_of_two().min(self.batch.n_rows));
        programs::stages(Kind::Prefill, &*self.model, &batch)
    }

    /// The stages of a decode step for `n` sequences: what it runs, for reports.
    pub fn decode_stages(&self, n: usize) -> Vec<Stage> {
        let batch = self.batch.bucket(n.next_power_of_two().min(MAX_SEQUENCES));
        programs::stages(Kind::Decode, &*self.model, &batch)
    }

    /// Computes the logits behind the last computed token of a sequence, whose prefill has just ended: row 0 of
    /// [`Self::draw`] and [`Self::logits`].
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn pick(&mut self, sequence: &Sequence) -> Result<(), EngineError> {
        let Engine { backend, model, batch, programs, input, .. } = self;
        let recorded = programs.get(Kind::Pick, 1, &**backend, &**model, batch)?;
        input.put_logit_rows(&recorded.batch, once(self.last_row));
        backend.write(&recorded.batch.input, input.put_sampling(&recorded.batch, once(sequence)))?;
        recorded.program.replay(&mut NoRoutePoints)?;
        self.drawn_from = (Kind::Pick, 1);
        Ok(())
    }

    /// Draws the next token of the sequence in a row of the last [`Self::pick`] or [`Self::step`].
    ///
    /// # Errors
    /// Logits that are no numbers, or the device's refusal.
    pub fn draw(&mut self, row: usize, sequence: &Sequence) -> Result<u32, EngineError> {
        let (kind, n) = self.drawn_from;
        let recorded = self.programs.recorded(kind, n);
        self.drawer.draw(&*self.backend, recorded, row, sequence)
    }

    /// Reads a row of logits `[vocab]` of the last [`Self::pick`] or [`Self::step`], with the penalties of its sequence.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn logits(&self, row: usize, out: &mut [f32]) -> Result<(), EngineError> {
        let (kind, n) = self.drawn_from;
        let (logits, row_bytes) = (&self.programs.recorded(kind, n).batch.logits, size_of_val(out));
        let row = logits.slice(row * row_bytes..(row + 1) * row_bytes);
        Ok(self.backend.read(&row, bytemuck::cast_slice_mut(out))?)
    }

    /// Computes the one pending token of each sequence and draws the next ones, which are not appended.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was computed, and of a recurrent model's sequences nothing is left after a step that failed.
    pub fn decode(&mut self, sequences: &mut [&mut Sequence], drawn: &mut [u32]) -> Result<(), EngineError> {
        self.step(sequences)?;
        for (row, (drawn, sequence)) in drawn.iter_mut().zip(sequences).enumerate() {
            *drawn = self.draw(row, sequence)?;
        }
        Ok(())
    }

    /// Computes the one pending token of each sequence: the n-th one's logits are row n of [`Self::draw`] and [`Self::logits`].
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn step(&mut self, sequences: &mut [&mut Sequence]) -> Result<(), EngineError> {
        for sequence in sequences.iter_mut() {
            assert_eq!(sequence.pending().len(), 1, "decode computes one token a sequence");
            self.make_room(sequence, 1)?;
        }
        assert!(sequences.len() <= MAX_SEQUENCES, "as many sequences as a step takes");
        if let Err(error) = self.decode_rows(sequences) {
            sequences.iter_mut().for_each(|sequence| self.distrust(sequence));
            return Err(error);
        }
        sequences.iter_mut().for_each(|sequence| sequence.advance(1));
        Ok(())
    }

    /// The same for sequences that have the room.
    fn decode_rows(&mut self, sequences: &[&mut Sequence]) -> Result<(), EngineError> {
        let kind = match self.elastic.as_deref().map(Elastic::next_step) {
            Some(StepKind::InPlace) => Kind::DecodeInPlace,
            Some(StepKind::CoExecuted) | None => Kind::Decode,
        };
        let Engine { backend, model, decode_batch, programs, input, elastic, .. } = self;
        let recorded = programs.get(kind, sequences.len(), &**backend, &**model, decode_batch)?;
        let shared = || sequences.iter().map(|sequence| &**sequence);
        input.put_rows(&recorded.batch, shared(), 1);
        input.put_logit_rows(&recorded.batch, 0..recorded.batch.n_rows);
        backend.write(&recorded.batch.input, input.put_sampling(&recorded.batch, shared()))?;
        replay(kind, &mut *recorded.program, elastic)?;
        if let (Kind::DecodeInPlace, Some(serving)) = (kind, elastic.as_deref_mut()) {
            let ids = bytemuck::cast_slice(recorded.program.output(output::EXPERT_IDS));
            settle(serving.end_in_place(ids), elastic)?;
        }
        self.drawn_from = (kind, sequences.len());
        Ok(())
    }

    /// Computes the pending tokens of a sequence, at most `max_chunk` at a time, and gives the logits `[vocab]` of each of
    /// them, in order.
    ///
    /// # Errors
    /// [`EngineError`], or the first error of `row`.
    pub fn score<E: From<EngineError>>(
        &mut self,
        sequence: &mut Sequence,
        max_chunk: usize,
        mut row: impl FnMut(&[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let vocab = self.model.sizes().vocab;
        let mut read = Vec::new();
        while !sequence.pending().is_empty() {
            let n = self.chunk(sequence.pending().len()).min(max_chunk);
            self.compute(sequence, n)?;
            for start in (0..n).step_by(MAX_SEQUENCES) {
                let rows = start..n.min(start + MAX_SEQUENCES);
                read.resize(rows.len() * vocab, 0.0);
                self.logits_of(rows, &mut read)?;
                read.chunks_exact(vocab).try_for_each(&mut row)?;
            }
        }
        Ok(())
    }

    /// Logits of some rows of the last chunk.
    fn logits_of(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<(), EngineError> {
        let Engine { backend, model, batch, programs, input, .. } = self;
        let recorded = programs.get(Kind::Logits, rows.len(), &**backend, &**model, batch)?;
        let batch = &recorded.batch;
        // Rows that pad the bucket repeat the last one.
        input.put_logit_rows(batch, (0..batch.n_rows).map(|i| (rows.start + i).min(rows.end - 1)));
        backend.write(&batch.input, input.rows(batch))?;
        recorded.program.replay(&mut NoRoutePoints)?;
        Ok(backend.read(&batch.logits, bytemuck::cast_slice_mut(out))?)
    }

    /// Takes pages for the next `n` tokens and a place for the state, and refuses tokens that the model does not have.
    pub(super) fn make_room(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        let n_tokens = sequence.n_computed() + n;
        if n_tokens > self.limits.context {
            return Err(EngineError::ContextFull { n_tokens, context: self.limits.context });
        }
        let vocab = self.model.sizes().vocab;
        if let Some(&id) = sequence.pending()[..n].iter().find(|id| **id as usize >= vocab) {
            return Err(EngineError::Token { id, vocab });
        }
        let missing = n_tokens.div_ceil(PAGE_TOKENS).saturating_sub(sequence.pages.len());
        self.prefixes.evict(missing.saturating_sub(self.pool.n_free()), &mut self.pool);
        if !self.pool.grow(&mut sequence.pages, n_tokens) {
            return Err(EngineError::CacheFull);
        }
        self.take_state(sequence)
    }
}

/// Replays a step, whose route points the cache answers. After a step that failed, nobody knows what is in its slots.
pub(super) fn replay(
    kind: Kind,
    program: &mut dyn Program,
    elastic: &mut Option<Box<Elastic>>,
) -> Result<(), EngineError> {
    let done = match elastic {
        Some(elastic) if kind != Kind::DecodeInPlace => {
            elastic.begin(kind == Kind::Decode).and_then(|()| program.replay(&mut **elastic))
        }
        _ => program.replay(&mut NoRoutePoints),
    };
    settle(done, elastic)
}

pub(super) fn settle<T, E: Into<EngineError>>(
    done: Result<T, E>,
    elastic: &mut Option<Box<Elastic>>,
) -> Result<T, EngineError> {
    if let (Err(_), Some(elastic)) = (&done, elastic) {
        elastic.forget()?;
    }
    done.map_err(Into::into)
}
