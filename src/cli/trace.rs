//! `freetoken trace`: which experts every token is routed to, in a file that `freetoken bench cache` replays.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use clap::{ArgGroup, Args};
use indicatif::BinaryBytes;

use super::{
    eval::read_text,
    model::ModelArgs,
    run::Conversation,
    terminal::{Progress, print_line},
};
use crate::{
    devices,
    engine::{Engine, Sequence, sampling::SamplingParams},
    model_files::ModelFiles,
    models::{Inventory, MoeSizes},
    moe::{Routing, TraceWriter},
};

/// Tokens that are routed at a time. Each is a step of the trace all the same.
const CHUNK: usize = 256;

/// Record which experts the tokens of an answer or a text are routed to.
///
/// A step of the trace is one token, as decoding takes it: those of the prompt, then those of the greedy answer, or those of
/// the text. A text longer than the context is cut into windows that do not overlap.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").required(true).args(["prompt", "text"]),
    after_help = "Examples:\n  freetoken trace --model DIR --prompt \"What is a fox?\" --out routes.trace\n  \
                  freetoken trace --model DIR --text book.txt --out routes.trace\n  \
                  freetoken bench cache routes.trace --plot hits.svg"
)]
pub(super) struct TraceArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A prompt that is answered.
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// A text that is read as it is.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Continue the prompt as it is, without the model's chat template.
    #[arg(long, requires = "prompt")]
    raw: bool,
    /// Tokens of the answer [default: the model's own limit, or what the context holds].
    #[arg(long, value_name = "N", requires = "prompt", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,
    /// Where to write the trace.
    #[arg(long, short, value_name = "FILE")]
    out: PathBuf,
}

pub(super) fn run(args: TraceArgs) -> Result<()> {
    let files = args.model.files()?;
    let sizes = Inventory::new(&files.config(), &*devices::reference())?.sizes;
    let moe = sizes.moe.filter(|moe| moe.n_layers > 0).with_context(|| {
        format!("{} is a dense model, which routes nothing: give one with experts", files.name())
    })?;
    let MoeSizes { n_layers, n_experts, top_k, .. } = moe;
    let routing = Routing { model: files.name(), n_layers, n_experts, top_k };
    let given = args.tokens(&files)?;
    ensure!(!given.is_empty(), "there are no tokens to route: give a text");
    let mut engine = args.model.engine(&files, 1)?;
    let tokens = match args.text {
        Some(_) => given,
        None => args.answered(&files, &mut engine, given)?,
    };
    let cannot_write = || format!("cannot write {}", args.out.display());
    let file = BufWriter::new(File::create(&args.out).with_context(cannot_write)?);
    let mut trace = TraceWriter::new(file, routing).with_context(cannot_write)?;
    let n_in_use = route(&mut engine, &moe, &tokens, &mut trace)?;
    trace.finish().and_then(|mut file| file.flush()).with_context(cannot_write)?;
    let bytes = fs::metadata(&args.out).with_context(cannot_write)?.len();
    print_line(&format!(
        "{}: {} steps of {n_layers} layers, top {top_k}, {n_in_use} of {} experts in use, {}",
        args.out.display(),
        tokens.len(),
        n_layers * n_experts,
        BinaryBytes(bytes)
    ))
}

impl TraceArgs {
    /// The tokens of the text, or those in front of the answer.
    fn tokens(&self, files: &ModelFiles) -> Result<Vec<u32>> {
        match (&self.text, &self.prompt) {
            (Some(path), _) => Ok(files.tokenizer()?.encode(&read_text(path)?, true)?),
            (None, Some(prompt)) => {
                let mut conversation = Conversation::new(files, None, self.raw)?;
                conversation.ask(prompt);
                conversation.tokens(0)
            }
            (None, None) => unreachable!("the arguments require one of the two"),
        }
    }

    /// The prompt's tokens and those of the greedy answer, without the one that ends it.
    fn answered(&self, files: &ModelFiles, engine: &mut Engine, prompt: Vec<u32>) -> Result<Vec<u32>> {
        let (n_prompt, context) = (prompt.len(), engine.context());
        ensure!(
            n_prompt < context,
            "the prompt has {n_prompt} tokens and the context holds {context}, the answer included: shorten it, or raise \
             --context"
        );
        let generation = files.generation();
        let max_tokens = self.max_tokens.or(generation.max_new_tokens).map_or(usize::MAX, |n| n as usize);
        let n_most = max_tokens.min(context - n_prompt);
        let progress = Progress::tokens("answering", n_most as u64);
        let mut sequence = Sequence::new(&prompt, SamplingParams::GREEDY, context);
        let mut drawn =
            [engine.prefill(&mut sequence, &mut |_| true)?.expect("nobody stops it before its end")];
        for n_answered in 1..=n_most {
            if generation.eos_token_ids.contains(&drawn[0]) {
                break;
            }
            sequence.push(drawn[0]);
            progress.set(n_answered as u64);
            if n_answered < n_most {
                engine.decode(&mut [&mut sequence], &mut drawn)?;
            }
        }
        progress.finish();
        engine.release(&mut sequence);
        Ok(sequence.tokens().to_vec())
    }
}

/// Routes tokens, in windows of a context, and writes a step a token. Gives the number of experts that any of them chose.
fn route(
    engine: &mut Engine,
    moe: &MoeSizes,
    tokens: &[u32],
    trace: &mut TraceWriter<impl Write>,
) -> Result<usize> {
    let (context, top_k) = (engine.context(), moe.top_k);
    let progress = Progress::tokens("routing", tokens.len() as u64);
    let mut in_use = vec![vec![false; moe.n_experts]; moe.n_layers];
    for window in tokens.chunks(context) {
        let mut sequence = Sequence::new(window, SamplingParams::GREEDY, window.len());
        while !sequence.pending().is_empty() {
            let n = CHUNK.min(sequence.pending().len());
            let routes = engine.trace(&mut sequence, n)?.routes;
            for row in 0..n {
                for (layer, (ids, _)) in routes.iter().enumerate() {
                    let ids = &ids[row * top_k..(row + 1) * top_k];
                    trace.route(layer as u32, ids)?;
                    ids.iter().for_each(|&id| in_use[layer][id as usize] = true);
                }
            }
            progress.add(n as u64);
        }
        engine.release(&mut sequence);
    }
    progress.finish();
    Ok(in_use.iter().flatten().filter(|is_used| **is_used).count())
}
