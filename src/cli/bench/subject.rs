//! What is measured: an engine with a real or a made-up model, and random tokens to feed it.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, ensure};
use clap::{ArgGroup, Args};
use freetoken_backend::{Attention, Backend, KvCache, Op, PAGE_TOKENS, Stage};

use super::{
    super::{
        memory::MemoryArgs,
        model::DeviceArgs,
        synth::{ExpertUse, N_TOKENS, Shape, ShapeArgs, distinct_experts, random_routes, random_token},
        terminal::Progress,
    },
    report::{Report, ReportArgs, read_bandwidth},
    table::Table,
};
use crate::{
    engine::{Engine, EngineOptions, Sequence, sampling::SamplingParams},
    model_files::ModelFiles,
    models::SyntheticCheckpoint,
};

/// Steps that are not timed in front of those that are.
pub(super) const WARM_UP: usize = 2;

/// Which model is measured, and where.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").args(["model", "like", "config"]))]
pub(super) struct SubjectArgs {
    /// A directory with config.json and *.safetensors, or the name of one under $FREETOKEN_HOME/models
    /// [default: the demo model].
    #[arg(long, short, value_name = "DIR")]
    pub(super) model: Option<PathBuf>,
    #[command(flatten)]
    pub(super) shape: ShapeArgs,
    #[command(flatten)]
    pub(super) device: DeviceArgs,
}

/// Which decode steps are measured.
#[derive(Debug, Args)]
pub(super) struct DecodeArgs {
    /// Tokens that are in the cache before decoding, with keys and values that are made up.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0",
        value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub(super) depth: Vec<u32>,
    /// Decode steps that are timed.
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    pub(super) decode: u32,
    /// Sequences that decode together.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(super) batch: Vec<u32>,
}

impl DecodeArgs {
    /// Tokens of the deepest sequence before it decodes.
    pub(super) fn deepest(&self) -> usize {
        self.depth.iter().copied().max().unwrap_or(0) as usize
    }

    /// Options of an engine that has room for every batch, and for sequences of `context` tokens.
    pub(super) fn options(&self, context: usize) -> EngineOptions {
        let max_sequences = self.batch.iter().copied().max().unwrap_or(1) as usize;
        EngineOptions { context: context.max(N_TOKENS), max_sequences, ..EngineOptions::default() }
    }
}

/// Tokens of prompts that are measured.
#[derive(Debug, Args)]
pub(super) struct PromptArgs {
    /// Tokens of prompts.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512",
        value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(super) prompt: Vec<u32>,
}

impl PromptArgs {
    /// Tokens of the longest.
    pub(super) fn longest(&self) -> usize {
        self.prompt.iter().copied().max().unwrap_or(0) as usize
    }
}

/// Where the model comes from.
pub(super) enum Source {
    /// A checkpoint.
    Files(Box<ModelFiles>),
    /// Made-up weights of a shape.
    Shape(Shape, SyntheticCheckpoint),
}

impl Source {
    /// Opens the files, or makes the weights.
    pub(super) fn open(args: &SubjectArgs) -> Result<Self> {
        Ok(match args.shape.read()? {
            Some(shape) => {
                let weights = shape.weights(&args.shape)?;
                Source::Shape(shape, weights)
            }
            None => {
                ensure!(
                    args.shape.format.is_none(),
                    "--format is for made-up weights: give --like NAME or --config FILE"
                );
                Source::Files(Box::new(ModelFiles::open(args.model.as_deref())?))
            }
        })
    }

    /// The model on a device, with random tokens routed through it.
    pub(super) fn subject(
        &self,
        args: &SubjectArgs,
        backend: Arc<dyn Backend>,
        options: &EngineOptions,
    ) -> Result<Subject> {
        let (name, mut engine) = match self {
            Source::Shape(shape, weights) => (shape.title(), shape.engine(weights, backend, options)?),
            Source::Files(files) => {
                let progress = Progress::bytes("loading", files.checkpoint().total_bytes());
                let engine = files.engine(backend, options, &mut |bytes| progress.add(bytes))?;
                progress.finish();
                (files.name(), engine)
            }
        };
        ensure!(
            options.context <= engine.context(),
            "the model's context is {} tokens and {} are asked for: ask for shorter prompts, less depth or fewer steps",
            engine.context(),
            options.context
        );
        let seed = args.shape.seed;
        let routes = random_routes(&mut engine, seed)?;
        Ok(Subject { name, engine, routes, seed, n_drawn: N_TOKENS as u64 })
    }
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
    /// Loads or makes the model, within the memory that it may have, and routes random tokens through it.
    pub(super) fn open(args: &SubjectArgs, memory: &MemoryArgs, options: EngineOptions) -> Result<Self> {
        let backend = args.device.open()?;
        let options = memory.options(options, &*backend, &args.device)?;
        let subject = Source::open(args)?.subject(args, backend, &options)?;
        memory.say(&subject.engine);
        Ok(subject)
    }

    /// Bytes a second at which its device reads its own memory.
    pub(super) fn read_bandwidth(&self) -> Result<f64> {
        read_bandwidth(self.engine.backend())
    }

    /// Prints what was measured, beside how its experts are used.
    pub(super) fn report(&self, read_bandwidth: f64, table: Table, to: &ReportArgs) -> Result<()> {
        let n_experts = self.engine.model().sizes().moe.map_or(0, |moe| moe.n_experts);
        let expert_use: Vec<ExpertUse> =
            self.routes.iter().map(|ids| ExpertUse::new(ids, n_experts)).collect();
        let caps = self.engine.backend().caps();
        Report { subject: self.name.clone(), caps, read_bandwidth, expert_use: &expert_use, table }.print(to)
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
        args: &DecodeArgs,
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

    /// Makes a sequence have `depth` tokens, all in the cache, as if they were computed.
    pub(super) fn bring_to(&mut self, depth: usize, sequence: &mut Sequence) -> Result<()> {
        let mut tokens = sequence.tokens().to_vec();
        tokens.resize_with(depth, || self.token());
        self.engine.rebase(sequence, &tokens);
        let n_pending = sequence.pending().len();
        Ok(self.engine.make_up(sequence, n_pending)?)
    }

    /// Computes so many random tokens behind those of a sequence and draws nothing, so that the device keeps the last chunk's input.
    pub(super) fn compute(&mut self, n_tokens: usize, sequence: &mut Sequence) -> Result<()> {
        (0..n_tokens).for_each(|_| sequence.push(self.token()));
        while !sequence.pending().is_empty() {
            self.engine.compute(sequence, self.engine.chunk(sequence.pending().len()))?;
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
        ops_of(self.engine.decode_stages(n_sequences))
    }

    /// All ops of a chunk of a prompt, as long as one can be.
    pub(super) fn prompt_ops(&self, n_tokens: usize) -> Vec<Op> {
        ops_of(self.engine.prefill_stages(n_tokens))
    }
}

fn ops_of(stages: Vec<Stage>) -> Vec<Op> {
    let ops = |stage| match stage {
        Stage::Ops(ops) => ops,
        Stage::Route(point) => vec![point.mlp.into()],
    };
    stages.into_iter().flat_map(ops).collect()
}

/// Bytes of one layer's cache for each token in it.
pub(super) fn kv_token_bytes(op: &Attention) -> f64 {
    let (n_kv_heads, head_dim) = (op.p.n_kv_heads as usize, op.p.head_dim as usize);
    KvCache::page_bytes(op.kv.format, n_kv_heads, head_dim) as f64 / PAGE_TOKENS as f64
}
