//! `POST /v1/messages`.

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::request::{conversation, rest};
use crate::{
    chat::reader::ToolCall,
    server::{
        Server,
        answers::{Answers, Finish, Piece, Taken, Whole},
        ask::{Drawing, fresh_id},
        body::Body,
        error::{ApiError, Protocol},
        journal::Ticket,
        sse::{self, Frames, Voice},
    },
};

/// Answers with a message.
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
    let limit: i64 = fields.require("max_tokens")?;
    let generation = server.model().generation();
    let mut drawing = Drawing::take(&mut fields, generation, &[], "stop_sequences")?;
    drawing.limit("max_tokens", limit)?;
    drawing.take_logit_bias(&mut fields, server.model().tokenizer().vocab_size())?;
    let conversation = conversation(&mut fields, server.model())?;
    rest(&mut fields)?;
    fields.finish()?;
    let mut answers = conversation.ask(drawing, &server, ticket.clone()).await?;
    let head = json!({
        "id": fresh_id("msg_"), "type": "message", "role": "assistant", "model": model,
        "content": [], "stop_reason": null, "stop_sequence": null,
    });
    if stream {
        ticket.streams();
        let started = answers.taken();
        let voice = MessageVoice { head, started, n_blocks: 0, open: None, finish: Finish::Stop };
        return Ok(sse::response(answers, voice, server.settings().keep_alive));
    }
    let whole = answers.whole().await?.pop().expect("there is one choice");
    Ok(Json(message(head, whole, answers.taken())).into_response())
}

/// Tokens in Anthropic's words, where the input is what was not found in the cache.
fn usage(Taken { usage, reasoning_tokens }: Taken) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "thinking_tokens": reasoning_tokens },
    })
}

fn stop_reason(finish: &Finish) -> (&'static str, Option<&str>) {
    match finish {
        Finish::Stop => ("end_turn", None),
        Finish::StopString(text) => ("stop_sequence", Some(text)),
        Finish::Length => ("max_tokens", None),
        Finish::ToolCalls => ("tool_use", None),
    }
}

/// A whole message.
fn message(mut head: Value, whole: Whole, taken: Taken) -> Value {
    let Whole { answered, finish, .. } = whole;
    let mut content = Vec::new();
    if !answered.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": answered.reasoning, "signature": "" }));
    }
    if !answered.content.is_empty() || answered.tool_calls.is_empty() {
        content.push(json!({ "type": "text", "text": answered.content }));
    }
    for ToolCall { id, name, arguments } in answered.tool_calls {
        content.push(json!({ "type": "tool_use", "id": id, "name": name, "input": input(&arguments) }));
    }
    let (reason, text) = stop_reason(&finish);
    head["content"] = content.into();
    head["stop_reason"] = reason.into();
    head["stop_sequence"] = text.into();
    head["usage"] = usage(taken);
    head
}

/// Arguments must be an object here. What is none, because the answer was cut off for example, is kept as a text.
fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(object @ Value::Object(_)) => object,
        _ if arguments.trim().is_empty() => json!({}),
        _ => json!({ "raw_arguments": arguments }),
    }
}

/// The kinds of blocks that a stream consists of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Tool,
}

/// Says a message in blocks.
struct MessageVoice {
    head: Value,
    started: Taken,
    /// Blocks that began.
    n_blocks: usize,
    open: Option<Block>,
    finish: Finish,
}

impl MessageVoice {
    fn begin_block(&mut self, kind: Block, block: &Value, frames: &mut Frames) {
        self.end_block(frames);
        let event = json!({ "type": "content_block_start", "index": self.n_blocks, "content_block": block });
        frames.event("content_block_start", &event);
        self.n_blocks += 1;
        self.open = Some(kind);
    }

    fn end_block(&mut self, frames: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        if kind == Block::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": "" }), frames);
        }
        frames.event(
            "content_block_stop",
            &json!({ "type": "content_block_stop", "index": self.n_blocks - 1 }),
        );
    }

    fn delta(&self, delta: &Value, frames: &mut Frames) {
        let event = json!({ "type": "content_block_delta", "index": self.n_blocks - 1, "delta": delta });
        frames.event("content_block_delta", &event);
    }
}

impl Voice for MessageVoice {
    fn begin(&mut self, frames: &mut Frames) {
        self.head["usage"] = usage(self.started);
        frames.event("message_start", &json!({ "type": "message_start", "message": self.head }));
        self.keep_alive(frames);
    }

    fn piece(&mut self, _: usize, piece: Piece, frames: &mut Frames) {
        match piece {
            Piece::Reasoning(text) => {
                if self.open != Some(Block::Thinking) {
                    let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                    self.begin_block(Block::Thinking, &block, frames);
                }
                self.delta(&json!({ "type": "thinking_delta", "thinking": text }), frames);
            }
            Piece::Content(text) => {
                if self.open != Some(Block::Text) {
                    self.begin_block(Block::Text, &json!({ "type": "text", "text": "" }), frames);
                }
                self.delta(&json!({ "type": "text_delta", "text": text }), frames);
            }
            Piece::ToolCallBegin { id, name, .. } => {
                let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                self.begin_block(Block::Tool, &block, frames);
            }
            Piece::ToolCallArguments { json, .. } => {
                self.delta(&json!({ "type": "input_json_delta", "partial_json": json }), frames);
            }
            Piece::ToolCallEnd { .. } => self.end_block(frames),
        }
    }

    fn end(&mut self, _: usize, finish: Finish, _: &mut Frames) {
        self.finish = finish;
    }

    fn close(&mut self, answers: &Answers, frames: &mut Frames) {
        if self.n_blocks == 0 {
            self.begin_block(Block::Text, &json!({ "type": "text", "text": "" }), frames);
        }
        self.end_block(frames);
        let (reason, text) = stop_reason(&self.finish);
        let delta = json!({ "stop_reason": reason, "stop_sequence": text });
        let usage = usage(answers.taken());
        frames.event("message_delta", &json!({ "type": "message_delta", "delta": delta, "usage": usage }));
        frames.event("message_stop", &json!({ "type": "message_stop" }));
    }

    fn failed(&mut self, error: &ApiError, frames: &mut Frames) {
        self.end_block(frames);
        frames.event("error", &error.body(Protocol::Anthropic));
    }

    fn keep_alive(&mut self, frames: &mut Frames) {
        frames.event("ping", &json!({ "type": "ping" }));
    }
}
