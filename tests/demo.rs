//! The demo model against what transformers computes from it (`models/demo/reference.json`), and turns that share a cache.

use std::{fs, path::Path, sync::Arc};

use anyhow::{Context, Result};
use freetoken::{
    engine::{Engine, EngineOptions, Sequence, sampling::SamplingParams},
    golden,
    model_files::ModelFiles,
};
use freetoken_backend::Precision;
use freetoken_cpu::{Cpu, CpuOptions};
use serde::Deserialize;

/// How far a logit may be off in f32; the file rounds to 1e-5.
const LOGIT_TOLERANCE: f32 = 1e-3;
/// Below this distance of the two best logits, another rounding may choose the other token.
const SAFE_MARGIN: f32 = 0.01;
/// How far a perplexity may be off, as a share of it.
const PERPLEXITY_TOLERANCE: f64 = 0.005;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
    perplexity: Perplexity,
}

#[derive(Deserialize)]
struct Case {
    prompt: String,
    ids: Vec<u32>,
    /// The best tokens behind the prompt, and their logits.
    top_ids: Vec<usize>,
    top_logits: Vec<f32>,
    greedy_ids: Vec<u32>,
    min_margin: f32,
    /// Place of the smallest margin in `greedy_ids`.
    margin_at: usize,
}

#[derive(Deserialize)]
struct Perplexity {
    file: String,
    tokens: usize,
    window: usize,
    scored_tokens: usize,
    perplexity: f64,
}

fn demo() -> Result<(ModelFiles, Reference)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let reference = fs::read(dir.join("reference.json"))?;
    Ok((ModelFiles::open(Some(&dir))?, serde_json::from_slice(&reference)?))
}

fn engine(files: &ModelFiles, precision: Precision) -> Result<Engine> {
    let cpu = Cpu::new(CpuOptions { threads: Some(2), precision })?;
    let options = EngineOptions { context: 1024, ..EngineOptions::default() };
    Ok(files.engine(Arc::new(cpu), &options, &mut |_| ())?)
}

#[test]
fn logits_and_greedy_tokens_in_f32() -> Result<()> {
    let (files, reference) = demo()?;
    let mut engine = engine(&files, Precision::F32)?;
    for case in &reference.cases {
        assert_eq!(files.tokenizer()?.encode(&case.prompt, false)?, case.ids, "{}", case.prompt);
        let logits = golden::logits(&mut engine, &case.ids, usize::MAX)?;
        let last = &logits[logits.len() - logits.len() / case.ids.len()..];
        for (&id, &logit) in case.top_ids.iter().zip(&case.top_logits) {
            let off = (last[id] - logit).abs();
            assert!(off <= LOGIT_TOLERANCE, "{}: the logit of {id} is off by {off}", case.prompt);
        }
        let n_safe = if case.min_margin < SAFE_MARGIN { case.margin_at } else { case.greedy_ids.len() };
        let greedy = golden::greedy(&mut engine, &case.ids, n_safe)?;
        assert_eq!(greedy, case.greedy_ids[..n_safe], "{}", case.prompt);
    }
    Ok(())
}

#[test]
fn perplexity_in_f32() -> Result<()> {
    check_perplexity(Precision::F32)
}

#[test]
fn perplexity_in_auto() -> Result<()> {
    check_perplexity(Precision::Auto)
}

fn check_perplexity(precision: Precision) -> Result<()> {
    let (files, Reference { perplexity: want, .. }) = demo()?;
    let mut engine = engine(&files, precision)?;
    let text = fs::read_to_string(files.checkpoint().dir().join(&want.file))?;
    let tokens = files.tokenizer()?.encode(&text, false)?;
    assert_eq!(tokens.len(), want.tokens);
    let (mut nll, mut n_scored) = (0.0, 0);
    for window in tokens.chunks(want.window) {
        let mut sequence = Sequence::new(window, SamplingParams::GREEDY, window.len());
        let mut nexts = window[1..].iter();
        engine.score(&mut sequence, usize::MAX, |logits| -> Result<()> {
            if let Some(&next) = nexts.next() {
                let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                nll += sum.ln() - f64::from(logits[next as usize]);
                n_scored += 1;
            }
            Ok(())
        })?;
        engine.release(&mut sequence);
    }
    assert_eq!(n_scored, want.scored_tokens);
    let perplexity = (nll / f64::from(n_scored as u32)).exp();
    let off = (perplexity / want.perplexity - 1.0).abs();
    eprintln!("{precision}: perplexity {perplexity}, reference {}, off by {off:.2e}", want.perplexity);
    assert!(off <= PERPLEXITY_TOLERANCE, "perplexity {perplexity} instead of {}", want.perplexity);
    Ok(())
}

/// The tokens that follow the sequence's, the first `n` of them.
fn answer(engine: &mut Engine, sequence: &mut Sequence, n: usize) -> Result<Vec<u32>> {
    let mut ids = vec![engine.prefill(sequence, &mut |_| true)?.context("nobody stopped it")?];
    while ids.len() < n {
        sequence.push(ids[ids.len() - 1]);
        let mut drawn = [0];
        engine.decode(&mut [&mut *sequence], &mut drawn)?;
        ids.push(drawn[0]);
    }
    Ok(ids)
}

#[test]
fn a_turn_on_a_kept_cache_gives_the_answer_of_a_fresh_sequence() -> Result<()> {
    let (files, reference) = demo()?;
    let mut engine = engine(&files, Precision::F32)?;
    let story = &reference.cases[4].ids;
    let question = &reference.cases[3].ids;
    let mut sequence = Sequence::new(story, SamplingParams::GREEDY, 256);
    let first = answer(&mut engine, &mut sequence, 40)?;
    engine.release(&mut sequence);
    let next_turn = [&story[..], &first, question].concat();
    let other_turn = [&story[..], &first[..20], question].concat();
    for params in [SamplingParams::GREEDY, SamplingParams { presence_penalty: 1.5, ..SamplingParams::GREEDY }]
    {
        let mut kept = Sequence::new(story, params, 256);
        answer(&mut engine, &mut kept, 40)?;
        for prompt in [&next_turn, &other_turn, story, question] {
            let n_common = kept.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count();
            engine.rebase(&mut kept, prompt);
            assert_eq!(kept.n_computed(), n_common.min(prompt.len() - 1));
            let on_kept = answer(&mut engine, &mut kept, 24)?;
            let mut fresh = Sequence::new(prompt, params, 256);
            assert_eq!(on_kept, answer(&mut engine, &mut fresh, 24)?);
            engine.release(&mut fresh);
        }
        engine.release(&mut kept);
    }
    Ok(())
}
