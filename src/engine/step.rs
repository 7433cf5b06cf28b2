//! The engine: one step of the model for some sequences. Pack the input, replay the program of the bucket, draw tokens.
//!
//! A decode step allocates nothing.

use std::{
    collections::{HashMap, hash_map::Entry},
    iter::once,
    ops::Range,
    sync::Arc,
};

use freetoken_backend::{Backend, Caps, NoRoutePoints, PAGE_TOKENS, Program, Stage};

use super::{
    Batch, BlockPool, EngineError, Sequence,
    batch::{self, Limits, MAX_SEQUENCES},
    draw::Drawer,
    input::StepInput,
    layered::Layered,
    prefix::PrefixCache,
    programs::{self, Kind, Programs, output},
    state::StatePool,
};
use crate::{
    models::{LoadedExperts, Model, Sizes},
    moe::{CacheSize, Elastic, ElasticOptions, ExpertPlan, Mode, StepKind},
};

/// How much room an engine makes, and how.
#[derive(Clone)]
pub struct EngineOptions {
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Sequences that are in the cache at a time, at most 16.
    pub max_sequences: usize,
    /// Tokens that the key-value cache holds, of all sequences together and never less than one of them may have; as many as all
    /// may have by default.
    pub kv_tokens: Option<usize>,
    /// Bytes of host memory for states of recurrent layers that later sequences may go on from.
    pub state_cache: usize,
    /// Rows of a prefill step; as many as keep the device busy by default.
    pub max_chunk: Option<usize>,
    /// Bytes of device memory that all of it may take; what is free by default.
    pub vram: Option<u64>,
    /// Device memory for experts; all of them, or what is left, by default.
    pub expert_cache: Option<CacheSize>,
    /// How experts that have no place on the device are treated.
    pub elastic: ElasticOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            context: 4096,
            max_sequences: 1,
            kv_tokens: None,
            state_cache: 1 << 30,
            max_chunk: None,
            vram: None,
            expert_cache: None,
            elastic: ElasticOptions::default(),
        }
    }
}

/// Bytes of caches and activations that an engine will take. `memory`: what the device has for all of it, where that is known;
/// `streamed`: whether experts stay in host memory.
pub fn step_bytes(
    sizes: &Sizes,
    caps: &Caps,
    options: &EngineOptions,
    memory: Option<u64>,
    streamed: bool,
) -> u64 {
    let context = options.context.clamp(1, sizes.max_positions);
    let limits = Limits::new(sizes, caps, options, context, memory, streamed);
    batch::bytes(sizes, &limits, caps.precision)
}

/// What a layer-by-layer run saw.
#[derive(Debug, Default)]
pub struct Trace {
    /// The residual stream behind each layer, `[n_rows, hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// Expert ids and weights of each MoE layer, `[n_rows, top_k]`; empty for a dense model.
    pub routes: Vec<(Vec<i32>, Vec<f32>)>,
}

/// Rows of the steps that have route points.
const ROUTED_ROWS: [usize; 7] = [1, 2, 4, 8, MAX_SEQUENCES, 32, MOST_ROUTED_ROWS];
/// The longest prompt among them. Each of its experts has few rows, which the host computes about as fast as it reads them.
const MOST_ROUTED_ROWS: usize = 64;

/// A chunk of a prompt whose experts are streamed, between two layers.
pub(super) struct OpenChunk {
    bucket: usize,
    n_rows: usize,
    /// MoE layers that are done.
    n_done: usize,
}

/// A model on a device, with room for sequences.
pub struct Engine {
    pub(super) backend: Arc<dyn Backend>,
    model: Box<dyn Model>,
    /// The buffers of the largest bucket.
    pub(super) batch: Batch,
    /// The buffers of decode steps, where a prompt may be half way through the layers meanwhile.
    pub(super) decode_batch: Batch,
    pub(super) pool: BlockPool,
    pub(super) prefixes: PrefixCache,
    pub(super) states: StatePool,
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
    input: StepInput,
    drawer: Drawer,
    /// Where the last computed token's row is in the residual stream.
    last_row: usize,
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
        let needed = |context: usize| batch::bytes(sizes, &limits(context), caps.precision);
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
        let mut engine = Engine {
            pool: BlockPool::new(limits.n_pages),
            prefixes: PrefixCache::new(options.state_cache),
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
        batch::bytes(self.model.sizes(), &self.limits, self.backend.caps().precision)
    }

