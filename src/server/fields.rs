//! [`Fields`]: a JSON object that is taken apart field by field. A field of the wrong type is an error that names it, and so is
//! one that nobody took: nothing that a client asks for is silently ignored. It knows no protocol.

use serde_json::{Map, Value};

use super::error::{ApiError, Kind};

/// What is left of an object, and where it was in the request.
#[derive(Debug)]
pub(super) struct Fields {
    /// `messages[2].content`; empty for the request itself.
    path: String,
    left: Map<String, Value>,
}

/// A type that a field may have.
pub(super) trait FieldType: Sized {
    /// The type in words, behind "must be".
    const WORDS: &'static str;

    /// `None` where the value has another type.
    fn read(value: Value) -> Option<Self>;
}

impl Fields {
    /// The fields of a request.
    ///
    /// # Errors
    /// Anything but an object.
    pub(super) fn of_request(value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(left) => Ok(Fields { path: String::new(), left }),
            other => {
                let message = format!("the body must be a JSON object, but is {}", shown(&other));
                Err(ApiError::new(Kind::Invalid, message))
            }
        }
    }

    /// The fields of an object inside of a request.
    ///
    /// # Errors
    /// Anything but an object.
    pub(super) fn of(path: impl Into<String>, value: Value) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(left) => Ok(Fields { path, left }),
            other => Err(wrong(&path, &shown(&other), <Map<String, Value>>::WORDS)),
        }
    }

    /// The full name of a field.
    pub(super) fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// A field that is left where it is; `None` where it is absent or null.
    pub(super) fn peek(&self, field: &str) -> Option<&Value> {
        self.left.get(field).filter(|value| !value.is_null())
    }

    /// Takes a field; `None` where it is absent or null.
    ///
    /// # Errors
    /// Another type.
    pub(super) fn take<T: FieldType>(&mut self, field: &str) -> Result<Option<T>, ApiError> {
        match self.left.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let found = shown(&value);
                T::read(value).map(Some).ok_or_else(|| wrong(&self.name(field), &found, T::WORDS))
            }
        }
    }

    /// Takes a field that must be there.
    ///
    /// # Errors
    /// Another type, or none.
    pub(super) fn require<T: FieldType>(&mut self, field: &str) -> Result<T, ApiError> {
        self.take(field)?.ok_or_else(|| {
            let name = self.name(field);
            ApiError::field(&name, format!("{name} is missing: it must be {}", T::WORDS))
        })
    }

    /// Takes an object's fields.
    ///
    /// # Errors
    /// Another type.
    pub(super) fn object(&mut self, field: &str) -> Result<Option<Fields>, ApiError> {
        let name = self.name(field);
        self.take::<Value>(field)?.map(|value| Fields::of(name, value)).transpose()
    }

    /// Takes one of some words.
    ///
    /// # Errors
    /// Another value, with the words that would do.
    pub(super) fn word<T: Copy>(&mut self, field: &str, words: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take::<Value>(field)? else { return Ok(None) };
        let known = value.as_str().and_then(|word| words.iter().find(|(known, _)| *known == word));
        match known {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let list: Vec<String> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
                Err(wrong(&self.name(field), &shown(&value), &list.join(" or ")))
            }
        }
    }

    /// Takes fields that ask for nothing of us: names, labels, hints.
    pub(super) fn skip(&mut self, fields: &[&str]) {
        fields.iter().for_each(|field| _ = self.left.remove(*field));
    }

    /// Refuses a field that asks for what there is not, unless it has one of the values that ask for nothing.
    ///
    /// # Errors
    /// The field and the reason.
    pub(super) fn refuse(&mut self, field: &str, idle: &[Value], reason: &str) -> Result<(), ApiError> {
        match self.take::<Value>(field)? {
            Some(value) if !idle.contains(&value) => {
                let name = self.name(field);
                Err(ApiError::field(&name, format!("{name} is {}, but {reason}", shown(&value))))
            }
            _ => Ok(()),
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// A field that nobody took.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        match self.left.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((field, _)) => {
                let name = self.name(&shortened(field));
                Err(ApiError::field(
                    &name,
                    format!("{name} is not a field that this server knows: leave it out"),
                ))
            }
        }
    }
}

