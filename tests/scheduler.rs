//! Many requests on one engine: each gets what it would get alone, and nothing of it stays behind.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::{path::Path, sync::Arc, time::Duration};

use freetoken::{
    engine::{Division, EngineOptions, sampling::SamplingParams},
    model_files::ModelFiles,
    moe::{CacheSize, ElasticOptions},
    scheduler::{
        Ended, Event, Events, Refusal, Request, Scheduler, SchedulerOptions, Service, States, Stop, Usage,
    },
};
use freetoken_backend::{PAGE_TOKENS, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap())
}

fn scheduler_with(options: &EngineOptions, max_running: usize, max_waiting: usize) -> Scheduler {
    scheduler_of("models/demo", options, max_running, max_waiting)
}

fn scheduler_of(model: &str, options: &EngineOptions, max_running: usize, max_waiting: usize) -> Scheduler {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join(model);
    let engine = ModelFiles::open(Some(&model)).unwrap().engine(cpu(), options, &mut |_| ()).unwrap();
    Scheduler::start(engine, SchedulerOptions { max_running, max_waiting }).unwrap()
}

/// With room for so many full sequences.
fn scheduler(context: usize, n_sequences: usize, max_running: usize) -> Scheduler {
    let options = EngineOptions {
        context,
        max_sequences: max_running,
        kv_tokens: Some(n_sequences * context),
        ..EngineOptions::default()
    };
    scheduler_with(&options, max_running, 64)
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: prompt.to_vec(),
        sampling: SamplingParams::GREEDY,
        logit_bias: Vec::new(),
        max_tokens,
        eos: Vec::new(),
        logprobs: None,
        constraint: None,
        anchors: Vec::new(),
    }
}

fn prompt(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 101) % 8000).collect()
}

/// All tokens, and how it ended.
fn answer(mut events: Events) -> (Vec<u32>, Ended) {
    let mut tokens = Vec::new();
    loop {
        match events.blocking_recv().unwrap() {
            Event::Prefill { .. } => {}
            Event::Token(token) => tokens.push(token.id),
            Event::Ended(ended) => return (tokens, ended),
            Event::Failed(why) => panic!("{why}"),
        }
    }
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("not within ten seconds: {what}");
}

#[test]
fn each_request_gets_what_it_gets_alone() {
    let sampled = SamplingParams {
        temperature: 0.9,
        top_p: 0.9,
        frequency_penalty: 0.5,
        seed: 7,
        ..SamplingParams::GREEDY
    };
    let make = |i: u32| {
        let sampling = if i.is_multiple_of(2) { SamplingParams::GREEDY } else { sampled };
        let logprobs = i.is_multiple_of(3).then_some(2);
        let n = [200, 17, 1, 90, 33, 64][i as usize];
        Request { sampling, logprobs, ..request(&prompt(i, n), 12) }
    };
    let alone: Vec<_> = (0..6).map(|i| answer(scheduler(512, 1, 1).submit(make(i)).unwrap()).0).collect();
    let scheduler = scheduler(512, 4, 4);
    let together: Vec<Events> = (0..6).map(|i| scheduler.submit(make(i)).unwrap()).collect();
    for (events, alone) in together.into_iter().zip(alone) {
        let (tokens, ended) = answer(events);
        assert_eq!((tokens.as_slice(), ended.stop), (alone.as_slice(), Stop::Length));
        assert_eq!(ended.usage.completion_tokens, 12);
    }
    let stats = scheduler.stats();
    assert_eq!((stats.n_ended, stats.n_running, stats.n_waiting, stats.decoded_tokens), (6, 0, 0, 72));
    assert_eq!(stats.cache.kv_tokens_running, 0);
}

#[test]
fn a_common_beginning_is_computed_once() {
    let scheduler = scheduler(512, 2, 2);
    let first = prompt(1, 100);
    let (tokens, ended) = answer(scheduler.submit(request(&first, 30)).unwrap());
    assert_eq!(ended.usage, Usage { prompt_tokens: 100, cached_tokens: 0, completion_tokens: 30 });
    let again = answer(scheduler.submit(request(&first, 30)).unwrap());
    assert_eq!((&again.0, again.1.usage.cached_tokens), (&tokens, 96));
    // The next turn: the answer is part of the prompt, and was computed as it was drawn.
    let turn: Vec<u32> = first.iter().chain(&tokens).copied().chain(prompt(9, 20)).collect();
    let (continued, ended) = answer(scheduler.submit(request(&turn, 8)).unwrap());
    assert_eq!(ended.usage.cached_tokens, 129);
    // Another beginning, then another end.
    let mut other = turn.clone();
    other[50] += 1;
    assert_eq!(answer(scheduler.submit(request(&other, 2)).unwrap()).1.usage.cached_tokens, 48);
    let fresh = self::scheduler(512, 1, 1);
    assert_eq!(answer(fresh.submit(request(&turn, 8)).unwrap()).0, continued);
}

