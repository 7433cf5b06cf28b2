//! [`Tokenizer`]: `tokenizer.json` checked, and text to token ids and back.
//!
//! The algorithm is the `tokenizers` crate's; `check` stands between a foreign file and that crate. Added
//! here are the bytes of a single token, from which text is built as it is generated. It knows no chat
//! template: rendered chat text already holds its special tokens, so it is encoded without adding any.

mod check;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::decoders::DecoderWrapper;

use super::error::{FormatError, shorten};
use super::json;

/// Why a tokenizer could not be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is no JSON.
    #[error(transparent)]
    File(#[from] FormatError),
    /// A part, or a parameter of a part, that is not supported.
    #[error("{file}: the {field} {found} is not supported: {needed}")]
    Unsupported {
        /// The path or label.
        file: String,
        /// The field that holds the part.
        field: &'static str,
        /// The part's type.
        found: String,
        /// What would be supported, in words.
        needed: &'static str,
    },
    /// Two tokens merge into one that does not exist.
    #[error(
        "{file}: the merge of `{left}` and `{right}` gives no token of the vocabulary; download the file again"
    )]
    Merge {
        /// The path or label.
        file: String,
        /// First token.
        left: String,
        /// Second token.
        right: String,
    },
    /// A field is missing, has the wrong type, or contradicts another.
    #[error("{file} does not describe a tokenizer: {reason}; download it again")]
    Malformed {
        /// The path or label.
        file: String,
        /// The crate's reason.
        reason: String,
    },
    /// The tokenizer could emit ids for which the model has no embedding.
    #[error(
        "{file} has token ids up to {highest}, but the model's vocab_size is {vocab_size}: the tokenizer belongs \
         to another model; use the tokenizer.json that came with the weights"
    )]
    BeyondModel {
        /// The path or label.
        file: String,
        /// Highest token id.
        highest: usize,
        /// The model's number of ids.
        vocab_size: usize,
    },
    /// A text has no encoding.
    #[error("{file} cannot encode this text: {reason}")]
    Encode {
        /// The path or label.
        file: String,
        /// The crate's reason.
        reason: String,
    },
    /// Ids have no text.
    #[error("{file} cannot decode these token ids: {reason}")]
    Decode {
        /// The path or label.
        file: String,
        /// The crate's reason.
        reason: String,
    },
}

/// Text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The path or label that errors name.
    file: String,
    vocab_size: usize,
    /// Tokens are spelled in GPT-2's byte alphabet, one character a byte.
    byte_level: bool,
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`; `label` names it in errors.
    ///
    /// # Errors
    /// [`TokenizerError`] for bytes that are not JSON, or JSON that is not a BPE tokenizer.
    pub fn from_bytes(label: &str, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let mut json: Value = json::parse(label, bytes)?;
        check::check(label, &json)?;
        if let Some(fields) = json.as_object_mut() {
            // Left over from training: a prompt is never silently cut or padded.
            fields.remove("truncation");
            fields.remove("padding");
        }
        let inner = tokenizers::Tokenizer::deserialize(&json).map_err(|error| TokenizerError::Malformed {
            file: label.to_string(),
            reason: shorten(&error.to_string()),
        })?;
        let ids = inner.get_vocab(true).into_values().chain(check::template_ids(&json));
        let vocab_size = ids.max().map_or(0, |highest| highest as usize + 1);
        let byte_level = match inner.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => true,
            Some(DecoderWrapper::Sequence(steps)) => {
                matches!(steps.get_decoders(), [DecoderWrapper::ByteLevel(_)])
            }
            _ => false,
        };
        Ok(Self { inner, file: label.to_string(), vocab_size, byte_level })
    }

    /// One more than the highest id that [`Tokenizer::encode`] can return.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Checks that every id has a row in a model's embedding of `model_vocab_size` rows.
    ///
    /// # Errors
    /// [`TokenizerError::BeyondModel`]. Fewer ids than rows is usual: embeddings are padded.
    pub fn check_vocab(&self, model_vocab_size: usize) -> Result<(), TokenizerError> {
        if self.vocab_size <= model_vocab_size {
            return Ok(());
        }
        Err(TokenizerError::BeyondModel {
            file: self.file.clone(),
            highest: self.vocab_size - 1,
            vocab_size: model_vocab_size,
        })
    }

    /// The ids of `text`; special tokens spelled out in it become their ids. `add_special_tokens` adds those
    /// that the file puts around a plain text (such as a beginning-of-text token).
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] for a character that a vocabulary without byte fallback lacks.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        match self.inner.encode_fast(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => {
                Err(TokenizerError::Encode { file: self.file.clone(), reason: shorten(&error.to_string()) })
            }
        }
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD, ids without a token nothing, and so do
    /// special tokens if `skip_special`.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the file's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        self.inner.decode(ids, skip_special).map_err(|error| TokenizerError::Decode {
            file: self.file.clone(),
            reason: shorten(&error.to_string()),
        })
    }

    /// The bytes that `id` adds to a text whose last token is `previous`: part of a character, perhaps.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`] when the file's decoder fails.
    pub fn bytes_after(&self, previous: Option<u32>, id: u32) -> Result<Vec<u8>, TokenizerError> {
        let Some(token) = self.inner.id_to_token(id) else { return Ok(Vec::new()) };
        if self.byte_level {
            let spelled: Option<Vec<u8>> = token.chars().map(byte_of_letter).collect();
            return Ok(spelled.unwrap_or_else(|| token.into_bytes()));
        }
        let alone = self.decode(&[id], false)?;
        if alone != token
            && let Some(byte) = fallback_byte(&token)
        {
            return Ok(vec![byte]);
        }
        let Some(previous) = previous else { return Ok(alone.into_bytes()) };
        let before = self.decode(&[previous], false)?;
        let both = self.decode(&[previous, id], false)?;
        Ok(both.strip_prefix(&before).unwrap_or(&alone).as_bytes().to_vec())
    }

    /// The id of a token spelled as in the file.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether `id` is a token that the file marks as special: structure, not text.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        self.inner.id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }
}

/// The byte behind a letter of GPT-2's alphabet: printable Latin-1 stands for itself, and U+0100 onwards for
/// the other 68 bytes in ascending order.
fn byte_of_letter(letter: char) -> Option<u8> {
    let byte = match letter {
        '!'..='~' | '\u{A1}'..='\u{AC}' | '\u{AE}'..='\u{FF}' => u32::from(letter),
        '\u{100}'..='\u{120}' => u32::from(letter) - 0x100,
        '\u{121}'..='\u{142}' => u32::from(letter) - 0x121 + 0x7F,
        '\u{143}' => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The byte that a SentencePiece fallback token such as `<0x0A>` stands for.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}
