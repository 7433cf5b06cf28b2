//! `convert`: what comes out is what went in, wherever the work is cut off, and what cannot be done ends in a sentence.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::Arc,
};

use freetoken::{
    convert::Conversion,
    formats::{
        Checkpoint, FormatError,
        ftw::{INDEX_FILE, JOURNAL_FILE},
    },
    golden,
    model_files::ModelFiles,
    models::{self, Inventory, LoadedExperts, Weights},
};
use freetoken_backend::{Backend, Format, Precision, record};
use freetoken_cpu::{Cpu, CpuOptions};
use serde_json::Value;

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

const MOE: [&str; 8] = [
    "golden/qwen3_moe-bf16",
    "golden/qwen3_moe-fp8-block",
    "golden/qwen3_moe-nvfp4-ct",
    "golden/qwen3_moe-nvfp4-modelopt",
    "golden/qwen3_5_moe-bf16",
    "golden/qwen3_5_moe-fp8-block",
    "golden/qwen3_5_moe-nvfp4-ct",
    "golden/qwen3_5_moe-nvfp4-modelopt",
];
const FTW: [&str; 2] = ["ftw/qwen3_moe-bf16", "ftw/qwen3_moe-nvfp4"];

fn convert(from: &Path, out: &Path, quantised: Option<Format>, force: bool) -> Result<(), String> {
    convert_watched(from, out, quantised, force, &mut |_| ())
}

fn convert_watched(
    from: &Path,
    out: &Path,
    quantised: Option<Format>,
    force: bool,
    progress: &mut dyn FnMut(u64),
) -> Result<(), String> {
    let files = ModelFiles::open(Some(from)).map_err(|error| error.to_string())?;
    let conversion = Conversion::plan(&files, quantised).map_err(|error| error.to_string())?;
    conversion.run(out, force, progress).map_err(|error| error.to_string())
}

/// Names and contents of the files of a directory.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

fn put(dir: &Path, files: &BTreeMap<String, Vec<u8>>) {
    for (name, bytes) in files {
        fs::write(dir.join(name), bytes).unwrap();
    }
}

/// The records of all experts, layer by layer, and their format.
fn banks(dir: &Path) -> (Option<Format>, Vec<Vec<u8>>) {
    let files = ModelFiles::open(Some(dir)).unwrap();
    let (cpu, mut heard) = (Cpu::reference(), |_| ());
    let mut weights = Weights::new(&cpu, files.checkpoint(), &mut heard).with_banks();
    models::load(&files.config(), &mut weights).unwrap();
    let LoadedExperts::Banked(banks) = weights.into_experts() else { unreachable!("banks were asked for") };
    let layers = banks.layers().iter().map(|bank| bank.as_slice().to_vec()).collect();
    (banks.record().map(|record| record.format), layers)
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap())
}

#[test]
fn what_comes_out_is_what_went_in_to_the_bit() {
    for name in MOE.into_iter().chain(FTW).chain(["golden/qwen3-bf16", "golden/llama-bf16"]) {
        let (from, out) = (source(name), tempfile::tempdir().unwrap());
        let mut heard = 0;
        convert_watched(&from, out.path(), None, false, &mut |bytes| heard += bytes).unwrap();
        let (before, after) = (Checkpoint::open(&from).unwrap(), Checkpoint::open(out.path()).unwrap());
        let mut n = 0;
        for name in after.tensor_names() {
            let (a, b) = (before.tensor(name).unwrap(), after.tensor(name).unwrap());
            assert_eq!(
                (a.dtype, &a.shape, a.bytes.as_slice()),
                (b.dtype, &b.shape, b.bytes.as_slice()),
                "{name}"
            );
            n += 1;
        }
        assert!(n > 10 && !after.tensor_names().any(|name| name.contains(".experts.")));
        assert_eq!(banks(&from), banks(out.path()), "{name}");
        // Nothing is lost on the way through the inventory either.
        let files = |dir: &Path| ModelFiles::open(Some(dir)).unwrap();
        let params = |files: &ModelFiles| {
            let inventory =
                Inventory::of_checkpoint(&files.config(), files.checkpoint(), &Cpu::reference()).unwrap();
            (inventory.n_params(), inventory.n_active_params(), inventory.expert_format)
        };
        assert_eq!(params(&files(&from)), params(&files(out.path())), "{name}");
        assert_eq!(heard, after.total_bytes());
        for beside in ["config.json", "expected.json"] {
            assert_eq!(fs::read(from.join(beside)).unwrap(), fs::read(out.path().join(beside)).unwrap());
        }
        // And once more from there.
        let again = tempfile::tempdir().unwrap();
        convert(out.path(), again.path(), None, false).unwrap();
        assert_eq!(contents(out.path()), contents(again.path()));
    }
}

