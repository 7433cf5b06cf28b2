//! FTW directories: those that the seed system wrote give its outputs, and what is wrong with others ends in a sentence.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use freetoken::{
    formats::{
        Checkpoint, Dtype, FormatError,
        ftw::{Ftw, INDEX_FILE, Kind, index},
    },
    golden,
    model_files::ModelFiles,
};
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};
use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Copies the files of a directory.
fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            fs::write(to.join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
        }
    }
}

/// The folder of large test files, where `FREETOKEN_GOLDEN` names it.
fn outside() -> Option<PathBuf> {
    let folder = std::env::var_os("FREETOKEN_GOLDEN").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("SKIPPED: FREETOKEN_GOLDEN is not set: some FTW directories were not checked");
    }
    folder
}

/// Every entry of a directory against the hashes beside it, and that some of them lie in several shards.
fn check_hashes(dir: &Path) {
    let expected = read_json(&dir.join("expected.json"));
    let ftw = Ftw::open(dir).unwrap();
    let tensors = expected["tensors"].as_object().unwrap();
    assert_eq!(ftw.index().entries.len(), tensors.len(), "{}", dir.display());
    for entry in &ftw.index().entries {
        let wanted = &tensors[&entry.name];
        let bytes = ftw.bytes(entry).unwrap();
        assert_eq!(sha256(bytes.as_slice()), wanted["sha256"].as_str().unwrap(), "{}", entry.name);
        assert_eq!(json!(entry.shape), wanted["shape"], "{}", entry.name);
        let kind = if wanted["kind"] == "weight" { Kind::Weight } else { Kind::ExpertsBank };
        assert_eq!(entry.kind, kind, "{}", entry.name);
    }
    assert!(expected["n_tensors_over_several_shards"].as_u64().unwrap() > 0);
}

#[test]
fn entries_have_the_bytes_that_were_written() {
    for name in ["qwen3_moe-bf16", "qwen3_moe-nvfp4"] {
        check_hashes(&root().join("tests/ftw").join(name));
    }
    let Some(folder) = outside() else { return };
    for name in ["qwen3_moe-bf16", "qwen3_moe-nvfp4", "gpt_oss-mxfp4", "gpt_oss-mxfp4-flat"] {
        check_hashes(&folder.join("ftw").join(name));
    }
}

/// The source of each directory: its outputs are in `tests/golden`.
const SOURCES: [(&str, &str); 2] =
    [("qwen3_moe-bf16", "qwen3_moe-bf16"), ("qwen3_moe-nvfp4", "qwen3_moe-nvfp4-modelopt")];

/// Tensor by tensor what the checkpoint holds that it was made from.
#[test]
fn tensors_are_those_of_the_source_by_name() {
    for (name, source) in SOURCES {
        let ftw = Checkpoint::open(&root().join("tests/ftw").join(name)).unwrap();
        let source = Checkpoint::open(&root().join("tests/golden").join(source)).unwrap();
        let mut n = 0;
        for name in source.tensor_names().filter(|name| !name.ends_with(".input_scale")) {
            let (found, wanted) = (ftw.tensor(name).unwrap(), source.tensor(name).unwrap());
            assert_eq!(found.dtype, wanted.dtype, "{name}");
            if name.ends_with(".weight_scale_2") {
                let rows = found.bytes.as_slice().chunks_exact(4);
                assert!(
                    rows.len() == found.shape[0] && rows.clone().all(|row| row == wanted.bytes.as_slice())
                );
            } else {
                assert_eq!((&found.shape, found.bytes.as_slice()), (&wanted.shape, wanted.bytes.as_slice()));
            }
            n += 1;
        }
        assert_eq!(n, ftw.tensor_names().len());
    }
}

/// A directory with the outputs of its source beside it.
fn with_outputs(dir: &Path, source: &str) -> tempfile::TempDir {
    let joined = tempfile::tempdir().unwrap();
    copy(&root().join("tests/golden").join(source), joined.path());
    fs::remove_file(joined.path().join("model.safetensors")).unwrap();
    copy_index_and_shards(dir, joined.path());
    joined
}

fn copy_index_and_shards(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name == INDEX_FILE || name.ends_with(".ftw") {
            fs::write(to.join(&name), fs::read(from.join(&name)).unwrap()).unwrap();
        }
    }
}

fn cpu(precision: Precision) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision }).unwrap())
}

