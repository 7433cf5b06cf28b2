//! [`GenerationConfig`]: what a checkpoint says about how to generate from it.
//!
//! The fields are those of Hugging Face's `generation_config.json`; unknown ones are ignored, `null` means
//! absent. Older checkpoints name their end-of-sequence token only in `config.json`. It knows no sampling
//! algorithm, and reads no file: it takes parsed JSON and the label to use in errors.

use serde_json::Value;

use super::error::shorten;
use crate::engine::sampling::{ParamOutOfRange, SamplingParams};

/// How many end-of-sequence tokens a checkpoint may have.
const MAX_EOS_TOKENS: usize = 64;

/// A generation field that cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GenerationConfigError {
    /// The file is JSON, but not an object.
    #[error("{file} must be a JSON object; download it again")]
    NotAnObject {
        /// The path or label.
        file: String,
    },
    /// A field of the wrong type, or a number out of reach.
    #[error("{file}: {field} is {found}, but must be {expected}; correct the field or remove it")]
    Field {
        /// The path or label.
        file: String,
        /// The field.
        field: &'static str,
        /// What the file says, shortened.
        found: String,
        /// What is allowed, in words.
        expected: &'static str,
    },
    /// A sampling parameter outside its range.
    #[error("{file}: {source}; correct the field or remove it")]
    Sampling {
        /// The path or label.
        file: String,
        /// The field, its value and its range.
        source: ParamOutOfRange,
    },
}

/// A checkpoint's generation defaults. `None` where it does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Tokens that end a sequence; empty if the checkpoint names none.
    pub eos_token_ids: Vec<u32>,
    /// The token that begins a sequence.
    pub bos_token_id: Option<u32>,
    /// Whether to sample; `Some(false)` is greedy whatever the parameters below say.
    pub do_sample: Option<bool>,
    /// See [`SamplingParams::temperature`].
    pub temperature: Option<f32>,
    /// See [`SamplingParams::top_k`]; the file's -1 is read as 0 (off).
    pub top_k: Option<u32>,
    /// See [`SamplingParams::top_p`].
    pub top_p: Option<f32>,
    /// See [`SamplingParams::min_p`].
    pub min_p: Option<f32>,
    /// See [`SamplingParams::repetition_penalty`].
    pub repetition_penalty: Option<f32>,
    /// The most tokens to generate, at least 1.
    pub max_new_tokens: Option<u32>,
}

impl GenerationConfig {
    /// Reads a parsed `generation_config.json`; `file` names it in errors.
    ///
    /// # Errors
    /// [`GenerationConfigError`] naming the file, the field, and what it must be.
    pub fn parse(file: &str, json: &Value) -> Result<Self, GenerationConfigError> {
        let fields = Fields::new(file, json)?;
        let config = Self {
            eos_token_ids: fields.eos_token_ids()?,
            bos_token_id: fields.get("bos_token_id", "a token id", as_u32)?,
            do_sample: fields.get("do_sample", "true or false", Value::as_bool)?,
            temperature: fields.get("temperature", NUMBER, as_f32)?,
            top_k: fields.get("top_k", "a whole number from 0 (off)", as_top_k)?,
            top_p: fields.get("top_p", NUMBER, as_f32)?,
            min_p: fields.get("min_p", NUMBER, as_f32)?,
            repetition_penalty: fields.get("repetition_penalty", NUMBER, as_f32)?,
            max_new_tokens: fields.get("max_new_tokens", "a whole number from 1", as_positive)?,
        };
        config
            .sampled()
            .validated()
            .map_err(|source| GenerationConfigError::Sampling { file: file.to_string(), source })?;
        Ok(config)
    }

    /// Takes the tokens that this configuration does not name from a parsed `config.json`, where multimodal
    /// models keep them under `text_config`.
    ///
    /// # Errors
    /// [`GenerationConfigError`] naming the file, the field, and what it must be.
    pub fn or_from_config(mut self, file: &str, json: &Value) -> Result<Self, GenerationConfigError> {
        for part in [Some(json), json.get("text_config")].into_iter().flatten() {
            let fields = Fields::new(file, part)?;
            if self.eos_token_ids.is_empty() {
                self.eos_token_ids = fields.eos_token_ids()?;
            }
            if self.bos_token_id.is_none() {
                self.bos_token_id = fields.get("bos_token_id", "a token id", as_u32)?;
            }
        }
        Ok(self)
    }

    /// The sampling parameters for a request that asks for none. Without a `do_sample` the checkpoint samples
    /// if it sets any of temperature, top-k, top-p and min-p, and is greedy otherwise.
    pub fn defaults(&self) -> SamplingParams {
        let sets_sampling = self.temperature.or(self.top_p).or(self.min_p).is_some() || self.top_k.is_some();
        let sampled = self.sampled();
        if self.do_sample.unwrap_or(sets_sampling) {
            sampled
        } else {
            SamplingParams { repetition_penalty: sampled.repetition_penalty, ..SamplingParams::GREEDY }
        }
    }

    /// The parameters as they are when the checkpoint samples.
    fn sampled(&self) -> SamplingParams {
        let off = SamplingParams::GREEDY;
        SamplingParams {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(off.top_k),
            top_p: self.top_p.unwrap_or(off.top_p),
            min_p: self.min_p.unwrap_or(off.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(off.repetition_penalty),
            ..off
        }
    }
}

const NUMBER: &str = "a number";

/// A JSON object and the label to use in errors.
struct Fields<'a> {
    file: &'a str,
    json: &'a Value,
}

