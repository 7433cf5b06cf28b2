//! What is measured: an engine with a real or a made-up model, and random tokens to feed it.

use std::sync::Arc;

use anyhow::{Result, ensure};
use freetoken_backend::{Attention, Backend, KvCache, Op, PAGE_TOKENS, Stage};

use super::{
    super::{
        synth::{N_TOKENS, Shape, distinct_experts, random_routes, random_token},
        terminal::Progress,
    },
    BenchArgs,
};
use crate::{
    engine::{Engine, EngineOptions, Sequence, sampling::SamplingParams},
    model_files::ModelFiles,
    models::SyntheticCheckpoint,
};

/// Steps that are not timed in front of those that are.
pub(super) const WARM_UP: usize = 2;

/// Where the model comes from.
pub(super) enum Source {
    /// A checkpoint.
    Files(Box<ModelFiles>),
    /// Made-up weights of a shape.
    Shape(Shape, SyntheticCheckpoint),
}

impl Source {
    /// Opens the files, or makes the weights.
    pub(super) fn open(args: &BenchArgs) -> Result<Self> {
        Ok(match args.shape.read()? {
            Some(shape) => {
                let weights = shape.weights(&args.shape)?;
                Source::Shape(shape, weights)
            }
            None => Source::Files(Box::new(ModelFiles::open(args.model.as_deref())?)),
        })
    }

    /// The model on a device, with random tokens routed through it. `deepest`: tokens of the longest sequence that decodes.
    pub(super) fn subject(
        &self,
        args: &BenchArgs,
        backend: Arc<dyn Backend>,
        options: &EngineOptions,
        deepest: usize,
    ) -> Result<Subject> {
        let (name, mut engine) = match self {
            Source::Shape(shape, weights) => (shape.name.clone(), shape.engine(weights, backend, options)?),
            Source::Files(files) => {
                let progress = Progress::bytes("loading", files.checkpoint().total_bytes());
                let engine = files.engine(backend, options, &mut |bytes| progress.add(bytes))?;
                progress.finish();
                (files.name(), engine)
            }
        };
        let longest = args.prompt.iter().copied().max().unwrap_or(0) as usize;
        ensure!(
            deepest.max(longest) <= engine.context(),
            "the model's context is {} tokens and {} are asked for: lower --prompt, --depth or --decode",
            engine.context(),
            deepest.max(longest)
        );
        let seed = args.shape.seed;
        let routes = random_routes(&mut engine, seed)?;
        Ok(Subject { name, engine, routes, seed, n_drawn: N_TOKENS as u64 })
    }
}

/// Options of an engine that has room for every prompt and batch, and for sequences of `deepest` tokens that decode.
pub(super) fn options(args: &BenchArgs, deepest: usize) -> EngineOptions {
    let longest = args.prompt.iter().copied().max().unwrap_or(0) as usize;
    let context = deepest.max(longest).max(N_TOKENS);
    let max_sequences = args.batch.iter().copied().max().unwrap_or(1) as usize;
    EngineOptions { context, max_sequences, ..EngineOptions::default() }
}

/// A model on a device.
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) engine: Engine,
    /// Expert ids of each layer for random tokens; none for a dense model.
    pub(super) routes: Vec<Vec<i32>>,
    seed: u64,
    /// Random tokens drawn so far.
    n_drawn: u64,
}

impl Subject {
    /// Loads or makes the model, with room for all that is asked for, and routes random tokens through it.
    pub(super) fn open(args: &BenchArgs) -> Result<Self> {
        let deepest = args.depth.iter().copied().max().unwrap_or(0) as usize + WARM_UP + args.decode as usize;
        let backend = args.device.open()?;
        let options = options(args, deepest);
        let options = args.memory.options(options, &*backend, &args.device)?;
        let subject = Source::open(args)?.subject(args, backend, &options, deepest)?;
        args.memory.say(&subject.engine);
        Ok(subject)
    }

    /// The next random token.
    pub(super) fn token(&mut self) -> u32 {
        self.n_drawn += 1;
        random_token(self.seed, self.n_drawn, self.engine.model().sizes().vocab)
    }