#[test]
fn a_client_that_leaves_frees_its_pages_wherever_it_was() {
    let scheduler = scheduler(512, 2, 1);
    let mut decoding = scheduler.submit(request(&prompt(1, 40), 400)).unwrap();
    while !matches!(decoding.blocking_recv().unwrap(), Event::Token(_)) {}
    let waiting = scheduler.submit(request(&prompt(2, 40), 400)).unwrap();
    until("it waits", || scheduler.stats().n_waiting == 1);
    drop(waiting);
    until("the queue is empty", || scheduler.stats().n_waiting == 0);
    drop(decoding);
    until("nothing runs", || scheduler.stats().n_running == 0);
    let mut reading = scheduler.submit(request(&prompt(3, 500), 4)).unwrap();
    assert!(matches!(reading.blocking_recv().unwrap(), Event::Prefill { n_computed: 0, .. }));
    drop(reading);
    until("nothing runs", || scheduler.stats().n_ended == 3);
    let stats = scheduler.stats();
    assert_eq!((stats.n_cancelled, stats.cache.kv_tokens_running), (3, 0));
    assert_eq!(answer(scheduler.submit(request(&prompt(4, 400), 3)).unwrap()).0.len(), 3);
}

#[test]
fn where_room_runs_out_the_youngest_waits_and_all_texts_are_the_same() {
    let requests = || (0..4).map(|i| request(&prompt(i, 60), 150));
    let alone: Vec<_> =
        requests().map(|request| answer(scheduler(256, 1, 1).submit(request).unwrap()).0).collect();
    // 32 pages, and 4 x 14 are wanted.
    let scheduler = scheduler(256, 2, 4);
    let together: Vec<Events> = requests().map(|request| scheduler.submit(request).unwrap()).collect();
    until("all run at first", || scheduler.stats().n_running == 4);
    for (events, alone) in together.into_iter().zip(alone) {
        let (tokens, ended) = answer(events);
        assert_eq!(tokens, alone);
        assert_eq!(ended.usage, Usage { prompt_tokens: 60, cached_tokens: 0, completion_tokens: 150 });
    }
    assert_eq!(scheduler.stats().cache.kv_tokens_running, 0);
}

#[test]
fn others_decode_while_a_long_prompt_is_read() {
    let scheduler = scheduler(1024, 2, 2);
    let mut decoding = scheduler.submit(request(&prompt(1, 20), 1000)).unwrap();
    while !matches!(decoding.blocking_recv().unwrap(), Event::Token(_)) {}
    let mut reading = scheduler.submit(request(&prompt(2, 1000), 1)).unwrap();
    let mut n_pieces = 0;
    while let Some(Event::Prefill { .. }) = reading.blocking_recv() {
        n_pieces += 1;
    }
    let mut n_between = 0;
    while let Ok(event) = decoding.try_recv() {
        n_between += usize::from(matches!(event, Event::Token(_)));
    }
    assert!(n_pieces > 4, "{n_pieces} pieces");
    assert!(n_between + 2 >= n_pieces, "{n_between} tokens beside {n_pieces} pieces of the prompt");
}

#[test]
fn a_full_queue_and_a_prompt_without_room_are_refused() {
    let options = EngineOptions { context: 128, ..EngineOptions::default() };
    let scheduler = scheduler_with(&options, 1, 1);
    let too_long = scheduler.submit(request(&prompt(1, 128), 1)).err();
    assert_eq!(too_long, Some(Refusal::TooLong { n_tokens: 128, context: 128 }));
    let _running = scheduler.submit(request(&prompt(1, 20), 100)).unwrap();
    until("it runs", || scheduler.stats().n_running == 1);
    let _waiting = scheduler.submit(request(&prompt(2, 20), 100)).unwrap();
    let full = scheduler.submit(request(&prompt(3, 20), 100)).err();
    assert!(matches!(full, Some(Refusal::Full { n_waiting: 1, .. })), "{full:?}");
}

