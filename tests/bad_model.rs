//! Models that are wrong: every one ends in a sentence that names the file, the tensor or the field, and in nothing worse.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

use std::{fs, path::Path, sync::Arc};

use freetoken::{engine::EngineOptions, model_files::ModelFiles};
use freetoken_backend::Precision;
use freetoken_cpu::{Cpu, CpuOptions};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A copy of a golden checkpoint that a test may break.
fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    for file in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(golden.join(file), dir.path().join(file)).unwrap();
    }
    dir
}

fn load(dir: &Path) -> Result<(), String> {
    let cpu = Cpu::new(CpuOptions { threads: Some(1), precision: Precision::F32 }).unwrap();
    let options =
        EngineOptions { context: 64, max_sequences: 1, max_chunk: Some(16), ..EngineOptions::default() };
    let files = ModelFiles::open(Some(dir)).map_err(|e| e.to_string())?;
    files.engine(Arc::new(cpu), &options, &mut |_| ()).map(|_| ()).map_err(|e| e.to_string())
}

fn edit(dir: &Path, file: &str, field: &str, value: Value) {
    let path = dir.join(file);
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json[field] = value;
    fs::write(&path, json.to_string()).unwrap();
}

#[test]
fn the_copy_loads() {
    for name in ["qwen3_moe-bf16", "qwen3-bf16", "llama-bf16"] {
        load(copy(name).path()).unwrap();
    }
}

#[test]
fn every_broken_field_is_named() {
    let cases: Vec<(&str, Value, &str)> = vec![
        ("model_type", json!("gpt5"), "`model_type` is \"gpt5\", which is not one of those that run"),
        ("model_type", json!(null), "`model_type` is missing"),
        ("model_type", json!(7), "`model_type` must be a string"),
        ("num_hidden_layers", json!(1_000_000_000u64), "`num_hidden_layers` is 1000000000"),
        ("num_hidden_layers", json!(-1), "`num_hidden_layers` is -1"),
        ("num_hidden_layers", json!(0), "`num_hidden_layers` is 0"),
        ("num_hidden_layers", json!(3), "no tensor `model.layers.2."),
        ("hidden_size", json!(1u64 << 40), "`hidden_size` is 1099511627776"),
        ("hidden_size", json!(65), "`model.embed_tokens.weight` has shape [320, 64]"),
        ("hidden_size", json!("64"), "`hidden_size` is \"64\""),
        ("vocab_size", json!(1e300), "`vocab_size` is 1e+300"),
        ("vocab_size", json!(300), "`model.embed_tokens.weight` has shape"),
        ("num_attention_heads", json!(3), "`num_key_value_heads` is 2, which does not divide 3 heads"),
        ("num_key_value_heads", json!(0), "`num_key_value_heads` is 0"),
        ("head_dim", json!(15), "`head_dim` is 15; it must be even"),
        ("head_dim", json!(1 << 20), "`head_dim` is 1048576"),
        ("rms_norm_eps", json!("NaN"), "`rms_norm_eps` is \"NaN\""),
        ("rms_norm_eps", json!(-1.0), "`rms_norm_eps` is -1.0"),
        ("rope_theta", json!(0), "`rope_theta` is 0"),
        ("rope_scaling", json!({ "rope_type": "longrope" }), "`rope_scaling.rope_type` must be one of"),
        ("rope_scaling", json!([1]), "`rope_scaling` must be an object"),
        ("num_experts", json!(1u64 << 33), "`num_experts` is 8589934592"),
        ("num_experts", json!(9), "`model.layers.0.mlp.gate.weight` has shape [8, 64]"),
        ("num_experts_per_tok", json!(9), "`num_experts_per_tok` is 9, more than the 8 experts"),
        ("num_experts_per_tok", json!(0), "`num_experts_per_tok` is 0"),
        ("moe_intermediate_size", json!(33), "has shape [32, 64]"),
        ("decoder_sparse_step", json!(0), "`decoder_sparse_step` is 0"),
        ("mlp_only_layers", json!([0, 5]), "`mlp_only_layers` must be a list of whole numbers below 2"),
        ("mlp_only_layers", json!([1]), "no tensor `model.layers.1.mlp.gate_proj.weight`"),
        ("hidden_act", json!("gelu"), "`hidden_act` must be \"silu\""),
        ("norm_topk_prob", json!("yes"), "`norm_topk_prob` must be true or false"),
        ("attention_bias", json!(true), "no tensor `model.layers.0.self_attn.q_proj.bias`"),
        ("max_position_embeddings", json!(0), "`max_position_embeddings` is 0"),
        ("eos_token_id", json!("</s>"), "eos_token_id"),
    ];
    for (field, value, expected) in cases {
        let dir = copy("qwen3_moe-bf16");
        if field == "eos_token_id" {
            fs::remove_file(dir.path().join("generation_config.json")).unwrap();
        }
        edit(dir.path(), "config.json", field, value.clone());
        let error = load(dir.path()).expect_err(&format!("{field} = {value}"));
        assert!(error.contains(expected), "{field} = {value}: {error}");
        assert!(!error.contains('\n') && error.len() < 1000, "one sentence: {error}");
    }
}

#[test]
fn contradictions_of_a_windowed_model_are_refused() {
    let dir = copy("qwen3-bf16");
    edit(dir.path(), "config.json", "use_sliding_window", json!(true));
    load(dir.path()).unwrap();
    edit(dir.path(), "config.json", "sliding_window", json!(128));
    assert!(load(dir.path()).unwrap_err().contains("`use_sliding_window` is true"));
}

#[test]
fn broken_files_are_named() {
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    for (file, content, expected) in [
        ("config.json", "", "config.json"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json"),
        ("config.json", deep.as_str(), "config.json nests arrays or objects too deep"),
        ("tokenizer.json", deep.as_str(), "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("generation_config.json", "{\"temperature\": -1}", "temperature"),
        ("generation_config.json", "{\"top_p\": 7}", "top_p"),
        ("generation_config.json", "{\"eos_token_id\": [-5]}", "eos_token_id"),
        ("tokenizer_config.json", "{\"chat_template\": \"{% for\"}", "chat template"),
        ("model.safetensors", "short", "model.safetensors"),
    ] {
        let dir = copy("qwen3_moe-bf16");
        fs::write(dir.path().join(file), content).unwrap();
        let error = load(dir.path()).expect_err(&format!("{file}: {content:.20}"));
        assert!(error.contains(expected), "{file} {content:.20}: {error}");
        assert!(error.len() < 1000, "{error}");
    }
}

#[test]
fn a_foreign_tokenizer_is_refused() {
    let dir = copy("qwen3_moe-bf16");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/tokenizer.json");
    fs::copy(demo, dir.path().join("tokenizer.json")).unwrap();
    let error = load(dir.path()).unwrap_err();
    assert!(error.contains("8191") && error.contains("320"), "{error}");
}

#[test]
fn missing_files_are_named() {
    let dir = copy("qwen3_moe-bf16");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(load(dir.path()).unwrap_err().contains("has no config.json"));
    let error = load(&dir.path().join("nowhere")).unwrap_err();
    assert!(error.contains("nowhere"), "{error}");
    let error = load(&dir.path().join("tokenizer.json")).unwrap_err();
    assert!(error.contains("give the directory"), "{error}");
    let error = load(Path::new("no-such-model")).unwrap_err();
    assert!(error.contains("there is no model `no-such-model`"), "{error}");
}
