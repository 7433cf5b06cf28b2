//! `instructions` and `input`, checked, as messages in the form that chat templates take them.

use serde_json::{Value, json};

use crate::server::{
    error::ApiError,
    fields::{Fields, shown, wrong},
};

/// The conversation of a request.
///
/// # Errors
/// The first thing that is wrong.
pub(super) fn messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(text) = fields.take::<String>("instructions")? {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match fields.require::<Value>("input")? {
        Value::String(text) => messages.push(json!({ "role": "user", "content": text })),
        Value::Array(items) if items.is_empty() => {
            return Err(ApiError::field("input", "input is empty: say something"));
        }
        Value::Array(items) => {
            for (i, value) in items.into_iter().enumerate() {
                item(Fields::of(format!("input[{i}]"), value)?, &mut messages)?;
            }
        }
        other => return Err(wrong("input", &shown(&other), "a string or an array of items")),
    }
    Ok(messages)
}

fn item(mut item: Fields, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    item.skip(&["id", "status", "phase"]);
    match item.take::<String>("type")?.as_deref() {
        None | Some("message") => {
            let roles =
                [("user", "user"), ("assistant", "assistant"), ("system", "system"), ("developer", "system")];
            let role = item.word("role", &roles)?;
            let role = role.ok_or_else(|| wrong(&item.name("role"), "missing", "\"user\", for example"))?;
            let name = item.name("content");
            let text = texts(&name, item.require("content")?)?;
            match turn(messages).filter(|turn| role == "assistant" && turn["content"] == "") {
                Some(turn) => turn["content"] = text.into(),
                None => messages.push(json!({ "role": role, "content": text })),
            }
        }
        Some("function_call") => {
            let (id, name): (String, String) = (item.require("call_id")?, item.require("name")?);
            let arguments: String = item.require("arguments")?;
            let function = json!({ "name": name, "arguments": arguments });
            let call = json!({ "id": id, "type": "function", "function": function });
            if turn(messages).is_none() {
                messages.push(json!({ "role": "assistant", "content": "" }));
            }
            let turn = turn(messages).expect("there is one now");
            match turn["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => turn["tool_calls"] = json!([call]),
            }
        }
        Some("function_call_output") => {
            let id: String = item.require("call_id")?;
            let name = item.name("output");
            let text = texts(&name, item.require("output")?)?;
            messages.push(json!({ "role": "tool", "tool_call_id": id, "content": text }));
        }
        Some("reasoning") => {
            let name = item.name("content");
            let text = item
                .take::<Value>("content")?
                .map_or_else(|| Ok(String::new()), |value| texts(&name, value))?;
            // Summaries are made for people, and encrypted thoughts for another model.
            item.skip(&["summary", "encrypted_content"]);
            if !text.is_empty() {
                messages.push(json!({ "role": "assistant", "content": "", "reasoning_content": text }));
            }
        }
        Some(other) => {
            let words = "\"message\", \"function_call\", \"function_call_output\" or \"reasoning\"";
            return Err(wrong(&item.name("type"), &shown(&other.into()), words));
        }
    }
    item.finish()
}

/// The assistant's turn, where it is the last thing that was said.
fn turn(messages: &mut [Value]) -> Option<&mut Value> {
    messages.last_mut().filter(|message| message["role"] == "assistant")
}

/// A text, or the texts of some parts.
fn texts(path: &str, content: Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text),
        Value::Array(parts) => {
            let parts = parts.into_iter().enumerate().map(|(i, part)| {
                let mut part = Fields::of(format!("{path}[{i}]"), part)?;
                let kind: String = part.require("type")?;
                if !matches!(kind.as_str(), "input_text" | "output_text" | "text" | "reasoning_text") {
                    let words = "\"input_text\" or \"output_text\": this server takes text alone";
                    return Err(wrong(&part.name("type"), &shown(&kind.into()), words));
                }
                let text: String = part.require("text")?;
                part.skip(&["annotations", "logprobs", "prompt_cache_breakpoint"]);
                part.finish()?;
                Ok(text)
            });
            Ok(parts.collect::<Result<Vec<_>, ApiError>>()?.concat())
        }
        other => Err(wrong(path, &shown(&other), "a string or an array of parts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    fn read(input: Value) -> Result<Vec<Value>, String> {
        let mut fields: Map<String, Value> = Map::new();
        fields.insert("instructions".into(), "Be kind.".into());
        fields.insert("input".into(), input);
        let mut fields = Fields::of_request(fields.into()).expect("an object");
        messages(&mut fields).map_err(|error| error.message)
    }

    #[test]
    fn items_of_one_turn_become_one_message() {
        let messages = read(json!([
            { "role": "user", "content": [{ "type": "input_text", "text": "Add." }] },
            { "type": "reasoning", "summary": [], "content": [{ "type": "reasoning_text", "text": "Hm." }] },
            { "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "Yes." }] },
            { "type": "function_call", "call_id": "a", "name": "add", "arguments": "{\"x\": 1}" },
            { "type": "function_call", "call_id": "b", "name": "add", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "a", "output": "2" },
        ]));
        let call = |id: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": "add", "arguments": arguments } });
        let expected = vec![
            json!({ "role": "system", "content": "Be kind." }),
            json!({ "role": "user", "content": "Add." }),
            json!({
                "role": "assistant", "content": "Yes.", "reasoning_content": "Hm.",
                "tool_calls": [call("a", "{\"x\": 1}"), call("b", "{}")],
            }),
            json!({ "role": "tool", "tool_call_id": "a", "content": "2" }),
        ];
        assert_eq!(messages, Ok(expected));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (input, expected) in [
            (json!(1), "input is 1, but must be"),
            (json!([]), "input is empty"),
            (json!([{ "type": "item_reference", "id": "x" }]), "input[0].type is \"item_reference\""),
            (
                json!([{ "role": "user", "content": [{ "type": "input_image", "image_url": "x" }] }]),
                "input[0].content[0].type is",
            ),
            (json!([{ "role": "user", "content": "x", "weight": 1 }]), "input[0].weight is not a field"),
        ] {
            let error = read(input).expect_err("refused");
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
