//! The `tojson` filter: Python's `json.dumps` without HTML escapes, which is how models saw tools in training.

use super::bounded::BoundedText;
use super::python;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::{self, Write};

/// The widest indent of a level, in spaces; more is no layout.
const MAX_INDENT: usize = 64;

/// How `json.dumps` was asked to lay out its text.
struct Layout {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
}

/// `value|tojson`, with the keywords `ensure_ascii`, `indent`, `separators` and `sort_keys` of `json.dumps`.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<Value>>("indent")?.map(indent_text).transpose()?;
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson takes two separators")),
    };
    let layout = Layout {
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item_separator,
        key_separator,
    };
    kwargs.assert_all_used()?;
    BoundedText::written_by(|output| layout.write(output, value, 0)).map(Value::from)
}

/// One level of indent, given as text or as a number of spaces.
fn indent_text(indent: Value) -> Result<String, Error> {
    match indent.as_str() {
        Some(text) => Ok(text.into()),
        None => match usize::try_from(indent)? {
            spaces @ ..=MAX_INDENT => Ok(" ".repeat(spaces)),
            _ => Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson indents by {MAX_INDENT} at most"),
            )),
        },
    }
}

impl Layout {
    fn write(&self, output: &mut BoundedText, value: &Value, level: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => output.write_str("null")?,
            ValueKind::Bool => write!(output, "{}", value.is_true())?,
            ValueKind::Number => python::write_number(output, value)?,
            ValueKind::String => self.write_string(output, value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.write_items(output, ['[', ']'], level, items, |output, item| {
                    self.write(output, &item, level + 1)
                })?;
            }
            ValueKind::Map => {
                let mut entries = value
                    .try_iter()?
                    .map(|key| Ok((key_text(&key)?, value.get_item(&key)?)))
                    .collect::<Result<Vec<_>, Error>>()?;
                if self.sort_keys {
                    entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.write_items(output, ['{', '}'], level, entries, |output, (key, item)| {
                    self.write_string(output, &key)?;
                    output.write_str(&self.key_separator)?;
                    self.write(output, &item, level + 1)
                })?;
            }
            kind => return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} is no JSON value"))),
        }
        Ok(())
    }

    /// Writes a list or an object: brackets, separators, indent.
    fn write_items<T>(
        &self,
        output: &mut BoundedText,
        [open, close]: [char; 2],
        level: usize,
        items: impl IntoIterator<Item = T>,
        mut write_item: impl FnMut(&mut BoundedText, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if level >= python::MAX_DEPTH {
            return Err(python::too_deep());
        }
        output.write_char(open)?;
        let mut empty = true;
        for item in items {
            output.write_str(if empty { "" } else { &self.item_separator })?;
            empty = false;
            self.write_line_break(output, level + 1)?;
            write_item(output, item)?;
        }
        if !empty {
            self.write_line_break(output, level)?;
        }
        Ok(output.write_char(close)?)
    }

    fn write_line_break(&self, output: &mut BoundedText, level: usize) -> fmt::Result {
        let Some(indent) = &self.indent else { return Ok(()) };
        output.write_char('\n')?;
        (0..level).try_for_each(|_| output.write_str(indent))
    }

    fn write_string(&self, output: &mut BoundedText, text: &str) -> fmt::Result {
        let json = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            return output.write_str(&json);
        }
        for c in json.chars() {
            match c {
                ..='\x7f' => output.write_char(c)?,
                _ => {
                    c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| write!(output, "\\u{unit:04x}"))?
                }
            }
        }
        Ok(())
    }
}

/// The text of an object's key: numbers, booleans and none are keys in Python, strings in JSON.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(key.is_true().to_string()),
        _ => python::to_str(key),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};
    use serde_json::{Value, json};

    fn render(expression: &str, value: &Value) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::tojson);
        environment.render_str(&format!("{{{{ {expression} }}}}"), context! { value }).unwrap()
    }

    #[test]
    fn lays_out_as_json_dumps_does() {
        let value = json!({"b": [1, 2.0, 1e16, null], "a": "<é😀>\"\n", "c": [], "d": {}});
        for (expression, text) in [
            ("value|tojson", r#"{"b": [1, 2.0, 1e+16, null], "a": "<é😀>\"\n", "c": [], "d": {}}"#),
            (
                "value|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true)",
                r#"{"a":"<\u00e9\ud83d\ude00>\"\n","b":[1,2.0,1e+16,null],"c":[],"d":{}}"#,
            ),
        ] {
            assert_eq!(render(expression, &value), text);
        }
        let indented = "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": []\n}";
        assert_eq!(render("value|tojson(indent=2)", &json!({"a": [1, 2], "b": []})), indented);
        assert_eq!(render("value|tojson(indent='\t')", &json!([true])), "[\n\ttrue\n]");
    }

    #[test]
    fn keys_become_text() {
        let keys = render("{1: 'a', false: 'b', none: 'c'}|tojson", &Value::Null);
        assert_eq!(keys, r#"{"1": "a", "false": "b", "null": "c"}"#);
    }
}