#[test]
fn a_token_that_ends_the_answer_is_the_last_one() {
    let scheduler = scheduler(256, 1, 1);
    let (tokens, _) = answer(scheduler.submit(request(&prompt(1, 30), 20)).unwrap());
    let first = tokens.iter().position(|&token| token == tokens[7]).unwrap();
    let ends = Request { eos: vec![tokens[7]], ..request(&prompt(1, 30), 20) };
    let (cut, ended) = answer(scheduler.submit(ends).unwrap());
    assert_eq!((cut.as_slice(), ended.stop), (&tokens[..=first], Stop::Eos));
}

#[test]
fn memory_is_divided_anew_while_requests_run_and_no_text_changes() {
    let elastic = ElasticOptions { host: Some(cpu()), in_place: false, ..ElasticOptions::default() };
    let options = EngineOptions {
        context: 512,
        max_sequences: 2,
        expert_cache: Some(CacheSize::Percent(40.0)),
        elastic,
        ..EngineOptions::default()
    };
    let run = |divide: bool| {
        let scheduler = scheduler_with(&options, 2, 8);
        let both = [(1, 150), (2, 300)].map(|(i, n)| scheduler.submit(request(&prompt(i, n), 60)).unwrap());
        if divide {
            until("both run", || scheduler.stats().n_running == 2);
            let little = Division { kv_tokens: Some(PAGE_TOKENS), ..Division::default() };
            assert!(scheduler.divide(little).unwrap_err().contains("running sequences"));
            for (slots, kv_tokens) in [(8, 1024), (30, 768), (16, 1024)] {
                std::thread::sleep(Duration::from_millis(20));
                let division =
                    Division { expert_slots: Some(slots), kv_tokens: Some(kv_tokens), ..Division::default() };
                let cache = scheduler.divide(division).unwrap();
                assert_eq!((cache.experts.unwrap().n_slots, cache.kv_tokens), (slots, kv_tokens));
            }
        }
        both.map(|events| answer(events).0)
    };
    assert_eq!(run(true), run(false));
}

/// The golden checkpoint with recurrent layers, and so many slots for states on the device.
fn recurrent(state_slots: usize) -> Scheduler {
    let options = EngineOptions { context: 512, max_sequences: 2, state_slots, ..EngineOptions::default() };
    scheduler_of("tests/golden/qwen3_5_moe-f32", &options, 2, 8)
}

/// Tokens of its vocabulary.
fn small(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * 37 + seed * 101) % 300).collect()
}

fn anchored(prompt: &[u32], anchors: &[usize]) -> Request {
    Request { anchors: anchors.to_vec(), ..request(prompt, 10) }
}

#[test]
fn a_recurrent_model_goes_on_from_the_states_that_were_kept() {
    for state_slots in [0, 2, 32] {
        let states = goes_on_from_states(state_slots);
        assert_eq!(
            (states.slot_hits > 0, states.host_hits > 0),
            (state_slots > 0, state_slots < 32),
            "{states:?}"
        );
        assert_eq!((states.n_slots, states.spilled > 0), (state_slots, state_slots == 2), "{states:?}");
        assert_eq!(states.slot_hits + states.host_hits, 5, "{states:?}");
    }
}

fn goes_on_from_states(state_slots: usize) -> States {
    let fresh = |prompt: &[u32]| answer(recurrent(0).submit(request(prompt, 10)).unwrap()).0;
    let scheduler = recurrent(state_slots);
    let system = small(1, 50);
    let first: Vec<u32> = system.iter().copied().chain(small(2, 60)).collect();
    let (tokens, ended) = answer(scheduler.submit(anchored(&first, &[50])).unwrap());
    assert_eq!((&tokens, ended.usage.cached_tokens), (&fresh(&first), 0));
    // The next turn goes on from the very end.
    let turn: Vec<u32> = first.iter().chain(&tokens).copied().chain(small(3, 20)).collect();
    let (continued, ended) = answer(scheduler.submit(anchored(&turn, &[50, 120])).unwrap());
    assert_eq!((&continued, ended.usage.cached_tokens), (&fresh(&turn), first.len() + 9));
    // An edited end, from the end of the prompt before it; another conversation, from the end of what both begin with.
    let mut edited = turn.clone();
    edited[112] += 1;
    let (text, ended) = answer(scheduler.submit(anchored(&edited, &[50, 120])).unwrap());
    assert_eq!((&text, ended.usage.cached_tokens), (&fresh(&edited), 96));
    let other: Vec<u32> = system.iter().copied().chain(small(9, 40)).collect();
    let (text, ended) = answer(scheduler.submit(anchored(&other, &[50])).unwrap());
    assert_eq!((&text, ended.usage.cached_tokens), (&fresh(&other), 48));
    // Two at once under the same beginning.
    let both =
        [small(11, 30), small(12, 30)].map(|end| system.iter().copied().chain(end).collect::<Vec<u32>>());
    let events = both.each_ref().map(|prompt| scheduler.submit(request(prompt, 10)).unwrap());
    for (events, prompt) in events.into_iter().zip(&both) {
        let (text, ended) = answer(events);
        assert_eq!((&text, ended.usage.cached_tokens), (&fresh(prompt), 48));
    }
    scheduler.stats().cache.states.unwrap()
}

