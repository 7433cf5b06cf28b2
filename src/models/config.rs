//! Checked reading of a `config.json`: every number has a range, and what is wrong with it is said with the field's name.

use std::{fmt::Display, ops::RangeInclusive};

use serde_json::{Map, Value};

use super::MODEL_TYPES;
use crate::formats::quantised::FP8_BLOCK;

/// A field of a configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{file}: `{field}` {problem}")]
pub struct ConfigError {
    /// The file.
    pub file: String,
    /// Path of the field.
    pub field: String,
    /// What is wrong with it and what would be right.
    pub problem: String,
}

/// A `config.json` and where it came from.
#[derive(Debug, Clone, Copy)]
pub struct ConfigFile<'a> {
    file: &'a str,
    /// Fields that hold this object, with a dot behind each.
    path: &'a str,
    fields: &'a Map<String, Value>,
}

impl<'a> ConfigFile<'a> {
    /// The fields of `file`.
    pub fn new(file: &'a str, fields: &'a Map<String, Value>) -> Self {
        ConfigFile { file, path: "", fields }
    }

    /// An error about a field.
    pub fn error(&self, field: &str, problem: impl Into<String>) -> ConfigError {
        ConfigError {
            file: self.file.into(),
            field: format!("{}{field}", self.path),
            problem: problem.into(),
        }
    }

    pub(super) fn unknown_model_type(&self, model_type: &str) -> ConfigError {
        let shown: String = model_type.chars().filter(|c| !c.is_control()).take(60).collect();
        self.error(
            "model_type",
            format!("is \"{shown}\", which is not one of those that run: {}", MODEL_TYPES.join(", ")),
        )
    }

