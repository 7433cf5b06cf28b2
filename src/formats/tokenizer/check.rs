//! What a `tokenizer.json` must be before the `tokenizers` crate may see it.
//!
//! That crate trusts its files: on parameters that no training produces, some of its parts index out of
//! bounds or build strings that are not UTF-8. So the parts that language models use are listed here, with
//! what they may ask for, and anything else is refused by name. Fields of a wrong type pass: the crate has a
//! sentence for those.

use serde_json::Value;

use super::TokenizerError;
use crate::formats::error::shorten;

/// Each field, the name of the list in its `Sequence`, and the types that may stand there.
const PARTS: [(&str, &str, &[&str]); 5] = [
    ("normalizer", "normalizers", &["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"]),
    (
        "pre_tokenizer",
        "pretokenizers",
        &["ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit"],
    ),
    ("model", "", &["BPE"]),
    ("post_processor", "processors", &["ByteLevel", "TemplateProcessing"]),
    ("decoder", "decoders", &["ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"]),
];

/// Refuses every part that is not in [`PARTS`] or asks for more than is supported, and merges into no token.
pub(super) fn check(file: &str, json: &Value) -> Result<(), TokenizerError> {
    for (field, list, types) in PARTS {
        for part in leaves(&json[field], list) {
            // Files older than the type's name hold a BPE model without it.
            let found = if field == "model" && part["type"].is_null() { "BPE" } else { type_of(part) };
            let refuse = |needed| {
                let found = shorten(found);
                Err(TokenizerError::Unsupported { file: file.to_string(), field, found, needed })
            };
            if !types.contains(&found) {
                return refuse("use a checkpoint whose tokenizer is a plain BPE");
            }
            if let Some(needed) = missing(found, part) {
                return refuse(needed);
            }
        }
    }
    let templates =
        leaves(&json["post_processor"], "processors").into_iter().filter(|part| is_template(part));
    if templates.count() > 1 {
        let (field, found) = ("post_processor", "TemplateProcessing".to_string());
        let needed = "it may appear only once";
        return Err(TokenizerError::Unsupported { file: file.to_string(), field, found, needed });
    }
    check_merges(file, &json["model"])
}

/// The ids that the template around a plain text adds, which need not be in the vocabulary.
pub(super) fn template_ids(json: &Value) -> impl Iterator<Item = u32> {
    let templates =
        leaves(&json["post_processor"], "processors").into_iter().filter(|part| is_template(part));
    let tokens =
        templates.filter_map(|part| part["special_tokens"].as_object()).flat_map(|tokens| tokens.values());
    let ids = tokens.filter_map(|token| token["ids"].as_array()).flatten();
    ids.filter_map(|id| u32::try_from(id.as_u64()?).ok())
}

/// The parts under a field, with every `Sequence` unrolled.
fn leaves<'a>(part: &'a Value, list: &str) -> Vec<&'a Value> {
    match part[list].as_array() {
        _ if part.is_null() => Vec::new(),
        Some(parts) if type_of(part) == "Sequence" => {
            parts.iter().flat_map(|part| leaves(part, list)).collect()
        }
        _ => vec![part],
    }
}

fn type_of(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("without a type")
}

fn is_template(part: &Value) -> bool {
    type_of(part) == "TemplateProcessing"
}

/// What a part of a supported type must have and lacks.
fn missing(found: &str, part: &Value) -> Option<&'static str> {
    let (is_sound, needed) = match found {
        "BPE" => {
            let prefix = part["continuing_subword_prefix"].as_str().unwrap_or_default();
            let dropout = part["dropout"].as_f64().unwrap_or_default();
            (prefix.is_empty() && dropout == 0.0, "it must have no continuing_subword_prefix and no dropout")
        }
        "Prepend" => {
            let text = part["prepend"].as_str().unwrap_or_default();
            (!text.is_empty(), "its prepend must not be empty")
        }
        "Replace" => {
            let pattern = part["pattern"]["String"].as_str().unwrap_or_default();
            (!pattern.is_empty(), "its pattern must be a String that is not empty")
        }
        "Strip" => (part["stop"].as_u64() == Some(0), "its stop must be 0"),
        "TemplateProcessing" => (
            is_sound_template(part),
            "its single must hold Sequence A once, and special tokens that it defines",
        ),
        _ => return None,
    };
    (!is_sound).then_some(needed)
}

fn is_sound_template(part: &Value) -> bool {
    let Some(pieces) = part["single"].as_array() else { return false };
    let (sequences, tokens): (Vec<_>, Vec<_>) =
        pieces.iter().partition(|piece| piece.get("SpecialToken").is_none());
    let is_defined = |id: &str| part["special_tokens"].get(id).is_some();
    matches!(sequences[..], [sequence] if sequence["Sequence"]["id"] == "A")
        && tokens.iter().all(|token| token["SpecialToken"]["id"].as_str().is_some_and(is_defined))
}

/// Checks that each merge gives a token of the vocabulary.
fn check_merges(file: &str, model: &Value) -> Result<(), TokenizerError> {
    let (Some(vocab), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else {
        return Ok(());
    };
    let mut merged = String::new();
    for (left, right) in merges.iter().filter_map(merge_pair) {
        merged.clear();
        merged.extend([left, right]);
        if !vocab.contains_key(&merged) {
            let (left, right) = (shorten(left), shorten(right));
            return Err(TokenizerError::Merge { file: file.to_string(), left, right });
        }
    }
    Ok(())
}

/// The two tokens of a merge, written `["a", "b"]` or, in older files, `"a b"`.
fn merge_pair(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(line) if !line.starts_with("#version") => line.split_once(' '),
        Value::Array(pair) => match pair.as_slice() {
            [left, right] => left.as_str().zip(right.as_str()),
            _ => None,
        },
        _ => None,
    }
}
