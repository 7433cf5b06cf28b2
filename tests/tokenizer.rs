//! The tokenizer against ids and texts computed by Hugging Face, and against files it must refuse.

use std::fs;
use std::path::{Path, PathBuf};

use freetoken::formats::tokenizer::Tokenizer;
use serde_json::{Value, json};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read_json(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn load(dir: &Path) -> Tokenizer {
    let path = dir.join("tokenizer.json");
    let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Tokenizer::from_bytes(&path.display().to_string(), &bytes).unwrap_or_else(|error| panic!("{error}"))
}

fn load_error(json: &Value) -> String {
    let bytes = json.to_string();
    Tokenizer::from_bytes("tokenizer.json", bytes.as_bytes()).expect_err("refused").to_string()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of ids")
}

fn golden_dirs() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("tests/golden")).expect("tests/golden is there");
    let dirs: Vec<_> =
        entries.map(|entry| entry.expect("a readable entry").path()).filter(|p| p.is_dir()).collect();
    assert!(dirs.len() >= 3, "the golden folders are there: {dirs:?}");
    dirs
}

fn golden_json() -> Value {
    read_json(&root().join("tests/golden/qwen3_moe-bf16/tokenizer.json"))
}

#[test]
fn golden_texts_encode_and_decode() {
    for dir in golden_dirs() {
        let tokenizer = load(&dir);
        let check = &read_json(&dir.join("expected.json"))["tokenizer_check"];
        let cases = check["encode"].as_array().expect("encode cases");
        assert!(!cases.is_empty());
        for case in cases {
            let text = case["text"].as_str().expect("a text");
            assert_eq!(tokenizer.encode(text, false).expect("encodes"), ids(&case["ids"]), "{text:?}");
            assert_eq!(
                tokenizer.decode(&ids(&case["ids"]), true).expect("decodes"),
                case["decoded"],
                "{text:?}"
            );
        }
        if let Some(chat) = check["chat"].as_object() {
            let rendered = chat["rendered"].as_str().expect("a text");
            assert_eq!(tokenizer.encode(rendered, false).expect("encodes"), ids(&chat["ids"]));
            assert_eq!(
                tokenizer.decode(&ids(&chat["greedy_ids"]), false).expect("decodes"),
                chat["greedy_text"]
            );
        }
    }
}

#[test]
fn demo_prompts_encode_and_decode() {
    let dir = root().join("models/demo");
    let tokenizer = load(&dir);
    assert_eq!(tokenizer.vocab_size(), 8192);
    let reference = read_json(&dir.join("reference.json"));
    let cases = reference["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    for case in cases {
        let prompt = case["prompt"].as_str().expect("a prompt");
        assert_eq!(tokenizer.encode(prompt, false).expect("encodes"), ids(&case["ids"]), "{prompt:?}");
        assert_eq!(tokenizer.decode(&ids(&case["ids"]), false).expect("decodes"), prompt);
        assert_eq!(tokenizer.decode(&ids(&case["greedy_ids"]), false).expect("decodes"), case["greedy_text"]);
    }
}

#[test]
fn vocabulary_is_known_and_checked_against_the_model() {
    let tokenizer = load(&root().join("tests/golden/qwen3_moe-bf16"));
    let end = tokenizer.token_to_id("<|im_end|>").expect("a token of the vocabulary");
    assert!(tokenizer.is_special(end));
    let think = tokenizer.token_to_id("<think>").expect("a token of the vocabulary");
    assert!(!tokenizer.is_special(think), "added, but text");
    assert!(!tokenizer.is_special(39) && !tokenizer.is_special(u32::MAX));
    assert_eq!(tokenizer.token_to_id("no such token"), None);
    assert_eq!(tokenizer.decode(&[39, u32::MAX], false).expect("decodes"), "H");

    let size = tokenizer.vocab_size();
    assert!(tokenizer.check_vocab(size).is_ok() && tokenizer.check_vocab(size + 100).is_ok());
    let error = tokenizer.check_vocab(size - 1).expect_err("refused").to_string();
    assert!(
        error.contains("tokenizer.json") && error.contains(&format!("vocab_size is {}", size - 1)),
        "{error}"
    );
}