    /// The stages of a decode step for `n` sequences: what it runs, for reports.
    pub fn decode_stages(&self, n: usize) -> Vec<Stage> {
        let batch = self.batch.bucket(n.next_power_of_two().min(MAX_SEQUENCES));
        programs::stages(Kind::Decode, &*self.model, &batch)
    }

    /// Finds what is computed of the beginning of a new sequence already, and gives the number of its tokens. One token at least
    /// stays pending.
    ///
    /// # Errors
    /// The device's; the sequence then begins at its first token.
    pub fn adopt(&mut self, sequence: &mut Sequence) -> Result<usize, EngineError> {
        assert!(sequence.pages.is_empty(), "a sequence without pages");
        let Some((_, before)) = sequence.tokens().split_last() else { return Ok(0) };
        let mut pages = Vec::new();
        let found = self.prefixes.adopt(before, self.is_recurrent(), &mut pages, &mut self.pool);
        sequence.pages.extend(pages);
        let restored = found.state.filter(|_| self.is_recurrent());
        if let Some(Err(error)) = restored.map(|state| self.write_state(sequence, &state)) {
            self.release(sequence);
            return Err(error);
        }
        sequence.advance(found.n_tokens);
        Ok(found.n_tokens)
    }

    /// Keeps what is computed of a running sequence for others that begin alike, as long as nobody needs the room: full pages,
    /// and of a recurrent model's sequence only where its last page is full.
    ///
    /// # Errors
    /// The device's; then nothing is kept.
    pub fn keep(&mut self, sequence: &Sequence) -> Result<(), EngineError> {
        let is_full = sequence.n_computed().is_multiple_of(PAGE_TOKENS);
        if self.is_recurrent() && !is_full { Ok(()) } else { self.keep_pages(sequence, false) }
    }

    /// The same for a sequence that ends: all of it is kept, and it gives its pages and its state back.
    ///
    /// # Errors
    /// The device's; then nothing is kept.
    pub fn end(&mut self, sequence: &mut Sequence) -> Result<(), EngineError> {
        let kept = self.keep_pages(sequence, true);
        self.release(sequence);
        kept
    }

    fn keep_pages(&mut self, sequence: &Sequence, with_tail: bool) -> Result<(), EngineError> {
        let computed = &sequence.tokens()[..sequence.n_computed()];
        let state = if self.is_recurrent() { self.read_state(sequence)?.map(Into::into) } else { None };
        self.prefixes.keep(computed, &sequence.pages, with_tail, state, &mut self.pool);
        Ok(())
    }

    /// Bytes of host memory that kept states of recurrent layers take.
    pub fn kept_state_bytes(&self) -> usize {
        self.prefixes.state_bytes()
    }

    /// Bytes of a page of the key-value cache, of all layers together.
    pub fn page_bytes(&self) -> u64 {
        self.batch.kv.iter().map(|kv| (kv.view.bytes() / kv.n_pages) as u64).sum()
    }

    /// Pages of the key-value cache that running sequences hold.
    pub fn n_pages_running(&self) -> usize {
        self.n_pages() - self.pool.n_free() - self.n_pages_kept()
    }

    /// Pages that are kept for sequences to come.
    pub fn n_pages_kept(&self) -> usize {
        self.prefixes.n_evictable(&self.pool)
    }

    /// Pages of the key-value cache.
    pub fn n_pages(&self) -> usize {
        self.pool.n_pages() - 1
    }

    /// Gives a sequence's pages and its state back.
    pub fn release(&mut self, sequence: &mut Sequence) {
        self.pool.shrink(&mut sequence.pages, 0);
        self.states.give_back(sequence.state.take());
    }

    /// Begins a sequence anew with another prompt. What is computed of a common beginning is kept, so that the next turn of a
    /// conversation computes only what is new; penalties see all of it as prompt. A recurrent model keeps all that is computed, or
    /// where the prompt does not go on from there, nothing.
    pub fn rebase(&mut self, sequence: &mut Sequence, prompt: &[u32]) {
        let n_before = sequence.n_computed();
        sequence.rebase(prompt);
        if self.is_recurrent() && sequence.n_computed() < n_before {
            sequence.resume_at(0);
        }
        let n_computed = sequence.n_computed();
        self.pool.shrink(&mut sequence.pages, n_computed);
    }

