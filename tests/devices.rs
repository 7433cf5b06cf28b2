//! Every device of this machine gives the golden outputs, and the demo model's text as the CPU has it.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_device;

use std::{fs, path::PathBuf, sync::Arc};

use freetoken::{
    convert::Conversion,
    engine::{Engine, EngineOptions},
    golden,
    model_files::ModelFiles,
};
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

const GOLDEN: [&str; 7] = [
    "qwen3_moe-bf16",
    "qwen3-bf16",
    "llama-bf16",
    "qwen3_5_moe-bf16",
    "qwen3_moe-fp8-block",
    "qwen3_moe-nvfp4-ct",
    "qwen3_moe-nvfp4-modelopt",
];
const PROMPT: &str = "<|im_start|>user\nTell me a story about a fox named Rusty who lost a red kite.<|im_end|>\n<|im_start|>assistant\n";
const N_TOKENS: usize = 48;
/// Two tokens whose logits lie closer may change places where activations are rounded.
const MARGIN: f32 = 0.05;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The first of them as an FTW directory, whose experts a device takes as records.
fn converted() -> tempfile::TempDir {
    let (source, out) = (path("tests/golden").join(GOLDEN[0]), tempfile::tempdir().unwrap());
    let files = ModelFiles::open(Some(&source)).unwrap();
    Conversion::plan(&files, None).unwrap().run(out.path(), false, &mut |_| ()).unwrap();
    fs::copy(source.join("expected.safetensors"), out.path().join("expected.safetensors")).unwrap();
    out
}

#[test]
fn every_device_gives_the_golden_outputs() {
    let converted = converted();
    let dirs = GOLDEN.map(|name| path("tests/golden").join(name));
    for precision in [Precision::F32, Precision::Auto] {
        on_every_device::run(precision, |device| {
            for dir in dirs.iter().map(PathBuf::as_path).chain([converted.path()]) {
                let report = golden::run(dir, &device).unwrap();
                let caps = device.caps();
                let n = report.checks.len();
                let name = dir.display();
                println!("{} ({}) {precision}: {name}: {n} checks", caps.backend, caps.device);
                assert!(report.passed(), "{} {precision} {name}\n{report}", caps.device);
            }
        });
    }
}

fn demo(device: Arc<dyn Backend>) -> (Engine, Vec<u32>) {
    let files = ModelFiles::open(Some(&path("models/demo"))).unwrap();
    let prompt = files.tokenizer().unwrap().encode(PROMPT, false).unwrap();
    let options =
        EngineOptions { context: 256, max_sequences: 1, max_chunk: Some(64), ..EngineOptions::default() };
    (files.engine(device, &options, &mut |_| ()).unwrap(), prompt)
}

#[test]
fn every_device_tells_the_story_of_the_cpu() {
    let cpu = Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap();
    let (mut engine, prompt) = demo(Arc::new(cpu));
    let story = golden::greedy(&mut engine, &prompt, N_TOKENS).unwrap();
    let logits = golden::logits(&mut engine, &[&prompt[..], &story].concat(), usize::MAX).unwrap();
    let margin = |i: usize| {
        let vocab = engine.model().sizes().vocab;
        let mut row = logits[(prompt.len() - 1 + i) * vocab..][..vocab].to_vec();
        row.sort_by(|a, b| b.total_cmp(a));
        row[0] - row[1]
    };
    for precision in [Precision::F32, Precision::Auto] {
        on_every_device::run(precision, |device| {
            let what = format!("{} ({}) {precision}", device.caps().backend, device.caps().device);
            let (mut engine, prompt) = demo(device);
            let told = golden::greedy(&mut engine, &prompt, N_TOKENS).unwrap();
            let Some(i) = told.iter().zip(&story).position(|(a, b)| a != b) else {
                println!("{what}: the same {N_TOKENS} tokens");
                return;
            };
            println!("{what}: another token at place {i}, where the margin is {:.3}", margin(i));
            assert!(precision == Precision::Auto && margin(i) < MARGIN, "{what}: differs at place {i}");
        });
    }
}
