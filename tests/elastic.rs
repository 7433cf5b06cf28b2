//! Experts behind a cache, end to end on the CPU backend with its experts in banks: the cache changes its size under a running
//! text, what cannot be honoured is refused in words, a step that fails leaves the engine usable.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

use std::{path::Path, sync::Arc};

use freetoken::{
    engine::{Division, Engine, EngineOptions, Sequence, sampling::SamplingParams},
    golden,
    model_files::ModelFiles,
    moe::{CacheSize, ElasticOptions, Mode, Rates},
};
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap())
}

fn open(model: &str, options: EngineOptions) -> Result<Engine, String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(model);
    let options = EngineOptions { context: 512, max_sequences: 4, ..options };
    ModelFiles::open(Some(&dir)).unwrap().engine(cpu(), &options, &mut |_| ()).map_err(|e| e.to_string())
}

fn demo(options: EngineOptions) -> Result<Engine, String> {
    open("models/demo", options)
}

fn cached(slots: usize, elastic: ElasticOptions) -> Result<Engine, String> {
    demo(EngineOptions { expert_cache: Some(CacheSize::Slots(slots)), elastic, ..EngineOptions::default() })
}

fn with_host() -> ElasticOptions {
    ElasticOptions { host: Some(cpu()), ..ElasticOptions::default() }
}

fn prompt() -> Vec<u32> {
    (0..70).map(|i| (i * 37 + 101) % 8000).collect()
}

#[test]
fn a_cache_that_changes_its_size_does_not_change_the_text() {
    let resident = golden::greedy(&mut demo(EngineOptions::default()).unwrap(), &prompt(), 40).unwrap();
    let mut engine = cached(60, with_host()).unwrap();
    let mut sequence = Sequence::new(&prompt(), SamplingParams::GREEDY, 200);
    let mut told = vec![engine.prefill(&mut sequence, &mut |_| true).unwrap().unwrap()];
    for i in 1..40 {
        if i % 5 == 0 {
            let expert_slots = Some([8, 100, 3, 30, 0, 192, 17][i / 5 - 1]);
            let kv_tokens = Some([200, 2000, 160, 300, 111, 1000, 400][i / 5 - 1]);
            engine
                .divide(Division { expert_slots, kv_tokens, ..Division::default() }, &mut [&mut sequence])
                .unwrap();
        }
        sequence.push(told[i - 1]);
        let mut drawn = [0];
        engine.decode(&mut [&mut sequence], &mut drawn).unwrap();
        told.push(drawn[0]);
    }
    assert_eq!(told, resident);
}

#[test]
fn what_is_prepared_is_all_that_steps_behind_a_cache_need() {
    for (slots, host) in [(60, with_host()), (60, ElasticOptions::default()), (0, with_host())] {
        let mut engine = cached(slots, host).unwrap();
        engine.prepare(1).unwrap();
        let n_programs = engine.n_programs();
        for n in [1, 2, 15, 16, 17, 33, 63, 64, 65, 70] {
            golden::greedy(&mut engine, &prompt()[..n], 3).unwrap();
        }
        assert_eq!(engine.n_programs(), n_programs, "{slots} slots");
    }
}

#[test]
fn a_division_that_does_not_fit_changes_nothing() {
    let mut engine = cached(30, with_host()).unwrap();
    let mut sequence = Sequence::new(&prompt(), SamplingParams::GREEDY, 200);
    engine.prefill(&mut sequence, &mut |_| true).unwrap();
    let asked = |kv_tokens| Division { kv_tokens: Some(kv_tokens), ..Division::default() };
    let error = engine.divide(asked(64), &mut [&mut sequence]).unwrap_err().to_string();
    assert!(error.contains("64 tokens") && error.contains("80 tokens"), "{error}");
    let error = engine.divide(asked(1 << 40), &mut [&mut sequence]).unwrap_err().to_string();
    assert!(error.contains("more device memory") && error.contains("tokens"), "{error}");
    engine.divide(asked(80), &mut [&mut sequence]).unwrap();
}

/// Rates at which asking the host costs too much: steps read their misses in place.
fn rates() -> Rates {
    Rates {
        link_alone: 1e9,
        link_shared: 1e9,
        host_alone: 1e9,
        host_shared: 1e9,
        device_read: 1e10,
        host_flops: 1e9,
        reply_seconds: 1.0,
        wake_seconds: 0.0,
        combine_seconds: 0.0,
        fetch_seconds: 0.0,
        copy_lane: false,
    }
}

