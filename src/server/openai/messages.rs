//! Messages and tools of a chat request, checked, in the form that chat templates take them.

use serde_json::{Map, Value, json};

use crate::server::{
    error::ApiError,
    fields::{Fields, shown, wrong},
};

/// Names under which clients send back what an assistant thought.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

/// The messages of a request.
///
/// # Errors
/// None at all, or the first that is wrong.
pub(in crate::server) fn messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let messages: Vec<Value> = fields.require("messages")?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages is empty: say something"));
    }
    messages.into_iter().enumerate().map(|(i, value)| message(format!("messages[{i}]"), value)).collect()
}

fn message(path: String, value: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::of(path, value)?;
    let roles = [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
    ];
    let Some(role) = fields.word("role", &roles)? else {
        let name = fields.name("role");
        return Err(ApiError::field(&name, format!("{name} is missing: it must be \"user\", for example")));
    };
    let mut message = Map::new();
    message.insert("role".into(), role.into());
    let content = content(&mut fields)?;
    let calls = match role {
        "assistant" => {
            let mut reasoning = None;
            for name in REASONING {
                let given: Option<String> = fields.take(name)?;
                reasoning = reasoning.or(given);
            }
            message.extend(reasoning.map(|text| ("reasoning_content".into(), text.into())));
            calls(&mut fields)?
        }
        "tool" => {
            message.insert("tool_call_id".into(), fields.require::<String>("tool_call_id")?.into());
            Vec::new()
        }
        _ => Vec::new(),
    };
    if content.is_none() && calls.is_empty() && !message.contains_key("reasoning_content") {
        let name = fields.name("content");
        return Err(ApiError::field(
            &name,
            format!("{name} is missing: it must be a string or an array of parts"),
        ));
    }
    message.insert("content".into(), content.unwrap_or_default().into());
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    message.extend(fields.take::<String>("name")?.map(|name| ("name".into(), name.into())));
    fields.skip(&["id", "cache_control", "annotations"]);
    fields.refuse("refusal", &[], "refusals cannot be sent back: send them as content")?;
    fields.refuse("audio", &[], "this server takes text alone")?;
    fields.refuse("function_call", &[], "function_call is gone from the API: use tool_calls")?;
    fields.finish()?;
    Ok(message.into())
}

/// The text of a message, whose parts are put together.
fn content(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let name = fields.name("content");
    match fields.take::<Value>("content")? {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let parts = parts.into_iter().enumerate();
            let texts: Result<Vec<String>, ApiError> =
                parts.map(|(i, part)| part_text(format!("{name}[{i}]"), part)).collect();
            Ok(Some(texts?.concat()))
        }
        Some(other) => Err(wrong(&name, &shown(&other), "a string or an array of parts")),
    }
}

fn part_text(path: String, part: Value) -> Result<String, ApiError> {
    let mut fields = Fields::of(path, part)?;
    let kind: String = fields.require("type")?;
    if !matches!(kind.as_str(), "text" | "input_text" | "output_text") {
        let name = fields.name("type");
        return Err(wrong(&name, &shown(&Value::from(kind)), "\"text\": this server takes text alone"));
    }
    let text = fields.require("text")?;
    fields.skip(&["cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"]);
    fields.finish()?;
    Ok(text)
}

/// The calls of an assistant.
fn calls(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let path = fields.name("tool_calls");
    let calls: Vec<Value> = fields.take("tool_calls")?.unwrap_or_default();
    let calls = calls.into_iter().enumerate().map(|(i, call)| {
        let mut call = Fields::of(format!("{path}[{i}]"), call)?;
        let id: Option<String> = call.take("id")?;
        call.word("type", &[("function", ())])?;
        call.skip(&["index"]);
        let name = call.name("function");
        let mut function =
            call.object("function")?.ok_or_else(|| wrong(&name, "missing", "an object with a name"))?;
        let name: String = function.require("name")?;
        let arguments: Option<String> = function.take("arguments")?;
        function.finish()?;
        call.finish()?;
        let function = json!({ "name": name, "arguments": arguments.unwrap_or_default() });
        Ok(json!({ "id": id, "type": "function", "function": function }))
    });
    calls.collect()
}