/// The error of a value that is not what its field must be.
pub(super) fn wrong(name: &str, found: &str, words: &str) -> ApiError {
    ApiError::field(name, format!("{name} is {found}, but must be {words}"))
}

/// A value as errors show it.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".into(),
        other => shortened(&other.to_string()),
    }
}

/// A text of a client, short enough for a sentence.
fn shortened(text: &str) -> String {
    const MOST_CHARS: usize = 60;
    match text.char_indices().nth(MOST_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

macro_rules! field_type {
    ($type:ty, $words:literal, $read:expr) => {
        impl FieldType for $type {
            const WORDS: &'static str = $words;

            fn read(value: Value) -> Option<Self> {
                let read: fn(Value) -> Option<Self> = $read;
                read(value)
            }
        }
    };
}

field_type!(Value, "a value", Some);
field_type!(bool, "true or false", |value| value.as_bool());
field_type!(u64, "a whole number from 0", whole);
field_type!(i64, "a whole number", |value| {
    value.as_i64().or_else(|| value.as_f64().filter(|n| n.fract() == 0.0 && n.abs() < 9e15).map(|n| n as i64))
});
field_type!(f32, "a number", |value| value.as_f64().map(|number| number as f32));
field_type!(String, "a string", |value| match value {
    Value::String(text) => Some(text),
    _ => None,
});
field_type!(Vec<Value>, "an array", |value| match value {
    Value::Array(items) => Some(items),
    _ => None,
});
field_type!(Map<String, Value>, "an object", |value| match value {
    Value::Object(fields) => Some(fields),
    _ => None,
});

/// A whole number, also where a client writes it as `4.0`.
fn whole(value: Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && (0.0..9e15).contains(&number)).then_some(number as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::of("at", value).expect("an object")
    }

    #[test]
    fn every_field_is_taken_or_named() {
        let mut some = fields(json!({ "a": 1, "b": null, "c": "x", "d": 4.0, "user": "me" }));
        assert_eq!(some.take::<u64>("a"), Ok(Some(1)));
        assert_eq!(some.take::<bool>("b"), Ok(None));
        assert_eq!(some.take::<u64>("d"), Ok(Some(4)));
        some.skip(&["user"]);
        let error = some.finish().expect_err("c is left");
        assert_eq!(error.param.as_deref(), Some("at.c"));
        assert_eq!(error.message, "at.c is not a field that this server knows: leave it out");
    }

    #[test]
    fn another_type_is_named() {
        let cases = [
            (json!({ "n": "1" }), "at.n is \"1\", but must be a whole number from 0"),
            (json!({ "n": -1 }), "at.n is -1, but must be"),
            (json!({ "n": 1.5 }), "at.n is 1.5, but must be"),
            (json!({ "n": [1, 2] }), "at.n is an array of 2, but"),
            (json!({ "n": {} }), "at.n is an object, but"),
            (json!({ "n": "é".repeat(100) }), "at.n is \"ééé"),
        ];
        for (value, expected) in cases {
            let error = fields(value).take::<u64>("n").expect_err("refused");
            assert!(error.message.starts_with(expected), "{}", error.message);
        }
        let missing = fields(json!({})).require::<String>("model").expect_err("missing");
        assert_eq!(missing.message, "at.model is missing: it must be a string");
    }

    #[test]
    fn words_and_refusals_say_what_would_do() {
        let words = [("auto", 1), ("none", 2)];
        assert_eq!(fields(json!({ "w": "none" })).word("w", &words), Ok(Some(2)));
        let error = fields(json!({ "w": "some" })).word("w", &words).expect_err("refused");
        assert_eq!(error.message, "at.w is \"some\", but must be \"auto\" or \"none\"");
        let idle = [json!(1), json!(false)];
        assert_eq!(fields(json!({ "w": 1 })).refuse("w", &idle, "there is one"), Ok(()));
        let error = fields(json!({ "w": 2 })).refuse("w", &idle, "there is one").expect_err("refused");
        assert_eq!(error.message, "at.w is 2, but there is one");
    }
}