#[test]
fn what_the_seed_system_wrote_gives_the_golden_outputs_wherever_experts_are() {
    for (name, source) in SOURCES {
        let dir = with_outputs(&root().join("tests/ftw").join(name), source);
        for placement in golden::PLACEMENTS {
            let (device, host) = (cpu(Precision::F32), cpu(Precision::F32));
            let report = golden::run_placed(dir.path(), &device, &host, placement).unwrap();
            assert!(report.passed(), "{name}, {}\n{report}", placement.name);
        }
    }
}

#[test]
fn layouts_that_do_not_run_are_refused_in_a_sentence() {
    let Some(folder) = outside() else { return };
    for name in ["gpt_oss-mxfp4", "gpt_oss-mxfp4-flat"] {
        let sentence = ModelFiles::open(Some(&folder.join("ftw").join(name))).err().unwrap().to_string();
        assert!(sentence.contains("stores its experts as `mxfp4_triton`"), "{sentence}");
    }
}

/// Entries and their bytes, laid out as the seed system does, in one shard.
#[derive(Default)]
struct ByHand {
    entries: Vec<Value>,
    region: Vec<u8>,
}

impl ByHand {
    fn add(&mut self, name: &str, kind: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) {
        let dtype = match dtype {
            Dtype::BF16 => "bfloat16",
            Dtype::F8_E4M3 => "float8_e4m3fn",
            other => panic!("{other} is in none of the sources"),
        };
        self.entries.push(json!({
            "name": name, "kind": kind, "dtype": dtype, "shape": shape, "global_off": self.region.len(), "nbytes": bytes.len()
        }));
        self.region.extend_from_slice(bytes);
        self.region.resize(self.region.len().next_multiple_of(4096), 0);
    }

    /// One tensor of several on top of each other.
    fn stack(
        &mut self,
        source: &Checkpoint,
        parts: &[String],
        name: &str,
        kind: &str,
        shape: impl Fn(&[usize], usize) -> Vec<usize>,
    ) {
        let parts: Vec<_> = parts.iter().map(|part| source.tensor(part).unwrap()).collect();
        let bytes = parts.iter().flat_map(|part| part.bytes.as_slice()).copied().collect::<Vec<u8>>();
        let rows = parts.iter().map(|part| part.shape[0]).sum();
        self.add(name, kind, parts[0].dtype, &shape(&parts[0].shape, rows), &bytes);
    }

    fn write(self, quant_format: &str, n_layers: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let index = json!({
            "format": "freetoken_weight", "version": 1, "align": 4096, "shard_limit": 1 << 30, "total_bytes": self.region.len(),
            "tensors": self.entries, "quant_format": quant_format, "expert_bank_num_layers": n_layers,
            "shards": [{ "file": "freetoken-00000.ftw", "global_off": 0, "nbytes": self.region.len() }],
        });
        fs::write(dir.path().join(INDEX_FILE), index.to_string()).unwrap();
        fs::write(dir.path().join("freetoken-00000.ftw"), self.region).unwrap();
        dir
    }
}

fn same_tensors(found: &Checkpoint, wanted: &Checkpoint) {
    assert!(found.tensor_names().eq(wanted.tensor_names()));
    for name in wanted.tensor_names() {
        let (found, wanted) = (found.tensor(name).unwrap(), wanted.tensor(name).unwrap());
        assert_eq!((found.dtype, &found.shape), (wanted.dtype, &wanted.shape), "{name}");
        assert!(found.bytes.as_slice() == wanted.bytes.as_slice(), "{name}");
    }
}

/// Banks of 128 x 128 blocks, each one entry for all layers, as the seed system's description says.
#[test]
fn flat_banks_of_fp8_blocks_are_cut_into_experts() {
    let dir = root().join("tests/golden/qwen3_moe-fp8-block");
    let source = Checkpoint::open(&dir).unwrap();
    let mut by_hand = ByHand::default();
    for name in source.tensor_names().filter(|name| !name.contains(".experts.")) {
        let tensor = source.tensor(name).unwrap();
        by_hand.add(name, "weight", tensor.dtype, &tensor.shape, tensor.bytes.as_slice());
    }
    let config = read_json(&dir.join("config.json"));
    let count = |field: &str| config[field].as_u64().unwrap() as usize;
    let (n_layers, n_experts) = (count("num_hidden_layers"), count("num_experts"));
    for (bank, parts) in [("gate_up", &["gate_proj", "up_proj"][..]), ("down", &["down_proj"])] {
        for (end, tensor) in [("", "weight"), ("_scale", "weight_scale_inv")] {
            let experts = (0..n_layers).flat_map(|l| (0..n_experts).map(move |e| (l, e)));
            let names: Vec<String> = experts
                .flat_map(|(l, e)| {
                    parts.iter().map(move |part| format!("model.layers.{l}.mlp.experts.{e}.{part}.{tensor}"))
                })
                .collect();
            let all = n_layers * n_experts;
            by_hand.stack(&source, &names, &format!("{bank}{end}"), "experts_bank", |first, rows| {
                vec![all, rows / all, first[1]]
            });
        }
    }
    let made = by_hand.write("fp8_block", n_layers);
    same_tensors(&Checkpoint::open(made.path()).unwrap(), &source);
}