#[test]
fn converted_checkpoints_give_the_golden_outputs_wherever_experts_are() {
    for name in MOE {
        let out = tempfile::tempdir().unwrap();
        convert(&source(name), out.path(), None, false).unwrap();
        fs::copy(source(name).join("expected.safetensors"), out.path().join("expected.safetensors")).unwrap();
        for placement in golden::PLACEMENTS {
            let (device, host) = (cpu(), cpu());
            let report = golden::run_placed(out.path(), &device, &host, placement).unwrap();
            assert!(report.passed(), "{name}, {}\n{report}", placement.name);
        }
    }
}

#[test]
fn experts_are_rounded_and_nothing_else() {
    let sources = [("golden/qwen3_moe-bf16", 2), ("golden/qwen3_5_moe-bf16", 4)];
    let formats = [(Format::Nvfp4, 0.4), (Format::Mxfp4, 0.4), (Format::Fp8, 0.6)];
    let bytes = |dir: &Path| Checkpoint::open(dir).unwrap().total_bytes();
    for ((name, n_layers), (format, share)) in
        sources.into_iter().flat_map(|source| formats.map(|format| (source, format)))
    {
        let from = source(name);
        let out = tempfile::tempdir().unwrap();
        convert(&from, out.path(), Some(format), false).unwrap();
        let (found, layers) = banks(out.path());
        assert_eq!((found, layers.len()), (Some(format), n_layers));
        let (before, after) = (Checkpoint::open(&from).unwrap(), Checkpoint::open(out.path()).unwrap());
        for name in after.tensor_names() {
            assert_eq!(
                before.tensor(name).unwrap().bytes.as_slice(),
                after.tensor(name).unwrap().bytes.as_slice()
            );
        }
        let experts = |dir: &Path| banks(dir).1.iter().map(Vec::len).sum::<usize>() as f64;
        assert!(experts(out.path()) <= share * experts(&from) + 4.0 * n_layers as f64 * 4096.0, "{format}");
        assert!(bytes(out.path()) < bytes(&from));
        // The same text comes out that rounded weights give anywhere: loading it once more as it is changes nothing.
        let again = tempfile::tempdir().unwrap();
        convert(out.path(), again.path(), None, false).unwrap();
        assert_eq!(contents(out.path()), contents(again.path()));
        let files = ModelFiles::open(Some(out.path())).unwrap();
        let options = freetoken::engine::EngineOptions { context: 64, ..Default::default() };
        let mut engine = files.engine(cpu(), &options, &mut |_| ()).unwrap();
        let logits = golden::logits(&mut engine, &[1, 2, 3, 4], usize::MAX).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()));
    }
}

