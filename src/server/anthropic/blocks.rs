//! Messages and their blocks, checked, in the form that chat templates take them.

use serde_json::{Map, Value, json};

use crate::server::{
    error::ApiError,
    fields::{Fields, shown, wrong},
};

/// A line that one client puts in front of its system prompt; it changes with every request, and says nothing to a model.
const BILLING_LINE: &str = "x-anthropic-billing-header:";

/// `system` and `messages`, as messages of OpenAI's form.
///
/// # Errors
/// The first thing that is wrong.
pub(super) fn messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = fields.take::<Value>("system")? {
        let text = texts("system", system)?;
        if !text.is_empty() {
            messages.push(json!({ "role": "system", "content": text }));
        }
    }
    let given: Vec<Value> = fields.require("messages")?;
    if given.is_empty() {
        return Err(ApiError::field("messages", "messages is empty: say something"));
    }
    for (i, message) in given.into_iter().enumerate() {
        let path = format!("messages.{i}");
        let mut message = Fields::of(&path, message)?;
        let role = message.word("role", &[("user", 'u'), ("assistant", 'a'), ("system", 's')])?;
        let role =
            role.ok_or_else(|| wrong(&message.name("role"), "missing", "\"user\" or \"assistant\""))?;
        let content: Value = message.require("content")?;
        message.skip(&["id"]);
        message.finish()?;
        let path = format!("{path}.content");
        match role {
            's' => messages.push(json!({ "role": "system", "content": texts(&path, content)? })),
            'a' => messages.push(assistant(&path, content)?),
            _ => user(&path, content, &mut messages)?,
        }
    }
    Ok(messages)
}

/// A text, or the texts of some blocks.
fn texts(path: &str, content: Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let mut texts = Vec::with_capacity(blocks.len());
            for (i, block) in blocks.into_iter().enumerate() {
                let mut block = Fields::of(format!("{path}.{i}"), block)?;
                let kind: String = block.require("type")?;
                if kind != "text" {
                    return Err(no_such_block(&block, &kind));
                }
                texts.push(text(block)?);
            }
            texts.retain(|text| !text.starts_with(BILLING_LINE));
            Ok(texts.join("\n"))
        }
        other => Err(wrong(path, &shown(&other), "a string or an array of blocks")),
    }
}

/// The text of a text block.
fn text(mut block: Fields) -> Result<String, ApiError> {
    let text = block.require("text")?;
    cache_control(&mut block)?;
    // Where an assistant quoted something.
    block.skip(&["citations"]);
    block.finish()?;
    Ok(text)
}

/// Marks the end of what other prompts share. Every beginning of a prompt is kept here, marked or not.
pub(super) fn cache_control(block: &mut Fields) -> Result<(), ApiError> {
    let Some(mut mark) = block.object("cache_control")? else { return Ok(()) };
    mark.word("type", &[("ephemeral", ())])?;
    mark.word("ttl", &[("5m", ()), ("1h", ())])?;
    mark.skip(&["scope"]);
    mark.finish()
}

/// A turn of the user: results of calls become messages of their own, in front of what the user says.
fn user(path: &str, content: Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let Value::Array(blocks) = content else {
        messages.push(json!({ "role": "user", "content": texts(path, content)? }));
        return Ok(());
    };
    let mut said = Vec::new();
    let is_empty = blocks.is_empty();
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(format!("{path}.{i}"), block)?;
        match block.require::<String>("type")?.as_str() {
            "text" => said.push(text(block)?),
            "tool_result" => messages.push(tool_result(block)?),
            kind => return Err(no_such_block(&block, kind)),
        }
    }
    if !said.is_empty() || is_empty {
        messages.push(json!({ "role": "user", "content": said.join("\n") }));
    }
    Ok(())
}

fn tool_result(mut block: Fields) -> Result<Value, ApiError> {
    let id: String = block.require("tool_use_id")?;
    let name = block.name("content");
    let content = block.take::<Value>("content")?;
    let mut content = content.map_or_else(|| Ok(String::new()), |value| texts(&name, value))?;
    if block.take::<bool>("is_error")?.unwrap_or_default() {
        content = format!("Error: {content}");
    }
    cache_control(&mut block)?;
    block.finish()?;
    Ok(json!({ "role": "tool", "tool_call_id": id, "content": content }))
}

fn assistant(path: &str, content: Value) -> Result<Value, ApiError> {
    let Value::Array(blocks) = content else {
        return Ok(json!({ "role": "assistant", "content": texts(path, content)? }));
    };
    let (mut said, mut thought, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let mut block = Fields::of(format!("{path}.{i}"), block)?;
        match block.require::<String>("type")?.as_str() {
            "text" => said.push(text(block)?),
            "thinking" => {
                thought.push(block.require::<String>("thinking")?);
                block.skip(&["signature"]);
                block.finish()?;
            }
            // Made by another model for itself.
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name): (String, String) = (block.require("id")?, block.require("name")?);
                let input: Map<String, Value> = block.take("input")?.unwrap_or_default();
                cache_control(&mut block)?;
                block.skip(&["caller"]);
                block.finish()?;
                let function = json!({ "name": name, "arguments": input });
                calls.push(json!({ "id": id, "type": "function", "function": function }));
            }
            kind => return Err(no_such_block(&block, kind)),
        }
    }
    let mut message = json!({ "role": "assistant", "content": said.join("\n") });
    if !thought.is_empty() {
        message["reasoning_content"] = thought.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

fn no_such_block(block: &Fields, kind: &str) -> ApiError {
    let words = "a block of text or of a tool's use: this server takes text alone";
    wrong(&block.name("type"), &shown(&kind.into()), words)
}