#[test]
fn kept_states_follow_a_division_of_the_memory() {
    let scheduler = recurrent(4);
    let first = [small(1, 50), small(2, 60)].concat();
    let found = |prompt: &[u32]| answer(scheduler.submit(anchored(prompt, &[50])).unwrap());
    let states = |state_slots, state_cache_bytes| {
        scheduler
            .divide(Division { state_slots, state_cache_bytes, ..Division::default() })
            .unwrap()
            .states
            .unwrap()
    };
    let (text, _) = found(&first);
    let before = scheduler.stats().cache.states.unwrap();
    assert_eq!((before.n_in_slots, before.n_in_host), (3, 0), "behind 48 tokens, 96, and all: {before:?}");
    // The coldest two move.
    let one = states(Some(1), None);
    assert_eq!((one.n_slots, one.n_in_slots, one.n_in_host, one.spilled), (1, 1, 2, 2), "{one:?}");
    let (again, ended) = found(&first);
    assert_eq!((&again, ended.usage.cached_tokens), (&text, 96));
    // Room for one: it is the one that was used.
    let none = states(Some(0), Some(before.state_bytes as usize));
    assert_eq!((none.n_slots, none.n_host, none.n_in_host, none.dropped), (0, 1, 1, 2), "{none:?}");
    assert_eq!(found(&first).1.usage.cached_tokens, 96);
    // Slots again, and nothing else.
    let before = states(Some(3), Some(0));
    assert_eq!((before.n_slots, before.n_host, before.n_in_host), (3, 0, 0), "{before:?}");
    let texts = [found(&first).0, found(&first).0];
    assert_eq!(texts, [text.clone(), text]);
    assert_eq!(scheduler.stats().cache.states.unwrap().slot_hits, before.slot_hits + 1);
    let too_many = Division { state_slots: Some(1 << 40), ..Division::default() };
    let error = scheduler.divide(too_many).unwrap_err();
    assert!(error.contains("more device memory") && error.contains("states of recurrent layers"), "{error}");
    let text_of_other = found(&small(9, 80)).0;
    assert_eq!(text_of_other, answer(recurrent(0).submit(request(&small(9, 80), 10)).unwrap()).0);
}

#[test]
fn what_was_read_of_a_prompt_whose_client_left_is_found() {
    let [attention, with_states]: [fn() -> Scheduler; 2] = [|| scheduler(1024, 2, 2), || recurrent(2)];
    for (start, long) in [(attention, prompt(3, 900)), (with_states, small(3, 450))] {
        let fresh = answer(start().submit(request(&long, 10)).unwrap()).0;
        let scheduler = start();
        // Beside it the prompt is read in pieces.
        let mut decoding = scheduler.submit(request(&small(4, 20), 400)).unwrap();
        while !matches!(decoding.blocking_recv().unwrap(), Event::Token(_)) {}
        let mut reading = scheduler.submit(request(&long, 10)).unwrap();
        let n_read = loop {
            match reading.blocking_recv().unwrap() {
                Event::Prefill { n_computed, .. } if n_computed > 0 => break n_computed,
                _ => {}
            }
        };
        drop((reading, decoding));
        until("nothing runs", || scheduler.stats().n_ended == 2);
        let (text, ended) = answer(scheduler.submit(request(&long, 10)).unwrap());
        assert_eq!(text, fresh);
        let n_found = ended.usage.cached_tokens;
        assert!(n_found >= n_read / PAGE_TOKENS * PAGE_TOKENS, "{n_found} of {n_read} tokens");
    }
}
