//! `POST /v1/responses`: stateless. Nothing is stored; a client sends the whole conversation with every request.

mod input;
mod voice;

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use self::voice::ResponseVoice;
use super::tools::{function_tool, json_schema, tool_choice};
use crate::server::{
    Server,
    answers::{Finish, Taken, Whole},
    ask::{Drawing, fresh_id},
    body::Body,
    conversation::{Conversation, Thinking, ToolChoice, effort},
    error::{ApiError, Kind},
    fields::{Fields, shown, wrong},
    grammar::Format,
    journal::{Ticket, unix_seconds},
    sse,
};

/// Tools that other servers run themselves. Offering one is no demand, so they are left out.
const HOSTED_TOOLS: [&str; 6] = [
    "web_search",
    "web_search_preview",
    "file_search",
    "code_interpreter",
    "image_generation",
    "local_shell",
];

/// Answers with a response.
///
/// # Errors
/// The first field that cannot be honoured, or what the service refuses.
pub(in crate::server) async fn answer(
    State(server): State<Arc<Server>>,
    Extension(ticket): Extension<Arc<Ticket>>,
    Body(mut fields): Body,
) -> Result<Response, ApiError> {
    let model: String = fields.require("model")?;
    server.check_model(&model)?;
    let stream: bool = fields.take("stream")?.unwrap_or_default();
    if let Some(mut options) = fields.object("stream_options")? {
        options.skip(&["include_obfuscation"]);
        options.finish()?;
    }
    let echoed =
        |fields: &Fields, field: &str, default: Value| fields.peek(field).cloned().unwrap_or(default);
    let mut response = json!({
        "id": fresh_id("resp_"),
        "object": "response",
        "created_at": unix_seconds() as u64,
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": echoed(&fields, "instructions", Value::Null),
        "max_output_tokens": echoed(&fields, "max_output_tokens", Value::Null),
        "model": model,
        "output": [],
        "parallel_tool_calls": echoed(&fields, "parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": echoed(&fields, "reasoning", json!({ "effort": null, "summary": null })),
        "store": false,
        "text": echoed(&fields, "text", json!({ "format": { "type": "text" } })),
        "tool_choice": echoed(&fields, "tool_choice", "auto".into()),
        "tools": echoed(&fields, "tools", json!([])),
        "truncation": "disabled",
        "usage": null,
        "metadata": echoed(&fields, "metadata", json!({})),
    });
    let mut drawing =
        Drawing::take(&mut fields, server.model().generation(), &["max_output_tokens"], "stop")?;
    drawing.take_logit_bias(&mut fields, server.model().tokenizer().vocab_size())?;
    response["temperature"] = drawing.params.temperature.into();
    response["top_p"] = drawing.params.top_p.into();
    let conversation = conversation(&mut fields, &server)?;
    rest(&mut fields)?;
    fields.finish()?;
    let mut answers = conversation.ask(drawing, &server, ticket.clone()).await?;
    if stream {
        ticket.streams();
        return Ok(sse::response(answers, ResponseVoice::new(response), server.settings().keep_alive));
    }
    let whole = answers.whole().await?.pop().expect("there is one choice");
    let finish = whole.finish.clone();
    response["output"] = output(whole).into();
    finish_response(&mut response, &finish, answers.taken());
    Ok(Json(response).into_response())
}

/// `GET /v1/responses/{id}` and what else asks for a stored response.
///
/// # Errors
/// Always: nothing is stored.
pub(in crate::server) async fn stored() -> Result<(), ApiError> {
    Err(ApiError::new(Kind::NotFound, "there is no such response: this server stores none"))
}

fn conversation(fields: &mut Fields, server: &Server) -> Result<Conversation, ApiError> {
    let mut thinking = Thinking::default();
    if let Some(mut reasoning) = fields.object("reasoning")? {
        if let Some(word) = reasoning.take::<String>("effort")? {
            thinking = effort("reasoning.effort", &word, server.model())?;
        }
        reasoning.skip(&["summary", "generate_summary"]);
        reasoning.finish()?;
    }
    let messages = input::messages(fields)?;
    let tool_choice = tool_choice(fields)?;
    Ok(Conversation {
        messages,
        tools: tools(fields, &tool_choice)?,
        tool_choice,
        parallel: fields.take("parallel_tool_calls")?.unwrap_or(true),
        format: text_format(fields)?,
        thinking,
        kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
    })
}

fn rest(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse(
        "store",
        &[json!(false)],
        "nothing is stored here: send false, and the whole conversation",
    )?;
    fields.refuse(
        "previous_response_id",
        &[],
        "nothing is stored here: send the whole conversation as input",
    )?;
    fields.refuse("conversation", &[], "nothing is stored here: send the whole conversation as input")?;
    fields.refuse("prompt", &[], "no prompts are stored here: send it as input")?;
    fields.refuse("background", &[json!(false)], "answers are not stored: ask for a stream")?;
    fields.refuse("truncation", &[json!("disabled")], "input is never cut: send less")?;
    fields.refuse("moderation", &[], "nothing is moderated here: leave it out")?;
    fields.refuse("top_logprobs", &[json!(0)], "log-probabilities are for /v1/chat/completions")?;
    fields.refuse("context_management", &[json!([])], "input is sent as it is: shorten it yourself")?;
    if let Some(include) = fields.take::<Vec<Value>>("include")?
        && let Some(other) = include.iter().find(|item| **item != "reasoning.encrypted_content")
    {
        return Err(wrong("include", &format!("of {}", shown(other)), "of \"reasoning.encrypted_content\""));
    }
    fields.skip(&[
        "metadata",
        "user",
        "safety_identifier",
        "service_tier",
        "max_tool_calls",
        "client_metadata",
    ]);
    fields.skip(&["prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"]);
    Ok(())
}

/// Functions, flat or as chat completions have them.
fn tools(fields: &mut Fields, choice: &ToolChoice) -> Result<Vec<Value>, ApiError> {
    let mut tools = Vec::new();
    for (i, tool) in fields.take::<Vec<Value>>("tools")?.unwrap_or_default().into_iter().enumerate() {
        let mut tool = Fields::of(format!("tools[{i}]"), tool)?;
        match tool.require::<String>("type")?.as_str() {
            "function" => {
                let function = match tool.object("function")? {
                    Some(function) => {
                        tool.finish()?;
                        function
                    }
                    None => tool,
                };
                tools.push(function_tool(function)?);
            }
            kind if HOSTED_TOOLS.contains(&kind) && *choice != ToolChoice::Required => {}
            kind => {
                return Err(wrong(&tool.name("type"), &shown(&kind.into()), "\"function\""));
            }
        }
    }
    Ok(tools)
}

fn text_format(fields: &mut Fields) -> Result<Format, ApiError> {
    let Some(mut text) = fields.object("text")? else { return Ok(Format::Text) };
    text.refuse("verbosity", &[json!("medium")], "models here do not know it: ask for it in a message")?;
    let format = text.object("format")?;
    text.finish()?;
    let Some(mut format) = format else { return Ok(Format::Text) };
    let read = match format.require::<String>("type")?.as_str() {
        "text" => Format::Text,
        "json_object" => Format::Json(json!({ "type": "object" })),
        "json_schema" => json_schema(&mut format)?,
        other => {
            let words = "\"text\", \"json_object\" or \"json_schema\"";
            return Err(wrong(&format.name("type"), &shown(&other.into()), words));
        }
    };
    format.finish()?;
    Ok(read)
}

/// The items of a whole answer.
fn output(whole: Whole) -> Vec<Value> {
    let answered = whole.answered;
    let status = if whole.finish == Finish::Length { "incomplete" } else { "completed" };
    let mut items = Vec::new();
    if !answered.reasoning.is_empty() {
        items.push(reasoning_item(&fresh_id("rs_"), &answered.reasoning));
    }
    if !answered.content.is_empty() {
        items.push(message_item(&fresh_id("msg_"), &answered.content, status));
    }
    for call in answered.tool_calls {
        items.push(call_item(&fresh_id("fc_"), &call.id, &call.name, &call.arguments, "completed"));
    }
    items
}

fn reasoning_item(id: &str, text: &str) -> Value {
    let content = json!([{ "type": "reasoning_text", "text": text }]);
    json!({ "id": id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": null })
}

fn message_item(id: &str, text: &str, status: &str) -> Value {
    let content = json!([text_part(text)]);
    json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": content })
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "status": status,
        "call_id": call_id, "name": name, "arguments": arguments,
    })
}

/// Writes how a response ended and what it took.
fn finish_response(response: &mut Value, finish: &Finish, Taken { usage, reasoning_tokens }: Taken) {
    let incomplete = *finish == Finish::Length;
    response["status"] = if incomplete { "incomplete" } else { "completed" }.into();
    if incomplete {
        response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
    }
    response["usage"] = json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.cached_tokens },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": reasoning_tokens },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    });
}
