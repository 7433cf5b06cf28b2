//! One step of the model for some sequences: pack the input, replay the program of the bucket, draw tokens.
//!
//! Programs are recorded before the step that needs them; a decode step allocates nothing.

use std::{collections::HashMap, ops::Range, sync::Arc};

use freetoken_backend::{
    Backend, EditLogits, EditLogitsParams, LogitEdit, MAX_TOP_LOGITS, Op, PAGE_TOKENS, Program, RouteAsk,
    RouteReply, Stage, TopLogits, TopLogitsParams,
};

use super::{
    Batch, BlockPool, Sequence,
    batch::{self, Limits, MAX_EDITS, MAX_SEQUENCES},
    sampling::{Candidates, Draw, SamplingError, sample, sample_row},
};
use crate::models::Model;

/// How much room an engine makes.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Sequences that are in the cache at a time, at most 16.
    pub max_sequences: usize,
    /// Rows of a prefill step.
    pub max_chunk: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions { context: 4096, max_sequences: 1, max_chunk: 512 }
    }
}

/// Why a step, or making an engine, failed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device's answer.
    #[error(transparent)]
    Backend(#[from] freetoken_backend::Error),
    /// No token could be drawn.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The plan does not fit.
    #[error(
        "a context of {context} tokens needs {needed_mib} MiB of memory and {free_mib} MiB are free: try --context {fits}"
    )]
    TooLarge {
        /// Context asked for.
        context: usize,
        /// Memory that it takes.
        needed_mib: u64,
        /// Memory that is free.
        free_mib: u64,
        /// A context that fits.
        fits: usize,
    },
    /// A sequence outgrew the context.
    #[error(
        "the sequence has {n_tokens} tokens and the context holds {context}: shorten it, or raise --context"
    )]
    ContextFull {
        /// Tokens of the sequence.
        n_tokens: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// All pages are taken by other sequences.
    #[error("the key-value cache is full: wait for other sequences to end, or raise --context")]
    CacheFull,
    /// A token that the model does not have.
    #[error(
        "token id {id} is not below the model's vocabulary of {vocab}: the tokenizer does not belong to this model"
    )]
    Token {
        /// The token.
        id: u32,
        /// Tokens of the model.
        vocab: usize,
    },
}

/// What a program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Tokens to keys and values: a chunk of a prompt.
    Prefill,
    /// Rows of the residual stream to logits.
    Logits,
    /// The same, and what a sampler needs of them.
    Pick,
    /// All of it: one token a sequence.
    Decode,
}