/// Wherever the work is cut off, the directory says so or is complete, and the next run makes of it what one run would have.
#[test]
fn a_run_that_is_cut_off_goes_on() {
    let from = source("golden/qwen3_moe-bf16");
    let whole = tempfile::tempdir().unwrap();
    convert(&from, whole.path(), Some(Format::Nvfp4), false).unwrap();
    let whole = contents(whole.path());

    // What lies there at each report of a run, into a new directory and over another checkpoint.
    let mut states = Vec::new();
    for old in [None, Some(Format::Mxfp4)] {
        let out = tempfile::tempdir().unwrap();
        if old.is_some() {
            convert(&from, out.path(), old, false).unwrap();
        }
        convert_watched(&from, out.path(), Some(Format::Nvfp4), old.is_some(), &mut |_| {
            states.push(contents(out.path()));
        })
        .unwrap();
        assert_eq!(contents(out.path()), whole);
    }
    assert!(states.len() > 30, "{} states", states.len());
    // Between the last two steps: the index is there, and the journal still.
    let journal = states.last().unwrap()[JOURNAL_FILE].clone();
    let mut last = whole.clone();
    last.insert(JOURNAL_FILE.into(), journal.clone());
    // And a shard that the journal knows was lost with the power, or cut.
    let mut cut = states.last().unwrap().clone();
    cut.get_mut("freetoken-00001.ftw").unwrap().truncate(4096);
    let mut gone = states.last().unwrap().clone();
    gone.remove("freetoken-00000.ftw").unwrap();
    states.extend([cut, gone]);

    for (i, state) in states.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), state);
        let opened = Checkpoint::open(dir.path());
        assert!(matches!(opened, Err(FormatError::Unfinished { .. })), "state {i} opened: {opened:?}");
        convert(&from, dir.path(), Some(Format::Nvfp4), false).unwrap();
        let found = contents(dir.path());
        assert!(found == whole, "state {i}: {:?}", found.keys());
    }
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &last);
    Checkpoint::open(dir.path()).unwrap();
    // Before the first step but the journal: the old checkpoint is still whole.
    let old = tempfile::tempdir().unwrap();
    convert(&from, old.path(), Some(Format::Mxfp4), false).unwrap();
    fs::write(old.path().join(JOURNAL_FILE), journal).unwrap();
    assert_eq!(banks(old.path()).0, Some(Format::Mxfp4));
}

#[test]
fn a_resumed_run_reads_only_what_is_left() {
    let from = source("golden/qwen3_moe-bf16");
    let out = tempfile::tempdir().unwrap();
    let mut states = Vec::new();
    convert_watched(&from, out.path(), None, false, &mut |_| states.push(contents(out.path()))).unwrap();
    let done = states.iter().find(|state| state.contains_key("freetoken-00001.ftw")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), done);
    let kept = fs::metadata(dir.path().join("freetoken-00000.ftw")).unwrap().modified().unwrap();
    let mut first = None;
    convert_watched(&from, dir.path(), None, false, &mut |bytes| first = first.or(Some(bytes))).unwrap();
    let kept_bytes = done["freetoken-00000.ftw"].len() + done["freetoken-00001.ftw"].len();
    assert_eq!(first, Some(kept_bytes as u64), "what is there is heard at once");
    assert_eq!(fs::metadata(dir.path().join("freetoken-00000.ftw")).unwrap().modified().unwrap(), kept);
}

fn freetoken(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_freetoken")).args(args).output().unwrap()
}

