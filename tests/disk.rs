//! A model that host memory does not hold: its experts are read while it runs, from safetensors and from FTW, and the text is the
//! same; a file that cannot be read fails one request with its name and the place, and the engine lives.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_device;

use std::{
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
};

use freetoken::{
    convert::Conversion,
    engine::{Engine, EngineOptions, Sequence, sampling::SamplingParams},
    golden::{self, RATES, Ram},
    model_files::ModelFiles,
    moe::{CacheSize, ElasticOptions},
};
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

/// One for each way in which experts are stored.
const MODELS: [&str; 5] = [
    "tests/golden/qwen3_moe-bf16",
    "tests/golden/qwen3_moe-fp8-block",
    "tests/golden/qwen3_moe-nvfp4-modelopt",
    "tests/golden/qwen3_moe-nvfp4-ct",
    "tests/golden/qwen3_5_moe-bf16",
];

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap())
}

/// Options with room for so many experts of the model in host memory, and slots for some of the others on a device of its own memory.
fn options(files: &ModelFiles, device: &Arc<dyn Backend>, part: Option<Ram>) -> EngineOptions {
    let host = (!device.caps().host_memory).then(cpu);
    let elastic = ElasticOptions { rates: Some(RATES), host, ..ElasticOptions::default() };
    let options = EngineOptions { context: 512, max_sequences: 2, elastic, ..EngineOptions::default() };
    let Some(part) = part else { return options };
    let ram = Some(part.bytes(files, &**device, &options).unwrap());
    let expert_cache = (!device.caps().host_memory).then_some(CacheSize::Percent(25.0));
    EngineOptions { ram, expert_cache, ..options }
}

fn engine(dir: &Path, device: &Arc<dyn Backend>, part: Option<Ram>) -> Engine {
    let files = ModelFiles::open(Some(dir)).unwrap();
    let options = options(&files, device, part);
    files.engine(device.clone(), &options, &mut |_| ()).unwrap()
}

fn prompt(engine: &Engine, n: usize) -> Vec<u32> {
    let vocab = engine.model().sizes().vocab as u32;
    (0..n as u32).map(|i| (i * 37 + 101) % vocab).collect()
}

/// Logits of a prompt that is streamed and of one that is not, and what follows.
fn outputs(engine: &mut Engine) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
    let prompts = [200, 20, 3].map(|n| prompt(engine, n));
    let logits = prompts.iter().map(|prompt| golden::logits(engine, prompt, 128).unwrap()).collect();
    let ids = prompts.iter().map(|prompt| golden::greedy(engine, prompt, 24).unwrap()).collect();
    (logits, ids)
}

fn check(dir: &Path, device: &Arc<dyn Backend>) {
    let (logits, ids) = outputs(&mut engine(dir, device, None));
    for part in [Ram::Half, Ram::Least] {
        let mut engine = engine(dir, device, Some(part));
        let (got_logits, got_ids) = outputs(&mut engine);
        let what = format!("{} on {}, {part:?}", dir.display(), device.caps().device);
        assert_eq!(got_ids, ids, "{what}");
        for (got, want) in got_logits.iter().zip(&logits) {
            let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4, "{what}: logits differ by {worst}");
        }
        let sums = engine.elastic().unwrap().counters();
        assert!(sums.decode.disk > 0 && sums.disk.reads > sums.decode.disk, "{what}: {sums:?}");
        let record = engine.elastic().unwrap().record_bytes() as u64;
        assert_eq!(sums.disk.bytes, sums.disk.reads * record);
        println!("{what}: {} reads", sums.disk.reads);
    }
}

fn converted(model: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let files = ModelFiles::open(Some(&root(model))).unwrap();
    Conversion::plan(&files, None).unwrap().run(&dir.path().join("ftw"), false, &mut |_| ()).unwrap();
    dir
}

#[test]
fn experts_on_the_disk_change_no_output() {
    on_every_device::run(Precision::F32, |device| {
        for model in MODELS {
            check(&root(model), &device);
            check(&converted(model).path().join("ftw"), &device);
        }
    });
}

#[test]
fn many_sequences_at_once_find_their_experts() {
    let tokens = |part: Option<Ram>| {
        let mut engine = engine(&root(MODELS[0]), &cpu(), part);
        let prompts = [prompt(&engine, 9), prompt(&engine, 30)[17..].to_vec()];
        let mut sequences = prompts.map(|prompt| Sequence::new(&prompt, SamplingParams::GREEDY, 64));
        for sequence in &mut sequences {
            let token = engine.prefill(sequence, &mut |_| true).unwrap().unwrap();
            sequence.push(token);
        }
        for _ in 0..20 {
            let mut drawn = [0; 2];
            engine.decode(&mut sequences.each_mut(), &mut drawn).unwrap();
            sequences.iter_mut().zip(drawn).for_each(|(sequence, token)| sequence.push(token));
        }
        sequences.map(|sequence| sequence.tokens().to_vec())
    };
    let all = tokens(None);
    assert_eq!(tokens(Some(Ram::Half)), all);
    assert_eq!(tokens(Some(Ram::Least)), all);
}