    /// A sequence without tokens.
    pub(super) fn sequence(&self) -> Sequence {
        Sequence::new(&[], SamplingParams::GREEDY, self.engine.context())
    }

    /// Calls `measure` with every batch of sequences at every depth, from the shallowest on. It may decode [`WARM_UP`] and the
    /// timed steps.
    pub(super) fn at_each_depth(
        &mut self,
        args: &BenchArgs,
        mut measure: impl FnMut(&mut Self, usize, &mut [Sequence]) -> Result<()>,
    ) -> Result<()> {
        let mut depths = args.depth.clone();
        depths.sort_unstable();
        let n_sequences = args.batch.iter().copied().max().unwrap_or(1) as usize;
        let mut sequences: Vec<Sequence> = (0..n_sequences).map(|_| self.sequence()).collect();
        for depth in depths {
            for &batch in &args.batch {
                let sequences = &mut sequences[..batch as usize];
                for sequence in sequences.iter_mut() {
                    self.bring_to(depth as usize, sequence)?;
                }
                measure(self, depth as usize, sequences)?;
            }
        }
        sequences.iter_mut().for_each(|sequence| self.engine.release(sequence));
        Ok(())
    }

    /// Makes a sequence have `depth` tokens, all in the cache: what it has of them already is kept.
    pub(super) fn bring_to(&mut self, depth: usize, sequence: &mut Sequence) -> Result<()> {
        let mut tokens = sequence.tokens().to_vec();
        tokens.resize_with(depth, || self.token());
        self.engine.rebase(sequence, &tokens);
        if depth > 0 {
            self.engine.prefill(sequence, &mut |_| true)?;
        }
        Ok(())
    }

    /// A decode step with a random token for each sequence: what is drawn is not fed back, since random weights fall into
    /// cycles.
    pub(super) fn decode(&mut self, sequences: &mut [Sequence]) -> Result<()> {
        for sequence in sequences.iter_mut() {
            let token = self.token();
            sequence.push(token);
        }
        let mut drawn = vec![0; sequences.len()];
        let mut sequences: Vec<&mut Sequence> = sequences.iter_mut().collect();
        Ok(self.engine.decode(&mut sequences, &mut drawn)?)
    }

    /// Bytes that a decode step of these ops must read, without the cache: each weight once, of the experts those that
    /// random tokens choose together.
    pub(super) fn weight_bytes(&self, n_sequences: usize) -> f64 {
        let top_k = self.engine.model().sizes().moe.map_or(1, |moe| moe.top_k);
        let distinct = self.routes.iter().map(|ids| distinct_experts(ids, top_k, n_sequences)).sum::<f64>()
            / self.routes.len().max(1) as f64;
        let bytes = |op: &Op| match op {
            Op::ExpertMlp(op) => distinct * op.experts.expert_bytes() as f64,
            // Greedy sequences edit nothing.
            Op::EditLogits(_) => 0.0,
            op => op.spec().bytes() as f64,
        };
        self.ops(n_sequences).iter().map(bytes).sum()
    }

    /// Bytes of the cache that a decode step reads for each token in it.
    pub(super) fn kv_token_bytes(&self) -> f64 {
        let attention = |op: &Op| match op {
            Op::Attention(op) => kv_token_bytes(op),
            _ => 0.0,
        };
        self.ops(1).iter().map(attention).sum()
    }

    /// All ops of a decode step.
    pub(super) fn ops(&self, n_sequences: usize) -> Vec<Op> {
        let ops = |stage: Stage| match stage {
            Stage::Ops(ops) => ops,
            Stage::Route(point) => vec![point.mlp.into()],
        };
        self.engine.decode_stages(n_sequences).into_iter().flat_map(ops).collect()
    }
}

/// Bytes of one layer's cache for each token in it.
pub(super) fn kv_token_bytes(op: &Attention) -> f64 {
    let (n_kv_heads, head_dim) = (op.p.n_kv_heads as usize, op.p.head_dim as usize);
    KvCache::page_bytes(op.kv.format, n_kv_heads, head_dim) as f64 / PAGE_TOKENS as f64
}