/// The sentence of a command that fails.
fn sentence(args: &[&str]) -> String {
    let output = freetoken(args);
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_command_converts_refuses_and_checks() {
    let (from, dense) = (source("golden/qwen3_moe-bf16"), source("golden/qwen3-bf16"));
    let (from, dense) = (from.to_str().unwrap(), dense.to_str().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let out = at("out");

    let output = freetoken(&["convert", from, &out, "--quantize", "nvfp4"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains(" become ") && said.contains("experts in nvfp4"), "{said}");

    for (args, part) in [
        (&["convert", from, &out][..], "holds a complete FTW checkpoint: give --force"),
        (&["convert", from, from], "is the source itself"),
        (&["convert", from, dir.path().to_str().unwrap()], "is not empty and holds no FTW checkpoint"),
        (
            &["convert", from, dir.path().to_str().unwrap(), "--force"],
            "is not empty and holds no FTW checkpoint",
        ),
        (&["convert", dense, &at("d"), "--quantize", "mxfp4"], "has no routed experts to quantise"),
        (&["convert", &out, &at("d"), "--quantize", "mxfp4"], "has experts in nvfp4 already"),
        (&["convert", "nowhere/at/all", &at("d")], "there is no model"),
    ] {
        let said = sentence(args);
        assert!(said.contains(part), "{args:?}: {said}");
    }
    assert!(freetoken(&["convert", from, &out, "--force"]).status.success());
    assert_eq!(banks(Path::new(&out)).0, Some(Format::Bf16));

    let measured = freetoken(&["bench", "load", "--json", from, &out]);
    let measured: Value = serde_json::from_slice(&measured.stdout).unwrap();
    let rows = measured["rows"].as_array().unwrap();
    let ways: Vec<&str> =
        rows.iter().map(|row| row["way"].as_str().unwrap().split(", ").next().unwrap()).collect();
    assert_eq!(ways, ["the disk itself", "tensors read", "tensors mapped", "records read"]);
    assert!(
        rows.iter().all(|row| row["bytes"].as_u64() > Some(0) && row["share_of_disk"].as_f64() > Some(0.0))
    );
    assert!(sentence(&["bench", "load", dense]).contains("has no routed experts"));

    let shown = freetoken(&["inspect", &out, "--verify"]);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("container") && text.contains("FTW") && text.contains("checksums"), "{text}");
    // One bit of the last shard.
    let shard = Path::new(&out).join("freetoken-00002.ftw");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[5000] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let said = sentence(&["inspect", &out, "--verify"]);
    assert!(said.contains("SHA-256 of `freetoken-00002.ftw`"), "{said}");
    assert!(freetoken(&["inspect", &out]).status.success(), "nobody asked");
}

#[test]
fn another_conversion_does_not_go_on_with_what_is_there() {
    let from = source("golden/qwen3_moe-bf16");
    let out = tempfile::tempdir().unwrap();
    let mut states = Vec::new();
    convert_watched(&from, out.path(), Some(Format::Fp8), false, &mut |_| states.push(contents(out.path())))
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &states[states.len() / 2]);
    let said = convert(&from, dir.path(), None, false).unwrap_err();
    assert!(said.contains("an unfinished conversion of another source, or in another format"), "{said}");
    convert(&from, dir.path(), None, true).unwrap();
    assert_eq!(banks(dir.path()), banks(&from));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named_and_the_work_goes_on_later() {
    let from = source("golden/qwen3_moe-bf16");
    for full in
        ["freetoken-00000.ftw.tmp", "freetoken-00002.ftw.tmp", "config.json.tmp", "freetoken_weight.json.tmp"]
    {
        let begun = tempfile::tempdir().unwrap();
        let mut state = None;
        let dir = tempfile::tempdir().unwrap();
        convert_watched(&from, begun.path(), None, false, &mut |_| {
            if state.is_none() {
                state = Some(contents(begun.path()))
            }
        })
        .unwrap();
        put(dir.path(), &state.unwrap());
        std::os::unix::fs::symlink("/dev/full", dir.path().join(full)).unwrap();
        let said = convert(&from, dir.path(), None, false).unwrap_err();
        assert!(
            said.starts_with("the disk is full: ") && said.contains(full.trim_end_matches(".tmp")),
            "{said}"
        );
        assert!(matches!(Checkpoint::open(dir.path()), Err(FormatError::Unfinished { .. })));
        convert(&from, dir.path(), None, false).unwrap();
        assert_eq!(contents(dir.path()), contents(begun.path()));
    }
}

#[test]
fn weights_that_are_no_number_are_not_rounded() {
    let from = source("golden/qwen3_moe-bf16");
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &contents(&from));
    let name = "model.layers.1.mlp.experts.3.down_proj.weight";
    let offset = {
        let shard = freetoken::formats::safetensors::Shard::open(&from.join("model.safetensors")).unwrap();
        shard.entries()[name].range.start
    };
    let mut bytes = fs::read(from.join("model.safetensors")).unwrap();
    bytes[offset + 4..offset + 6].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let out = tempfile::tempdir().unwrap();
    let said = convert(dir.path(), out.path(), Some(Format::Mxfp4), false).unwrap_err();
    assert!(
        said.contains("model.layers.1.mlp.experts, expert 3")
            && said.contains("row 0 and column 2 of `down_proj`"),
        "{said}"
    );
}

#[test]
fn layers_in_different_formats_are_not_mixed() {
    let from = source("golden/qwen3_moe-bf16");
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &contents(&from));
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    for (name, entry) in header.as_object_mut().unwrap() {
        if name.contains("layers.1.mlp.experts") {
            entry["dtype"] = "F16".into();
        }
    }
    let mut text = header.to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let edited = [&(text.len() as u64).to_le_bytes()[..], &text, data].concat();
    fs::write(dir.path().join("model.safetensors"), edited).unwrap();
    for quantised in [None, Some(Format::Nvfp4)] {
        let said = convert(dir.path(), tempfile::tempdir().unwrap().path(), quantised, false).unwrap_err();
        assert!(said.contains("different formats, bf16 and f16") && said.contains("layers.1"), "{said}");
    }
}