#[test]
fn a_second_turn_follows_steps_that_asked_nobody() {
    let conversation = |engine: &mut Engine| {
        let mut sequence = Sequence::new(&prompt()[..20], SamplingParams::GREEDY, 200);
        let mut told = Vec::new();
        for turn in 0..4 {
            let mut token = engine.prefill(&mut sequence, &mut |_| true).unwrap().unwrap();
            for _ in 0..6 {
                told.push(token);
                sequence.push(token);
                let mut drawn = [0];
                engine.decode(&mut [&mut sequence], &mut drawn).unwrap();
                token = drawn[0];
            }
            told.push(token);
            let next: Vec<u32> = [sequence.tokens(), &prompt()[40 + turn..43 + 2 * turn]].concat();
            engine.rebase(&mut sequence, &next);
        }
        engine.release(&mut sequence);
        told
    };
    let resident = conversation(&mut demo(EngineOptions::default()).unwrap());
    let mut engine = cached(40, ElasticOptions { rates: Some(rates()), ..with_host() }).unwrap();
    assert_eq!(conversation(&mut engine), resident);
    let sums = engine.elastic().unwrap().counters();
    assert!(sums.decode.behind > 0 && sums.decode.in_place > 0 && sums.prompts.points > 0, "{sums:?}");
}

#[test]
fn slots_can_come_where_there_were_none() {
    let resident = golden::greedy(&mut demo(EngineOptions::default()).unwrap(), &prompt(), 24).unwrap();
    let mut engine = cached(0, ElasticOptions { mode: Mode::Share(0.5), ..with_host() }).unwrap();
    engine.divide(Division { expert_slots: Some(150), ..Division::default() }, &mut []).unwrap();
    assert_eq!(golden::greedy(&mut engine, &prompt(), 24).unwrap(), resident);
    let elastic = engine.elastic().unwrap();
    assert!(elastic.n_ring() > 2 && elastic.counters().decode.fetched > 0, "{:?}", elastic.counters());
}

#[test]
fn the_mode_can_change_between_steps() {
    let resident = golden::greedy(&mut demo(EngineOptions::default()).unwrap(), &prompt(), 24).unwrap();
    let mut engine = cached(48, with_host()).unwrap();
    for mode in [Mode::Auto, Mode::Gpu, Mode::Cpu, Mode::Hybrid, Mode::Share(0.4)] {
        engine.set_experts_mode(mode).unwrap();
        assert_eq!(golden::greedy(&mut engine, &prompt(), 24).unwrap(), resident, "{mode:?}");
    }
}

#[test]
fn what_cannot_be_honoured_is_refused_in_words() {
    // Neither a host nor reading in place: the top-k must fit.
    let fetched = |slots| {
        let elastic = ElasticOptions { in_place: false, mode: Mode::Gpu, ..ElasticOptions::default() };
        cached(slots, elastic)
    };
    let error = golden::greedy(&mut fetched(2).unwrap(), &prompt()[..3], 2).unwrap_err();
    assert!(format!("{error:#}").contains("2 slots"), "{error:#}");
    let error = cached(0, ElasticOptions { in_place: false, mode: Mode::Gpu, ..ElasticOptions::default() })
        .err()
        .expect("nothing can be done with a miss");
    assert!(error.contains("--experts"), "{error}");
    let error = cached(4, ElasticOptions { mode: Mode::Hybrid, ..ElasticOptions::default() }).err().unwrap();
    assert!(error.contains("host"), "{error}");
    let vram = EngineOptions {
        vram: Some(1 << 60),
        expert_cache: Some(CacheSize::Slots(4)),
        ..EngineOptions::default()
    };
    let error = demo(vram).err().unwrap();
    assert!(error.contains("--vram") && error.contains("largest that fits"), "{error}");
}