struct Recorded {
    batch: Batch,
    program: Box<dyn Program>,
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
    context: usize,
    programs: HashMap<(Kind, usize), Recorded>,
    /// The input of a step, as 32-bit words.
    staging: Vec<u32>,
    /// Where the last computed token's row is in the residual stream.
    last_row: usize,
    logits: Vec<f32>,
    sorted: Vec<(f32, u32)>,
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
        let max_rows = options.max_chunk.clamp(1, 1 << 16).next_power_of_two().max(MAX_SEQUENCES);
        let limits = |context: usize| Limits {
            max_rows,
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
            staging: vec![0; batch.layout().bytes / 4],
            logits: vec![0.0; model.sizes().vocab],
            sorted: Vec::with_capacity(model.sizes().vocab),
            pool: BlockPool::new(limits.n_pages),
            programs: HashMap::new(),
            last_row: 0,
            backend,
            model,
            batch,
            context,
        };
        engine.prepare(Kind::Decode, 1)?;
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
        self.context
    }

    /// Bytes of device memory for caches and activations.
    pub fn bytes(&self) -> u64 {
        let limits =
            Limits { max_rows: self.batch.n_rows, context: self.context, n_pages: self.pool.n_pages() };
        batch::bytes(&*self.model, &limits, self.backend.caps().precision)
    }

    /// The stages of a decode step for `n` sequences: what it runs, for reports.
    pub fn decode_stages(&self, n: usize) -> Vec<Stage> {
        self.stages(Kind::Decode, &self.batch.bucket(n.next_power_of_two().min(MAX_SEQUENCES)))
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

    /// Computes all pending tokens of a sequence and draws the next one, which is not appended. `proceed` is asked between
    /// chunks, with the number of tokens computed so far; where it says no, the result is `None`.
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
            if !proceed(sequence.n_computed()) {
                return Ok(None);
            }
        }
        self.pick(sequence).map(Some)
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
        self.make_room(sequence, n)?;
        let bucket = self.prepare(Kind::Prefill, n)?;
        self.pack_rows(bucket, Kind::Prefill, std::iter::once(&*sequence), n)?;
        self.replay(Kind::Prefill, bucket)?;
        sequence.advance(n);
        self.last_row = n - 1;
        Ok(())
    }

    /// Draws the token behind the last one computed.
    fn pick(&mut self, sequence: &Sequence) -> Result<u32, EngineError> {
        let bucket = self.prepare(Kind::Pick, 1)?;
        let layout = self.programs[&(Kind::Pick, bucket)].batch.layout();
        self.staging[layout.logit_rows / 4] = self.last_row as u32;
        self.pack_sampling(bucket, Kind::Pick, std::iter::once(sequence))?;
        self.replay(Kind::Pick, bucket)?;
        self.draw(Kind::Pick, bucket, 0, sequence)
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
        let bucket = self.prepare(Kind::Decode, sequences.len())?;
        self.pack_rows(bucket, Kind::Decode, sequences.iter().map(|s| &**s), 1)?;
        let layout = self.programs[&(Kind::Decode, bucket)].batch.layout();
        for row in 0..bucket {
            self.staging[layout.logit_rows / 4 + row] = row as u32;
        }
        self.pack_sampling(bucket, Kind::Decode, sequences.iter().map(|s| &**s))?;
        self.replay(Kind::Decode, bucket)?;
        for (row, (drawn, sequence)) in drawn.iter_mut().zip(sequences.iter()).enumerate() {
            *drawn = self.draw(Kind::Decode, bucket, row, sequence)?;
        }
        for sequence in sequences.iter_mut() {
            sequence.advance(1);
        }
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
        while !sequence.pending().is_empty() {
            let n = self.chunk(sequence.pending().len()).min(max_chunk);
            self.compute(sequence, n)?;
            let mut read = vec![0.0; MAX_SEQUENCES.min(n) * vocab];
            for start in (0..n).step_by(MAX_SEQUENCES) {
                let rows = start..n.min(start + MAX_SEQUENCES);
                self.logits_of(rows.clone(), &mut read[..rows.len() * vocab])?;
                read.chunks_exact(vocab).take(rows.len()).try_for_each(&mut row)?;
            }
        }
        Ok(())
    }

    /// Logits of some rows of the last chunk.
    fn logits_of(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<(), EngineError> {
        let bucket = self.prepare(Kind::Logits, rows.len())?;
        let (input, layout, logits) = {
            let batch = &self.programs[&(Kind::Logits, bucket)].batch;
            (batch.input.clone(), batch.layout(), batch.logits.clone())
        };
        for i in 0..bucket {
            self.staging[layout.logit_rows / 4 + i] = (rows.start + i).min(rows.end - 1) as u32;
        }
        self.backend.write(&input, bytemuck::cast_slice(&self.staging[..layout.edits / 4]))?;
        self.replay(Kind::Logits, bucket)?;
        self.backend.read(&logits, bytemuck::cast_slice_mut(out))?;
        Ok(())
    }

    /// Computes the next `n` pending tokens layer by layer, without a program, and keeps what it sees.
    ///
    /// # Errors
    /// [`EngineError`].
    pub fn trace(&mut self, sequence: &mut Sequence, n: usize) -> Result<Trace, EngineError> {
        self.make_room(sequence, n)?;
        let bucket = self.prepare(Kind::Prefill, n)?;
        self.pack_rows(bucket, Kind::Prefill, std::iter::once(&*sequence), n)?;
        let batch = self.batch.bucket(bucket);
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
        sequence.advance(n);
        self.last_row = n - 1;
        Ok(trace)
    }

    /// Takes pages for the next `n` tokens and refuses tokens that the model does not have.
    fn make_room(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        let n_tokens = sequence.n_computed() + n;
        if n_tokens > self.context {
            return Err(EngineError::ContextFull { n_tokens, context: self.context });
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

    /// Records the program of a bucket for `n` rows unless it is there, and gives the bucket.
    fn prepare(&mut self, kind: Kind, n: usize) -> Result<usize, EngineError> {
        let bucket = n.next_power_of_two();
        if !self.programs.contains_key(&(kind, bucket)) {
            let batch = self.batch.bucket(bucket);
            let stages = self.stages(kind, &batch);
            let outputs = match kind {
                Kind::Prefill | Kind::Logits => Vec::new(),
                Kind::Pick | Kind::Decode => vec![
                    batch.top_ids.slice(0..bucket * self.top_k() * 4),
                    batch.top_values.slice(0..bucket * self.top_k() * 4),
                    batch.log_sum_exp.slice(0..bucket * 4),
                ],
            };
            let program = self.backend.record(&stages, &outputs)?;
            self.programs.insert((kind, bucket), Recorded { batch, program });
        }
        Ok(bucket)
    }

    /// Candidates a row.
    fn top_k(&self) -> usize {
        MAX_TOP_LOGITS.min(self.model.sizes().vocab)
    }

    fn stages(&self, kind: Kind, batch: &Batch) -> Vec<Stage> {
        let mut stages = Vec::new();
        if matches!(kind, Kind::Prefill | Kind::Decode) {
            stages.push(Stage::Ops(self.model.embed(batch)));
            stages.extend((0..self.model.sizes().n_layers).flat_map(|layer| self.model.layer(layer, batch)));
        }
        if kind != Kind::Prefill {
            stages.push(Stage::Ops(self.model.head(batch)));
        }
        if matches!(kind, Kind::Pick | Kind::Decode) {
            stages.push(Stage::Ops(self.sampling(batch)));
        }
        stages
    }

    fn sampling(&self, batch: &Batch) -> Vec<Op> {
        let (n_rows, vocab) = (batch.n_sequences as u32, self.model.sizes().vocab as u32);
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
            p: TopLogitsParams { n_rows, vocab, k: self.top_k() as u32 },
        };
        vec![edit.into(), top.into()]
    }

    /// Packs the next `n` tokens of each sequence, in order, and padding behind them.
    fn pack_rows<'s>(
        &mut self,
        bucket: usize,
        kind: Kind,
        sequences: impl Iterator<Item = &'s Sequence>,
        n: usize,
    ) -> Result<(), EngineError> {
        let batch = &self.programs[&(kind, bucket)].batch;
        let layout = batch.layout();
        let mut row = 0;
        for (i, sequence) in sequences.enumerate() {
            for (token, position) in sequence.pending()[..n].iter().zip(sequence.n_computed()..) {
                self.staging[layout.ids / 4 + row] = *token;
                self.staging[layout.positions / 4 + row] = position as u32;
                self.staging[layout.sequences / 4 + row] = i as u32;
                let page = sequence.pages[position / PAGE_TOKENS];
                self.staging[layout.kv_slots / 4 + row] =
                    page * PAGE_TOKENS as u32 + (position % PAGE_TOKENS) as u32;
                row += 1;
            }
            let table = layout.block_table / 4 + i * batch.max_pages;
            self.staging[table..table + sequence.pages.len()].copy_from_slice(&sequence.pages);
        }
        for row in row..bucket {
            self.staging[layout.ids / 4 + row] = 0;
            self.staging[layout.positions / 4 + row] = 0;
            self.staging[layout.sequences / 4 + row] = u32::MAX;
            self.staging[layout.kv_slots / 4 + row] = (row % PAGE_TOKENS) as u32;
        }
        if kind == Kind::Prefill {
            self.backend.write(&batch.input, bytemuck::cast_slice(&self.staging[..layout.edits / 4]))?;
        }
        Ok(())
    }

    /// Packs temperatures and edits, and writes the input.
    fn pack_sampling<'s>(
        &mut self,
        bucket: usize,
        kind: Kind,
        sequences: impl Iterator<Item = &'s Sequence>,
    ) -> Result<(), EngineError> {
        let batch = &self.programs[&(kind, bucket)].batch;
        let layout = batch.layout();
        let inverse_temperatures = layout.inverse_temperatures / 4;
        self.staging[inverse_temperatures..inverse_temperatures + bucket].fill(f32::to_bits(1.0));
        let mut end = layout.edits / 4;
        let mut put = |staging: &mut [u32], edit: LogitEdit| {
            staging[end..end + 4].copy_from_slice(bytemuck::cast_slice(&[edit]));
            end += 4;
            end
        };
        for (row, sequence) in sequences.enumerate() {
            let params = sequence.params();
            if !params.is_greedy() {
                self.staging[inverse_temperatures + row] = f32::to_bits(1.0 / params.temperature);
            }
            if let Some(counts) = sequence.counts().filter(|_| edits_on_device(sequence, bucket)) {
                counts.edits(params, row).for_each(|edit| _ = put(&mut self.staging, edit));
            }
        }
        let end = put(&mut self.staging, LogitEdit::END);
        self.backend.write(&batch.input, bytemuck::cast_slice(&self.staging[..end]))?;
        Ok(())
    }

    fn replay(&mut self, kind: Kind, bucket: usize) -> Result<(), EngineError> {
        let recorded = self.programs.get_mut(&(kind, bucket)).expect("prepared before it is replayed");
        Ok(recorded.program.replay(&mut no_route_point)?)
    }

    /// The next token of the sequence in a row of the last replay.
    fn draw(
        &mut self,
        kind: Kind,
        bucket: usize,
        row: usize,
        sequence: &Sequence,
    ) -> Result<u32, EngineError> {
        let (vocab, k) = (self.model.sizes().vocab, self.top_k());
        let recorded = &self.programs[&(kind, bucket)];
        let position = sequence.tokens().len() as u64;
        let edited = edits_on_device(sequence, bucket);
        if edited {
            let ids = recorded.program.output(0);
            let values: &[f32] = bytemuck::cast_slice(recorded.program.output(1));
            let log_sum_exp: &[f32] = bytemuck::cast_slice(recorded.program.output(2));
            let candidates = Candidates {
                ids: &ids[row * k..][..k],
                logits: &values[row * k..][..k],
                lse: log_sum_exp[row],
                complete: k == vocab,
            };
            if let Draw::Token(token) = sample(&candidates, sequence.params(), position)? {
                return Ok(token);
            }
        }
        let view = recorded.batch.logits.slice(row * vocab * 4..(row + 1) * vocab * 4);
        self.backend.read(&view, bytemuck::cast_slice_mut(&mut self.logits))?;
        if let Some(counts) = sequence.counts().filter(|_| !edited) {
            for edit in counts.edits(sequence.params(), row) {
                let logit = &mut self.logits[edit.id as usize];
                *logit = edit.apply(*logit);
            }
        }
        Ok(sample_row(&self.logits, &mut self.sorted, sequence.params(), position)?)
    }
}

/// Whether the penalties of a sequence are few enough for its share of the list of edits; otherwise the host applies them.
fn edits_on_device(sequence: &Sequence, bucket: usize) -> bool {
    sequence.counts().is_none_or(|counts| counts.n_distinct() <= (MAX_EDITS - 1) / bucket)
}

fn no_route_point(ask: &RouteAsk<'_>, _: &mut RouteReply) -> freetoken_backend::Result<()> {
    let why = "the program asks for experts, and all of them are resident".into();
    Err(freetoken_backend::Error::StepFailed { layer: ask.layer, why })
}