    /// Computes all pending tokens of a sequence, of which there is one at least, and draws the next one, which is not
    /// appended. `proceed` is told the number of tokens computed after each chunk; where it says no and tokens are left,
    /// the result is `None`.
    ///
    /// # Errors
    /// [`EngineError`]; the sequence keeps what was computed.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        proceed: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<u32>, EngineError> {
        assert!(!sequence.pending().is_empty(), "a prefill computes one token at least");
        while !sequence.pending().is_empty() {
            self.compute(sequence, self.chunk(sequence.pending().len()))?;
            if !proceed(sequence.n_computed()) && !sequence.pending().is_empty() {
                return Ok(None);
            }
        }
        self.pick(sequence)?;
        self.draw(0, sequence).map(Some)
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

    /// Rows of the next step for `n` pending tokens: the next larger bucket where little of it is padding, else the next
    /// smaller one.
    pub fn chunk(&self, n: usize) -> usize {
        let n = n.min(self.batch.n_rows);
        let above = n.next_power_of_two();
        if 4 * n >= 3 * above { n } else { above / 2 }
    }

    /// Computes the next `n` pending tokens of a sequence.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was computed, and of a recurrent model's sequence nothing is left after a step that failed.
    pub fn compute(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        while !self.compute_unit(sequence, n)? {}
        Ok(())
    }

    /// Begins to compute the next `n` pending tokens of a sequence, or goes on with it: one layer where experts are streamed,
    /// else all of it. Whether the tokens are computed now; until then decode steps of other sequences may run, and nothing
    /// else but [`Self::abandon`].
    ///
    /// # Errors
    /// As [`Self::compute`].
    pub fn compute_unit(&mut self, sequence: &mut Sequence, n: usize) -> Result<bool, EngineError> {
        let n = match &self.open {
            Some(open) => open.n_rows,
            None => {
                self.make_room(sequence, n)?;
                n
            }
        };
        match self.compute_rows(sequence, n) {
            Ok(true) => self.advance(sequence, n),
            Ok(false) => return Ok(false),
            Err(error) => {
                self.distrust(sequence);
                return Err(error);
            }
        }
        Ok(true)
    }

    /// The same for a sequence that has the room.
    fn compute_rows(&mut self, sequence: &Sequence, n: usize) -> Result<bool, EngineError> {
        if self.open.is_none() && self.streams(n) {
            let bucket = self.layered_input(sequence, n)?;
            self.open = Some(OpenChunk { bucket, n_rows: n, n_done: 0 });
        }
        if let Some(OpenChunk { bucket, n_rows, n_done }) = self.open.take() {
            let Engine { backend, layered, elastic, .. } = self;
            let (layered, serving) =
                layered.get_mut(&bucket).zip(elastic.as_deref_mut()).expect("made for it");
            let is_done = settle(layered.run_layer(n_done, &**backend, serving), elastic)?;
            if !is_done {
                self.open = Some(OpenChunk { bucket, n_rows, n_done: n_done + 1 });
            }
            return Ok(is_done);
        }
        let Engine { backend, model, batch, programs, input, elastic, .. } = self;
        let recorded = programs.get(Kind::Prefill, n, &**backend, &**model, batch)?;
        input.put_rows(&recorded.batch, once(sequence), n);
        backend.write(&recorded.batch.input, input.rows(&recorded.batch))?;
        replay(Kind::Prefill, &mut *recorded.program, elastic)?;
        Ok(true)
    }

    /// Leaves the chunk of a sequence that is half way through the layers, if there is one: its tokens are not computed, and of a
    /// recurrent model's sequence nothing is left.
    pub fn abandon(&mut self, sequence: &mut Sequence) {
        if self.open.take().is_some() {
            self.elastic.iter_mut().for_each(|elastic| elastic.abandon());
            self.distrust(sequence);
        }
    }

    /// Whether a chunk is half way through the layers.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether a chunk of `n` tokens has its experts streamed to the device.
    pub fn streams(&self, n: usize) -> bool {
        let most =
            if self.elastic().is_some_and(Elastic::host_shares) { MOST_ROUTED_ROWS } else { MAX_SEQUENCES };
        self.elastic().is_some_and(|elastic| n > most || !elastic.serves(n))
    }