/// An index of records that is edited.
#[test]
fn wrong_records_end_in_a_sentence() {
    let out = tempfile::tempdir().unwrap();
    convert(&source("golden/qwen3_moe-nvfp4-modelopt"), out.path(), None, false).unwrap();
    let good = contents(out.path());
    let index: Value = serde_json::from_slice(&good[INDEX_FILE]).unwrap();
    let last = index["tensors"].as_array().unwrap().len() - 1;
    type Edit = fn(&mut Value);
    let cases: [(Edit, &str); 10] = [
        (|e| drop(e.as_object_mut().unwrap().remove("record")), "has records of no stated format"),
        (|e| e["record"]["format"] = "q4_0".into(), "the format `q4_0`"),
        (|e| e["record"]["hidden"] = 0.into(), "which nvfp4 weights cannot have"),
        (|e| e["record"]["intermediate"] = 40.into(), "which nvfp4 weights cannot have"),
        (|e| e["record"]["intermediate"] = (1_u64 << 40).into(), "which nvfp4 weights cannot have"),
        (|e| e["record"]["hidden"] = 1024.into(), "where nvfp4 1024 x 64 takes"),
        (|e| e["record"]["module"] = "model".into(), "the module `model`, which is none of experts"),
        (
            |e| e["record"]["module"] = "model.layers.0.mlp.experts".into(),
            "names experts of 1 modules, and config.json asks for 2",
        ),
        (|e| e["name"] = "experts#L7".into(), "is no bank of a layer"),
        (|e| e["name"] = "experts#L00009".into(), "is of layer 9"),
    ];
    let sentence = |index: &Value| {
        let dir = tempfile::tempdir().unwrap();
        put(dir.path(), &good);
        fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
        convert(dir.path(), tempfile::tempdir().unwrap().path(), None, false).unwrap_err()
    };
    for (edit, part) in cases {
        let mut index = index.clone();
        edit(&mut index["tensors"][last]);
        let said = sentence(&index);
        assert!(said.contains(part), "no `{part}` in: {said}");
    }
    let mut one_layer = index.clone();
    one_layer["tensors"].as_array_mut().unwrap().pop();
    assert!(sentence(&one_layer).contains("model.layers.1.mlp.experts.0.gate_proj.weight"));
    let mut mixed = index.clone();
    mixed["tensors"][last]["kind"] = "experts_bank".into();
    assert!(sentence(&mixed).contains("both banks and records"), "{}", sentence(&mixed));

    // Records of another width than config.json says.
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), &good);
    let mut config: Value = serde_json::from_slice(&good["config.json"]).unwrap();
    config["moe_intermediate_size"] = 32.into();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let convert_it = || convert(dir.path(), tempfile::tempdir().unwrap().path(), None, false).unwrap_err();
    let said = convert_it();
    assert!(
        said.contains("holds 8 experts of 64 x 64, but config.json asks for 8 experts of 64 x 32"),
        "{said}"
    );

    // A scale and a global of the third expert of the last layer that are no number.
    let layout = record(Format::Nvfp4, 64, 64);
    let shard = index["shards"].as_array().unwrap().last().unwrap()["file"].as_str().unwrap();
    for (at, bytes, name) in [
        (layout.up().scales.start + 7, &[0xff][..], "experts.2.up_proj.weight_scale`"),
        (layout.down.globals.start + 8, &0_f32.to_le_bytes(), "experts.2.down_proj.weight_scale_2`"),
    ] {
        put(dir.path(), &good);
        let mut wrong = good[shard].clone();
        wrong[2 * layout.bytes + at..][..bytes.len()].copy_from_slice(bytes);
        fs::write(dir.path().join(shard), wrong).unwrap();
        let said = convert_it();
        assert!(
            said.contains(&format!("model.layers.1.mlp.{name}")) && said.contains("positive numbers"),
            "{said}"
        );
    }
}