#[test]
fn fused_projections_are_cut_where_they_were_joined() {
    let source = Checkpoint::open(&root().join("tests/golden/qwen3-bf16")).unwrap();
    let mut by_hand = ByHand::default();
    for name in source.tensor_names() {
        let fused = |first: &str, all: &[&str], fused: &str| {
            let names = all.iter().map(|part| name.replace(first, part)).collect::<Vec<_>>();
            (names, name.replace(first, fused))
        };
        let (names, fused) = if name.contains("q_proj") {
            fused("q_proj", &["q_proj", "k_proj", "v_proj"], "qkv_proj")
        } else if name.contains("gate_proj") {
            fused("gate_proj", &["gate_proj", "up_proj"], "gate_up_proj")
        } else if ["k_proj", "v_proj", "up_proj"].iter().any(|part| name.contains(part)) {
            continue;
        } else {
            (vec![name.to_owned()], name.to_owned())
        };
        by_hand.stack(&source, &names, &fused, "weight", |first, rows| [&[rows], &first[1..]].concat());
    }
    assert!(by_hand.entries.iter().any(|entry| entry["name"].as_str().unwrap().contains("gate_up_proj")));
    same_tensors(&Checkpoint::open(by_hand.write("bf16", 0).path()).unwrap(), &source);
}

/// A directory of the tests whose index is edited.
struct Edited(tempfile::TempDir);

impl Edited {
    fn new(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        copy_index_and_shards(&root().join("tests/ftw").join(name), dir.path());
        Edited(dir)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    fn index(&self, edit: impl FnOnce(&mut Value)) -> &Self {
        let mut index = read_json(&self.path(INDEX_FILE));
        edit(&mut index);
        fs::write(self.path(INDEX_FILE), index.to_string()).unwrap();
        self
    }

    /// The sentence with which opening fails.
    fn sentence(&self) -> String {
        Checkpoint::open(self.0.path()).unwrap_err().to_string()
    }
}

/// The entry of that name.
fn entry<'v>(index: &'v mut Value, name: &str) -> &'v mut Value {
    let entries = index["tensors"].as_array_mut().unwrap();
    entries.iter_mut().find(|entry| entry["name"] == name).unwrap()
}