    /// A field that is there and not null.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn required<T>(&self, field: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| self.error(field, "is missing; this is not a complete config.json"))
    }

    /// Whether the field is there and not null.
    pub fn has(&self, field: &str) -> bool {
        self.get(field).is_some()
    }

    /// A string.
    pub fn text(&self, field: &str) -> Result<String, ConfigError> {
        let value = self.required(field, self.get(field))?;
        value.as_str().map(str::to_owned).ok_or_else(|| self.error(field, "must be a string"))
    }

    /// A whole number in a range, or `None` where the field is absent or null.
    pub fn optional_count(
        &self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let count = value.as_u64().and_then(|v| usize::try_from(v).ok());
        self.in_range(field, count, range).map(Some)
    }

    /// A whole number in a range.
    pub fn count(&self, field: &str, range: RangeInclusive<usize>) -> Result<usize, ConfigError> {
        self.required(field, self.optional_count(field, range)?)
    }

    /// A number in a range, or `None` where the field is absent or null.
    pub fn optional_number(
        &self,
        field: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        self.in_range(field, value.as_f64(), range).map(Some)
    }

    /// A number in a range.
    pub fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<f64, ConfigError> {
        self.required(field, self.optional_number(field, range)?)
    }

    fn in_range<T: PartialOrd + Display>(
        &self,
        field: &str,
        value: Option<T>,
        range: RangeInclusive<T>,
    ) -> Result<T, ConfigError> {
        value.filter(|v| range.contains(v)).ok_or_else(|| {
            let found: String = self.fields[field].to_string().chars().take(40).collect();
            self.error(
                field,
                format!("is {found}; it must be a number from {} to {}", range.start(), range.end()),
            )
        })
    }

    /// `true` or `false`, with a default.
    pub fn flag(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.error(field, "must be true or false"))
    }

    /// A list of whole numbers below `below`, empty where the field is absent.
    pub fn counts(&self, field: &str, below: usize) -> Result<Vec<usize>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let number = |v: &Value| v.as_u64().and_then(|v| usize::try_from(v).ok()).filter(|v| *v < below);
        let list = value.as_array().map(|list| list.iter().map(number).collect::<Option<Vec<_>>>());
        list.flatten()
            .ok_or_else(|| self.error(field, format!("must be a list of whole numbers below {below}")))
    }

    /// A list of `n` words, or `None` where the field is absent.
    pub fn words(&self, field: &str, n: usize) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let words = value.as_array().map(|list| list.iter().map(Value::as_str).collect::<Option<Vec<_>>>());
        let words = words.flatten().filter(|words| words.len() == n);
        words.map(Some).ok_or_else(|| self.error(field, format!("must be a list of {n} words, one a layer")))
    }

    /// An object, or `None` where the field is absent or null. `path` is its name with a dot behind.
    pub fn object(&self, field: &str, path: &'a str) -> Result<Option<ConfigFile<'a>>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let fields = value.as_object().ok_or_else(|| self.error(field, "must be an object"))?;
        Ok(Some(ConfigFile { file: self.file, path, fields }))
    }

    /// Refuses an activation other than silu.
    pub(super) fn silu(&self) -> Result<(), ConfigError> {
        match self.has("hidden_act").then(|| self.text("hidden_act")).transpose()?.as_deref() {
            None | Some("silu" | "swish") => Ok(()),
            Some(_) => Err(self.error("hidden_act", "must be \"silu\" for this architecture")),
        }
    }

    /// Refuses weights quantised in a way that no scheme of [`crate::formats::quantised`] reads. What is read is told by the
    /// tensors; this says it before a tensor with a strange name is missing.
    pub(super) fn known_quantisation(&self) -> Result<(), ConfigError> {
        let Some(quantisation) = self.object("quantization_config", "quantization_config.")? else {
            return Ok(());
        };
        let one_of = |field: &str, known: &[&str]| {
            let found = quantisation.text(field)?;
            if known.contains(&found.as_str()) {
                return Ok(found);
            }
            let found: String = found.chars().filter(|c| !c.is_control()).take(60).collect();
            let problem = format!("is \"{found}\", which does not run; those that do: {}", known.join(", "));
            Err(quantisation.error(field, problem))
        };
        let methods = ["fp8", "modelopt", "modelopt_fp4", "compressed-tensors", "mxfp4"];
        match one_of("quant_method", &methods)?.as_str() {
            "fp8" => {
                let block = quantisation.counts("weight_block_size", 1 << 20)?;
                if !block.is_empty() && block != [FP8_BLOCK; 2] {
                    let problem = "must be [128, 128]; other blocks do not run";
                    return Err(quantisation.error("weight_block_size", problem));
                }
            }
            "modelopt" | "modelopt_fp4" if quantisation.has("quant_algo") => {
                one_of("quant_algo", &["NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION"])?;
            }
            "compressed-tensors" => {
                let packed = ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized"];
                one_of("format", &[&packed[..], &["mixed-precision"]].concat())?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Refuses attention over a sliding window.
    pub(super) fn full_attention(&self) -> Result<(), ConfigError> {
        if self.flag("use_sliding_window", false)? && self.has("sliding_window") {
            return Err(
                self.error("use_sliding_window", "is true; this architecture runs with full attention only")
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(json: Value) -> Map<String, Value> {
        json.as_object().unwrap().clone()
    }

    #[test]
    fn quantisation_that_does_not_run_is_said() {
        let check = |json: Value| {
            let fields = fields(serde_json::json!({ "quantization_config": json }));
            ConfigFile::new("config.json", &fields).known_quantisation().map_err(|e| e.to_string())
        };
        for known in [
            serde_json::json!(null),
            serde_json::json!({ "quant_method": "fp8" }),
            serde_json::json!({ "quant_method": "fp8", "weight_block_size": [128, 128] }),
            serde_json::json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }),
            serde_json::json!({ "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" }),
            serde_json::json!({ "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized" }),
            serde_json::json!({ "quant_method": "compressed-tensors", "format": "mixed-precision" }),
            serde_json::json!({ "quant_method": "mxfp4" }),
        ] {
            check(known).unwrap();
        }
        for (json, part) in [
            (serde_json::json!({}), "`quantization_config.quant_method` is missing"),
            (
                serde_json::json!({ "quant_method": "gptq" }),
                "is \"gptq\", which does not run; those that do: fp8",
            ),
            (
                serde_json::json!({ "quant_method": "fp8", "weight_block_size": [64, 64] }),
                "`quantization_config.weight_block_size` must be [128, 128]",
            ),
            (
                serde_json::json!({ "quant_method": "compressed-tensors", "format": "pack-quantized" }),
                "`quantization_config.format` is \"pack-quantized\"",
            ),
            (
                serde_json::json!({ "quant_method": "modelopt", "quant_algo": "W4A8_AWQ" }),
                "`quantization_config.quant_algo` is \"W4A8_AWQ\"",
            ),
        ] {
            let sentence = check(json).unwrap_err();
            assert!(sentence.contains(part), "{sentence}");
        }
    }

    #[test]
    fn wrong_fields_are_named() {
        let fields = fields(serde_json::json!({
            "a": 1e9, "b": -1, "c": "x", "d": 0.5, "e": [1, 2], "f": [1, -2], "g": 10, "h": null, "i": true
        }));
        let c = ConfigFile::new("config.json", &fields);
        assert_eq!(c.count("g", 1..=10).unwrap(), 10);
        assert_eq!(c.optional_count("h", 1..=2).unwrap(), None);
        assert_eq!(c.counts("e", 3).unwrap(), [1, 2]);
        assert!(c.flag("i", false).unwrap() && c.flag("none", true).unwrap());
        for (error, part) in [
            (c.count("a", 1..=5).unwrap_err(), "`a` is 1000000000.0; it must be a number from 1 to 5"),
            (c.count("b", 1..=5).unwrap_err(), "`b` is -1"),
            (c.count("c", 1..=5).unwrap_err(), "`c` is \"x\""),
            (c.count("d", 0..=5).unwrap_err(), "`d` is 0.5"),
            (c.count("none", 0..=5).unwrap_err(), "`none` is missing"),
            (c.count("h", 0..=5).unwrap_err(), "`h` is missing"),
            (c.counts("f", 5).unwrap_err(), "`f` must be a list"),
            (c.number("c", 0.0..=1.0).unwrap_err(), "`c` is \"x\""),
            (c.flag("g", true).unwrap_err(), "`g` must be true or false"),
            (c.text("g").unwrap_err(), "`g` must be a string"),
        ] {
            assert!(error.to_string().contains(part), "{error}");
            assert!(error.to_string().starts_with("config.json: "), "{error}");
        }
    }
}
