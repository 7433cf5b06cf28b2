//! [`Detokenizer`]: text from token ids, one at a time, in whole characters.
//!
//! A token may hold part of a character, so up to three bytes wait for the next one. Nothing else is kept but
//! the last id: a step costs the same however long the text is. It knows neither stop strings nor chat
//! structure.

use crate::formats::tokenizer::{Tokenizer, TokenizerError};

/// The text of a growing sequence of token ids.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    skip_special: bool,
    /// Special tokens that are text nevertheless.
    shown: Vec<u32>,
    previous: Option<u32>,
    /// Bytes that are not text yet: after a push, the beginning of one character.
    pending: Vec<u8>,
    text: String,
}

impl Detokenizer {
    /// An empty sequence. Special tokens add nothing to the text if `skip_special`.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, shown: Vec::new(), previous: None, pending: Vec::new(), text: String::new() }
    }

    /// The same, where these tokens are text although they are special: those that a dialect reads.
    pub fn showing(mut self, special: Vec<u32>) -> Self {
        self.shown = special;
        self
    }

    /// Adds a token and returns the text that is now certain, which is empty while a character is incomplete.
    /// Bytes that can never become UTF-8 appear as U+FFFD, as in [`Tokenizer::decode`].
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the tokenizer's decoder fails.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<&str, TokenizerError> {
        self.text.clear();
        if self.skip_special && tokenizer.is_special(id) && !self.shown.contains(&id) {
            return Ok(&self.text);
        }
        self.pending.extend(tokenizer.bytes_after(self.previous, id)?);
        self.previous = Some(id);
        let n_certain = self.pending.len() - incomplete_tail(&self.pending);
        self.text.push_str(&String::from_utf8_lossy(&self.pending[..n_certain]));
        self.pending.drain(..n_certain);
        Ok(&self.text)
    }

    /// Ends the sequence and returns what is left: U+FFFD for an incomplete character, otherwise nothing.
    pub fn flush(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        self.previous = None;
        &self.text
    }
}

/// How many bytes at the end of `bytes` are the beginning of one character.
fn incomplete_tail(bytes: &[u8]) -> usize {
    let Some(last) = bytes.utf8_chunks().last() else { return 0 };
    let could_grow = std::str::from_utf8(last.invalid()).is_err_and(|error| error.error_len().is_none());
    if could_grow { last.invalid().len() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;
    use std::sync::LazyLock;

    /// Byte-level BPE: one character a byte, every byte a token.
    static BYTE_LEVEL: LazyLock<Tokenizer> = LazyLock::new(|| {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_moe-bf16/tokenizer.json");
        let bytes = std::fs::read(file).expect("the golden tokenizer is there");
        Tokenizer::from_bytes("tokenizer.json", &bytes).expect("the golden tokenizer loads")
    });

    /// SentencePiece-like BPE: a space is `▁`, bytes outside the vocabulary are `<0xHH>`.
    static BYTE_FALLBACK: LazyLock<Tokenizer> = LazyLock::new(|| {
        let mut tokens: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
        tokens.extend(["<s>", "▁", "a", "é", "▁a"].map(String::from));
        let vocab: serde_json::Map<_, _> = tokens.into_iter().zip((0u32..).map(Into::into)).collect();
        let json = serde_json::json!({
            "added_tokens": [{"id": 256, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": [["▁", "a"]]},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
        });
        Tokenizer::from_bytes("fallback", json.to_string().as_bytes()).expect("a valid tokenizer")
    });

    fn pushed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(detokenizer.push(tokenizer, id).expect("decodes"));
            assert!(detokenizer.pending.len() < 4, "{:?}", detokenizer.pending);
        }
        text + detokenizer.flush()
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        for tokenizer in [&*BYTE_LEVEL, &*BYTE_FALLBACK] {
            let ids = tokenizer.encode("🙂", false).expect("encodes");
            assert_eq!(ids.len(), 4);
            let mut detokenizer = Detokenizer::new(false);
            for &id in &ids[..3] {
                assert_eq!(detokenizer.push(tokenizer, id).expect("decodes"), "");
            }
            assert_eq!(detokenizer.push(tokenizer, ids[3]).expect("decodes"), "🙂");
            assert_eq!(detokenizer.flush(), "");
        }
    }

    #[test]
    fn an_unfinished_character_is_flushed_as_a_replacement() {
        let ids = BYTE_LEVEL.encode("🙂", false).expect("encodes");
        assert_eq!(pushed(&BYTE_LEVEL, &ids[..2], false), "\u{FFFD}");
        assert_eq!(pushed(&BYTE_LEVEL, &[ids[0], ids[0], ids[1]], false), "\u{FFFD}\u{FFFD}");
    }

    #[test]
    fn special_tokens_are_left_out_unless_they_are_shown() {
        let special = BYTE_FALLBACK.token_to_id("<s>").expect("is there");
        let text = |mut detokenizer: Detokenizer| {
            detokenizer.push(&BYTE_FALLBACK, special).expect("decodes").to_owned()
        };
        assert_eq!(text(Detokenizer::new(true)), "");
        assert_eq!(text(Detokenizer::new(true).showing(vec![special])), "<s>");
    }

    proptest! {
        #[test]
        fn byte_level_pushes_add_up_to_decode(ids in prop::collection::vec(0u32..330, 0..200), skip: bool) {
            let whole = BYTE_LEVEL.decode(&ids, skip).expect("decodes");
            prop_assert_eq!(pushed(&BYTE_LEVEL, &ids, skip), whole);
        }

        #[test]
        fn byte_fallback_pushes_add_up_to_decode(text in "<s>|[ aé你🙂▁]{0,40}", skip: bool) {
            let ids = BYTE_FALLBACK.encode(&text, false).expect("encodes");
            let whole = BYTE_FALLBACK.decode(&ids, skip).expect("decodes");
            prop_assert_eq!(pushed(&BYTE_FALLBACK, &ids, skip), whole);
        }
    }
}
