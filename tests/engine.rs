//! The engine with several sequences: they share steps and the cache and nothing else.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

use std::{path::Path, sync::Arc};

use freetoken::{
    engine::{Engine, EngineError, EngineOptions, Sequence, sampling::SamplingParams},
    golden,
    model_files::ModelFiles,
};
use freetoken_backend::Precision;
use freetoken_cpu::{Cpu, CpuOptions};

fn engine(context: usize, max_sequences: usize) -> Engine {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let cpu = Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap();
    let options = EngineOptions { context, max_sequences, max_chunk: Some(64), ..EngineOptions::default() };
    ModelFiles::open(Some(&demo)).unwrap().engine(Arc::new(cpu), &options, &mut |_| ()).unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    [(1, 200), (2, 17), (3, 1), (4, 90), (5, 33)]
        .map(|(seed, n)| (0..n).map(|i| (i * 37 + seed * 101) % 8000).collect())
        .into()
}

#[test]
fn sequences_in_one_step_get_the_tokens_they_get_alone() {
    let mut engine = engine(512, 5);
    let alone: Vec<Vec<u32>> =
        prompts().iter().map(|p| golden::greedy(&mut engine, p, 12).unwrap()).collect();
    let mut sequences: Vec<Sequence> =
        prompts().iter().map(|p| Sequence::new(p, SamplingParams::GREEDY, p.len() + 12)).collect();
    for sequence in &mut sequences {
        let token = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
        sequence.push(token);
    }
    let mut drawn = [0; 5];
    for _ in 1..12 {
        let mut step: Vec<&mut Sequence> = sequences.iter_mut().collect();
        engine.decode(&mut step, &mut drawn).unwrap();
        sequences.iter_mut().zip(drawn).for_each(|(sequence, token)| sequence.push(token));
    }
    for ((sequence, alone), prompt) in sequences.iter().zip(alone).zip(prompts()) {
        assert_eq!(&sequence.tokens()[prompt.len()..], alone);
    }
}

#[test]
fn what_is_prepared_is_all_that_steps_need() {
    let mut engine = engine(512, 3);
    engine.prepare(3).unwrap();
    let n_programs = engine.n_programs();
    for prompt in prompts() {
        golden::greedy(&mut engine, &prompt, 3).unwrap();
    }
    let mut sequences: Vec<Sequence> =
        prompts()[..3].iter().map(|p| Sequence::new(p, SamplingParams::GREEDY, p.len() + 1)).collect();
    for sequence in &mut sequences {
        let token = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
        sequence.push(token);
    }
    engine.decode(&mut sequences.iter_mut().collect::<Vec<_>>(), &mut [0; 3]).unwrap();
    assert_eq!(engine.n_programs(), n_programs);
}

#[test]
fn a_released_sequence_leaves_room_and_no_trace() {
    let mut engine = engine(256, 1);
    let first = golden::greedy(&mut engine, &prompts()[3], 8).unwrap();
    for prompt in prompts() {
        golden::greedy(&mut engine, &prompt, 3).unwrap();
    }
    assert_eq!(golden::greedy(&mut engine, &prompts()[3], 8).unwrap(), first);
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut engine = engine(64, 1);
    let long: Vec<u32> = (0..65).collect();
    let mut sequence = Sequence::new(&long, SamplingParams::GREEDY, 65);
    let error = engine.prefill(&mut sequence, &mut |_| true).unwrap_err();
    assert!(matches!(error, EngineError::ContextFull { n_tokens: 65, context: 64 }), "{error}");
    engine.release(&mut sequence);

    let mut first = Sequence::new(&long[..64], SamplingParams::GREEDY, 64);
    engine.prefill(&mut first, &mut |_| true).unwrap();
    let mut second = Sequence::new(&long[..1], SamplingParams::GREEDY, 64);
    assert!(matches!(engine.prefill(&mut second, &mut |_| true).unwrap_err(), EngineError::CacheFull));
    engine.release(&mut first);
    engine.prefill(&mut second, &mut |_| true).unwrap();
    engine.release(&mut second);

    let mut foreign = Sequence::new(&[8192], SamplingParams::GREEDY, 1);
    let error = engine.prefill(&mut foreign, &mut |_| true).unwrap_err();
    assert!(matches!(error, EngineError::Token { id: 8192, vocab: 8192 }), "{error}");
}

#[test]
fn a_prefill_stops_where_it_is_told_to() {
    let mut engine = engine(256, 1);
    let mut sequence = Sequence::new(&prompts()[0], SamplingParams::GREEDY, 256);
    assert_eq!(engine.prefill(&mut sequence, &mut |n| n < 100).unwrap(), None);
    assert_eq!(sequence.n_computed(), 128, "two chunks of 64");
    let token = engine.prefill(&mut sequence, &mut |_| true).unwrap().unwrap();
    engine.release(&mut sequence);
    assert_eq!(golden::greedy(&mut engine, &prompts()[0], 1).unwrap(), [token]);
}