#[test]
fn wrong_indices_end_in_a_sentence() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 27] = [
        (|i| i["format"] = "gguf".into(), &["says that it is a `gguf`"]),
        (|i| i["version"] = 2.into(), &["is of version 2"]),
        (|i| i["align"] = 512.into(), &["aligns its entries to 512"]),
        (|i| i["total_bytes"] = 4096.into(), &["a region of 4096 bytes and shards of 356352"]),
        (|i| i["shards"][1]["global_off"] = 0.into(), &["`freetoken-00001.ftw` at byte 0", "16384 is next"]),
        (|i| i["shards"][1]["nbytes"] = 100.into(), &["`freetoken-00001.ftw` 100 bytes", "no multiple"]),
        (|i| i["shards"][1]["nbytes"] = 0.into(), &["`freetoken-00001.ftw` 0 bytes"]),
        (|i| i["shards"][1]["nbytes"] = (u64::MAX - 4095).into(), &["`freetoken-00001.ftw`"]),
        (|i| i["shards"][1]["file"] = "../x".into(), &["`../x`, which is not a plain file name"]),
        (|i| i["shards"][1]["file"] = "freetoken-00000.ftw".into(), &["`freetoken-00000.ftw` twice"]),
        (|i| i["shards"][1]["file"] = "other.ftw".into(), &["lacks 1 of the 23 shards", "other.ftw"]),
        (|i| entry(i, "lm_head.weight")["kind"] = "kv".into(), &["`lm_head.weight` is a `kv`"]),
        (|i| entry(i, "lm_head.weight")["dtype"] = "int3".into(), &["`lm_head.weight` holds `int3`"]),
        (|i| entry(i, "lm_head.weight")["nbytes"] = 1.into(), &["`lm_head.weight` has 1 bytes but BF16"]),
        (|i| entry(i, "lm_head.weight")["shape"] = json!([u64::MAX, 2]), &["`lm_head.weight`", "no size"]),
        (
            |i| entry(i, "lm_head.weight")["global_off"] = 2.into(),
            &["byte 2 of the region", "multiple of 4096"],
        ),
        (|i| entry(i, "lm_head.weight")["global_off"] = (1_u64 << 40).into(), &["a region of 356352"]),
        (|i| entry(i, "lm_head.weight")["global_off"] = 4096.into(), &["overlaps `lm_head.weight`"]),
        (|i| entry(i, "lm_head.weight")["name"] = "model.norm.weight".into(), &["is there twice"]),
        (|i| i["quant_format"] = "nvfp4_marlin".into(), &["stores its experts as `nvfp4_marlin`"]),
        (|i| i["layer_quant_formats"] = json!(["bf16", "nvfp4"]), &["one format a layer"]),
        (|i| i["expert_bank_num_layers"] = 3.into(), &["experts of 3 layers and routers of 2"]),
        (
            |i| entry(i, "down_scale#L00001")["kind"] = "weight".into(),
            &["lacks the bank `down_scale#L00001`"],
        ),
        (|i| entry(i, "down_scale#L00001")["name"] = "down_scale#L7".into(), &["`down_scale#L7` is no bank"]),
        (
            |i| entry(i, "down_scale#L00001")["name"] = "down_scale#L00007".into(),
            &["is of layer 7", "2 layers"],
        ),
        (
            |i| entry(i, "down_scale#L00001")["shape"] = json!([8, 32, 8]),
            &["has the shape [8, 32, 8]", "[8, 64, ..]"],
        ),
        (
            |i| {
                let global = entry(i, "down_global#L00001");
                (global["dtype"], global["nbytes"]) = ("float16".into(), 1024.into());
            },
            &["`down_global#L00001` holds F16", "is F32"],
        ),
    ];
    for (edit, parts) in cases {
        let edited = Edited::new("qwen3_moe-nvfp4");
        let sentence = edited.index(edit).sentence();
        for part in parts {
            assert!(sentence.contains(part), "no `{part}` in: {sentence}");
        }
    }
}

#[test]
fn wrong_shards_end_in_a_sentence() {
    let edited = Edited::new("qwen3_moe-nvfp4");
    let shard = edited.path("freetoken-00003.ftw");
    let bytes = fs::read(&shard).unwrap();
    for (len, part) in [(bytes.len() - 1, "has 16383"), (1, "has 1:"), (0, "is empty")] {
        fs::write(&shard, &bytes[..len]).unwrap();
        let sentence = edited.sentence();
        assert!(sentence.contains("freetoken-00003.ftw") && sentence.contains(part), "{sentence}");
    }
    fs::remove_file(&shard).unwrap();
    assert!(
        edited
            .sentence()
            .contains("lacks 1 of the 23 shards that its index lists, first freetoken-00003.ftw")
    );
    fs::write(edited.path(INDEX_FILE), "{}").unwrap();
    assert!(edited.sentence().contains("missing field"));
}