#[test]
fn a_file_that_was_cut_fails_the_request_and_not_the_engine() {
    let dir = converted(MODELS[0]);
    let ftw = dir.path().join("ftw");
    let mut engine = engine(&ftw, &cpu(), Some(Ram::Least));
    let prompt = prompt(&engine, 20);
    let whole = golden::greedy(&mut engine, &prompt, 12).unwrap();
    // The shard of the last layer's experts: all other weights are elsewhere.
    let mut shards: Vec<PathBuf> = std::fs::read_dir(&ftw)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "ftw"))
        .collect();
    shards.sort();
    let last = shards.last().unwrap();
    let bytes = std::fs::read(last).unwrap();
    OpenOptions::new().write(true).open(last).unwrap().set_len(4096).unwrap();
    for _ in 0..2 {
        let error = format!("{:#}", golden::greedy(&mut engine, &prompt, 12).unwrap_err());
        let name = last.file_name().unwrap().to_str().unwrap();
        assert!(error.contains(name) && error.contains("byte ") && error.contains("ends before"), "{error}");
    }
    std::fs::write(last, bytes).unwrap();
    assert_eq!(golden::greedy(&mut engine, &prompt, 12).unwrap(), whole, "the engine lives");
}

#[test]
fn a_record_that_is_wrong_is_found_when_it_is_read() {
    let dir = converted("tests/golden/qwen3_moe-nvfp4-ct");
    let ftw = dir.path().join("ftw");
    let mut engine = engine(&ftw, &cpu(), Some(Ram::Least));
    let prompt = prompt(&engine, 20);
    golden::greedy(&mut engine, &prompt, 12).unwrap();
    for entry in std::fs::read_dir(&ftw).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|end| end == "ftw") && !entry.ends_with("freetoken-00000.ftw") {
            let n = std::fs::metadata(&entry).unwrap().len() as usize;
            std::fs::write(&entry, vec![0xff; n]).unwrap();
        }
    }
    let error = format!("{:#}", golden::greedy(&mut engine, &prompt, 12).unwrap_err());
    assert!(error.contains("scale") && error.contains("layers."), "{error}");
}

fn freetoken(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_freetoken"));
    command.args(args).env("FREETOKEN_HOME", home.path()).output().unwrap()
}

#[test]
fn the_command_line_runs_a_model_that_is_larger_than_its_memory() {
    let dir = root(MODELS[0]);
    let dir = dir.to_str().unwrap();
    let run = |ram: &[&str]| {
        let fixed =
            ["run", "--model", dir, "--backend", "cpu", "--prompt", "a b c d", "--raw", "--temperature", "0"];
        let output =
            freetoken(&[&fixed, &["--max-tokens", "24", "--precision", "f32", "--json"][..], ram].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (json, String::from_utf8(output.stderr).unwrap())
    };
    let (all, said) = run(&[]);
    assert!(all["experts"].is_null() && !said.contains("plan: "), "{said}");
    let files = ModelFiles::open(Some(Path::new(dir))).unwrap();
    let demand = files.plan(&*cpu(), &EngineOptions::default()).unwrap().demand;
    let half = (demand.n_experts as u64 / 2 * demand.record_bytes).to_string();
    let (part, said) = run(&["--ram", &half]);
    assert_eq!(part["text"], all["text"]);
    let experts = &part["experts"];
    assert!(
        experts["disk_reads"].as_u64() > Some(0) && experts["disk_bytes"].as_u64() > Some(0),
        "{experts}"
    );
    assert!(experts["disk_bytes_per_second"].as_f64() > Some(0.0), "{experts}");
    for part in [
        "plan: ",
        "on the disk alone",
        "the others on the disk, which reads",
        "read from the disk",
        "waited for",
    ] {
        assert!(said.contains(part), "no `{part}` in {said}");
    }
    let refused = freetoken(&["run", "--model", dir, "--backend", "cpu", "--prompt", "a", "--ram", "4096"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(1) && said.contains("the least is --ram"), "{said}");
    let inspected = freetoken(&["inspect", dir, "--backend", "cpu", "--ram", &half, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
    assert!(json["plan"]["expert_disk_bytes"].as_u64() > Some(0), "{json}");
    let inspected = freetoken(&["inspect", dir, "--backend", "cpu", "--ram", "4096"]);
    let said = String::from_utf8(inspected.stdout).unwrap();
    assert!(said.contains("cannot run") && said.contains("the least is --ram"), "{said}");
}