impl<'a> Fields<'a> {
    fn new(file: &'a str, json: &'a Value) -> Result<Self, GenerationConfigError> {
        if json.is_object() {
            Ok(Self { file, json })
        } else {
            Err(GenerationConfigError::NotAnObject { file: file.to_string() })
        }
    }

    /// The field as `read` understands it, `None` if it is absent or null.
    fn get<T>(
        &self,
        field: &'static str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, GenerationConfigError> {
        match &self.json[field] {
            Value::Null => Ok(None),
            value => read(value).map(Some).ok_or_else(|| GenerationConfigError::Field {
                file: self.file.to_string(),
                field,
                found: shorten(&value.to_string()),
                expected,
            }),
        }
    }

    fn eos_token_ids(&self) -> Result<Vec<u32>, GenerationConfigError> {
        let ids = self.get("eos_token_id", "a token id or a list of at most 64", |value| match value {
            Value::Array(ids) if ids.len() <= MAX_EOS_TOKENS => ids.iter().map(as_u32).collect(),
            Value::Array(_) => None,
            id => as_u32(id).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

fn as_u32(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

fn as_positive(value: &Value) -> Option<u32> {
    as_u32(value).filter(|&number| number > 0)
}

fn as_f32(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32)
}

/// Some checkpoints turn top-k off with -1.
fn as_top_k(value: &Value) -> Option<u32> {
    if value.as_i64() == Some(-1) { Some(0) } else { as_u32(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(json: Value) -> Result<GenerationConfig, String> {
        GenerationConfig::parse("generation_config.json", &json).map_err(|error| error.to_string())
    }

    #[test]
    fn fields_are_read_and_unknown_ones_ignored() {
        let config = parse(json!({
            "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": -1, "do_sample": true, "temperature": 0.5,
            "top_k": 20, "top_p": 0.75, "min_p": null, "repetition_penalty": 1.25, "max_new_tokens": 2048,
            "transformers_version": "5.0",
        }));
        let expected = GenerationConfig {
            eos_token_ids: vec![2, 3],
            bos_token_id: Some(1),
            do_sample: Some(true),
            temperature: Some(0.5),
            top_k: Some(20),
            top_p: Some(0.75),
            min_p: None,
            repetition_penalty: Some(1.25),
            max_new_tokens: Some(2048),
        };
        assert_eq!(config.as_ref(), Ok(&expected));
        let defaults = SamplingParams {
            temperature: 0.5,
            top_k: 20,
            top_p: 0.75,
            repetition_penalty: 1.25,
            ..SamplingParams::GREEDY
        };
        assert_eq!(expected.defaults(), defaults);
    }

    #[test]
    fn sampling_is_on_when_asked_for() {
        let defaults = |json| parse(json).expect("a valid configuration").defaults();
        let sampled = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
        assert_eq!(defaults(json!({})), SamplingParams::GREEDY);
        assert_eq!(defaults(json!({"do_sample": true, "top_k": -1})), sampled);
        assert_eq!(defaults(json!({"top_p": 0.5})), SamplingParams { top_p: 0.5, ..sampled });
        let greedy = defaults(json!({"do_sample": false, "temperature": 0.5, "repetition_penalty": 1.5}));
        assert_eq!(greedy, SamplingParams { repetition_penalty: 1.5, ..SamplingParams::GREEDY });
    }

    #[test]
    fn config_json_fills_in_the_tokens_that_are_missing() {
        let fill = |generation, config| {
            let generation = parse(generation).expect("a valid configuration");
            let filled =
                generation.or_from_config("config.json", &config).map_err(|error| error.to_string())?;
            Ok::<_, String>((filled.eos_token_ids, filled.bos_token_id))
        };
        let config = json!({"eos_token_id": 7, "bos_token_id": 8});
        assert_eq!(fill(json!({"eos_token_id": 1}), config.clone()), Ok((vec![1], Some(8))));
        assert_eq!(fill(json!({}), config.clone()), Ok((vec![7], Some(8))));
        assert_eq!(fill(json!({}), json!({"text_config": config})), Ok((vec![7], Some(8))));
        assert_eq!(
            fill(json!({}), json!({"eos_token_id": "</s>"})),
            Err("config.json: eos_token_id is \"</s>\", but must be a token id or a list of at most 64; correct the \
                 field or remove it"
                .into())
        );
    }

    #[test]
    fn errors_name_file_field_and_what_is_allowed() {
        let cases = [
            (json!([]), "must be a JSON object"),
            (json!({"eos_token_id": -1}), "eos_token_id is -1"),
            (json!({"eos_token_id": [1, 4294967296u64]}), "eos_token_id is [1,4294967296]"),
            (json!({"eos_token_id": vec![1; 65]}), "at most 64"),
            (json!({"bos_token_id": 1.5}), "bos_token_id is 1.5"),
            (json!({"do_sample": "yes"}), "do_sample is \"yes\", but must be true or false"),
            (json!({"temperature": "hot"}), "temperature is \"hot\", but must be a number"),
            (json!({"temperature": 1e300}), "temperature is inf, but must be from 0"),
            (json!({"do_sample": false, "temperature": -1}), "temperature is -1"),
            (json!({"top_k": -2}), "top_k is -2"),
            (json!({"top_p": 0}), "top_p is 0, but must be above 0"),
            (json!({"min_p": 2}), "min_p is 2"),
            (json!({"repetition_penalty": 0}), "repetition_penalty is 0"),
            (json!({"max_new_tokens": 0}), "max_new_tokens is 0"),
        ];
        for (json, expected) in cases {
            let error = parse(json).expect_err("refused");
            assert!(error.starts_with("generation_config.json") && error.contains(expected), "{error}");
        }
    }
}
