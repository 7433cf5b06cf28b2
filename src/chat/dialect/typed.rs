//! Values of parameters that a dialect writes as text: a JSON schema says what they are.

use serde_json::Value;

/// What a text may mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Types {
    string: bool,
    null: bool,
    boolean: bool,
    container: bool,
    number: bool,
}

impl Types {
    /// What nobody declared may be anything.
    const UNKNOWN: Types = Types { string: true, null: true, boolean: true, container: true, number: true };

    fn of(schema: &Value) -> Self {
        let mut types = Types::default();
        types.add(schema, 0);
        if types == Types::default() { Types::UNKNOWN } else { types }
    }

    fn add(&mut self, schema: &Value, depth: usize) {
        match &schema["type"] {
            Value::String(name) => self.add_named(name),
            Value::Array(names) => {
                names.iter().filter_map(Value::as_str).for_each(|name| self.add_named(name))
            }
            _ => {}
        }
        for value in schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")) {
            self.add_named(name_of(value));
        }
        // Deeper unions than people write.
        if depth < 8 {
            let unions = ["anyOf", "oneOf"].into_iter().filter_map(|union| schema[union].as_array());
            unions.flatten().for_each(|schema| self.add(schema, depth + 1));
        }
    }

    fn add_named(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "null" => self.null = true,
            "boolean" => self.boolean = true,
            "object" | "array" => self.container = true,
            "integer" | "number" => self.number = true,
            _ => {}
        }
    }
}

fn name_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) | Value::Object(_) => "object",
    }
}

/// Whether a parameter is a string whatever its text is.
pub(super) fn is_string(schema: Option<&Value>) -> bool {
    schema.map(Types::of) == Some(Types { string: true, ..Types::default() })
}

/// The JSON of a value written as `text`. Where strings and numbers (or booleans) are both allowed a declared value is a
/// string, for strings are what is written without quotes. What cannot be read otherwise is a string, too.
pub(super) fn typed(text: &str, schema: Option<&Value>) -> String {
    let types = schema.map_or(Types::UNKNOWN, Types::of);
    let word = text.trim();
    let prefers_string = types.string && types != Types::UNKNOWN;
    match word {
        "null" | "None" if types.null => return "null".into(),
        "true" | "True" if types.boolean && !prefers_string => return "true".into(),
        "false" | "False" if types.boolean && !prefers_string => return "false".into(),
        _ => {}
    }
    let fits = match word.chars().next() {
        Some('{' | '[') => types.container,
        Some('-' | '0'..='9') => types.number && !prefers_string,
        _ => false,
    };
    if fits && is_json(word) { word.into() } else { quoted(text) }
}

/// Whether a text is one JSON value, not nested deeper than readers take.
pub(super) fn is_json(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok()
}

/// A JSON string.
pub(super) fn quoted(text: &str) -> String {
    let mut json = String::from("\"");
    escape_into(text, &mut json);
    json.push('"');
    json
}

/// Appends `text` as it stands between the quotes of a JSON string.
pub(super) fn escape_into(text: &str, json: &mut String) {
    let quoted = serde_json::to_string(text).expect("every text is a JSON string");
    json.push_str(&quoted[1..quoted.len() - 1]);
}

#[cfg(test)]
mod tests {
    use super::{is_string, typed};
    use serde_json::json;

    #[test]
    fn the_schema_says_what_a_text_is() {
        let of = |schema, text| typed(text, Some(&schema));
        assert_eq!(of(json!({"type": "string"}), "5"), "\"5\"");
        assert_eq!(of(json!({"type": "integer"}), " 5 "), "5");
        assert_eq!(of(json!({"type": "number"}), "-2.50"), "-2.50");
        assert_eq!(of(json!({"type": "boolean"}), "True"), "true");
        assert_eq!(of(json!({"type": "array"}), "[1, \"a\"]"), "[1, \"a\"]");
        assert_eq!(of(json!({"enum": ["a", "5"]}), "5"), "\"5\"");
        assert_eq!(of(json!({"type": ["string", "null"]}), "null"), "null");
        assert_eq!(of(json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), "5"), "\"5\"");
        assert_eq!(
            of(json!({"anyOf": [{"type": "object"}, {"type": "string"}]}), "{\"a\": 1}"),
            "{\"a\": 1}"
        );
    }

    #[test]
    fn what_does_not_fit_is_a_string() {
        for (schema, text) in [
            ("integer", "five"),
            ("integer", "[1]"),
            ("object", "{'a': 1}"),
            ("number", "1e"),
            ("array", "true"),
        ] {
            let value = typed(text, Some(&json!({ "type": schema })));
            assert_eq!(value, json!(text).to_string(), "{schema}");
        }
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert!(typed(&deep, None).starts_with("\"["));
    }

    #[test]
    fn what_is_not_declared_is_what_it_looks_like() {
        for (text, value) in
            [("5", "5"), ("true", "true"), ("[1]", "[1]"), ("5 apples", "\"5 apples\""), ("", "\"\"")]
        {
            assert_eq!(typed(text, None), value);
        }
        assert!(
            !is_string(None) && !is_string(Some(&json!({}))) && is_string(Some(&json!({"type": "string"})))
        );
    }
}
