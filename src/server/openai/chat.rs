//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::{
    Head, failed, finish_reason, logprobs,
    messages::messages,
    take_stream,
    tools::{response_format, tool_choice, tools},
    usage::usage,
};
use crate::server::{
    Server,
    answers::{Answers, Finish, Piece, TokenLogprob, Whole},
    ask::Drawing,
    body::Body,
    conversation::{Conversation, Thinking, effort},
    error::ApiError,
    fields::{Fields, wrong},
    journal::Ticket,
    sse::{self, Frames, Voice},
};

/// Tokens beside the drawn one whose log-probabilities a client may have.
const MOST_LOGPROBS: u64 = 20;

/// Answers a chat request.
///
/// # Errors
/// The first field that cannot be honoured, or what the service refuses.
pub(in crate::server) async fn answer(
    State(server): State<Arc<Server>>,
    Extension(ticket): Extension<Arc<Ticket>>,
    Body(mut fields): Body,
) -> Result<Response, ApiError> {
    let head = Head::take("chatcmpl-", &mut fields, &server)?;
    let (stream, include_usage) = take_stream(&mut fields)?;
    let model = server.model();
    let limits = ["max_completion_tokens", "max_tokens"];
    let mut drawing = Drawing::take(&mut fields, model.generation(), &limits, "stop")?;
    drawing.take_n(&mut fields)?;
    drawing.take_logit_bias(&mut fields, model.tokenizer().vocab_size())?;
    drawing.logprobs = take_logprobs(&mut fields)?;
    let conversation = conversation(&mut fields, &server)?;
    fields.refuse("store", &[json!(false)], "nothing is stored here: leave it out")?;
    fields.refuse("modalities", &[json!(["text"])], "this server answers in text")?;
    fields.refuse("audio", &[], "this server answers in text")?;
    fields.refuse("prediction", &[], "predictions are not used: leave it out")?;
    fields.refuse("verbosity", &[json!("medium")], "models here do not know it: ask for it in a message")?;
    fields.refuse("moderation", &[], "nothing is moderated here: leave it out")?;
    fields.refuse("web_search_options", &[], "this server does not search: offer a tool that does")?;
    fields.refuse("functions", &[], "functions are gone from the API: use tools")?;
    fields.refuse("function_call", &[], "function_call is gone from the API: use tool_choice")?;
    fields.skip(&["user", "metadata", "safety_identifier", "service_tier"]);
    fields.skip(&["prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control"]);
    fields.finish()?;
    let mut answers = conversation.ask(drawing, &server, ticket.clone()).await?;
    if stream {
        ticket.streams();
        let pending = vec![Vec::new(); answers.n_choices()];
        let voice = ChatVoice { head, include_usage, pending };
        return Ok(sse::response(answers, voice, server.settings().keep_alive));
    }
    let choices = answers.whole().await?;
    let mut body = head.object("chat.completion");
    body["choices"] = choices.into_iter().enumerate().map(|(i, whole)| choice(i, whole)).collect();
    body["usage"] = usage(answers.taken());
    Ok(Json(body).into_response())
}

fn take_logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.take::<u64>("top_logprobs")?;
    match top {
        Some(_) if !wanted => Err(ApiError::field("top_logprobs", "top_logprobs needs \"logprobs\": true")),
        Some(n) if n > MOST_LOGPROBS => {
            Err(wrong("top_logprobs", &n.to_string(), &format!("from 0 to {MOST_LOGPROBS}")))
        }
        top => Ok(wanted.then_some(top.unwrap_or_default() as usize)),
    }
}

fn shown_logprobs(tokens: &[TokenLogprob]) -> Value {
    json!({ "content": tokens.iter().map(logprobs::chat).collect::<Vec<_>>(), "refusal": null })
}