#[test]
fn a_step_that_fails_leaves_the_engine_usable() {
    let elastic = ElasticOptions { in_place: false, mode: Mode::Gpu, ..ElasticOptions::default() };
    let mut engine = cached(8, elastic).unwrap();
    let alone = golden::greedy(&mut engine, &prompt()[..20], 6).unwrap();
    // Together they want more experts at once than there are slots.
    let mut sequences = [0, 30, 50].map(|i| Sequence::new(&prompt()[i..i + 8], SamplingParams::GREEDY, 20));
    for sequence in &mut sequences {
        let token = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
        sequence.push(token);
    }
    let mut step: Vec<&mut Sequence> = sequences.iter_mut().collect();
    assert!(engine.decode(&mut step, &mut [0; 3]).is_err());
    sequences.iter_mut().for_each(|sequence| engine.release(sequence));
    assert_eq!(golden::greedy(&mut engine, &prompt()[..20], 6).unwrap(), alone);
}

#[test]
fn a_recurrent_sequence_begins_anew_behind_a_step_that_failed() {
    let elastic = ElasticOptions { in_place: false, mode: Mode::Gpu, ..ElasticOptions::default() };
    let expert_cache = Some(CacheSize::Slots(2));
    let options = EngineOptions { expert_cache, elastic, ..EngineOptions::default() };
    let mut engine = open("tests/golden/qwen3_5_moe-bf16", options).unwrap();
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| (i..i + 20).map(|t| t * 37 % 311).collect()).collect();
    let mut sequences: Vec<Sequence> =
        prompts.iter().map(|prompt| Sequence::new(prompt, SamplingParams::GREEDY, 64)).collect();
    for sequence in &mut sequences {
        let token = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
        sequence.push(token);
    }
    let mut step: Vec<&mut Sequence> = sequences.iter_mut().collect();
    assert!(engine.decode(&mut step, &mut [0; 3]).is_err());
    for sequence in &mut sequences {
        assert_eq!((sequence.n_computed(), sequence.pending().len()), (0, 21));
        let again = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
        let tokens = sequence.tokens().to_vec();
        engine.release(sequence);
        assert_eq!(golden::greedy(&mut engine, &tokens, 1).unwrap(), [again]);
    }
}

/// A client leaves while a chunk of its prompt is half way through the layers: what was computed before is found by the next one.
#[test]
fn a_chunk_that_is_abandoned_leaves_what_was_computed_before_it() {
    let n_chunk = 48;
    for (model, vocab) in [("tests/golden/qwen3_5_moe-bf16", 311), ("models/demo", 8000)] {
        let prompt: Vec<u32> = (0..150).map(|i| (i * 37 + 5) % vocab).collect();
        let fresh = golden::greedy(&mut open(model, EngineOptions::default()).unwrap(), &prompt, 8).unwrap();
        let elastic = ElasticOptions { in_place: false, mode: Mode::Gpu, ..ElasticOptions::default() };
        let expert_cache = Some(CacheSize::Slots(12));
        let options = EngineOptions { expert_cache, elastic, state_slots: 1, ..EngineOptions::default() };
        let mut engine = open(model, options).unwrap();
        let mut sequence = Sequence::new(&prompt, SamplingParams::GREEDY, 200);
        assert!(engine.streams(n_chunk));
        engine.compute(&mut sequence, n_chunk).unwrap();
        assert!(!engine.compute_unit(&mut sequence, n_chunk).unwrap(), "one layer of several");
        engine.abandon(&mut sequence);
        assert_eq!(sequence.n_computed(), n_chunk);
        engine.end(&mut sequence).unwrap();
        let mut next = Sequence::new(&prompt, SamplingParams::GREEDY, 200);
        assert_eq!(engine.adopt(&mut next).unwrap(), n_chunk, "{model}");
        let mut told = vec![engine.prefill(&mut next, &mut |_| true).unwrap().unwrap()];
        while told.len() < 8 {
            next.push(told[told.len() - 1]);
            let mut drawn = [0];
            engine.decode(&mut [&mut next], &mut drawn).unwrap();
            told.push(drawn[0]);
        }
        assert_eq!(told, fresh, "{model}");
    }
}

#[test]
fn a_second_prompt_finds_experts_of_the_first() {
    let mut engine = cached(150, with_host()).unwrap();
    // Long enough to be streamed.
    let prompt = prompt().repeat(3);
    golden::greedy(&mut engine, &prompt, 8).unwrap();
    let first = engine.elastic().unwrap().counters();
    golden::greedy(&mut engine, &prompt, 8).unwrap();
    let second = engine.elastic().unwrap().counters().prefill.since(&first.prefill);
    assert!(second.n_hits > second.n_fetched, "{second:?} behind {first:?}");
}
