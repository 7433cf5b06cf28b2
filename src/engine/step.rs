//! The engine: one step of the model for some sequences. Pack the input, replay the program of the bucket, draw tokens.
//!
//! A decode step allocates nothing.

use std::{iter::once, ops::Range, sync::Arc};

use freetoken_backend::{Backend, Caps, NoRoutePoints, PAGE_TOKENS, Stage};

use super::{
    Batch, BlockPool, EngineError, Sequence,
    batch::{self, Limits, MAX_SEQUENCES},
    draw::Drawer,
    input::StepInput,
    programs::{self, Kind, Programs, Recorded},
};
use crate::models::{Model, Sizes};

/// Share of a device's memory that the experts' rows of a prefill step may take.
const PARTS_SHARE: u64 = 64;
/// What they may take where the device does not tell its memory.
const DEFAULT_PARTS_BYTES: u64 = 64 << 20;

/// How much room an engine makes.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Sequences that are in the cache at a time, at most 16.
    pub max_sequences: usize,
    /// Rows of a prefill step; as many as keep the device busy by default.
    pub max_chunk: Option<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions { context: 4096, max_sequences: 1, max_chunk: None }
    }
}

/// What a layer-by-layer run saw.
#[derive(Debug, Default)]
pub struct Trace {
    /// The residual stream behind each layer, `[n_rows, hidden]`.
    pub hidden: Vec<Vec<f32>>,
    /// Expert ids and weights of each layer, `[n_rows, top_k]`; empty for a dense model.
    pub routes: Vec<(Vec<i32>, Vec<f32>)>,
}

/// A model on a device, with room for sequences.
pub struct Engine {
    backend: Arc<dyn Backend>,
    model: Box<dyn Model>,
    /// The buffers of the largest bucket.
    batch: Batch,
    pool: BlockPool,
    limits: Limits,
    programs: Programs,
    input: StepInput,
    drawer: Drawer,
    /// Where the last computed token's row is in the residual stream.
    last_row: usize,
}

impl Engine {
    /// Makes room for a loaded model and records its decode step.
    ///
    /// # Errors
    /// [`EngineError::TooLarge`] before anything is allocated, or the device's refusal.
    pub fn new(
        backend: Arc<dyn Backend>,
        model: Box<dyn Model>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let context = options.context.clamp(1, model.sizes().max_positions);
        let max_sequences = options.max_sequences.clamp(1, MAX_SEQUENCES);
        let max_chunk = options.max_chunk.unwrap_or(backend.caps().prefill_rows.min(context));
        let max_rows = max_chunk.clamp(1, 1 << 16).next_power_of_two().max(MAX_SEQUENCES);
        let tile_rows = tile_rows(model.sizes(), backend.caps(), max_rows);
        let limits = |context: usize| Limits {
            max_rows,
            tile_rows,
            context,
            n_pages: 1 + max_sequences * context.div_ceil(PAGE_TOKENS),
        };
        let precision = backend.caps().precision;
        let needed = |context: usize| batch::bytes(&*model, &limits(context), precision);
        if let Some(free) = backend.free_bytes()?.filter(|&free| needed(context) > free) {
            let mut fits = context;
            while fits > PAGE_TOKENS && needed(fits) > free {
                fits /= 2;
            }
            let (needed_mib, free_mib) = (needed(context) >> 20, free >> 20);
            return Err(EngineError::TooLarge { context, needed_mib, free_mib, fits });
        }
        let limits = limits(context);
        let batch = Batch::new(&*backend, &*model, &limits)?;
        let mut engine = Engine {
            pool: BlockPool::new(limits.n_pages),
            programs: Programs::default(),
            input: StepInput::new(&batch),
            drawer: Drawer::new(model.sizes().vocab, programs::top_k(&*model)),
            last_row: 0,
            backend,
            model,
            batch,
            limits,
        };
        engine.programs.get(Kind::Decode, 1, &*engine.backend, &*engine.model, &engine.batch)?;
        Ok(engine)
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
        batch::bytes(&*self.model, &self.limits, self.backend.caps().precision)
    }

    /// The stages of a decode step for `n` sequences: what it runs, for reports.
    pub fn decode_stages(&self, n: usize) -> Vec<Stage> {
        let batch = self.batch.bucket(n.next_power_of_two().min(MAX_SEQUENCES));
        programs::stages(Kind::Decode, &*self.model, &batch)
    }

    /// Gives a sequence's pages back.
    pub fn release(&mut self, sequence: &mut Sequence) {
        self.pool.shrink(&mut sequence.pages, 0);
    }

    /// Begins a sequence anew with another prompt. What is computed of a common beginning is kept, so that the next turn of a
    /// conversation computes only what is new; penalties see all of it as prompt.
    pub fn rebase(&mut self, sequence: &mut Sequence, prompt: &[u32]) {
        sequence.rebase(prompt);
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
        let Engine { backend, model, batch, programs, input, drawer, .. } = self;
        let recorded = programs.get(Kind::Pick, 1, &**backend, &**model, batch)?;
        input.put_logit_rows(&recorded.batch, once(self.last_row));
        backend.write(&recorded.batch.input, input.put_sampling(&recorded.batch, once(&*sequence)))?;
        recorded.program.replay(&mut NoRoutePoints)?;
        drawer.draw(&**backend, recorded, 0, sequence).map(Some)
    }

