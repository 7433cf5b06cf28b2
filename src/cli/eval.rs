//! `freetoken eval`: perplexity of a text, or the logits of given tokens.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use clap::{ArgGroup, Args};

use super::{
    model::ModelArgs,
    terminal::{Progress, note, print_line},
};
use crate::{
    engine::{Engine, Sequence, sampling::SamplingParams},
    formats::{
        Dtype,
        write::{TensorSpec, write_safetensors},
    },
    golden,
};

/// Measure perplexity on a text, or write the logits of given tokens.
///
/// Perplexity: the text is cut into windows that do not overlap; no token is added in front; the first token of each window
/// is not scored; the shorter last window counts; the mean is over all scored tokens.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").required(true).args(["text", "tokens"]),
    after_help = "Examples:\n  freetoken eval --text models/demo/heldout.txt --window 512 --precision f32\n  \
                  freetoken eval --model DIR --tokens ids.txt --logits out.safetensors --greedy 24"
)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// A text whose perplexity is measured.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of a window [default: the context].
    #[arg(long, value_name = "N", requires = "text", value_parser = clap::value_parser!(u32).range(2..=1 << 26))]
    window: Option<u32>,
    /// Decimal token ids between white space.
    #[arg(long, value_name = "FILE", requires = "logits")]
    tokens: Option<PathBuf>,
    /// Where to write `logits` F32 `[n, vocab]`, and with --greedy `greedy_ids` I32 `[N]`.
    #[arg(long, value_name = "OUT.safetensors", requires = "tokens")]
    logits: Option<PathBuf>,
    /// Also continue the tokens greedily, the end of the sequence ignored.
    #[arg(long, value_name = "N", requires = "tokens", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    greedy: Option<u32>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: EvalArgs) -> Result<()> {
    match (&args.text, &args.tokens, &args.logits) {
        (Some(text), _, _) => perplexity(&args, text),
        (_, Some(tokens), Some(out)) => logits(&args, tokens, out),
        _ => unreachable!("the arguments require one of the two"),
    }
}

pub(super) fn read_text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text: convert it", path.display()))
}

fn perplexity(args: &EvalArgs, path: &Path) -> Result<()> {
    let files = args.model.files()?;
    let tokens = files.tokenizer()?.encode(&read_text(path)?, false)?;
    ensure!(tokens.len() >= 2, "{} has {} tokens: at least 2 are needed", path.display(), tokens.len());
    let mut engine = args.model.engine(&files, 1)?;
    let window = args.window.map_or(engine.context(), |n| n as usize);
    if window > engine.context() {
        bail!(
            "--window {window} is larger than the context of {}: raise --context or lower it",
            engine.context()
        );
    }
    let start = Instant::now();
    let progress = Progress::tokens("scoring", tokens.len() as u64);
    let (mut nll, mut n_scored) = (0.0, 0);
    for (i, tokens) in tokens.chunks(window).enumerate() {
        nll += window_nll(&mut engine, tokens, |n| progress.set((i * window + n) as u64))?;
        n_scored += tokens.len() - 1;
    }
    progress.finish();
    let seconds = start.elapsed().as_secs_f64();
    let perplexity = (nll / n_scored as f64).exp();
    let tokens_per_second = tokens.len() as f64 / seconds;
    if args.json {
        let json = serde_json::json!({
            "perplexity": perplexity, "nll": nll / n_scored as f64, "tokens": tokens.len(), "scored_tokens": n_scored,
            "window": window, "seconds": seconds, "tokens_per_second": tokens_per_second,
        });
        return print_line(&json.to_string());
    }
    note(&format!("{} tokens, {n_scored} scored, {tokens_per_second:.0} tok/s", tokens.len()));
    print_line(&format!("perplexity {perplexity:.4}"))
}

/// Sum of the negative log-likelihoods of all tokens but the first.
fn window_nll(engine: &mut Engine, tokens: &[u32], mut progress: impl FnMut(usize)) -> Result<f64> {
    let mut sequence = Sequence::new(tokens, SamplingParams::GREEDY, tokens.len());
    let (mut nll, mut position) = (0.0, 0);
    let scored = engine.score(&mut sequence, usize::MAX, |logits| -> Result<()> {
        position += 1;
        progress(position);
        if let Some(&next) = tokens.get(position) {
            let max = logits.iter().fold(f32::NEG_INFINITY, |max, l| max.max(*l)) as f64;
            let sum: f64 = logits.iter().map(|&l| (l as f64 - max).exp()).sum();
            nll += max + sum.ln() - logits[next as usize] as f64;
        }
        Ok(())
    });
    engine.release(&mut sequence);
    scored.map(|()| nll)
}

fn logits(args: &EvalArgs, path: &Path, out: &Path) -> Result<()> {
    let text = read_text(path)?;
    let mut tokens = Vec::new();
    for word in text.split_ascii_whitespace() {
        let shown: String = word.chars().take(40).collect();
        tokens.push(
            word.parse::<u32>()
                .with_context(|| format!("{}: `{shown}` is not a token id", path.display()))?,
        );
    }
    ensure!(!tokens.is_empty(), "{} holds no token ids", path.display());
    let files = args.model.files()?;
    let mut engine = args.model.engine(&files, 1)?;
    let vocab = engine.model().sizes().vocab;
    let logits = golden::logits(&mut engine, &tokens, usize::MAX)?;
    let n_greedy = args.greedy.map_or(0, |n| n as usize);
    let greedy_ids = golden::greedy(&mut engine, &tokens, n_greedy)?;
    let mut specs =
        vec![TensorSpec { name: "logits".into(), dtype: Dtype::F32, shape: vec![tokens.len(), vocab] }];
    if n_greedy > 0 {
        specs.push(TensorSpec { name: "greedy_ids".into(), dtype: Dtype::I32, shape: vec![n_greedy] });
    }
    write_safetensors(out, specs, &mut |name: &str, file: &mut dyn Write| match name {
        "logits" => file.write_all(bytemuck::cast_slice(&logits)),
        _ => file.write_all(bytemuck::cast_slice(&greedy_ids)),
    })?;
    if args.json {
        let json = serde_json::json!({ "tokens": tokens.len(), "vocab": vocab, "greedy_ids": greedy_ids });
        return print_line(&json.to_string());
    }
    note(&format!("wrote the logits of {} tokens to {}", tokens.len(), out.display()));
    Ok(())
}
