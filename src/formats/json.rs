//! JSON of bounded size, with errors that name the file and the line.
//!
//! Knows no schema. Whether a repeated key is an error is asked by type: plain maps and `serde_json::Value` keep
//! the last value, [`UniqueMap`] and [`UniqueValue`] refuse, and so does a derived struct for its own fields.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::error::{FormatError, shorten};
use super::mapped::open_file;

/// Bytes that a configuration, an index or a chat template may have.
pub const CONFIG_LIMIT: u64 = 64 << 20;
/// Bytes that `tokenizer.json` may have.
pub const TOKENIZER_LIMIT: u64 = 256 << 20;

/// Reads the JSON file at `path` of at most `limit` bytes.
///
/// # Errors
/// Those of [`read_bytes`] and [`parse`].
pub fn read<T: de::DeserializeOwned>(path: &Path, limit: u64) -> Result<T, FormatError> {
    parse(&path.display().to_string(), &read_bytes(path, limit)?)
}

/// Reads the file at `path`, of which at most `limit` + 1 bytes are looked at.
///
/// # Errors
/// [`FormatError`] when the path is absent, a directory, not a regular file, unreadable, or larger than `limit`.
pub fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, FormatError> {
    let mut bytes = Vec::new();
    let mut file = open_file(path)?.take(limit.saturating_add(1));
    file.read_to_end(&mut bytes).map_err(|source| FormatError::read(path, source))?;
    if bytes.len() as u64 > limit {
        return Err(FormatError::TooLarge { file: path.display().to_string(), limit });
    }
    Ok(bytes)
}

/// Parses `bytes` as one JSON value; `label` names them in errors.
///
/// # Errors
/// [`FormatError`] for text that is not UTF-8, not JSON, nested more than 127 levels deep, or not a `T`.
pub fn parse<'a, T: Deserialize<'a>>(label: &str, bytes: &'a [u8]) -> Result<T, FormatError> {
    let file = || label.to_string();
    let text = std::str::from_utf8(bytes)
        .map_err(|error| FormatError::NotUtf8 { file: file(), offset: error.valid_up_to() })?;
    serde_json::from_str(text).map_err(|error| {
        let detail = error.to_string();
        // The crate gives this error no code of its own; its text is the only sign.
        if detail.starts_with("recursion limit exceeded") {
            FormatError::TooDeep { file: file(), line: error.line(), column: error.column() }
        } else if error.is_data() {
            FormatError::WrongJson { file: file(), detail: shorten(&detail) }
        } else {
            FormatError::NotJson { file: file(), detail: shorten(&detail) }
        }
    })
}

/// The error of a key that an object already has.
pub(super) fn repeated_key<E: de::Error>(key: &str) -> E {
    E::custom(format_args!("the key `{key}` appears twice"))
}

/// A JSON object whose keys are unique.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueMap<V>(pub BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = object.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(repeated_key(&key));
            }
            map.insert(key, object.next_value()?);
        }
        Ok(UniqueMap(map))
    }
}

/// Any JSON value whose objects, at every depth, have unique keys.
#[derive(Debug, Clone, PartialEq)]
pub struct UniqueValue(pub Value);

impl<'de> Deserialize<'de> for UniqueValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueValueVisitor).map(Self)
    }
}

struct UniqueValueVisitor;

impl<'de> Visitor<'de> for UniqueValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("a number is not finite"))?;
        Ok(Value::Number(number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(UniqueValue(value)) = array.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = object.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(repeated_key(&key));
            }
            let UniqueValue(value) = object.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
