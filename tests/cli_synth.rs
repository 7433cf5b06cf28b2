//! `synth`, and the commands that open what it wrote: `inspect`, `eval` and `bench`.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::{Value, json};

fn freetoken(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_freetoken")).current_dir(dir).args(args).output().unwrap()
}

/// What a command that succeeds prints.
fn stdout(dir: &Path, args: &[&str]) -> String {
    let output = freetoken(dir, args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The sentence of a command that fails.
fn sentence(dir: &Path, args: &[&str]) -> String {
    let output = freetoken(dir, args);
    assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// A folder with the configuration of a model of four layers.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": true,
        "tie_word_embeddings": true, "mlp_only_layers": [3], "intermediate_size": 48, "eos_token_id": 2,
        "quantization_config": { "quant_method": "fp8" }
    });
    fs::write(dir.path().join("shape.json"), config.to_string()).unwrap();
    dir
}

/// Weights of its first two layers.
const N_PARAMS: u64 =
    64 * 512 + 64 + 2 * (64 * 16 * (4 + 4 + 2 + 2) + 2 * 16 + 2 * 64 + 32 * 64 + 32 * 3 * 64 * 32);

#[test]
fn a_made_up_checkpoint_is_one_that_runs() {
    let dir = folder();
    let dir = dir.path();
    let printed =
        stdout(dir, &["synth", "out", "--config", "shape.json", "--layers", "2", "--routing", "zipf:1.0"]);
    // Four lines: what was written, a head, the law, and the two layers below it.
    let rows: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((rows.len(), rows[2][0]), (5, "zipf:1.0"), "{printed}");
    let quarter = |row: &[&str]| row[2].strip_suffix('%').unwrap().parse::<f64>().unwrap();
    let law = quarter(&rows[2]);
    assert!((60.0..75.0).contains(&law), "{printed}");
    for layer in &rows[3..] {
        assert!((quarter(layer) - law).abs() < 8.0 && layer[1].parse::<usize>().unwrap() >= 28, "{printed}");
    }

    let model = json(&stdout(dir, &["inspect", "out", "--json"]));
    assert_eq!(model["parameters"], N_PARAMS);
    assert_eq!(model["active_parameters"], N_PARAMS - 2 * 28 * 3 * 64 * 32);
    assert_eq!(model["bytes_by_format"], json!({ "BF16": 2 * N_PARAMS }));
    assert_eq!((&model["unused_tensors"], &model["chat_template"]), (&json!(0), &json!(false)));

    fs::write(dir.join("ids.txt"), "1 2 3\n511").unwrap();
    let eval = [
        "eval",
        "--model",
        "out",
        "--tokens",
        "ids.txt",
        "--logits",
        "l.safetensors",
        "--greedy",
        "2",
        "--json",
    ];
    let evaluated = json(&stdout(dir, &eval));
    assert_eq!((&evaluated["tokens"], &evaluated["vocab"]), (&json!(4), &json!(512)));
    assert_eq!(evaluated["greedy_ids"].as_array().unwrap().len(), 2);

    let bench = [
        "bench", "steps", "--model", "out", "--prompt", "16", "--depth", "0,32", "--batch", "1,2",
        "--decode", "2",
    ];
    let table = stdout(dir, &[&bench[..], &["--json", "--csv", "rows.csv", "--threads", "1"]].concat());
    let table = json(&table);
    let rows = table["rows"].as_array().unwrap();
    let stages: Vec<&str> = rows.iter().map(|row| row["stage"].as_str().unwrap()).collect();
    assert_eq!(stages, ["prefill", "decode", "decode", "decode", "decode"]);
    assert!(rows.iter().all(|row| row["tokens_per_second"].as_f64().unwrap() > 0.0), "{table}");
    let bytes: Vec<f64> = rows[1..].iter().map(|row| row["bytes"].as_f64().unwrap()).collect();
    assert!(bytes[1] > bytes[0] && bytes[3] > bytes[2], "two tokens choose more experts than one: {bytes:?}");
    assert_eq!(bytes[2] - bytes[0], 32.0 * 256.0, "the cache of 32 tokens, 256 bytes each");
    assert_eq!(fs::read_to_string(dir.join("rows.csv")).unwrap().lines().count(), 6);
}

#[test]
fn the_seed_decides() {
    let dir = folder();
    let dir = dir.path();
    let mut weights = Vec::new();
    for (out, seed) in [("a", "1"), ("b", "1"), ("c", "2")] {
        stdout(dir, &["synth", out, "--config", "shape.json", "--layers", "1", "--seed", seed]);
        weights.push(fs::read(dir.join(out).join("model.safetensors")).unwrap());
    }
    assert!(weights[0] == weights[1] && weights[0] != weights[2]);
}

#[test]
fn refusals_leave_nothing() {
    let dir = folder();
    let dir = dir.path();
    fs::create_dir(dir.join("used")).unwrap();
    fs::write(dir.join("used/notes.txt"), "mine").unwrap();
    fs::write(
        dir.join("huge.json"),
        r#"{"model_type":"qwen3_moe","num_hidden_layers":4096,"num_experts":65536}"#,
    )
    .unwrap();
    for (args, part) in [
        (&["synth", "used", "--config", "shape.json"][..], "used is not empty"),
        (&["synth", "new", "--config", "none.json"], "none.json does not exist"),
        (&["synth", "new", "--config", "huge.json"], "268435456 experts in all are more than"),
        (&["synth", "new", "--config", "shape.json", "--tokenizer", "used"], "tokenizer.json does not exist"),
        (&["synth", "new", "--config", "shape.json", "--routing", "pareto"], "is not a routing law"),
        (&["bench", "steps", "--layers", "2"], "--layers changes a made-up model"),
        (
            &["bench", "steps", "--config", "shape.json", "--prompt", "600"],
            "the model's context is 512 tokens and 600 are asked",
        ),
    ] {
        let sentence = sentence(dir, args);
        assert!(sentence.contains(part), "{args:?}: {sentence}");
    }
    assert!(!dir.join("new").exists());
    assert_eq!(fs::read_to_string(dir.join("used/notes.txt")).unwrap(), "mine");
}
