//! Values as Python prints them, and the Python methods that templates call on them.

use super::bounded::BoundedText;
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::{self, Write};

/// The deepest nesting of lists and dicts that is printed; a template can build more than the stack carries.
pub(super) const MAX_DEPTH: usize = 200;

/// `str(value)`.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    BoundedText::written_by(|output| write_str(output, value))
}

/// Writes `str(value)`, which `{{ value }}` prints.
pub(super) fn write_str(output: &mut dyn Write, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => Ok(output.write_str(text)?),
        None => write_repr(output, value, MAX_DEPTH),
    }
}

/// Writes `repr(value)`; an undefined value is empty.
fn write_repr(output: &mut dyn Write, value: &Value, depth: usize) -> Result<(), Error> {
    let inner = || depth.checked_sub(1).ok_or_else(too_deep);
    match value.kind() {
        ValueKind::String => write_quoted(output, value.as_str().unwrap_or_default())?,
        ValueKind::Number => write_number(output, value)?,
        ValueKind::Seq | ValueKind::Iterable => {
            output.write_char('[')?;
            for (index, item) in value.try_iter()?.enumerate() {
                output.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(output, &item, inner()?)?;
            }
            output.write_char(']')?;
        }
        ValueKind::Map => {
            output.write_char('{')?;
            for (index, key) in value.try_iter()?.enumerate() {
                output.write_str(if index > 0 { ", " } else { "" })?;
                write_repr(output, &key, inner()?)?;
                output.write_str(": ")?;
                write_repr(output, &value.get_item(&key)?, inner()?)?;
            }
            output.write_char('}')?;
        }
        _ => write!(output, "{value}")?,
    }
    Ok(())
}

/// The error of a value that nests deeper than [`MAX_DEPTH`].
pub(super) fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value nests deeper than {MAX_DEPTH}"))
}

/// Writes a number; Python prints floats with an exponent from 1e16 and below 1e-4.
pub(super) fn write_number(output: &mut dyn Write, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        return Ok(write!(output, "{value}")?);
    }
    let number = f64::try_from(value.clone())?;
    let scientific = format!("{number:e}");
    match scientific.split_once('e').map(|(digits, power)| (digits, power.parse::<i32>())) {
        Some((digits, Ok(power))) if !(-4..16).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            write!(output, "{digits}e{sign}{:02}", power.abs())?;
        }
        _ if number.is_nan() => output.write_str("nan")?,
        _ => write!(output, "{number:?}")?,
    }
    Ok(())
}

/// Writes a string literal; unlike Python, format characters and unassigned code points are printed as they are.
fn write_quoted(output: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    output.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => output.write_str("\\n")?,
            '\r' => output.write_str("\\r")?,
            '\t' => output.write_str("\\t")?,
            '\\' => output.write_str("\\\\")?,
            _ if c == quote => write!(output, "\\{c}")?,
            _ if c.is_control() || (c.is_whitespace() && c != ' ') => match u32::from(c) {
                code @ ..=0xff => write!(output, "\\x{code:02x}")?,
                code => write!(output, "\\u{code:04x}")?,
            },
            _ => output.write_char(c)?,
        }
    }
    output.write_char(quote)
}

/// The `string` filter.
pub(super) fn string(value: &Value) -> Result<Value, Error> {
    Ok(Value::from(to_str(value)?))
}

/// The `iterable` test; unlike the engine, Python does not iterate over none.
pub(super) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// The `sequence` test: in Python everything with a length and items, so strings and dicts too.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
}

/// Calls a method of a Python string, list or dict.
pub(super) fn call_method(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    // The crate's `str.count` does not return for an empty needle.
    if let (Some(text), "count", [needle]) = (value.as_str(), method, args)
        && needle.as_str() == Some("")
    {
        return Ok(Value::from(text.chars().count() + 1));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

#[cfg(test)]
mod tests {
    use super::to_str;
    use minijinja::Value;
    use serde_json::json;

    #[test]
    fn prints_as_python_does() {
        for (value, printed) in [
            (json!("it's"), "it's"),
            (json!(true), "True"),
            (json!(null), "None"),
            (json!(2.0), "2.0"),
            (json!(-0.0), "-0.0"),
            (json!(0.0001), "0.0001"),
            (json!(0.00001), "1e-05"),
            (json!(1.5e300), "1.5e+300"),
            (json!(1e16), "1e+16"),
            (json!(123456789012345.6), "123456789012345.6"),
            (json!(18446744073709551615_u64), "18446744073709551615"),
            (json!(["a", "it's", "'\"", "\u{2028}\u{1}\n"]), r#"['a', "it's", '\'"', '\u2028\x01\n']"#),
            (json!({"k": [1, {}], "é": false}), "{'k': [1, {}], 'é': False}"),
        ] {
            assert_eq!(to_str(&Value::from_serialize(&value)).unwrap(), printed);
        }
        assert_eq!(to_str(&Value::UNDEFINED).unwrap(), "");
    }
}