#[test]
fn special_tokens_are_added_only_on_request() {
    let mut json = golden_json();
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [315], "tokens": ["<|endoftext|>"]}},
    });
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes()).expect("loads");
    assert_eq!(tokenizer.encode("H", true).expect("encodes"), [315, 39]);
    assert_eq!(tokenizer.encode("H", false).expect("encodes"), [39]);
}

#[test]
fn truncation_and_padding_are_ignored() {
    let mut json = golden_json();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": null,
        "pad_id": 315, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes()).expect("loads");
    assert_eq!(tokenizer.encode("HHHH", true).expect("encodes"), [39; 4]);
}

#[test]
fn bad_files_are_refused_with_a_sentence() {
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let deep_decoder = format!("{{\"decoder\": {deep}}}");
    for bytes in [&b""[..], b"\xff\xfe", b"{", b"[]", b"7", b"{}", deep.as_bytes(), deep_decoder.as_bytes()] {
        let error = Tokenizer::from_bytes("some/tokenizer.json", bytes).expect_err("refused").to_string();
        assert!(error.starts_with("some/tokenizer.json") && error.len() < 400, "{error}");
    }
}

#[test]
fn parts_that_are_not_supported_are_named() {
    let template = |id: &str, token: &str| {
        json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1],
            "tokens": ["<s>"]}}, "single": [{"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": id, "type_id": 0}}]})
    };
    let twice = json!({"type": "Sequence", "processors": [template("A", "<s>"), template("A", "<s>")]});
    let cases = [
        ("/model/type", json!("Unigram"), "the model Unigram is not supported"),
        ("/model/continuing_subword_prefix", json!("é"), "no continuing_subword_prefix"),
        ("/model/dropout", json!(0.1), "no dropout"),
        ("/model/merges/0", json!(["H", "Hello"]), "merge of `H` and `Hello`"),
        ("/model/merges", json!(["H Hello"]), "merge of `H` and `Hello`"),
        ("/model/vocab", json!(["H"]), "does not describe a tokenizer"),
        (
            "/normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": ""}),
            "the normalizer Precompiled",
        ),
        ("/normalizer", json!({"type": "Prepend", "prepend": ""}), "must not be empty"),
        ("/normalizer", json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"}), "not empty"),
        ("/normalizer", json!({"type": "Replace", "pattern": {"Regex": "a|"}, "content": "x"}), "a String"),
        (
            "/pre_tokenizer/pretokenizers/1",
            json!({"type": "FixedLength", "length": 0}),
            "pre_tokenizer FixedLength",
        ),
        ("/decoder", json!({"type": "Rot13"}), "the decoder Rot13"),
        ("/decoder", json!(7), "the decoder without a type"),
        ("/decoder", json!({"type": "Strip", "content": "a", "start": 0, "stop": 1}), "its stop must be 0"),
        ("/post_processor", template("B", "<s>"), "Sequence A once"),
        ("/post_processor", template("A", "</s>"), "special tokens that it defines"),
        ("/post_processor", twice, "only once"),
    ];
    for (pointer, value, expected) in cases {
        let mut json = golden_json();
        *json.pointer_mut(pointer).expect("a field of the file") = value;
        let error = load_error(&json);
        assert!(error.starts_with("tokenizer.json") && error.contains(expected), "{pointer}: {error}");
    }
}

#[test]
fn template_ids_count_as_vocabulary() {
    let mut json = golden_json();
    json["post_processor"] = json!({"type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [4000], "tokens": ["<s>"]}}});
    let tokenizer = Tokenizer::from_bytes("tokenizer.json", json.to_string().as_bytes()).expect("loads");
    assert_eq!(tokenizer.encode("H", true).expect("encodes"), [4000, 39]);
    assert_eq!(tokenizer.vocab_size(), 4001);
}