    /// Writes the next `n` tokens as the input of the step that streams experts to them, and gives its bucket.
    fn layered_input(&mut self, sequence: &Sequence, n: usize) -> Result<usize, EngineError> {
        let bucket = n.next_power_of_two();
        let Engine { backend, model, batch, layered, elastic, input, .. } = self;
        let recorded = match layered.entry(bucket) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(place) => {
                let elastic = elastic.as_deref().expect("asked for by an engine with a cache");
                let batch = batch.bucket(bucket).with_shared_ids();
                let stages = programs::stages(Kind::Prefill, &**model, &batch);
                place.insert(Layered::record(&**backend, batch, stages, elastic)?)
            }
        };
        let batch = &recorded.batch;
        input.put_rows(batch, once(sequence), n);
        backend.write(&batch.input, input.rows(batch))?;
        Ok(bucket)
    }

    fn advance(&mut self, sequence: &mut Sequence, n: usize) {
        sequence.advance(n);
        self.last_row = n - 1;
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

    /// Computes the next `n` pending tokens layer by layer, without a program, and keeps what it sees.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn trace(&mut self, sequence: &mut Sequence, n: usize) -> Result<Trace, EngineError> {
        let mut trace = Trace::default();
        let mut left = n;
        while left > 0 {
            let rows = left.min(self.batch.n_rows);
            self.make_room(sequence, rows)?;
            let traced = self.trace_rows(sequence, rows, &mut trace);
            if let Err(error) = settle(traced, &mut self.elastic) {
                self.distrust(sequence);
                return Err(error);
            }
            self.advance(sequence, rows);
            left -= rows;
        }
        Ok(trace)
    }

    /// The same for rows of one step.
    fn trace_rows(&mut self, sequence: &Sequence, n: usize, trace: &mut Trace) -> Result<(), EngineError> {
        let batch = match &self.elastic {
            Some(_) => {
                let bucket = self.layered_input(sequence, n)?;
                self.layered[&bucket].batch.clone()
            }
            None => {
                let batch = self.batch.bucket(n.next_power_of_two());
                self.input.put_rows(&batch, once(sequence), n);
                self.backend.write(&batch.input, self.input.rows(&batch))?;
                batch
            }
        };
        let Engine { backend, model, layered, elastic, .. } = self;
        let mut layered = layered.get_mut(&batch.n_rows).zip(elastic.as_deref_mut());
        let (hidden, top_k) = (model.sizes().hidden, model.sizes().moe.map_or(0, |moe| moe.top_k));
        backend.run(&model.embed(&batch))?;
        let mut moe_layer = 0;
        for layer in 0..model.sizes().n_layers {
            let mut is_sparse = false;
            for stage in model.layer(layer, &batch) {
                match (stage, &mut layered) {
                    (Stage::Ops(ops), _) => backend.run(&ops)?,
                    (Stage::Route(mut point), layered) => {
                        is_sparse = true;
                        point.mlp.p.in_place = batch.reads_in_place as u32;
                        match layered {
                            Some((layered, elastic)) => layered.experts(moe_layer, elastic)?,
                            None => backend.run(&[point.mlp.into()])?,
                        }
                    }
                }
            }
            let mut x = vec![0.0_f32; n * hidden];
            backend.read(&batch.x, bytemuck::cast_slice_mut(&mut x))?;
            append(&mut trace.hidden, layer).extend(x);
            if is_sparse {
                let (mut ids, mut weights) = (vec![0_i32; n * top_k], vec![0.0_f32; n * top_k]);
                backend.read(&batch.expert_ids_of(moe_layer), bytemuck::cast_slice_mut(&mut ids))?;
                backend.read(&batch.expert_weights, bytemuck::cast_slice_mut(&mut weights))?;
                let (all_ids, all_weights) = append(&mut trace.routes, moe_layer);
                all_ids.extend(ids);
                all_weights.extend(weights);
                moe_layer += 1;
            }
        }
        Ok(())
    }

    /// Takes pages for the next `n` tokens and a place for the state, and refuses tokens that the model does not have.
    fn make_room(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
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
fn replay(
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

fn settle<T, E: Into<EngineError>>(
    done: Result<T, E>,
    elastic: &mut Option<Box<Elastic>>,
) -> Result<T, EngineError> {
    if let (Err(_), Some(elastic)) = (&done, elastic) {
        elastic.forget()?;
    }
    done.map_err(Into::into)
}

/// The `i`-th of some lists, which are made in order.
fn append<T: Default>(lists: &mut Vec<T>, i: usize) -> &mut T {
    if lists.len() == i {
        lists.push(T::default());
    }
    &mut lists[i]
}
