//! A decode step allocates nothing: counted by the allocator itself, with penalties and random draws on.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]
#![allow(unsafe_code, reason = "a global allocator is an unsafe trait; this one forwards to the system's")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use freetoken::{
    convert::Conversion,
    engine::{EngineOptions, Sequence, sampling::SamplingParams},
    model_files::ModelFiles,
    moe::{CacheSize, ElasticOptions, Mode},
};
use freetoken_backend::Precision;
use freetoken_cpu::{Cpu, CpuOptions};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Kinds of steps, and how exactly.
type Kind = (Precision, &'static str);

const KINDS: [Kind; 4] = [
    (Precision::F32, "resident"),
    (Precision::Auto, "resident"),
    (Precision::Auto, "co-executed"),
    (Precision::Auto, "in place"),
];

/// Engines of every kind of step: all experts in place, and behind a cache with a host that computes, or read in place, or from a
/// disk.
fn options(kind: &str, slots: usize, precision: Precision) -> EngineOptions {
    let options = EngineOptions { context: 512, max_sequences: 2, ..EngineOptions::default() };
    let elastic = match kind {
        "resident" => return options,
        // Half of the demo model's experts.
        "from a disk" => return EngineOptions { ram: Some(96 * (72 << 10)), ..options },
        "co-executed" => ElasticOptions {
            mode: Mode::Share(0.5),
            host: Some(Arc::new(Cpu::new(CpuOptions { threads: Some(1), precision }).unwrap())),
            ..ElasticOptions::default()
        },
        _ => ElasticOptions { mode: Mode::Gpu, ..ElasticOptions::default() },
    };
    EngineOptions { expert_cache: Some(CacheSize::Slots(slots)), elastic, ..options }
}

#[test]
fn a_decode_step_allocates_nothing() {
    // Some of the experts of each model have slots.
    for (model, slots) in [("models/demo", 60), ("tests/golden/qwen3_5_moe-bf16", 12)] {
        allocates_nothing(&Path::new(env!("CARGO_MANIFEST_DIR")).join(model), slots, &KINDS);
    }
    let dir = tempfile::tempdir().unwrap();
    let demo = ModelFiles::open(Some(&Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo"))).unwrap();
    let ftw = dir.path().join("demo");
    Conversion::plan(&demo, None).unwrap().run(&ftw, false, &mut |_| ()).unwrap();
    allocates_nothing(&ftw, 0, &[(Precision::Auto, "from a disk")]);
}

fn allocates_nothing(model: &Path, slots: usize, kinds: &[Kind]) {
    let files = ModelFiles::open(Some(model)).unwrap();
    let sampled = SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        seed: 7,
        ..SamplingParams::GREEDY
    };
    for &(precision, kind) in kinds {
        let cpu = Cpu::new(CpuOptions { threads: Some(2), precision }).unwrap();
        let mut engine = files.engine(Arc::new(cpu), &options(kind, slots, precision), &mut |_| ()).unwrap();
        let prompt: Vec<u32> = (100..140).collect();
        let mut first = Sequence::new(&prompt, sampled, 512);
        let mut second = Sequence::new(&prompt[..7], SamplingParams::GREEDY, 512);
        for sequence in [&mut first, &mut second] {
            let token = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
            sequence.push(token);
        }
        let mut drawn = [0; 2];
        // The first step records the program of its bucket.
        engine.decode(&mut [&mut first, &mut second], &mut drawn).unwrap();
        let mut hundred_steps = || {
            let before = ALLOCATIONS.load(Ordering::Relaxed);
            for _ in 0..100 {
                first.push(drawn[0]);
                second.push(drawn[1]);
                engine.decode(&mut [&mut first, &mut second], &mut drawn).unwrap();
            }
            ALLOCATIONS.load(Ordering::Relaxed) - before
        };
        // A worker thread that starts late allocates once; a step that allocates does so every time.
        let fewest = (0..3).map(|_| hundred_steps()).min();
        assert_eq!(
            fewest,
            Some(0),
            "allocations in 100 decode steps of {}, {kind}, precision {precision}",
            model.display()
        );
    }
}