    /// Rows of the next step for `n` pending tokens: the next larger bucket where little of it is padding, else the next
    /// smaller one.
    fn chunk(&self, n: usize) -> usize {
        let n = n.min(self.batch.n_rows);
        let above = n.next_power_of_two();
        if 4 * n >= 3 * above { n } else { above / 2 }
    }

    /// Computes the next `n` pending tokens of a sequence.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was computed.
    pub fn compute(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        let recorded = self.prefill_input(sequence, n)?;
        recorded.program.replay(&mut NoRoutePoints)?;
        self.advance(sequence, n);
        Ok(())
    }

    /// Makes room for the next `n` tokens and writes the input of the program that computes them.
    fn prefill_input(&mut self, sequence: &mut Sequence, n: usize) -> Result<&mut Recorded, EngineError> {
        self.make_room(sequence, n)?;
        let recorded = self.programs.get(Kind::Prefill, n, &*self.backend, &*self.model, &self.batch)?;
        self.input.put_rows(&recorded.batch, once(&*sequence), n);
        self.backend.write(&recorded.batch.input, self.input.rows(&recorded.batch))?;
        Ok(recorded)
    }

    fn advance(&mut self, sequence: &mut Sequence, n: usize) {
        sequence.advance(n);
        self.last_row = n - 1;
    }

    /// Computes the one pending token of each sequence and draws the next ones, which are not appended.
    ///
    /// # Errors
    /// [`EngineError`]; nothing was computed.
    pub fn decode(&mut self, sequences: &mut [&mut Sequence], drawn: &mut [u32]) -> Result<(), EngineError> {
        for sequence in sequences.iter_mut() {
            assert_eq!(sequence.pending().len(), 1, "decode computes one token a sequence");
            self.make_room(sequence, 1)?;
        }
        let Engine { backend, model, batch, programs, input, drawer, .. } = self;
        let recorded = programs.get(Kind::Decode, sequences.len(), &**backend, &**model, batch)?;
        let shared = || sequences.iter().map(|sequence| &**sequence);
        input.put_rows(&recorded.batch, shared(), 1);
        input.put_logit_rows(&recorded.batch, 0..recorded.batch.n_rows);
        backend.write(&recorded.batch.input, input.put_sampling(&recorded.batch, shared()))?;
        recorded.program.replay(&mut NoRoutePoints)?;
        for (row, (drawn, sequence)) in drawn.iter_mut().zip(shared()).enumerate() {
            *drawn = drawer.draw(&**backend, recorded, row, sequence)?;
        }
        sequences.iter_mut().for_each(|sequence| sequence.advance(1));
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
        let batch = self.prefill_input(sequence, n)?.batch.clone();
        let (hidden, top_k) = (self.model.sizes().hidden, self.model.sizes().moe.map_or(0, |moe| moe.top_k));
        let mut trace = Trace::default();
        self.backend.run(&self.model.embed(&batch))?;
        for layer in 0..self.model.sizes().n_layers {
            for stage in self.model.layer(layer, &batch) {
                match stage {
                    Stage::Ops(ops) => self.backend.run(&ops)?,
                    Stage::Route(point) => self.backend.run(&[point.mlp.into()])?,
                }
            }
            let mut x = vec![0.0_f32; n * hidden];
            self.backend.read(&batch.x, bytemuck::cast_slice_mut(&mut x))?;
            trace.hidden.push(x);
            if top_k > 0 {
                let (mut ids, mut weights) = (vec![0_i32; n * top_k], vec![0.0_f32; n * top_k]);
                self.backend.read(&batch.expert_ids, bytemuck::cast_slice_mut(&mut ids))?;
                self.backend.read(&batch.expert_weights, bytemuck::cast_slice_mut(&mut weights))?;
                trace.routes.push((ids, weights));
            }
        }
        self.advance(sequence, n);
        Ok(trace)
    }

    /// Takes pages for the next `n` tokens and refuses tokens that the model does not have.
    fn make_room(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        let n_tokens = sequence.n_computed() + n;
        if n_tokens > self.limits.context {
            return Err(EngineError::ContextFull { n_tokens, context: self.limits.context });
        }
        let vocab = self.model.sizes().vocab;
        if let Some(&id) = sequence.pending()[..n].iter().find(|id| **id as usize >= vocab) {
            return Err(EngineError::Token { id, vocab });
        }
        if !self.pool.grow(&mut sequence.pages, n_tokens) {
            return Err(EngineError::CacheFull);
        }
        Ok(())
    }
}

/// Rows whose experts' rows are kept at a time: all where memory is plentiful, since each tile reads its experts again.
fn tile_rows(sizes: &Sizes, caps: &Caps, max_rows: usize) -> usize {
    let row_bytes = sizes.moe.map_or(0, |moe| moe.top_k * sizes.hidden * size_of::<f32>());
    let share = caps.total_bytes.map_or(DEFAULT_PARTS_BYTES, |total| total / PARTS_SHARE);
    let most = usize::try_from(share).unwrap_or(usize::MAX).min(caps.max_binding_bytes);
    let fits = (most / row_bytes.max(1)).clamp(1, max_rows);
    1 << fits.ilog2()
}