/// A whole choice.
fn choice(index: usize, whole: Whole) -> Value {
    let Whole { answered, logprobs, finish } = whole;
    let mut message = json!({ "role": "assistant", "content": answered.content, "refusal": null });
    if !answered.reasoning.is_empty() {
        message["reasoning_content"] = answered.reasoning.into();
    }
    if !answered.tool_calls.is_empty() {
        if answered.content.is_empty() {
            message["content"] = Value::Null;
        }
        let calls = answered.tool_calls.into_iter().map(|call| {
            let function = json!({ "name": call.name, "arguments": call.arguments });
            json!({ "id": call.id, "type": "function", "function": function })
        });
        message["tool_calls"] = calls.collect();
    }
    let logprobs = logprobs.map(|tokens| shown_logprobs(&tokens));
    json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(&finish) })
}

/// Messages, tools, and how to answer.
fn conversation(fields: &mut Fields, server: &Server) -> Result<Conversation, ApiError> {
    Ok(Conversation {
        messages: messages(fields)?,
        tools: tools(fields)?,
        tool_choice: tool_choice(fields)?,
        parallel: fields.take("parallel_tool_calls")?.unwrap_or(true),
        format: response_format(fields)?,
        thinking: thinking(fields, server)?,
        kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
    })
}

/// `reasoning_effort`, or the switches that other servers have: `thinking` and `thinking_budget`.
fn thinking(fields: &mut Fields, server: &Server) -> Result<Thinking, ApiError> {
    let mut thinking = match fields.take::<String>("reasoning_effort")? {
        Some(word) => effort("reasoning_effort", &word, server.model())?,
        None => Thinking::default(),
    };
    if let Some(mut switch) = fields.object("thinking")? {
        thinking.on = switch.word("type", &[("enabled", true), ("disabled", false)])?.or(thinking.on);
        thinking.budget = switch.take::<u64>("budget_tokens")?.map(|tokens| tokens as usize);
        switch.finish()?;
    }
    if let Some(tokens) = fields.take::<u64>("thinking_budget")? {
        thinking.budget = Some(tokens as usize);
    }
    Ok(thinking)
}

/// Says an answer in chunks.
struct ChatVoice {
    head: Head,
    include_usage: bool,
    /// For each choice, log-probabilities that the next chunk takes along.
    pending: Vec<Vec<TokenLogprob>>,
}

impl ChatVoice {
    fn chunk(&mut self, choice: usize, delta: Value, finish: Option<&Finish>, frames: &mut Frames) {
        let tokens = std::mem::take(&mut self.pending[choice]);
        let logprobs = if tokens.is_empty() { Value::Null } else { shown_logprobs(&tokens) };
        let finish = finish.map(finish_reason);
        let mut chunk = self.head.object("chat.completion.chunk");
        chunk["choices"] =
            json!([{ "index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish }]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        frames.data(&chunk);
    }
}

impl Voice for ChatVoice {
    fn begin(&mut self, frames: &mut Frames) {
        for choice in 0..self.pending.len() {
            self.chunk(choice, json!({ "role": "assistant", "content": "" }), None, frames);
        }
    }

    fn logprob(&mut self, choice: usize, logprob: TokenLogprob) {
        self.pending[choice].push(logprob);
    }

    fn piece(&mut self, choice: usize, piece: Piece, frames: &mut Frames) {
        let delta = match piece {
            Piece::Reasoning(text) => json!({ "reasoning_content": text }),
            Piece::Content(text) => json!({ "content": text }),
            Piece::ToolCallBegin { index, id, name } => {
                let function = json!({ "name": name, "arguments": "" });
                json!({ "tool_calls": [{ "index": index, "id": id, "type": "function", "function": function }] })
            }
            Piece::ToolCallArguments { index, json } => {
                json!({ "tool_calls": [{ "index": index, "function": { "arguments": json } }] })
            }
            Piece::ToolCallEnd { .. } => return,
        };
        self.chunk(choice, delta, None, frames);
    }

    fn end(&mut self, choice: usize, finish: Finish, frames: &mut Frames) {
        self.chunk(choice, json!({}), Some(&finish), frames);
    }

    fn close(&mut self, answers: &Answers, frames: &mut Frames) {
        self.head.close("chat.completion.chunk", self.include_usage, answers, frames);
    }

    fn failed(&mut self, error: &ApiError, frames: &mut Frames) {
        failed(error, frames);
    }

    fn keep_alive(&mut self, frames: &mut Frames) {
        frames.comment("keep-alive");
    }
}