/// Scales that are no number, zero where none may be, or of another width: the sentence names the tensor.
#[test]
fn wrong_scales_end_in_a_sentence() {
    let load = |edited: &Edited| {
        copy(&root().join("tests/golden/qwen3_moe-nvfp4-modelopt"), edited.0.path());
        fs::remove_file(edited.path("model.safetensors")).unwrap();
        let files = ModelFiles::open(Some(edited.0.path())).unwrap();
        let options = freetoken::engine::EngineOptions { context: 64, ..Default::default() };
        files.engine(Arc::new(Cpu::reference()), &options, &mut |_| ()).err().unwrap().to_string()
    };
    // The second row of the first expert's down globals, and the third scale of its gate.
    for (name, at, bytes, tensor) in [
        (
            "down_global#L00001",
            4,
            &f32::NAN.to_le_bytes()[..],
            "layers.1.mlp.experts.0.down_proj.weight_scale_2",
        ),
        ("down_global#L00001", 4, &[0; 4], "layers.1.mlp.experts.0.down_proj.weight_scale_2"),
        ("gate_up_scale#L00000", 2, &[0x7f], "layers.0.mlp.experts.0.gate_proj.weight_scale"),
    ] {
        let edited = Edited::new("qwen3_moe-nvfp4");
        let mut index = read_json(&edited.path(INDEX_FILE));
        let offset = entry(&mut index, name)["global_off"].as_u64().unwrap() as usize + at;
        let path = edited.path(&format!("freetoken-{:05}.ftw", shard_of(&index, offset)));
        let start = index["shards"][shard_of(&index, offset)]["global_off"].as_u64().unwrap() as usize;
        let mut shard = fs::read(&path).unwrap();
        shard[offset - start..][..bytes.len()].copy_from_slice(bytes);
        fs::write(&path, shard).unwrap();
        let sentence = load(&edited);
        assert!(sentence.contains(tensor) && sentence.contains("positive numbers"), "{sentence}");
    }
    let edited = Edited::new("qwen3_moe-nvfp4");
    edited.index(|index| {
        let scale = entry(index, "down_scale#L00001");
        (scale["shape"], scale["nbytes"]) = (json!([8, 64, 2]), 1024.into());
    });
    let sentence = load(&edited);
    assert!(sentence.contains("down_proj.weight_scale` has shape [64, 2]"), "{sentence}");
}

fn shard_of(index: &Value, offset: usize) -> usize {
    let shards = index["shards"].as_array().unwrap();
    shards.iter().rposition(|shard| shard["global_off"].as_u64().unwrap() as usize <= offset).unwrap()
}

/// Whatever parses has its entries in bounds, in order, aligned, disjoint, and sized as their shapes say.
fn check_promises(bytes: &[u8]) -> Result<(), TestCaseError> {
    let Ok(index) = index::parse("mutant", bytes) else { return Ok(()) };
    let total = index.shards.last().map_or(0, |shard| shard.range.end);
    let mut end = 0;
    for shard in &index.shards {
        prop_assert_eq!(shard.range.start, end);
        prop_assert!(shard.range.end > end && shard.range.end % 4096 == 0);
        end = shard.range.end;
    }
    let mut end = 0;
    for entry in &index.entries {
        prop_assert!(entry.range.start >= end && entry.range.end <= total && entry.range.start % 4096 == 0);
        let bits = entry.shape.iter().product::<usize>() * entry.dtype.bitsize();
        prop_assert_eq!((entry.range.end - entry.range.start) * 8, bits as u64);
        end = entry.range.end;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Digits replaced by digits leave JSON that parses, and so reach the checks behind the parser.
    #[test]
    fn mutated_indices_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..4),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
        which in 0..2_usize,
    ) {
        let dir = root().join("tests/ftw").join(SOURCES[which].0);
        let mut bytes = fs::read(dir.join(INDEX_FILE)).unwrap();
        for (at, byte) in edits {
            let n = bytes.len();
            bytes[at.index(n)] = byte;
        }
        let places: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
        for (at, digit) in digits {
            bytes[places[at.index(places.len())]] = digit;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check_promises(&bytes)?;
        // The whole way, shards included: what opens hands out tensors of the size that their shapes say.
        let mutant = tempfile::tempdir().unwrap();
        for shard in fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()) {
            if shard.extension().is_some_and(|extension| extension == "ftw") {
                fs::hard_link(&shard, mutant.path().join(shard.file_name().unwrap())).unwrap();
            }
        }
        fs::write(mutant.path().join(INDEX_FILE), &bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(mutant.path()) {
            for name in checkpoint.tensor_names() {
                let tensor = checkpoint.tensor(name).unwrap();
                let bits = tensor.shape.iter().product::<usize>() * tensor.dtype.bitsize();
                prop_assert_eq!(tensor.bytes.len() * 8, bits, "{}", name);
            }
        }
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check_promises(&bytes)?;
    }
}

/// The seeds of the fuzz target: those named `valid-` parse, the others do not.
#[test]
fn fuzz_corpus() {
    let (mut n_valid, mut n_bad) = (0, 0);
    for file in fs::read_dir(root().join("fuzz/corpus/ftw_index")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let parsed: Result<_, FormatError> = index::parse(&name, &fs::read(&path).unwrap());
        assert_eq!(parsed.is_ok(), name.starts_with("valid-"), "{name}: {:?}", parsed.err());
        if parsed.is_ok() { n_valid += 1 } else { n_bad += 1 }
    }
    assert!(n_valid >= 2 && n_bad >= 6, "{n_valid} valid and {n_bad} bad seeds");
}
